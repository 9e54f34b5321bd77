"""Combinations of everything a loss takes, drawn by a seed, against the float64 oracle on each of 1 to 4 ranks.

The cases are drawn once, always the same, and run in one world per number of ranks. To draw others, or more:

    DRAWN_CASES=300 DRAWN_SEED=7 python -m pytest tests/multirank/test_loss_drawn.py

`scripts/fuzz --kinds losses` draws them without end, in groups of all kinds. A case that fails is made smaller, setting
by setting, as long as it still fails, and printed as a `Case(...)` that can be pasted into `test_loss_options.py`.
"""

from __future__ import annotations

import functools
import os

import pytest

from tests.fuzz.campaign import shrunk
from tests.fuzz.case import Draw
from tests.fuzz.kinds.losses import Losses, draw_loss
from tests.multirank.sharded import TP, Cases

COUNT = int(os.environ.get("DRAWN_CASES", "32"))
SEED = int(os.environ.get("DRAWN_SEED", "0"))
BATCH = 64  # cases that share a world


@functools.cache
def batches() -> list[Cases]:
    found = [draw_loss(Draw("losses", SEED * 1_000_000 + number)) for number in range(COUNT)]
    return [Cases(found[at : at + BATCH]) for at in range(0, len(found), BATCH)]


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
        small = shrunk(Losses(ranks=tuple(range(tp)), case=case), "mismatch", seconds=60.0)
        raise AssertionError(f"{error}\nmade smaller: {small!r}") from None
