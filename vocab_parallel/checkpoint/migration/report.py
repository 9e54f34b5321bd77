"""What a migration moved, or would move."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.mapping import VocabMap


@dataclass(frozen=True)
class Table:
    """A parameter over the vocabulary and all that moves with it.

    Attributes:
        name: Of the parameter.
        weight: Its key.
        master: Key of its full-precision weight, if the optimizer has one.
        states: Keys of other row-shaped optimizer state.
    """

    name: str
    weight: str
    master: str | None
    states: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that move."""
        return (self.weight, *([self.master] if self.master else []), *self.states)


@dataclass(frozen=True)
class MigrationReport:
    """What a migration does, or did.

    Attributes:
        init: How new rows begin, as on the command line.
        layout: How the target's files are cut.
        tables: What moved by row.
        bytes: Of the target's tensors.
        without_sources: New ids that begin as the mean of all rows, since the map names no sub-tokens of them.
        notes: What else a user should know.
    """

    source: Path
    target: Path
    vocab_map: VocabMap
    init: str
    layout: VocabLayout
    tables: tuple[Table, ...]
    bytes: int
    without_sources: int
    notes: tuple[str, ...]

    def lines(self, old: VocabIdentity | None = None, new: VocabIdentity | None = None) -> list[str]:
        """For people; with the texts of tokens where an identity is given."""
        lines = list(self.vocab_map.describe(old, new))
        if len(self.vocab_map.new_ids):
            lines.append(f"new rows begin as: {self.init}; their optimizer moments as zeros")
        if self.without_sources:
            lines.append(
                f"{self.without_sources:,} new ids have no source sub-tokens: they begin as the mean of all rows"
            )
        for table in self.tables:
            states = ", ".join(key.rpartition(".")[2] for key in table.keys[1:]) or "no optimizer state"
            lines.append(f"table {table.name}: {table.weight} with {states}")
        lines.append(f"target: {self.layout}; {self.bytes:,} bytes of tensors")
        return [*lines, *self.notes]

    def origin(self) -> dict[str, Any]:
        """JSON values for the target's state: where its rows are from."""
        vocab_map = self.vocab_map
        return {
            "checkpoint": self.source.resolve().name,
            "old_sha256": vocab_map.old_sha256,
            "new_sha256": vocab_map.new_sha256,
            "kept": vocab_map.kept,
            "new": len(vocab_map.new_ids),
            "dropped": len(vocab_map.dropped_ids),
            "init": self.init,
            "without_sources": self.without_sources,
        }
