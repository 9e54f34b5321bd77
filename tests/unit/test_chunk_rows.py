"""How many rows a chunk gets: from the layout, the dtype and a budget of bytes, the same on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.loss import chunk_rows, linear_cross_entropy, linear_row_loss

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DEFAULT_BUDGET, MOST_ROWS = 128 << 20, 4096


def shard_of(vocab, tp=1, rank=0, multiple_of=128):
    """A shard without its process group: `chunk_rows` may not need one."""
    shard = object.__new__(VocabShard)
    shard.layout, shard.rank, shard.size = VocabLayout(vocab, tp, multiple_of=multiple_of), rank, tp
    ids = shard.layout.range(rank)
    shard.start, shard.stop, shard.num_valid = ids.start, ids.stop, len(ids)
    return shard


@pytest.mark.parametrize(
    ("vocab", "tp", "dtype", "budget", "rows"),
    [
        (131_072, 2, torch.float32, None, 512),
        (131_072, 2, torch.bfloat16, None, 1024),
        (131_072, 1, torch.float32, None, 256),
        (131_072, 8, torch.float32, None, 2048),
        (131_072, 64, torch.float32, None, 4096),  # the most: the rest of a GEMM's gain is small
        (256, 1, torch.float32, None, 4096),
        (1 << 28, 1, torch.float32, None, 1),  # one row has more than the default
        (131_072, 2, torch.float32, 64 << 20, 256),
        (131_072, 2, torch.float32, 4 << 30, 16_384),  # who gives a budget may have more than the most
        (131_072, 2, torch.float32, (64 << 20) - 1, 255),
        (131_072, 2, torch.float32, 1, 1),
        (100, 1, torch.float32, 10 * 128 * 4, 10),  # padding columns take memory too
    ],
)
def test_rows_of_a_chunk(vocab, tp, dtype, budget, rows):
    assert chunk_rows(shard_of(vocab, tp), dtype, budget) == rows


def test_float32_and_no_budget_are_the_defaults():
    shard = shard_of(131_072, 2)
    assert chunk_rows(shard) == chunk_rows(shard, torch.float32) == chunk_rows(shard, torch.float32, None) == 512


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 64),
    st.integers(1, 1 << 34),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 8, 128]),
)
def test_a_chunk_fills_its_budget_and_does_not_exceed_it(vocab, tp, budget, dtype, multiple_of):
    shard = shard_of(vocab, tp, multiple_of=multiple_of)
    row = shard.shard_size * dtype.itemsize
    rows = chunk_rows(shard, dtype, budget)
    assert isinstance(rows, int) and rows >= 1
    assert rows * row <= budget or rows == 1
    assert (rows + 1) * row > budget
    assert chunk_rows(shard, dtype) == max(1, min(DEFAULT_BUDGET // row, MOST_ROWS))


@given(
    st.integers(1, 1 << 18), st.integers(2, 16), st.sampled_from(DTYPES), st.one_of(st.none(), st.integers(1, 1 << 30))
)
def test_every_rank_chooses_the_same_even_one_with_few_ids_or_none(vocab, tp, dtype, budget):
    assert len({chunk_rows(shard_of(vocab, tp, rank), dtype, budget) for rank in range(tp)}) == 1


@given(st.integers(1, 1 << 18), st.lists(st.integers(1, 1 << 32), min_size=2, max_size=5))
def test_more_budget_is_never_fewer_rows(vocab, budgets):
    rows = [chunk_rows(shard_of(vocab), torch.bfloat16, budget) for budget in sorted(budgets)]
    assert rows == sorted(rows)


@pytest.mark.parametrize("name", ["chunk_size", "memory_budget"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_sizes_that_are_no_positive_integers_are_refused(name, value):
    shard = VocabShard(VocabLayout(9, 1))
    tensors = torch.zeros(3, 4), torch.zeros(128, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=name) as error:
        linear_cross_entropy(*tensors, shard=shard, **{name: value})
    assert repr(value) in str(error.value)


def test_a_chunk_size_wins_over_a_budget():
    """The rows that each chunk's exchange had are seen by a row loss."""
    shard, seen = VocabShard(VocabLayout(9, 1)), []

    def objective(rows):
        seen.append(len(rows.logprob))
        return -rows.logprob

    tensors = torch.zeros(10, 4), torch.zeros(128, 4), torch.zeros(10, dtype=torch.int64)
    for options, expected in [
        ({"memory_budget": 4 * 128 * 4}, [4, 4, 2]),
        ({"chunk_size": 7, "memory_budget": 4 * 128 * 4}, [7, 3]),
        ({"chunk_size": 7}, [7, 3]),
        ({"memory_budget": 1}, [1] * 10),
        ({}, [10]),
    ]:
        seen.clear()
        linear_row_loss(*tensors, objective, shard=shard, **options)
        assert seen == expected
