"""Where a draw falls: the column at which the masses, added up in id order, pass a number.

`tokens` tells it from approximate masses, one exchange sooner than from exact ones, and finds the same column: `exp`
by the library, in float64, is several times faster than the exact steps of `masses`, and within 2**-30 of them. A rank
tells its largest value and its approximate mass below it in 8 bytes. All ranks then know in which interval of masses a
draw lies, and nearly always one rank, and on it one column, holds all of the interval. Where not, the draw waits for
the exact masses: an approximation never decides.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.select.approximate import ERROR, block_sums, bounds, rounding
from vocab_parallel.select.keys import ids_of, keys_of, values_of
from vocab_parallel.select.masses import BLOCK, Masses, blocks_of, exp, mass_bits, masses_of
from vocab_parallel.select.scores import Bounds, Scores
from vocab_parallel.select.support import largest_of

_CODE_BITS = 27  # of a sum in 32 bits, below the 5 of its exponent
_UNDECIDED = -1


def tokens(scores: Scores, draws: list[int]) -> list[int]:
    """The token of each row at its number of `[0, 2**62)`: that of `draw`.

    Args:
        scores: float32, spread over ranks, on a CPU, where errors are not deferred.

    Collectives:
        An all-gather of 8 bytes a row, unless it is known what the ranks' columns weigh. Then, if all rows fall to one
        rank, its broadcast of 8 bytes a row, else an all-gather of as many. For a row that is not decided then: a
        gather of 8 bytes to the rank it falls to, unless that was not clear, in which case the exchange before had
        them; and a broadcast of 8.

    Raises:
        NonFiniteError: On every rank: a row without a finite value, or with +inf or NaN.
    """
    channel, part, columns = scores.channel, None, scores.vocab_size
    if scores.sums is None:
        part = Part.of(scores.values)
        gathered = channel.gather_words(part.words())
        each = list(zip(*(values_of(words) for words in gathered), strict=True))  # of each row, the ranks' peaks
        peaks = [max(of_ranks) for of_ranks in each]
        if not all(-math.inf < one < math.inf for one in peaks) or any(math.isnan(one) for of in each for one in of):
            largest_of(scores, torch.tensor(each).t())
        codes = zip(*(ids_of(words) for words in gathered), strict=True)
        sums = [_sums(of_ranks, of_row, columns) for of_ranks, of_row in zip(each, codes, strict=True)]
    else:
        assert scores.largest is not None
        peaks, sums = scores.largest.tolist(), scores.sums
    if not draws:
        return []
    places = [place_of(draw, of_ranks, columns) for draw, of_ranks in zip(draws, sums, strict=True)]
    if part is None and any(place.owner == channel.rank for place in places):
        part = Part.of(scores.values)
    mine = [_word(scores, part, row, place, peaks[row]) for row, place in enumerate(places)]
    first = places[0].owner
    if first is not None and all(place.owner == first for place in places):
        every = [channel.tell(mine, first)] * channel.size
    else:
        every = channel.gather_words(mine)
    found = [every[place.owner or 0][row] for row, place in enumerate(places)]
    for row, place in enumerate(places):
        if place.owner is None or found[row] == _UNDECIDED:
            masses = [of_rank[row] for of_rank in every] if place.owner is None else None
            found[row] = _exactly(scores, row, peaks[row], draws[row], place.owner, masses)
    return found


def column_at(scores: Scores, masses: Masses, at: Tensor) -> Tensor:
    """int64 `[T]`: this rank's column at which its masses, added up, pass `at`; any column where they do not."""
    n = scores.values.shape[1]
    if n == 0:
        return torch.zeros_like(at)
    through = masses.blocks.to(torch.int64).cumsum(1)
    block = (through <= at[:, None]).sum(1, keepdim=True).clamp(max=through.shape[1] - 1)
    if masses.width == 1:
        return block[:, 0]
    at = at[:, None] - (through - masses.blocks.to(torch.int64)).gather(1, block)
    columns = block * masses.width + torch.arange(min(masses.width, n), device=at.device)
    values = scores.values.gather(1, columns.clamp(max=n - 1)).masked_fill(columns >= n, -torch.inf)
    through = masses_of(values, masses.largest[:, None], masses.bits).cumsum(1)
    return (block[:, 0] * masses.width + (through <= at).sum(1)).clamp(max=n - 1)


class Place(NamedTuple):
    """Where a draw falls.

    Attributes:
        owner: The rank on which it surely does; None if that is not one rank.
        low, high: Of the masses on that rank, in masses of the row's largest column, the interval in which it lies.
    """

    owner: int | None
    low: float = 0.0
    high: float = 0.0


def place_of(draw: int, sums: Bounds, columns: int) -> Place:
    """Where the number `draw` of `[0, 2**62)` falls. The same on every rank.

    Args:
        sums: Of the ranks.
        columns: Of all ranks together.
    """
    part = draw * 2.0**-62
    at_low, at_high = max(0.0, part * sum(sums.low) - rounding(columns)), part * sum(sums.high)
    before_low = before_high = 0.0
    for rank, (least, most) in enumerate(zip(*sums, strict=True)):
        if most and before_high <= at_low and at_high < before_low + least:
            return Place(rank, at_low - before_high, at_high - before_low)
        before_low, before_high = before_low + least, before_high + most
    return Place(None)


class Part(NamedTuple):
    """This rank's columns.

    Attributes:
        values: `[T, n]`.
        peaks: `[T]`, their largest values, with NaN above all; -inf for an empty row.
        blocks: Approximate masses below these by 256 columns, `[T, ceil(n / 256)]`.
    """

    values: Tensor
    peaks: list[float]
    blocks: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Part:
        peaks = values.amax(1) if values.shape[1] else values.new_full((len(values),), -torch.inf)
        return cls(values, peaks.tolist(), block_sums(values, peaks))

    def words(self) -> list[int]:
        """A key for each row: its peak, and in place of an id its mass."""
        return keys_of(self.peaks, [_code(mass) for mass in self.blocks.sum(1).tolist()])

    def column(self, row: int, place: Place, peak: float, columns: int) -> int | None:
        """The column at which the masses, added up, pass what lies in the interval; None if that is not one column.

        Args:
            peak: The row's largest value on any rank.
            columns: Of all ranks together.
        """
        scale, slack = exp(self.peaks[row] - peak), rounding(columns)
        low = (place.low * (1.0 - ERROR) - slack) / scale
        high = (place.high * (1.0 + ERROR) + slack) / scale
        through = list(accumulate(self.blocks[row].tolist()))
        block = bisect_right(through, low)
        if block == len(through) or through[block] <= high:
            return None
        before = through[block - 1] if block else 0.0
        values = self.values[row, block * BLOCK : (block + 1) * BLOCK]
        through = list(accumulate(values.double().sub_(self.peaks[row]).exp_().tolist(), initial=before))[1:]
        column = bisect_right(through, low)
        return block * BLOCK + column if column < len(through) and through[column] > high else None


def _word(scores: Scores, part: Part | None, row: int, place: Place, peak: float) -> int:
    """What this rank says of a row: its token if that falls here; its exact mass if nobody knows where it falls."""
    if place.owner is None:
        return int(_exact(scores, row, peak).total)
    if place.owner != scores.channel.rank:
        return 0
    assert part is not None
    column = part.column(row, place, peak, scores.vocab_size)
    return _UNDECIDED if column is None else _first_id(scores) + column


def _first_id(scores: Scores) -> int:
    return int(scores.token_ids[0]) if scores.first_id is None else scores.first_id


def _exact(scores: Scores, row: int, peak: float) -> Masses:
    """The exact masses of this rank's columns of a row, as if it held all columns."""
    largest = torch.tensor([peak], dtype=scores.values.dtype)
    blocks, width = blocks_of(scores.at(torch.tensor([row])), largest)
    total = blocks.to(torch.int64).sum(1)
    return Masses(largest, mass_bits(scores.vocab_size), total[None], total, blocks, width)


def _exactly(scores: Scores, row: int, peak: float, draw: int, owner: int | None, masses: list[int] | None) -> int:
    """The token of a row by its exact masses, which every rank has, or is yet to tell the owner."""
    channel, mine = scores.channel, _exact(scores, row, peak)
    if owner is not None:
        gathered = channel.tell_one([int(mine.total)], owner)
        masses = None if gathered is None else [of_rank[0] for of_rank in gathered]
    column = 0
    if masses is not None:
        at, place = draw * sum(masses) >> 62, 0
        while at >= masses[place]:
            at, place = at - masses[place], place + 1
        owner = place
        if owner == channel.rank:
            column = int(column_at(scores.at(torch.tensor([row])), mine, torch.tensor([at])))
            column += _first_id(scores)
    assert owner is not None
    return channel.tell([column], owner)[0]


def _sums(peaks: Sequence[float], codes: Sequence[int], columns: int) -> Bounds:
    """What the ranks' columns of a row weigh, by what they have told."""
    peak, known = max(peaks), [_decoded(code) for code in codes]
    scales = [exp(one - peak) for one in peaks]
    low, high = ([scale * one for scale, one in zip(scales, side, strict=True)] for side in zip(*known, strict=True))
    return Bounds(bounds(low, columns).low, bounds(high, columns).high)


def _code(mass: float) -> int:
    """32 bits of a sum of 1 to 2**31: below the sum by less than 2**-27 of it. 0 for an empty row, or one of NaN."""
    if not 0.5 <= mass < 2.0**31:
        return 0
    part, exponent = math.frexp(mass)  # part in [1/2, 1)
    return exponent << _CODE_BITS | int((part - 0.5) * 2.0 ** (_CODE_BITS + 1))


def _decoded(code: int) -> tuple[float, float]:
    """The interval of sums that have this code."""
    if code == 0:
        return 0.0, 0.0
    part = 0.5 + (code & (1 << _CODE_BITS) - 1) * 2.0 ** -(_CODE_BITS + 1)
    exponent = code >> _CODE_BITS
    return math.ldexp(part, exponent), math.ldexp(part + 2.0 ** -(_CODE_BITS + 1), exponent)
