"""The best k tokens of each row over all shards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.select.scores import Peak, best, describe, may_use_words, open_scores, require_support
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

    k better candidates in a shard exclude any other of that shard, so k of each shard are enough.

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
    scores = open_scores(logits, shard, f"top_k(logits {describe(logits)}, k={k})", may_hide_nan=False)
    if not _is_k(k, shard.vocab_size):
        with scores.channel.guard():
            raise ValueError(f"k must be an integer in [1, {shard.vocab_size}] (the vocabulary), got {k!r}")
    values, token_ids = best(scores, k)
    if not may_use_words(scores) or not all(value > -math.inf for value in values[:, 0].tolist()):
        require_support(replace(scores, peak=Peak(values[:, 0], token_ids[:, 0])), values[:, 0])
    shape = (*logits.shape[:-1], k)
    return TopK(values.to(logits.dtype).view(shape), token_ids.view(shape))


def _is_k(k: object, vocab_size: int) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= vocab_size
