"""The best k tokens of each row over all shards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.select.keys import floats, ids_of, integers, values_of
from vocab_parallel.select.scores import FEW_KEYS, Peak, best, best_words, describe, may_use_words, open_scores
from vocab_parallel.select.support import require_support
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
    shape = (*logits.shape[:-1], k)
    if may_use_words(scores) and scores.rows * k <= FEW_KEYS:
        rows = best_words(scores, k)
        keys = [key for row in rows for key in row]
        found = values_of(keys)
        values, token_ids = floats(found).view(shape), integers(ids_of(keys)).view(shape)
        if all(value > -math.inf for value in found[::k]):
            return TopK(values if logits.dtype == torch.float32 else values.to(logits.dtype), token_ids)
    else:
        values, token_ids = best(scores, k)
    best_of_each = Peak(values.view(-1, k)[:, 0], token_ids.view(-1, k)[:, 0])
    require_support(replace(scores, peak=best_of_each), best_of_each.values)
    return TopK(values.to(logits.dtype).view(shape), token_ids.view(shape))


def _is_k(k: object, vocab_size: int) -> bool:
    return isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= vocab_size
