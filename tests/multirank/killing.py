"""A process that kills itself at the n-th thing that it does to the file system, and what it leaves."""

from __future__ import annotations

import builtins
import io
import multiprocessing
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.multirank.checkpoint_cases import Model, build, train
from vocab_parallel.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, writing
from vocab_parallel.checkpoint.saver import AsyncSaver
from vocab_parallel.checkpoint.states import collect

Moment = tuple[str, bool, int, str]  # scenario, by a thread, number of the event, what it was
WRITES = 8  # of so many small writes one counts
RENAMES = 40  # of so many events the last ones put a checkpoint in its place
SCENARIOS = ("next step", "same step again")


class Killer:
    """Counts what a save does to the file system and ends the process before one of these things.

    Of a write, half is done before.
    """

    def __init__(self, at: int, report: Callable[[str], None] = lambda event: None) -> None:
        self.at, self.count, self.writes, self.report = at, 0, 0, report
        for name in ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        for module in (builtins, io):
            module.open = self._opened(module.open)  # type: ignore[attr-defined]
        writing._Hashed.write = self._written(writing._Hashed.write)  # type: ignore[method-assign]

    def event(self, name: str) -> bool:
        self.count += 1
        if self.count == self.at:
            self.report(name)
        return self.count == self.at

    def _counted(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.event(name):
                die()
            return real(*args, **kwargs)

        return call

    def _opened(self, real: Any) -> Any:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "w" in mode and self.event("open"):
                die()
            return real(file, mode, *args, **kwargs)

        return call

    def _written(self, real: Any) -> Any:
        def call(file: Any, data: Any) -> Any:
            self.writes += 1
            if self.writes % WRITES == 0 and self.event("write"):
                real(file, data[: len(data) // 2])
                file.flush()
                die()
            return real(file, data)

        return call


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(root: Path, scenario: str, by_thread: bool, model: Model, optimizer: Any) -> None:
    step = 1 if scenario == "same step again" else 2
    if not by_thread:
        save_checkpoint(root, model, optimizer, step, {"which": "new"}, keep=1)
        return
    with AsyncSaver(model.head.shard, keep=1) as saver:
        saver.save(root, model, optimizer, step, {"which": "new"})


def every_moment(place: str, sample: int) -> list[Moment] | str:
    """Kills a save at each of its moments, of some scenarios at each `sample`-th; checks what is left each time.

    The renames at the end are met in each, by a thread at every second moment.

    Runs in a process of one thread, which forks for every kill.

    Returns:
        The moments, each with what was found after it ("old" or "new") at its end; or a trace.
    """
    results, sender = multiprocessing.get_context("forkserver").Pipe(False)
    process = multiprocessing.get_context("forkserver").Process(target=_loop, args=(place, sample, sender))
    process.start()
    sender.close()
    try:
        return results.recv()
    except EOFError:
        return f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _loop(place: str, sample: int, sender: Any) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(_moments(Path(place), sample))
    except BaseException:
        sender.send(traceback.format_exc())


def _moments(place: Path, sample: int) -> list[Moment]:
    model, optimizer = small()
    train(model, optimizer, range(1))
    template = place / "template"
    save_checkpoint(template, model, optimizer, 1, {"which": "old"})
    want = {"old": held(model, optimizer)}
    train(model, optimizer, range(1, 2))
    want["new"] = held(model, optimizer)
    found: list[Moment] = []
    for scenario, by_thread in ((one, how) for one in SCENARIOS for how in (False, True)):
        root = place / "killed"
        every = 1 if (scenario, by_thread) == ("next step", False) else sample
        at = 1
        while True:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(template, root)
            event = _kill(root, scenario, by_thread, at, model, optimizer)
            if event is None:
                break
            which = check(root, want, f"{scenario}, killed at event {at} ({event})")
            found.append((scenario, by_thread, at, f"{event} {which}"))
            at += every if at < RENAMES else 1 + by_thread
    return found


def _kill(root: Path, scenario: str, by_thread: bool, at: int, model: Model, optimizer: Any) -> str | None:
    """What the save was about to do when it ended; None if it came to its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            Killer(at, lambda name: os.write(writer, name.encode()))
            save(root, scenario, by_thread, model, optimizer)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    event = os.read(reader, 100).decode()
    os.close(reader)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        return None
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and event, f"{status} {event}"
    return event


def check(root: Path, want: dict[str, dict[str, Any]], what: str) -> str:
    """Finds and loads the newest checkpoint; which of the two states it holds."""
    latest = latest_checkpoint(root, verify=True)
    assert latest is not None, f"{what}: no checkpoint in {sorted(os.listdir(root))}"
    model, optimizer = small()
    _, extra = load_checkpoint(latest, model, optimizer)
    which = extra["which"]
    found = held(model, optimizer)
    assert found.keys() == want[which].keys(), what
    for key, value in want[which].items():
        assert torch.equal(found[key], value), f"{what}: {key}"
    return str(which)


def small() -> tuple[Model, Any]:
    """Few tensors, so that a save has few moments."""
    return build(True, "SGD", bias=False)


def held(model: Model, optimizer: Any) -> dict[str, torch.Tensor]:
    return {key: value.local.clone() for key, value in collect(model, optimizer).tensors.items()}
