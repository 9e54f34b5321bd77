"""Where the best columns of each row, added up, reach a part of its mass: the nucleus, over shards.

Each rank lists a run of its columns in the total order, and says what they and the columns above them weigh. The run
is its best columns, if these may hold the part. If they cannot, it is the columns around the one at which this rank's
own columns reach the part of their mass: the row's last is near. Mostly that settles a row. If not, longer runs follow,
then the search of `prefix`. What is approximate has bounds and decides nothing within them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.select.approximate import bounds
from vocab_parallel.select.listed import Listed
from vocab_parallel.select.masses import CLOSE, Masses, exp, mass_bits, measure, with_masses
from vocab_parallel.select.prefix import smallest_prefix
from vocab_parallel.select.runs import first_runs, next_runs
from vocab_parallel.select.scores import FEW_KEYS, Bounds, Scores, may_use_words, with_largest
from vocab_parallel.select.support import largest_of

# Columns of a rank's first run; and of the next one the part of all its columns, which with the search after it is less
# than a gather of bfloat16. Fewer than the least are not worth an exchange.
_FEW, _BEST, _SHARE, _LEAST, _MOST = 64, 128, 16, 256, 1024


class Crossing(NamedTuple):
    """The nucleus of each row.

    Attributes:
        scores: All columns, knowing their largest.
        mask: Bool `[T, n]`: this rank's columns that are in it; None if `every` has them and no mask was wanted.
        sums: What each rank's columns in it weigh, row by row, if known.
        every: The columns in it, if every rank holds them all.
        masses: Of `scores`, if measured.
    """

    scores: Scores
    mask: Tensor | None
    sums: list[Bounds] | None = None
    every: Scores | None = None
    masses: Masses | None = None


def crossing(scores: Scores, p: Tensor, *, masked: bool = False) -> Crossing:
    """The smallest prefix of each row's total order with a mass of p `[T]`, in (0, 1]; 1 takes all columns.

    Args:
        masked: The mask is wanted in any case.

    Collectives:
        Those of `filters.keep_top_p`.
    """
    p = p.to(scores.values.device)
    size = scores.channel.size
    if size == 1 or p.device.type != "cpu" or scores.channel.group.defers(p.device):
        scores = with_masses(with_largest(scores))
        masses = measure(scores)
        inside = smallest_prefix(scores, scores.values, masses, reach(masses.total, p), by_value=True)
        return Crossing(scores, inside | (p >= 1.0)[:, None], masses=masses)

    more = min(_MOST, scores.vocab_size // size // _SHARE)
    more = more if more >= _LEAST else 0
    parts = p.tolist()
    scores, listed, weights = _first(scores, p, min(_BEST if more else _FEW, scores.vocab_size))
    sums = [bounds(of_ranks, scores.vocab_size) for of_ranks in weights]
    wanted = [_reach(of_ranks, part, scores.vocab_size) for of_ranks, part in zip(sums, parts, strict=True)]
    found = listed.reaching(scores, wanted)
    rows = [row for row, part in enumerate(parts) if part < 1.0 and not found.sure[row]]
    every = listed.candidates(scores, found) if max(parts, default=1.0) < 1.0 else None
    if every is not None and not masked:
        return Crossing(scores, None, every=every)

    mask: Tensor | None = None
    if len(rows) < scores.rows or not rows:
        mask = found.mask(scores) | (p >= 1.0)[:, None]
        for row, of_ranks in enumerate(listed.sums(found, scores)):
            sums[row] = of_ranks if parts[row] < 1.0 else sums[row]
    if rows and more:
        start = listed.next_start(scores, weights, wanted, parts, more)
        at = torch.tensor(rows)
        part = scores if len(rows) == scores.rows else scores.at(at)
        listed = _next(part, [start[row] for row in rows], [weights[row] for row in rows], more)
        found = listed.reaching(part, [wanted[row] for row in rows])
        mask = _put(found.mask(part), at, mask)
        for row, of_ranks in zip(rows, listed.sums(found, part), strict=True):
            sums[row] = of_ranks
        every = listed.candidates(part, found) if len(rows) == scores.rows else None
        rows = [row for row, sure in zip(rows, found.sure, strict=True) if not sure]
    if not rows:
        return Crossing(scores, mask, sums, every)
    at = torch.tensor(rows)
    part = scores.at(at)
    masses = measure(part)
    inside = smallest_prefix(part, part.values, masses, reach(masses.total, p[at]), by_value=True)
    return Crossing(scores, _put(inside, at, mask))


def reach(total: Tensor, p: Tensor) -> Tensor:
    """int64 `[T]`: the mass at which a part p of `total` is reached."""
    wanted = total.double() * (p - torch.minimum(p, 1.0 - p) * CLOSE)
    return torch.minimum(wanted.to(torch.int64).clamp(min=1), total)


def _reach(sums: Bounds, p: float, columns: int) -> tuple[int, int]:
    """Bounds of `reach`, given those of the ranks' masses."""
    part = (p - min(p, 1.0 - p) * CLOSE) * 2.0 ** mass_bits(columns)
    return max(1, int(sum(sums.low) * part) - 1), int(sum(sums.high) * part) + 2


def _put(part: Tensor, rows: Tensor, whole: Tensor | None) -> Tensor:
    """`part`, the mask of some rows, in that of all; these are all if there is none yet."""
    if whole is None or len(rows) == len(whole):
        return part
    whole[rows] = part
    return whole


def _first(scores: Scores, p: Tensor, k: int) -> tuple[Scores, Listed, list[list[float]]]:
    """The scores, knowing their largest; the ranks' first runs; and of each row what the ranks' columns weigh.

    The last approximately, in masses of the row's largest column. One all-gather.
    """
    runs = first_runs(scores, p, k)
    gathered, told = _gather(scores, runs.keys, torch.stack([runs.mass, runs.over, runs.peaks]))
    mass, over, peaks = told.unbind(1)  # [size, T] each
    scores = replace(scores, largest=largest_of(scores, peaks))
    assert scores.largest is not None
    weights, above, tops = [], [], []
    for one, run, values, best in zip(
        *(each.t().tolist() for each in (mass, over, peaks)), scores.largest.tolist(), strict=True
    ):
        scales = [exp(value - best) for value in values]
        weights.append([weight * scale for weight, scale in zip(one, scales, strict=True)])
        above.append(bounds([weight * scale for weight, scale in zip(run, scales, strict=True)], scores.vocab_size))
        tops.append(max((value for value, weight in zip(values, run, strict=True) if weight), default=-math.inf))
    return scores, Listed.of(scores, gathered, above, tops), weights


def _next(scores: Scores, start: list[float], weights: list[list[float]], more: int) -> Listed:
    """The ranks' next runs, from `start` down. One all-gather."""
    more = more if math.inf in start else more // 2  # from a cut down half as many reach far enough
    keys, over = next_runs(scores, start, [of_ranks[scores.channel.rank] for of_ranks in weights], more)
    gathered, told = _gather(scores, keys, torch.tensor([over], dtype=torch.float64))
    above = [bounds(of_ranks, scores.vocab_size) for of_ranks in told[:, 0].t().tolist()]
    return Listed.of(scores, gathered, above, [math.inf] * len(above))


def _gather(scores: Scores, keys: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
    """The ranks' `best_columns` `[planes, T, k]` and float64 numbers `[m, T]`. One all-gather."""
    words = torch.cat([keys.flatten(), told.view(torch.int64).flatten()])
    if may_use_words(scores) and len(words) <= FEW_KEYS:
        every = torch.tensor(scores.channel.gather_words(words.tolist()))
    else:
        every = scores.channel.gather(words)
    listed, numbers = every[:, : keys.numel()], every[:, keys.numel() :].contiguous().view(torch.float64)
    return listed.reshape(len(every), *keys.shape), numbers.view(len(every), *told.shape)
