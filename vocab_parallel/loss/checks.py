"""Local checks of what the losses take. Each raises on this rank; callers `capture` it."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.agreement import checksum
from vocab_parallel.arguments import check_target
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError
from vocab_parallel.loss.options import LossOptions
from vocab_parallel.loss.outputs import RowOutputs
from vocab_parallel.shard import VocabShard


def is_distribution(target: object) -> bool:
    """Whether `target` is a distribution over the vocabulary instead of ids."""
    return isinstance(target, Tensor) and target.is_floating_point()


def check_targets(target: object, shard: VocabShard, options: LossOptions) -> None:
    """Raises unless `target` is ids, or a distribution `[..., shard_size]` where the options say so."""
    if not options.soft:
        check_target(target, shard, options.ignore_index)
        return
    if not isinstance(target, Tensor) or not target.is_floating_point():
        got = str(target.dtype) if isinstance(target, Tensor) else type(target).__name__
        raise LayoutMismatchError(f"a target distribution must be floating, got {got}")
    if target.dim() == 0 or target.shape[-1] != shard.shard_size:
        raise LayoutMismatchError(
            f"a target of {target.dtype} is a distribution and must hold this rank's columns [..., "
            f"{shard.shard_size}], padding included, got {list(target.shape)} on rank {shard.rank} of {shard.tp_size} "
            f"({shard.layout}). Token ids must be integer."
        )
    if target.requires_grad:
        raise ValueError("the target distribution requires a gradient, which this loss does not form: detach it")


def check_row_data(name: str, data: object, shape: torch.Size) -> None:
    """Raises unless `data` is a tensor of `[*shape, ...]` that needs no gradient."""
    if not isinstance(data, Tensor) or data.shape[: len(shape)] != shape:
        got = list(data.shape) if isinstance(data, Tensor) else type(data).__name__
        raise LayoutMismatchError(f"{name} must have the target's rows {list(shape)}, got {got}")
    if data.requires_grad:
        raise ValueError(
            f'{name} requires a gradient, which this loss does not form: detach it, or use reduction="none" and '
            "multiply the row losses"
        )


def check_row_weight(row_weight: object, target: Tensor, shard: VocabShard, options: LossOptions) -> None:
    """Raises unless `row_weight` is None or a floating tensor of the target's rows, finite where they are valid.

    Where the host may not wait for the device, a weight that is not finite shows in the loss.
    """
    if row_weight is None:
        return
    shape = target.shape[:-1] if options.soft else target.shape
    check_row_data("row_weight", row_weight, shape)
    assert isinstance(row_weight, Tensor)
    if not row_weight.is_floating_point() or row_weight.shape != shape:
        raise LayoutMismatchError(
            f"row_weight must be a floating tensor of the target's shape {list(shape)}, got {row_weight.dtype} "
            f"{list(row_weight.shape)}"
        )
    if shard.defers(row_weight.device):
        return
    bad = ~row_weight.isfinite() & (True if options.soft else target != options.ignore_index)
    if bool(bad.any()):
        at = int(bad.reshape(-1).nonzero()[0, 0])
        raise NonFiniteError(
            f"row_weight {float(row_weight.reshape(-1)[at])} at row {at} is not finite; to leave a row out, set its "
            "target to ignore_index."
        )


def check_outputs(outputs: object, soft: bool) -> None:
    """Raises unless `outputs` is None or a `RowOutputs` that the targets can fill."""
    if outputs is None:
        return
    if not isinstance(outputs, RowOutputs):
        raise ValueError(f'outputs must be a RowOutputs, for example RowOutputs("entropy"), got {outputs!r}')
    wrong = [name for name in outputs.names if name in ("logprob", "correct")]
    if soft and wrong:
        raise ValueError(f"outputs {', '.join(wrong)} are of a target id, and the target is a distribution")


def check_same_rows(what: str, tensor: Tensor, target: Tensor, soft: bool, sequence_parallel: bool = False) -> None:
    """Raises unless the rows of `target` are those of `tensor` `[..., columns]`."""
    leading, rows = tensor.shape[:-1], target.shape[:-1] if soft else target.shape
    names = f"{what} {list(tensor.shape)} and target {list(target.shape)} disagree"
    if not sequence_parallel and leading != rows:
        hint = " If each rank holds its own rows, pass sequence_parallel=True." if what == "input" else ""
        raise LayoutMismatchError(f"{names}: target must have the {what}'s leading shape {list(leading)}.{hint}")
    if leading[1:] != rows[1:] or len(leading) != len(rows):
        raise LayoutMismatchError(f"{names} past their first dimension.")


def check_mean_group(ranks: int, reduction: str) -> None:
    """Raises for a `mean_group` of several ranks where there is no mean."""
    if ranks > 1 and reduction != "mean":
        raise ValueError(f'mean_group is for reduction="mean", got {reduction!r}: sums need no agreement on a count')


def check_invariant(sequence_parallel: bool) -> None:
    """Raises where `tp_invariant` cannot hold: chunks of sequence-parallel rows follow the number of ranks."""
    if sequence_parallel:
        raise ValueError(
            "tp_invariant needs replicated rows: with sequence_parallel the rows of a chunk depend on the TP size. "
            "Gather the rows before the loss"
        )


def check_positive(name: str, value: object) -> None:
    """Raises unless `value` is None or an integer of at least 1."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def check_devices(**tensors: Tensor | None) -> None:
    """Raises unless all are on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if len(set(devices.values())) > 1:
        table = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise LayoutMismatchError(f"the tensors must be on one device: {table}")


def row_checksum(*rows: Tensor, device: torch.device | None = None) -> Tensor:
    """Checksum of what must be the same bits on every rank, an int64 scalar on its device."""
    total = torch.zeros((), dtype=torch.int64, device=rows[0].device if rows else device)
    for some in rows:
        total = total * 31 + checksum(_bits(some.detach()))
    return total


def _bits(tensor: Tensor) -> Tensor:
    """The tensor, or the bits of its floating-point numbers as integers."""
    if not tensor.is_floating_point():
        return tensor
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().reshape(-1).view(integers[tensor.element_size()])
