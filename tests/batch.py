"""Many calls on one set of ranks, and calls that are expected to raise on all of them."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.ranks import RankFailure, run_ranks


@dataclass(frozen=True)
class Attempt:
    """How one rank's call ended: `kind` is the name of the class it raised, None if it returned."""

    kind: str | None
    is_value_error: bool
    message: str
    seconds: float


def attempt(call: Callable[[], Any]) -> Attempt:
    """Runs a call that is expected to raise."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return Attempt(type(error).__name__, isinstance(error, ValueError), str(error), time.monotonic() - start)
    return Attempt(None, False, "", time.monotonic() - start)


def has_word(message: str, word: str) -> bool:
    """Whether `word` stands in the message by itself: "6" is not in "16", "[4, 2]" is in "(4, 2)"."""
    brackets = str.maketrans("()", "[]")
    text, word = message.translate(brackets).lower(), word.translate(brackets).lower()
    before = r"(?<![\w.\-])" if word[0].isalnum() else ""
    after = r"(?![\w])(?!\.\d)" if word[-1].isalnum() else ""
    return re.search(before + re.escape(word) + after, text) is not None


def assert_all_raise(what: str, attempts: list[Attempt], kinds: Sequence[str], words: Sequence[str]) -> None:
    """Every rank raised the same class, one of `kinds`, with the same message that names all `words`, in 10 seconds."""
    assert all(one.kind is not None for one in attempts), f"{what}: a rank did not raise: {attempts}"
    assert len({(one.kind, one.message) for one in attempts}) == 1, f"{what}: the ranks raise differently: {attempts}"
    assert attempts[0].kind in kinds, f"{what}: {attempts[0].kind} where {' or '.join(kinds)} is right: {attempts[0]}"
    assert attempts[0].is_value_error, f"{what}: {attempts[0].kind} is no ValueError"
    missing = [word for word in words if not has_word(attempts[0].message, word)]
    assert not missing, f"{what}: the message does not name {missing}: {attempts[0].message}"
    slowest = max(one.seconds for one in attempts)
    assert slowest < 10, f"{what}: raised after {slowest:.1f} s"


Entry = TypeVar("Entry")


def run_batch(
    worker: Callable[[int, int, Entry], Any], world: int, entries: Sequence[Entry], **options: Any
) -> dict[Entry, list[Any] | str]:
    """Runs `worker(rank, world, entry)` for many entries on one set of ranks, which saves their start-up.

    An entry that raises, hangs or kills a rank does not take the others with it: its own result is the report of what
    happened, and the entries after it run on new ranks, for up to three such entries.

    Returns:
        For each entry the results of its ranks in rank order, or the report.
    """
    results: dict[Entry, list[Any] | str] = {}
    left = list(entries)
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(_run_entries, world, worker, world, left, folder, **options)
                report = ""
            except RankFailure as failure:
                report = str(failure)
            done = sum(1 for i in range(len(left)) if all(_result(folder, i, r).exists() for r in range(world)))
            for i, entry in enumerate(left[:done]):
                results[entry] = [torch.load(_result(folder, i, r), weights_only=False) for r in range(world)]
        if not report:
            return results
        assert done < len(left), f"every entry finished, and then: {report}"
        results[left[done]] = report
        left = left[done + 1 :]
        if not left:
            return results
    return results | {entry: "not run: three entries before it broke their ranks" for entry in left}


def _run_entries(rank: int, worker: Any, world: int, entries: list[Any], folder: str) -> None:
    for i, entry in enumerate(entries):
        path = _result(folder, i, rank)
        torch.save(worker(rank, world, entry), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def _result(folder: str, index: int, rank: int) -> Path:
    return Path(folder) / f"{index}-{rank}.pt"
