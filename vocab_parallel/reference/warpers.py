"""The oracle of warpers and controllers: whole rows `[T, V]`, float64 throughout.

Parameters are a number or one a row `[T]`. A threshold counts as reached within one part in 2**20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.reference.select import CLOSE, prefix, rank


def temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """`logits / T`; at T 0 only the best token stays."""
    t = per_row(temperature, logits)
    cold = t < 2.0**-64
    greedy = torch.where(top_k(logits, 1), logits, -torch.inf)
    return torch.where(cold, greedy, logits / torch.where(cold, 1.0, t))


def top_k(logits: Tensor, k: float | Tensor) -> Tensor:
    """Kept `[T, V]`: the first k by value descending, then id ascending."""
    return (rank(logits) < per_row(k, logits)) & (logits > -torch.inf)


def top_p(logits: Tensor, p: float | Tensor) -> Tensor:
    """Kept: the smallest prefix by value descending, then id ascending, whose mass reaches p."""
    return within(logits, logits, p)


def min_p(logits: Tensor, min_p: float | Tensor) -> Tensor:
    """Kept: `p_v >= min_p * max p`."""
    probability = softmax(logits)
    return (probability > 0) & (probability >= per_row(min_p, logits) * probability.amax(1, True) * (1 - CLOSE))


def typical(logits: Tensor, p: float | Tensor) -> Tensor:
    """Kept: the smallest prefix by `|-log p_v - H|` (rounded to float32) ascending, then id, whose mass reaches p."""
    surprise = -logits.double().log_softmax(1)
    return within(logits, -(surprise - entropy(logits)[:, None]).abs().float(), p)


def epsilon(logits: Tensor, epsilon: float | Tensor) -> Tensor:
    """Kept: `p_v >= epsilon`, and what is as likely as the best."""
    return floor(logits, per_row(epsilon, logits)[:, 0])


def eta(logits: Tensor, epsilon: float | Tensor) -> Tensor:
    """Kept: `p_v >= min(epsilon, sqrt(epsilon) exp(-H))`, and what is as likely as the best."""
    e = per_row(epsilon, logits)[:, 0]
    return floor(logits, torch.minimum(e, e.sqrt() * (-entropy(logits)).exp()))


def top_n_sigma(logits: Tensor, n: float | Tensor) -> Tensor:
    """Kept: `z_v >= max z - n sigma`, sigma over the finite logits of the row."""
    z = logits.double()
    sigma = torch.stack([row[row.isfinite()].std(correction=0) for row in z])[:, None]
    limit = torch.where(per_row(n, logits).isinf(), torch.inf, per_row(n, logits) * sigma * (1 + CLOSE))
    return z.isfinite() & (z.amax(1, True) - z <= limit)


def dynamic_temperature(
    logits: Tensor, low: float | Tensor, high: float | Tensor, exponent: float | Tensor = 1.0
) -> Tensor:
    """T `[T]`: `low + (high - low) (H / log support)**exponent`, as float32; 1 where one token is left."""
    support = logits.isfinite().sum(1).double()
    share = (entropy(logits) / support.clamp(min=2).log()).clamp(0, 1)
    t = [per_row(x, logits)[:, 0] for x in (low, high, exponent)]
    return torch.where(support > 1, t[0] + (t[1] - t[0]) * share ** t[2], 1.0).float().double()


def mirostat_v2(logits: Tensor, mu: float | Tensor) -> Tensor:
    """Kept: `-log2 p_v <= mu` bits; the best token alone where none is."""
    kept = (softmax(logits) >= torch.exp2(-per_row(mu, logits)) * (1 - CLOSE)) & logits.isfinite()
    return torch.where(kept.any(1, True), kept, top_k(logits, 1))


def mirostat_v2_step(logits: Tensor, kept: Tensor, token: Tensor, mu: Tensor, tau: float, eta: float) -> Tensor:
    """The next mu `[T]` in bits: `mu - eta (surprise - tau)`, the surprise of `token` `[T]` among those kept."""
    among = softmax(torch.where(kept, logits, -torch.inf)).gather(1, token[:, None])[:, 0]
    return mu - eta * (-among.log2() - tau)


def within(logits: Tensor, order: Tensor, p: float | Tensor) -> Tensor:
    """Kept: what is finite of the smallest prefix by `order` whose mass reaches p."""
    return prefix(logits, order, per_row(p, logits)[:, 0]) & logits.isfinite()


def floor(logits: Tensor, least: Tensor) -> Tensor:
    """Kept: a probability of at least `least` `[T]`, or the row's largest."""
    probability = softmax(logits)
    best = logits == logits.amax(1, True)
    return logits.isfinite() & ((probability >= least[:, None] * (1 - CLOSE)) | best)


def softmax(logits: Tensor) -> Tensor:
    """Probabilities `[T, V]`, float64."""
    return logits.double().softmax(1)


def entropy(logits: Tensor) -> Tensor:
    """H `[T]` in nats."""
    return -torch.xlogy(softmax(logits), softmax(logits)).sum(1)


def per_row(value: float | Tensor, logits: Tensor) -> Tensor:
    """`[T, 1]` float64."""
    return torch.as_tensor(value, dtype=torch.float64).expand(len(logits)).unsqueeze(1)
