"""Cross entropy fused with the projection onto a sharded vocabulary: three GEMMs, no `[T, v]` tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture, checksum
from vocab_parallel.arguments import check_head, check_target
from vocab_parallel.collectives import apply, gather_rows
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.loss.gradients import HeadGradients
from vocab_parallel.loss.normalizer import Normalizer, merge, require_finite, statistics
from vocab_parallel.loss.rows import ReplicatedRows, RowPlan, SequenceParallelRows, agree_on_rows
from vocab_parallel.loss.targets import LossOptions, Targets
from vocab_parallel.shard import VocabShard

_CHUNK_ELEMENTS = 1 << 26  # logits in flight per chunk: 256 MiB in float32


def linear_cross_entropy(
    input: Tensor,  # [..., D], the same on every rank; with sequence_parallel this rank's rows [t, ..., D]
    linear_weight: Tensor,  # [shard_size, D]
    target: Tensor,  # [...], this rank's rows or all rows of the group
    *,
    shard: VocabShard,
    linear_bias: Tensor | None = None,  # [shard_size]
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
) -> Tensor:
    """`cross_entropy(input @ linear_weight.T + linear_bias, target)` without ever holding the logits.

    Rows go in chunks of `Z = H Wᵀ`. The gradients are formed in forward, while a chunk's exponentials are at hand, so
    backward only scales them. With `reduction="none"` each row has its own upstream gradient, so the projection is
    recomputed in backward (4 GEMMs).

    Args:
        input: Hidden states. Without `sequence_parallel`, `target` has their leading shape. Never modified.
        linear_weight: This rank's rows of the head; padding rows are never read and get zero gradient.
        target: Global token ids, or `ignore_index`. With `sequence_parallel`, of this rank's rows or of all rows of
            the group in rank order, told apart by their number.
        shard, reduction, ignore_index, label_smoothing, smoothing_over: As in `cross_entropy`.
        sequence_parallel: Each rank passes its own rows (their number may differ) and gets their gradient.
        chunk_size: Rows of a chunk, over the whole group (with `sequence_parallel` an equal share of each rank).
            Default: 256 MiB of float32 logits, at most 4,096 rows.

    Returns:
        Nats, float32 (float64 for float64 input): for "none" `[...]` like `target`, else a scalar over all rows of
        the group.

    Collectives:
        Forward, per chunk: one all-gather of 12 bytes a row (16 with smoothing), in flight during the dH GEMM; and, if
        `input` needs a gradient, one all-reduce of the chunk's dH, in flight during later chunks. Backward: none
        ("none": the dH reductions move there). With `sequence_parallel`: one more exchange, one of the target if
        it is local, and per chunk an all-gather of its rows; dH is reduce-scattered; "none" with a local target
        gathers the upstream gradient. None at tp_size 1.

    Memory:
        One `[chunk_size, num_valid]` buffer in the input's dtype; dW in float32; dH. Nothing grows with T beside dH
        and 8 bytes a row.

    Raises:
        TargetRangeError, LayoutMismatchError, NonFiniteError, UngatheredWeightError: On every rank, though only one may
        have seen it.

    Source:
        Three GEMMs: Liger (arXiv:2410.10989). dH with the local softmax, rescaled: Vocabulary Parallelism
            (arXiv:2411.05288).
    """
    options = LossOptions(reduction, ignore_index, label_smoothing, smoothing_over)
    input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    fault = capture(_check, input, linear_weight, target, linear_bias, shard, options, sequence_parallel, chunk_size)
    if fault is not None:
        Exchange(shard, "loss", "linear_cross_entropy", fault=fault).wait()
    chunk_size = chunk_size or default_chunk_size(shard)
    settings = _Settings(shard, options, sequence_parallel, chunk_size, torch.is_grad_enabled())
    return apply(_LinearCrossEntropy, input, linear_weight, linear_bias, target, settings)


def default_chunk_size(shard: VocabShard) -> int:
    """Rows of a chunk: from the layout alone, so that every rank chooses the same whatever else may differ."""
    return max(1, min(4096, _CHUNK_ELEMENTS // shard.shard_size))


@dataclass(frozen=True)
class _Settings:
    shard: VocabShard
    options: LossOptions
    sequence_parallel: bool
    chunk_size: int
    grad_enabled: bool


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, settings: _Settings
    ) -> Tensor:
        shard, options = settings.shard, settings.options
        needs = tuple(settings.grad_enabled and needed for needed in ctx.needs_input_grad[:3])
        words = (
            f"linear_cross_entropy(input {_words(input, settings.sequence_parallel)}, weight {_words(weight)}, "
            f"bias {_words(bias)}, target {'its rows' if settings.sequence_parallel else list(target.shape)}, "
            f"{options}, chunk_size {settings.chunk_size}, input gradient {'wanted' if needs[0] else 'not wanted'})"
        )
        make_plan, flat_target, check = _plan_rows(input, target, settings, words)
        plan = make_plan(input.reshape(-1, input.shape[-1]))
        targets = Targets(flat_target, shard, options.ignore_index)
        head = _Head(plan, weight, bias, targets, shard, options, words, check)
        per_row = options.reduction == "none"
        gradients = HeadGradients(head.weight, shard, options, needs) if any(needs) and not per_row else None
        scale = head.scale()
        # dH is rounded once if the mean's 1 / count is in it before. float16 would underflow: it scales in backward.
        early = input.dtype != torch.float16
        results = [
            _forward_chunk(head, chunk, gradients, scale if early else torch.ones_like(scale))
            for chunk in range(len(plan.chunks))
        ]
        losses, maxima, sums = (plan.in_order(list(parts)) for parts in zip(*results, strict=True))
        ctx.shape, ctx.dtypes = input.shape, tuple(None if x is None else x.dtype for x in (input, weight, bias))
        if gradients is not None:
            gradients.finish()
            grad_input = plan.input_grad().view(input.shape) if needs[0] else None
            ctx.save_for_backward(
                grad_input, gradients.weight, gradients.bias, torch.ones_like(scale) if early else scale, scale
            )
        elif any(needs):
            ctx.arguments = (make_plan, shard, options, words, needs)
            ctx.save_for_backward(input, weight, bias, flat_target, maxima, sums)
        ctx.per_row = per_row
        return plan.mine(losses).view(target.shape) if per_row else options.reduce(losses, head.targets.count)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.per_row:
            return *_recompute_gradients(ctx, grad), *(None,) * 2
        *grads, input_scale, scale = ctx.saved_tensors
        scales = (grad * input_scale, grad * scale, grad * scale)
        return *(
            None if saved is None else (saved * factor).to(dtype)
            for saved, factor, dtype in zip(grads, scales, ctx.dtypes, strict=True)
        ), *(None,) * 2


@dataclass
class _Head:
    """One call, prepared: rows, matrices, targets, and the buffer that holds one chunk's logits."""

    plan: RowPlan
    padded_weight: Tensor  # [shard_size, D]
    padded_bias: Tensor | None  # [shard_size]
    targets: Targets  # of all T rows of the group
    shard: VocabShard
    options: LossOptions
    words: str
    checksum: Tensor | int

    def __post_init__(self) -> None:
        self.weight = self.padded_weight[: self.shard.num_valid]
        self.bias = None if self.padded_bias is None else self.padded_bias[: self.shard.num_valid]
        rows = max(len(_row_numbers(chunk)) for chunk in self.plan.chunks)
        self._buffer = self.weight.new_empty(rows, self.shard.num_valid)

    def project(self, chunk: int) -> tuple[Tensor, Tensor, Targets]:
        """The chunk's hidden states `[C, D]`, ignored rows zeroed; its logits `[C, n]`, in the buffer; its targets."""
        index = self.plan.chunks[chunk]
        targets = self.targets.rows(index)
        # An ignored row may hold NaN, and a zero coefficient would not keep it out of dW.
        hidden = self.plan.hidden(chunk).masked_fill(~targets.valid[:, None], 0.0)
        logits = self._buffer[: len(hidden)]
        if self.bias is None:
            torch.mm(hidden, self.weight.T, out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=logits)
        return hidden, logits, targets

    def scale(self) -> Tensor:
        """What the reduction multiplies each row's loss with, a scalar tensor."""
        count = self.targets.count.to(torch.promote_types(self.weight.dtype, torch.float32))
        return 1.0 / count.clamp(min=1) if self.options.reduction == "mean" else torch.ones_like(count)


def _forward_chunk(
    head: _Head, chunk: int, gradients: HeadGradients | None, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: its row losses, M and S, each `[C]`; its share of the gradients goes to `gradients` and the plan."""
    hidden, logits, targets = head.project(chunk)
    picked = targets.pick(logits)
    smoothing = head.options.label_smoothing > 0
    local = statistics(logits, shifted_sum=smoothing, in_place=gradients is not None)
    payload = torch.stack([local[0], local[1], picked, *local[2:]])
    exchange = Exchange(head.shard, "loss", head.words, payload=payload, checksum=head.checksum)
    product = gradients.start(logits, targets) if gradients is not None else None
    gathered = exchange.wait()
    normalizer = merge(gathered, head.shard)
    require_finite(normalizer, gathered, targets.valid, _row_numbers(head.plan.chunks[chunk]))
    if gradients is not None:
        g = targets.valid.to(normalizer.maximum.dtype)
        grad = gradients.add(product, hidden, logits, local[0], normalizer, targets, g, g * scale)
        if grad is not None:
            head.plan.reduce(chunk, grad)
    return normalizer.loss(head.options, head.shard.vocab_size, targets.valid), normalizer.maximum, normalizer.sumexp


def _recompute_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of row losses with an upstream gradient for each row: the projection again, then as in forward."""
    input, weight, bias, target, maxima, sums = ctx.saved_tensors
    make_plan, shard, options, words, needs = ctx.arguments
    plan = make_plan(input.reshape(-1, input.shape[-1]))
    head = _Head(plan, weight, bias, Targets(target, shard, options.ignore_index), shard, options, words, 0)
    gradients = HeadGradients(head.weight, shard, options, needs)
    upstream = plan.whole(grad.reshape(-1).to(maxima.dtype).contiguous())
    for chunk, index in enumerate(plan.chunks):
        hidden, logits, targets = head.project(chunk)
        normalizer = Normalizer(maxima[index], sums[index], targets.pick(logits))
        maximum = statistics(logits, shifted_sum=False, in_place=True)[0]
        g = torch.where(targets.valid, upstream[index], 0.0)
        product = gradients.start(logits, targets)
        partial = gradients.add(product, hidden, logits, maximum, normalizer, targets, g, g)
        if partial is not None:
            plan.reduce(chunk, partial)
    gradients.finish()
    return (
        plan.input_grad().view(ctx.shape) if needs[0] else None,
        None if gradients.weight is None else gradients.weight.to(weight.dtype),
        None if gradients.bias is None else gradients.bias.to(weight.dtype),
    )


def _plan_rows(
    input: Tensor, target: Tensor, settings: _Settings, words: str
) -> tuple[Callable[[Tensor], RowPlan], Tensor, Tensor | int]:
    """How to plan the rows of a flat input, all their targets, and the checksum the ranks still have to compare."""
    shard, flat = settings.shard, target.reshape(-1).to(torch.int64)
    plan: Callable[[Tensor], RowPlan]
    if not settings.sequence_parallel or shard.tp_size == 1:
        plan = partial(ReplicatedRows, shard=shard, chunk_size=settings.chunk_size)
        return plan, flat, checksum(flat)
    rows, local = agree_on_rows(input.reshape(-1, input.shape[-1]), flat, shard, words, checksum(flat))
    plan = partial(SequenceParallelRows, shard=shard, chunk_size=settings.chunk_size, rows=rows, local_target=local)
    filler = flat.new_tensor([settings.options.ignore_index])  # at index -1, which filler rows have
    return plan, torch.cat([gather_rows(shard, flat, rows) if local else flat, filler]), 0


def _row_numbers(chunk: slice | Tensor) -> range | Tensor:
    return range(chunk.start, chunk.stop) if isinstance(chunk, slice) else chunk


def _words(tensor: Tensor | None, any_rows: bool = False) -> str:
    if tensor is None:
        return "none"
    shape = ", ".join(str(size) for size in tensor.shape)
    return f"[{'*, ' + str(tensor.shape[-1]) if any_rows else shape}] {tensor.dtype}"


def _autocast(*tensors: Any) -> Any:
    """What `torch.autocast` would do to a linear layer's arguments."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in tensors)


def _check(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, shard: VocabShard, options: LossOptions,
    sequence_parallel: bool, chunk_size: object,
) -> None:  # fmt: skip
    options.check()
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size must be an integer of at least 1, got {chunk_size!r}")
    check_head(input, weight, bias, shard)
    check_target(target, shard, options.ignore_index)
    if input.shape[:-1] != target.shape and not sequence_parallel:
        raise LayoutMismatchError(
            f"input {list(input.shape)} and target {list(target.shape)} disagree: target must have the input's "
            f"leading shape {list(input.shape[:-1])}. If each rank holds its own rows, pass sequence_parallel=True."
        )
    if input.shape[1:-1] != target.shape[1:] or target.dim() != input.dim() - 1:
        raise LayoutMismatchError(
            f"input {list(input.shape)} and target {list(target.shape)} disagree past their first dimension."
        )
    if not input.device == weight.device == target.device:
        raise LayoutMismatchError(f"input is on {input.device}, weight on {weight.device}, target on {target.device}")
