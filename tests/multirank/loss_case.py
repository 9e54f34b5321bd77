"""Calls of a loss: what can be said about one, and the tensors it is made of, whole and on each rank."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel import VocabLayout, VocabShard

# How `sequence_parallel` rows of a T-row batch are spread over the ranks.
SPREADS = {
    "even": lambda rows, tp: [rows * (r + 1) // tp - rows * r // tp for r in range(tp)],
    "uneven": lambda rows, tp: [rows - (tp - 1)] + [1] * (tp - 1),
    "last has none": lambda rows, tp: [*SPREADS["even"](rows, tp - 1), 0] if tp > 1 else [rows],
    "only last has any": lambda rows, tp: [0] * (tp - 1) + [rows],
}


OUTPUTS = ("logprob", "entropy", "lse", "argmax", "correct", "margin")

# Per-row tensors that follow the target: under sequence parallelism of this rank's rows, or of all.
BY_TARGET = ("target", "upstream", "row_weight", "old", "advantage")


@dataclass(frozen=True, repr=False)
class Case:
    """One call of a loss. `name` is the test's id."""

    name: str
    function: str = "cross_entropy"  # or "kl_div", "token_logprobs", or "row_loss" of `surrogate`
    linear: bool = True
    vocab: int = 9
    multiple_of: int = 1
    leading: tuple[int, ...] = (7,)
    hidden: int = 5
    dtype: torch.dtype = torch.float64
    bias: bool = False
    chunk_size: int | None = None
    spread: str | None = None  # a key of SPREADS: sequence-parallel rows
    target_local: bool = True  # under sequence parallelism: this rank's targets, or all
    ignored: str = "some"  # "some", "none" or "all" rows
    every_id: bool = False  # target the ids in turn, the edges of every shard among them
    soft: bool = False  # the target is a distribution; under sequence parallelism of all rows
    weighted: bool = False  # with a row_weight, some of it zero or negative
    masked: tuple[int, ...] = ()  # ids with a logit of -inf in every row (from the bias, if linear); never targets
    frozen: tuple[str, ...] = ()  # of "input", "weight", "bias"
    upstream_one: bool = False  # the gradient of the loss: all ones, else arbitrary with zeros among it
    scale: float = 2.0  # standard deviation of the logits
    offset: float = 0.0  # added to all logits of a row
    grid: float | None = None  # all values are rounded to multiples of this: equal logits become common
    outputs: tuple[str, ...] = ()  # rows' outputs to ask for
    memory: str = "contiguous"  # or "strided", or "expanded": every row of the input is the first one, stored once
    options: dict[str, Any] = field(default_factory=dict)  # of the loss itself
    execution: dict[str, Any] = field(default_factory=dict)  # arguments that change how, not what, is computed
    seed: int = 0

    def __repr__(self) -> str:
        """What can be pasted into a test: the fields that are not their defaults."""
        given = []
        for one in fields(self):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if getattr(self, one.name) != default:
                given.append(f"{one.name}={getattr(self, one.name)!r}")
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def names(self) -> list[str]:
        return ["input", *(["weight"] if self.linear else []), *(["bias"] if self.bias else [])]

    @property
    def exact_scores(self) -> bool:
        """Whether the scores are the same numbers in every dtype: then so is their order."""
        return self.grid is not None and not {"softcap", "temperature"} & set(self.options)

    def rows(self, tp: int) -> list[int] | None:
        return SPREADS[self.spread](self.leading[0], tp) if self.spread else None


def surrogate(rows: Any, old: Tensor, advantage: Tensor) -> Tensor:
    """A clipped policy gradient with an entropy bonus and a penalty on lse: uses all that a row loss is given."""
    ratio = (rows.logprob - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    bonus = 0.0 if rows.entropy is None else 0.1 * rows.entropy  # None if the call has entropy=False
    return -gain - bonus + 0.05 * rows.lse**2


def both(name: str, **settings: Any) -> list[Case]:
    """The case for the loss of logits, and for the one fused with the projection."""
    return [Case(f"{kind}: {name}", linear=kind == "linear", **settings) for kind in ("logits", "linear")]


def shard_of(vocab: int, multiple_of: int = 1, group: Any = None) -> VocabShard:
    """A shard over `group`, by default the world; without a group in a world of one."""
    tp = dist.get_world_size(group)
    return VocabShard(VocabLayout(vocab, tp, multiple_of=multiple_of), (group or dist.group.WORLD) if tp > 1 else None)


def whole(case: Case) -> dict[str, Tensor]:
    """The whole tensors of a case, the same on every rank. "input" is the logits where the loss takes those."""
    draw = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    width = case.hidden if case.linear else case.vocab
    tensors = {"input": normal(*case.leading, width) * (1.0 if case.linear else case.scale)}
    if case.linear:
        tensors["weight"] = normal(case.vocab, case.hidden) * case.scale / case.hidden**0.5
    if case.bias:
        tensors["bias"] = normal(case.vocab)
    if case.grid:
        tensors = {name: (tensor / case.grid).round() * case.grid for name, tensor in tensors.items()}
    if not case.linear:
        tensors["input"] += case.offset
    elif case.offset:  # through one constant hidden feature
        tensors["input"][..., 0], tensors["weight"][:, 0] = 1.0, case.offset
    if case.masked:
        tensors["bias" if case.linear else "input"][..., list(case.masked)] = -torch.inf
    tensors = {name: tensor.to(case.dtype) for name, tensor in tensors.items()}
    if case.memory == "expanded":
        tensors["input"] = one_row(tensors["input"])
    tensors["target"] = _ids(case, draw)
    wide = case.options.get("reduction", "mean") == "none" or case.function == "token_logprobs"
    upstream = normal(*case.leading) if wide else normal()
    if case.upstream_one:
        upstream = torch.ones_like(upstream)
    elif upstream.dim():
        upstream[torch.rand(case.leading, generator=draw) < 0.3] = 0.0
    if case.function == "token_logprobs":
        upstream = torch.stack([upstream, 1.0 - upstream], -1)
    tensors["upstream"] = upstream
    if case.soft:
        tensors["target"] = _distribution(case, draw)
    if case.weighted:
        weight = normal(*case.leading)
        weight[torch.rand(case.leading, generator=draw) < 0.3] = 0.0
        tensors["row_weight"] = weight.to(torch.promote_types(case.dtype, torch.float32))
    if case.function == "row_loss":
        floating = torch.promote_types(case.dtype, torch.float32)
        tensors |= {"old": (normal(*case.leading) - 2.0).to(floating), "advantage": normal(*case.leading).to(floating)}
    return tensors


def _ids(case: Case, draw: torch.Generator) -> Tensor:
    target = torch.randint(0, case.vocab, case.leading, generator=draw)
    if case.every_id:
        target = torch.arange(target.numel()).view(case.leading) % case.vocab
    allowed = torch.tensor([token for token in range(case.vocab) if token not in case.masked])
    target = allowed[target % len(allowed)]
    ignore = case.options.get("ignore_index", -100)
    if case.ignored == "all":
        target.fill_(ignore)
    elif case.ignored == "some":
        target[torch.rand(case.leading, generator=draw) < 0.3] = ignore
    return target


def _distribution(case: Case, draw: torch.Generator) -> Tensor:
    """Non-negative rows, zeros among them, whose sums are not 1; as logarithms they are below 1."""
    shape = (*case.leading, case.vocab)
    q = torch.randn(shape, generator=draw, dtype=torch.float64).mul(2.0).softmax(-1)
    spread = 0.5 if case.options.get("log_target") else 1.0
    q *= 0.5 + spread * torch.rand(*case.leading, 1, generator=draw, dtype=torch.float64)
    q[torch.rand(shape, generator=draw) < 0.2] = 0.0
    q[..., list(case.masked)] = 0.0
    return (q.log() if case.options.get("log_target") else q).to(torch.promote_types(case.dtype, torch.float32))


def local(case: Case, tensors: dict[str, Tensor], shard: VocabShard) -> dict[str, Tensor]:
    """This rank's part of the whole tensors. Padding holds NaN: whoever reads it is found out."""
    mine = dict(tensors)
    if case.linear:
        mine["weight"] = shard.slice(tensors["weight"], 0, fill=float("nan"))
    else:
        mine["input"] = shard.slice(tensors["input"], -1, fill=float("nan"))
    if case.bias:
        mine["bias"] = shard.slice(tensors["bias"], 0, fill=float("nan"))
    if case.soft:
        mine["target"] = shard.slice(tensors["target"], -1, fill=float("nan"))
    rows = case.rows(shard.tp_size)
    if rows:
        start = sum(rows[: shard.rank])
        for name in ["input", *(BY_TARGET if case.target_local else [])]:
            if name in mine and mine[name].dim():
                mine[name] = mine[name][start : start + rows[shard.rank]].contiguous()
    if case.memory == "expanded":
        mine["input"] = one_row(mine["input"])
    if case.memory == "strided":
        mine = {name: torch.stack([tensor, tensor], -1)[..., 0] for name, tensor in mine.items()}
    return mine


def one_row(tensor: Tensor) -> Tensor:
    """The first row, as often as there are rows."""
    return tensor.reshape(-1, tensor.shape[-1])[0].expand(tensor.shape) if tensor.numel() else tensor
