"""Masses to a known error, several times faster than the exact ones of `masses`: they tell where to look."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.select.masses import BLOCK, mass_bits
from vocab_parallel.select.scores import Bounds

# What a sum may be off, as a part of it: the polynomial of `masses` by 1.1e-10, the library's exp by less than 1e-15,
# and float64 sums of 2**20 columns.
ERROR = 2.0**-30
_CACHED_ELEMENTS = 1 << 16


def block_sums(values: Tensor, peaks: Tensor) -> Tensor:
    """Sums of `exp(value - peak)` by 256 columns.

    Args:
        values: `[T, n]`.
        peaks: `[T]`, at least the largest value of a row; -inf where it is empty.

    Returns:
        float64 `[T, ceil(n / 256)]`.
    """
    rows, n = values.shape
    whole, step = n // BLOCK, max(1, _CACHED_ELEMENTS // max(1, n))
    sums = values.new_empty(rows, -(-n // BLOCK), dtype=torch.float64)
    peaks = peaks.clamp(min=torch.finfo(peaks.dtype).min)[:, None]
    for at in range(0, rows if n else 0, step):
        terms = values[at : at + step].to(torch.float64, copy=True).sub_(peaks[at : at + step]).exp_()
        sums[at : at + step, :whole] = terms[:, : whole * BLOCK].reshape(len(terms), whole, BLOCK).sum(2)
        if whole * BLOCK < n:
            sums[at : at + step, whole] = terms[:, whole * BLOCK :].sum(1)
    return sums


def bounds(sums: list[float], columns: int) -> Bounds:
    """Between what the exact masses lie whose approximate sums these are.

    Args:
        columns: Of all ranks together: each mass is rounded to an integer.
    """
    slack = rounding(columns)
    low = [max(0.0, one * (1.0 - ERROR) - slack) for one in sums]
    return Bounds(low, [one * (1.0 + ERROR) + slack if one else 0.0 for one in sums])


def rounding(columns: int) -> float:
    """What sums of masses of so many columns may be off by rounding to integers, in masses of the largest column.

    Half a unit a column, and where a rank's sum was scaled by the mass of its largest column, half a unit of that.
    """
    return 2.0 * columns * 2.0 ** -mass_bits(columns)
