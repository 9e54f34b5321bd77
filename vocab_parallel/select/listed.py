"""The runs of all ranks' columns, as each rank knows them, and where the best of all columns reach a mass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.select.approximate import bounds
from vocab_parallel.select.masses import mass_bits, masses_of
from vocab_parallel.select.order import by_rank
from vocab_parallel.select.scores import Bounds, Scores


class Found(NamedTuple):
    """Where the best columns reach a mass.

    Attributes:
        sure: Of each row. What else is said of it holds if this does.
        before: int64 `[T, 1]`: how many of the listed columns come before the last.
        last, last_id: `[T, 1]`, the last column.
        over: Whether the columns above runs are among them.
    """

    sure: list[bool]
    over: list[bool]
    before: Tensor
    last: Tensor
    last_id: Tensor

    def mask(self, scores: Scores) -> Tensor:
        """Bool `[T, n]`: this rank's columns down to the last."""
        return down_to(scores, self.last, self.last_id)


class Listed(NamedTuple):
    """The columns in the runs of all ranks.

    Attributes:
        values, token_ids: `[T, size * k]`, rank after rank.
        of_each: k.
        order: int64 `[T, size * k]`: the place of the best, the second, ..
        over: Of each row, what the ranks' columns above their runs weigh, in masses of the row's largest.
        peaks: Of each row, the largest value of a rank whose run has columns above it; infinity if not known.
        masses, through: int64 `[T, size * k]`: what columns weigh, from the best on, and added up.
    """

    values: Tensor
    token_ids: Tensor
    of_each: int
    order: Tensor
    over: list[Bounds]
    peaks: list[float]
    masses: Tensor
    through: Tensor

    @classmethod
    def of(cls, scores: Scores, gathered: Tensor, over: list[Bounds], peaks: list[float]) -> Listed:
        """From the ranks' `best_columns` `[size, planes, T, k]`; the scores know their largest."""
        assert scores.largest is not None
        values, token_ids, order = by_rank(gathered, scores.vocab_size)
        masses = masses_of(values.gather(1, order), scores.largest[:, None], mass_bits(scores.vocab_size))
        return cls(values, token_ids, gathered.shape[-1], order, over, peaks, masses, masses.cumsum(1))

    def reaching(self, scores: Scores, wanted: list[tuple[int, int]]) -> Found:
        """Where the best columns reach a mass between two bounds, in each row."""
        width, k, unit = self.values.shape[1], self.of_each, 2.0 ** mass_bits(scores.vocab_size)
        bounds_ = [
            (low, high, low - int(sum(over.high) * unit) - 1, high - int(sum(over.low) * unit))
            for (low, high), over in zip(wanted, self.over, strict=True)
        ]
        reached = torch.searchsorted(self.through, torch.tensor(bounds_).view(-1, 4)).clamp_(max=width)
        places = torch.empty_like(self.order).scatter_(1, self.order, torch.arange(width).expand_as(self.order))
        starts, ends, last = places[:, ::k], places[:, k - 1 :: k], self.values[:, k - 1 :: k]
        near = self.values.gather(1, self.order.gather(1, reached[:, :1].clamp(max=width - 1)))[:, 0]
        each = zip(
            *(bounds_, self.over, self.peaks, reached.tolist(), near.tolist()),
            *(starts.tolist(), ends.tolist(), last.tolist()),
            strict=True,
        )
        sure, over_, before = [], [], []
        for bound, over, peak, (low, high, low_below, high_below), value, first, end, lowest in each:
            # below a run's last column lie others, which may be nearer than the one looked for; and above its first
            bottom = min((one for one, of in zip(end, lowest, strict=True) if of > -math.inf), default=width - 1)
            top = max((one for one, weight in zip(first, over.high, strict=True) if weight), default=0)
            above = value <= peak if any(over.high) else False  # else no column above a run is as good
            low, high = (low_below, high_below) if above else (low, high)
            sure.append(low == high <= bottom and (not above or (bound[2] >= 1 and top <= low)))
            over_.append(above)
            before.append(min(low, width - 1))
        at = torch.tensor(before).view(-1, 1)
        place = self.order.gather(1, at)
        return Found(sure, over_, at, self.values.gather(1, place), self.token_ids.gather(1, place))

    def sums(self, found: Found, scores: Scores) -> list[Bounds]:
        """What the ranks' columns down to the last weigh, in masses of a row's largest."""
        kept = self.masses.masked_fill(torch.arange(self.masses.shape[1]) > found.before, 0)
        ranks = self.values.shape[1] // self.of_each
        of_each = torch.empty_like(kept).scatter_(1, self.order, kept).view(len(kept), ranks, self.of_each).sum(2)
        unit = 2.0 ** mass_bits(scores.vocab_size)
        weights = [bounds([mass / unit for mass in of_ranks], scores.vocab_size) for of_ranks in of_each.tolist()]
        each = zip(weights, self.over, found.over, strict=True)
        return [listed.plus(over) if above else listed for listed, over, above in each]

    def candidates(self, scores: Scores, found: Found) -> Scores | None:
        """The columns down to the last, as candidates that every rank holds; None where it does not."""
        if not all(found.sure) or any(found.over):
            return None
        width = max(found.before[:, 0].tolist(), default=0) + 1
        order, out = self.order[:, :width], torch.arange(width) > found.before
        token_ids, at = self.token_ids.gather(1, order).masked_fill(out, scores.vocab_size).sort(dim=1)
        values = self.values.gather(1, order).masked_fill(out, -torch.inf).gather(1, at)
        masses = self.masses[:, :width].masked_fill(out, 0).gather(1, at).double()
        return replace(
            scores, values=values, token_ids=token_ids, channel=scores.channel.alone(), first_id=None, masses=masses
        )

    def next_start(
        self, scores: Scores, own: list[list[float]], wanted: list[tuple[int, int]], p: list[float], more: int
    ) -> list[float]:
        """From where down each rank should list `more` columns of each row; infinity is from the top.

        From the top, if these may reach what is wanted. Else from the highest of the values at which the ranks' columns
        reach a part p of their own masses: above it less than that part of all can lie.

        Args:
            own: Of each row, the ranks' masses, approximately.
        """
        rows, k, unit = len(self.values), self.of_each, 2.0 ** mass_bits(scores.vocab_size)
        best, last = self.through[:, k - 1].tolist(), self.masses[:, k - 1].tolist()
        many = self.values.shape[1] // k * more
        from_top = [
            not any(over.high) and reached + one * many >= low
            for over, reached, one, (low, _) in zip(self.over, best, last, wanted, strict=True)
        ]
        masses = torch.empty_like(self.masses).scatter_(1, self.order, self.masses).view(rows, -1, k)
        left = torch.tensor(own, dtype=torch.float64) * torch.tensor(p, dtype=torch.float64)[:, None]
        left = left - torch.tensor([over.low for over in self.over], dtype=torch.float64)
        count = (masses.cumsum(2).double() / unit < left[..., None]).sum(2, keepdim=True).clamp(max=k - 1)
        cuts = self.values.view(rows, -1, k).gather(2, count)[..., 0].amax(1).tolist()
        return [math.inf if top else cut for top, cut in zip(from_top, cuts, strict=True)]


def down_to(scores: Scores, last: Tensor, last_id: Tensor) -> Tensor:
    """Bool `[T, n]`: the columns down to the values `last` `[T, 1]`, and at them to the ids `last_id`."""
    return (scores.values > last) | (scores.values == last) & (scores.token_ids <= last_id)
