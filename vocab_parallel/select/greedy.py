"""The best token of each row over all shards."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.select.keys import floats, ids_of, integers, values_of
from vocab_parallel.select.scores import Peak, best_words, describe, may_use_words, open_scores, peak_of, with_peak
from vocab_parallel.select.support import require_support
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
    if may_use_words(scores):
        keys = [key for (key,) in best_words(scores, 1)]
        if all(value > -math.inf for value in values_of(keys)):
            return integers(ids_of(keys)).view(logits.shape[:-1])
        scores = replace(scores, peak=Peak(floats(values_of(keys)), integers(ids_of(keys))))
    scores = with_peak(scores)
    peak = peak_of(scores)
    require_support(scores, peak.values)
    return peak.token_ids.view(logits.shape[:-1])
