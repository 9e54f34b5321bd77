"""Parameters that a batch shares or that each row has its own of, checked and as tensors."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def row_values(
    given: object,
    rows: int,
    name: str,
    *,
    integer: bool = False,
    device: torch.device | str = "cpu",
    **limits: Any,
) -> Tensor:
    """`row_list` as a tensor `[T]`, int64 if `integer`, else float64."""
    words = row_list(given, rows, name, integer=integer, **limits)
    return torch.tensor(words, dtype=torch.int64 if integer else torch.float64, device=device)


def row_list(
    given: object,
    rows: int,
    name: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    integer: bool = False,
) -> list[Any]:
    """A number for all rows, or a sequence or tensor `[T]` of one for each, as T numbers.

    Args:
        rows: T.
        name: For messages.
        low, high: Both allowed, `low` unless `low_open`.
        integer: Integers of 64 bits, and nothing but such numbers taken; else floats.

    Raises:
        ValueError: Names the row and the value that is no such number, or the lengths that differ.
    """
    if isinstance(given, Tensor):
        given = given.tolist()
    each = isinstance(given, Sequence) and not isinstance(given, str)
    values: list[Any] = list(given) if each else [given]  # type: ignore[call-overload]
    if each and len(values) != rows:
        raise ValueError(f"{name} has {len(values)} values for {rows} rows: give one number, or one for each row.")
    wanted = numbers.Integral if integer else numbers.Real
    high = min(high, 2**63 - 1) if integer else high
    for row, value in enumerate(values):
        good = isinstance(value, wanted) and not isinstance(value, bool)
        if not good or not (low < value if low_open else low <= value) or not value <= high:
            where = f" of row {row}" if each else ""
            interval = f"{'(' if low_open else '['}{low:g}, {high:g}]"
            kind = "an integer" if integer else "a number"
            raise ValueError(f"{name}{where} must be {kind} in {interval}, got {value!r}")
    words = [int(value) if integer else float(value) for value in values]
    return words if each else words * rows
