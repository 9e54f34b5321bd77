"""The best token of each row over all shards."""

from __future__ import annotations

from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.select.scores import describe, open_scores, peak_of, require_support, with_peak
from vocab_parallel.shard import VocabShard


@uncompiled
def greedy(
    logits: Tensor,  # [..., shard_size] floating, this rank's
    *,
    shard: VocabShard,
) -> Tensor:
    """The token id of the largest logit; of equal ones the smallest id.

    Args:
        logits: This rank's columns; padding columns are never read and never selected.

    Returns:
        int64 `[...]`, global ids, the same on every rank.

    Collectives:
        One all-gather of 8 bytes a row (16 for float64). None at tp_size 1.

    Raises:
        NonFiniteError, LayoutMismatchError: On every rank: a row with NaN or without a finite logit; not this rank's
            columns.
    """
    scores = open_scores(logits, shard, f"greedy(logits {describe(logits)})", may_hide_nan=False)
    scores = with_peak(scores)
    peak = peak_of(scores)
    require_support(scores, peak.values)
    return peak.token_ids.view(logits.shape[:-1])
