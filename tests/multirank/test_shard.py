"""`VocabShard`: what each rank owns, slicing, and layouts that differ between ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from tests.multirank.sharded import shard_of
from tests.ranks import run_ranks, run_ranks_expecting_errors
from vocab_parallel import LayoutMismatchError, VocabLayout, VocabShard


def _describe(rank, vocab, multiple_of):
    shard = shard_of(vocab, multiple_of)
    assert (shard.rank, shard.vocab_size) == (rank, vocab)
    assert shard.num_valid == shard.stop - shard.start
    assert shard.traffic.total_calls == 0, "the comparison of layouts is not counted"
    assert copy.deepcopy(shard) is shard
    table = torch.arange(1.0, vocab + 1)
    mine = shard.slice(table, fill=-1.0)
    assert mine[: shard.num_valid].tolist() == [float(token + 1) for token in range(shard.start, shard.stop)]
    assert (mine[shard.num_valid :] == -1).all()
    return shard.start, shard.stop, shard.shard_size


@pytest.mark.parametrize(
    ("vocab", "multiple_of", "expected"),
    [
        (9, 1, [(0, 3, 3), (3, 6, 3), (6, 9, 3), (9, 9, 3)]),
        (5, 2, [(0, 2, 2), (2, 4, 2), (4, 5, 2), (5, 5, 2)]),
        (1, 1, [(0, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)]),
        (3, 1, [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 3, 1)]),
        (16, 4, [(0, 4, 4), (4, 8, 4), (8, 12, 4), (12, 16, 4)]),
    ],
)
def test_each_rank_owns_a_range_that_may_be_short_or_empty(vocab, multiple_of, expected):
    assert run_ranks(_describe, 4, vocab, multiple_of) == expected


def test_one_rank_owns_everything_without_a_group():
    shard = VocabShard(VocabLayout(9, 1, multiple_of=4))
    assert (shard.rank, shard.tp_size, shard.start, shard.stop, shard.num_valid, shard.shard_size) == (
        0,
        1,
        0,
        9,
        9,
        12,
    )
    assert torch.equal(shard.slice(torch.ones(9)), torch.tensor([1.0] * 9 + [0.0] * 3))


def test_more_ranks_need_a_group():
    with pytest.raises(LayoutMismatchError, match="group"):
        VocabShard(VocabLayout(9, 2))


def test_only_a_whole_table_can_be_sliced():
    with pytest.raises(LayoutMismatchError, match="9"):
        VocabShard(VocabLayout(9, 1)).slice(torch.ones(8))


def _different(rank, key):
    tp = dist.get_world_size()
    odd = rank == tp - 1
    layout = {
        "vocab_size": lambda: VocabLayout(9 + odd, tp, multiple_of=4),
        "padded_size": lambda: VocabLayout(9, tp, multiple_of=4 * (1 + 3 * odd)),
        "tp_size": lambda: VocabLayout(9, tp + odd, multiple_of=4),
        "all tp_size": lambda: VocabLayout(9, tp + 1, multiple_of=4),
    }[key]()
    VocabShard(layout, dist.group.WORLD)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("key", ["vocab_size", "padded_size", "tp_size", "all tp_size"])
def test_layouts_that_differ_are_the_same_error_on_every_rank(tp, key):
    errors = run_ranks_expecting_errors(_different, tp, key, timeout=20)
    assert {error.type for error in errors} == {"LayoutMismatchError"}
    assert len(set(errors)) == 1


def _equal_however_made(rank):
    tp = dist.get_world_size()
    layout = VocabLayout(9, tp, multiple_of=4) if rank else VocabLayout.from_padded(9, 16, tp)
    return VocabShard(layout, dist.group.WORLD).shard_size


def test_layouts_with_the_same_rows_agree_however_they_were_made():
    assert run_ranks(_equal_however_made, 2) == [8, 8]


def _group_rank(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    shard = shard_of(9, group=groups[rank // 2])
    return shard.rank, shard.start, shard.stop


def test_a_rank_counts_within_its_group():
    assert run_ranks(_group_rank, 4) == [(0, 0, 5), (1, 5, 9)] * 2
