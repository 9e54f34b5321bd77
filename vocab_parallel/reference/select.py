"""The oracle of selection: whole rows, sorted, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

CLOSE = 2.0**-20  # of a threshold: as near counts as reached (`select.masses.CLOSE`)


def greedy(logits: Tensor) -> Tensor:
    """The first id of the total order: value descending, then id ascending."""
    return top_k(logits, 1)[1][..., 0]


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k values and ids of the total order. A stable sort leaves equal values in id order; -0.0 equals 0.0."""
    values, ids = in_order(logits)
    return values[..., :k], ids[..., :k]


def in_order(logits: Tensor) -> tuple[Tensor, Tensor]:
    """All values and ids of the total order."""
    values, ids = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True)
    return values, ids


def nucleus(
    logits: Tensor,  # [T, V]
    p: Tensor,  # [T]
) -> Tensor:
    """Bool `[T, V]`: the smallest prefix of the total order with a mass of p, the id that crosses p among it."""
    return prefix(logits, logits, p)


def prefix(
    logits: Tensor,  # [T, V]
    order: Tensor,  # [T, V]
    p: Tensor,  # [T]
) -> Tensor:
    """As `nucleus`, by `order` descending, then id ascending, in place of the total order."""
    ids = in_order(order)[1]
    mass = logits.double().softmax(-1).gather(-1, ids)
    p = p.double()[:, None]
    before = mass.cumsum(-1) - mass
    kept = (before < p - torch.minimum(p, 1 - p) * CLOSE) | (p == 1)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter(-1, ids, kept)


def rank(order: Tensor) -> Tensor:
    """int64: the place of each column, the largest first, then the smaller id."""
    return in_order(order)[1].argsort(-1)


def draw(
    logits: Tensor,  # [T, V]
    bits: Tensor,  # int64 [T], uniform in [0, 2**62)
) -> Tensor:
    """The id at which the probabilities, added up in id order, pass the row's uniform number: inverse CDF."""
    mass = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    reached = mass.cumsum(-1)
    at = bits.double()[:, None] * 2.0**-62 * reached[:, -1:]
    return (reached <= at).sum(-1)


def sample(
    logits: Tensor,  # [T, V]
    bits: Tensor,  # int64 [T], uniform in [0, 2**62)
    *,
    temperature: Tensor,  # [T], as are the others
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """`draw` after temperature (0: the first of the order), top-k, top-p and min-p, in this order."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    cold = temperature < 2.0**-64
    z = z / torch.where(cold, 1.0, temperature).to(z.dtype)[:, None]
    z = z.masked_fill(rank(z) >= torch.where(cold, 1, top_k)[:, None], -torch.inf)
    z = z.masked_fill(~nucleus(z, top_p), -torch.inf)
    floor = z.double().amax(-1) + min_p.double().log() - CLOSE
    return draw(z.masked_fill(z < floor[:, None], -torch.inf), bits)
