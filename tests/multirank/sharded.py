"""Runs a loss sharded over ranks and unsharded in the oracle, on the same whole tensors, and compares everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.multirank.shared_world import Batch
from tests.tolerances import bits, require_close, require_equal
from vocab_parallel import VocabLayout, VocabShard, cross_entropy, linear_cross_entropy, reference

TP = pytest.mark.parametrize("tp", [1, 2, 3, 4])

# How `sequence_parallel` rows of a T-row batch are spread over the ranks.
SPREADS = {
    "even": lambda rows, tp: [rows * (r + 1) // tp - rows * r // tp for r in range(tp)],
    "uneven": lambda rows, tp: [rows - (tp - 1)] + [1] * (tp - 1),
    "last has none": lambda rows, tp: [*SPREADS["even"](rows, tp - 1), 0] if tp > 1 else [rows],
    "only last has any": lambda rows, tp: [0] * (tp - 1) + [rows],
}


@dataclass(frozen=True)
class Case:
    """One call of a loss. `name` is the test's id."""

    name: str
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
    frozen: tuple[str, ...] = ()  # of "input", "weight", "bias"
    upstream_one: bool = False  # the gradient of the loss: all ones, else arbitrary with zeros among it
    scale: float = 2.0  # standard deviation of the logits
    offset: float = 0.0  # added to all logits of a row
    options: dict[str, Any] = field(default_factory=dict)  # of the loss itself
    seed: int = 0

    @property
    def names(self) -> list[str]:
        return ["input", *(["weight"] if self.linear else []), *(["bias"] if self.bias else [])]

    def rows(self, tp: int) -> list[int] | None:
        return SPREADS[self.spread](self.leading[0], tp) if self.spread else None


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
        if case.offset:  # through one constant hidden feature
            tensors["input"][..., 0], tensors["weight"][:, 0] = 1.0, case.offset
    else:
        tensors["input"] += case.offset
    if case.bias:
        tensors["bias"] = normal(case.vocab)
    tensors = {name: tensor.to(case.dtype) for name, tensor in tensors.items()}
    target = torch.randint(0, case.vocab, case.leading, generator=draw)
    ignore = case.options.get("ignore_index", -100)
    if case.ignored == "all":
        target.fill_(ignore)
    elif case.ignored == "some":
        target[torch.rand(case.leading, generator=draw) < 0.3] = ignore
    upstream = normal(*case.leading) if case.options.get("reduction") == "none" else normal()
    if case.upstream_one:
        upstream = torch.ones_like(upstream)
    elif upstream.dim():
        upstream[torch.rand(case.leading, generator=draw) < 0.3] = 0.0
    return tensors | {"target": target, "upstream": upstream}


def local(case: Case, tensors: dict[str, Tensor], shard: VocabShard) -> dict[str, Tensor]:
    """This rank's part of the whole tensors. Padding holds NaN: whoever reads it is found out."""
    mine = dict(tensors)
    if case.linear:
        mine["weight"] = shard.slice(tensors["weight"], 0, fill=float("nan"))
    else:
        mine["input"] = shard.slice(tensors["input"], -1, fill=float("nan"))
    if case.bias:
        mine["bias"] = shard.slice(tensors["bias"], 0, fill=float("nan"))
    rows = case.rows(shard.tp_size)
    if rows:
        start = sum(rows[: shard.rank])
        for name in ["input", *(["target", "upstream"] if case.target_local else [])]:
            if mine[name].dim():
                mine[name] = mine[name][start : start + rows[shard.rank]].contiguous()
    return mine


def call(case: Case, mine: dict[str, Tensor], shard: VocabShard) -> Tensor:
    """The sharded loss of this rank's tensors."""
    if not case.linear:
        return cross_entropy(mine["input"], mine["target"], shard=shard, **case.options)
    return linear_cross_entropy(
        mine["input"],
        mine["weight"],
        mine["target"],
        shard=shard,
        linear_bias=mine.get("bias"),
        sequence_parallel=case.spread is not None,
        chunk_size=case.chunk_size,
        **case.options,
    )


def run_case(rank: int, case: Case, group: Any = None) -> dict[str, Any]:
    """Loss and gradients of this rank, and whether the calls left their arguments as they were."""
    shard = shard_of(case.vocab, case.multiple_of, group)
    mine = local(case, whole(case), shard)
    before = {name: bits(tensor).clone() for name, tensor in mine.items()}
    for name in case.names:
        mine[name].requires_grad_(name not in case.frozen)
    with torch.no_grad():
        silent = call(case, mine, shard)
    loss = call(case, mine, shard)
    upstream = mine["upstream"].to(loss.dtype)
    trained = [mine[name] for name in case.names if name not in case.frozen]
    names = [name for name in case.names if name not in case.frozen]
    result: dict[str, Any] = {"loss": loss.detach().clone(), "no_grad": silent, "valid": shard.num_valid}
    if trained:
        first = torch.autograd.grad(loss, trained, upstream, retain_graph=True)
        first, given = [gradient.clone() for gradient in first], first
        for gradient in given:
            gradient.zero_()  # as clipping or an optimizer may: what is saved for the next backward must not be this
        second = torch.autograd.grad(loss, trained, upstream)
        result |= {f"d_{name}": gradient for name, gradient in zip(names, first, strict=True)}
        result |= {f"again_{name}": gradient for name, gradient in zip(names, second, strict=True)}
    result["modified"] = [name for name, saved in before.items() if not torch.equal(bits(mine[name]), saved)]
    result["loss_after"] = loss.detach().clone()
    return result


def oracle(case: Case) -> dict[str, Tensor]:
    """The same on whole tensors in float64."""
    tensors = whole(case)
    for name in case.names:
        tensors[name] = tensors[name].double().requires_grad_(name not in case.frozen)
    if case.linear:
        loss = reference.linear_cross_entropy(
            tensors["input"], tensors["weight"], tensors["target"], bias=tensors.get("bias"), **case.options
        )
    else:
        loss = reference.cross_entropy(tensors["input"], tensors["target"], **case.options)
    names = [name for name in case.names if name not in case.frozen]
    result = {"loss": loss.detach()}
    if names:
        gradients = torch.autograd.grad(loss, [tensors[name] for name in names], tensors["upstream"])
        result |= {f"d_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return result


def compare(case: Case, ranks: list[dict[str, Any]], expected: dict[str, Tensor]) -> None:
    """Every rank against the oracle, and against each other where values are replicated."""
    for rank, result in enumerate(ranks):
        assert result["modified"] == [], f"rank {rank} modified its arguments {result['modified']}"
        for key in ("loss_after", "no_grad"):
            require_equal(f"{key} on rank {rank}", [result["loss"], result[key]])
        for name in case.names:
            if name not in case.frozen:
                require_equal(f"second backward, d_{name}", [result[f"d_{name}"], result[f"again_{name}"]])
                assert result[f"d_{name}"].dtype == case.dtype, f"d_{name} is {result[f'd_{name}'].dtype}"
    whole_values = {key: assemble(case, key, ranks) for key in expected}
    loss_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert whole_values["loss"].dtype == loss_dtype
    for key, value in whole_values.items():
        require_close(key, value, expected[key], case.dtype)


def assemble(case: Case, key: str, ranks: list[dict[str, Any]]) -> Tensor:
    """The whole tensor from the ranks' parts. Replicated ones must agree in every bit, padding must be zero."""
    parts = [result[key] for result in ranks]
    by_rows = case.spread is not None
    if key == "loss":
        if by_rows and case.target_local and parts[0].dim():
            return torch.cat(parts)
    elif key == "d_input" and case.linear:
        if by_rows:
            return torch.cat(parts)
    else:
        dim = -1 if key == "d_input" else 0
        for rank, (part, result) in enumerate(zip(parts, ranks, strict=True)):
            padding = part.narrow(dim, result["valid"], part.shape[dim] - result["valid"])
            assert bool((padding == 0).all()), f"{key}: padding of rank {rank} has a gradient\n{padding}"
        return torch.cat([part.narrow(dim, 0, result["valid"]) for part, result in zip(parts, ranks, strict=True)], dim)
    require_equal(f"{key} (replicated)", parts)
    return parts[0]


class Cases(Batch):
    """Cases that are run on ranks together and compared with the oracle one by one."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__(run_case, [(case,) for case in cases])
        self.each = pytest.mark.parametrize("case", cases, ids=lambda case: case.name.replace(" ", "_"))

    def check(self, case: Case, tp: int) -> list[dict[str, Any]]:
        """Compares one case on `tp` ranks with the oracle, and returns what the ranks had."""
        ranks = self(tp, case)
        compare(case, ranks, oracle(case))
        return ranks
