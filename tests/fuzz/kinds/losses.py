"""Every loss with every option: value, gradients, outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from tests.fuzz.case import Draw, FuzzCase
from tests.multirank.loss_case import OUTPUTS, SPREADS, Case
from tests.multirank.sharded import compare, oracle, run_case

LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, repr=False)
class Losses(FuzzCase):
    kind: ClassVar[str] = "losses"
    case: Case = field(default_factory=lambda: Case("drawn"))

    @classmethod
    def draw(cls, one: Draw) -> Losses:
        return cls(ranks=one.ranks(), case=draw_loss(one))

    def run(self, place: Any) -> Any:
        return run_case(place.rank, self.case, place.group)

    def check(self, results: list[Any]) -> None:
        compare(self.case, results, oracle(self.case))

    def allowed(self) -> bool:
        return allowed(self.case)


def draw_loss(one: Draw) -> Case:
    """A case that every rule of the losses allows; the oracle knows its value and its gradients."""
    function = one("cross_entropy", "cross_entropy", "cross_entropy", "kl_div", "token_logprobs", "row_loss")
    linear = function == "row_loss" or one(True, True, False)
    dtype = one(torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)
    if function == "row_loss":  # its ratio of probabilities may be 100, and has lost so many of float32's digits
        dtype = torch.float64
    case = Case(
        "drawn",
        function=function,
        linear=linear,
        dtype=dtype,
        **one.layout(),
        leading=one((7,), (7,), (12,), (12,), (4, 3), (3, 2, 2), (1,), (), (0,), (3, 0)),
        hidden=one(1, 5, 8),
        bias=linear and one(True, False),
        chunk_size=one(None, 1, 2, 3, 5, 100) if linear else None,
        ignored=one("some", "some", "some", "none", "none", "all"),
        every_id=one(False, True),
        soft=function == "kl_div" or (function == "cross_entropy" and one(False, False, True)),
        weighted=function in ("cross_entropy", "kl_div") and one(False, True),
        upstream_one=one(False, False, True),
        scale=one(1.0, 2.0, 0.1) if dtype not in LOW else one(0.5, 0.1),
        grid=one(None, None, 0.25) if not (linear and dtype in LOW) else None,  # half precision rounds the products
        memory=one("contiguous", "contiguous", "strided", "expanded"),
        seed=one.seed(),
    )
    if linear and case.leading:
        spread = one(None, None, *spreads(case.leading[0]))
        case = replace(case, spread=spread, target_local=spread is None or (not case.soft and one(True, False)))
    if linear and case.chunk_size is None:
        case = replace(case, execution=one({}, {"memory_budget": one(1, 500, 10**6)}))
    if function == "row_loss" and one(False, True):
        case = replace(case, execution=case.execution | {"entropy": False})
    case = replace(case, options=_options(case, one))
    if case.function != "token_logprobs" and one(False, True):
        names = [name for name in OUTPUTS if not (case.soft and name in ("logprob", "correct"))]
        case = replace(case, outputs=tuple(one.subset(names, 1)))
    if (case.bias or not linear) and not case.options.get("label_smoothing") and one(False, True):
        ids = one.subset(range(case.vocab))[: case.vocab - 1]
        case = replace(case, masked=tuple(ids))
    if not linear and case.dtype not in LOW:
        case = replace(case, offset=one(0.0, 0.0, 0.0, *_offsets(case)))
    return replace(case, frozen=tuple(name for name in case.names if one.chance(0.25)))


def spreads(rows: int) -> list[str]:
    """The ways to spread so many rows over up to four ranks."""
    return [name for name in SPREADS if name != "uneven" or rows >= 3]


def _options(case: Case, one: Draw) -> dict[str, Any]:
    """Options of the function. One that has its default is left out half the time, and said the other half."""
    options = {"softcap": one(None, None, 1.5, 30.0), "temperature": one(1.0, 1.0, 0.5, 2.0, 0.7)}
    if not case.soft:
        options["ignore_index"] = one(-100, -100, -1, 0, case.vocab - 1, case.vocab, 10**12)
    if case.function != "token_logprobs":
        options["reduction"] = one("none", "sum", "mean")
    if case.function == "kl_div":
        options["log_target"] = one(False, True)
    if case.function == "cross_entropy":
        options["label_smoothing"] = one(0.0, 0.0, 0.1, 1.0)
        options["smoothing_over"] = "all" if case.soft else one("all", "others")
        options["z_loss"] = one(0.0, 0.0, 1e-4, 0.3)
    defaults = {"softcap": None, "temperature": 1.0, "ignore_index": -100, "reduction": "mean", "log_target": False}
    defaults |= {"label_smoothing": 0.0, "smoothing_over": "all", "z_loss": 0.0}
    return {name: value for name, value in options.items() if value != defaults[name] or one(False, True)}


def _offsets(case: Case) -> tuple[float, ...]:
    """Offsets that the dtype's logits can have without losing the digits that the comparison looks at.

    A temperature that is no power of two rounds a score of 1e4 in its own last place.
    """
    if case.options.get("temperature", 1.0) == 0.7:
        return (-10.0, 10.0)
    return (-1e4, 1e4) if case.grid else (-100.0, 100.0)


def allowed(case: Case) -> bool:
    """Whether a loss takes these settings together."""
    return (
        case.vocab >= 1
        and case.multiple_of >= 1
        and case.hidden >= 1
        and (case.chunk_size is None or case.chunk_size >= 1)
        and case.soft == (case.function == "kl_div" or (case.soft and case.function == "cross_entropy"))
        and (case.linear or not (case.bias or case.spread or case.chunk_size))
        and (case.linear or "memory_budget" not in case.execution)
        and (case.function != "row_loss" or (case.linear and case.dtype == torch.float64))
        and (not case.spread or (bool(case.leading) and case.spread in spreads(case.leading[0])))
        and not (case.soft and case.spread and case.target_local)
        and not (case.soft and {"logprob", "correct"} & set(case.outputs))
        and not (case.soft and case.options.get("smoothing_over") == "others")
        and (case.linear or "weight" not in case.frozen)
        and (case.bias or "bias" not in case.frozen)
        and (case.bias or not case.linear or not case.masked)
        and all(token < case.vocab for token in case.masked)
        and len(case.masked) < case.vocab
        and not (case.masked and case.options.get("label_smoothing"))
        and (case.function == "kl_div" or "log_target" not in case.options)
        and (case.function == "row_loss" or "entropy" not in case.execution)
        and (case.function == "cross_entropy" or not {"label_smoothing", "z_loss"} & set(case.options))
        and (case.function in ("cross_entropy", "kl_div") or not case.weighted)
        and (case.function != "token_logprobs" or not (case.outputs or "reduction" in case.options))
    )
