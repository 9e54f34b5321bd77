"""Top-p and draws among a few candidates that every rank holds, in Python's floats.

As in `position`, what is approximate has bounds; where they matter, None, and the caller takes the exact way.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import accumulate

import torch

from vocab_parallel.select.approximate import ERROR, rounding
from vocab_parallel.select.keys import floats, ids_of, values_of
from vocab_parallel.select.masses import CLOSE
from vocab_parallel.select.order import FEW_ROWS
from vocab_parallel.select.scores import FEW_KEYS, Scores

_ERROR = 4.0 * ERROR  # of a sum beside another one, each off by at most `ERROR` of itself


def is_few(scores: Scores) -> bool:
    """Whether these are such candidates, of rows with a finite largest value."""
    values = scores.values
    if not scores.replicated or scores.largest is None or len(values) > FEW_ROWS or values.numel() > 2 * FEW_KEYS:
        return False
    if values.device.type != "cpu" or values.dtype == torch.float64 or scores.channel.group.defers(values.device):
        return False
    return all(-math.inf < one < math.inf for one in scores.largest.tolist())


def tokens_of_best(
    rows: list[list[int]], k: list[int], p: list[float], draws: list[int], vocab_size: int
) -> list[int] | None:
    """The token of each row at its number of `[0, 2**62)`, among the nucleus of its best k.

    Args:
        rows: Keys, the best first: k or more.
    """
    slack, found = rounding(vocab_size), []
    for keys, count, part, draw in zip(rows, k, p, draws, strict=True):
        values = values_of(keys[:count])
        peak = values[0]
        if not -math.inf < peak < math.inf:
            return None
        terms = [math.exp(value - peak) for value in values]
        if part < 1.0:
            count = _reached(list(accumulate(terms)), part, slack) + 1
            if count == 0:
                return None
        inside = sorted(zip(ids_of(keys[:count]), terms, strict=False))
        place = _drawn(list(accumulate([term for _, term in inside])), draw, slack)
        if place is None:
            return None
        found.append(inside[place][0])
    return found


def nucleus_of(scores: Scores, p: list[float]) -> Scores | None:
    """As `filters.keep_top_p`."""
    slack, rows = rounding(scores.vocab_size), scores.values.tolist()
    for values, part in zip(rows, p, strict=True):
        if part < 1.0:
            # ids ascend, and those of equal values stay so
            order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
            peak = values[order[0]]
            through = list(accumulate([math.exp(values[at] - peak) for at in order]))
            last = _reached(through, part, slack)
            if last < 0:
                return None
            for at in order[last + 1 :]:
                values[at] = -math.inf
    values = floats([value for row in rows for value in row]).view(scores.values.shape)
    return replace(scores, values=values, masses=None, sums=None)


def tokens_of(scores: Scores, draws: list[int]) -> list[int] | None:
    """As `position.tokens`."""
    slack, found = rounding(scores.vocab_size), []
    for values, token_ids, draw in zip(scores.values.tolist(), scores.token_ids.tolist(), draws, strict=True):
        peak = max(values)
        through = list(accumulate([math.exp(value - peak) for value in values]))
        column = _drawn(through, draw, slack)
        if column is None:
            return None
        found.append(token_ids[column])
    return found


def _reached(through: list[float], part: float, slack: float) -> int:
    """The first place at which sums, the best column's first, reach a part of the last; -1 if that is not clear."""
    wanted = through[-1] * (part - min(part, 1.0 - part) * CLOSE)
    place = bisect_left(through, wanted * (1.0 - _ERROR) - slack)
    return place if bisect_left(through, wanted * (1.0 + _ERROR) + slack) == place else -1


def _drawn(through: list[float], draw: int, slack: float) -> int | None:
    """The place at which sums in the order of ids pass a draw; None if that is not clear."""
    at = draw * 2.0**-62 * through[-1]
    place = bisect_right(through, max(0.0, at * (1.0 - _ERROR) - slack))
    clear = place < len(through) and bisect_right(through, at * (1.0 + _ERROR) + slack) == place
    return place if clear else None
