"""Rows of a vocabulary table as `torch.distributed.checkpoint` saves and loads them: by global row, in small blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

BLOCK_BYTES = 4 * 2**20  # of one block in a file at most: what a reader or a writer of rows holds at a time
_LEAST_BYTES = 2**18
_BLOCKS = 32  # of a table that is not large, at most: a block is then little beside a shard


class Rows(Tensor):
    """Consecutive rows `[first, first + count)` of a global table `[total, ...]`.

    Implements the `_Checkpointable` protocol of `torch.distributed.checkpoint`; no operation works on it. As the files
    know rows by their global number only, any other cut of the same table loads from them.
    """

    _first: int
    _count: int
    _give: Callable[[int, int], Tensor]

    @staticmethod
    def of(local: Tensor, first: int, total: int) -> Rows:  # local: [count, ...]
        """The rows in `local`: saved from it, or loaded into it in place."""
        size = (total, *local.shape[1:])
        return _rows(size, local.dtype, local.device, first, len(local), lambda a, b: local[a - first : b - first])

    @staticmethod
    def made(
        size: Sequence[int], dtype: torch.dtype, first: int, count: int, make: Callable[[int, int], Tensor]
    ) -> Rows:
        """Rows for saving only that `make(start, stop)` gives when they are written, one block at a time."""
        return _rows(tuple(size), dtype, torch.device("cpu"), first, count, make)

    @property
    def _step(self) -> int:
        """Rows a block."""
        return rows_in_block(self.shape, self.dtype)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        rest, last, step = self.shape[1:], self._first + self._count, self._step
        return [
            ChunkStorageMetadata(torch.Size([at, *[0] * len(rest)]), torch.Size([min(step, last - at), *rest]))
            for at in range(self._first, last, step)
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        start = index.offset[0]
        return self._give(start, min(start + self._step, self._first + self._count))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on rows that are only described for a checkpoint")


def rows_in_block(shape: Sequence[int], dtype: torch.dtype) -> int:
    """How many rows of a table of this whole shape are read or written at a time."""
    row = max(1, math.prod(shape[1:]) * dtype.itemsize)
    return max(1, min(BLOCK_BYTES, max(_LEAST_BYTES, math.prod(shape) * dtype.itemsize // _BLOCKS)) // row)


def _rows(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, first: int, count: int,
    give: Callable[[int, int], Tensor],
) -> Rows:  # fmt: skip
    make: Any = Tensor._make_wrapper_subclass
    made: Rows = make(Rows, size, dtype=dtype, device=device)
    made._first, made._count, made._give = first, count, give
    return made
