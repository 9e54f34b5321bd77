"""How the row of a new token begins. The same bits on every rank, at any TP size and block size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vocab_parallel.errors import ConfigError, VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.normal_rows import normal_rows
from vocab_parallel.vocabulary.migration.statistics import ColumnStatistics

_NEXT_TO_EACH_OTHER = 8  # ids that an error names


@dataclass(frozen=True)
class OldRows:
    """What new rows of one table are made from.

    Attributes:
        shape: Of one row; `()` for a bias.
        dtype, device: Of the table.
        fetched: The rows of (at least) what `RowInit.needs` says, by old id, each of shape `shape`.
        statistics: Of all old rows, where `RowInit.needs_statistics`.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    fetched: Mapping[int, Tensor] = field(default_factory=dict)
    statistics: ColumnStatistics | None = None

    def zeros(self, count: int) -> Tensor:
        """So many rows of zeros."""
        return torch.zeros(count, *self.shape, dtype=self.dtype, device=self.device)

    def all_rows(self) -> ColumnStatistics:
        """The statistics; `ValueError` where there are none."""
        if self.statistics is None:
            raise ValueError("this initialization reads the statistics of all old rows, and got none")
        return self.statistics


class RowInit:
    """A declared beginning of new rows. What it reads of the old table, it reads of the real rows alone."""

    spread = False  # whether the statistics that it reads must have a standard deviation

    def check(self, vocab_map: VocabMap) -> None:
        """Raises `VocabularyError` unless it says how every new id of the map begins."""

    def needs(self, new_id: int, vocab_map: VocabMap) -> tuple[int, ...]:
        """The old ids whose rows it reads for a new id."""
        return ()

    def needs_statistics(self, vocab_map: VocabMap) -> bool:
        """Whether it reads the statistics of all old rows for some new id of the map."""
        return False

    def rows(self, new_ids: Sequence[int], vocab_map: VocabMap, old: OldRows) -> Tensor:
        """Rows `[len(new_ids), *old.shape]` of ids without an old row: computed in float64, rounded to the dtype."""
        raise NotImplementedError


@dataclass(frozen=True)
class Zeros(RowInit):
    """Rows of zeros: a logit of 0 for each new token, whatever the hidden state."""

    def rows(self, new_ids: Sequence[int], vocab_map: VocabMap, old: OldRows) -> Tensor:
        return old.zeros(len(new_ids))

    def __str__(self) -> str:
        return "zeros"


@dataclass(frozen=True)
class MeanOfRows(RowInit):
    """The mean of all old rows, those that the map drops included."""

    def needs_statistics(self, vocab_map: VocabMap) -> bool:
        return len(vocab_map.new_ids) > 0

    def rows(self, new_ids: Sequence[int], vocab_map: VocabMap, old: OldRows) -> Tensor:
        return old.zeros(len(new_ids)).copy_(old.all_rows().mean)

    def __str__(self) -> str:
        return "mean"


@dataclass(frozen=True)
class MeanOfSources(RowInit):
    """The mean of the rows of the old tokens that the new token was made of; `MeanOfRows` where the map names none.

    A source that comes twice counts twice. Sums are in the map's order, so they have the same bits everywhere.
    """

    def needs(self, new_id: int, vocab_map: VocabMap) -> tuple[int, ...]:
        return tuple(vocab_map.sources.get(new_id, ()))

    def needs_statistics(self, vocab_map: VocabMap) -> bool:
        return without_sources(self, vocab_map) > 0

    def rows(self, new_ids: Sequence[int], vocab_map: VocabMap, old: OldRows) -> Tensor:
        result = old.zeros(len(new_ids))
        for row, new_id in zip(result, new_ids, strict=True):
            sources = self.needs(new_id, vocab_map)
            if not sources:
                row.copy_(old.all_rows().mean)
                continue
            total = torch.zeros(tuple(old.shape), dtype=torch.float64, device=old.device)
            for source in sources:
                total += old.fetched[source].to(torch.float64)
            row.copy_(total / len(sources))
        return result

    def __str__(self) -> str:
        return "sources"


@dataclass(frozen=True)
class CopyOf(RowInit):
    """The bits of an old row, named for each new id: `{new id: old id}`."""

    ids: Mapping[int, int]

    def check(self, vocab_map: VocabMap) -> None:
        new = set(vocab_map.new_ids.tolist())
        wrong = {
            "no row is named for the new ids": sorted(new - set(self.ids)),
            "rows are named for ids that are not new:": sorted(set(self.ids) - new),
            f"old ids outside [0, {vocab_map.old_size}):": sorted(
                old for old in self.ids.values() if not 0 <= old < vocab_map.old_size
            ),
        }
        if any(wrong.values()):
            raise VocabularyError(
                "the rows to copy do not fit the map: "
                + "; ".join(f"{what} {_few(ids)}" for what, ids in wrong.items() if ids)
                + ". Name one old id for each new id: --init copy:NEW=OLD,... (or choose --init sources)."
            )

    def needs(self, new_id: int, vocab_map: VocabMap) -> tuple[int, ...]:
        return (self.ids[new_id],)

    def rows(self, new_ids: Sequence[int], vocab_map: VocabMap, old: OldRows) -> Tensor:
        result = old.zeros(len(new_ids))
        for row, new_id in zip(result, new_ids, strict=True):
            row.copy_(old.fetched[self.ids[new_id]])
        return result

    def __str__(self) -> str:
        return "copy:" + ",".join(f"{new}={old}" for new, old in sorted(self.ids.items()))


@dataclass(frozen=True)
class Normal(RowInit):
    """Normal rows with each column's own mean and standard deviation, drawn by (seed, new id, column)."""

    seed: int = 0
    spread = True

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise VocabularyError(f"the seed of normal rows must be an integer in [0, 2**64), got {self.seed!r}")

    def needs_statistics(self, vocab_map: VocabMap) -> bool:
        return len(vocab_map.new_ids) > 0

    def rows(self, new_ids: Sequence[int], vocab_map: VocabMap, old: OldRows) -> Tensor:
        result = old.zeros(len(new_ids))
        mean, std = (one.to(old.device).reshape(-1) for one in (old.all_rows().mean, old.all_rows().std))
        step = max(1, 2**17 // max(1, len(mean)))  # of the drawing's 100 bytes a number
        for at in range(0, len(new_ids), step):
            drawn = normal_rows(new_ids[at : at + step], len(mean), self.seed, old.device)
            result[at : at + step] = (mean + std * drawn).view(-1, *old.shape)
        return result

    def __str__(self) -> str:
        return f"normal:{self.seed}"


def without_sources(init: RowInit, vocab_map: VocabMap) -> int:
    """How many new ids begin as the mean of all rows because the map names no sub-tokens of them."""
    if not isinstance(init, MeanOfSources):
        return 0
    return len(vocab_map.new_ids) - len(vocab_map.sources)  # which has new ids only, each with some


def parse_init(text: str) -> RowInit:
    """An initialization from a command line: zeros, mean, sources, copy:NEW=OLD,..., normal[:seed].

    Raises:
        ConfigError: Anything else.
    """
    plain = {"zeros": Zeros(), "mean": MeanOfRows(), "sources": MeanOfSources(), "normal": Normal()}
    if text in plain:
        return plain[text]
    kind, _, rest = text.partition(":")
    if kind == "normal" and re.fullmatch(r"[0-9]{1,20}", rest) and int(rest) < 2**64:
        return Normal(int(rest))
    if kind == "copy" and re.fullmatch(r"[0-9]{1,9}=[0-9]{1,9}(,[0-9]{1,9}=[0-9]{1,9})*", rest):
        pairs = [pair.split("=") for pair in rest.split(",")]
        ids = {int(new): int(old) for new, old in pairs}
        if len(ids) < len(pairs):
            raise ConfigError(f"--init {text[:80]}: a new id comes twice; each takes one old row")
        return CopyOf(ids)
    raise ConfigError(
        f"--init {text[:80]!r} is none of: zeros, mean (of all rows), sources (mean of the source sub-tokens), "
        "copy:NEW=OLD,..., normal or normal:SEED"
    )


def _few(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _NEXT_TO_EACH_OTHER} more" if len(ids) > _NEXT_TO_EACH_OTHER else ""
    return ", ".join(map(str, ids[:_NEXT_TO_EACH_OTHER])) + more
