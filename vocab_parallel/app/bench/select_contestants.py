"""Ways to select tokens from sharded logits: ours, and gathering the rows first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.app.bench.select_problem import Problem
from vocab_parallel.select import Streams, greedy, sample, top_k
from vocab_parallel.shard import VocabShard

K, P = 50, 0.9
# Renamed in torch 2.13, where the old name warns.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One selection.

    Attributes:
        plain: Of whole float32 logits `[B, V]` with torch alone; the generator is the same on every rank. Ids.
        ours: Of this rank's logits. Ids.
    """

    plain: Callable[[Tensor, torch.Generator], Tensor]
    ours: Callable[[Tensor, VocabShard, Streams], Tensor]


def _top_p_plain(logits: Tensor, draw: torch.Generator) -> Tensor:
    p, ids = logits.softmax(-1).sort(-1, descending=True)
    p = p.masked_fill(p.cumsum(-1) - p >= P, 0.0)
    return ids.gather(-1, torch.multinomial(p, 1, generator=draw))[:, 0]


def _top_k_top_p_plain(logits: Tensor, draw: torch.Generator) -> Tensor:
    """The cheap order: k candidates first, then the nucleus among them alone."""
    values, ids = logits.topk(K)
    p = values.softmax(-1)
    p = p.masked_fill(p.cumsum(-1) - p >= P, 0.0)
    return ids.gather(-1, torch.multinomial(p, 1, generator=draw))[:, 0]


OPERATIONS = {
    "greedy": Operation(
        lambda logits, draw: logits.argmax(-1),
        lambda logits, shard, streams: greedy(logits, shard=shard),
    ),
    "top_k": Operation(
        lambda logits, draw: logits.topk(K).indices,
        lambda logits, shard, streams: top_k(logits, K, shard=shard).token_ids,
    ),
    "sample": Operation(
        lambda logits, draw: torch.multinomial(logits.softmax(-1), 1, generator=draw)[:, 0],
        lambda logits, shard, streams: sample(logits, shard=shard, streams=streams).token_ids,
    ),
    "top_p": Operation(
        _top_p_plain,
        lambda logits, shard, streams: sample(logits, shard=shard, streams=streams, top_p=P).token_ids,
    ),
    "top_k_top_p": Operation(
        _top_k_top_p_plain,
        lambda logits, shard, streams: sample(logits, shard=shard, streams=streams, top_k=K, top_p=P).token_ids,
    ),
}


def _ours(operation: Operation, problem: Problem) -> Callable[[], Tensor]:
    return lambda: operation.ours(problem.logits, problem.shard, problem.streams)


def _gather(operation: Operation, problem: Problem) -> Callable[[], Tensor]:
    draw = torch.Generator(problem.logits.device).manual_seed(0)
    return lambda: operation.plain(gathered(problem), draw)


def _gather_ours(operation: Operation, problem: Problem) -> Callable[[], Tensor]:
    return lambda: operation.ours(gathered(problem), problem.alone, problem.streams)


# Each makes, of an operation and a problem, what is timed.
CONTESTANTS = {"ours": _ours, "gather": _gather, "gather_ours": _gather_ours}


def gathered(problem: Problem) -> Tensor:
    """The whole rows `[B, V]` on every rank, as Megatron-core and Transformers gather them."""
    mine, shard = problem.logits, problem.shard
    if shard.size == 1:
        return mine
    every = mine.new_empty(shard.size * len(mine), mine.shape[1])
    getattr(dist, _ALL_GATHER)(every, mine, group=shard.group)
    return every.view(shard.size, *mine.shape).movedim(0, 1).reshape(len(mine), -1)
