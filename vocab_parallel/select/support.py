"""Rows without a value that can be chosen, or with one that no distribution has: an error on every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from vocab_parallel.agreement import first_row
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.select.nan import describe_nan
from vocab_parallel.select.scores import Peak, Scores, may_use_words


def require_support(
    scores: Scores,
    largest: Tensor,
    *,
    error: type[NonFiniteError] = NonFiniteError,
    cause: str = "every id is masked to -inf. Leave at least one legal",
    infinite: bool = True,
) -> None:
    """Raises on every rank for the first row whose largest value is NaN or -inf, or, unless `infinite`, +inf.

    Args:
        largest: `[T]`, the same on every rank.
        error: Class of the error of a row without columns.
        cause: Why it has none, in words.
    """
    highest = math.inf if infinite else torch.finfo(torch.float32).max
    if may_use_words(scores) and all(-math.inf < value <= highest for value in largest.tolist()):
        return
    good = largest > -torch.inf if infinite else largest.isfinite()
    if not scores.channel.group.defers(largest.device) and bool(good.all()):
        return
    row = first_row(~good)
    if len(largest) == 0:
        return
    at = row.clamp(min=0)[None]
    value = largest.index_select(0, at)[0]
    token_id = scores.peak.token_ids.index_select(0, at)[0] if scores.peak is not None else torch.full_like(row, -1)
    flags = torch.stack([row, value.isnan().to(torch.int64), (value > 0).to(torch.int64), token_id])
    layout = getattr(scores.channel.group, "layout", None)

    def describe(flags: list[int]) -> Exception:
        row, nan, at_infinity, token_id = flags
        if nan:
            return describe_nan(row, layout.owner(token_id) if layout is not None and token_id >= 0 else None)
        if at_infinity:
            return NonFiniteError(f"row {row} holds +inf, which no distribution has. Likely an overflow upstream.")
        return error(f"row {row} has no finite logit: {cause}.")

    scores.channel.judge(flags, error, describe)


def largest_of(scores: Scores, peaks: Tensor) -> Tensor:
    """The rows' largest values `[T]` of those of the ranks, `[size, T]`, in the scores' dtype.

    Raises:
        NonFiniteError: On every rank: a row without a finite value, or with +inf or NaN.
    """
    largest = peaks.amax(0).to(scores.values.dtype)
    if not all(-math.inf < value < math.inf for value in largest.tolist()):
        layout = getattr(scores.channel.group, "layout", None)
        ranks = peaks.argmax(0).tolist()
        ids = torch.tensor([layout.range(rank).start if layout is not None else -1 for rank in ranks])
        require_support(replace(scores, peak=Peak(largest, ids)), largest, infinite=False)
    return largest
