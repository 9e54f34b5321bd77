"""The embedding over a sharded vocabulary: each rank looks up the ids it owns, one reduction makes the rows whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vocab_parallel.adjoints import ScatterRows, SumOverShards
from vocab_parallel.agreement import Exchange, capture, checksum
from vocab_parallel.arguments import check_embedding, ids_found, local_rows
from vocab_parallel.collectives import apply, gather_rows, uncompiled
from vocab_parallel.shard import VocabShard

_INIT_BLOCK = 1024  # global rows that share a random stream


@uncompiled
def vocab_parallel_embedding(
    input: Tensor,  # [...] int64, the same on every rank; with own_rows this rank's own
    weight: Tensor,  # [shard_size, D]
    *,
    shard: VocabShard,
    padding_idx: int | None = None,
    sequence_parallel: bool = False,
    own_rows: bool = False,
) -> Tensor:
    """The rows of a sharded table, `table[input]`, in the weight's dtype.

    Args:
        input: Global token ids, all of the group's, also with `sequence_parallel`.
        weight: This rank's rows; padding rows are never read and get zero gradient.
        padding_idx: A global id whose row gets no gradient, as in `torch.nn.functional.embedding`.
        sequence_parallel: Return only this rank's rows of the first dimension: with n rows over tp ranks, rank r gets
            `[r c, (r + 1) c)`, `c = ceil(n / tp)`, so the last ranks may have fewer or none.
        own_rows: Each rank passes ids of its own, any number of them, also none, and gets their rows: data-parallel
            ranks that share one table. The gradient of a row is the sum of what all ranks have for it.

    Returns:
        `[..., D]`, the same bits on every rank; with `sequence_parallel` this rank's rows `[t, ..., D]`, with
        `own_rows` those of its own ids.

    Collectives:
        Forward: a 64-byte all-gather in which the ranks agree on the ids, in flight during the lookup; then one
        all-reduce of the rows (a reduce-scatter with `sequence_parallel`). Backward: none (one all-gather of the
        rows' gradient). With `own_rows` one all-gather more, of the ids, and the reduce-scatter with its adjoint, each
        as large as the rank with the most ids needs. None at tp_size 1.

    Raises:
        TokenRangeError, LayoutMismatchError, UngatheredWeightError: On every rank, though only one may have seen it.
    """
    if own_rows:
        return _own_rows(input, weight, shard, padding_idx, sequence_parallel)
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
    rows = _lookup(input, weight, shard, padding_idx)
    exchange.wait()
    if sequence_parallel:
        return apply(ScatterRows, rows, shard, sequence_rows(len(input), shard.tp_size))
    if shard.tp_size == 1:
        return rows
    return apply(SumOverShards, rows, shard)


def _lookup(input: Tensor, weight: Tensor, shard: VocabShard, padding_idx: int | None) -> Tensor:
    """This rank's part of the rows: zero where another rank owns the id."""
    owned = (input >= shard.start) & (input < shard.stop)
    local = torch.where(owned, input - shard.start, 0)
    skip = padding_idx - shard.start if padding_idx is not None and shard.start <= padding_idx < shard.stop else None
    return F.embedding(local, weight, padding_idx=skip).masked_fill(~owned[..., None], 0.0)


def _own_rows(
    input: Tensor, weight: Tensor, shard: VocabShard, padding_idx: int | None, sequence_parallel: bool
) -> Tensor:
    """The rows of each rank's own ids: all ids are gathered, looked up where they live, and the rows sent back."""

    def check() -> None:
        check_embedding(input, weight, shard, padding_idx)
        if sequence_parallel:
            raise ValueError("own_rows and sequence_parallel exclude each other: ids are a rank's own, or all the same")

    fault = capture(check)
    wanted = "wanted" if torch.is_grad_enabled() and weight.requires_grad else "not wanted"
    call = (
        f"vocab_parallel_embedding(input of its own, weight {list(weight.shape)} {weight.dtype}, {padding_idx=}, "
        f"gradient {wanted})"
    )
    ids = input.reshape(-1).to(torch.int64) if fault is None else torch.empty(0, dtype=torch.int64)
    found = ids_found(input, shard) if fault is None else None
    exchange = Exchange(shard, "header", call, fault=fault, rows=len(ids), found=found, device=weight.device)
    exchange.wait()
    if shard.tp_size == 1:
        return _lookup(input, weight, shard, padding_idx)
    rows = _lookup(gather_rows(shard, ids, exchange.rows), weight, shard, padding_idx)
    return apply(ScatterRows, rows, shard, exchange.rows).view(*input.shape, weight.shape[1])


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
        own_rows: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dim, self.shard = embedding_dim, shard
        self.padding_idx, self.sequence_parallel, self.own_rows = padding_idx, sequence_parallel, own_rows
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
            local_rows(self.weight, self.shard),
            shard=self.shard,
            padding_idx=self.padding_idx,
            sequence_parallel=self.sequence_parallel,
            own_rows=self.own_rows,
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
        generator = torch.Generator("cpu").manual_seed(seed * 1_000_003 + first)
        block = (
            torch.randn(_INIT_BLOCK, *weight.shape[1:], generator=generator, device="cpu", dtype=torch.float32) * std
        )
        start, stop = max(first, shard.start), min(first + _INIT_BLOCK, shard.stop)
        weight[start - shard.start : stop - shard.start] = block[start - first : stop - first].to(weight)
