"""The fuzzer's own logic: what it draws, how it makes a case smaller, and what it prints. No ranks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch

from tests.batch import Attempt
from tests.fuzz.__main__ import main
from tests.fuzz.campaign import Finding, Report, as_test, drawn, judge, words
from tests.fuzz.case import GROUPS, REPLICAS, WORLD, Draw, FuzzCase, smaller, smallest
from tests.fuzz.kinds.errors import Errors
from tests.fuzz.kinds.every import KINDS, SHARES, make
from tests.fuzz.kinds.losses import Losses
from tests.fuzz.kinds.selection import Selection
from tests.fuzz.world import Outcome, _dumps, _loads
from tests.multirank.loss_case import Case
from tests.tolerances import bits

EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True, repr=False)
class Toy(FuzzCase):
    kind: ClassVar[str] = "toy"
    size: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    flag: bool = False

    def allowed(self):
        return self.size >= 1

    def check(self, results):
        if results != [1]:
            raise AssertionError(f"{results} is not one")


@EACH_KIND
def test_a_seed_makes_the_same_case_again_and_others_make_others(kind):
    cases = [make(kind, seed) for seed in range(40)]
    assert cases == [make(kind, seed) for seed in range(40)]
    assert len({repr(case) for case in cases}) == 40


@EACH_KIND
def test_what_is_drawn_is_allowed_and_runs_on_ranks_that_there_are(kind):
    for seed in range(60):
        case = make(kind, seed)
        assert case.allowed(), case
        assert len(set(case.ranks)) == len(case.ranks) and set(case.ranks) <= set(range(WORLD))


@EACH_KIND
def test_a_case_is_pasted_back_as_it_was_printed(kind):
    names = {"inf": math.inf, "nan": math.nan, "torch": torch}
    for seed in range(20):
        case = make(kind, seed)
        text = as_test(Finding(kind, seed, "mismatch", "", case, case))
        lines = [line for line in text.splitlines() if line.startswith(("from", "import"))]
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)
        assert eval(repr(case), {**scope, **names}) == case
        compile(text, "pasted", "exec")
        assert f"def test_found_by_fuzzing_{kind}_{seed}():" in text and f"check_case({case!r})" in text


@EACH_KIND
def test_every_step_of_making_smaller_is_another_case_that_is_allowed(kind):
    for seed in range(10):
        case = make(kind, seed)
        steps = list(smaller(case))
        assert steps or case == type(case)()
        assert all(step != case and step.allowed() for step in steps)


def test_every_kind_meets_every_number_of_ranks():
    for kind in set(KINDS) - {"replicas", "checkpoints", "tp_invariant"}:
        assert {make(kind, seed).tp for seed in range(60)} == {1, 2, 3, 4}, kind
    assert {make("replicas", seed).ranks for seed in range(30)} == {(*one, *other) for one, other in REPLICAS}
    sizes = {(len(one.saving), len(one.loading)) for one in (make("checkpoints", seed) for seed in range(300))}
    assert len(sizes) == 16, "a checkpoint goes from any number of ranks to any"


def test_layouts_have_empty_shards_padding_and_one_id():
    cases = [make("selection", seed) for seed in range(300)]
    last = [
        one for one in cases if (one.tp - 1) * -(-one.vocab // one.tp // one.multiple_of) * one.multiple_of >= one.vocab
    ]
    assert last and {1, 128} <= {one.multiple_of for one in cases} and 1 in {one.vocab for one in cases}
    assert {one.ranks for one in cases} == set(GROUPS)


def test_kinds_are_drawn_by_their_shares_and_a_master_seed_says_which():
    found = list(islice(drawn(7, list(KINDS)), 3 * sum(SHARES.values())))
    assert Counter(kind for kind, _ in found) == {kind: 3 * share for kind, share in SHARES.items()}
    assert found == list(islice(drawn(7, list(KINDS)), len(found)))
    assert found != list(islice(drawn(8, list(KINDS)), len(found)))


def test_making_smaller_keeps_what_fails_and_drops_the_rest():
    case = Toy(ranks=(2, 0, 3, 1), seed=9, size=100, options={"a": 1, "b": 2}, flag=True)
    found = smallest(case, lambda one: one.size >= 17 and "b" in one.options)
    assert found == Toy(size=17, options={"b": 2}, ranks=(0,))
    assert smallest(case, lambda one: False) == case
    tried = []
    smallest(case, lambda one: tried.append(one) or False, tries=4)
    assert len(tried) == 4


def test_making_smaller_reaches_into_the_settings_of_a_loss():
    case = Losses(
        ranks=(0, 1, 2), case=Case("drawn", vocab=31, bias=True, seed=3, options={"z_loss": 0.3, "temperature": 2.0})
    )
    found = smallest(case, lambda one: one.case.bias and "z_loss" in one.case.options)
    assert found == Losses(case=Case("drawn", bias=True, options={"z_loss": 0.3}))


def test_a_policy_loses_its_transforms_one_by_one():
    case = make("policies", 3)
    count = len(case.given()[0].transforms)
    assert count > 1
    kept = smallest(case, lambda one: one.only is None or 0 in one.only)
    assert kept.only == (0,) and len(kept.given()[0].transforms) == 1


def test_a_finding_says_what_is_wrong_and_how_to_repeat_it():
    small = Selection(dtype=torch.bfloat16, p=math.inf)
    text = words(Finding("selection", 12, "mismatch", "ids: [3]", make("selection", 12), small))
    assert "mismatch: selection:12" in text and "ids: [3]" in text
    assert "scripts/fuzz --case selection:12" in text
    assert "import torch" in text and "from math import inf, nan" in text


def test_an_outcome_is_a_mismatch_an_error_or_neither():
    assert judge(Outcome(Toy(), [1])) == ("", "")
    assert judge(Outcome(Toy(), [2])) == ("mismatch", "[2] is not one")
    assert judge(Outcome(Toy(), [1], "hang", "rank 3"))[0] == "hang"
    assert judge(Outcome(FuzzCase(), [1]))[0] == "the oracle failed"


def test_a_report_counts_by_kind_and_by_number_of_ranks():
    report = Report(5)
    report.counts.update(["losses", "losses", "errors"])
    report.sizes.update([1, 4, 4])
    assert report.total == 3 and report.line().startswith("3 cases")
    assert "losses                2" in report.table() and "1 on 1, 2 on 4" in report.table()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_results_come_back_from_ranks_bit_for_bit(dtype):
    strided = torch.stack([torch.arange(6).view(2, 3)] * 2, -1)[..., 0].to(dtype)
    for tensor in (strided, strided[:0], strided[0, 0], strided.T, strided[:1, :1]):
        (back,) = _loads(_dumps((tensor,)))
        assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(bits(back), bits(tensor))


@pytest.mark.parametrize("arguments", [["--kinds", "losses,bogus"], ["--case", "losses"], ["--case", "bogus:1"]])
def test_a_name_that_there_is_not_is_refused(arguments, capsys):
    assert main(arguments) == 2
    assert "error" in capsys.readouterr().err


def test_choices_are_whole_subsets_and_ranges():
    one = Draw("toy", 1)
    assert all(0 <= one.below(3) < 3 for _ in range(50))
    assert {tuple(one.subset((1, 2, 3), 1)) for _ in range(200)} == {
        (1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3),
    }  # fmt: skip


def test_errors_that_differ_between_ranks_or_are_missing_are_found():
    def met(kind="NonFiniteError", message="row 1", seconds=0.1):
        return Attempt(kind, kind != "RuntimeError", message, seconds), True

    case = Errors(ranks=(0, 1))
    case.check([met(), met()])
    case.check([(Attempt(None, False, "", 0.0), False)] * 2)
    for wrong in (
        [met(), met(kind=None)],
        [met(), met(message="row 2")],
        [met(), met(kind="TargetRangeError")],
        [met(kind="RuntimeError")] * 2,
        [met(), met(seconds=20.0)],
        [(one, False) for one, _ in (met(), met())],
    ):
        with pytest.raises(AssertionError):
            case.check(wrong)
