"""Runs of this rank's columns in the total order: the best ones, or those around a place further down."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.select.approximate import block_sums
from vocab_parallel.select.order import best_columns
from vocab_parallel.select.scores import Scores

_BINS = 8192


class Runs(NamedTuple):
    """One run of each row.

    Attributes:
        keys: int64 `[planes, T, k]`, as of `order.best_columns`.
        over: float64 `[T]`: the approximate mass of the columns above the run.
        mass: float64 `[T]`, of all columns.
        peaks: float64 `[T]`, the largest values: both masses are below these.
    """

    keys: Tensor
    over: Tensor
    mass: Tensor
    peaks: Tensor


def first_runs(scores: Scores, p: Tensor, k: int) -> Runs:
    """The best k columns of each row, or if these cannot have a part p of its mass, those around where it is reached.

    Args:
        p: float64 `[T]`.
    """
    values = scores.values
    peaks = values.amax(1) if values.shape[1] else values.new_full((len(values),), -torch.inf)
    mass = block_sums(values, peaks).sum(1)
    over, wanted, parts = [0.0] * len(values), (p * mass).tolist(), p.tolist()
    far = [row for row, one in enumerate(wanted) if one > k and parts[row] < 1.0]  # no column weighs more than 1
    if len(far) < len(values) or not far:
        keys = best_columns(values, scores.token_ids, k, may_read=True)
    else:
        keys = values.new_empty(2 if values.dtype == torch.float64 else 1, len(values), k, dtype=torch.int64)
    for row in far:
        inside, over[row] = _around(values[row], float(peaks[row]), wanted[row], parts[row], k)
        keys[:, row] = _best_of(scores, row, inside, k)
    return Runs(keys, torch.tensor(over, dtype=torch.float64), mass, peaks.double())


def next_runs(scores: Scores, start: list[float], own: list[float], k: int) -> tuple[Tensor, list[float]]:
    """The best k columns of each row at or below its `start`, and the approximate mass above it.

    Args:
        scores: Knowing their largest, which masses are below.
        own: The mass of all columns of this rank.
    """
    assert scores.largest is not None
    over = [0.0] * scores.rows
    if all(value == math.inf for value in start):
        return best_columns(scores.values, scores.token_ids, k, may_read=True), over
    keys = []
    for row, value in enumerate(start):
        inside = scores.values[row] <= value
        columns, peak = inside.nonzero()[:, 0], scores.largest[row : row + 1]
        over[row] = own[row] - float(block_sums(scores.values[row : row + 1, columns], peak).sum())
        if over[row] < own[row] / 4:  # a difference that leaves few digits
            over[row] = float(block_sums(scores.values[row : row + 1, ~inside], peak).sum())
        keys.append(_best_of(scores, row, columns, k))
    return torch.stack(keys, 1), over


def _around(values: Tensor, peak: float, wanted: float, part: float, k: int) -> tuple[Tensor, float]:
    """Columns around the one at which `values` `[n]` reach the mass `wanted`, and the mass above these.

    At least those that, with k of them in the total order, are half above and half below it, by histogram.

    Args:
        part: `wanted` of all, below 1.
    """
    # below the reach, all columns together have less than what is not wanted
    reach = math.log(len(values) * part / (wanted * (1.0 - part))) + 0.01
    spread = peak - float(values.amin())
    reach = spread if 0.0 < spread < reach else reach
    gap = values.to(torch.float64, copy=True).sub_(peak).neg_()
    bins = (gap * (_BINS / reach)).clamp_(max=_BINS).to(torch.int64)
    through = torch.bincount(bins, gap.neg_().exp_(), _BINS + 1).cumsum(0)
    counts = torch.bincount(bins, minlength=_BINS + 1).cumsum(0)
    middle = int(counts[min(_BINS, int(torch.searchsorted(through, wanted)))])  # rounding may leave it short of all
    first = int(torch.searchsorted(counts, max(0, middle - k // 2), right=True))
    before = int(counts[first - 1]) if first else 0
    last = int(torch.searchsorted(counts, before + k))
    inside = ((bins >= first) & (bins <= last)).nonzero()[:, 0]
    return inside, float(through[first - 1]) if first else 0.0


def _best_of(scores: Scores, row: int, columns: Tensor, k: int) -> Tensor:
    """`best_columns` `[planes, k]` of some columns of a row, ascending."""
    values, token_ids = scores.values[row : row + 1, columns], scores.token_ids[None, columns]
    return best_columns(values, token_ids, k, may_read=True)[:, 0]
