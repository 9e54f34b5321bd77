"""The exchange of sums and counts over a wider group: its value and cost, and an error of one group in all of them.

Four ranks: two vocabulary-parallel groups of two, and pairs of ranks that hold the same ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.batch import Attempt, attempt, has_word, run_batch
from tests.multirank.counting import collectives
from tests.multirank.test_bad_input import local, whole_tables
from tests.multirank.test_deferred_errors import no_host_reads
from vocab_parallel import VocabLayout, VocabShard, cross_entropy, linear_cross_entropy, vocab_parallel_embedding
from vocab_parallel.agreement import raise_deferred
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import RankGroup, Traffic

V, TP = 9, 2
MODES = {"at once": False, "deferred": True}


@functools.cache
def groups() -> tuple[list[Any], list[Any]]:
    """Vocabulary-parallel groups, and pairs across them."""
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return shards, [dist.new_group([0, 2]), dist.new_group([1, 3])]


def place(rank: int, mode: str) -> tuple[VocabShard, Any, int]:
    """A new shard, this rank's pair, and which vocabulary-parallel group it is in."""
    shards, pairs = groups()
    replica, of_replica = divmod(rank, TP)
    layout = VocabLayout.from_padded(V, 12, TP)
    return VocabShard(layout, shards[replica], deferred_errors=MODES[mode]), pairs[of_replica], replica


# --- value and cost ---------------------------------------------------------------------------------------------------


def reduce_once(shard: VocabShard, pair: Any, total: torch.Tensor, count: torch.Tensor) -> tuple[Any, Any]:
    with WideMean(shard, pair, "a call") as wide:
        return wide.reduce(total, count)


def reduced(rank: int, world: int, mode: str) -> dict[str, Any]:
    shard, pair, replica = place(rank, mode)
    total, count = torch.tensor(0.1 + 0.2 * replica, dtype=torch.float64), torch.tensor(3 + 2**40 * replica)
    for _ in range(3):
        reduce_once(shard, pair, total, count)
    shard.traffic.reset()
    if mode == "deferred":
        with no_host_reads():
            summed = reduce_once(shard, pair, total, count)
    else:
        summed = reduce_once(shard, pair, total, count)
    calls, sent = dict(shard.traffic.calls), dict(shard.traffic.bytes)
    with collectives() as (issued, issued_bytes):
        reduce_once(shard, pair, total, count)
    raise_deferred(shard)
    return {
        "summed": summed,
        "counted": (calls, sent),
        "issued": (dict(issued), dict(issued_bytes)),
        "alone": WideMean(shard, None, "").reduce(total, count),
        "sizes": (WideMean(shard, pair, "").size, WideMean(shard, None, "").size),
    }


@pytest.mark.parametrize("mode", MODES)
def test_sums_and_counts_are_those_of_all_rows_with_one_small_exchange(mode: str) -> None:
    found = run_batch(reduced, 4, [mode], timeout=30, detail=False)[mode]
    assert not isinstance(found, str), found
    for rank, one in enumerate(found):
        total, count = one["summed"]
        assert total.item() == 0.1 + (0.1 + 0.2) and total.dtype == torch.float64
        assert count.item() == 6 + 2**40 and count.dtype == torch.int64
        assert one["counted"] == ({"all_gather": 1}, {"all_gather": 80}) == one["issued"]
        assert one["alone"][0].item() == 0.1 + 0.2 * (rank // 2), "without a group nothing is exchanged"
        assert one["sizes"] == (2, 1)


def over_another_group(rank: int, world: int, _: str) -> dict[str, Any]:
    """Collectives over a group that is no shard's."""
    from vocab_parallel.collectives import all_gather, all_reduce_, reduce_scatter

    traffic = Traffic()
    pair = RankGroup(groups()[1][rank % TP], traffic=traffic)
    x = torch.arange(4.0) + 10 * rank
    return {
        "place": (pair.rank, pair.size),
        "gathered": all_gather(pair, x).wait(),
        "summed": all_reduce_(pair, x.clone()).wait(),
        "scattered": reduce_scatter(pair, x).wait(),
        "calls": dict(traffic.calls),
    }


def test_collectives_work_over_any_group() -> None:
    (found,) = run_batch(over_another_group, 4, ["once"], timeout=30).values()
    assert not isinstance(found, str), found
    for rank, one in enumerate(found):
        pair = [torch.arange(4.0) + 10 * other for other in (rank % 2, rank % 2 + 2)]
        assert one["place"] == (rank // 2, 2)
        assert torch.equal(one["gathered"], torch.stack(pair))
        assert torch.equal(one["summed"], sum(pair))
        assert torch.equal(one["scattered"], sum(pair)[2 * (rank // 2) : 2 * (rank // 2) + 2])
        assert one["calls"] == {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}


# --- errors -----------------------------------------------------------------------------------------------------------


def loss(rank: int, shard: VocabShard, pair: Any, *, linear: bool, bad: bool, change: dict[str, Any]) -> None:
    """One step of the loss; the first replica's row 1 is bad with `bad`; `change` are this rank's other arguments."""
    hidden, weight, _, logits = whole_tables()
    target = torch.tensor([8, 0, -100, 4, 2, 7, 1, 8])
    if bad and change.get("target") is not None:
        target[1] = change["target"]
    if bad and change.get("row") is not None:
        hidden[1], logits[1] = change["row"], change["row"]
    given = {"reduction": change["reduction"]} if bad and "reduction" in change else {}
    if bad and change.get("narrow"):
        weight, logits = weight[:, :2], logits[:, :-1]
    if linear:
        mine = local(weight, 0, shard).requires_grad_()
        value = linear_cross_entropy(hidden, mine, target, shard=shard, mean_group=pair, chunk_size=3, **given)
    else:
        mine = logits.requires_grad_() if bad and change.get("narrow") else local(logits, 1, shard).requires_grad_()
        value = cross_entropy(mine, target, shard=shard, mean_group=pair, **given)
    value.backward()


FAULTS: dict[str, tuple[dict[str, Any], Callable[[int], bool], str]] = {
    # name -> what is wrong, on which ranks, class of the error
    "a bad target in one group": ({"target": 99}, lambda rank: rank < 2, "TargetRangeError"),
    "a bad target in the last group": ({"target": 99}, lambda rank: rank >= 2, "TargetRangeError"),
    "a bad target on one rank": ({"target": 99}, lambda rank: rank == 1, "TargetRangeError"),
    "NaN in one group": ({"row": float("nan")}, lambda rank: rank < 2, "NonFiniteError"),
    "a wrong shape on one rank": ({"narrow": True}, lambda rank: rank == 2, "LayoutMismatchError"),
    "an option that is none, on one rank": ({"reduction": "all"}, lambda rank: rank == 3, "ValueError"),
    "an option that is none, everywhere": ({"reduction": "all"}, lambda rank: True, "ValueError"),
    "bad targets everywhere": ({"target": -5}, lambda rank: True, "TargetRangeError"),
    "another target on one rank": ({"target": 5}, lambda rank: rank == 0, "LayoutMismatchError"),
}

Key = tuple[str, str, bool, bool]  # name, mode, linear, warm
KEYS = [
    (name, mode, linear, warm)
    for name in FAULTS
    for mode in MODES
    for linear in (False, True)
    for warm in ((False, True) if mode == "deferred" else (False,))
]


def meet(rank: int, world: int, key: Key) -> dict[str, Any]:
    name, mode, linear, warm = key
    shard, pair, _ = place(rank, mode)
    change, where, _ = FAULTS[name]
    step = functools.partial(loss, rank, shard, pair, linear=linear, change=change)
    for _ in range(3 * warm):
        step(bad=False)
    met = attempt(lambda: step(bad=where(rank)))
    step(bad=False)
    step(bad=False)
    return {"met": met}


@functools.cache
def meetings() -> dict[Key, Any]:
    return run_batch(meet, 4, KEYS, timeout=60, detail=False)


@pytest.mark.parametrize("key", [pytest.param(key, id=str(key)) for key in KEYS])
def test_an_error_in_one_group_is_one_of_its_class_on_every_rank(key: Key) -> None:
    found = meetings()[key]
    assert not isinstance(found, str), found
    met: list[Attempt] = [one["met"] for one in found]
    assert [one.kind for one in met] == [FAULTS[key[0]][2]] * 4, met
    assert max(one.seconds for one in met) < 10, met
    if key[1] == "at once":  # then the words come too
        assert len({one.message.split(" [")[0] for one in met}) == 1, met
    assert all(has_word(one.message, "rank") or "rank" in one.message for one in met), met


def other_options(rank: int, world: int, mode: str) -> Attempt:
    """The replicas were given different options."""
    shard, pair, replica = place(rank, mode)
    logits = local(whole_tables()[3], 1, shard).requires_grad_()
    target = torch.arange(8)

    def step(smoothing: float) -> None:
        cross_entropy(logits, target, shard=shard, mean_group=pair, label_smoothing=smoothing).backward()

    step(0.0)
    met = attempt(lambda: step(0.1 * replica))
    step(0.0)
    return met


@pytest.mark.parametrize("mode", MODES)
def test_different_options_in_different_groups_are_refused(mode: str) -> None:
    found = run_batch(other_options, 4, [mode], timeout=30, detail=False)[mode]
    assert not isinstance(found, str), found
    assert {one.kind for one in found} == {"LayoutMismatchError"}, found
    assert all("disagree" in one.message for one in found), found


def an_earlier_error(rank: int, world: int, mode: str) -> Attempt:
    """A call without `mean_group` went wrong in one group, which learns of it in the loss."""
    shard, pair, replica = place(rank, mode)
    weight = local(whole_tables()[1], 0, shard).requires_grad_()
    logits = local(whole_tables()[3], 1, shard).requires_grad_()
    ids, target = torch.arange(8), torch.arange(8)

    def step(bad: bool) -> None:
        given = ids.index_fill(0, torch.tensor([2]), 9) if bad else ids
        vocab_parallel_embedding(given, weight, shard=shard)
        cross_entropy(logits, target, shard=shard, mean_group=pair).backward()

    for _ in range(4):
        step(False)
    met = attempt(lambda: step(replica == 0))
    step(False)
    return met


def test_an_earlier_error_that_shows_in_the_loss_reaches_the_other_groups() -> None:
    (found,) = run_batch(an_earlier_error, 4, ["deferred"], timeout=30, detail=False).values()
    assert not isinstance(found, str), found
    assert {one.kind for one in found} == {"TokenRangeError"}, found
    assert all(has_word(one.message, "9 at position 2") for one in found[:2]), found


def no_group(rank: int, world: int, mode: str) -> list[Attempt]:
    """On one rank `mean_group` is no process group, or one that it is no member of."""
    shard, pair, _ = place(rank, mode)
    logits, target = local(whole_tables()[3], 1, shard).requires_grad_(), torch.arange(8)
    met = []
    for wrong in ("data", groups()[1][1] if rank == 0 else None):
        group = wrong if rank == 0 else pair
        met.append(attempt(lambda group=group: cross_entropy(logits, target, shard=shard, mean_group=group)))
    return met


def test_a_mean_group_that_is_none_is_refused_by_the_group_of_the_rank_that_has_it() -> None:
    """The pair of that rank waits for it in vain: it cannot be told. So only this rank's own group makes the call."""
    (found,) = run_batch(in_one_group, 4, ["at once"], timeout=30, detail=False).values()
    assert not isinstance(found, str), found
    for one in found[:2]:
        assert [met.kind for met in one] == ["LayoutMismatchError"] * 2, one
        assert "process group" in one[0].message and "member" in one[1].message, one


def in_one_group(rank: int, world: int, mode: str) -> list[Attempt]:
    if rank >= 2:
        place(rank, mode)
        return []
    return no_group(rank, world, mode)
