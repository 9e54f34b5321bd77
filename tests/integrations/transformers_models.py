"""Small models of many families, built by Transformers from random weights; and how one is trained."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tests.multirank.shared_world import Batch, _run_all
from tests.ranks import RankFailure, run_ranks
from vocab_parallel import VocabLayout, VocabShard, vocab_parameters
from vocab_parallel.gradient_norm import clip_gradients_

HIDDEN = 16
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip

# family: prefix of its config, whether tied, what its config needs beside the sizes
FAMILIES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "llama": ("Llama", True, {}),
    "llama untied": ("Llama", False, {}),
    "gpt2": ("GPT2", True, {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "gemma2": ("Gemma2", True, {"head_dim": 8, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "cohere": ("Cohere", True, {"logit_scale": 0.25}),
    "granite": ("Granite", True, {"logits_scaling": 3.0}),
    "phi": ("Phi", False, {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    "qwen2": ("Qwen2", False, {}),
    "opt": ("OPT", True, {"ffn_dim": 32, "word_embed_proj_dim": HIDDEN}),
    "mixtral": ("Mixtral", False, {"num_local_experts": 2, "output_router_logits": True}),
}
DROPOUTS = ("attention_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout", "activation_dropout")


def build(family: str, vocab: int, seed: int = 0, **changes: Any) -> Any:
    """A float32 model in training mode, the same bits for the same seed; its tables large enough to matter."""
    prefix, tied, own = FAMILIES[family]
    settings = SIZES | own | {"vocab_size": vocab, "tie_word_embeddings": tied} | dict.fromkeys(DROPOUTS, 0.0) | changes
    config = getattr(transformers, f"{prefix}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # away from the tiny initial values, under which a wrong scale would hardly show
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.train()


def make_shard(vocab: int, multiple_of: int = 1, group: Any = None) -> VocabShard:
    world = dist.get_world_size(group)
    return VocabShard(VocabLayout(vocab, world, multiple_of=multiple_of), group or dist.group.WORLD)


def batch(vocab: int, step: int, rows: int = 3, columns: int = 7) -> tuple[Tensor, Tensor]:
    """Ids and labels, some of them ignored."""
    draw = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, vocab, (rows, columns), generator=draw)
    labels = ids.clone()
    labels[:, 2] = -100
    if rows:
        labels[0, : columns // 2] = -100
    return ids, labels


def make_optimizer(model: Any) -> torch.optim.AdamW:
    """With an eps under which noise in a small gradient stays noise."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def train(model: Any, vocab: int, steps: int, optimizer: Any = None) -> dict[str, Any]:
    """Steps of AdamW with clipping; losses, gradient norms, and the number of states of the table."""
    optimizer = optimizer or make_optimizer(model)
    losses, norms = [], []
    for step in range(steps):
        ids, labels = batch(vocab, step)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(clip_gradients_(model, 1.0) if vocab_parameters(model) else clip_plain(model, 1.0))
        optimizer.step()
        losses.append(loss.detach())
    return {"loss": torch.stack(losses), "norm": torch.stack(norms).double(), "optimizer": optimizer}


def clip_plain(model: Any, most: float) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def whole_parameters(model: Any) -> dict[str, Tensor]:
    """Of a model that is not converted, or of the ranks' converted one."""
    from vocab_parallel.integrations.transformers import full_state_dict

    state = full_state_dict(model) if hasattr(model, "_vocab_parallel") else model.state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def largest_difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine if mine[name].numel())


def state_count(model: Any, optimizer: Any) -> list[int]:
    """For each sharded parameter, how many states the optimizer has for it; and how many states there are in all."""
    tables = [parameter for parameter, _ in vocab_parameters(model).values()]
    of_tables = [sum(held is table for held in optimizer.state) for table in tables]
    return [*of_tables, len(optimizer.state)]


class DdpBatch(Batch):
    """A `Batch` for cases with a DDP: torch's ends the process where the group checks the ranks' collectives."""

    def __call__(self, tp: int, *case: Any) -> list[Any]:
        if tp not in self._results:
            try:
                self._results[tp] = run_ranks(_run_all, tp, self._fn, self.cases, detail=False)
            except RankFailure as failure:
                self._results[tp] = failure
        return super().__call__(tp, *case)
