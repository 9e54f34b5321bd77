"""Truncations beyond top-k, top-p and min-p: which columns of a row stay, decided by exact quantities of the row.

Entropy, normalizer, support and spread come from integer sums over all ranks (`select.masses`), so every rank decides
the same, at every TP size. A column within one part in 2**20 of a threshold counts as reaching it. Parameters `[T]`
may lie on the CPU, as those of `select.filters`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vocab_parallel.select.crossing import reach
from vocab_parallel.select.masses import CLOSE, Masses, measure, value_spread
from vocab_parallel.select.prefix import smallest_prefix
from vocab_parallel.select.scores import Scores, with_largest, with_peak

_LN2 = math.log(2.0)


def keep_typical(
    scores: Scores,
    p: Tensor,  # float64 [T], in (0, 1]
) -> Scores:
    """Keeps the tokens whose surprise is nearest to the row's entropy: the smallest set of them with a mass of p.

    Tokens are ranked by `|-log p_v - H|` ascending, compared as float32, then by id ascending; the one that crosses p
    stays. A mass that falls short of p by less than 2**-20 of min(p, 1 - p) has reached it. The most likely token may
    go. `p == 1` leaves a row as it is.

    Collectives:
        Those of `measure` with moments, 8 (unless known) and 32 bytes a row, and of `smallest_prefix`. None if p is 1
        in all rows.

    Source:
        Meister et al., Locally typical sampling (2023), section 4.
    """
    if bool((p >= 1.0).all()):
        return scores
    scores = with_largest(scores)
    masses, p = measure(scores, moments=True), p.to(scores.values.device)
    # -log p = gap + log Z and H = mean gap + log Z: the normalizer cancels
    order = -(_gaps(scores, masses.largest) - masses.mean_gap[:, None]).abs()
    kept = smallest_prefix(scores, order.to(torch.float32), masses, reach(masses.total, p))
    return scores.keep(kept | (p >= 1.0)[:, None], keeps_peak=False)


def keep_epsilon(
    scores: Scores,
    epsilon: Tensor,  # float64 [T], in [0, 1]
) -> Scores:
    """Keeps the tokens with a probability of at least epsilon, and those as likely as the best; 0 leaves a row.

    Collectives:
        Those of `measure`: 8 (unless known) and 8 bytes a row. None if epsilon is 0 in all rows.

    Source:
        Hewitt et al., Truncation sampling as language model desmoothing (2022), section 4.1.
    """
    if bool((epsilon == 0.0).all()):
        return scores
    scores = with_largest(scores)
    return _keep_floor(scores, measure(scores), epsilon.to(scores.values.device).log())


def keep_eta(
    scores: Scores,
    epsilon: Tensor,  # float64 [T], in [0, 1]
) -> Scores:
    """Keeps the tokens with a probability of at least `min(epsilon, sqrt(epsilon) exp(-H))`, and those like the best.

    H is the row's entropy in nats: a flat row lowers the floor. 0 leaves a row as it is.

    Collectives:
        Those of `measure` with moments: 8 (unless known) and 32 bytes a row. None if epsilon is 0 in all rows.

    Source:
        Hewitt et al., Truncation sampling as language model desmoothing (2022), section 4.2 with alpha = sqrt(epsilon);
        equality, and that the best token stays, as in Transformers' `EtaLogitsWarper`.
    """
    if bool((epsilon == 0.0).all()):
        return scores
    scores = with_largest(scores)
    masses, log_epsilon = measure(scores, moments=True), epsilon.to(scores.values.device).log()
    return _keep_floor(scores, masses, torch.minimum(log_epsilon, log_epsilon / 2 - masses.entropy))


def keep_top_n_sigma(
    scores: Scores,
    n: Tensor,  # float64 [T], at least 0
) -> Scores:
    """Keeps the scores of at least `max - n sigma`, sigma being the standard deviation of the row's finite scores.

    `n sigma` is taken one part in 2**20 larger. Dividing the scores by a temperature, or adding a constant to them,
    changes nothing. `n == inf` leaves a row as it is.

    Collectives:
        The peak's, 8 bytes a row, unless it is known; 16 and 24 bytes a row. None if n is inf in all rows.

    Source:
        Tang et al., Top-n-sigma: not all logits are you need (2024), equation 3.
    """
    if bool(n.isinf().all()):
        return scores
    scores, n = with_largest(scores), n.to(scores.values.device)
    assert scores.largest is not None
    limit = torch.where(n.isinf(), torch.inf, n * value_spread(scores) * (1.0 + CLOSE))
    return scores.keep(_gaps(scores, scores.largest) <= limit[:, None])


def keep_surprise(
    scores: Scores,
    mu: Tensor,  # float64 [T], bits
) -> Scores:
    """Keeps the tokens with a surprise `-log2 p_v` of at most mu bits, and the first of the total order.

    Collectives:
        The peak's, 8 bytes a row, unless it is known; 8 bytes a row.

    Source:
        Basu et al., Mirostat (2021), with the truncation of llama.cpp's `mirostat_v2`.
    """
    scores = with_peak(scores)
    assert scores.peak is not None
    masses = measure(scores)
    kept = _gaps(scores, masses.largest) <= _gap_at(masses, mu.to(scores.values.device) * -_LN2)[:, None]
    return scores.keep(kept | (scores.token_ids == scores.peak.token_ids[:, None]))


def entropy_temperature(
    scores: Scores,
    low: Tensor,  # float64 [T]
    high: Tensor,  # float64 [T]
    exponent: Tensor,  # float64 [T]
) -> Tensor:
    """The temperature `low + (high - low) (H / log n)**exponent` of each row, n being its support size.

    Returns:
        float64 `[T]`, rounded to float32, the same on every rank. 1 in a row of one token: none changes that.

    Collectives:
        Those of `measure` with moments: 8 (unless known) and 32 bytes a row.

    Source:
        The entropy-based dynamic temperature of llama.cpp's sampler `temp_ext`.
    """
    masses = measure(scores, moments=True)
    assert masses.support is not None
    low, high, exponent = (one.to(masses.total.device) for one in (low, high, exponent))
    share = (masses.entropy / masses.support.double().clamp(min=2.0).log()).clamp(0.0, 1.0)
    temperature = torch.where(masses.support > 1, low + (high - low) * share**exponent, 1.0)
    return temperature.to(torch.float32).double()  # `pow` may give another last bit at another place in a batch


def _keep_floor(scores: Scores, masses: Masses, log_floor: Tensor) -> Scores:
    """Keeps `log p >= log_floor` `[T]` in nats, and the columns equal to the row's best."""
    limit = _gap_at(masses, log_floor).clamp(min=0.0)
    return scores.keep(_gaps(scores, masses.largest) <= limit[:, None])


def _gap_at(masses: Masses, log_floor: Tensor) -> Tensor:
    """float64 `[T]`: the gap below the largest value where `log p` is `log_floor`, one part in 2**20 of p further.

    In gaps a floor far below the unit of the masses still decides exactly.
    """
    return -log_floor - masses.log_total - math.log1p(-CLOSE)


def _gaps(scores: Scores, largest: Tensor) -> Tensor:
    """float64 `[T, n]`: how far each value lies below its row's largest, in nats; inf outside the support."""
    return largest.double()[:, None] - scores.values.double()
