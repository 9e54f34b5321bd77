"""What the ranks that save or load one checkpoint do together: they agree, and an error of one is one of all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.collectives import all_gather
from vocab_parallel.errors import VocabParallelError
from vocab_parallel.shard import RankGroup, VocabShard


def ranks_of(model: nn.Module, shard: VocabShard, group: RankGroup | None) -> RankGroup:
    """Every rank that holds a part of a model: those of the shard, or all where parameters are DTensors."""
    if group is not None:
        return group
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return shard.wider(dist.group.WORLD) if dist.group.WORLD is not None else shard
    return shard


def gather_objects(group: RankGroup, call: str, value: Any, fault: Exception | None = None) -> list[Any]:
    """Every rank's `value` in rank order; or the error that some rank has, on every rank.

    Args:
        call: What the ranks are doing, in words; the same on every rank or an error.
        value: Anything that pickles; it comes from the ranks of this job only.

    Collectives:
        An all-gather of 64 bytes, then one of the largest value; on an error, one of 4 KiB.
    """
    content = pickle.dumps(value) if fault is None and group.size > 1 else b""
    exchange = Exchange(group, "header", call, fault=fault, rows=len(content))
    exchange.wait()
    if group.size == 1:
        return [value]
    buffer = torch.zeros(max(exchange.rows), dtype=torch.uint8)
    buffer[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    gathered = all_gather(group, buffer.to(group.device)).wait().cpu()
    return [_loaded(row[:size]) for row, size in zip(gathered, exchange.rows, strict=True)]


def caught(what: str, work: Callable[..., Any], *args: Any) -> Exception | None:
    """`agreement.capture`, with every error as one that keeps its class on its way to the other ranks."""
    error = capture(work, *args)
    if error is None or isinstance(error, VocabParallelError):
        return error
    made = VocabParallelError(f"{what}: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def _loaded(row: torch.Tensor) -> Any:
    content = bytearray(len(row))
    torch.frombuffer(content, dtype=torch.uint8).copy_(row)
    return pickle.loads(content)
