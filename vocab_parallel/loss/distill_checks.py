"""Local checks of what distillation takes from a teacher. Each raises on this rank; callers `capture` it."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.arguments import check_head
from vocab_parallel.deferral import Found, first_row
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError, TargetRangeError, VocabParallelError
from vocab_parallel.loss.checks import check_devices, check_row_data
from vocab_parallel.loss.targets import MOST_MASS
from vocab_parallel.shard import VocabShard

TAILS = ("ignore", "renormalize", "bucket")


def check_teacher(input: object, teacher_input: object, weight: Tensor, bias: Tensor | None, shard: VocabShard) -> None:
    """Raises unless the teacher is a head of this shard, without a gradient, with hidden states of the input's rows."""
    try:
        check_head(teacher_input, weight, bias, shard)
    except VocabParallelError as error:
        raise type(error)(f"of the teacher: {error}") from None
    assert isinstance(teacher_input, Tensor)
    for name, tensor in (("teacher_input", teacher_input), ("teacher_weight", weight), ("teacher_bias", bias)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which this loss does not form for the teacher: detach it")
    if isinstance(input, Tensor):
        check_devices(input=input, teacher_input=teacher_input, teacher_weight=weight, teacher_bias=bias)
        if input.shape[:-1] != teacher_input.shape[:-1]:
            raise LayoutMismatchError(
                f"input {list(input.shape)} and teacher_input {list(teacher_input.shape)} must have the same rows"
            )


def filled_slots(ids: Tensor, valid: Tensor, ignore_index: int) -> Tensor:
    """Which slots of ids `[..., K]` hold an id of a valid row."""
    return (ids != ignore_index) & valid[..., None]


def check_given(
    input: object, ids: object, logprobs: object, target: object, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Raises unless ids and log-probabilities are of the rows and of one shape; returns them, and the valid rows."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() == 0:
        raise LayoutMismatchError(f"teacher_ids must hold integer token ids (int64) [..., K], got {_kind(ids)}")
    if not isinstance(logprobs, Tensor) or not logprobs.is_floating_point() or logprobs.shape != ids.shape:
        raise LayoutMismatchError(
            f"teacher_logprobs must be floating, of the shape of teacher_ids {list(ids.shape)}, got {_kind(logprobs)}"
        )
    if ids.shape[-1] == 0:
        raise LayoutMismatchError(f"teacher_ids {list(ids.shape)} must give at least one id a row")
    leading = ids.shape[:-1]
    if target is not None and (not isinstance(target, Tensor) or target.shape != leading):
        raise LayoutMismatchError(f"teacher_ids {list(ids.shape)} must have the target's rows, got {_kind(target)}")
    if target is None and isinstance(input, Tensor) and input.shape[:-1] != leading:
        raise LayoutMismatchError(f"teacher_ids {list(ids.shape)} must have the input's rows, got {_kind(input)}")
    check_row_data("teacher_logprobs", logprobs, leading)
    tensors = {"input": input, "teacher_ids": ids, "teacher_logprobs": logprobs, "target": target}
    check_devices(**{name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)})
    valid = target != ignore_index if isinstance(target, Tensor) else torch.ones_like(ids[..., 0], dtype=torch.bool)
    return ids, logprobs, valid


def problems(
    ids: Tensor, logprobs: Tensor, valid: Tensor, shard: VocabShard, ignore_index: int, tail: str
) -> list[Found]:
    """What may be wrong with the values of valid rows, each with the first row where it is; not read by the host."""
    count = ids.shape[-1]
    ids, logprobs = ids.reshape(-1, count).to(torch.int64), logprobs.reshape(-1, count)
    filled = filled_slots(ids, valid.reshape(-1), ignore_index)
    outside = filled & ((ids < 0) | (ids >= shard.vocab_size))
    vocab_size = shard.vocab_size

    def out_of_range(row: int, value: int) -> Exception:
        return TargetRangeError(
            f"teacher id {value} in row {row} is outside [0, {vocab_size}) and is not ignore_index {ignore_index}: "
            "likely a teacher with another vocabulary, or padding that is not ignore_index."
        )

    def not_finite(row: int, value: int) -> Exception:
        return NonFiniteError(f"a log-probability of the teacher in row {row} is NaN or +inf, slot {value}.")

    def twice(row: int, value: int) -> Exception:
        return ValueError(f"the teacher gives id {value} more than once in row {row}: a row must give an id once.")

    def too_much(row: int, value: int) -> Exception:
        return ValueError(
            f"the teacher's probabilities of row {row} sum to more than 1: teacher_logprobs look like logits, or like "
            'log-probabilities of another temperature. Subtract their logsumexp, or pass tail="renormalize".'
        )

    in_order = torch.where(filled, ids, -1).sort(1).values
    repeated = torch.zeros_like(filled)
    repeated[:, 1:] = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    slot = torch.arange(count, device=ids.device).expand_as(ids)
    found = [
        Found(_first(outside, ids), TargetRangeError, out_of_range),
        Found(_first(filled & ~(logprobs < torch.inf), slot), NonFiniteError, not_finite),
        Found(_first(repeated, in_order), ValueError, twice),
    ]
    if tail != "renormalize":
        mass = torch.where(filled, logprobs.to(torch.promote_types(logprobs.dtype, torch.float32)), -torch.inf)
        found.append(Found(_first((mass.exp().sum(1) > MOST_MASS)[:, None], slot[:, :1]), ValueError, too_much))
    return found


def _first(bad: Tensor, values: Tensor) -> Tensor:
    """The first row of `bad` `[T, K]` with a True, or -1, and the first such entry of `values` in it: int64 `[2]`."""
    row = first_row(bad.any(1))[None]
    if not len(bad):
        return torch.cat([row, row])
    here = row.clamp(min=0)
    slot = bad.index_select(0, here).to(torch.uint8).argmax(1, keepdim=True)
    return torch.cat([row, values.index_select(0, here).gather(1, slot)[0]])


def _kind(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
