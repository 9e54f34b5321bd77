"""Transformers: any causal language model with its embedding, head and loss sharded over the vocabulary.

    shard = VocabShard(VocabLayout(model.config.vocab_size, tp_size), group)
    apply(model, shard=shard)

See `docs/hosts/transformers.md`.
"""

from vocab_parallel.integrations.transformers.convert import apply, unapply
from vocab_parallel.integrations.transformers.generation import Generated, generate
from vocab_parallel.integrations.transformers.logits_processor import PolicyProcessor
from vocab_parallel.integrations.transformers.saving import full_optimizer_state, full_state_dict, take_whole_moments
from vocab_parallel.integrations.transformers.search import Searched, beam_search
from vocab_parallel.integrations.transformers.training import attach, clip_like_torch_, verify

__all__ = [
    "Generated",
    "PolicyProcessor",
    "Searched",
    "apply",
    "attach",
    "beam_search",
    "clip_like_torch_",
    "full_optimizer_state",
    "full_state_dict",
    "generate",
    "take_whole_moments",
    "unapply",
    "verify",
]
