"""Cross entropy of logits that are sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture, raise_deferred
from vocab_parallel.arguments import check_logits, target_found
from vocab_parallel.collectives import apply, uncompiled
from vocab_parallel.loss.checks import (
    check_devices,
    check_mean_group,
    check_outputs,
    check_row_weight,
    check_same_rows,
    check_targets,
    is_distribution,
    row_checksum,
)
from vocab_parallel.loss.gradients import logits_gradient
from vocab_parallel.loss.normalizer import Normalizer, merge, require_finite, statistics
from vocab_parallel.loss.objective import CrossEntropy, Objective, require_distribution
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.outputs import RowOutputs
from vocab_parallel.loss.targets import Targets, soft_statistics
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import VocabShard


@uncompiled
def cross_entropy(
    logits: Tensor,  # [..., shard_size] floating
    target: Tensor,  # [...] int64, the same on every rank; or a distribution [..., shard_size]
    *,
    shard: VocabShard,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    row_weight: Tensor | None = None,  # [...]
    mean_group: dist.ProcessGroup | None = None,
    outputs: RowOutputs | None = None,
) -> Tensor:
    """Cross entropy of sharded `logits`, with the softmax over the whole real vocabulary, as one rank would give it.

    A row's loss is `row_weight (- sum_v q_v log p_v + z_loss lse²)`, with `p = softmax(z)`,
    `z = softcap tanh(logits / softcap) / temperature` and q the target distribution.

    Args:
        logits: This rank's columns. Padding columns are never read and get zero gradient. Never modified.
        target: Global token ids, or `ignore_index`. A floating target is a distribution over the vocabulary, this
            rank's columns of it (PyTorch's probability targets; no row is ignored). An entry below 0 is an error.
        reduction: "none", "sum", or "mean" over the valid rows (0 if there are none).
        ignore_index: Rows with this target have loss 0 and gradient 0, whatever their logits hold.
        label_smoothing: Mass moved off the target, in [0, 1].
        smoothing_over: Where it goes: "all" V classes (PyTorch) or the V - 1 "others" (NeMo, Megatron's intent).
        z_loss: Weight of the squared log-normalizer (PaLM, arXiv:2204.02311, section 5).
        softcap: Bound on the logits (Gemma 2, arXiv:2408.00118, section 2).
        row_weight: Factor of each row's loss, the same on every rank; a row of weight 0 still counts as valid.
        mean_group: Ranks that hold other rows (data parallel). The mean is then the sum of all their rows over their
            number, and the gradient is multiplied by the group's size, so that a wrapper that averages gradients over
            the group (DDP, FSDP, DeepSpeed, Megatron) ends with the gradient of that mean.
        outputs: Filled with per-row quantities from the same exchange.

    Returns:
        Nats, float32 (float64 for float64 logits): `[...]` for "none", else a scalar; the same bits on every rank.

    Collectives:
        Forward: one all-gather of 12 bytes a row; 4 more with smoothing, 12 with a distribution, and what `outputs`
        adds; with `mean_group` one of 80 bytes over it. Backward: none. None at tp_size 1 without `mean_group`.

    Memory:
        Forward keeps `logits` and 12 bytes a row. Backward allocates the gradient, nothing else of its size.

    Raises:
        TargetRangeError, LayoutMismatchError, NonFiniteError, ValueError: On every rank, though only one may have
        seen it.
    """
    soft = "probabilities" if is_distribution(target) else ""
    options = LossOptions(
        reduction, ignore_index, label_smoothing, smoothing_over, z_loss, Scores(softcap, temperature), soft
    )
    return loss_of_logits(logits, target, shard, options, row_weight, mean_group, outputs)


@uncompiled
def kl_div(
    logits: Tensor,  # [..., shard_size] floating
    target: Tensor,  # [..., shard_size] probabilities, or log-probabilities
    *,
    shard: VocabShard,
    log_target: bool = False,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float = 1.0,
    row_weight: Tensor | None = None,  # [...]
    mean_group: dist.ProcessGroup | None = None,
    outputs: RowOutputs | None = None,
) -> Tensor:
    """Kullback-Leibler divergence `sum_v q_v (log q_v - log p_v)` of a sharded distribution and sharded logits.

    Args:
        target: q, this rank's columns; `0 log 0` is 0. Padding columns are never read.
        log_target: `target` holds log-probabilities. A row of more than probability 1 (logits) is an error.
        reduction: "none", "sum", or "mean" over the rows (`torch.nn.functional.kl_div`'s "batchmean" on `[T, V]`).

    The rest, and what it returns, exchanges and raises: as `cross_entropy` with a distribution.
    """
    scores = Scores(softcap, temperature)
    soft = "log-probabilities" if log_target else "probabilities"
    options = LossOptions(reduction=reduction, scores=scores, soft=soft, relative=True)
    return loss_of_logits(logits, target, shard, options, row_weight, mean_group, outputs)


def loss_of_logits(
    logits: Tensor, target: Tensor, shard: VocabShard, options: LossOptions, row_weight: Tensor | None,
    mean_group: dist.ProcessGroup | None, outputs: RowOutputs | None,
) -> Tensor:  # fmt: skip
    """The loss that `options` describe."""
    name = f"cross_entropy({options})"
    with WideMean(shard, mean_group, name) as wide:
        fault = capture(_check, logits, target, shard, options, row_weight, wide, outputs)
        if fault is not None:
            Exchange(shard, "loss", "cross_entropy", fault=fault).wait()
        row_data = () if row_weight is None else (row_weight,)
        call = LogitsCall(
            name, lambda data: CrossEntropy(options, shard.vocab_size, *data), target, row_data, shard,
            options.scores, options.ignore_index, options.soft, outputs,
        )  # fmt: skip
        (rows,) = per_row_of_logits(logits, call)
        valid = torch.ones_like(rows, dtype=torch.bool) if options.soft else target.long() != options.ignore_index
        return apply(_MeanOver, rows, valid.sum(), wide) if wide.size > 1 else options.reduce(rows, valid.sum())


@dataclass(frozen=True)
class LogitsCall:
    """What an operation on given logits was asked to do; the fields are those of `FusedCall`."""

    name: str
    objective: Callable[[tuple[Tensor, ...]], Objective]
    target: Tensor
    row_data: tuple[Tensor, ...]
    shard: VocabShard
    scores: Scores
    ignore_index: int
    soft: str = ""
    outputs: RowOutputs | None = None


def per_row_of_logits(logits: Tensor, call: LogitsCall) -> tuple[Tensor, ...]:
    """The values of the call's objective, each of the target's rows."""
    values: Any = apply(_LogitsRows, logits, call)
    return tuple(values)


class _LogitsRows(torch.autograd.Function):
    """Per-row values of given logits: one exchange forward, no collective backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: LogitsCall) -> tuple[Tensor, ...]:
        shard, soft = call.shard, call.soft
        shape = call.target.shape[:-1] if soft else call.target.shape
        ids = call.target.new_zeros(shape, dtype=torch.int64) if soft else call.target
        target = _real_columns(call.target, shard) if soft else None
        data = tuple(rows.detach().reshape(shape.numel()) for rows in call.row_data)
        objective = call.objective(data)
        wanted = objective.wanted if call.outputs is None else objective.wanted.also(call.outputs.wanted)
        z, targets = _real_columns(logits, shard), _targets(ids, call)
        local = statistics(z, scores=call.scores, wanted=wanted, in_place=False)
        extra = None
        if target is not None:
            extra = soft_statistics(z, local.maximum, local.sumexp, target, call.scores, soft == "log-probabilities")
        payload = local.pack(targets.pick(z, call.scores), extra)
        words = f"{call.name} of logits {list(logits.shape)} {logits.dtype}, target {list(call.target.shape)}"
        check = row_checksum(ids, *data)
        found = target_found(ids, shard, call.ignore_index)
        gathered = Exchange(shard, "loss", words, payload=payload, checksum=check, found=found).wait()
        normalizer = merge(gathered, wanted, [shard.layout.range(rank) for rank in range(shard.tp_size)])
        require_finite(shard, normalizer, gathered, targets.valid, range(len(z)))
        require_distribution(shard, normalizer, objective, slice(None), range(len(z)))
        values, _ = objective.evaluate(normalizer, targets, slice(None), None)
        if call.outputs is not None:
            call.outputs.begin()
            call.outputs.collect(normalizer, targets)
            call.outputs.fill(lambda parts: parts[0], shape)
        kept = normalizer.kept()
        ctx.save_for_backward(logits, call.target, ids, *data, *kept.values())
        ctx.call, ctx.names = call, list(kept)
        return tuple(rows.view(shape) for rows in values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        call: LogitsCall = ctx.call
        logits, target, ids, *rest = ctx.saved_tensors
        data, kept = rest[: len(call.row_data)], rest[len(call.row_data) :]
        normalizer = Normalizer(**dict(zip(ctx.names, kept, strict=True)))
        targets = _targets(ids, call)
        upstream = tuple(grad.reshape(-1).to(normalizer.maximum.dtype) for grad in grads)
        coefficients = call.objective(tuple(data)).evaluate(normalizer, targets, slice(None), upstream)[1]
        assert coefficients is not None
        out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        logits_gradient(
            _real_columns(logits, call.shard), _real_columns(out, call.shard), normalizer, coefficients, targets,
            call.scores, _real_columns(target, call.shard) if call.soft else None, call.soft == "log-probabilities",
        )  # fmt: skip
        raise_deferred(call.shard)
        return out, None


class _MeanOver(torch.autograd.Function):
    """The mean over a wider group; its gradient as `cross_entropy` says of `mean_group`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: Tensor, wide: WideMean) -> Tensor:
        total, count = wide.reduce(rows.sum(dtype=torch.float64), count)
        ctx.save_for_backward(wide.size / count.clamp(min=1).to(torch.float64))
        ctx.shape, ctx.dtype = rows.shape, rows.dtype
        return (total / count.clamp(min=1)).to(rows.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (scale,) = ctx.saved_tensors
        return (grad * scale).to(ctx.dtype).expand(ctx.shape), None, None


def _real_columns(columns: Tensor, shard: VocabShard) -> Tensor:
    return columns.reshape(-1, shard.shard_size)[:, : shard.num_valid]


def _targets(ids: Tensor, call: LogitsCall) -> Targets:
    start, stop = (0, 0) if call.soft else (call.shard.start, call.shard.stop)
    return Targets(ids.reshape(-1), start, stop, call.ignore_index if not call.soft else -1)


def _check(
    logits: Tensor, target: Tensor, shard: VocabShard, options: LossOptions, row_weight: Tensor | None, wide: WideMean,
    outputs: RowOutputs | None,
) -> None:  # fmt: skip
    options.check()
    check_mean_group(wide.size, options.reduction)
    check_logits(logits, shard)
    check_targets(target, shard, options)
    check_same_rows("logits", logits, target, bool(options.soft))
    check_row_weight(row_weight, target, shard, options)
    check_outputs(outputs, bool(options.soft))
    check_devices(logits=logits, target=target, row_weight=row_weight)
