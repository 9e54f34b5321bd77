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
    """

    sure: list[bool]
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
        masses, through: int64 `[T, size * k]`: what columns weigh, from the best on, and added up.
    """

    values: Tensor
    token_ids: Tensor
    of_each: int
    order: Tensor
    over: list[Bounds]
    masses: Tensor
    through: Tensor

    @classmethod
    def of(cls, scores: Scores, gathered: Tensor, over: list[Bounds]) -> Listed:
        """From the ranks' `best_columns` `[size, planes, T, k]`; the scores know their largest."""
        assert scores.largest is not None
        values, token_ids, order = by_rank(gathered, scores.vocab_size)
        masses = masses_of(values.gather(1, order), scores.largest[:, None], mass_bits(scores.vocab_size))
        return cls(values, token_ids, gathered.shape[-1], order, over, masses, masses.cumsum(1))

    def reaching(self, scores: Scores, wanted: list[tuple[int, int]]) -> Found:
        """Where the best columns reach a mass between two bounds, in each row."""
        width, k, unit = self.values.shape[1], self.of_each, 2.0 ** mass_bits(scores.vocab_size)
        left = [
            (low - int(sum(over.high) * unit) - 1, high - int(sum(over.low) * unit))
            for (low, high), over in zip(wanted, self.over, strict=True)
        ]
        reached = torch.searchsorted(self.through, torch.tensor(left).view(-1, 2))
        places = torch.empty_like(self.order).scatter_(1, self.order, torch.arange(width).expand_as(self.order))
        starts, ends, last = places[:, ::k], places[:, k - 1 :: k], self.values[:, k - 1 :: k]
        each = zip(left, reached.tolist(), starts.tolist(), ends.tolist(), last.tolist(), self.over, strict=True)
        sure = []
        for (least, _), (low, high), first, end, value, over in each:
            # above a run's first column lie others, and below its last: neither may be nearer than the one looked for
            top = max((one for one, weight in zip(first, over.high, strict=True) if weight), default=0)
            bottom = min((one for one, of in zip(end, value, strict=True) if of > -math.inf), default=width - 1)
            sure.append(least >= 1 and low == high and top <= low <= bottom)
        before = reached[:, :1].clamp(max=width - 1)
        place = self.order.gather(1, before)
        return Found(sure, before, self.values.gather(1, place), self.token_ids.gather(1, place))

    def sums(self, found: Found, scores: Scores) -> list[Bounds]:
        """What the ranks' columns down to the last weigh, in masses of a row's largest."""
        kept = self.masses.masked_fill(torch.arange(self.masses.shape[1]) > found.before, 0)
        ranks = self.values.shape[1] // self.of_each
        of_each = torch.empty_like(kept).scatter_(1, self.order, kept).view(len(kept), ranks, self.of_each).sum(2)
        unit = 2.0 ** mass_bits(scores.vocab_size)
        return [
            bounds([mass / unit for mass in of_ranks], scores.vocab_size).plus(over)
            for of_ranks, over in zip(of_each.tolist(), self.over, strict=True)
        ]

    def candidates(self, scores: Scores, found: Found) -> Scores | None:
        """The columns down to the last, as candidates that every rank holds; None where it does not."""
        if not all(found.sure) or any(any(over.high) for over in self.over):
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
