"""How the row of a new token begins. The same bits on every rank, at any TP size and block size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vocab_parallel.errors import ConfigError, VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.normal_rows import normal_rows
from vocab_parallel.vocabulary.migration.statistics import ColumnStatistics

__all__ = ["CopyOf", "MeanOfRows", "MeanOfSources", "Normal", "RowInit", "Zeros", "parse_init"]

_NEXT_TO_EACH_OTHER = 8  # ids that an error names


class RowInit:
    """A declared beginning of new rows. What it reads of the old table, it reads of the real rows alone."""

    def check(self, vocab_map: VocabMap) -> None:
        """Raises `VocabularyError` unless it says how every new id of the map begins."""

    def needs(self, new_id: int, vocab_map: VocabMap) -> tuple[int, ...]:
        """The old ids whose rows it reads for a new id."""
        return ()

    def needs_statistics(self, vocab_map: VocabMap) -> bool:
        """Whether it reads the statistics of all old rows for some new id of the map."""
        return False

    @property
    def spread(self) -> bool:
        """Whether the statistics must have a standard deviation."""
        return False

    def rows(
        self,
        new_ids: Sequence[int],
        vocab_map: VocabMap,
        fetched: Mapping[int, Tensor],
        statistics: ColumnStatistics | None,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """New rows, computed in float64 and rounded to `dtype`.

        Args:
            new_ids: Ids without an old row.
            fetched: The rows of (at least) what `needs` says, by old id, each of shape `shape`.
            statistics: Of all old rows, where `needs_statistics`.
            shape: Shape of one row; `()` for a bias.

        Returns:
            `[len(new_ids), *shape]`.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Zeros(RowInit):
    """Rows of zeros: a logit of 0 for each new token, whatever the hidden state."""

    def rows(
        self, new_ids: Sequence[int], vocab_map: VocabMap, fetched: Mapping[int, Tensor],
        statistics: ColumnStatistics | None, *, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor:  # fmt: skip
        return torch.zeros(len(new_ids), *shape, dtype=dtype, device=device)

    def __str__(self) -> str:
        return "zeros"


@dataclass(frozen=True)
class MeanOfRows(RowInit):
    """The mean of all old rows, those that the map drops included."""

    def needs_statistics(self, vocab_map: VocabMap) -> bool:
        return len(vocab_map.new_ids) > 0

    def rows(
        self, new_ids: Sequence[int], vocab_map: VocabMap, fetched: Mapping[int, Tensor],
        statistics: ColumnStatistics | None, *, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor:  # fmt: skip
        result = torch.empty(len(new_ids), *shape, dtype=dtype, device=device)
        return result.copy_(_given(statistics).mean())

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
        return bool(self.without_sources(vocab_map))

    def without_sources(self, vocab_map: VocabMap) -> list[int]:
        """The new ids that begin as the mean of all rows."""
        return [new_id for new_id in vocab_map.new_ids.tolist() if not vocab_map.sources.get(new_id)]

    def rows(
        self, new_ids: Sequence[int], vocab_map: VocabMap, fetched: Mapping[int, Tensor],
        statistics: ColumnStatistics | None, *, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor:  # fmt: skip
        result = torch.empty(len(new_ids), *shape, dtype=dtype, device=device)
        mean: Tensor | None = None
        for at, new_id in enumerate(new_ids):
            sources = self.needs(new_id, vocab_map)
            if not sources:
                mean = _given(statistics).mean().to(device) if mean is None else mean
                result[at] = mean
                continue
            total = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
            for source in sources:
                total += fetched[source].to(torch.float64)
            result[at] = total / len(sources)
        return result

    def __str__(self) -> str:
        return "sources"


@dataclass(frozen=True)
class CopyOf(RowInit):
    """The bits of an old row, named for each new id: `{new id: old id}`."""

    ids: Mapping[int, int]

    def check(self, vocab_map: VocabMap) -> None:
        new = set(vocab_map.new_ids.tolist())
        missing, extra = sorted(new - set(self.ids)), sorted(set(self.ids) - new)
        outside = sorted(old for old in self.ids.values() if not 0 <= old < vocab_map.old_size)
        if missing or extra or outside:
            raise VocabularyError(
                "the rows to copy do not fit the map: "
                + "; ".join(
                    f"{what} {_few(ids)}"
                    for what, ids in (
                        ("no row is named for the new ids", missing),
                        ("rows are named for ids that are not new:", extra),
                        (f"old ids outside [0, {vocab_map.old_size}):", outside),
                    )
                    if ids
                )
                + ". Name one old id for each new id: --init copy:NEW=OLD,... (or choose --init sources)."
            )

    def needs(self, new_id: int, vocab_map: VocabMap) -> tuple[int, ...]:
        return (self.ids[new_id],)

    def rows(
        self, new_ids: Sequence[int], vocab_map: VocabMap, fetched: Mapping[int, Tensor],
        statistics: ColumnStatistics | None, *, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor:  # fmt: skip
        result = torch.empty(len(new_ids), *shape, dtype=dtype, device=device)
        for at, new_id in enumerate(new_ids):
            result[at] = fetched[self.ids[new_id]]
        return result

    def __str__(self) -> str:
        return "copy:" + ",".join(f"{new}={old}" for new, old in sorted(self.ids.items()))


@dataclass(frozen=True)
class Normal(RowInit):
    """Normal rows with each column's own mean and standard deviation, drawn by (seed, new id, column)."""

    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 2**64:
            raise VocabularyError(f"the seed of normal rows must be an integer in [0, 2**64), got {self.seed!r}")

    def needs_statistics(self, vocab_map: VocabMap) -> bool:
        return len(vocab_map.new_ids) > 0

    @property
    def spread(self) -> bool:
        return True

    def rows(
        self, new_ids: Sequence[int], vocab_map: VocabMap, fetched: Mapping[int, Tensor],
        statistics: ColumnStatistics | None, *, shape: Sequence[int], dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor:  # fmt: skip
        result = torch.empty(len(new_ids), *shape, dtype=dtype, device=device)
        mean, std = (one.to(device).reshape(-1) for one in (_given(statistics).mean(), _given(statistics).std()))
        step = max(1, 2**17 // max(1, len(mean)))  # of the drawing's 100 bytes a number
        for at in range(0, len(new_ids), step):
            drawn = normal_rows(new_ids[at : at + step], len(mean), self.seed, device)
            result[at : at + step] = (mean + std * drawn).view(-1, *shape)
        return result

    def __str__(self) -> str:
        return f"normal:{self.seed}"


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


def _given(statistics: ColumnStatistics | None) -> ColumnStatistics:
    if statistics is None:
        raise ValueError("this initialization reads the statistics of all old rows, and got none")
    return statistics


def _few(ids: Sequence[int]) -> str:
    more = f" and {len(ids) - _NEXT_TO_EACH_OTHER} more" if len(ids) > _NEXT_TO_EACH_OTHER else ""
    return ", ".join(map(str, ids[:_NEXT_TO_EACH_OTHER])) + more
