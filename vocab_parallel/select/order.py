"""The total order of candidates as integers: value descending, then token id ascending.

A float32's bits, read as a signed integer with the low bits of negatives flipped, sort like its value. Those in the
upper half of an int64 and the complement of the token id in the lower half make a key that is unique in its row, so
any maximum, top-k or merge of keys obeys the order, and value and id come back from the key exactly. A float64
leaves no room for the id: its candidates travel as two integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
NONE: int = torch.iinfo(torch.int64).min  # below every candidate
_BLOCK_ELEMENTS = 1 << 20
_BLOCK = 64  # columns that are looked at by their maximum first
_FINE_BITS = 5
_FINE = 1 << _FINE_BITS  # the same, of the library's search for several
_MANY_COLUMNS, _MANY_ELEMENTS = 1 << 15, 1 << 16
FEW_ROWS = 16


def best_columns(values: Tensor, token_ids: Tensor, k: int, *, may_read: bool = False) -> Tensor:
    """The best k columns of each row as what travels: int64 `[1, T, k]`, `[2, T, k]` for float64.

    Args:
        values: `[T, n]` float32 or float64; n may be below k, or 0.
        token_ids: int64 `[n]` or `[T, n]`, ascending.
        may_read: Whether the host may look at values, which can spare it the keys.
    """
    rows, columns = values.shape
    if k == 1:
        return column_keys(values, token_ids, first_best(values).indices if columns else None)
    found, planes = min(k, columns), 2 if values.dtype == torch.float64 else 1
    if found == 0 or not may_read or planes == 2 or (rows > FEW_ROWS and _coarse(values)):
        keys = _exact_top(values, token_ids, found) if found else token_ids.new_zeros(planes, rows, 0)
    else:
        top, index, bound = library_best(values, found)
        keys = pack(top[:, :found], ids_at(token_ids, index[:, :found]))[None]
        unsure = [not last > most for last, most in zip(top[:, found - 1].tolist(), bound, strict=True)]
        if any(unsure):
            tied = torch.tensor(unsure).nonzero()[:, 0].to(values.device)
            ids = token_ids if token_ids.dim() == 1 else token_ids[tied]
            keys[:, tied] = _exact_top(values[tied], ids, found)
    if found == k:
        return keys
    out = keys.new_full((planes, rows, k), LOW)  # an id beyond all
    out[0] = NONE
    out[:, :, :found] = keys
    return out


def _exact_top(values: Tensor, token_ids: Tensor, k: int) -> Tensor:
    """`best_columns` of at least k columns, whatever is equal."""
    rows, columns = values.shape
    if columns > 2 * k * _BLOCK:
        values, token_ids = _narrowed(values, token_ids, k)
    if values.dtype == torch.float64:
        ordered, index = ordered_bits(values).sort(dim=1, descending=True, stable=True)
        return torch.stack([ordered[:, :k], ids_at(token_ids, index[:, :k])])
    out = torch.empty(1, rows, k, dtype=torch.int64, device=values.device)
    step = max(1, _BLOCK_ELEMENTS // columns)  # never all rows' keys at once: they are 8 bytes a column
    for at in range(0, rows, step):
        ids = token_ids if token_ids.dim() == 1 else token_ids[at : at + step]
        out[0, at : at + step] = pack(values[at : at + step], ids).topk(k, dim=1).values
    return out


def _coarse(values: Tensor) -> bool:
    """Whether a first few are of bfloat16 or float16 precision, among which ties are common."""
    bits = values[:1, :_BLOCK].view(torch.int32)
    return not bool((bits & 0x1FFF).any())


def library_best(values: Tensor, k: int) -> tuple[Tensor, Tensor, list[float]]:
    """The k largest of each row and their columns, `[T, k]` or one more, as the library finds them, ties in any order.

    Last, of each row, what no column that is left out exceeds: if the k-th does, these are the best k.
    """
    rows, columns = values.shape
    whole = columns // _FINE
    if rows * columns < _MANY_ELEMENTS or whole <= k:
        top, index = values.topk(min(k + 1, columns), dim=1)
        return top, index, top[:, k].tolist() if columns > k else [-torch.inf] * rows
    blocks = values[:, : whole * _FINE].reshape(rows, whole, _FINE)
    left, at = blocks.amax(2).topk(k + 1, dim=1)
    if columns % _FINE:
        index = _columns_of(at[:, :k], whole, columns, _FINE)
        top, place = values.gather(1, index).topk(k + 1, dim=1)
        index = index.gather(1, place)
    else:  # whole blocks at once are far quicker than columns one by one
        first = torch.arange(0, rows * whole, whole, device=values.device)[:, None]
        chosen = blocks.view(-1, _FINE).index_select(0, (at[:, :k] + first).view(-1))
        top, place = chosen.view(rows, -1).topk(k + 1, dim=1)
        index = at.gather(1, place >> _FINE_BITS) << _FINE_BITS | place & (_FINE - 1)
    return top, index, torch.maximum(top[:, k], left[:, k]).tolist()


def column_keys(values: Tensor, token_ids: Tensor, column: Tensor | None, there: Tensor | None = None) -> Tensor:
    """One column `[T]` of each row as what travels: as `best_columns` with k = 1; nothing where not `there`.

    Args:
        column: None where this rank has no columns.
    """
    planes = 2 if values.dtype == torch.float64 else 1
    if column is None or values.shape[1] == 0:
        return torch.tensor([NONE, LOW], device=values.device)[:planes, None, None].repeat(1, len(values), 1)
    value, token_id = values.gather(1, column[:, None]), ids_at(token_ids, column[:, None])
    keys = torch.stack([ordered_bits(value), token_id]) if planes == 2 else pack(value, token_id)[None]
    return keys if there is None else torch.where(there[:, None], keys, NONE)


def _narrowed(values: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The columns of the k best blocks of each row, and of the rest that fills no block, with their ids.

    A block that is not among the k with the best maxima has k better columns than any of its own elsewhere.
    """
    whole = values.shape[1] // _BLOCK
    blocks = values[:, : whole * _BLOCK].reshape(-1, whole, _BLOCK).amax(2)
    best = blocks.sort(dim=1, descending=True, stable=True).indices[:, :k]  # of equal maxima the first block
    index = _columns_of(best.sort(dim=1).values, whole, values.shape[1])
    return values.gather(1, index), ids_at(token_ids, index)


def _columns_of(blocks: Tensor, whole: int, columns: int, width: int = _BLOCK) -> Tensor:
    """The columns `[T, m]` of each row's `blocks` `[T, k]`, and those after the `whole` blocks."""
    index = (blocks[..., None] * width + torch.arange(width, device=blocks.device)).flatten(1)
    rest = torch.arange(whole * width, columns, device=blocks.device)
    return torch.cat([index, rest.expand(len(blocks), -1)], 1) if len(rest) else index


def first_best(values: Tensor) -> torch.return_types.max:
    """The first column of each row's largest value, NaN above all, and that value."""
    columns = values.shape[1]
    whole = columns // _BLOCK
    if columns < _MANY_COLUMNS:
        return values.max(1)
    blocks = values[:, : whole * _BLOCK].reshape(-1, whole, _BLOCK).amax(2)  # a maximum alone is far faster on a CPU
    if columns % _BLOCK:
        blocks = torch.cat([blocks, values[:, whole * _BLOCK :].amax(1, keepdim=True)], 1)
    start = blocks.max(1, keepdim=True).indices * _BLOCK
    index = (start + torch.arange(_BLOCK, device=values.device)).clamp(max=columns - 1)
    best, place = values.gather(1, index).max(1)
    return torch.return_types.max((best, start[:, 0] + place))


def merge(gathered: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The best k of the ranks' `best_columns` `[size, 1 or 2, T, k]`: values and ids `[T, k]`, best first."""
    if k == 1 and gathered.shape[1] == 1:
        return unpack(gathered[:, 0].amax(0))
    merged = gathered.permute(1, 2, 0, 3).flatten(2)  # [1 or 2, T, size * k], rank after rank: equal values in id order
    if len(merged) == 1:
        return unpack(merged[0].topk(k, dim=1).values)
    ordered, at = merged[0].sort(dim=1, descending=True, stable=True)
    return from_ordered(ordered[:, :k], torch.float64), merged[1].gather(1, at[:, :k])


def by_rank(gathered: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values and ids `[T, size * k]` of the ranks' `best_columns`, rank after rank, and the places of the best first.

    What is no column has value -inf and id `vocab_size`, and is last.
    """
    planes = gathered.permute(1, 2, 0, 3).flatten(2)
    values, ids = unpack(planes[0]) if len(planes) == 1 else (from_ordered(planes[0], torch.float64), planes[1])
    order = planes[0].argsort(dim=1, descending=True, stable=True)  # of equal float64 values each rank's ids ascend
    unused = ids >= vocab_size
    return values.masked_fill(unused, -torch.inf), ids.masked_fill(unused, vocab_size), order


def pack(values: Tensor, token_ids: Tensor) -> Tensor:
    """int64 keys of float32 `values` and the ids beside them."""
    return (ordered_bits(values).to(torch.int64) << 32) | (LOW - token_ids)


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The float32 values and int64 token ids of `keys`."""
    return from_ordered((keys >> 32).to(torch.int32), torch.float32), LOW - (keys & LOW)


def ordered_bits(values: Tensor) -> Tensor:
    """Integers as wide as the floats `values` that sort like them; -0.0 counts as 0.0, NaN above all."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    largest, sign = torch.iinfo(integer).max, torch.iinfo(integer).bits - 1
    bits = (values + 0.0).view(integer)
    return torch.where(values.isnan(), largest, bits ^ ((bits >> sign) & largest))


def from_ordered(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `ordered_bits`; its largest integer is a NaN's bits."""
    largest, sign = torch.iinfo(ordered.dtype).max, torch.iinfo(ordered.dtype).bits - 1
    return (ordered ^ ((ordered >> sign) & largest)).contiguous().view(dtype)


def few(values: Tensor) -> bool:
    """Whether rows `[T, n]` are so few that Python's integers beat chains of small tensor operations (see `keys`)."""
    return 0 < values.shape[0] <= FEW_ROWS and values.dtype != torch.float64 and values.device.type == "cpu"


def ids_at(token_ids: Tensor, index: Tensor) -> Tensor:
    """The ids `[T, m]` of columns `index` `[T, m]`."""
    return index + token_ids[0] if token_ids.dim() == 1 else token_ids.gather(1, index)  # a rank's ids are a range
