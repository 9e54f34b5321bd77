"""The checkpoints of one run: which are whole, which is the newest, which may go."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.writing import discard, is_whole, old_of
from vocab_parallel.errors import CheckpointLayoutError

_NAME = re.compile(r"step-(\d{8,})")


def latest_checkpoint(folder: str | os.PathLike[str], *, verify: bool = False) -> Path | None:
    """The whole checkpoint with the highest step in `folder`; None if there is none.

    After a crash it may be a folder `.step-<step>.old`: one that was just to be replaced by another of the same step.

    Args:
        verify: Read every file of it and compare hashes; one that is damaged is passed over with a warning.
    """
    for path in reversed(checkpoints(Path(folder))):
        if not verify:
            return path
        try:
            open_checkpoint(path).verify()
            return path
        except (CheckpointLayoutError, OSError) as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
    return None


def checkpoints(root: Path) -> list[Path]:
    """All whole ones, by step."""
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        old = _NAME.fullmatch(path.name[1:-4]) if path.name.startswith(".") and path.name.endswith(".old") else None
        if match and is_whole(path):
            found[int(match[1])] = path
        elif old and is_whole(path) and not is_whole(root / old[0]):
            found[int(old[1])] = path
    return [found[step] for step in sorted(found)]


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}"


def prune(root: Path, keep: int | None) -> None:
    """Removes all but the last `keep` whole checkpoints, and what crashes have left behind."""
    for path in checkpoints(root)[: -keep if keep else 0]:
        discard(old_of(path))
        discard(path)
    for path in root.iterdir():
        if path.name.startswith(".step-") and path.name.endswith((".partial", ".gone")):
            shutil.rmtree(path, ignore_errors=True)
