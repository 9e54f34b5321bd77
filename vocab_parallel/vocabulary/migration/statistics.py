"""Mean and standard deviation of a table's rows, exact: the same bits for any cut into blocks, shards and orders.

Each column is scaled by a power of two, rounded to integers and summed as integers, which has no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from vocab_parallel.errors import NonFiniteError

# Bits that a column's largest magnitude is scaled to. So many rows can be summed in an int64, which has 63.
_BITS = 36
_MOST_ROWS = 2 ** (62 - _BITS)
_HALF = _BITS // 2
_LOWEST_EXPONENT = -900  # smaller columns count as this large: their scale would overflow
_NUMBERS = 2**15  # that are worked on at a time: 256 KiB of float64

Blocks = Callable[[], Iterable[tuple[int, Tensor]]]  # gives (first id, rows [n, ...]) block by block, each time anew


def column_statistics(name: str, blocks: Blocks, row_shape: Sequence[int], *, spread: bool = False) -> ColumnStatistics:
    """The statistics of a table that one process reads in blocks.

    Args:
        name: What to call the table in an error.
        blocks: Called twice; gives the real rows, each once.
        row_shape: Shape of one row.
        spread: Whether the standard deviation is wanted too.

    Raises:
        NonFiniteError: A row with NaN or an infinity, by its id.
    """
    magnitudes = Magnitudes(name, row_shape)
    for first, rows in blocks():
        magnitudes.see(first, rows)
    statistics = ColumnStatistics(magnitudes, spread=spread)
    for _, rows in blocks():
        statistics.add(rows)
    return statistics


class Magnitudes:
    """The first of two passes: the largest magnitude of each column.

    Attributes:
        largest: float64 `[C]`, the columns of a row in order. Those of parts merge by the larger one.
    """

    def __init__(self, name: str, row_shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.name, self.row_shape = name, tuple(row_shape)
        self.largest = torch.zeros(math.prod(self.row_shape), dtype=torch.float64, device=device)

    def see(self, first: int, rows: Tensor) -> None:
        """Takes in the rows `[n, ...]` of the ids from `first` on.

        Raises:
            NonFiniteError: One of them has NaN or an infinity.
        """
        for at, chunk in _chunks(rows):
            require_finite(self.name, range(first + at, first + at + len(chunk)), chunk)
            torch.maximum(self.largest, chunk.abs().amax(0), out=self.largest)


class ColumnStatistics:
    """The second pass: integer sums of each column, scaled by its largest magnitude.

    Args:
        magnitudes: Of all rows; equal in all parts that are merged.
        spread: Whether to keep what the standard deviation needs too: three more sums.

    Attributes:
        sums: int64 `[2 or 5, C]`; those of parts add up, in any order.
        count: Rows that the sums are of.
    """

    def __init__(self, magnitudes: Magnitudes, *, spread: bool = False) -> None:
        self.row_shape, self._spread, self.count = magnitudes.row_shape, spread, 0
        _, exponent = torch.frexp(magnitudes.largest)
        exponent = torch.where(magnitudes.largest > 0, exponent, 0).clamp(min=_LOWEST_EXPONENT)
        self._shifts: list[int] = (_BITS - exponent).tolist()
        scale = [math.ldexp(1.0, shift) for shift in self._shifts]
        self._scale = torch.tensor(scale, dtype=torch.float64, device=exponent.device)
        self.sums = torch.zeros(5 if spread else 2, len(scale), dtype=torch.int64, device=exponent.device)

    def add(self, rows: Tensor) -> None:
        """Takes in rows `[n, ...]`."""
        if self.count + len(rows) > _MOST_ROWS:
            raise OverflowError(f"statistics are of at most {_MOST_ROWS} rows")
        self.count += len(rows)
        for _, chunk in _chunks(rows):
            scaled = chunk * self._scale
            high = scaled.round()
            low = ((scaled - high) * 2.0**_BITS).round_().to(torch.int64)
            whole = high.to(torch.int64)
            parts = [whole, low]
            if self._spread:
                upper, lower = whole >> _HALF, whole & (2**_HALF - 1)
                parts += [upper * upper, upper * lower, lower * lower]
            for total, part in zip(self.sums, parts, strict=True):
                total += part.sum(0)

    def merge(self, sums: Tensor, count: int) -> None:
        """Replaces the sums by those of all parts together, `count` rows; before `mean` and `std` are asked for."""
        self.sums, self.count = sums, count

    @cached_property
    def mean(self) -> Tensor:
        """float64 `[...]`, one row: the mean of all rows, rounded once."""
        high, low, *_ = self.sums.tolist()
        each = zip(high, low, self._shifts, strict=True)
        return self._row([math.ldexp(((h << _BITS) + lo) / (self.count << _BITS), -shift) for h, lo, shift in each])

    @cached_property
    def std(self) -> Tensor:
        """float64 `[...]`, one row: the standard deviation of all rows, that of a population; exact to 2**-36."""
        if not self._spread:
            raise ValueError("these statistics are without a spread: ColumnStatistics(magnitudes, spread=True)")
        total, _, upper, mixed, lower = self.sums.tolist()
        result = []
        for linear, a, m, b, shift in zip(total, upper, mixed, lower, self._shifts, strict=True):
            squares = (a << 2 * _HALF) + (m << _HALF + 1) + b
            result.append(math.ldexp(math.sqrt(self.count * squares - linear * linear) / self.count, -shift))
        return self._row(result)

    def _row(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.sums.device).view(self.row_shape)


def require_finite(name: str, ids: Sequence[int] | Tensor, rows: Tensor) -> None:  # rows: [n, ...] of n token ids
    """Raises `NonFiniteError` for a row that no new row can be made from."""
    bad = ~rows.to(torch.float64).isfinite().reshape(len(rows), -1).all(1)
    if bool(bad.any()):
        raise NonFiniteError(
            f"row {int(ids[int(bad.nonzero()[0, 0])])} of {name} holds NaN or an infinity: new rows cannot be made "
            "from it. Likely training has diverged: go back to an earlier checkpoint, or choose an initialization that "
            "does not read it (zeros, or a copy of another row)."
        )


def _chunks(rows: Tensor) -> Iterable[tuple[int, Tensor]]:
    """Rows as float64 `[n, C]`, a bounded number at a time, with the index of the first."""
    if rows.numel() == 0:
        return
    step = max(1, _NUMBERS * len(rows) // rows.numel())
    for at in range(0, len(rows), step):
        chunk = rows[at : at + step].detach()
        yield at, chunk.to(torch.float64).reshape(len(chunk), -1)
