"""Temperature and the truncations that samplers share: `Scores` to `Scores`.

Their parameters `[T]` lie on the CPU: what to exchange is decided on the host, the same on every rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vocab_parallel.select.masses import CLOSE, measure
from vocab_parallel.select.prefix import smallest_prefix
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
        best = best.keep(_ranks(best) < k.to(best.values.device)[:, None])
    if len(limits) == len(wanted) and most <= MAX_CANDIDATES:
        return best
    last = torch.where(best.values == -torch.inf, torch.inf, best.values).amin(1)
    last_id = torch.where(best.values == last[:, None], best.token_ids, -1).amax(1)
    tie = (scores.values == last[:, None]) & (scores.token_ids <= last_id[:, None])
    off = (k >= scores.vocab_size).to(tie.device)
    scores = replace(scores, largest=best.largest, peak=best.peak)
    return scores.keep((scores.values > last[:, None]) | tie | off[:, None])


def keep_top_p(
    scores: Scores,
    p: Tensor,  # float64 [T], in (0, 1]
) -> Scores:
    """The smallest prefix of the total order with a mass of p, the column that crosses p among it; 1 leaves a row.

    A prefix whose mass is below p by less than 2**-20 of min(p, 1 - p) has reached it.

    Collectives:
        The peak's unless it is known; one all-gather of 8 bytes a row and 8 of 128 (16 for float64).

    Source: Holtzman et al., The curious case of neural text degeneration (2020), equation 2.
    """
    scores, p = with_largest(scores), p.to(scores.values.device)
    masses = measure(scores)
    target = reach(masses.total, p)
    mask = smallest_prefix(scores, scores.values, masses, target, by_value=True)
    return scores.keep(mask | (p >= 1.0)[:, None])


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


def reach(total: Tensor, p: Tensor) -> Tensor:
    """int64 `[T]`: the mass at which a part p of `total` is reached."""
    wanted = total.double() * (p - torch.minimum(p, 1.0 - p) * CLOSE)
    return torch.minimum(wanted.to(torch.int64).clamp(min=1), total)


def _ranks(scores: Scores) -> Tensor:
    """int64 `[T, K]`: the places of candidates in the total order; ids ascend, so equal values keep theirs."""
    return scores.values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
