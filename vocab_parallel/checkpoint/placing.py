"""How a checkpoint gets its name: written aside, put in place as a whole, what was there before kept until then."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from vocab_parallel.errors import CheckpointLayoutError

STATE = "state.json"  # written last: a folder without it is not a checkpoint
METADATA = ".metadata"
_PATIENCE_S = 300.0


def require_replaceable(final: Path) -> None:
    """Raises if something stands at `final` that is neither a checkpoint nor an empty folder: it would be lost."""
    if final.exists() and not (final / METADATA).exists() and not (final.is_dir() and not any(final.iterdir())):
        raise CheckpointLayoutError(
            f"{final} exists and is no checkpoint, expected a new name or one to replace: give another name, or move "
            f"it: mv {final} {final}.other"
        )


def aside_of(final: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return final.parent / f".{final.name}.partial"


def open_aside(final: Path) -> Path:
    """An empty folder beside `final` to write into."""
    aside = aside_of(final)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    return aside


class Turn:
    """The right to write checkpoints into a folder: replicas that save without a common group take turns.

    Nothing is left in the folder, and a process that dies gives it back. File systems without locks know no turns.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, folder: Path) -> None:
        """Waits for it.

        Raises:
            CheckpointLayoutError: Another process has it for minutes.
        """
        with suppress(FileExistsError):  # if it is no folder, the next line says so
            folder.mkdir(parents=True)
        self._descriptor, until = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise CheckpointLayoutError(
                        f"another process has been writing a checkpoint into {folder} for {_PATIENCE_S:.0f} s: give "
                        "replicas of one model a common group=, or each a folder of its own"
                    ) from error
                time.sleep(0.01)
            except OSError:  # no locks here; NFS has none of folders
                return

    def give_back(self) -> None:
        """Lets the next one write; also when forked processes hold copies of what is open here."""
        if self._descriptor is not None:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def put_in_place(aside: Path, final: Path, *, state: str = STATE) -> None:
    """Syncs all of `aside` and gives it its name.

    A checkpoint of that name (a step saved twice) goes only after. A crash between the two renames leaves it as
    `.<name>.old`, which `latest_checkpoint` finds.
    """
    for path in (*aside.rglob("*"), aside):
        sync(path)
    old = old_of(final)
    if not final.exists() and is_whole(old, state):  # such a crash
        os.replace(old, final)
    discard(old)
    if final.exists():
        os.replace(final, old)
    os.replace(aside, final)
    sync(final.parent)
    discard(old)


def old_of(final: Path) -> Path:
    """Where a checkpoint is while another one takes its name."""
    return final.parent / f".{final.name}.old"


def is_whole(path: Path, state: str = STATE) -> bool:
    """Whether a folder is a checkpoint that was written to its end; `state` is the file that is written last."""
    return (path / state).is_file() and (state != STATE or (path / METADATA).is_file())


def discard(folder: Path) -> None:
    """Removes a checkpoint; renamed first, so that a crash on the way leaves nothing that looks whole."""
    if folder.exists():
        gone = folder.parent / f".{folder.name.strip('.')}.gone"
        shutil.rmtree(gone, ignore_errors=True)
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def sync(path: Path) -> None:
    """Makes a file, or the names in a folder, last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
