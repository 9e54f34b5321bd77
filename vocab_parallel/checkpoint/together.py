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
from vocab_parallel.errors import CheckpointLayoutError, VocabParallelError
from vocab_parallel.shard import RankGroup, VocabShard


def ranks_of(model: nn.Module, shard: VocabShard, group: RankGroup | None) -> RankGroup:
    """Every rank that holds a part of a model: those of the shard, or of the DTensors' mesh.

    Collectives:
        Of the first call for a mesh of several dimensions, over its ranks: they make a group.
    """
    if group is not None:
        require_all(group, shard)
        return group
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not meshes:
        return shard
    mesh = max(meshes, key=lambda mesh: mesh.mesh.numel())
    wide = [at for at in range(mesh.ndim) if mesh.size(at) > 1]
    if len(wide) > 1:
        found = shard.of_ranks(tuple(sorted(mesh.mesh.flatten().tolist())))
    else:
        found = shard.wider(mesh.get_group(wide[0] if wide else 0))
    require_all(found, shard)
    return found


def require_all(group: RankGroup, shard: VocabShard) -> None:
    """Raises unless the ranks of `group` hold all rows of the vocabulary: else some would be in no file."""
    ranks, others = (
        set() if one.group is None else {*dist.get_process_group_ranks(one.group)} for one in (group, shard)
    )
    if not others <= ranks:
        raise CheckpointLayoutError(
            f"a checkpoint of {sorted(ranks) or 'this rank alone'}, but ranks {sorted(others)} share the vocabulary: "
            "pass the model's shard as group, or a RankGroup of all ranks of the job"
        )


def agree(group: RankGroup, call: str, fault: Exception | None) -> None:
    """Raises the error that some rank has, on every rank, and at once: what follows changes something.

    Collectives:
        An all-gather of 64 bytes; on an error, one of 4 KiB.
    """
    Exchange(group, "header", call, fault=fault, rows=0).wait()


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
