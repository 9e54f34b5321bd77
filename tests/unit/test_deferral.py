"""Flags that are read later, and what ranks expect of each other until then."""

from __future__ import annotations

import copy
from collections import deque

import pytest
import torch

from vocab_parallel import VocabLayout, VocabShard, errors
from vocab_parallel.agreement import Exchange, first_row, judge, raise_deferred
from vocab_parallel.arguments import check_target, ids_found, target_found
from vocab_parallel.deferral import CLASSES, Habit, Plan, Step, UnreadFlags, class_code
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError, TargetRangeError, TokenRangeError
from vocab_parallel.headers import HEADER_WORDS, constant_header, signature
from vocab_parallel.shard import RankGroup

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# --- what the device finds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "row"),
    [([], -1), ([False], -1), ([True], 0), ([False, True, True], 1), ([False, False, True], 2), ([False] * 5, -1)],
)
def test_the_first_row_is_found_without_reading_it(bad: list[bool], row: int) -> None:
    found = first_row(torch.tensor(bad, dtype=torch.bool))
    assert found.dtype == torch.int64 and found.dim() == 0 and found.item() == row


def deferred() -> VocabShard:
    return VocabShard(VocabLayout.from_padded(9, 12, 1), deferred_errors=True)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([0, 8, -100], [-1]),
        ([], [-1]),
        ([3, 9, -1], [1, 9]),
        ([-100, -1], [1, -1]),
        ([[1, 2], [2**40, 3]], [2, 2**40]),
        ([-(2**63), 5], [0, -(2**63)]),
        ([4, 2**63 - 1], [1, 2**63 - 1]),
    ],
)
def test_the_first_bad_target_and_its_value_are_found(target: list[int], words: list[int]) -> None:
    found = target_found(torch.tensor(target, dtype=torch.int64), deferred(), -100)
    assert found is not None
    assert found.words.tolist()[: len(words)] == words
    assert found.error is TargetRangeError
    assert "row 7" in str(found.describe(7, 9)) and "padding id" in str(found.describe(7, 9))


def test_a_deferred_target_has_the_words_of_one_that_is_read_at_once() -> None:
    target = torch.tensor([1, 99])
    found = target_found(target, deferred(), -100)
    assert found is not None
    at_once = VocabShard(VocabLayout.from_padded(9, 12, 1))
    with pytest.raises(TargetRangeError) as error:
        check_target(target, at_once, -100)
    assert str(error.value) == str(found.describe(*found.words.tolist()))
    assert target_found(target, at_once, -100) is None and ids_found(target, at_once) is None
    check_target(target, deferred(), -100)


def test_the_first_bad_id_is_found() -> None:
    found = ids_found(torch.tensor([[1, 2], [11, -1]], dtype=torch.int32), deferred())
    assert found is not None and found.words.tolist() == [2, 11] and found.error is TokenRangeError
    assert "11 at position 2" in str(found.describe(2, 11))


# --- classes of errors as numbers -------------------------------------------------------------------------------------


def test_every_class_of_the_tree_has_a_number_of_its_own_above_0() -> None:
    tree = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = [class_code(error) for error in (*tree, ValueError, TypeError)]
    assert len(set(codes)) == len(codes) and min(codes) > 0
    assert [CLASSES[code - 1] for code in codes] == [error.__name__ for error in (*tree, ValueError, TypeError)]


def test_other_classes_have_the_number_of_a_base_or_of_the_root() -> None:
    class Narrow(TargetRangeError):
        pass

    assert class_code(Narrow) == class_code(TargetRangeError)
    assert class_code(UnicodeError) == class_code(ValueError)
    assert class_code(KeyError) == class_code(errors.VocabParallelError)


# --- unread flags -----------------------------------------------------------------------------------------------------


def test_errors_are_deferred_on_cuda_unless_it_is_said() -> None:
    def defers(setting: bool | None, device: torch.device) -> bool:
        return VocabShard(VocabLayout(9, 1), deferred_errors=setting).defers(device)

    assert [defers(None, CPU), defers(None, CUDA)] == [False, True]
    assert [defers(True, CPU), defers(True, CUDA)] == [True, True]
    assert [defers(False, CPU), defers(False, CUDA)] == [False, False]


def test_a_verdict_is_raised_at_once_or_later_and_once() -> None:
    def describe(flags: list[float]) -> Exception:
        return NonFiniteError(f"row {flags[0]:.0f}: {flags[1]}")

    fine, bad = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, float("nan")], dtype=torch.float64)
    at_once = VocabShard(VocabLayout(9, 1))
    judge(at_once, fine, NonFiniteError, describe)
    with pytest.raises(NonFiniteError, match="row 3: nan"):
        judge(at_once, bad, NonFiniteError, describe)
    later = deferred()
    for flags in (fine, bad, bad + 1, fine):
        judge(later, flags, NonFiniteError, describe)
    assert [later.unread.code().item(), len(later.unread)] == [class_code(NonFiniteError), 4]
    with pytest.raises(NonFiniteError, match="row 3: nan"):
        raise_deferred(later)
    raise_deferred(later)
    assert later.unread.code() is None


def test_flags_are_those_of_when_they_were_given() -> None:
    shard, flags = deferred(), torch.tensor([4])
    judge(shard, flags, NonFiniteError, lambda read: NonFiniteError(str(read)))
    flags.fill_(-1)
    with pytest.raises(NonFiniteError, match=r"\[4\]"):
        raise_deferred(shard)


def test_a_call_raises_the_flags_of_the_one_before() -> None:
    shard = deferred()
    judge(shard, torch.tensor([4]), NonFiniteError, lambda read: NonFiniteError("before"))
    with pytest.raises(NonFiniteError, match="before"):
        Exchange(shard, "header", "a call")
    Exchange(shard, "header", "a call").wait()
    judge(shard, torch.tensor([4]), NonFiniteError, lambda read: NonFiniteError("in the middle"))
    Exchange(shard, "header", "a call", opens=False).wait()
    with pytest.raises(NonFiniteError, match="in the middle"):
        Exchange(shard, "header", "a call")


def test_an_error_voids_what_was_learned() -> None:
    flags = UnreadFlags()
    flags.add(torch.tensor([1]), lambda read: None, lambda on_device: on_device[0])
    flags.read()
    assert flags.generation == 0
    flags.add(torch.tensor([1]), lambda read: LayoutMismatchError("no"), lambda on_device: on_device[0])
    with pytest.raises(LayoutMismatchError):
        flags.read()
    assert flags.generation == 1
    shard = deferred()
    shard.habit.begin(plan("a"), known=False)
    shard.payload_sizes["loss"] = deque([16])
    shard.unread.forget()
    assert shard.habit.expected() is None and shard.payload_sizes == {}


# --- what ranks expect ------------------------------------------------------------------------------------------------


def plan(call: str) -> Plan:
    return Plan(call, signature(call), "loss", 0)


def hits(calls: str) -> str:
    """Which calls of a sequence were expected: a 1 for each that was."""
    habit, seen = Habit(), ""
    for call in calls:
        expected = habit.expected()
        known = expected is not None and expected.call == call
        seen += str(int(known))
        habit.begin(expected if known and expected is not None else plan(call), known)
    return seen


@pytest.mark.parametrize("period", ["a", "ab", "aab", "abc", "aabb", "abac", "aaaab"])
def test_calls_in_turn_are_expected_after_two_rounds(period: str) -> None:
    rounds = hits(period * 6)
    assert rounds[3 * len(period) :] == "1" * (3 * len(period)), rounds


def test_a_call_alone_is_expected_the_second_time_and_a_new_one_never() -> None:
    assert hits("aaa") == "011"
    assert "1" not in hits("abcdefgh")


def test_a_long_run_of_new_calls_is_forgotten() -> None:
    habit = Habit()
    for at in range(3000):
        habit.begin(plan(str(at)), known=False)
    assert len(habit._next) <= 1100 and len(habit._plans) <= 1100


def test_a_call_that_is_not_known_is_written_down_and_a_known_one_is_followed() -> None:
    habit, written = Habit(), plan("a")
    steps = [Step("all_reduce", (2,)), Step("exchange", kind="loss", need=4)]
    habit.note(steps[0])
    habit.begin(written, known=False)
    for step in steps:
        habit.note(step)
    habit.end()
    habit.note(steps[0])
    assert written.steps == steps and habit.left() == []
    habit.begin(written, known=True)
    assert habit.left() == steps
    habit.note(steps[0])
    assert habit.left() == steps[1:] and written.steps == steps


# --- groups -----------------------------------------------------------------------------------------------------------


def test_a_group_within_another_shares_what_is_counted_and_raised() -> None:
    shard = deferred()
    wide = RankGroup(None, within=shard)
    assert wide.traffic is shard.traffic and wide.unread is shard.unread and wide.deferred_errors is True
    assert (wide.rank, wide.size) == (0, 1)
    assert copy.deepcopy(wide) is wide


def test_headers_are_made_once_and_not_kept_without_bound() -> None:
    shard = deferred()
    header = constant_header(shard, (5, 0, 2, 3, 0, 1), CPU)
    assert header.tolist() == [5, 0, 2, 3, 0, 1, -1, 0] and len(header) == HEADER_WORDS
    assert constant_header(shard, (5, 0, 2, 3, 0, 1), CPU) is header
    for rows in range(500):
        constant_header(shard, (5, 0, rows, 0, 0, 1), CPU)
    assert len(shard.headers) <= 64
