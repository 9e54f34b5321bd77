"""The arguments of a generation: prompts that all end in one column, checked on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture, checksum
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.errors import LayoutMismatchError, TokenRangeError
from vocab_parallel.integrations.transformers.conversion import conversion_of, inner_of


@dataclass(frozen=True)
class Prompts:
    """Prompts moved to the right, so that all end in one column, and what ends them.

    Attributes:
        ids: int64 `[B, s]`, some real id where there is none.
        mask: bool `[B, s]`, where there is one.
        view: Of them.
        pad_id: What results hold after a row's end.
    """

    ids: Tensor
    mask: Tensor
    view: View
    eos_ids: list[int]
    pad_id: int

    @classmethod
    def of(
        cls,
        model: Any,
        input_ids: Tensor,  # [B, S]
        attention_mask: Tensor | None,  # [B, S]
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int | None,
        max_new_tokens: int,
        *,
        words: str,
        check: Callable[[int], Any] = lambda rows: None,
    ) -> Prompts:
        """Raises on every rank what is wrong on any.

        Args:
            words: The rest of the call, the same on every rank.
            check: Of what else there is, with the number of rows.

        Collectives:
            One 64-byte all-gather.
        """
        conversion, made = conversion_of(model), list[Prompts]()
        shard, device = conversion.shard, conversion.head.weight.device

        def make() -> None:
            mask = _checked(input_ids, attention_mask, shard.vocab_size, max_new_tokens)
            eos_ids, pad_id, pads = _ends(model, eos_token_id, pad_token_id, shard.vocab_size)
            if attention_mask is None and pads:
                _require_no_padding(input_ids, pad_id)
            ids, mask = _moved_right(input_ids.to(device), mask.to(device))
            made.append(cls(ids, mask, View.of(torch.where(mask, ids, -1)), eos_ids, pad_id))
            check(len(ids))

        fault = capture(make)
        if fault is not None:
            Exchange(shard, "header", words, fault=fault, device=device).wait()
        prompts = made[0]
        words += f", {list(input_ids.shape)}, {max_new_tokens=}, eos {prompts.eos_ids}, pad {prompts.pad_id}"
        Exchange(shard, "header", words, checksum=checksum(prompts.view.prefix), device=device).wait()
        return prompts


def _checked(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int, max_new_tokens: Any) -> Tensor:
    """The mask as bool `[B, S]`."""
    if input_ids.dtype != torch.int64 or input_ids.dim() != 2 or 0 in input_ids.shape:
        raise LayoutMismatchError(
            f"input_ids must be int64 [B, S] with a row and a token, got {input_ids.dtype} {list(input_ids.shape)}"
        )
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}")
    if attention_mask is None:
        mask = torch.ones_like(input_ids, dtype=torch.bool)
    elif attention_mask.shape != input_ids.shape:
        raise LayoutMismatchError(
            f"attention_mask {list(attention_mask.shape)} and input_ids {list(input_ids.shape)} must have one shape"
        )
    else:
        mask = attention_mask.to(input_ids.device) != 0
    empty = (~mask.any(1)).nonzero()
    if len(empty):
        raise ValueError(f"row {int(empty[0])} has no token: attention_mask is 0 throughout. Give it at least a BOS.")
    bad = (mask & ((input_ids < 0) | (input_ids >= vocab_size))).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise TokenRangeError(
            f"input_ids[{row}, {column}] is {int(input_ids[row, column])}, outside [0, {vocab_size}). If it is "
            "padding, attention_mask must be 0 there."
        )
    return mask


def _ends(
    model: Any, eos_token_id: int | Sequence[int] | None, pad_token_id: int | None, vocab_size: int
) -> tuple[list[int], int, bool]:
    """End ids and the padding id, from the arguments or else the generation config; whether it is padding only."""
    defaults = getattr(inner_of(model), "generation_config", None)
    eos: Any = eos_token_id if eos_token_id is not None else getattr(defaults, "eos_token_id", None)
    pad: Any = pad_token_id if pad_token_id is not None else getattr(defaults, "pad_token_id", None)
    eos_ids = [] if eos is None else [int(one) for one in eos] if isinstance(eos, Iterable) else [int(eos)]
    pad_id = int(pad) if pad is not None else eos_ids[0] if eos_ids else 0  # without an end id nothing is padded
    for name, token in (*(("eos_token_id", one) for one in eos_ids), ("pad_token_id", pad_id)):
        if not 0 <= token < vocab_size:
            raise TokenRangeError(f"{name} {token} is outside [0, {vocab_size})")
    return eos_ids, pad_id, pad is not None and pad_id not in eos_ids


def _require_no_padding(input_ids: Tensor, pad_id: int) -> None:
    rows = (input_ids[:, -1] == pad_id).nonzero()
    if len(rows):
        raise ValueError(
            f"row {int(rows[0])} of input_ids ends in pad_token_id {pad_id}, and there is no attention_mask: its next "
            "token would be that of a padding place. Pass attention_mask, 0 where input_ids is padding."
        )


def _moved_right(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's tokens in its last places, in order, without columns that no row needs; 0 in the other places."""
    at = mask.to(torch.int8).sort(dim=1, stable=True).indices[:, ids.shape[1] - int(mask.sum(1).max()) :]
    mask = mask.gather(1, at)
    return torch.where(mask, ids.gather(1, at), 0), mask
