"""Where the rows of a fused loss come from and where their gradient goes: replicated rows, or sequence-parallel ones.

A plan cuts the rows of the group into chunks, hands out each chunk's hidden states, and takes back each chunk's
partial `dH`, which it reduces over the shards while later chunks compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange
from vocab_parallel.collectives import Pending, all_gather, all_reduce_, gather_rows, pad_rows, reduce_scatter
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.shard import VocabShard


def row_numbers(chunk: slice | Tensor) -> range | Tensor:
    """The rows of a chunk of a plan."""
    return range(chunk.start, chunk.stop) if isinstance(chunk, slice) else chunk


class RowPlan(Protocol):
    """The rows of one call."""

    @property
    def chunks(self) -> Sequence[slice | Tensor]:
        """For each chunk the rows of the group it takes, as a slice or as an int64 tensor with -1 for filler.

        At least one chunk, empty where there are no rows: an exchange still has to find that out.
        """

    def hidden(self, chunk: int) -> Tensor:
        """The chunk's hidden states `[C, D]`, the same on every rank."""

    def reduce(self, chunk: int, grad: Tensor) -> None:
        """Starts summing the chunk's partial dH `[C, D]` over the shards."""

    def input_grad(self) -> Tensor:
        """The dH of this rank's `input` rows, after all `reduce`."""

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """The chunks' per-row values `[C]`, as one `[T]` in row order."""

    def whole(self, per_row: Tensor, filler: float = 0) -> Tensor:
        """`[T, ...]` of the group, from per-row values given for this rank's target.

        A plan with filler rows adds one row of `filler` at the end, where the filler's index -1 finds it.
        """

    def mine(self, per_row: Tensor) -> Tensor:
        """The part of `[T]` that this rank's target covers."""


class ReplicatedRows:
    """Every rank holds all rows `[T, D]`; dH is all-reduced in place, chunk by chunk."""

    def __init__(self, input: Tensor, shard: VocabShard, chunk_size: int) -> None:
        self._input, self._shard = input, shard
        total = len(input)
        self.chunks = [slice(at, min(at + chunk_size, total)) for at in range(0, max(total, 1), chunk_size)]
        self._grad: Tensor | None = None
        self._pending: list[Pending] = []

    def hidden(self, chunk: int) -> Tensor:
        return self._input[self.chunks[chunk]]

    def reduce(self, chunk: int, grad: Tensor) -> None:
        if self._grad is None:
            self._grad = torch.empty_like(self._input, memory_format=torch.contiguous_format)
        rows = self._grad[self.chunks[chunk]]
        rows.copy_(grad)
        self._pending.append(all_reduce_(self._shard, rows))

    def input_grad(self) -> Tensor:
        for pending in self._pending:
            pending.wait()
        assert self._grad is not None
        return self._grad

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def whole(self, per_row: Tensor, filler: float = 0) -> Tensor:
        return per_row

    def mine(self, per_row: Tensor) -> Tensor:
        return per_row


class SequenceParallelRows:
    """Each rank holds some rows `[t, D]`, t of its own choice; chunks are gathered ahead, dH is reduce-scattered.

    Chunk j takes rows `[j c, (j + 1) c)` of every rank, `c = chunk_size / tp`, with filler rows where a rank has fewer.
    """

    def __init__(
        self, input: Tensor, shard: VocabShard, chunk_size: int, rows: list[int], *, local_target: bool
    ) -> None:
        self._input, self._shard, self._rows = input, shard, rows
        self._local_target = local_target
        step = max(1, chunk_size // shard.tp_size)
        starts = torch.tensor([0, *rows]).cumsum(0)[:-1].tolist()
        self._slices: list[slice] = []
        self._widths: list[int] = []
        self.chunks: list[Tensor] = []
        for at in range(0, max(*rows, 1), step):
            width = min(step, max(rows) - at)
            self._slices.append(slice(min(at, len(input)), min(at + width, len(input))))
            self._widths.append(width)
            offset = torch.arange(at, at + width)
            index = [torch.where(offset < count, start + offset, -1) for start, count in zip(starts, rows, strict=True)]
            self.chunks.append(torch.cat(index).to(input.device))
        self._ahead: tuple[int, Pending] | None = None
        self._grad: Tensor | None = None
        self._reduced: tuple[slice, Pending] | None = None  # of the chunk before

    def _gather(self, chunk: int) -> Pending:
        return all_gather(self._shard, pad_rows(self._input[self._slices[chunk]], self._widths[chunk]))

    def hidden(self, chunk: int) -> Tensor:
        pending = self._ahead[1] if self._ahead and self._ahead[0] == chunk else self._gather(chunk)
        gathered = pending.wait().flatten(0, 1)
        self._ahead = (chunk + 1, self._gather(chunk + 1)) if chunk + 1 < len(self.chunks) else None
        return gathered

    def reduce(self, chunk: int, grad: Tensor) -> None:
        self._take_reduced()  # long done; what it holds is the size of the group's dH of a chunk
        self._reduced = self._slices[chunk], reduce_scatter(self._shard, grad.to(self._input.dtype))

    def _take_reduced(self) -> Tensor:
        if self._grad is None:
            self._grad = torch.zeros_like(self._input, memory_format=torch.contiguous_format)
        if self._reduced is not None:
            rows, pending = self._reduced
            self._grad[rows] = pending.wait()[: rows.stop - rows.start]
            self._reduced = None
        return self._grad

    def input_grad(self) -> Tensor:
        return self._take_reduced()

    def in_order(self, parts: Sequence[Tensor]) -> Tensor:
        out = parts[0].new_zeros(sum(self._rows) + 1)  # the last takes the filler rows
        for index, part in zip(self.chunks, parts, strict=True):
            out[index] = part
        return out[:-1]

    def whole(self, per_row: Tensor, filler: float = 0) -> Tensor:
        rows = gather_rows(self._shard, per_row, self._rows) if self._local_target else per_row
        return torch.cat([rows, rows.new_full((1, *rows.shape[1:]), filler)])

    def mine(self, per_row: Tensor) -> Tensor:
        return torch.split(per_row, self._rows)[self._shard.rank] if self._local_target else per_row


def agree_on_rows(
    input: Tensor, target_rows: int, shard: VocabShard, call: str, check: Tensor
) -> tuple[list[int], bool]:
    """Exchanges the row counts of sequence-parallel ranks.

    Args:
        target_rows: How many rows this rank's target has.
        check: Checksum of what must be the same on every rank, if the targets cover all rows.

    Returns:
        Each rank's rows, and whether the target covers this rank's rows only (else all rows of the group).

    Collectives:
        One `Exchange` without payload.

    Raises:
        LayoutMismatchError: On every rank, if the targets fit neither.
    """
    exchange = Exchange(
        shard, "loss", call, rows=len(input), target_rows=target_rows, checksum=check, compare_checksum=False,
        device=input.device,
    )  # fmt: skip
    exchange.wait()
    rows, targets = exchange.rows, exchange.target_rows
    if targets == rows:
        return rows, True
    if any(count != sum(rows) for count in targets):
        table = ", ".join(
            f"rank {r}: input {n}, target {t}" for r, (n, t) in enumerate(zip(rows, targets, strict=True))
        )
        raise LayoutMismatchError(
            f"with sequence_parallel every rank's target must cover its own rows, or every rank's all {sum(rows)} "
            f"rows of the group; got rows {table}."
        )
    if shard.tp_size > 1:
        exchange.require_equal_checksums()
    return rows, False
