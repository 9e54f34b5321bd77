"""Transforms with a number for all requests, or one for each, among their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.transform import PROCESSED, Transform, row_values

LARGEST = float(torch.finfo(torch.float32).max)
SMALLEST = float(torch.finfo(torch.float32).tiny)
Bounds = Mapping[str, Mapping[str, Any]]
SHARE: Mapping[str, Any] = {"low": 0.0, "high": 1.0}
MASS: Mapping[str, Any] = {**SHARE, "low_open": True}


class RowTransform(Transform):
    """A transform with fields that are a number, or one number a request.

    Attributes:
        bounds: Options of `row_values` for each of these fields.
    """

    gives: ClassVar[str | None] = PROCESSED  # of log-probabilities too: they no longer sum to one
    bounds: ClassVar[Bounds] = {}

    def check(self, vocab_size: int, rows: int | None) -> None:
        for name in self.bounds:
            self.row(name, self.count(rows))

    def count(self, rows: int | None) -> int:
        """`rows`; where that is not known, how many its per-row fields are for, or 1."""
        own = self.row_count()
        return rows if rows is not None else 1 if own is None else own

    def row(self, name: str, rows: int, like: Tensor | None = None) -> Tensor:
        """A field as one value a row `[rows]`, on the CPU; ValueError naming row and value if it is out of bounds.

        Args:
            like: Its device, and its dtype unless the field is an integer, instead.
        """
        values = row_values(getattr(self, name), rows, f"{self.name}'s {name}", **self.bounds[name])
        if like is None:
            return values
        return values.to(like.device, like.dtype if values.is_floating_point() else values.dtype)
