"""Cross entropy fused with the projection onto a sharded vocabulary: three GEMMs, no `[T, v]` tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.arguments import check_head
from vocab_parallel.collectives import apply, uncompiled
from vocab_parallel.loss.checks import (
    check_devices,
    check_invariant,
    check_mean_group,
    check_outputs,
    check_positive,
    check_row_data,
    check_row_weight,
    check_same_rows,
    check_targets,
    is_distribution,
)
from vocab_parallel.loss.fused import FusedCall, PerRow, Reduced
from vocab_parallel.loss.invariant import leaf_ids
from vocab_parallel.loss.objective import CrossEntropy
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.outputs import RowOutputs
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import VocabShard

_BUDGET_BYTES = 128 << 20
_MOST_ROWS = 4096


@uncompiled
def linear_cross_entropy(
    input: Tensor,  # [..., D], the same on every rank; with sequence_parallel this rank's rows [t, ..., D]
    linear_weight: Tensor,  # [shard_size, D]
    target: Tensor,  # [...] of this rank's rows or of all rows of the group; or a distribution [..., shard_size]
    *,
    shard: VocabShard,
    linear_bias: Tensor | None = None,  # [shard_size]
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
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    tp_invariant: bool = False,
) -> Tensor:
    """`cross_entropy(input @ linear_weight.T + linear_bias, target)` without ever holding the logits.

    Rows go in chunks of `Z = H Wᵀ`. The gradients are formed in forward, while a chunk's exponentials are at hand, so
    backward only scales them. With `reduction="none"` each row has its own upstream gradient, so the projection is
    recomputed in backward (4 GEMMs).

    Args:
        input: Hidden states. Without `sequence_parallel`, `target` has their leading shape. Never modified.
        linear_weight: This rank's rows of the head; padding rows are never read and get zero gradient. If it has a
            float32 `main_grad` and Megatron's `grad_added_to_main_grad`, its gradient is added there.
        target: As in `cross_entropy`. With `sequence_parallel`, of this rank's rows or of all rows of the group in
            rank order, told apart by their number.
        sequence_parallel: Each rank passes its own rows (their number may differ) and gets their gradient.
        chunk_size: Rows of a chunk, over the whole group (with `sequence_parallel` an equal share of each rank).
        memory_budget: Bytes for a chunk's logits, from which the chunk follows where `chunk_size` is not given.
            Default: 128 MiB, and at most 4,096 rows.
        tp_invariant: The same bits of loss and gradients at TP 1, 2, 4 and 8, if the padded size is the same at each
            (`VocabLayout.from_padded`); see `invariant`. Replicated rows only.

    The other arguments: as in `cross_entropy`.

    Returns:
        Nats, float32 (float64 for float64 input): for "none" `[...]` like `target`, else a scalar over all rows of
        the group.

    Collectives:
        Forward, per chunk: one all-gather of 12 bytes a row (more with options, see `cross_entropy`), in flight during
        the dH GEMM; and, if `input` needs a gradient, one all-reduce of the chunk's dH, in flight during the dW GEMM
        and later chunks. Backward: none ("none": the dH reductions move there). With `sequence_parallel`: one more
        exchange, one of the target if it is local, and per chunk an all-gather of its rows; dH is reduce-scattered;
        "none" with a local target gathers the upstream gradient. None at tp_size 1.
        A distribution or a softcap leaves nothing to hide the exchange behind: their gradient needs the merged
        statistics before its first GEMM.

    Memory:
        One `[chunk_size, num_valid]` buffer in the input's dtype; dW in float32; dH. Nothing grows with T beside dH
        and 12 bytes a row.

    Raises:
        TargetRangeError, LayoutMismatchError, NonFiniteError, UngatheredWeightError, ValueError: On every rank, though
        only one may have seen it.

    Source:
        Three GEMMs: Liger (arXiv:2410.10989). dH with the local softmax, rescaled: Vocabulary Parallelism
            (arXiv:2411.05288).
    """
    soft = "probabilities" if is_distribution(target) else ""
    options = LossOptions(
        reduction, ignore_index, label_smoothing, smoothing_over, z_loss, Scores(softcap, temperature), soft
    )
    return _loss(
        input, linear_weight, linear_bias, target, shard, options, row_weight, mean_group, outputs=outputs,
        sequence_parallel=sequence_parallel, chunk_size=chunk_size, memory_budget=memory_budget,
        tp_invariant=tp_invariant,
    )  # fmt: skip


@uncompiled
def linear_kl_div(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [shard_size, D]
    target: Tensor,  # [..., shard_size] probabilities, or log-probabilities
    *,
    shard: VocabShard,
    linear_bias: Tensor | None = None,  # [shard_size]
    log_target: bool = False,
    reduction: str = "mean",
    softcap: float | None = None,
    temperature: float = 1.0,
    row_weight: Tensor | None = None,  # [...]
    mean_group: dist.ProcessGroup | None = None,
    outputs: RowOutputs | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    tp_invariant: bool = False,
) -> Tensor:
    """`kl_div(input @ linear_weight.T + linear_bias, target)`, with everything else as in `linear_cross_entropy`."""
    soft = "log-probabilities" if log_target else "probabilities"
    options = LossOptions(reduction=reduction, scores=Scores(softcap, temperature), soft=soft, relative=True)
    return _loss(
        input, linear_weight, linear_bias, target, shard, options, row_weight, mean_group, outputs=outputs,
        sequence_parallel=sequence_parallel, chunk_size=chunk_size, memory_budget=memory_budget,
        tp_invariant=tp_invariant,
    )  # fmt: skip


def _loss(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, shard: VocabShard, options: LossOptions,
    row_weight: Tensor | None, mean_group: dist.ProcessGroup | None, **settings: Any,
) -> Tensor:  # fmt: skip
    row_data = () if row_weight is None else (row_weight,)
    name = f"linear_cross_entropy({options})"
    with WideMean(shard, mean_group, name) as wide:
        input, weight, bias, call = prepare(
            name, lambda data: CrossEntropy(options, shard.vocab_size, *data), input, weight, bias, target, shard,
            options, wide, row_data=row_data, row_weight=row_weight, **settings,
        )  # fmt: skip
        if options.reduction == "none":
            values: Any = apply(PerRow, input, weight, bias, call)
            return values[0]  # type: ignore[no-any-return]
        return apply(Reduced, input, weight, bias, call, options)


def prepare(
    name: str, objective: Any, input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, shard: VocabShard,
    options: LossOptions, wide: WideMean, *, row_data: tuple[Tensor, ...] = (), row_weight: Tensor | None = None,
    sequence_parallel: bool = False, chunk_size: int | None = None, memory_budget: int | None = None,
    tp_invariant: bool = False, outputs: RowOutputs | None = None, every_row: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, FusedCall]:  # fmt: skip
    """Checks a fused operation's arguments and describes it; a fault is raised on every rank."""
    parameter = weight
    input, weight, bias = autocast(input, weight, bias)

    def check() -> None:
        options.check()
        check_mean_group(wide.size, options.reduction)
        check_positive("chunk_size", chunk_size)
        check_positive("memory_budget", memory_budget)
        if tp_invariant:
            leaf_ids(shard)
            check_invariant(sequence_parallel)
        check_head(input, weight, bias, shard)
        check_targets(target, shard, options)
        check_same_rows("input", input, target, bool(options.soft), sequence_parallel)
        shape = target.shape[:-1] if options.soft else target.shape
        check_row_weight(row_weight, target, shard, options)
        check_outputs(outputs, bool(options.soft))
        for at, data in enumerate(row_data):
            check_row_data(f"row data {at}", data, shape)
        check_devices(input=input, weight=weight, bias=bias, target=target)

    fault = capture(check)
    if fault is not None:
        Exchange(shard, "loss", "linear_cross_entropy", fault=fault).wait()
    ids = leaf_ids(shard) if tp_invariant else [shard.layout.range(rank) for rank in range(shard.tp_size)]
    width = shard.layout.padded_size if tp_invariant else shard.shard_size  # the same chunks at every TP size
    return (
        input,
        weight,
        bias,
        FusedCall(
            f"{name}, tp_invariant={tp_invariant}", objective, target, row_data, shard, ids,
            options.scores, options.ignore_index,
            chunk_size or _chunk_rows(width, weight.dtype, memory_budget), wide, options.soft, sequence_parallel,
            outputs, every_row, tp_invariant, parameter if _takes_main_grad(parameter, weight) else None,
            torch.is_grad_enabled(),
        ),
    )  # fmt: skip


def chunk_rows(shard: VocabShard, dtype: torch.dtype = torch.float32, memory_budget: int | None = None) -> int:
    """Rows of a chunk whose logits take `memory_budget` bytes (default 128 MiB, and at most 4,096 rows).

    From the layout alone, so that every rank chooses the same whatever else may differ.
    """
    return _chunk_rows(shard.shard_size, dtype, memory_budget)


def _chunk_rows(columns: int, dtype: torch.dtype, memory_budget: int | None) -> int:
    row = columns * dtype.itemsize
    if memory_budget is not None:
        return max(1, memory_budget // row)
    return max(1, min(_MOST_ROWS, _BUDGET_BYTES // row))


def _takes_main_grad(parameter: Tensor, used: Tensor) -> bool:
    main_grad = getattr(parameter, "main_grad", None)
    return used is parameter and isinstance(main_grad, Tensor) and hasattr(parameter, "grad_added_to_main_grad")


def autocast(*tensors: Any) -> Any:
    """What `torch.autocast` would do to a linear layer's arguments."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in tensors)


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
