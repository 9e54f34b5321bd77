"""The smallest prefix of an order over all shards that holds a given mass: top-p, and whatever ranks by another key.

Sorting would need the row. A radix search needs, for each digit of the order's integer keys, the mass by digit: 16 or
256 integers a row. The digit at which the sum from the top reaches the target is the next digit of the last kept key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.select.masses import Masses, masses_of
from vocab_parallel.select.order import ordered_bits
from vocab_parallel.select.scores import Scores

_FEW_COLUMNS = 4096
_MANY_COLUMNS = 8192  # of a rank, beside which 8 KiB a row are little: half the rounds then count more


def smallest_prefix(
    scores: Scores,
    order: Tensor,  # [T, n] float32 or float64
    masses: Masses,
    target: Tensor,  # int64 [T], in (0, masses.total]
    *,
    by_value: bool = False,
) -> Tensor:
    """The smallest prefix, by `order` descending, then by id ascending, whose mass reaches `target`.

    Args:
        scores: What the masses are of. Columns at -inf are in no prefix.
        order: What ranks this rank's columns: for each the same bits whatever rank holds it.
        masses: `measure(scores)`.
        target: In the unit of `masses.total`.
        by_value: The order is the scores' values: columns that cannot be in the prefix are then left out at the start.

    Returns:
        Bool `[T, n]`: this rank's columns of the prefix.

    Collectives:
        4 all-gathers of 2,048 bytes a row where a rank has 8,192 columns or more, else 8 of 128 (twice as many for a
        float64 order), whatever the row holds; none if every rank holds the columns.
    """
    if scores.channel.size == 1 and scores.values.shape[1] <= _FEW_COLUMNS:
        return _sorted_prefix(scores, order, masses, target)
    at = _candidates(scores, masses, target, by_value)
    rows = torch.div(at, max(1, scores.values.shape[1]), rounding_mode="floor")
    key = ordered_bits(order.reshape(-1).index_select(0, at))
    values = scores.values.view(-1).index_select(0, at)
    mass = masses_of(values, masses.largest.index_select(0, rows), masses.bits)
    threshold, need, tied = _threshold(scores, rows, key, mass, target)
    last = threshold.index_select(0, rows)
    kept, ties = key > last, (key == last).nonzero()[:, 0]
    before = tied[: scores.channel.rank].sum(0)  # ties of lower ranks have lower ids
    kept[ties] = _sums_before(rows[ties], mass[ties], scores.rows) < (need - before)[rows[ties]]
    mask = torch.zeros(scores.values.numel(), dtype=torch.bool, device=key.device)
    mask[at] = kept
    return mask.view(scores.values.shape)


def _sorted_prefix(scores: Scores, order: Tensor, masses: Masses, target: Tensor) -> Tensor:
    """The same by sorting: for a few columns."""
    at = order.argsort(dim=1, descending=True, stable=True)  # ids ascend, so equal ones stay in their order
    known = scores.masses
    mass = masses_of(scores.values, masses.largest[:, None], masses.bits) if known is None else known.to(torch.int64)
    mass = mass.gather(1, at)
    before = mass.cumsum(1) - mass
    kept = torch.empty_like(mass, dtype=torch.bool).scatter_(1, at, before < target[:, None])
    return kept & (scores.values > -torch.inf)


def _threshold(
    scores: Scores, rows: Tensor, key: Tensor, mass: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The last kept key of each row, the mass still needed at it, both int64 `[T]`, and the ranks' mass there.

    Args:
        rows, key, mass: `[N]`, columns in a list; keys are int32 or int64.
    """
    need, threshold = target, torch.zeros_like(target)
    tied = torch.empty(0)
    bits, digit_bits = torch.iinfo(key.dtype).bits, 8 if _many_columns(scores) else 4
    bins = 1 << digit_bits
    for shift in range(bits - digit_bits, -1, -digit_bits):
        sign = bins // 2 if shift == bits - digit_bits else 0  # of the first digit: keys are signed
        digit = ((key >> shift) & (bins - 1)) ^ sign
        histogram = torch.zeros(scores.rows * bins, dtype=torch.int64, device=key.device)
        histogram.index_add_(0, rows * bins + digit, mass)
        by_rank = scores.channel.gather(histogram.view(scores.rows, bins))
        from_top = by_rank.sum(0).flip(1).cumsum(1)
        steps = (from_top < need[:, None]).sum(1, keepdim=True).clamp(max=bins - 1)
        need = need - torch.where(steps > 0, from_top.gather(1, (steps - 1).clamp(min=0)), 0)[:, 0]
        chosen = bins - 1 - steps[:, 0]
        threshold = threshold << digit_bits | (chosen ^ sign)
        tied = by_rank.gather(2, chosen.expand(len(by_rank), -1)[..., None])[..., 0]
        same = (digit == chosen.to(key.dtype).index_select(0, rows)).nonzero()[:, 0]
        if len(same) < len(rows):
            rows, key, mass = (one.index_select(0, same) for one in (rows, key, mass))
    return (threshold if bits == 64 else (threshold ^ 1 << 31) - (1 << 31)).to(key.dtype), need, tied


def _candidates(scores: Scores, masses: Masses, target: Tensor, by_value: bool) -> Tensor:
    """The places in `scores.values`, in id order, of columns that may be in the prefix.

    Columns with less than `(total - target) / V` each have less than `total - target` together, so the prefix ends
    above all of them; a hundredth of a nat is for rounding.
    """
    floor = torch.full_like(masses.largest, -torch.inf)
    if by_value:
        each = torch.div(masses.total - target, scores.vocab_size, rounding_mode="floor")
        lowest = masses.largest.double() + (each.double() * 2.0**-masses.bits).log() - 0.01
        floor = torch.where(each >= 64, lowest, -torch.inf).to(floor.dtype)
    lowest_finite = torch.finfo(floor.dtype).min
    alive = scores.values >= floor.clamp(min=lowest_finite)[:, None]
    return alive.view(-1).nonzero()[:, 0]


def _sums_before(rows: Tensor, mass: Tensor, count: int) -> Tensor:
    """For each entry of a list sorted by row: the mass of its row's entries before it. (Wrapping sums are exact.)"""
    of_rows = torch.zeros(count, dtype=torch.int64, device=mass.device).index_add_(0, rows, mass)
    return mass.cumsum(0) - mass - (of_rows.cumsum(0) - of_rows)[rows]


def _many_columns(scores: Scores) -> bool:
    """Whether 8 KiB a row are little beside what a gather of this rank's columns would send."""
    return scores.vocab_size // scores.channel.size >= _MANY_COLUMNS
