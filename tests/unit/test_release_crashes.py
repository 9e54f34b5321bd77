"""A promotion or a rollback that dies, or meets a full disk, at any moment: a whole bundle stays in use."""

from __future__ import annotations

import io
import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.unit.releases import checkpoint
from vocab_parallel.checkpoint.release import open_current, promote, rollback, verify
from vocab_parallel.checkpoint.release.writing import remove
from vocab_parallel.errors import CheckpointLayoutError as Refused


class Moments:
    """Counts what changes files; at a given count it stops the process, or fails once as a full disk does."""

    NAMES = ("link", "symlink", "replace", "unlink", "rmdir", "mkdir", "chmod", "fsync")

    def __init__(self, at: int | None, fail: bool) -> None:
        self.count, self.at, self.fail = 0, at, fail
        for name in self.NAMES:
            setattr(os, name, self._counted(getattr(os, name)))
        plain, opened = io.open, self._counted(io.open)
        io.open = lambda path, mode="r", *rest, **more: (opened if mode[0] in "wa" else plain)(
            path, mode, *rest, **more
        )

    def _counted(self, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at and not self.fail:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.count == self.at:
                raise OSError(28, "No space left on device")
            return function(*args, **options)

        return call


def in_child(work: Any, at: int | None, fail: bool = False) -> tuple[int, int]:
    """Runs `work` in a forked process that is killed, or fails once, at a moment; its status and events."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which do nothing here
        child = os.fork()
    if child == 0:
        status = 1
        try:
            moments = Moments(at, fail)
            work()
            os.write(write, str(moments.count).encode())
            status = 0
        except (OSError, Refused):
            status = 28
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        counted = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, int(counted or 0)


def moments_of(work: Any, wanted: int, last: int) -> list[int]:
    """Some of all moments: the last ones each, the others evenly."""
    status, total = in_child(work, None)
    assert status == 0 and total > last, total
    early = range(1, total - last + 1)
    some = {early[round(at * (len(early) - 1) / max(1, wanted - last - 1))] for at in range(wanted - last)}
    return sorted({*some, *range(total - last + 1, total + 1)})


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A third checkpoint, and the ids of two bundles, the second in use."""
    folder = tmp_path_factory.mktemp("two")
    a, b = (promote(folder / "releases", checkpoint(folder, seed=seed, tied=seed == 1)).id for seed in (1, 2))
    yield checkpoint(folder, seed=3), a, b
    for path in (folder / "releases").iterdir():
        remove(path)


@pytest.fixture
def fresh(two, tmp_path):
    """Makes copies of the releases, one a moment."""
    copies = []

    def make() -> Path:
        copies.append(tmp_path / f"copy-{len(copies)}")
        shutil.copytree(two[0].parent / "releases", copies[-1], symlinks=True)
        return copies[-1]

    yield make
    for copy in copies:
        for path in copy.iterdir():
            remove(path)


@pytest.mark.parametrize(("fail", "wanted"), [(False, 20), (True, 10)], ids=["killed", "full disk"])
def test_a_promotion_that_stops_at_any_moment_leaves_the_bundle_in_use_whole(two, fresh, fail, wanted):
    source, _, b = two
    first = fresh()
    moments = moments_of(lambda: promote(first, source), wanted, 8)
    assert len(moments) >= wanted
    c = open_current(first).id
    seen = set()
    for at in moments:
        releases = fresh()
        status, _ = in_child(lambda releases=releases: promote(releases, source), at, fail)
        now = open_current(releases).id
        seen.add(now)
        # A file system without links, as one that is full, is no failure yet.
        assert status == (28 if fail else -signal.SIGKILL) or (fail and now == c and status == 0), at
        assert now in (b, c) and verify(releases) == [], at
        assert promote(releases, source).id == c, at
        assert {path.name for path in releases.iterdir() if path.name.startswith(".")} == {".lock"}
        assert rollback(releases).id == b, at
    assert seen == {b, c}


def test_a_rollback_that_stops_at_any_moment_leaves_a_whole_bundle_in_use(two, fresh):
    _, a, b = two
    seen, first = set(), fresh()
    for at in moments_of(lambda: rollback(first), 7, 6):
        releases = fresh()
        assert in_child(lambda releases=releases: rollback(releases), at)[0] == -signal.SIGKILL
        seen.add(open_current(releases).id)
        assert verify(releases) == [], at
        if open_current(releases).id == b:
            assert rollback(releases).id == a
        with pytest.raises(Refused, match="nothing to roll back to"):
            rollback(releases)
    assert seen == {a, b}
