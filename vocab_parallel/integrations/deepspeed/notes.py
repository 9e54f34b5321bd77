"""What is noted beside a ZeRO checkpoint: the newest tag, and the layout that `vocab_parallel.json` describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.metadata import inside, leads_out
from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.files import parse_json, read_bytes

LAYOUT_FILE = "vocab_parallel.json"
VOCAB_SIZE = "vocab_size"
MOST_RANKS = 2**20
_LARGEST, _MOST_LISTS = 2**26, 2**20


def named_tag(latest: Path) -> str:
    """The tag in a file such as ``latest``: a folder beside it.

    Raises:
        CheckpointLayoutError: It names something else.
    """
    try:
        tag = read_bytes(latest, 2**11).decode("utf-8", "replace").strip()
    except (VocabularyError, OSError) as error:
        raise CheckpointLayoutError(f"{latest} cannot be read: {error}") from error
    if not tag or not inside(latest.parent, tag) or leads_out(latest.parent, tag):
        raise CheckpointLayoutError(f"{latest} names {tag!r:.200}, which is no folder in {latest.parent}")
    return tag


def read_note(path: Path) -> dict[str, Any]:
    """What `universal.write_layout` has written beside a checkpoint.

    Raises:
        CheckpointLayoutError: It is damaged, or cannot be read.
    """
    try:
        note: dict[str, Any] = parse_json(read_bytes(path, _LARGEST), path, _MOST_LISTS)
        sizes, tables = (VOCAB_SIZE, "padded_size", "tp_size"), note["parameters"]
        sane = bool(tables) and all(
            all(type(entry[size]) is int and 0 < entry[size] < 2**40 for size in sizes)
            and entry[VOCAB_SIZE] <= entry["padded_size"] and entry["tp_size"] < MOST_RANKS
            and type(entry["row"]) is list and all(type(n) is int and 0 <= n < 2**40 for n in entry["row"])
            and type(entry.get("trained", True)) is bool and inside(path, name)
            for name, entry in tables.items()
        )  # fmt: skip
        names = [name for pair in note["aliases"].items() for name in pair]
        if not sane or not all(type(name) is str and inside(path, name) for name in names):
            raise ValueError("sizes that no layout has")
    except OSError as error:
        raise CheckpointLayoutError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointLayoutError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]})") from error
    return note
