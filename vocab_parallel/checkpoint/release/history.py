"""Which bundle is in use, and which were before: the link `current`, and a log that is only ever appended to."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.placing import sync
from vocab_parallel.checkpoint.release.bundle import is_id, is_plain
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest.strict_json import dump, parse

CURRENT, LOG = "current", "history.jsonl"
_LOCK, _NEXT = ".lock", ".current.partial"
_LARGEST = 64 * 2**20
_ACTIONS = ("promote", "rollback", "undone", "found")


@dataclass(frozen=True)
class Event:
    """A line of the log.

    Attributes:
        action: "promote" and "rollback" are written before the link moves; "undone" says that the one before never
            moved it (a crash); "found" that the link was moved by other means.
        id: The bundle; of "undone" the one that stays in use, if any.
        time: UTC.
        sha256: Of its `bundle.json` at a promotion.
    """

    action: str
    id: str | None
    time: str
    sha256: str | None = None

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS or not (self.id is None or is_id(self.id)):
            raise CheckpointLayoutError(f"expected one of {', '.join(_ACTIONS)} and an id, got {self.action!r:.40}")


class History:
    """The log of a folder of releases and what follows from it.

    Attributes:
        current: The id in use; None of none.
        stack: Ids in the order of their promotions, as far as they were not rolled back; the last is in use.
    """

    def __init__(self, releases: Path) -> None:
        self.releases = releases
        self.events, self._torn = _read(releases / LOG)
        self.current = current_id(releases)
        self.stack, before = _stack(self.events)
        self._missing: Event | None = None  # what the log must say first
        if self.current != (self.stack[-1] if self.stack else None):
            if self.current == (before[-1] if before else None):
                self.stack, action = before, "undone"
            else:
                self.stack, action = [*self.stack, self.current] if self.current else [], "found"
            self._missing = Event(action, self.current, _now())

    def move(self, action: str, to: str, sha256: str | None = None) -> None:
        """Logs it, then puts the bundle into use; one `os.replace` does it."""
        with (self.releases / LOG).open("ab") as file:
            file.truncate(file.seek(0, os.SEEK_END) - self._torn)
            for event in filter(None, (self._missing, Event(action, to, _now(), sha256))):
                file.write(json.dumps(dump(event)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        link = self.releases / _NEXT
        link.unlink(missing_ok=True)
        os.symlink(to, link)
        os.replace(link, self.releases / CURRENT)
        sync(self.releases)

    def digest(self, bundle_id: str) -> str | None:
        """The sha256 of a bundle's list as it was promoted last."""
        found = [one.sha256 for one in self.events if one.id == bundle_id and one.sha256 is not None]
        return found[-1] if found else None


@contextmanager
def locked(releases: Path) -> Iterator[History]:
    """The history, for whoever changes it: one process at a time; the lock ends with the process.

    Raises:
        CheckpointLayoutError: Another process is at work.
    """
    if os.path.lexists(releases / _LOCK) and not is_plain(releases / _LOCK):
        raise CheckpointLayoutError(f"{releases / _LOCK} is a link, or no regular file: remove it and repeat")
    with (releases / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointLayoutError(
                f"another process is promoting or rolling back in {releases}: wait for it and repeat"
            ) from error
        yield History(releases)


def current_id(releases: Path) -> str | None:
    """What the link points to, read once; None without a link.

    Raises:
        CheckpointLayoutError: It is no link to a bundle of this folder.
    """
    link = releases / CURRENT
    try:
        found = os.readlink(link)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointLayoutError(f"{link} is no link: expected one to a bundle, as `promote` makes it") from error
    if not is_id(found):
        raise CheckpointLayoutError(f"{link} points to {found[:100]!r}: expected the id of a bundle beside it")
    return found


def _stack(events: list[Event]) -> tuple[list[str], list[str]]:
    """Promoted ids that were not rolled back, after all events and before the last."""
    now: list[str] = []
    before: list[str] = []
    for event in events:
        if event.action == "undone" or event.id is None:
            now = before if event.action == "undone" else []
            continue
        before = now
        if event.action == "rollback" and event.id in now:
            now = now[: len(now) - now[::-1].index(event.id)]
        elif now[-1:] != [event.id]:  # else it was made again, in place of a damaged one
            now = [*now, event.id]
    return now, before


def _read(path: Path) -> tuple[list[Event], int]:
    """The events, and how many bytes of a line that was not written to its end follow them."""
    try:
        if os.path.lexists(path) and not is_plain(path):
            raise CheckpointLayoutError(f"{path} is a link, or no regular file: a log of releases is a file of its own")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        return [], 0
    if len(data) > _LARGEST:
        raise CheckpointLayoutError(f"{path} has more than {_LARGEST:,} bytes: no log of releases is that long")
    *lines, rest = data.split(b"\n")
    events = []
    for number, line in enumerate(lines, 1):
        try:
            given: Any = json.loads(line)
            events.append(parse(Event, given, ""))
        except (ValueError, RecursionError, CheckpointLayoutError) as error:
            raise CheckpointLayoutError(
                f"{path} line {number}: {str(error)[:200]}. The log was edited: restore it, or move it away; then "
                "the bundle in use stays, and there is none to roll back to"
            ) from error
    return events, len(rest)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
