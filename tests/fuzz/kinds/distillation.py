"""Distillation from a teacher's head and from its likeliest ids: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from tests.fuzz.case import Draw, FuzzCase
from tests.fuzz.kinds.losses import spreads
from tests.multirank.sharded import compare
from tests.multirank.test_distill import DIVERGENCES, TAILS, Distill, oracle, run_case

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, repr=False)
class Distillation(FuzzCase):
    kind: ClassVar[str] = "distillation"
    case: Distill = field(default_factory=lambda: Distill("drawn"))

    @classmethod
    def draw(cls, one: Draw) -> Distillation:
        dtype = one(torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16)
        case = Distill(
            "drawn",
            dtype=dtype,
            **one.layout(),
            leading=one((7,), (12,), (4, 3), (1,), (), (0,)),
            hidden=one(1, 5, 8),
            teacher_hidden=one(1, 4, 6),
            bias=one(False, True),
            chunk_size=one(None, 1, 2, 3, 100),
            ignored=one("some", "some", "none", "all"),
            weighted=one(False, True),
            scale=one(1.0, 2.0, 0.1) if dtype not in LOW else one(0.5, 0.1),
            with_target=one(True, True, False),
            memory=one("contiguous", "contiguous", "strided"),
            seed=one.seed(),
        )
        options = {"reduction": one("none", "sum", "mean"), "temperature": one(1.0, 1.0, 2.0, 0.7)}
        options |= {"softcap": one(None, 1.5, 30.0), "ignore_index": one(-100, -1, case.vocab - 1, case.vocab)}
        case = replace(case, options={name: value for name, value in options.items() if one.chance(0.6)})
        if one(True, True, False):
            loss = {"divergence": one(*DIVERGENCES), "beta": one(0.5, 0.3), "teacher_softcap": one(None, 2.0)}
            # never narrower than the student's, whose tolerance is the comparison's
            case = replace(case, loss=loss, teacher_dtype=one(None, torch.float64))
        else:
            case = replace(case, given=1 + one.below(min(case.vocab, 6)), loss={"tail": one(*TAILS)})
            case = replace(case, teacher_dtype=torch.float64)  # rounded ones may sum to more than 1, which is refused
        if case.leading:
            spread = one(None, None, *spreads(case.leading[0]))
            case = replace(case, spread=spread, target_local=spread is None or not case.with_target or one(True, False))
        return cls(ranks=one.ranks(), case=replace(case, frozen=tuple(x for x in case.names if one.chance(0.25))))

    def run(self, place: Any) -> Any:
        return run_case(place.rank, self.case, place.group)

    def check(self, results: list[Any]) -> None:
        compare(self.case, results, oracle(self.case))

    def allowed(self) -> bool:
        case = self.case
        loss = {"tail"} if case.given else {"divergence", "beta", "teacher_softcap"}
        return (
            min(case.vocab, case.multiple_of, case.hidden, case.teacher_hidden, case.chunk_size or 1) >= 1
            and case.given <= case.vocab
            and (not case.given or case.teacher_dtype == torch.float64)
            and case.teacher_dtype in (None, case.dtype, torch.float64)
            and set(case.loss) <= loss
            and (case.with_target or case.target_local)
            and (not case.spread or (bool(case.leading) and case.spread in spreads(case.leading[0])))
            and (case.bias or "bias" not in case.frozen)
        )
