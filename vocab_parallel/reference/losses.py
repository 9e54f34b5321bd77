"""The oracle of embedding, head and losses. Gradients are autograd's.

Shapes: T tokens, D hidden, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.reference.select import top_k


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """`weight[input]`; the row of `padding_idx` gets no gradient."""
    rows = weight[input]
    return rows if padding_idx is None else torch.where((input == padding_idx)[..., None], rows.detach(), rows)


def logits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input @ weight.T + bias`."""
    product = input @ weight.T
    return product if bias is None else product + bias


def scores(logits: Tensor, softcap: float | None = None, temperature: float = 1.0) -> Tensor:
    """What the softmax is taken of: `softcap * tanh(logits / softcap)`, then divided by the temperature."""
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return capped / temperature


def target_distribution(
    target: Tensor,  # [...] ids, or [..., V] floating: the distribution itself
    vocab: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
) -> tuple[Tensor, Tensor]:
    """`q` `[..., V]`, smoothed, and which rows are valid `[...]`; no row of a floating target is ignored."""
    if target.is_floating_point():
        q, valid = target, torch.ones_like(target[..., 0], dtype=torch.bool)
    else:
        valid = target != ignore_index
        ids = torch.arange(vocab, device=target.device)
        q = (torch.where(valid, target, 0)[..., None] == ids).double()
    if smoothing_over == "others":
        return (1 - label_smoothing) * q + label_smoothing / max(vocab - 1, 1) * (1 - q), valid
    return (1 - label_smoothing) * q + label_smoothing / vocab, valid


def cross_entropy(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [...] ids, or [..., V] a distribution
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    row_weight: Tensor | None = None,  # [...]
) -> Tensor:
    """`-sum_v q_v log p_v + z_loss lse^2` in nats a row; 0 for ignored rows, and for the mean of none."""
    q, valid = target_distribution(target, logits.shape[-1], ignore_index, label_smoothing, smoothing_over)
    z = scores(torch.where(valid[..., None], logits, 0.0), softcap, temperature)  # an ignored row may hold anything
    top = z.detach().amax(-1, keepdim=True)  # taken out first: logsumexp's own backward rounds z - lse at lse's size
    lse = (z - top).logsumexp(-1) + top[..., 0]
    rows = -_times(q.to(z.dtype), z.log_softmax(-1)).sum(-1) + z_loss * lse**2
    return reduce(rows, reduction, valid, row_weight)


def linear_cross_entropy(
    input: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,
    *,
    bias: Tensor | None = None,  # [V]
    **options: Any,
) -> Tensor:
    """`cross_entropy` of `logits`."""
    return cross_entropy(logits(input, weight, bias), target, **options)


def kl_div(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [..., V] q, or log q
    *,
    log_target: bool = False,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float = 1.0,
    row_weight: Tensor | None = None,  # [...]
) -> Tensor:
    """KL(q || p) `= sum_v q_v (log q_v - log p_v)` in nats a row; the mean is over rows."""
    log_p = scores(logits, softcap, temperature).log_softmax(-1)
    q, log_q = (target.exp(), target) if log_target else (target, target.log())
    rows = _times(q, log_q - log_p).sum(-1)
    return reduce(rows, reduction, torch.ones_like(rows, dtype=torch.bool), row_weight)


def linear_kl_div(
    input: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """`kl_div` of `logits`."""
    return kl_div(logits(input, weight, bias), target, **options)


class RowOutputs(NamedTuple):
    """What a row's softmax says, each `[...]`; the first three are differentiable."""

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    argmax: Tensor
    correct: Tensor
    margin: Tensor


def row_outputs(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [...]
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> RowOutputs:
    """The softmax of each row, read out in every way that the package offers.

    `logprob` is log p of the target, 0 for ignored rows. `argmax` is the first id of the total order, `correct` whether
    that is the target (never for ignored rows), `margin` how far its score is above the next, infinite without a next.
    """
    z, valid = scores(logits, softcap, temperature), target != ignore_index
    log_p = z.log_softmax(-1)
    picked = log_p.gather(-1, torch.where(valid, target, 0)[..., None])[..., 0]
    values, ids = top_k(torch.cat([z, z.new_full((*z.shape[:-1], 1), -torch.inf)], -1), 2)
    return RowOutputs(
        logprob=torch.where(valid, picked, 0.0),
        entropy=-_times(log_p.exp(), log_p).sum(-1),
        lse=z.logsumexp(-1),
        argmax=ids[..., 0],
        correct=valid & (ids[..., 0] == target),
        margin=values[..., 0] - values[..., 1],
    )


def token_logprobs(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """`logprob` and `entropy` of `row_outputs`."""
    return row_outputs(logits, target, **options)[:2]


def linear_token_logprobs(
    input: Tensor, weight: Tensor, target: Tensor, *, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of `logits`."""
    return token_logprobs(logits(input, weight, bias), target, **options)


def row_loss(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [...]
    fn: Callable[..., Tensor],
    *row_data: Tensor,  # [...] each
    reduction: str = "mean",
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """`fn(row_outputs, *row_data)` as the rows' losses; 0 for ignored rows."""
    rows = row_outputs(logits, target, ignore_index=ignore_index, **options)
    return reduce(fn(rows, *row_data), reduction, target != ignore_index)


def linear_row_loss(input: Tensor, weight: Tensor, *rest: Any, bias: Tensor | None = None, **options: Any) -> Tensor:
    """`row_loss` of `logits`; `rest` is target, fn and row data."""
    return row_loss(logits(input, weight, bias), *rest, **options)


def distillation(
    student_logits: Tensor,  # [..., V]
    teacher_logits: Tensor,  # [..., V]
    *,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
) -> Tensor:
    """The rows' divergence of student s and teacher t, in nats.

    forward_kl: KL(t || s). reverse_kl: KL(s || t). jensen_shannon: `beta KL(t || m) + (1 - beta) KL(s || m)` with
    `m = beta t + (1 - beta) s`. The temperature divides both logits; the result is not multiplied by its square.
    """
    log_s, log_t = ((z / temperature).log_softmax(-1) for z in (student_logits, teacher_logits))
    s, t = log_s.exp(), log_t.exp()
    if divergence == "forward_kl":
        return _times(t, log_t - log_s).sum(-1)
    if divergence == "reverse_kl":
        return _times(s, log_s - log_t).sum(-1)
    log_m = (beta * t + (1 - beta) * s).clamp(min=torch.finfo(s.dtype).tiny).log()
    return (beta * _times(t, log_t - log_m) + (1 - beta) * _times(s, log_s - log_m)).sum(-1)


def reduce(rows: Tensor, reduction: str, valid: Tensor, row_weight: Tensor | None = None) -> Tensor:
    """Rows times their weight, 0 where not valid; "mean" divides by the number of valid rows, weight 0 included."""
    rows = rows if row_weight is None else rows * row_weight.to(rows.dtype)
    rows = torch.where(valid, rows, 0.0)
    return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / valid.sum().clamp(min=1)}[reduction]


def _times(q: Tensor, log: Tensor) -> Tensor:
    """`q * log`, and 0 where q is 0 whatever the logarithm."""
    return q * torch.where(q == 0, 0.0, log)
