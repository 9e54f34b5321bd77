"""Temperature and the truncations that samplers share: `Scores` to `Scores`.

Their parameters `[T]` lie on the CPU: what to exchange is decided on the host, the same on every rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vocab_parallel.select.crossing import crossing
from vocab_parallel.select.held import is_few, nucleus_of
from vocab_parallel.select.listed import down_to
from vocab_parallel.select.masses import CLOSE
from vocab_parallel.select.scores import Scores, peak_of, top_candidates, with_largest

MIN_TEMPERATURE = 2.0**-64  # below it a row is greedy: a quotient would overflow, and be one-hot anyway
MAX_CANDIDATES = 1024  # of a row, that every rank takes over


def temper(
    scores: Scores,
    temperature: Tensor,  # float64 [T]
) -> Scores:
    """`value / temperature`. A row at 0 (or under 2**-64) is greedy: only its best column stays.

    Collectives:
        The peak's, 8 bytes a row, if a row is greedy and it is not known.
    """
    if bool((temperature == 1.0).all()):
        return scores
    cold = (temperature < MIN_TEMPERATURE).to(scores.values.device)
    divisor = torch.where(cold, 1.0, temperature.to(scores.values.device)).to(scores.values.dtype)
    values = scores.values / divisor[:, None]
    largest = None if scores.largest is None else scores.largest / divisor
    if bool((temperature < MIN_TEMPERATURE).any()):
        peak = peak_of(scores)
        best = scores.token_ids == peak.token_ids[:, None]
        values, largest = torch.where(cold[:, None] & ~best, -torch.inf, values), peak.values / divisor
    return scores.with_values(values, largest)  # equal quotients of different values: another id may be the best


def keep_top_k(
    scores: Scores,
    k: Tensor,  # int64 [T]
) -> Scores:
    """Exactly the best k of each row in the total order; `k >= vocab_size` leaves a row as it is.

    Returns:
        Candidates that every rank holds, if no row is left as it is and k is at most 1,024.

    Collectives:
        One all-gather of 8 bytes a row and candidate (16 for float64), as many candidates as the largest k.
    """
    wanted = k.tolist()
    limits = [one for one in wanted if one < scores.vocab_size]
    if not limits:
        return scores
    most = max(limits)
    best = top_candidates(scores, most)
    if min(limits) < most:
        places = best.values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)  # ids ascend: ties keep theirs
        best = best.keep(places < k.to(best.values.device)[:, None])
    if len(limits) == len(wanted) and most <= MAX_CANDIDATES:
        return best
    off = (k >= scores.vocab_size).to(best.values.device)
    scores = replace(scores, largest=best.largest, peak=best.peak)
    last = torch.where(best.values == -torch.inf, torch.inf, best.values).amin(1, keepdim=True)
    last_id = torch.where(best.values == last, best.token_ids, -1).amax(1, keepdim=True)
    return scores.keep(down_to(scores, last, last_id) | off[:, None])


def keep_top_p(
    scores: Scores,
    p: Tensor,  # float64 [T], in (0, 1]
) -> Scores:
    """The smallest prefix of the total order with a mass of p, the column that crosses p among it; 1 leaves a row.

    A prefix whose mass is below p by less than 2**-20 of min(p, 1 - p) has reached it.

    Returns:
        Candidates that every rank holds, if the first runs hold all rows' prefixes, or if none's and the next do.

    Collectives:
        All-gathers of 536 bytes a row, or 1,048 where a rank has n = 4,096 columns or more: a run of its columns (see
        `crossing`). For the rows that this does not settle, with so many columns, one of n / 2 + 8 bytes, at most
        8,200; and for those that are left one of 8 and those of `smallest_prefix`. float64 columns count twice. Where
        errors are deferred, and on CUDA: the peak's, the 8 and the last, for all rows.

    Source: Holtzman et al., The curious case of neural text degeneration (2020), equation 2.
    """
    if bool((p >= 1.0).all()):
        return scores
    held = nucleus_of(scores, p.tolist()) if is_few(scores) else None
    if held is not None:
        return held
    found = crossing(scores, p)
    if found.every is not None:
        return found.every
    assert found.mask is not None
    return replace(found.scores.keep(found.mask), sums=found.sums)


def keep_min_p(
    scores: Scores,
    min_p: Tensor,  # float64 [T], in [0, 1]
) -> Scores:
    """The columns with at least `min_p` times the largest probability, within 2**-20 of it; 0 leaves a row as it is.

    Collectives:
        The peak's, 8 bytes a row, unless it is known.

    Source: Nguyen et al., Min-p sampling (2024), equation 2, as a gap of log-probabilities.
    """
    scores = with_largest(scores)
    assert scores.largest is not None
    return scores.keep(
        scores.values >= (scores.largest.double() + min_p.to(scores.values.device).log() - CLOSE)[:, None]
    )
