"""The folder of a saved ZeRO checkpoint, and what `vocab_parallel.json` in it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed.universal import LAYOUT_FILE

MOST_RANKS = 2**20
_LARGEST_JSON = 64 * 2**20


def find_tag(source: Path) -> Path:
    """The folder of a tag: `source`, or the one that its file ``latest`` names.

    Raises:
        CheckpointLayoutError: There is none, or it was not saved by an engine of `initialize`.
    """
    latest = source / "latest"
    folder = source
    if not (source / LAYOUT_FILE).is_file() and latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace")[:1024].strip()
        if not tag or Path(tag).is_absolute() or ".." in Path(tag).parts:
            raise CheckpointLayoutError(f"{latest} names {tag!r}, which is no folder in {source}")
        folder = source / tag
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
        CheckpointLayoutError: It is damaged, of a universal checkpoint, or of several vocabularies.
    """
    path = folder / LAYOUT_FILE
    try:
        with path.open("rb") as file:
            note = json.loads(file.read(_LARGEST_JSON))
        tables, aliases = note["parameters"], note["aliases"]
        sizes = ("vocab_size", "padded_size", "tp_size")
        sane = bool(tables) and all(
            all(type(entry[size]) is int and 0 < entry[size] < 2**40 for size in sizes)
            and entry["vocab_size"] <= entry["padded_size"] and entry["tp_size"] < MOST_RANKS
            and all(type(n) is int and n >= 0 for n in entry["row"])
            for entry in tables.values()
        )  # fmt: skip
        if not sane or not all(type(one) is str for pair in aliases.items() for one in pair):
            raise ValueError("sizes that no layout has")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointLayoutError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if note.get("universal"):
        raise CheckpointLayoutError(
            f"{folder} is a universal checkpoint of to_universal: convert the folder that it was made from"
        )
    if len({(entry["vocab_size"], entry["tp_size"]) for entry in tables.values()}) > 1:
        raise CheckpointLayoutError(
            f"{path} has tables of different vocabularies ({', '.join(tables)}): a checkpoint of ours has one"
        )
    return tables, aliases
