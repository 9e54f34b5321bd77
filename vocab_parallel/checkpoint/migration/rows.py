"""The rows of a stored table under another vocabulary, made block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vocab_parallel.checkpoint.files import StoredTensors
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import OldRows, RowInit
from vocab_parallel.vocabulary.migration.statistics import ColumnStatistics, column_statistics, require_finite

READ_BYTES = 2**18  # that are read at a time beside a block
Fill = Callable[[Sequence[int]], Tensor]  # new ids -> their rows [n, ...]


def moved_rows(
    stored: StoredTensors, key: str, vocab_map: VocabMap, first: int, count: int, fill: Fill | None = None
) -> Rows:
    """New rows `[first, first + count)` of a stored table: old rows by the map, bit for bit, the others by `fill`.

    Args:
        stored: The checkpoint with the old rows.
        key: Of the table, or of a row-shaped state of it.
        vocab_map: From the old ids to the new.
        fill: Gives the rows of new ids; None: zeros.

    Memory:
        When the rows are made: a block, and `READ_BYTES` for what is read into it.
    """
    dtype, size = stored.tensors[key]

    def make(start: int, stop: int) -> Tensor:
        old = vocab_map.new_to_old[start:stop]
        kept = old >= 0
        if bool(kept.all()):
            return stored.rows_of(key, old)
        block = torch.zeros((stop - start, *size[1:]), dtype=dtype)
        places, step = kept.nonzero()[:, 0], _rows_read(dtype, size[1:])
        for at in torch.split(places, step):
            bits(block)[at] = bits(stored.rows_of(key, old[at]))
        if fill is not None:
            for at in torch.split((~kept).nonzero()[:, 0], step):
                bits(block)[at] = bits(fill((at + start).tolist()).to(dtype))
        return block

    return Rows.made((vocab_map.new_size, *size[1:]), dtype, first, count, make)


class NewRows:
    """How the new rows of one stored table begin.

    Args:
        stored: The checkpoint with the old table.
        key: Of the table.
        vocab_map: Its new ids are those without an old row.
        init: Says how they begin.

    Memory:
        As much as `moved_rows`; statistics of all rows, where `init` reads them, are taken here, once, in blocks.

    Raises:
        NonFiniteError: `init` reads a row with NaN or an infinity.
    """

    def __init__(self, stored: StoredTensors, key: str, vocab_map: VocabMap, init: RowInit) -> None:
        self._stored, self._key, self._map, self._init = stored, key, vocab_map, init
        self._dtype, size = stored.tensors[key]
        self._shape = tuple(size[1:])
        self._step = _rows_read(self._dtype, self._shape)
        self._statistics: ColumnStatistics | None = None
        if init.needs_statistics(vocab_map):
            self._statistics = column_statistics(key, self._blocks, self._shape, spread=init.spread)

    def __call__(self, new_ids: Sequence[int]) -> Tensor:
        """The rows of some new ids, `[len(new_ids), ...]` in the table's dtype."""
        result = torch.empty(len(new_ids), *self._shape, dtype=self._dtype)
        for start, stop, needed in self._groups(new_ids):
            old = OldRows(self._shape, self._dtype, fetched=self._fetch(needed), statistics=self._statistics)
            result[start:stop] = self._init.rows(new_ids[start:stop], self._map, old)
        return result

    def _fetch(self, needed: list[int]) -> dict[int, Tensor]:
        if not needed:
            return {}
        rows = self._stored.rows_of(self._key, torch.tensor(needed, dtype=torch.int64))
        require_finite(self._key, needed, rows)
        return dict(zip(needed, rows, strict=True))

    def _groups(self, new_ids: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        """Runs of the ids that read no more old rows than a block has, each with these, ascending."""
        start, needed = 0, set[int]()
        for at, new_id in enumerate(new_ids):
            more = set(self._init.needs(new_id, self._map))
            if at > start and len(needed) + len(more - needed) > self._step:
                yield start, at, sorted(needed)
                start, needed = at, set()
            needed.update(more)
        if len(new_ids) > start:
            yield start, len(new_ids), sorted(needed)

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        size = self._map.old_size
        for first in range(0, size, self._step):
            yield first, self._stored.read(self._key, first, min(first + self._step, size))


def _rows_read(dtype: torch.dtype, row_shape: Sequence[int]) -> int:
    return max(1, READ_BYTES // max(1, math.prod(row_shape) * dtype.itemsize))


def bits(values: Tensor) -> Tensor:
    """The same memory as integers: they move in every dtype, and a NaN keeps its payload."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(kinds[values.dtype.itemsize]) if values.dtype.itemsize in kinds else values
