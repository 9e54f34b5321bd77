"""Cross entropy of logits that are sharded over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture, checksum
from vocab_parallel.arguments import check_logits, check_target
from vocab_parallel.collectives import apply
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.loss.normalizer import merge, require_finite, row_blocks, statistics
from vocab_parallel.loss.targets import LossOptions, Targets
from vocab_parallel.shard import VocabShard


def cross_entropy(
    logits: Tensor,  # [..., shard_size] floating
    target: Tensor,  # [...] int64, the same on every rank
    *,
    shard: VocabShard,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
) -> Tensor:
    """Cross entropy of sharded `logits`, with the softmax over the whole real vocabulary, as one rank would give it.

    Args:
        logits: This rank's columns. Padding columns are never read and get zero gradient. Never modified.
        target: Global token ids, or `ignore_index`.
        reduction: "none", "sum", or "mean" over the valid rows (0 if there are none).
        ignore_index: Rows with this target have loss 0 and gradient 0, whatever their logits hold.
        label_smoothing: Mass moved off the target, in [0, 1].
        smoothing_over: Where it goes: "all" V classes (PyTorch) or the V - 1 "others" (NeMo, Megatron's intent).

    Returns:
        Nats, float32 (float64 for float64 logits): `[...]` for "none", else a scalar; the same bits on every rank.

    Collectives:
        Forward: one all-gather of 12 bytes a row (16 with smoothing). Backward: none. None at tp_size 1.

    Memory:
        Forward keeps `logits` and 8 bytes a row. Backward allocates the gradient, nothing else of its size.

    Raises:
        TargetRangeError, LayoutMismatchError, NonFiniteError: On every rank, though only one may have seen it.
    """
    options = LossOptions(reduction, ignore_index, label_smoothing, smoothing_over)
    fault = capture(_check, logits, target, shard, options)
    if fault is not None:
        Exchange(shard, "loss", "cross_entropy", fault=fault).wait()
    return apply(_CrossEntropy, logits, target, shard, options)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard, options: LossOptions) -> Tensor:
        z = _real_columns(logits, shard)
        targets = Targets(target.reshape(-1), shard, options.ignore_index)
        smoothing = options.label_smoothing > 0
        local = statistics(z, shifted_sum=smoothing, in_place=False)
        payload = torch.stack([local[0], local[1], targets.pick(z), *local[2:]])
        call = f"cross_entropy(logits {list(logits.shape)} {logits.dtype}, target {list(target.shape)}, {options})"
        gathered = Exchange(shard, "loss", call, payload=payload, checksum=checksum(target)).wait()
        normalizer = merge(gathered, shard)
        require_finite(normalizer, gathered, targets.valid, range(len(z)))
        rows = normalizer.loss(options, shard.vocab_size, targets.valid)
        ctx.save_for_backward(logits, target, normalizer.maximum, normalizer.sumexp)
        ctx.shard, ctx.options = shard, options
        return options.reduce(rows, targets.count).view(target.shape if options.reduction == "none" else ())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """`dz = g (p - q)`, p from the saved M and S.

        The target's entry is formed in float32: a confident row's `p - 1` vanishes when p is rounded first.
        """
        logits, target, maximum, sumexp = ctx.saved_tensors
        shard, options = ctx.shard, ctx.options
        targets = Targets(target.reshape(-1), shard, options.ignore_index)
        on_target, uniform = options.weights(shard.vocab_size)
        g = grad.reshape(-1).to(maximum.dtype)
        g = g / targets.count.clamp(min=1) if options.reduction == "mean" else g
        g = torch.where(targets.valid, g, 0.0)
        z = _real_columns(logits, shard)
        out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        dz = _real_columns(out, shard)
        if shard.num_valid == 0:
            return out, None, None, None
        at_target = torch.expm1(targets.pick(z) - maximum - sumexp.log()) + (1.0 - on_target - uniform)
        for block in row_blocks(z):
            p = z[block].to(maximum.dtype, copy=True)
            p.sub_(maximum[block, None]).exp_().div_(sumexp[block, None])
            if uniform:
                p.sub_(uniform)
            column = targets.local[block, None]
            p.scatter_(1, column, torch.where(targets.owned[block, None], at_target[block, None], p.gather(1, column)))
            p.mul_(g[block, None]).masked_fill_(~targets.valid[block, None], 0.0)  # an ignored row may hold NaN
            dz[block] = p
        return out, None, None, None


def _real_columns(logits: Tensor, shard: VocabShard) -> Tensor:
    return logits.reshape(-1, shard.shard_size)[:, : shard.num_valid]


def _check(logits: Tensor, target: Tensor, shard: VocabShard, options: LossOptions) -> None:
    options.check()
    check_logits(logits, shard)
    check_target(target, shard, options.ignore_index)
    if logits.shape[:-1] != target.shape:
        raise LayoutMismatchError(
            f"logits {list(logits.shape)} and target {list(target.shape)} disagree: target must have the logits' "
            f"leading shape {list(logits.shape[:-1])}."
        )
    if logits.device != target.device:
        raise LayoutMismatchError(f"logits are on {logits.device} and target on {target.device}")
