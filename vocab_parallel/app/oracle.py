"""The step-by-step check: sharded loss and gradients against one rank that holds the whole table, in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.job import Job
from vocab_parallel.app.model import Head
from vocab_parallel.collectives import all_reduce_, gather_rows, gather_vocab
from vocab_parallel.loss import linear_cross_entropy
from vocab_parallel.shard import VocabShard


def check(
    job: Job,
    shard: VocabShard,
    head: Head,
    hidden: Tensor,  # [T, D], of this replica
    target: Tensor,  # [T]
    loss: Tensor,  # [], the mean over all replicas
    *,
    gradients: bool,
    chunk_rows: int,
    chunk_size: int | None,
) -> Difference:
    """Compares the step's loss with the reference on the gathered table; with `gradients`, dH, dW and db too.

    The first rank computes, the others wait for the outcome. Call it before the optimizer changes the weights.

    Returns:
        The same `Difference` on every rank.

    Collectives:
        A gather of the table (and of its gradient, with the loss once more on detached copies), and one broadcast;
        with replicas also gathers of their rows.
    """
    sharded = _sharded_gradients(job, shard, head, hidden, target, chunk_size) if gradients else None
    weight = gather_vocab(shard, head.weight)
    bias = None if head.bias is None else gather_vocab(shard, head.bias)
    hidden, target = _rows_of_replicas(job, hidden), _rows_of_replicas(job, target)
    result: Difference | None = None
    if job.first:
        with _threads_of_waiting_ranks(job):
            value, whole = whole_loss(hidden, weight, bias, target, chunk_rows, gradients=gradients)
        largest = None
        if sharded is not None:
            largest = max(_relative(got, want) for got, want in zip(sharded, whole, strict=True))
        result = Difference(value, abs(value - float(loss)), largest)
    agreed = job.agree(result)
    assert isinstance(agreed, Difference)
    return agreed


@dataclasses.dataclass(frozen=True)
class Difference:
    """What one check found."""

    oracle_loss: float  # nats
    loss: float  # absolute, nats
    gradient: float | None  # largest entry of the difference over the largest entry of the oracle's gradient


def whole_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk_rows: int, *, gradients: bool
) -> tuple[float, list[Tensor]]:
    """Mean loss by the reference in float64, `chunk_rows` rows of whole logits at a time.

    Args:
        hidden: ``[T, D]``.
        weight: ``[V, D]``, all real rows.
        bias: ``[V]`` or None.
        target: ``[T]``.
        chunk_rows: rows of ``[rows, V]`` float64 logits formed at once.
        gradients: whether to compute them.

    Returns:
        The loss in nats, and the gradients of hidden, weight and bias (those that exist) in float64.
    """
    inputs = [t.detach().double().requires_grad_(gradients) for t in (hidden, weight, bias) if t is not None]
    total = 0.0
    for start in range(0, len(target), chunk_rows):
        rows = slice(start, start + chunk_rows)
        with torch.set_grad_enabled(gradients):
            wide_bias = inputs[2] if bias is not None else None
            part = reference.linear_cross_entropy(
                inputs[0][rows], inputs[1], target[rows], bias=wide_bias, reduction="sum"
            )
            if gradients:
                (part / len(target)).backward()  # type: ignore[no-untyped-call]
        total += float(part.detach())
    return total / len(target), [t.grad for t in inputs if t.grad is not None]


def _sharded_gradients(
    job: Job, shard: VocabShard, head: Head, hidden: Tensor, target: Tensor, chunk_size: int | None
) -> list[Tensor]:
    """The head's own dH, dW and db, on copies: the tied parameter's gradient also holds the lookup's part."""
    inputs = [t.detach().clone().requires_grad_() for t in (hidden, head.weight, head.bias) if t is not None]
    bias = inputs[2] if head.bias is not None else None
    loss = linear_cross_entropy(
        inputs[0], inputs[1], target,
        shard=shard, linear_bias=bias, chunk_size=chunk_size, mean_group=job.data_group,
    )  # fmt: skip
    loss.backward()  # type: ignore[no-untyped-call]
    # `mean_group` has each replica's gradients times their number, for a mean to follow.
    found = [t.grad / job.replicas.size for t in inputs if t.grad is not None]
    whole = [all_reduce_(job.replicas, gradient.contiguous()).wait() for gradient in found[1:]]
    return [_rows_of_replicas(job, found[0]), *(gather_vocab(shard, gradient) for gradient in whole)]


def _rows_of_replicas(job: Job, rows: Tensor) -> Tensor:
    return gather_rows(job.replicas, rows, [len(rows)] * job.replicas.size)


def _relative(got: Tensor, want: Tensor) -> float:
    error = float((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30))
    return math.inf if math.isnan(error) else error  # a later `max` would lose a NaN


@contextmanager
def _threads_of_waiting_ranks(job: Job) -> Iterator[None]:
    """Lends the first rank the CPU threads of the ranks of its machine that wait for it."""
    own = torch.get_num_threads()
    torch.set_num_threads(own * job.world if job.device.type == "cpu" else own)
    try:
        yield
    finally:
        torch.set_num_threads(own)
