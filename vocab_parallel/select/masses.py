"""Probabilities as integers: their sums are exact, so no order of additions, rank or TP size can change a decision.

The mass of a column is `exp(value - peak)` in fixed point. `exp` is built from IEEE additions, multiplications and
moves of bits: a column has the same mass wherever it lies in a buffer, on every device. (A library's `exp` may give
another last bit in a vector's tail.) Sums of masses are integers, exact in any order.
"""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.select.scores import Scores, may_use_words, with_largest
from vocab_parallel.select.support import require_support

CLOSE = 2.0**-20
"""A probability this near to a threshold, as a part of it, has reached it: rounding never decides."""

BLOCK = 256  # columns whose masses are summed in float64, exactly, and a draw searches one by one

_MAGIC = 1.5 * 2.0**52  # adding it rounds to an integer, which its low bits then hold
_MAGIC_BITS = struct.unpack("<q", struct.pack("<d", _MAGIC))[0]
_REACH = 40.0  # nats below the peak: less than half a unit, also times 40 squared
_MAX_BITS = 45  # 256 masses of 2**45 add up within float64's 2**53
_FEW_COLUMNS = 1024
_CACHED_ELEMENTS = 1 << 15  # that stay in cache from one elementwise pass to the next
# 2**f on [-1/2, 1/2], interpolated at Chebyshev's points: relative error 1.1e-10 for float32 scores, 2.4e-15 for float
_EXP2 = {
    torch.float32: (
        1.0, 0.6931471805568341, 0.24022651213495422, 0.055504109063177154, 0.009618025613598036,
        0.0013333478480888061, 0.00015469729140704658, 1.5303699001378845e-05,
    ),
    torch.float64: (
        1.0, 0.6931471805599483, 0.24022650695901254, 0.055504108664544756, 0.00961812911053657,
        0.0013333558214738293, 0.00015403526882354606, 1.525266622014565e-05, 1.3217210256367588e-06,
        1.0206977921453389e-07, 6.767963482574983e-09,
    ),
}  # fmt: skip


class Masses(NamedTuple):
    """What the ranks know of the rows' distributions; the same bits on every rank and at every TP size.

    Attributes:
        largest: `[T]` the largest values, in the scores' dtype.
        bits: A mass of `2**bits` is the largest column's.
        by_rank: int64 `[size, T]`, the mass of each rank's columns.
        total: int64 `[T]`.
        blocks: float64 `[T, ceil(n / width)]`, this rank's masses by blocks of columns: integers.
        width: Columns in a block: 256, or 1 where there are few.
        weighted, squared: int64 `[T]`, with moments: sums of mass times gap and gap², gap = largest - value in nats.
        support: int64 `[T]`, with moments: columns above -inf.
    """

    largest: Tensor
    bits: int
    by_rank: Tensor
    total: Tensor
    blocks: Tensor
    width: int
    weighted: Tensor | None = None
    squared: Tensor | None = None
    support: Tensor | None = None

    @property
    def log_total(self) -> Tensor:
        """float64 `[T]`: the log-sum-exp above the largest value, in nats."""
        return (self.total.double() * 2.0**-self.bits).log()

    @property
    def lse(self) -> Tensor:
        """float64 `[T]`, nats."""
        return self.largest.double() + self.log_total

    @property
    def mean_gap(self) -> Tensor:
        """float64 `[T]`: the expected gap below the largest value, in nats."""
        assert self.weighted is not None, "measured without moments"
        return self.weighted.double() / self.total.double()

    @property
    def entropy(self) -> Tensor:
        """float64 `[T]`, nats."""
        return self.log_total + self.mean_gap

    @property
    def variance(self) -> Tensor:
        """float64 `[T]`: of the value under the row's own distribution, nats²."""
        assert self.squared is not None, "measured without moments"
        return (self.squared.double() / self.total.double() - self.mean_gap.square()).clamp(min=0.0)

    def logprob(self, values: Tensor) -> Tensor:
        """float64: log-probabilities, in nats, of `values` `[T]` or `[T, K]` of the rows."""
        shape = (-1,) + (1,) * (values.dim() - 1)
        return (values.double() - self.largest.double().view(shape)) - self.log_total.view(shape)


def measure(scores: Scores, *, moments: bool = False) -> Masses:
    """The masses of the rows' distributions.

    Args:
        moments: Also what entropy, variance and support need.

    Collectives:
        The peak's all-gather unless it is known, and one of 8 bytes a row (32 with moments).

    Raises:
        NonFiniteError: On every rank: a row without a finite value, or with +inf.
    """
    scores = with_largest(scores)
    assert scores.largest is not None
    require_support(scores, scores.largest, infinite=False)
    bits, more = mass_bits(scores.vocab_size), []
    if moments:
        width = BLOCK
        blocks, *more = _block_sums(scores.values, scores.largest, bits, moments)
    else:
        blocks, width = blocks_of(scores, scores.largest)
    sums = [blocks.to(torch.int64).sum(1)]
    if not moments and may_use_words(scores):
        by_rank = scores.channel.gather_words(sums[0].tolist())
        totals = torch.tensor([sum(of_ranks) for of_ranks in zip(*by_rank, strict=True)])
        return Masses(scores.largest, bits, torch.tensor(by_rank), totals, blocks, width)
    if moments:
        sums += [one.to(torch.int64).sum(1) for one in more]
        sums.append((scores.values > -torch.inf).sum(1))
    gathered = scores.channel.gather(torch.stack(sums))  # [size, 1 or 4, T]
    total, *rest = gathered.sum(0)
    return Masses(scores.largest, bits, gathered[:, 0], total, blocks, width, *rest)


def blocks_of(scores: Scores, largest: Tensor) -> tuple[Tensor, int]:
    """`Masses.blocks` and `Masses.width` of this rank's columns, below the rows' largest values `[T]`."""
    bits = mass_bits(scores.vocab_size)
    if scores.values.shape[1] > _FEW_COLUMNS:
        return _block_sums(scores.values, largest, bits, False)[0], BLOCK
    return scores.masses if scores.masses is not None else _few_masses(scores.values, largest, bits), 1


def with_masses(scores: Scores) -> Scores:
    """The same few columns, with their masses formed once for what follows. Their largest must be known."""
    if scores.values.shape[1] > _FEW_COLUMNS or scores.masses is not None or scores.largest is None:
        return scores
    return replace(scores, masses=_few_masses(scores.values, scores.largest, mass_bits(scores.vocab_size)))


def _few_masses(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    gap = values.to(torch.float64, copy=True).sub_(largest[:, None])
    return _scaled_exp(gap, bits, values.dtype).add_(_MAGIC).sub_(_MAGIC)


def mass_bits(vocab_size: int) -> int:
    """Bits of the largest mass, so that `vocab_size` of them add up within 62."""
    return min(_MAX_BITS, 62 - vocab_size.bit_length())


def masses_of(values: Tensor, largest: Tensor, bits: int) -> Tensor:
    """int64 masses of `values` below `largest`, any shapes that broadcast."""
    return fixed_exp(values.double() - largest.double(), bits, values.dtype).to(torch.int64)


def probabilities(scores: Scores, masses: Masses) -> Tensor:
    """float64 `[T, n]`: the columns' probabilities, the same bits for a column on any rank and at any TP size."""
    exp: Tensor = fixed_exp(scores.values.double() - masses.largest.double()[:, None], masses.bits, scores.values.dtype)
    return exp.div_(masses.total.double()[:, None])


def fixed_exp(difference: Tensor, bits: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """`exp(difference) * 2**bits`, rounded to integers that float64 holds, for differences up to 0 (-inf gives 0).

    Args:
        difference: float64, any shape.
        bits: At most 45.
        dtype: float32 for differences of float32 numbers: the polynomial then is as short as they allow.
    """
    return _scaled_exp(difference.clone(), bits, dtype).add_(_MAGIC).sub_(_MAGIC)


def exp(x: float) -> float:
    """`exp(x)` of an x of at most 0, in exact steps as `fixed_exp`'s: the same bits on every machine."""
    coefficients = _EXP2[torch.float64]
    x = max(x, -_REACH) * (1.0 / math.log(2.0))
    rounded = (x + _MAGIC) - _MAGIC
    x -= rounded
    power = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        power = power * x + coefficient
    return math.ldexp(power, int(rounded))


def value_spread(scores: Scores) -> Tensor:
    """float64 `[T]`: the population standard deviation of the rows' finite values; 0 for a single one.

    The distances from the largest value are rounded to 2**-22 of their range, so that their squares add up exactly.

    Collectives:
        Two all-gathers of 16 and 24 bytes a row.

    Source: Tang et al., Top-n-sigma (2024), equation 3.
    """
    largest, smallest = _value_range(scores)
    reach = (largest - smallest).clamp(min=0.0)
    bits = (62 - scores.vocab_size.bit_length()) // 2
    _, exponent = torch.frexp(reach)
    scale = torch.ldexp(torch.ones_like(reach), bits - exponent.clamp(min=-900))  # a power of two: no rounding
    finite = scores.values > -torch.inf
    gap = ((largest[:, None] - scores.values.double()) * scale[:, None]).round_()
    gap = torch.where(finite, gap, 0.0).to(torch.int64)
    local = torch.stack([finite.sum(1), gap.sum(1), (gap * gap).sum(1)])
    count, first, second = scores.channel.gather(local).sum(0).double()
    mean = first / count
    spread: Tensor = (second / count - mean * mean).clamp(min=0.0).sqrt() / scale
    return spread


def _value_range(scores: Scores) -> tuple[Tensor, Tensor]:
    """float64 `[T]` each: the rows' largest and smallest values above -inf. One all-gather of 16 bytes a row."""
    values = scores.values
    if values.shape[1]:
        smallest = torch.where(values == -torch.inf, torch.inf, values).amin(1)
        local = torch.stack([values.amax(1), -smallest]).double()
    else:
        local = values.new_full((2, len(values)), -torch.inf, dtype=torch.float64)
    largest, negated = scores.channel.gather(local).amax(0)
    return largest, -negated


def _block_sums(values: Tensor, largest: Tensor, bits: int, moments: bool) -> list[Tensor]:
    """Of each 256 columns of `values` `[T, n]` the sums of masses, and with moments of those times gap and gap²."""
    rows, n = values.shape
    count = -(-n // BLOCK)
    out = [values.new_zeros(rows, count, dtype=torch.float64) for _ in range(3 if moments else 1)]
    elements = _CACHED_ELEMENTS if values.device.type == "cpu" else 1 << 26
    width = max(1, min(n, elements))  # a multiple of the block, or the row
    height = max(1, elements // width)
    for top in range(0, rows, height):
        peak = largest[top : top + height, None].double()
        for left in range(0, n, width):
            part = values[top : top + height, left : left + width]
            gap = part.to(torch.float64, copy=True).sub_(peak)
            terms = _scaled_exp(gap.clone() if moments else gap, bits, values.dtype)
            at = slice(left // BLOCK, -(-(left + part.shape[1]) // BLOCK))
            if moments:
                gap.clamp_(min=-_REACH).neg_()
                weighted = terms * gap
                _sum_blocks(out[1][top : top + height, at], weighted.clone())
                _sum_blocks(out[2][top : top + height, at], weighted.mul_(gap))
            _sum_blocks(out[0][top : top + height, at], terms)
    return out


def _sum_blocks(out: Tensor, terms: Tensor) -> None:
    """Rounds `terms` `[T, n]` to integers, in place, and sums each 256 of them into `out` `[T, ceil(n / 256)]`."""
    terms.add_(_MAGIC).sub_(_MAGIC)
    whole = terms.shape[1] // BLOCK
    if whole:
        out[:, :whole] = terms[:, : whole * BLOCK].reshape(-1, whole, BLOCK).sum(2)
    if whole < out.shape[1]:
        out[:, whole] = terms[:, whole * BLOCK :].sum(1)


def _scaled_exp(x: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """`exp(x) * 2**bits` in float64, elementwise exact steps only; x is overwritten."""
    coefficients = _EXP2[dtype]
    x.clamp_(min=-_REACH).mul_(1.0 / math.log(2.0))
    rounded = x + _MAGIC
    x.sub_(rounded - _MAGIC)  # 2**x = 2**rounded * 2**rest, rest in [-1/2, 1/2]
    power = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        power.add_(coefficient).mul_(x)
    power.add_(coefficients[0])
    exponent = rounded.view(torch.int64).sub_(_MAGIC_BITS - 1023 - bits).bitwise_left_shift_(52)
    return power.mul_(exponent.view(torch.float64))
