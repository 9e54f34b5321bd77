"""The oracle of diagnostics, calibration and lenses: whole tensors, float64 throughout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Diagnostics(NamedTuple):
    """Of each row of `z / T`, each `[T]`."""

    token_ids: Tensor
    runner_up: Tensor
    margin: Tensor
    entropy: Tensor
    effective_support: Tensor
    lse: Tensor
    energy: Tensor
    confidence: Tensor
    support: Tensor


def diagnose(logits: Tensor, temperature: float | Tensor = 1.0) -> Diagnostics:
    """Every diagnostic by its formula; the runner-up is -1, and the margin infinite, where no second id is finite."""
    t = torch.as_tensor(temperature, dtype=torch.float64).expand(len(logits))
    z = logits.double() / t[:, None]
    padded = torch.cat([z, torch.full_like(z[:, :1], -torch.inf)], 1)
    values, ids = (padded + 0.0).sort(dim=1, descending=True, stable=True)
    p = z.softmax(1)
    entropy = -torch.special.xlogy(p, p).sum(1)
    second = torch.where(values[:, 1] > -torch.inf, ids[:, 1], -1)
    lse = z.logsumexp(1)
    return Diagnostics(
        ids[:, 0], second, values[:, 0] - values[:, 1], entropy, entropy.exp(), lse, -t * lse, p.amax(1),
        (z > -torch.inf).sum(1),
    )  # fmt: skip


def calibration(logits: Tensor, target: Tensor, bins: int, temperature: float = 1.0) -> dict[str, object]:
    """Rows, accuracy and confidence of each bin, ECE and mean NLL; rows with a target below 0 are left out."""
    log_p = (logits[target >= 0].double() / temperature).log_softmax(1)
    target = target[target >= 0]
    confidence, best = log_p.max(1).values.exp(), (log_p + 0.0).sort(dim=1, descending=True, stable=True).indices[:, 0]
    right = (best == target).double()
    which = [(confidence > m / bins) & (confidence <= (m + 1) / bins) for m in range(bins)]
    return {
        "rows": [int(rows.sum()) for rows in which],
        "accuracy": [float(right[rows].mean()) if rows.any() else None for rows in which],
        "confidence": [float(confidence[rows].mean()) if rows.any() else None for rows in which],
        "ece": sum(abs(float((right - confidence)[rows].sum())) for rows in which) / len(target),
        "nll": float(-log_p.gather(1, target[:, None]).mean()),
    }


def best_temperature(logits: Tensor, target: Tensor, low: float, high: float) -> float:
    """The temperature with the least mean NLL, by halving the bracket of the derivative's sign in beta = 1 / T."""
    z, beta, low, high = logits[target >= 0].double(), 1.0, 1 / high, 1 / low
    target = target[target >= 0]
    for _ in range(80):
        beta = math.sqrt(low * high)
        slope = ((beta * z).softmax(1) * z).nan_to_num().sum(1) - z.gather(1, target[:, None])[:, 0]
        low, high = (low, beta) if slope.mean() > 0 else (beta, high)
    return 1 / beta


def lens(hidden: Tensor, read: Callable[[Tensor], Tensor], target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layers `[L, T, D]` read as whole logits: sorted ids and log-probabilities `[L, T, V]`, entropy, target's rank."""
    z = torch.stack([read(layer) for layer in hidden]).double()
    log_p = z.log_softmax(-1)
    ids = (z + 0.0).sort(dim=-1, descending=True, stable=True).indices
    rank = 1 + (ids == target[None, :, None]).to(torch.int64).argmax(-1)
    return ids, log_p.gather(-1, ids), -(log_p.exp() * log_p).nan_to_num().sum(-1), rank
