"""`Scores`: the scores of some rows over the vocabulary, wherever their columns are.

A selection is a chain of functions from `Scores` to `Scores`. The columns are spread over ranks, or are a few
candidates that every rank holds. The same functions take both, one process with the whole vocabulary among them, so
all of them give the same ids.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.arguments import check_logits
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.keys import best_keys, best_of_keys, floats, ids_of, integers, values_of
from vocab_parallel.select.nan import nan_found
from vocab_parallel.select.order import best_columns, few, merge
from vocab_parallel.shard import VocabShard

FEW_KEYS = 512  # that are quicker as Python's integers


class Peak(NamedTuple):
    """The best of each row: values `[T]` in the scores' dtype, -inf where a row is empty; int64 token_ids `[T]`."""

    values: Tensor
    token_ids: Tensor


class Bounds(NamedTuple):
    """Bounds of what each rank's columns of a row weigh, in masses of the row's largest column."""

    low: list[float]
    high: list[float]

    def plus(self, other: Bounds) -> Bounds:
        """Of both together."""
        pairs = zip(self, other, strict=True)
        return Bounds(*([a + b for a, b in zip(one, more, strict=True)] for one, more in pairs))


@dataclass(frozen=True)
class Scores:
    """Scores of T rows.

    Attributes:
        values: `[T, n]` float32, or float64 for float64 logits; -inf is not in the support.
        token_ids: int64 `[n]`: this rank's real ids, a range. Or int64 `[T, n]`: candidates that every rank holds,
            ascending in each row; a place not in use has value -inf and id `vocab_size`.
        channel: Of the ranks that hold the other columns; of size 1 where every rank holds all.
        vocab_size: Real ids.
        first_id: Of a range of ids, if the host knows it.
        masses: float64 `[T, n]`, the columns' masses below `largest`, if formed. See `masses`.
        largest: `[T]` the rows' largest values, if known; else None.
        peak: Their `Peak`, if known.
        sums: What each rank's columns weigh, row by row, if known; the same on every rank.
    """

    values: Tensor
    token_ids: Tensor
    channel: Channel
    vocab_size: int
    first_id: int | None = None
    largest: Tensor | None = None
    peak: Peak | None = None
    masses: Tensor | None = None
    sums: list[Bounds] | None = None

    @classmethod
    def of(cls, logits: Tensor, shard: VocabShard, channel: Channel) -> Scores:
        """This rank's real columns of `logits` `[..., shard_size]` as rows."""
        values = logits.detach() if logits.requires_grad else logits  # each operation takes microseconds
        if values.dim() != 2 or shard.num_valid < shard.shard_size:
            values = values.reshape(-1, shard.shard_size)[:, : shard.num_valid]
        if values.dtype not in (torch.float32, torch.float64):
            values = values.to(torch.float32)
        if not values.is_contiguous():
            values = values.contiguous()
        return cls(values, shard.token_ids(logits.device), channel, shard.vocab_size, shard.start)

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def replicated(self) -> bool:
        """Whether these are candidates that every rank holds."""
        return self.token_ids.dim() == 2

    def with_values(self, values: Tensor, largest: Tensor | None = None) -> Scores:
        """The same columns with other values; what was known of the old ones is dropped."""
        return replace(self, values=values, largest=largest, peak=None, masses=None, sums=None)

    def keep(self, mask: Tensor, *, keeps_peak: bool = True) -> Scores:
        """-inf where `mask` `[T, n]` is False.

        Args:
            keeps_peak: The best column of each row stays, as in every truncation: what is known of it stays too.
        """
        values = self.values.masked_fill(~mask, -torch.inf)
        if not keeps_peak:
            return self.with_values(values)
        return replace(self, values=values, masses=None if self.masses is None else self.masses * mask, sums=None)

    def at(self, rows: Tensor) -> Scores:
        """These rows, int64 `[N]`, only; every rank must take the same."""
        ids = self.token_ids[rows] if self.replicated else self.token_ids
        largest = None if self.largest is None else self.largest[rows]
        peak = None if self.peak is None else Peak(self.peak.values[rows], self.peak.token_ids[rows])
        masses = None if self.masses is None else self.masses[rows]
        sums = None if self.sums is None else [self.sums[row] for row in rows.tolist()]
        values = self.values[rows]
        return replace(self, values=values, token_ids=ids, largest=largest, peak=peak, masses=masses, sums=sums)

    def listed(self, ids: Tensor) -> Tensor:
        """Bool `[T, n]`: the columns whose id is among the row's `ids`, int64 `[T, m]`, or `[m]` for all rows.

        Ids below 0 count as none.
        """
        return self.counts(ids) > 0

    def counts(self, ids: Tensor) -> Tensor:
        """int64 `[T, n]`: how often each column's id is among the row's `ids` `[T, m]` or `[m]`; below 0 is none."""
        ids = ids.expand(self.rows, -1) if ids.dim() == 1 else ids
        rows, n = self.values.shape
        if self.replicated:
            at = torch.searchsorted(self.token_ids, ids.contiguous())
        else:
            at = ids - (self.token_ids[0] if n else 0)
        found = (at >= 0) & (at < n) & (ids >= 0)
        at = torch.where(found, at, n)  # a place of its own for what is not here
        if self.replicated and n:
            there = self.token_ids.gather(1, at.clamp(max=n - 1)) == ids
            at = torch.where(there, at, n)
        out = torch.zeros(rows, n + 1, dtype=torch.int64, device=self.values.device)
        return out.scatter_add_(1, at, torch.ones_like(at))[:, :n]

    def take(self, table: Tensor) -> Tensor:
        """The entries of a whole table `[V]` (or `[T, V]`) at the columns' ids: `[n]` or `[T, n]`."""
        ids = self.token_ids.clamp(max=self.vocab_size - 1)
        if table.dim() == 1:
            return table[ids]
        return table.gather(1, ids) if self.replicated else table[:, ids]


def describe(logits: object) -> str:
    """Shape and dtype of logits, for what the ranks must agree on."""
    return f"{list(logits.shape)} {logits.dtype}" if isinstance(logits, Tensor) else type(logits).__name__


def rows_of(logits: object, shard: VocabShard) -> int:
    """How many rows `logits` have; 0 if they are none."""
    return logits.numel() // shard.shard_size if isinstance(logits, Tensor) else 0


def open_scores(
    logits: Tensor,
    shard: VocabShard,
    call: str,
    *,
    kind: str = "select",
    checksum: Tensor | int = 0,
    may_hide_nan: bool = True,
) -> Scores:
    """The `Scores` of an operation's logits, with the channel that its first gather opens.

    Args:
        call, kind, checksum: As in `Channel`; a checksum may lie on any device.
        may_hide_nan: A NaN may be masked before the rows' best is known, so it is looked for here.

    Raises:
        LayoutMismatchError: On every rank, if these are not a rank's columns.
    """
    if isinstance(checksum, Tensor) and isinstance(logits, Tensor):
        checksum = checksum.to(logits.device)
    found = nan_found(logits, shard) if may_hide_nan else None
    channel = Channel(shard, call, kind=kind, checksum=checksum, found=found)
    try:
        check_logits(logits, shard)
    except ValueError as error:
        with channel.guard():
            raise error
    return Scores.of(logits, shard, channel)


def peak_of(scores: Scores) -> Peak:
    """The best of each row: known, or one all-gather of 8 bytes a row (16 for float64).

    Source: the total order of `order`.
    """
    if scores.peak is not None:
        return scores.peak
    values, ids = best(scores, 1)
    return Peak(values[:, 0], ids[:, 0])


def may_use_words(scores: Scores) -> bool:
    """Whether the host may work on the rows' few numbers itself."""
    return few(scores.values) and not scores.channel.group.defers(scores.values.device)


def with_peak(scores: Scores) -> Scores:
    """The same scores, knowing their peak."""
    peak = peak_of(scores)
    return replace(scores, peak=peak, largest=peak.values)


def with_largest(scores: Scores) -> Scores:
    """The same scores, knowing their largest values."""
    return scores if scores.largest is not None else with_peak(scores)


def top_candidates(scores: Scores, k: int) -> Scores:
    """The best k of each row in the total order, as candidates that every rank holds.

    Collectives:
        One all-gather of `8 k` bytes a row (`16 k` for float64); none if every rank holds the columns already.
    """
    if may_use_words(scores) and scores.rows * k <= FEW_KEYS:
        return held_by_all(scores, best_words(scores, k))
    values, ids = best(scores, k)
    peak = Peak(values[:, 0], ids[:, 0])
    unused = ids.gt(scores.vocab_size) | ids.lt(0)
    ids = torch.where(unused, scores.vocab_size, ids)
    ids, at = ids.sort(dim=1)
    values = torch.where(unused, -torch.inf, values).gather(1, at)
    return Scores(values, ids, scores.channel.alone(), scores.vocab_size, largest=peak.values, peak=peak)


def held_by_all(scores: Scores, rows: list[list[int]]) -> Scores:
    """Candidates of these keys, which every rank holds."""
    values: list[float] = []
    token_ids: list[int] = []
    size = scores.vocab_size
    for keys in rows:
        of_row = sorted(zip(ids_of(keys), values_of(keys), strict=True))
        token_ids += [token_id if token_id < size else size for token_id, _ in of_row]
        values += [value if token_id < size else -math.inf for token_id, value in of_row]
    best = [keys[0] for keys in rows]
    peak, shape = Peak(floats(values_of(best)), integers(ids_of(best))), (len(rows), -1)
    held = floats(values).view(shape), integers(token_ids).view(shape)
    return Scores(*held, scores.channel.alone(), size, largest=peak.values, peak=peak)


def value_at(scores: Scores, token_ids: Tensor) -> Tensor:
    """The values `[T]` of one id `[T]` a row, -inf where it is no column; on every rank.

    Collectives:
        One all-gather of 8 bytes a row; none if every rank holds the columns.
    """
    mine = scores.listed(token_ids[:, None])
    values = torch.where(mine, scores.values, -torch.inf)
    local = values.amax(1) if values.shape[1] else values.new_full((len(values),), -torch.inf)
    return scores.channel.gather(local.double()).amax(0).to(scores.values.dtype)


def best(scores: Scores, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids `[T, k]` of the best of each row, best first. One all-gather of 8 k bytes a row."""
    if may_use_words(scores) and scores.rows * k <= FEW_KEYS:
        keys = [key for row in best_words(scores, k) for key in row]
        return floats(values_of(keys)).view(-1, k), integers(ids_of(keys)).view(-1, k)
    may_read = not scores.channel.group.defers(scores.values.device)
    return merge(scores.channel.gather(best_columns(scores.values, scores.token_ids, k, may_read=may_read)), k)


def best_words(scores: Scores, k: int) -> list[list[int]]:
    """The keys of the best k of each row, best first, where few (see `may_use_words`). One all-gather like `best`'s."""
    gathered = scores.channel.gather_words(best_keys(scores.values, scores.token_ids, k, scores.first_id))
    return best_of_keys(gathered, scores.rows, k)
