"""The best k tokens of each row over all shards."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.select.order import select_best
from vocab_parallel.shard import VocabShard


class TopK(NamedTuple):
    """values: `[..., k]` in the logits' dtype, best first. token_ids: int64 `[..., k]`, global ids."""

    values: Tensor
    token_ids: Tensor


@uncompiled
def top_k(
    logits: Tensor,  # [..., shard_size] floating, this rank's
    k: int,
    *,
    shard: VocabShard,
) -> TopK:
    """Exactly k tokens by value descending, then token id ascending (`torch.topk` leaves the order of ties open).

    Args:
        logits: This rank's columns; padding columns are never read and never selected.
        k: At most `vocab_size`; may be larger than a shard.

    Returns:
        `TopK`, the same bits on every rank.

    Collectives:
        One all-gather of `8 k` bytes a row (`16 k` for float64). None at tp_size 1.

    Raises:
        NonFiniteError, LayoutMismatchError, ValueError: On every rank: a row with NaN or without a finite logit; not
            this rank's columns; k outside `[1, vocab_size]`.
    """
    values, token_ids = select_best(logits, k, shard, "top_k")
    shape = (*logits.shape[:-1], k)
    return TopK(values.to(logits.dtype).view(shape), token_ids.view(shape))
