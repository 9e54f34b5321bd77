"""The best columns of a rank, by each way that finds them, beside a plain sort by value, then id."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vocab_parallel.select import order
from vocab_parallel.select.keys import best_keys, best_of_keys, ids_of, values_of
from vocab_parallel.select.order import best_columns, merge

FIRST_ID = 1000
# of more than a block, some with columns that fill none
SIZES = [5, 100, 3000, order._MANY_ELEMENTS // 4, 2 * order._MANY_COLUMNS - 27]
ROWS = 5


def normal(columns: int) -> Tensor:
    return torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns))


def coarse(columns: int) -> Tensor:
    return normal(columns).bfloat16().float()


def tied_rows(columns: int) -> Tensor:
    """Ties at every place in some rows, none in the others; among them both zeros, and a row of one value."""
    x = normal(columns)
    x[1] = (x[1] * 4).round() / 7
    x[3], x[4, ::2] = 0.3, -x[4, ::2].abs() * 0.0
    return x


def masked(columns: int) -> Tensor:
    """Fewer columns than k above -inf, or none; infinities; NaN of either sign."""
    x = normal(columns)
    x[0, 3:], x[1], x[2, 1::3] = -math.inf, -math.inf, math.inf
    x[3, -1], x[4, 2] = math.nan, -torch.tensor(math.nan)
    return x


def apart(columns: int) -> Tensor:
    """The best in blocks of their own, the worst of them first; the k-th equals the next, in a block left out."""
    x, count = normal(columns), columns // order._FINE
    heads = 2000.0 + torch.arange(count)
    for k in COUNTS:
        if k < count:
            heads[-k - 1] = heads[-k]
    x[:, : count * order._FINE : order._FINE] = heads
    return x


COUNTS = [1, 2, 50, 700, 1200]
KINDS: list[Callable[[int], Tensor]] = [normal, coarse, tied_rows, masked, apart]


@functools.cache
def sorted_columns(kind: Callable[[int], Tensor], columns: int) -> list[list[int]]:
    """All columns of each row, the best first: NaN, then by value, then by id."""
    return [
        sorted(range(columns), key=lambda at: (value[at] == value[at], -value[at] if value[at] == value[at] else 0, at))
        for value in kind(columns).tolist()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", COUNTS)
@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_columns_are_those_of_a_sort(
    kind: Callable[[int], Tensor], columns: int, k: int, dtype: torch.dtype
) -> None:
    values, ids = kind(columns).to(dtype), torch.arange(FIRST_ID, FIRST_ID + columns)
    shuffled = (
        torch.arange(columns)[None] * 3 + torch.arange(ROWS)[:, None]
    )  # as those of candidates: other in each row
    found = min(k, columns)
    for token_ids in (ids, shuffled):
        wanted = [sorted_columns(kind, columns)[row][:found] for row in range(ROWS)]
        for may_read in (False, True):
            sent = best_columns(values, token_ids, k, may_read=may_read)
            assert sent.shape == (2 if dtype == torch.float64 else 1, ROWS, k)
            best, best_ids = merge(sent[None], k)
            at = torch.tensor(wanted)
            expected = ids[at] if token_ids is ids else shuffled.gather(1, at)
            assert torch.equal(best_ids[:, :found], expected), f"{may_read=}"
            assert torch.equal(best[:, :found].nan_to_num(7.5), values.gather(1, at).nan_to_num(7.5))
            assert (best_ids[:, found:] == order.LOW).all()
        if dtype == torch.float32:
            keys = [key for row in best_of_keys([best_keys(values, token_ids, k)], ROWS, k) for key in row]
            best, best_ids = torch.tensor(values_of(keys)).view(-1, k), torch.tensor(ids_of(keys)).view(-1, k)
            assert torch.equal(best_ids[:, :found], expected)
            assert torch.equal(best[:, :found].nan_to_num(7.5), values.gather(1, at).nan_to_num(7.5))
            assert (best_ids[:, found:] == order.LOW).all()
