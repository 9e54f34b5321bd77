"""Candidates that every rank holds as the ranks' columns again, for a transform that needs more than they are."""

from __future__ import annotations

from dataclasses import replace

from vocab_parallel.decode.transforms.history import places
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.scores import Scores
from vocab_parallel.shard import VocabShard


def as_columns(scores: Scores) -> Scores:
    """The same scores with each column on the rank that owns its id, -inf where there was no candidate."""
    if not scores.replicated:
        return scores
    channel = ranks_of(scores)
    shard, values = channel.group, scores.values
    assert isinstance(shard, VocabShard)
    token_ids = shard.token_ids(values.device)
    n = len(token_ids)
    columns = values.new_full((len(values), n + 1), -float("inf"))  # the last takes what other ranks own
    columns.scatter_(1, places(token_ids, n, scores.token_ids), values)
    return replace(
        scores, values=columns[:, :n].contiguous(), token_ids=token_ids, channel=channel, masses=None, sums=None
    )


def ranks_of(scores: Scores) -> Channel:
    """The channel of the ranks that share the vocabulary, also where `scores` are candidates that all of them hold."""
    if not scores.replicated:
        return scores.channel
    group = scores.channel.group
    while group.within is not None:
        group = group.within
    channel = Channel(group, scores.channel.call)
    channel.opened = channel.agreed = True  # candidates come of an exchange
    return channel
