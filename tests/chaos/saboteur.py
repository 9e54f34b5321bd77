"""``python -m vocab_parallel`` on one rank, with something done to it on the way: patches from outside, then the app.

What is done stands in the environment, as a list of `Strike` in JSON (`PLAN`). Each one that is done is noted in a file
(`NOTES`) just before. Without a list the file tells what there is to strike: collectives a step, events a save.
"""

from __future__ import annotations

import builtins
import dataclasses
import errno
import faulthandler
import io
import json
import os
import random
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAN, NOTES = "VOCAB_PARALLEL_CHAOS_PLAN", "VOCAB_PARALLEL_CHAOS_NOTES"
CHANGES = ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir")
ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS}
WRITES = 8  # of so many small writes one counts


@dataclass(frozen=True)
class Strike:
    """One thing that is done to one rank in one attempt of torchrun.

    Attributes:
        how: "kill", "stop" (SIGSTOP), "full" or "read-only" (errors of the disk from then on), "flip", "cut" or
            "lose" (of the newest checkpoint, before the start).
        where: "step" (before it), "collective" (before this rank joins it), "save" (before an event), "start".
        number: The step or save, counted from the attempt's first.
        at: Of a step the collective, of a save the event or the write; of damage a seed.
    """

    attempt: int
    rank: int
    how: str
    where: str
    number: int = 1
    at: int = 1


class Saboteur:
    """Counts one rank's steps, collectives and saves, and strikes where it was told to."""

    def __init__(self, strikes: list[Strike], note: Callable[..., None]) -> None:
        self.strikes, self.note = strikes, note
        self.steps = self.calls = self.saves = self.events = 0
        self.saving = False
        self.disk: FileEvents | None = None
        self.patch()

    def patch(self) -> None:
        from vocab_parallel import collectives
        from vocab_parallel.app.train import Run
        from vocab_parallel.checkpoint import saver, store

        true_step, true_save, true_start = Run.step, store.save_together, collectives._start

        def step(run: Any, number: int) -> Any:
            self.steps, self.calls = self.steps + 1, 0
            self.strike("step", self.steps)
            row = true_step(run, number)
            if not self.strikes and self.steps == 2:
                self.note(collectives=self.calls)
            self.calls = -(10**9)  # what comes between two steps is no part of one
            return row

        def save_together(*args: Any) -> Any:
            if self.disk is None:
                self.disk = FileEvents(self.event)
            self.saves, self.events, self.saving = self.saves + 1, 0, True
            try:
                return true_save(*args)
            finally:
                self.saving = False
                if not self.strikes and self.saves == 2:
                    self.note(events=self.events)

        def start(*args: Any) -> Any:
            self.calls += 1
            self.strike("collective", self.steps, self.calls, event=args[0])
            return true_start(*args)

        Run.step, collectives._start = step, start  # type: ignore[method-assign]
        store.save_together = saver.save_together = save_together

    def event(self, name: str, half: Callable[[], None]) -> None:
        """Before something is done to the file system; what is done outside of a save does not count."""
        if self.saving:
            self.events += 1
            self.strike("save", self.saves, self.events, name, half)

    def strike(
        self, where: str, number: int, at: int = 1, event: str = "", half: Callable[[], None] = lambda: None
    ) -> None:
        for one in self.strikes:
            if (one.where, one.number, one.at) != (where, number, at):
                continue
            self.note(strike=dataclasses.asdict(one), event=event)
            if one.how in ERRORS:
                assert self.disk is not None
                self.disk.error = ERRORS[one.how]
                continue
            half()
            os.kill(os.getpid(), signal.SIGKILL if one.how == "kill" else signal.SIGSTOP)


class FileEvents:
    """Tells of what this process does to the file system before it does it, or fails it with `error`.

    A full disk still makes folders and removes files; a read-only one changes nothing.
    """

    def __init__(self, tell: Callable[[str, Callable[[], None]], None]) -> None:
        from vocab_parallel.checkpoint import writing

        self.tell, self.error, self.writes = tell, 0, 0
        for name in CHANGES:
            setattr(os, name, self._changing(name, getattr(os, name)))
        for module in (builtins, io):
            module.open = self._opening(module.open)  # type: ignore[attr-defined]
        writing._Hashed.write = self._writing(writing._Hashed.write)  # type: ignore[method-assign]

    def _changing(self, name: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.tell(name, lambda: None)
            if self.error == errno.EROFS and name != "fsync":
                self.fail(args[0])
            return real(*args, **options)

        return call

    def _opening(self, real: Any) -> Any:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "w" in mode:
                self.tell("open", lambda: None)
                if self.error == errno.EROFS:
                    self.fail(file)
            return real(file, mode, *args, **options)

        return call

    def _writing(self, real: Any) -> Any:
        def call(file: Any, data: Any) -> Any:
            def half() -> None:
                real(file, bytes(data)[: len(data) // 2])
                file.flush()

            self.writes += 1
            if self.writes % WRITES == 0:
                self.tell("write", half)
            if self.error:
                half()
                self.fail(file._path)
            return real(file, data)

        return call

    def fail(self, path: Any) -> None:
        if "checkpoints" in str(path) or "/" not in str(path):
            raise OSError(self.error, os.strerror(self.error), str(path))


def damage(folder: Path, how: str, seed: int) -> str:
    """Damages the newest checkpoint of a run: one byte flipped, a file cut short, or a file gone. Says what."""
    from vocab_parallel.checkpoint import latest_checkpoint

    drawn = random.Random(seed)
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None, f"nothing to damage in {folder}"
    path = drawn.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    at = drawn.randrange(len(content))
    if how == "flip":
        content[at] ^= 1 << drawn.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[:at])
    else:
        path.unlink()
    return f"{newest.name}/{path.name} at {at}"


def notes(path: Path) -> list[dict[str, Any]]:
    """What the ranks have noted, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def main() -> None:
    attempt, rank = (int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    plan = json.loads(os.environ[PLAN])

    def note(**what: Any) -> None:
        line = json.dumps({"attempt": attempt, "rank": rank, **what}) + "\n"
        with open(os.environ[NOTES], "a") as file:
            file.write(line)

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    strikes = [Strike(**one) for one in plan or ()]
    mine = [one for one in strikes if (one.attempt, one.rank) == (attempt, rank)]
    for one in (one for one in mine if one.where == "start"):
        [run] = [Path(word.partition("=")[2]) for word in sys.argv if word.startswith("run=")]
        note(strike=dataclasses.asdict(one), event=damage(run, one.how, one.at))
    later = [one for one in mine if one.where != "start"]
    if later or plan is None:
        Saboteur(later, note)
    runpy.run_module("vocab_parallel", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
