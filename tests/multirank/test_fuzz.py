"""A fixed small part of the fuzzer's cases, and what it does with a case that is wrong, hangs or kills a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.campaign import Report, campaign, check_case, drawn, judge, words
from tests.fuzz.case import FuzzCase
from tests.fuzz.kinds import every
from tests.fuzz.kinds.every import KINDS, make
from tests.fuzz.kinds.invariant import Invariant
from tests.fuzz.kinds.losses import Losses
from tests.fuzz.world import Outcome, World
from tests.multirank.loss_case import Case

MASTER, COUNT = 7, 300

# What the fuzzer has found, as small as it made it: the name says the fault that was repaired.
FOUND: dict[str, FuzzCase] = {
    "one number of strided rows has no view as bytes": Losses(
        ranks=(0, 1), case=Case("drawn", leading=(4, 3), hidden=1, chunk_size=1, spread="uneven", memory="strided")
    ),
    "no numbers of strided rows have no view as bytes": Losses(
        ranks=(0, 1), case=Case("drawn", leading=(0,), spread="even", weighted=True, memory="strided")
    ),
    "no rows in float16 have no largest factor": Losses(case=Case("drawn", leading=(3, 0), dtype=torch.float16)),
    "rows that fill up a chunk hold no distribution": Losses(
        ranks=(0, 1),
        case=Case(
            "drawn", function="kl_div", spread="uneven", target_local=False, soft=True, options={"log_target": True}
        ),
    ),
    "one leaf of a strided weight was copied and the next was not": Invariant(
        case=Case("drawn", vocab=41, leading=(), memory="strided"), groups=((3,), (2, 3), (2, 0, 3, 1)), leaf=19
    ),
    "a leaf of one number has any stride, and was copied at one TP size only": Invariant(
        case=Case(
            "drawn",
            vocab=5,
            leading=(1,),
            hidden=1,
            dtype=torch.float32,
            bias=True,
            ignored="all",
            soft=True,
            weighted=True,
            scale=1.0,
            memory="strided",
            execution={"memory_budget": 1},
            seed=1673076034,
            options={"softcap": 1.5, "temperature": 0.5, "reduction": "none", "z_loss": 1e-4},
        ),
        groups=((0,), (2, 0), (2, 0, 3, 1)),
        leaf=1,
    ),
    # the oracle's fault: this loss is within 4e-12 of 50 digits, logsumexp's backward was within 4e-8
    "the oracle's gradient of lse squared rounded at the size of lse": Losses(
        case=Case("drawn", offset=-1e4, options={"temperature": 0.5, "z_loss": 0.3})
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    """How each of the cases ended, by kind and seed or by name."""
    names = list(islice(drawn(MASTER, list(KINDS)), COUNT))
    cases = [*((name, make(*name)) for name in names), *FOUND.items()]
    by_case = {id(case): name for name, case in cases}
    with World() as world:
        return {by_case[id(outcome.case)]: outcome for outcome in world.run(case for _, case in cases)}


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_cases_of_every_kind_are_as_the_oracle_has_them(outcomes, kind):
    mine = {name: judge(outcome) for name, outcome in outcomes.items() if name[0] == kind}
    assert len(mine) >= COUNT // 30
    wrong = {name: what for name, what in mine.items() if what[0]}
    assert not wrong, "\n".join(
        f"scripts/fuzz --case {kind}:{seed}\n{what}: {details}" for (_, seed), (what, details) in wrong.items()
    )


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_repaired(outcomes, name):
    trouble, details = judge(outcomes[name])
    assert not trouble, f"{trouble}: {details}"


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"errors", "roundtrips"}))  # which return no numbers
def test_a_number_that_is_wrong_on_one_rank_is_seen(outcomes, kind):
    tried = 0
    for outcome in [outcome for name, outcome in outcomes.items() if name[0] == kind][:2]:
        wrong = list(spoiled(outcome.results))
        for results in wrong[:: 1 + len(wrong) // 20]:
            tried += 1
            assert judge(Outcome(outcome.case, results))[0], f"{outcome.case}\n{results}"
    assert tried


def spoiled(value: Any) -> Iterator[Any]:
    """The results of the ranks with one tensor, number or text of them wrong."""
    if isinstance(value, Tensor):
        if value.numel():
            wrong = value.clone(memory_format=torch.contiguous_format)
            first = wrong.view(-1)[:1]
            first.copy_(~first if wrong.dtype == torch.bool else torch.where(first.isfinite(), first + 1, 0))
            yield wrong
    elif isinstance(value, dict):
        # not what the check is told of the layout, or has put there itself
        for key in [key for key in value if key != "valid" and not key.startswith("out_")]:
            yield from (value | {key: wrong} for wrong in spoiled(value[key]))
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            wrongs = ([*value[:at], wrong, *value[at + 1 :]] for wrong in spoiled(one))
            yield from (type(value)(*wrong) if hasattr(value, "_fields") else type(value)(wrong) for wrong in wrongs)
    elif isinstance(value, (float, str)):
        yield value + ("1" if isinstance(value, str) else 1.0)


@dataclass(frozen=True, repr=False)
class Bad(FuzzCase):
    """What its first rank does: nothing wrong, a wrong number, an error, a call that the others do not make, an end."""

    kind: ClassVar[str] = "bad"
    ranks: tuple[int, ...] = (0,)
    does: str = "right"
    weight: int = 0

    @classmethod
    def draw(cls, one):
        return cls(ranks=one((0, 1), (2, 0), (0, 1, 2, 3)), does=one(*DOES), weight=one.below(50))

    def run(self, place):
        total = torch.ones(())
        first = place.rank == 0
        if first and self.does == "error":
            raise ArithmeticError("on purpose")
        if first and self.does == "died":
            os._exit(3)
        if first and self.does == "hang":
            return total
        if len(self.ranks) > 1:
            dist.all_reduce(total, group=place.group)
        return total + (first and self.does == "mismatch")

    def check(self, results):
        assert all(int(result) == self.tp for result in results), f"sums {results}"


DOES = ("right", "right", "mismatch", "error", "hang", "died")


def test_a_case_in_trouble_is_told_and_the_others_go_on_on_new_ranks():
    cases = [Bad(ranks=(0, 1)), Bad(ranks=(2, 0, 3, 1))]
    for does in DOES[2:]:
        cases += [Bad(ranks=(2, 0), does=does), Bad(ranks=(0, 1, 2)), Bad(ranks=(3, 1))]
    began = time.monotonic()
    with World(limit=2.0) as world:
        outcomes = list(world.run(cases))
        starts = world.starts
    assert sorted(map(repr, cases)) == sorted(repr(outcome.case) for outcome in outcomes)
    for outcome in outcomes:
        trouble, details = judge(outcome)
        # a rank that raises leaves the others waiting
        expected = {"right": "", "error": "hang"}.get(outcome.case.does, outcome.case.does)
        assert trouble == expected, (outcome.case, details)
        if outcome.case.does == "error":
            assert "ArithmeticError: on purpose" in details and "all_reduce" in details
        if outcome.case.does == "died":
            assert "rank 2 ended with 3" in details
    assert starts == 4 and time.monotonic() - began < 60


def test_a_campaign_makes_what_it_finds_smaller_and_prints_it(monkeypatch):
    said: list[str] = []
    report = Report(3)
    monkeypatch.setattr(every, "KINDS", {"bad": Bad})
    monkeypatch.setattr("tests.fuzz.campaign.SHARES", {"bad": 1})
    monkeypatch.setattr(
        Bad, "draw", classmethod(lambda cls, one: cls(ranks=(2, 0), does="mismatch", weight=one.below(50)))
    )
    campaign(report, ["bad"], cases=2, say=said.append)
    assert report.counts == {"bad": 2} and [one.trouble for one in report.findings] == ["mismatch"] * 2
    assert all(one.small == Bad(does="mismatch") for one in report.findings)
    text = words(report.findings[0])
    assert text in said and "check_case(Bad(does='mismatch'))" in text


def test_a_pasted_case_fails_as_it_did_and_passes_when_it_is_right():
    check_case(Bad(ranks=(0, 1)))
    with pytest.raises(AssertionError, match="mismatch: sums"):
        check_case(Bad(ranks=(1, 3), does="mismatch"))
