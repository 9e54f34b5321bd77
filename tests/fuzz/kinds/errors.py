"""Bad input on every rank or on one: the same error on every rank, and the group works afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.batch import Attempt, attempt
from tests.fuzz.case import Draw, FuzzCase
from tests.multirank.loss_case import SPREADS
from tests.tolerances import require_equal
from vocab_parallel import (
    Streams,
    VocabShard,
    cross_entropy,
    errors,
    greedy,
    linear_cross_entropy,
    linear_distillation,
    sample,
    top_k,
    top_p,
    vocab_parallel_embedding,
)

LOSSES = ("cross_entropy", "linear", "distillation")
SELECTS = ("greedy", "top_k", "top_p", "sample")
OPERATIONS = (*LOSSES, "spread", "embedding", *SELECTS)
LIMIT = 10.0  # seconds until an error is there
# What can be wrong, and where it can be; "alone" is no fault unless one rank has it and others have not.
FAULTS = {
    "nan": (*LOSSES, "spread", *SELECTS), "target": ("cross_entropy", "linear", "spread"), "id": ("embedding",),
    "missing row": ("cross_entropy", "linear", "distillation", "embedding", *SELECTS), "dtype": OPERATIONS,
    "float target": ("cross_entropy", "linear", "spread", "embedding"), "no weight": ("linear", "spread", "embedding"),
    "narrow weight": ("linear", "spread", "distillation"), "short weight": ("linear", "embedding", "distillation"),
    "option": ("cross_entropy", "linear", "spread", "distillation", "top_k", "top_p", "sample"),
    "option alone": ("cross_entropy", "linear", "spread", "distillation", "top_k", "top_p", "sample"),
    "other ids": ("cross_entropy", "linear", "embedding"), "gathered": ("cross_entropy", "greedy", "top_k", "sample"),
    "frozen alone": ("linear", "spread"),
}  # fmt: skip
ALONE = ("missing row", "dtype", "option alone", "other ids", "frozen alone")
BAD_OPTIONS = {"reduction": "average", "k": 0, "p": 1.5, "temperature": -0.5}
OTHER_OPTIONS = {"reduction": "none", "k": 2, "p": 0.25, "temperature": 0.5}
CALLS = {
    "cross_entropy": cross_entropy, "linear": linear_cross_entropy, "spread": linear_cross_entropy,
    "distillation": linear_distillation, "embedding": vocab_parallel_embedding, "greedy": greedy, "top_k": top_k,
    "top_p": top_p, "sample": sample,
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Errors(FuzzCase):
    kind: ClassVar[str] = "errors"
    vocab: int = 9
    multiple_of: int = 1
    rows: int = 4
    operation: str = "greedy"
    fault: str = "nan"
    bad: int | None = None  # the rank of the group that alone has it; None: every one
    row: int = 0
    value: int = 0  # what a bad id is beyond the vocabulary; negative: that id
    late: bool | None = None  # errors that the host reads later
    spread: str = "even"

    @classmethod
    def draw(cls, one: Draw) -> Errors:
        ranks, fault = one.ranks(), one(*FAULTS)
        rows, alone = one(4, 5, 9), fault in ALONE or one(False, True)
        return cls(
            ranks=ranks, seed=one.seed(), **one.layout((9, 9, 5, 13, 37)), rows=rows, fault=fault,
            operation=one(*FAULTS[fault]), bad=one.below(len(ranks)) if alone else None, row=one.below(rows),
            value=one(0, 1, 90, -1, -7), spread=one(*SPREADS),
        )  # fmt: skip

    def arguments(self, shard: VocabShard) -> dict[str, Any]:
        """Those of a call that is right."""
        draw = torch.Generator().manual_seed(self.seed)
        hidden, weight = torch.randn(self.rows, 3, generator=draw), torch.randn(self.vocab, 3, generator=draw)
        target = torch.randint(0, self.vocab, (self.rows,), generator=draw)
        table = shard.slice(weight, fill=math.nan)
        if self.operation == "embedding":
            return {"input": target, "weight": table.requires_grad_()}
        if self.operation == "distillation":
            teacher = {"teacher_input": hidden.flip(0), "teacher_weight": table.clone()}
            return {"input": hidden.requires_grad_(), "linear_weight": table.requires_grad_(), **teacher}
        if self.operation in ("linear", "spread"):
            mine = {"input": hidden, "target": target}
            if self.operation == "spread":
                counts = SPREADS[self.spread](self.rows, shard.tp_size)
                mine = {name: one.split(counts)[shard.rank].clone() for name, one in mine.items()}
                mine["sequence_parallel"] = True
            mine["input"].requires_grad_()
            return mine | {"linear_weight": table.requires_grad_(), "chunk_size": 3}
        logits = shard.slice(hidden @ weight.T, -1, fill=math.nan)
        if self.operation == "cross_entropy":
            return {"logits": logits.requires_grad_(), "target": target}
        more: dict[str, Any] = {"top_k": {"k": 1}, "top_p": {"p": 0.5}}.get(self.operation, {})
        if self.operation == "sample":
            more = {"streams": Streams.of(range(self.rows)), "temperature": 0.8, "top_p": 0.9}
        return {"logits": logits} | more

    def spoiled(self, given: dict[str, Any], shard: VocabShard) -> dict[str, Any]:
        """The arguments with the fault."""
        floats = [name for name in ("logits", "input", "linear_weight", "weight") if name in given]
        ids = "input" if self.operation == "embedding" else "target"
        table = "weight" if self.operation == "embedding" else "linear_weight"

        def changed(name: str, change: Any) -> dict[str, Any]:
            return given | {name: change(given[name].detach().clone()).requires_grad_(given[name].requires_grad)}

        def put(tensor: Tensor, value: Any) -> Tensor:
            if len(tensor):
                tensor[self.row % len(tensor)] = value
            return tensor

        if self.fault == "nan":
            return changed(floats[0], lambda x: put(x, math.nan))
        if self.fault in ("target", "id"):
            return changed(ids, lambda x: put(x, self.vocab + self.value if self.value >= 0 else self.value))
        if self.fault == "other ids":
            return changed(ids, lambda x: (x + 1) % self.vocab)
        if self.fault == "float target":
            return given | {ids: given[ids].float()}
        if self.fault == "missing row":
            by_row = ("logits", "input", "target", "teacher_input")
            found = dict(given)
            for name in by_row:
                if name in given:
                    found[name] = given[name].detach()[:-1].requires_grad_(given[name].requires_grad)
            return found
        if self.fault == "dtype":
            found = dict(given)
            for name in floats:
                if given[name].is_floating_point():
                    found |= {name: given[name].detach().double().requires_grad_(given[name].requires_grad)}
            return found
        if self.fault in ("no weight", "short weight", "narrow weight"):
            cuts = {"no weight": lambda x: x[:0], "short weight": lambda x: x[:-1], "narrow weight": lambda x: x[:, :2]}
            return changed(table, cuts[self.fault])
        if self.fault == "gathered":
            return changed("logits", lambda x: torch.cat([x] * shard.tp_size + [x], -1))
        if self.fault == "frozen alone":
            return given | {"input": given["input"].detach()}
        options = BAD_OPTIONS if self.fault == "option" else OTHER_OPTIONS
        name = {"top_k": "k", "top_p": "p", "sample": "temperature"}.get(self.operation, "reduction")
        return given | {name: options[name]}

    def call(self, arguments: dict[str, Any], shard: VocabShard) -> list[Tensor]:
        value = CALLS[self.operation](shard=shard, **arguments)
        if isinstance(value, Tensor) and value.requires_grad:
            value.sum().backward()
        shard.raise_deferred()
        found = [value] if isinstance(value, Tensor) else [one for one in value if isinstance(one, Tensor)]
        return [one.detach() for one in found]

    def run(self, place: Any) -> Any:
        shard = place.shard(self.vocab, self.multiple_of)
        shard.deferred_errors = self.late
        first = self.call(self.arguments(shard), shard)
        given, here = self.arguments(shard), self.bad in (None, place.rank)
        given = self.spoiled(given, shard) if here else given
        seen = bool(here and self.matters(given, shard))
        met = attempt(lambda: self.call(given, shard))
        second = self.call(self.arguments(shard), shard)
        for one, other in zip(first, second, strict=True):
            require_equal("the right call afterwards", [one, other])
        return met, seen

    def matters(self, given: dict[str, Any], shard: VocabShard) -> bool:
        """Whether the arguments of this rank are bad: there is a row, and a column that anybody reads."""
        if self.fault == "nan":
            rows = len(given.get("logits", given.get("input")))
            return rows > 0 and (shard.num_valid > 0 or self.operation == "spread")  # whose rows all ranks project
        if self.fault in ("target", "id"):
            return len(given["input" if self.fault == "id" else "target"]) > 0
        if self.fault == "missing row" and self.operation == "sample":
            return True  # the streams are of more rows
        return self.fault not in ALONE or shard.tp_size > 1

    def check(self, results: list[Any]) -> None:
        met: list[Attempt] = [one for one, _ in results]
        if not any(seen for _, seen in results):
            assert all(one.kind is None for one in met), f"nothing was wrong: {met}"
            return
        assert all(one.kind is not None for one in met), f"a rank did not raise: {met}"
        assert len({(one.kind, one.message) for one in met}) == 1, f"the ranks raise differently: {met}"
        kind = met[0].kind or ""
        assert hasattr(errors, kind) or kind in ("ValueError", "TypeError"), (
            f"{kind} is no error of the package: {met[0]}"
        )
        assert met[0].is_value_error and met[0].message, met[0]
        assert max(one.seconds for one in met) < LIMIT, f"slow: {met}"

    def allowed(self) -> bool:
        return (
            min(self.vocab, self.multiple_of) >= 1
            and self.rows >= 4
            and 0 <= self.row < self.rows
            and (self.bad is None or self.bad < self.tp)
            and self.operation in FAULTS[self.fault]
        )
