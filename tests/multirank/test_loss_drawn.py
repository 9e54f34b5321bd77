"""Combinations of everything a loss takes, drawn by hypothesis, against the float64 oracle on 1 to 4 ranks.

The cases are drawn once, always the same, and run in one world per number of ranks. To draw others, or more:

    DRAWN_CASES=300 DRAWN_SEED=7 python -m pytest tests/multirank/test_loss_drawn.py

A case that fails is made smaller, setting by setting, as long as it still fails, and printed as a `Case(...)` that can
be pasted into a `Cases([...])` of `test_loss_options.py`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.multirank.sharded import OUTPUTS, SPREADS, TP, Case, Cases
from tests.ranks import RankFailure

COUNT = int(os.environ.get("DRAWN_CASES", "32"))
SEED = int(os.environ.get("DRAWN_SEED", "0"))
BATCH = 64  # cases that share a world
SMALLEST = Case("drawn")


@st.composite
def cases(draw: Any) -> Case:
    """A case that every rule of the losses allows; the oracle knows its value and its gradients."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    function = one("cross_entropy", "cross_entropy", "cross_entropy", "kl_div", "token_logprobs", "row_loss")
    linear = function == "row_loss" or one(True, True, False)
    case = Case(
        "drawn",
        function=function,
        linear=linear,
        dtype=one(torch.float64, torch.float32),
        vocab=one(9, 1, 2, 3, 5, 8, 13, 31),
        multiple_of=one(1, 1, 2, 4, 16),
        leading=one((7,), (7,), (12,), (12,), (4, 3), (3, 2, 2), (1,), (), (0,), (3, 0)),
        hidden=one(1, 5, 8),
        bias=linear and one(True, False),
        chunk_size=one(None, 1, 2, 3, 5, 100) if linear else None,
        ignored=one("some", "some", "some", "none", "none", "all"),
        every_id=one(False, True),
        soft=function == "kl_div" or (function == "cross_entropy" and one(False, False, True)),
        weighted=function in ("cross_entropy", "kl_div") and one(False, True),
        upstream_one=one(False, False, True),
        scale=one(1.0, 2.0, 0.1),
        grid=one(None, None, 0.25),
        seed=draw(st.integers(0, 10**9)),
    )
    if linear and case.leading:
        spread = one(None, None, *SPREADS)
        case = replace(case, spread=spread, target_local=spread is None or (not case.soft and one(True, False)))
    if linear and case.chunk_size is None:
        case = replace(case, execution=one({}, {"memory_budget": one(1, 500, 10**6)}))
    if function == "row_loss" and one(False, True):
        case = replace(case, execution=case.execution | {"entropy": False})
    case = replace(case, options=_options(case, one))
    if case.function != "token_logprobs" and one(False, True):
        names = [name for name in OUTPUTS if not (case.soft and name in ("logprob", "correct"))]
        case = replace(case, outputs=tuple(draw(st.lists(st.sampled_from(names), min_size=1, unique=True))))
    if (case.bias or not linear) and not case.options.get("label_smoothing") and one(False, True):
        ids = st.lists(st.integers(0, case.vocab - 1), max_size=case.vocab - 1, unique=True)
        case = replace(case, masked=tuple(sorted(draw(ids))))
    if not linear:
        case = replace(case, offset=one(0.0, 0.0, 0.0, *_offsets(case)))
    frozen = [name for name in case.names if one(True, False, False, False)]
    return replace(case, frozen=tuple(frozen))


def _options(case: Case, one: Any) -> dict[str, Any]:
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


def drawn(count: int, seed: int) -> list[Case]:
    """`count` cases. Of those that hypothesis makes by changing an earlier one, which keep its seed, the first only."""
    found: dict[int, Case] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=5 * count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def collect(case: Case) -> None:
        found.setdefault(case.seed, case)

    collect()
    assert len(found) >= count, f"only {len(found)} cases of {count}"
    return list(found.values())[:count]


@functools.cache
def batches() -> list[Cases]:
    found = drawn(COUNT, SEED)
    return [Cases(found[at : at + BATCH]) for at in range(0, len(found), BATCH)]


def smaller(case: Case) -> Iterator[Case]:
    """The case with one of its settings at its default, as far as the rest allows that."""
    for one in fields(Case):
        plain = getattr(SMALLEST, one.name)
        if one.name not in ("name", "options", "execution", "soft") and getattr(case, one.name) != plain:
            yield replace(case, **{one.name: plain})
    if case.soft and case.function == "cross_entropy":
        yield replace(case, soft=False)
    for one in ("options", "execution"):
        given = getattr(case, one)
        for name in given:
            yield replace(case, **{one: {key: value for key, value in given.items() if key != name}})


def allowed(case: Case) -> bool:
    return (
        case.soft == (case.function == "kl_div" or (case.soft and case.function == "cross_entropy"))
        and (case.linear or not (case.bias or case.spread or case.chunk_size))
        and (bool(case.leading) or not case.spread)
        and not (case.soft and case.spread and case.target_local)
        and (case.linear or "weight" not in case.frozen)
        and (case.bias or "bias" not in case.frozen)
        and (case.bias or not case.linear or not case.masked)
        and all(token < case.vocab for token in case.masked)
        and (case.function == "kl_div" or "log_target" not in case.options)
        and (case.function != "token_logprobs" or not case.outputs)
    )


def smallest(case: Case, tp: int) -> Case:
    """A smaller case that fails on `tp` ranks too, if one with fewer settings does."""
    for _ in range(12):
        tried = [replace(one, name=f"smaller {index}") for index, one in enumerate(smaller(case)) if allowed(one)]
        together = Cases(tried)
        failing = [one for one in tried if fails(together, one, tp)]
        if not failing:
            break
        case = failing[0]
    return replace(case, name="smallest")


def fails(together: Cases, case: Case, tp: int) -> bool:
    try:
        together.check(case, tp)
    except (AssertionError, RankFailure):
        return True
    return False


_reduced: set[int] = set()  # numbers of ranks for which a failing case was made smaller: the first, as it takes a while


@TP
@pytest.mark.parametrize("index", range(COUNT))
def test_any_combination_equals_the_oracle(index, tp):
    batch = batches()[index // BATCH]
    ((case,),) = batch.cases[index % BATCH : index % BATCH + 1]
    try:
        batch.check(case, tp)
    except AssertionError as error:
        if tp in _reduced:
            raise
        _reduced.add(tp)
        raise AssertionError(f"{error}\nmade smaller: {smallest(case, tp)!r}") from None
