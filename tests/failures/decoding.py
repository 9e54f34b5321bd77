"""One step of a policy on whole rows, for the failures of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.failures.lab import whole_shard
from vocab_parallel import Streams, VocabShard
from vocab_parallel.decode import Policy, Step, View


def step_of(
    policy: Policy,
    logits: Tensor,  # [T, V], whole
    *,
    shard: VocabShard | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> Step:
    """One step of new requests: seed 0, request t in row t."""
    rows = len(logits)
    shard = shard or whole_shard(logits.shape[1])
    state = policy.start(rows, Streams.of([0] * rows, list(range(rows))))
    view = View.of(prompts or [[]] * rows)
    return policy.step(shard.slice(logits, -1), view, state, shard=shard, **options)


def probabilities(policy: Policy, logits: Tensor, **options: Any) -> Tensor:
    """What the policy draws from, `[T, V]`; with `logprobs="raw"` what the model said."""
    vocab = logits.shape[1]
    top = step_of(policy, logits, top_logprobs=vocab, **options).top
    assert top is not None
    ids = torch.where(top.token_ids < 0, vocab, top.token_ids)
    filled = torch.zeros(len(logits), vocab + 1, dtype=torch.float64)
    return filled.scatter(1, ids, top.logprobs.exp())[:, :vocab]


def kept(policy: Policy, logits: Tensor, **options: Any) -> list[list[int]]:
    """The ids that the policy leaves, row by row."""
    found = probabilities(policy, logits, **options) > 0
    return [row.nonzero()[:, 0].tolist() for row in found]


def log_of(*rows: Sequence[float]) -> Tensor:
    """Logits of rows of probabilities, float64 `[T, V]`."""
    return torch.tensor(rows, dtype=torch.float64).log()
