"""Collectives in autograd: each names its adjoint.

A backward first raises what forward left unread (see `deferral`): a rank that knows of an error issues nothing more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel.collectives import all_reduce_, gather_rows, scatter_rows
from vocab_parallel.shard import RankGroup


class SumOverShards(torch.autograd.Function):
    """Forward: all-reduce sum. Adjoint: identity, for a gradient that is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: RankGroup) -> Tensor:
        ctx.shard = shard
        return all_reduce_(shard, x.clone(memory_format=torch.contiguous_format)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.shard.raise_deferred()
        return grads[0], None


class CopyToShards(torch.autograd.Function):
    """Forward: identity on what every rank holds. Adjoint: all-reduce sum of the ranks' partial gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: RankGroup) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.shard.raise_deferred()
        return all_reduce_(ctx.shard, grads[0].clone(memory_format=torch.contiguous_format)).wait(), None


class GatherRows(torch.autograd.Function):
    """Forward: `gather_rows`. Adjoint: `scatter_rows` of the ranks' partial gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: RankGroup, rows: list[int]) -> Tensor:
        ctx.shard, ctx.rows = shard, rows
        gathered = gather_rows(shard, x, rows)
        return gathered.view_as(gathered) if gathered is x else gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.shard.raise_deferred()
        return scatter_rows(ctx.shard, grads[0], ctx.rows), None, None


class ScatterRows(torch.autograd.Function):
    """Forward: `scatter_rows`. Adjoint: `gather_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: RankGroup, rows: list[int]) -> Tensor:
        ctx.shard, ctx.rows = shard, rows
        scattered = scatter_rows(shard, x, rows)
        return scattered.view_as(scattered) if scattered is x else scattered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.shard.raise_deferred()
        return gather_rows(ctx.shard, grads[0], ctx.rows), None, None
