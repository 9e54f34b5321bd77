"""Sums whose order is fixed."""

from __future__ import annotations

from torch import Tensor


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Sum of neighbours, then of neighbours' sums: a power of two of parts always adds in one order."""
    while len(parts) > 1:
        pairs = [parts[i] + parts[i + 1] for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]
