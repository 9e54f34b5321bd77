"""The best tokens of each row with their log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.arguments import check_logits
from vocab_parallel.collectives import uncompiled
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.masses import Masses, measure
from vocab_parallel.select.nan import nan_found
from vocab_parallel.select.scores import Scores, describe, top_candidates
from vocab_parallel.shard import VocabShard


class TopLogprobs(NamedTuple):
    """token_ids: int64 `[..., n]`, best first, -1 past the support. logprobs: float64 `[..., n]`, nats, -inf there."""

    token_ids: Tensor
    logprobs: Tensor


@uncompiled
def top_logprobs(
    logits: Tensor,  # [..., shard_size] floating, this rank's
    n: int,
    *,
    shard: VocabShard,
) -> TopLogprobs:
    """The n most likely tokens of each row and their log-probabilities, in the total order.

    Args:
        logits: This rank's columns; padding columns are never read.
        n: At most `vocab_size`.

    Returns:
        `TopLogprobs`, the same bits on every rank and at every TP size. Where fewer than n ids are above -inf, the
        rest has id -1 and log-probability -inf.

    Collectives:
        Two all-gathers, of `8 n` and of 8 bytes a row (`16 n` and 8 for float64). None at tp_size 1.

    Raises:
        NonFiniteError, LayoutMismatchError, ValueError: On every rank: a row with NaN, +inf or without a finite logit;
            not this rank's columns; n outside `[1, vocab_size]`.
    """
    channel = Channel(shard, f"top_logprobs({describe(logits)}, n={n!r})", found=nan_found(logits, shard))
    with channel.guard():
        check_logits(logits, shard)
        check_count(n, shard.vocab_size)
    best = best_logprobs(Scores.of(logits, shard, channel), n)
    shape = (*logits.shape[:-1], n)
    return TopLogprobs(best.token_ids.view(shape), best.logprobs.view(shape))


def best_logprobs(scores: Scores, n: int, masses: Masses | None = None) -> TopLogprobs:
    """As `top_logprobs`, of scores `[T, V]` over the ranks, whose masses may be known already."""
    best = top_candidates(scores, n)
    if masses is None:
        masses = measure(replace(scores, peak=best.peak, largest=best.largest))
    values, order = best.values.sort(dim=1, descending=True, stable=True)  # ids ascend, so equal values stay in order
    token_ids = best.token_ids.gather(1, order)
    absent = values == -torch.inf
    return TopLogprobs(torch.where(absent, -1, token_ids), torch.where(absent, -torch.inf, masses.logprob(values)))


def check_count(n: object, vocab_size: int) -> None:
    """Raises unless n is a number of tokens in `[1, vocab_size]`."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= vocab_size:
        raise ValueError(f"n must be an integer in [1, {vocab_size}] (the vocabulary), got {n!r}")
