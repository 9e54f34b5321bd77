"""The embedding over a sharded vocabulary: each rank looks up the ids it owns, one reduction makes the rows whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vocab_parallel.agreement import Exchange, capture, checksum
from vocab_parallel.arguments import check_embedding, ids_found
from vocab_parallel.collectives import ScatterRows, SumOverShards, apply, uncompiled
from vocab_parallel.shard import VocabShard

_INIT_BLOCK = 1024  # global rows that share a random stream


@uncompiled
def vocab_parallel_embedding(
    input: Tensor,  # [...] int64, the same on every rank
    weight: Tensor,  # [shard_size, D]
    *,
    shard: VocabShard,
    padding_idx: int | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """The rows of a sharded table, `table[input]`, in the weight's dtype.

    Args:
        input: Global token ids, all of the group's, also with `sequence_parallel`.
        weight: This rank's rows; padding rows are never read and get zero gradient.
        padding_idx: A global id whose row gets no gradient, as in `torch.nn.functional.embedding`.
        sequence_parallel: Return only this rank's rows of the first dimension: with n rows over tp ranks, rank r gets
            `[r c, (r + 1) c)`, `c = ceil(n / tp)`, so the last ranks may have fewer or none.

    Returns:
        `[..., D]`, the same bits on every rank; with `sequence_parallel` this rank's rows `[t, ..., D]`.

    Collectives:
        Forward: a 64-byte all-gather in which the ranks agree on the ids, in flight during the lookup; then one
        all-reduce of the rows (a reduce-scatter with `sequence_parallel`). Backward: none (one all-gather of the
        rows' gradient). None at tp_size 1.

    Raises:
        TokenRangeError, LayoutMismatchError, UngatheredWeightError: On every rank, though only one may have seen it.
    """
    fault = capture(check_embedding, input, weight, shard, padding_idx)
    call = "vocab_parallel_embedding"
    if fault is not None:
        Exchange(shard, "header", call, fault=fault).wait()
    call += (
        f"(input {list(input.shape)}, weight {list(weight.shape)} {weight.dtype}, {padding_idx=}, "
        f"{sequence_parallel=}, "
        f"gradient {'wanted' if torch.is_grad_enabled() and weight.requires_grad else 'not wanted'})"
    )
    exchange = Exchange(
        shard, "header", call, checksum=checksum(input), found=ids_found(input, shard), device=weight.device
    )
    owned = (input >= shard.start) & (input < shard.stop)
    local = torch.where(owned, input - shard.start, 0)
    skip = padding_idx - shard.start if padding_idx is not None and shard.start <= padding_idx < shard.stop else None
    rows = F.embedding(local, weight, padding_idx=skip).masked_fill(~owned[..., None], 0.0)
    exchange.wait()
    if sequence_parallel:
        return apply(ScatterRows, rows, shard, sequence_rows(len(input), shard.tp_size))
    if shard.tp_size == 1:
        return rows
    return apply(SumOverShards, rows, shard)


def sequence_rows(rows: int, tp_size: int) -> list[int]:
    """How many of `rows` each sequence-parallel rank holds: `ceil(rows / tp_size)` each until they run out."""
    share = -(-rows // tp_size)
    return [min(share, max(0, rows - rank * share)) for rank in range(tp_size)]


class VocabParallelEmbedding(nn.Module):
    """`torch.nn.Embedding` over a sharded vocabulary. See `vocab_parallel_embedding`.

    Attributes:
        weight: This rank's rows, `[shard_size, embedding_dim]`.
    """

    def __init__(
        self,
        embedding_dim: int,
        *,
        shard: VocabShard,
        padding_idx: int | None = None,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim, self.shard = embedding_dim, shard
        self.padding_idx, self.sequence_parallel = padding_idx, sequence_parallel
        self.weight = nn.Parameter(torch.empty(shard.shard_size, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self, *, seed: int = 0, std: float = 0.02) -> None:
        """Normal rows, the same bits for a token id at any TP size; zero padding rows and `padding_idx` row."""
        init_rows_(self.weight, self.shard, seed=seed, std=std)
        if self.padding_idx is not None and self.shard.start <= self.padding_idx < self.shard.stop:
            with torch.no_grad():
                self.weight[self.padding_idx - self.shard.start].zero_()

    def forward(self, input: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            input,
            self.weight,
            shard=self.shard,
            padding_idx=self.padding_idx,
            sequence_parallel=self.sequence_parallel,
        )

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, {self.shard}"


@torch.no_grad()
def init_rows_(weight: Tensor, shard: VocabShard, *, seed: int, std: float) -> None:
    """Fills this rank's rows `[shard_size, ...]` with normal values that depend on (seed, global row) only."""
    weight.zero_()
    if weight.is_meta:
        return
    for first in range(shard.start - shard.start % _INIT_BLOCK, shard.stop, _INIT_BLOCK):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + first)
        block = torch.randn(_INIT_BLOCK, *weight.shape[1:], generator=generator) * std
        start, stop = max(first, shard.start), min(first + _INIT_BLOCK, shard.stop)
        weight[start - shard.start : stop - shard.start] = block[start - first : stop - first].to(weight)
