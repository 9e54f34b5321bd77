"""The log-sum-exp of rows over shards in one exchange that needs no maximum first, the same bits at every TP size.

A float sum depends on how it is split, and integer masses relative to the row's maximum need that maximum before. So
the scale is absolute: a column of value z belongs to the class `floor(z / 4)`, counts as the integer
`round(exp(z - 4 (class + 1)) 2**bits)`, and integers of one class add up to the same sum in any order. A rank sends
the 12 sums from its highest class down. Whichever ranks hold the columns, the sums of the 12 classes below the row's
highest are then the same; what is further down is less than `exp(-44)` of the maximum a column, and left out.
(`exp` here is that of `select.masses`, relative error 1e-10 for float32 scores.)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.select.logarithm import exact_log
from vocab_parallel.select.masses import fixed_exp, mass_bits

CLASSES = 12
WORDS = 1 + CLASSES  # int64 a row and rank: the highest class as the bits of a float64, and the sums
_WIDTH = 4.0  # nats a class
_CACHED_ELEMENTS = 1 << 15  # that stay in cache from one elementwise pass to the next


class Normalizer(NamedTuple):
    """Of each row, float64 `[T]`: its log-sum-exp is `base + log_total`, in nats; NaN for a row without columns."""

    base: Tensor
    log_total: Tensor

    def logprobs(self, values: Tensor) -> Tensor:
        """float64 log p of the rows' own `values` `[T, n]`, never above 0; a large common offset costs no digits."""
        return ((values.double() - self.base[:, None]) - self.log_total[:, None]).clamp(max=0.0)


def class_sums(values: Tensor, vocab_size: int) -> Tensor:
    """int64 `[T, WORDS]` of this rank's columns `[T, n]` float32 or float64, for `merge_sums`."""
    rows, columns = values.shape
    largest = values.amax(1) if columns else values.new_full((rows,), -torch.inf)
    top = torch.floor(largest.double() / _WIDTH)
    sums = torch.zeros(rows, CLASSES + 1, dtype=torch.int64, device=values.device)  # the last is for what is left out
    elements = _CACHED_ELEMENTS if values.device.type == "cpu" else 1 << 24
    width = max(1, min(columns, elements))
    height = max(1, elements // width)
    for at in range(0, rows, height):
        for left in range(0, columns, width):
            part = values[at : at + height, left : left + width].double()
            classes = torch.floor(part / _WIDTH)
            place = (top[at : at + height, None] - classes).clamp_(max=CLASSES).nan_to_num_(CLASSES).to(torch.int64)
            below = classes.add_(1).mul_(-_WIDTH).add_(part)  # in [-4, 0]
            mass = fixed_exp(below, mass_bits(vocab_size), values.dtype).to(torch.int64)
            sums[at : at + height].scatter_add_(1, place, mass)
    return torch.cat([top.view(torch.int64)[:, None], sums[:, :CLASSES]], 1)


def merge_sums(
    gathered: Tensor,  # int64 [size, T, WORDS]
    vocab_size: int,
) -> Normalizer:
    """The rows' normalizer from all ranks' `class_sums`."""
    tops = gathered[:, :, 0].contiguous().view(torch.float64)
    top = tops.amax(0)
    shift = (top - tops)[:, :, None]  # how many classes a rank's highest lies below the row's
    place = shift + torch.arange(CLASSES, dtype=torch.float64, device=gathered.device)
    inside = place < CLASSES
    place = torch.where(inside, place, CLASSES).to(torch.int64)
    sums = gathered.new_zeros(*gathered.shape[:2], CLASSES + 1).scatter_add_(2, place, gathered[:, :, 1:])
    merged = sums[:, :, :CLASSES].sum(0)
    scale = math.ldexp(1.0, -mass_bits(vocab_size))
    total = torch.zeros_like(top)
    for at in reversed(range(CLASSES)):  # the smallest first
        total = total + merged[:, at].double() * (scale * _DECAY[at])
    return Normalizer(_WIDTH * (top + 1), exact_log(total))


# exp(-4 k), as text: what a host's library makes of exp may differ in the last bit
_DECAY = (
    1.0, 0.01831563888873418, 0.00033546262790251185, 6.14421235332821e-06, 1.1253517471925912e-07,
    2.061153622438558e-09, 3.775134544279098e-11, 6.914400106940203e-13, 1.2664165549094176e-14,
    2.3195228302435696e-16, 4.248354255291589e-18, 7.781132241133797e-20,
)  # fmt: skip
