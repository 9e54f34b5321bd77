"""The total order of candidates as integers: value descending, then token id ascending.

A float32's bits, read as a signed integer with the low bits of negatives flipped, sort like its value. Those in the
upper half of an int64 and the complement of the token id in the lower half make a key that is unique in its row, so
any maximum, top-k or merge of keys obeys the order, and value and id come back from the key exactly. A float64
leaves no room for the id: its candidates travel as two integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture, first_row, judge
from vocab_parallel.arguments import check_logits
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.shard import VocabShard

_LOW = 0xFFFFFFFF
_NONE = torch.iinfo(torch.int64).min  # below every candidate
_BLOCK_ELEMENTS = 1 << 20


def select_best(logits: Tensor, k: int, shard: VocabShard, name: str) -> tuple[Tensor, Tensor]:
    """Each row's best k over all shards, best first: float32 (float64) values and token ids, `[T, k]`, on every rank.

    k better candidates in a shard exclude any other of that shard, so k of each shard are enough.

    Collectives:
        One all-gather of `8 k` bytes a row (`16 k` for float64).

    Raises:
        NonFiniteError: On every rank, for the first row with NaN or without a finite logit.
    """
    fault = capture(_check, logits, k, shard)
    if fault is not None:
        Exchange(shard, "select", name, fault=fault).wait()
    flat = logits.detach().reshape(-1, shard.shard_size)[:, : shard.num_valid]
    local = _best_float64(flat, k, shard) if logits.dtype == torch.float64 else _best(flat, k, shard)
    gathered = Exchange(
        shard, "select", f"{name}(logits {list(logits.shape)} {logits.dtype}, k={k})", payload=local
    ).wait()
    merged = gathered.permute(1, 2, 0, 3).flatten(2)  # [1 or 2, T, tp * k], rank after rank: equal values in id order
    if logits.dtype == torch.float64:
        ordered, at = merged[0].sort(dim=1, descending=True, stable=True)
        values, ids = _from_ordered(ordered[:, :k], torch.float64), merged[1].gather(1, at[:, :k])
    else:
        values, ids = unpack(merged[0].topk(k, dim=1).values)
    _require_finite(values[:, 0], gathered, shard)
    return values, ids


def pack(values: Tensor, token_ids: Tensor) -> Tensor:
    """int64 keys of float32, bfloat16 or float16 `values` and the ids beside them."""
    return (_ordered(values.to(torch.float32)).to(torch.int64) << 32) | (_LOW - token_ids)


def unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The float32 values and int64 token ids of `keys`."""
    return _from_ordered((keys >> 32).to(torch.int32), torch.float32), _LOW - (keys & _LOW)


def _ordered(values: Tensor) -> Tensor:
    """Integers as wide as the floats `values` that sort like them; -0.0 counts as 0.0, NaN above all."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int64
    largest, sign = torch.iinfo(integer).max, torch.iinfo(integer).bits - 1
    bits = (values + 0.0).view(integer)
    return torch.where(values.isnan(), largest, bits ^ ((bits >> sign) & largest))


def _from_ordered(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `_ordered`; its largest integer is a NaN's bits."""
    largest, sign = torch.iinfo(ordered.dtype).max, torch.iinfo(ordered.dtype).bits - 1
    return (ordered ^ ((ordered >> sign) & largest)).contiguous().view(dtype)


def _best(logits: Tensor, k: int, shard: VocabShard) -> Tensor:
    """Keys of this shard's best k of `logits` `[T, n]`: `[1, T, k]`, filled up where it has fewer."""
    rows, columns = logits.shape
    keys = torch.full((1, rows, k), _NONE, dtype=torch.int64, device=logits.device)
    if columns == 0:
        return keys
    if k == 1:
        index = logits.argmax(1, keepdim=True)  # the first of equal maxima, and NaN before all
        keys[0] = pack(logits.gather(1, index), index + shard.start)
        return keys
    token_ids = torch.arange(shard.start, shard.stop, device=logits.device)
    step = max(1, _BLOCK_ELEMENTS // columns)  # never all rows' keys at once: they are 8 bytes a logit
    for at in range(0, rows, step):
        found = pack(logits[at : at + step], token_ids).topk(min(k, columns), dim=1).values
        keys[0, at : at + step, : found.shape[1]] = found
    return keys


def _best_float64(logits: Tensor, k: int, shard: VocabShard) -> Tensor:
    """Ordered values and ids of this shard's best k of `logits` `[T, n]`: `[2, T, k]`."""
    ordered, index = _ordered(logits).sort(dim=1, descending=True, stable=True)
    out = torch.zeros(2, len(logits), k, dtype=torch.int64, device=logits.device)
    out[0] = _NONE
    found = min(k, logits.shape[1])
    out[0, :, :found], out[1, :, :found] = ordered[:, :found], index[:, :found] + shard.start
    return out


def _check(logits: object, k: object, shard: VocabShard) -> None:
    check_logits(logits, shard)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= shard.vocab_size:
        raise ValueError(f"k must be an integer in [1, {shard.vocab_size}] (the vocabulary), got {k!r}")


def _require_finite(first: Tensor, gathered: Tensor, shard: VocabShard) -> None:
    """Raises for the first row whose best value `[T]` is NaN or -inf; the same on every rank.

    Args:
        gathered: `[tp, 1 or 2, T, k]`, the ranks' candidates, to name the rank that holds a NaN.
    """
    if len(first) == 0:
        return
    row = first_row(first.isnan() | (first == -torch.inf))
    at = row.clamp(min=0)[None]
    ordered = gathered[:, 0, :, 0].index_select(1, at)[:, 0]
    ordered = ordered if gathered.shape[1] == 2 else ordered >> 32
    nan = first.index_select(0, at)[0].isnan().to(torch.int64)
    judge(shard, torch.stack([row, nan, ordered.argmax()]), NonFiniteError, _describe)


def _describe(flags: list[int]) -> Exception:
    row, nan, rank = flags
    if not nan:
        return NonFiniteError(f"row {row} has no finite logit: every id is masked to -inf. Leave at least one legal.")
    return NonFiniteError(
        f"row {row} holds NaN among the logits of rank {rank} of the group: it has no order. Likely "
        "an overflow upstream, or an uninitialised weight."
    )
