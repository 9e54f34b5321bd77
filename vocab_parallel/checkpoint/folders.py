"""The checkpoints of one run: which are whole, which is the newest, which may go."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.placing import STATE, discard, is_whole, old_of
from vocab_parallel.errors import CheckpointLayoutError

_NAME = re.compile(r"(\.)?(step-(\d{8,}))(\.old)?")


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


def checkpoints(root: Path, state: str = STATE) -> list[Path]:
    """All whole ones, by step; of the kind whose last file is called `state`."""
    if not root.is_dir():
        return []
    found: dict[int, Path] = {}
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None or match[2] != name_of(int(match[3])) or bool(match[1]) != bool(match[4]):
            continue
        if is_whole(path, state) and not (match[1] and is_whole(root / match[2], state)):
            found[int(match[3])] = path
    return [found[step] for step in sorted(found)]


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step!s:0>8}"


def prune(root: Path, keep: int | None, saved: Path, state: str = STATE) -> None:
    """Removes all but the last `keep` whole checkpoints (None: none of them), and what crashes have left behind.

    The one that was just `saved` stays, though a run that went back to an earlier step has left later ones.
    """
    others = [path for path in checkpoints(root, state) if path != saved]
    for path in others[: max(0, len(others) - keep + 1)] if keep is not None else []:
        discard(old_of(path))
        discard(path)
    for path in root.iterdir():
        if path.name.startswith(".step-") and path.name.endswith((".partial", ".gone")):
            shutil.rmtree(path, ignore_errors=True)
