"""NaN among logits, which has no order."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.agreement import Found, first_row
from vocab_parallel.arguments import check_logits
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.shard import VocabShard


def nan_found(logits: object, shard: VocabShard) -> Found | None:
    """The first row with NaN among this rank's real columns, unread. None if these are no logits of the shard."""
    try:
        check_logits(logits, shard)
    except ValueError:
        return None
    assert isinstance(logits, Tensor)
    if not shard.defers(logits.device) and not _has_nan(logits, shard):
        return Found(torch.tensor([-1, 0], device=logits.device), NonFiniteError, describe_nan)
    flat = logits.detach().reshape(-1, shard.shard_size)[:, : shard.num_valid]
    bad = flat.amax(1).isnan() if flat.shape[1] else flat.new_zeros(len(flat), dtype=torch.bool)
    row = first_row(bad)
    return Found(torch.stack([row, torch.full_like(row, shard.rank)]), NonFiniteError, describe_nan)


def _has_nan(logits: Tensor, shard: VocabShard) -> bool:
    real = logits.detach()[..., : shard.num_valid]
    return real.numel() > 0 and bool(real.amax().isnan())


def describe_nan(row: int, rank: int | None = None) -> Exception:
    """The error of a row, and of the rank that has it."""
    where = "" if rank is None else f" among the logits of rank {rank} of the group"
    return NonFiniteError(
        f"row {row} holds NaN{where}: it has no order. Likely an overflow upstream, or an uninitialised weight."
    )
