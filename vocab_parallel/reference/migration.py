"""The oracle of migrations: whole tables, row after row."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor


def migrate_rows(table: Tensor, new_to_old: Sequence[int], new_rows: Sequence[Tensor]) -> Tensor:
    """The new table: row i is old row `new_to_old[i]`, or where that is -1 the next of `new_rows`."""
    rest = iter(new_rows)
    rows = [table[old] if old >= 0 else next(rest) for old in new_to_old]
    return torch.stack([row.to(table.dtype) for row in rows])


def mean_of_rows(table: Tensor) -> Tensor:
    """The exact mean of all rows, rounded to float64 once."""
    columns = table.double().reshape(len(table), -1).T.tolist()
    means = [float(sum(map(Fraction, column), Fraction(0)) / len(table)) for column in columns]
    return torch.tensor(means, dtype=torch.float64).view(table.shape[1:])


def mean_of_sources(table: Tensor, sources: Sequence[int]) -> Tensor:
    """The mean of these rows in float64, added in this order."""
    total = torch.zeros(table.shape[1:], dtype=torch.float64)
    for source in sources:
        total = total + table[source].double()
    return total / len(sources)
