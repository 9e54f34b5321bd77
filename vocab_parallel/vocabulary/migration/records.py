"""What is remembered of a table to compare it later: a hash of each row, and the logits of a few fixed hidden rows.

Tables are read through functions, block by block, so that live shards and checkpoints serve alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.vocabulary.migration.normal_rows import normal_rows

Block = tuple[int, Tensor, Tensor | None]  # first id, hashes int64 [n], logits float64 [n, H]
RowReader = Callable[[int, int], Tensor]  # (start, stop) -> rows [stop - start, ...] of these consecutive ids

HIDDEN_ROWS = 4
_READ, _NUMBERS = 2**15, 2**13  # numbers that are read, and that are worked on at a time (64 KiB of float64)
_KEPT = 2**13  # ids that are compared at a time
_MIX = [word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]  # splitmix64's
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class TableRecord:
    """What is remembered of one table, of its `V` real rows in order of their ids.

    Attributes:
        hashes: Of the bits of each row.
        logits: Of each id for the fixed hidden rows; None of what is no head.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    hashes: Tensor  # int64 [V]
    logits: Tensor | None = None  # float64 [V, H]

    @property
    def size(self) -> int:
        return len(self.hashes)

    def blocks(self) -> Iterator[Block]:
        """The rows, some at a time."""
        for at in range(0, self.size, _KEPT):
            some = slice(at, at + _KEPT)
            yield at, self.hashes[some], None if self.logits is None else self.logits[some]


class TableBlocks(NamedTuple):
    """A table that is read when it is compared, block by block, and of which nothing is kept.

    Attributes:
        blocks: Gives `record_blocks` of its `size` rows.
    """

    dtype: str
    row_shape: tuple[int, ...]
    size: int
    blocks: Callable[[], Iterator[Block]]


def record_table(
    name: str,
    read: RowReader,
    start: int,
    stop: int,
    *,
    hidden: Tensor | None = None,  # float64 [H, D]
    bias: RowReader | None = None,
) -> TableRecord:
    """Records the rows of ids `[start, stop)`.

    Args:
        read: Called for consecutive blocks; of a 0-row range not at all.
        hidden: For a head: `fixed_hidden(D)`.
        bias: Of the head.

    Memory:
        One block, and `8 (1 + H)` bytes a row.
    """
    sample = read(start, min(start + 1, stop)) if stop > start else None
    row_shape = tuple(sample.shape[1:]) if sample is not None else ()
    # Made whole at once: small pieces kept between large blocks would hold the freed blocks' memory.
    hashes = torch.empty(stop - start, dtype=torch.int64)
    logits = None if hidden is None else torch.empty(stop - start, len(hidden), dtype=torch.float64)
    for at, some, scores in record_blocks(read, start, stop, row_shape, hidden=hidden, bias=bias):
        place = slice(at - start, at - start + len(some))
        hashes[place] = some
        if logits is not None and scores is not None:
            logits[place] = scores
    dtype = str(sample.dtype).removeprefix("torch.") if sample is not None else ""
    return TableRecord(name, dtype, row_shape, hashes, logits)


def record_blocks(
    read: RowReader,
    start: int,
    stop: int,
    row_shape: Sequence[int],
    *,
    hidden: Tensor | None = None,
    bias: RowReader | None = None,
) -> Iterator[Block]:  # hidden: float64 [H, D]
    """What `record_table` keeps, of one block of ids after another."""
    step, few = (max(1, numbers // max(1, math.prod(row_shape))) for numbers in (_READ, _NUMBERS))
    for at in range(start, stop, step):
        end = min(at + step, stop)
        rows, scores = read(at, end).detach(), None
        if hidden is not None:
            scores = torch.cat([exact_scores(part, hidden) for part in torch.split(rows, few)])
            scores = scores if bias is None else scores + bias(at, end).detach().double()[:, None]
        yield at, torch.cat([row_hashes(part) for part in torch.split(rows, few)]), scores


def fixed_hidden(width: int, count: int = HIDDEN_ROWS, seed: int = 0) -> Tensor:
    """The hidden rows that logits are compared on: float64 `[count, width]`, normal, the same everywhere."""
    return normal_rows(range(count), width, seed)


def exact_scores(rows: Tensor, hidden: Tensor) -> Tensor:
    """Logits `[n, H]` in float64 that depend on nothing but the row: `rows` `[n, D]`, `hidden` `[H, D]`.

    Added up along one fixed tree: a matrix product's order of additions depends on the number of rows.
    """
    each = []
    for one in hidden.to(rows.device):
        products = rows.double() * one
        while products.shape[1] > 1:
            half = (products.shape[1] + 1) // 2
            folded = products[:, :half].clone()
            folded[:, : products.shape[1] - half] += products[:, half:]
            products = folded
        each.append(products.sum(1))
    return torch.stack(each, 1)


def row_hashes(rows: Tensor) -> Tensor:
    """64 bits of each row's bits and their places: int64 `[n]`; -0.0 and 0.0 differ, as do NaNs."""
    size = math.prod(rows.shape[1:])
    words = rows.contiguous().view(_WORDS.get(rows.element_size(), torch.uint8)).view(len(rows), -1)
    places = torch.arange(1, words.shape[1] + 1, device=rows.device) * _MIX[0] if size else 0
    mixed = words.to(torch.int64) + places
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & (2**33 - 1))).sum(1)
