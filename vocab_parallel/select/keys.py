"""Keys of a few columns as Python's integers: for a few rows on a CPU, many microseconds less than tensors of them.

The keys of `order`, for float32 values.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from vocab_parallel.select.order import LOW, best_columns, first_best, library_best

_SIGN = 0x7FFFFFFF


def keys_of(values: list[float], token_ids: list[int]) -> list[int]:
    """`order.pack`."""
    count = len(values)
    bits = struct.unpack(f"<{count}i", struct.pack(f"<{count}f", *[value + 0.0 for value in values]))  # -0.0 is 0.0
    ordered = [one if one >= 0 else one ^ _SIGN for one in bits]
    if not math.isfinite(sum(values)):
        ordered = [_SIGN if value != value else one for one, value in zip(ordered, values, strict=True)]
    return [one << 32 | LOW - token_id for one, token_id in zip(ordered, token_ids, strict=True)]


def values_of(keys: list[int]) -> tuple[float, ...]:
    """The values of `order.unpack`."""
    bits = [key >> 32 if key >= 0 else (key >> 32) ^ _SIGN for key in keys]
    return struct.unpack(f"<{len(keys)}f", struct.pack(f"<{len(keys)}i", *bits))


def ids_of(keys: list[int]) -> list[int]:
    """The ids of `order.unpack`."""
    return [LOW - (key & LOW) for key in keys]


def best_keys(values: Tensor, token_ids: Tensor, k: int, first_id: int | None = None) -> list[int]:
    """`order.best_columns` of float32 `values` `[T, n]`, row after row.

    Args:
        first_id: Of ids that are a range; None if they are not.
    """
    if first_id is not None and values.shape[1] >= k:
        if k == 1:
            best, at = first_best(values)
            return keys_of(best.tolist(), [first_id + column for column in at.tolist()])
        top, index, bound = library_best(values, k)
        keys: list[int] = []
        for row, columns, most in zip(top.tolist(), index.tolist(), bound, strict=True):
            if not row[k - 1] > most:
                break
            keys += keys_of(row[:k], [first_id + column for column in columns[:k]])
        else:
            return keys
    return best_columns(values, token_ids, k, may_read=True).flatten().tolist()


def best_of_keys(gathered: list[list[int]], rows: int, k: int) -> list[list[int]]:
    """The best k of each row of the ranks' `best_keys`, best first."""
    if k == 1:
        return [[max(keys)] for keys in zip(*gathered, strict=True)]
    together = ([key for keys in gathered for key in keys[row * k : row * k + k]] for row in range(rows))
    return [sorted(keys, reverse=True)[:k] for keys in together]


def floats(values: Sequence[float]) -> Tensor:
    """float32; a few microseconds less than `torch.tensor`."""
    if not values:
        return torch.empty(0)
    return torch.frombuffer(bytearray(struct.pack(f"={len(values)}f", *values)), dtype=torch.float32)


def integers(values: Sequence[int]) -> Tensor:
    """int64, likewise."""
    if not values:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(struct.pack(f"={len(values)}q", *values)), dtype=torch.int64)
