"""The folder of a saved ZeRO checkpoint, and what `vocab_parallel.json` in it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed.notes import LAYOUT_FILE, MOST_RANKS, named_tag, read_note

__all__ = ["MOST_RANKS", "find_tag", "read_layout"]


def find_tag(source: Path) -> Path:
    """The folder of a tag: `source`, or the one that its file ``latest`` names.

    Raises:
        CheckpointLayoutError: There is none, or it was not saved by an engine of `initialize`.
    """
    latest = source / "latest"
    folder = source
    if not (source / LAYOUT_FILE).is_file() and latest.is_file():
        folder = source / named_tag(latest)
    if not (folder / LAYOUT_FILE).is_file():
        raise CheckpointLayoutError(
            f"{folder} has no {LAYOUT_FILE}: it was not saved by an engine of "
            "vocab_parallel.integrations.deepspeed.initialize, so its real rows cannot be told from padding. Load it "
            "in an engine that initialize built, save it there, and convert that"
        )
    return folder


def read_layout(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The tables and the ties as `vocab_parallel.json` has them.

    Raises:
        CheckpointLayoutError: It is damaged or unreadable, of a universal checkpoint, or of several vocabularies.
    """
    path = folder / LAYOUT_FILE
    note = read_note(path)
    tables, aliases = note["parameters"], note["aliases"]
    if note.get("universal"):
        raise CheckpointLayoutError(
            f"{folder} is a universal checkpoint of to_universal: convert the folder that it was made from"
        )
    if len({(entry["vocab_size"], entry["tp_size"]) for entry in tables.values()}) > 1:
        raise CheckpointLayoutError(
            f"{path} has tables of different vocabularies ({', '.join(tables)}): a checkpoint of ours has one"
        )
    return tables, aliases
