"""`tp_invariant=True`: the same bits of loss and gradients on 1, 2 and 4 ranks, and the oracle's values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from tests.fuzz.case import GROUPS, Draw, FuzzCase
from tests.fuzz.kinds.losses import allowed, draw_loss
from tests.multirank.sharded import Case, assemble, compare, oracle, run_case
from tests.tolerances import require_equal

LEAVES = 8
FUNCTIONS = ("cross_entropy", "kl_div")
EXECUTIONS: tuple[dict[str, Any], ...] = ({}, {"memory_budget": 500})


@dataclass(frozen=True, repr=False)
class Invariant(FuzzCase):
    """`ranks` is the world: of these, some groups of each size run the loss one after the other."""

    kind: ClassVar[str] = "tp_invariant"
    kept: ClassVar[tuple[str, ...]] = ("ranks",)
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    case: Case = field(default_factory=lambda: Case("drawn"))
    groups: tuple[tuple[int, ...], ...] = ((0,), (0, 1))
    leaf: int = 2  # rows of one

    @classmethod
    def draw(cls, one: Draw) -> Invariant:
        case = draw_loss(one)
        while not (case.linear and case.function in FUNCTIONS and case.spread is None):
            case = draw_loss(one)
        groups = tuple(one(*(ranks for ranks in GROUPS if len(ranks) == size)) for size in (1, 2, 4))
        leaf = -(-case.vocab // LEAVES) + one(0, 0, 1, 5)
        return cls(case=replace(case, multiple_of=1), groups=groups, leaf=leaf)

    def of(self, tp: int) -> Case:
        """The case on so many ranks, with the same padded size on any number."""
        execution = self.case.execution | {"tp_invariant": True}
        return replace(self.case, execution=execution, multiple_of=self.leaf * LEAVES // tp)

    def run(self, place: Any) -> Any:
        me = place.ranks[place.rank]
        return [run_case(0, self.of(len(ranks)), place.groups[ranks]) if me in ranks else None for ranks in self.groups]

    def check(self, results: list[Any]) -> None:
        expected, wholes = oracle(self.case), []
        for at, ranks in enumerate(self.groups):
            mine = [results[self.ranks.index(rank)][at] for rank in ranks]
            case = self.of(len(ranks))
            compare(case, mine, expected)
            wholes.append({key: assemble(case, key, mine) for key in expected})
        for key in expected:
            parts = [whole[key].clone(memory_format=torch.contiguous_format) for whole in wholes]
            require_equal(f"{key} at {[len(ranks) for ranks in self.groups]} ranks", parts)

    def allowed(self) -> bool:
        case = self.case
        return (
            allowed(case)
            and case.linear
            and case.function in FUNCTIONS
            and case.spread is None
            and case.multiple_of == 1
            and self.leaf * LEAVES >= case.vocab
            and len(self.groups) >= 1
        )
