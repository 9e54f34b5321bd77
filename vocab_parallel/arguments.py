"""Local checks of the arguments that several operations take. Each raises on this rank; callers `capture` it."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.deferral import Found, first_row
from vocab_parallel.errors import LayoutMismatchError, TargetRangeError, TokenRangeError, UngatheredWeightError
from vocab_parallel.shard import VocabShard

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_logits(logits: object, shard: VocabShard) -> None:
    """Raises unless `logits` are this shard's `[..., shard_size]` floating columns."""
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise LayoutMismatchError(f"logits must be a floating tensor [..., {shard.shard_size}], got {got}")
    width = logits.shape[-1]
    if width == shard.shard_size:
        return
    cause = (
        "These look like gathered logits: a sharded loss would count every column once per rank. Pass this rank's "
        "columns only, and turn off gather_output"
        if width in (shard.vocab_size, shard.layout.padded_size)
        else "Likely hidden states that no head has projected, another axis than the vocabulary in the last place, or "
        "a head with another vocabulary or padding"
    )
    raise LayoutMismatchError(
        f"logits have {width} columns, shape {list(logits.shape)}, but rank {shard.rank} of {shard.tp_size} holds "
        f"{shard.shard_size} ({shard.layout}). {cause}."
    )


def check_weight(weight: object, shard: VocabShard) -> None:
    """Raises unless `weight` is this shard's `[shard_size, D]`."""
    if not isinstance(weight, Tensor):
        raise LayoutMismatchError(f"the weight must be a tensor, got {type(weight).__name__}")
    if weight.shape[0:1] == (0,):
        raise UngatheredWeightError(
            f"the weight has no rows (shape {list(weight.shape)}): under ZeRO-3 a parameter is partitioned and must "
            "be gathered first. Use it inside its module's forward, or under "
            "deepspeed.zero.GatheredParameters([weight])."
        )
    if weight.dim() != 2 or weight.shape[0] != shard.shard_size:
        raise LayoutMismatchError(
            f"the weight must be this rank's rows [{shard.shard_size}, D], padding included, got "
            f"{list(weight.shape)} on rank {shard.rank} of {shard.tp_size} ({shard.layout})."
        )


def local_rows(weight: Tensor, shard: VocabShard) -> Tensor:
    """A weight `[shard_size, ...]` as a plain tensor, also where a host holds it as a DTensor (FSDP2); differentiable.

    Raises:
        UngatheredWeightError: The host has it sharded over data-parallel ranks too; on every rank of the group.
    """
    if not hasattr(weight, "to_local"):  # a DTensor, whose import takes long
        return weight
    local: Tensor = weight.to_local()
    if len(local) != shard.shard_size:
        raise UngatheredWeightError(
            f"the weight has {len(local)} of this rank's {shard.shard_size} rows: it is sharded over data-parallel "
            "ranks and must be gathered first. Use it inside the forward of the module that fully_shard was called on, "
            "or between that forward and its backward with reshard_after_forward=False."
        )
    return local


def check_head(input: object, weight: Tensor, bias: Tensor | None, shard: VocabShard) -> None:
    """Raises unless `input` `[..., D]` can be projected by this shard's `weight` `[shard_size, D]` and `bias`."""
    check_weight(weight, shard)
    if not isinstance(input, Tensor) or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        got = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
        raise LayoutMismatchError(
            f"input {got} and weight {list(weight.shape)} disagree: expected [..., D] and [shard_size, D]."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LayoutMismatchError(f"the bias must have shape [{shard.shard_size}], got {list(bias.shape)}")
    dtypes = {str(x.dtype) for x in (input, weight, bias) if x is not None}
    if len(dtypes) > 1 or not input.is_floating_point():
        raise LayoutMismatchError(
            f"input {input.dtype}, weight {weight.dtype} and bias {None if bias is None else bias.dtype} must share "
            "one floating dtype: cast them, or run under torch.autocast."
        )


def check_target(target: object, shard: VocabShard, ignore_index: int) -> None:
    """Raises for the first target that is neither a real id nor `ignore_index`.

    Where errors are deferred only for the wrong dtype: then `target_found` says the rest.
    """
    if not isinstance(target, Tensor) or target.dtype not in _INTEGERS:
        got = str(target.dtype) if isinstance(target, Tensor) else type(target).__name__
        raise LayoutMismatchError(f"target must hold integer token ids (int64), got {got}")
    if not shard.defers(target.device):
        _raise_first(_target_found(target, shard, ignore_index))


def target_found(target: Tensor, shard: VocabShard, ignore_index: int) -> Found | None:
    """The first target that is neither a real id nor `ignore_index`, unread; None where `check_target` has read it."""
    return _target_found(target, shard, ignore_index) if shard.defers(target.device) else None


def _target_found(target: Tensor, shard: VocabShard, ignore_index: int) -> Found:
    flat = target.reshape(-1).to(torch.int64)
    bad = ((flat < 0) | (flat >= shard.vocab_size)) & (flat != ignore_index)
    vocab_size, padded_size = shard.vocab_size, shard.layout.padded_size

    def describe(row: int, value: int) -> Exception:
        cause = (
            "it is the row of a padding id, which is storage and not vocabulary"
            if vocab_size <= value < padded_size
            else "likely a tokenizer with another vocabulary, or a padding label that is not ignore_index"
        )
        return TargetRangeError(
            f"target {value} at row {row} is outside [0, {vocab_size}) and is not ignore_index {ignore_index}: "
            f"{cause}. Rows to leave out must hold ignore_index."
        )

    return Found(_first(bad, flat), TargetRangeError, describe)


def check_embedding(input: object, weight: Tensor, shard: VocabShard, padding_idx: int | None) -> None:
    """Raises unless `input` holds real ids and `weight` is this shard's.

    Where errors are deferred it looks at dtypes and shapes only: then `ids_found` says the rest.
    """
    check_weight(weight, shard)
    if not isinstance(input, Tensor) or input.dtype not in (torch.int64, torch.int32):
        got = str(input.dtype) if isinstance(input, Tensor) else type(input).__name__
        raise LayoutMismatchError(f"input must hold integer token ids (int64 or int32), got {got}")
    if padding_idx is not None and not 0 <= padding_idx < shard.vocab_size:
        raise TokenRangeError(f"padding_idx {padding_idx} is outside [0, {shard.vocab_size})")
    if shard.defers(input.device):
        return
    flat = input.reshape(-1)
    bad = _outside(flat, shard)
    if bool(bad.any()):
        rows = bad.nonzero()[:4, 0].tolist()
        named = ", ".join(f"{int(flat[row])} at position {row}" for row in rows)
        raise _id_error(f"{named} ({int(bad.sum())} in all)", shard.vocab_size, shard.layout.padded_size)


def ids_found(input: Tensor, shard: VocabShard) -> Found | None:
    """The first id that is not real, unread; None where `check_embedding` has read it."""
    if not shard.defers(input.device):
        return None
    flat = input.reshape(-1).to(torch.int64)
    vocab_size, padded_size = shard.vocab_size, shard.layout.padded_size

    def describe(row: int, value: int) -> Exception:
        return _id_error(f"the first is {value} at position {row}", vocab_size, padded_size)

    return Found(_first(_outside(flat, shard), flat), TokenRangeError, describe)


def _outside(flat: Tensor, shard: VocabShard) -> Tensor:
    return (flat < 0) | (flat >= shard.vocab_size)


def _id_error(named: str, vocab_size: int, padded_size: int) -> Exception:
    return TokenRangeError(
        f"token ids outside [0, {vocab_size}): {named}. Ids up to {padded_size} have storage but are no vocabulary; "
        "likely the tokenizer and the model disagree on the vocabulary."
    )


def _first(bad: Tensor, values: Tensor) -> Tensor:
    """The first row where `bad`, or -1, and its value: int64 `[2]` on their device."""
    row = first_row(bad)[None]
    padded = torch.cat([values, values.new_zeros(1)])  # at index -1, and where there are no rows
    return torch.cat([row, padded.index_select(0, row % len(padded))])


def _raise_first(found: Found) -> None:
    row, value = found.words.tolist()
    if row >= 0:
        raise found.describe(row, value)
