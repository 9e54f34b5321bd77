"""The oracle: every operation on whole tensors on one rank. Slow, short, and float64 when given float64.

Shapes: T tokens, D hidden, V vocabulary, K candidates. Every sharded operation equals its namesake here on the
gathered tensors; tests and `doctor` compare with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """`weight[input]`; the row of `padding_idx` gets no gradient."""
    rows = weight[input]
    return rows if padding_idx is None else torch.where((input == padding_idx)[..., None], rows.detach(), rows)


def logits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input @ weight.T + bias`."""
    product = input @ weight.T
    return product if bias is None else product + bias


def cross_entropy(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [...]
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
) -> Tensor:
    """`-sum_v q_v log p_v` in nats, q the smoothed one-hot target; 0 for ignored rows, and for the mean of none."""
    vocab = logits.shape[-1]
    log_p = torch.log_softmax(logits, dim=-1)
    valid = target != ignore_index
    picked = log_p.gather(-1, torch.where(valid, target, 0)[..., None])[..., 0]
    uniform = label_smoothing / (vocab if smoothing_over == "all" else max(vocab - 1, 1))
    on_target = 1 - label_smoothing if smoothing_over == "all" else 1 - label_smoothing - uniform * (vocab > 1)
    rows = -on_target * picked - (uniform * log_p.sum(-1) if label_smoothing else 0)
    rows = torch.where(valid, rows, 0)
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / valid.sum().clamp(min=1)}[reduction]


def linear_cross_entropy(
    input: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...]
    *,
    bias: Tensor | None = None,  # [V]
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
) -> Tensor:
    """`cross_entropy` of `logits`."""
    return cross_entropy(
        logits(input, weight, bias),
        target,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        smoothing_over=smoothing_over,
    )


def greedy(logits: Tensor) -> Tensor:
    """The first id of the total order: value descending, then id ascending."""
    return top_k(logits, 1)[1][..., 0]


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k values and ids of the total order. A stable sort leaves equal values in id order; -0.0 equals 0.0."""
    values, ids = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]
