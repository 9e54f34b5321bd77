"""Megatron-core: embedding, output layer and loss of a `GPTModel` (or `HybridModel`, `MambaModel`) over a `VocabShard`.

shard = VocabShard(VocabLayout.from_padded(vocab_size, model.vocab_size, tp), tp_group)
megatron.apply(model, shard=shard)                 # in the model provider, before DDP and the optimizer
megatron.verify_tied(model, optimizer)             # after the optimizer, and after each load
"""

from vocab_parallel.integrations.megatron.adoption import apply
from vocab_parallel.integrations.megatron.loss import TokenLoss
from vocab_parallel.integrations.megatron.modules import DeferredLogits, MegatronEmbedding, MegatronHead
from vocab_parallel.integrations.megatron.ties import verify_tied

__all__ = ["DeferredLogits", "MegatronEmbedding", "MegatronHead", "TokenLoss", "apply", "verify_tied"]
