"""Keys of a few columns as Python's integers: for a few rows on a CPU, many microseconds less than tensors of them.

The keys of `order`, for float32 values.
"""

from __future__ import annotations

import struct

from torch import Tensor

from vocab_parallel.select.order import LOW, NONE, best_columns, first_best, library_best

_SIGN = 0x7FFFFFFF


def keys_of(values: list[float], token_ids: list[int]) -> list[int]:
    """`order.pack`."""
    bits = struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values))
    return [
        ((_SIGN if value != value else one ^ ((one >> 31) & _SIGN) if one != -_SIGN - 1 else 0) << 32)
        | (LOW - token_id)
        for one, value, token_id in zip(bits, values, token_ids, strict=True)
    ]


def values_of(keys: list[int]) -> tuple[float, ...]:
    """The values of `order.unpack`."""
    bits = [(key >> 32) ^ ((key >> 63) & _SIGN) for key in keys]
    return struct.unpack(f"<{len(keys)}f", struct.pack(f"<{len(keys)}i", *bits))


def ids_of(keys: list[int]) -> list[int]:
    """The ids of `order.unpack`."""
    return [LOW - (key & LOW) for key in keys]


def best_keys(values: Tensor, token_ids: Tensor, k: int) -> list[int]:
    """`order.best_columns` of float32 `values` `[T, n]`, row after row."""
    if values.shape[1] < k or token_ids.dim() == 2:
        return best_columns(values, token_ids, k, may_read=True).flatten().tolist()
    if k == 1:
        best, at = first_best(values)
        top, places = best.tolist(), at.tolist()
    else:
        best, index, sure = library_best(values, k)
        if not all(sure):
            return best_columns(values, token_ids, k, may_read=True).flatten().tolist()
        top, places = best.flatten().tolist(), index.flatten().tolist()
    first = int(token_ids[0])
    return keys_of(top, [first + place for place in places])


def best_of_keys(gathered: list[list[int]], rows: int, k: int) -> list[list[int]]:
    """The best k of each row of the ranks' `best_keys`, best first."""
    if k == 1:
        return [[max(keys)] for keys in zip(*gathered, strict=True)]
    together = ([key for keys in gathered for key in keys[row * k : row * k + k]] for row in range(rows))
    return [sorted(keys, reverse=True)[:k] for keys in together]


def no_keys(count: int) -> list[int]:
    """What is below every column."""
    return [NONE] * count
