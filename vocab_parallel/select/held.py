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
from vocab_parallel.select.keys import floats
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


def nucleus_of(scores: Scores, p: list[float]) -> Scores | None:
    """As `filters.keep_top_p`."""
    slack, rows = rounding(scores.vocab_size), scores.values.tolist()
    for values, part in zip(rows, p, strict=True):
        if part < 1.0:
            order = sorted(
                range(len(values)), key=values.__getitem__, reverse=True
            )  # ids ascend, and equal ones stay so
            peak = values[order[0]]
            through = list(accumulate([math.exp(values[at] - peak) for at in order]))
            wanted = through[-1] * (part - min(part, 1.0 - part) * CLOSE)
            last = bisect_left(through, wanted * (1.0 - _ERROR) - slack)
            if bisect_left(through, wanted * (1.0 + _ERROR) + slack) != last:
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
        at = draw * 2.0**-62 * through[-1]
        column = bisect_right(through, max(0.0, at * (1.0 - _ERROR) - slack))
        if bisect_right(through, at * (1.0 + _ERROR) + slack) != column or column == len(through):
            return None
        found.append(token_ids[column])
    return found
