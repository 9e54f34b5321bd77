"""Runs a function in several processes, one per rank, and gives back what each of them returned or raised.

A call costs well under a second: the ranks are forked from a server that has already imported torch. Nothing
outlives a call: hung ranks are made to write their stacks and are then killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

START_LIMIT = 120.0  # seconds for the ranks to come up; the first call also waits for the server to import torch
AFTER_FAILURE = 10.0  # seconds the others have once one rank has failed
LEAVE_TOGETHER = 1.0  # seconds a finished rank keeps its connections open for peers that are still working
STACK_LIMIT = 5.0  # seconds a hung rank has to write its stacks

_context = multiprocessing.get_context("forkserver")
_preloaded = ["torch", "torch.distributed", "pytest", "vocab_parallel", "vocab_parallel.checkpoint"]
_context.set_forkserver_preload(_preloaded)


def preload(*modules: str) -> None:
    """Has the server import more, so that ranks need not. Before the first call of `run_ranks`."""
    _preloaded.extend(module for module in modules if module not in _preloaded)
    _context.set_forkserver_preload(_preloaded)


class RankError(NamedTuple):
    """What went wrong on one rank: the name of the exception's class, and its message."""

    type: str
    message: str


@dataclass
class Outcome:
    """How one rank ended. `error` is None when it returned `value`."""

    rank: int
    value: Any = None
    error: RankError | None = None
    details: str = ""


class RankFailure(Exception):
    """At least one rank raised, died or hung.

    Attributes:
        errors: rank -> RankError, the ranks that failed only, the first to fail first. A rank that died has the type
            "RankDied", one that hung "RankHung".
        details: rank -> its traceback, or its stacks if it hung or died.
    """

    def __init__(self, outcomes: list[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        self.errors = {outcome.rank: outcome.error for outcome in failed}
        self.details = {outcome.rank: outcome.details for outcome in failed}
        parts = [f"rank {o.rank}: {o.error.type}: {o.error.message}\n{o.details}" for o in failed if o.error]
        super().__init__(f"{len(failed)} of {len(outcomes)} ranks failed\n" + "\n".join(parts))


def run_ranks(
    fn: Callable[..., Any], tp: int, *args: Any, timeout: float = 60.0, detail: bool | None = None
) -> list[Any]:
    """Runs `fn(rank, *args)` on `tp` ranks of a new gloo world and returns the results in rank order.

    Args:
        fn: A module-level function; the ranks import it by name.
        tp: Number of ranks, 1 included. For groups that are not the world, let `fn` call `dist.new_group`.
        args: Sent by value, as are the results; tensors may be among them.
        timeout: Seconds, start-up not counted. Collectives time out at half of it, so that the rank which waits
            says itself where it waited.
        detail: Let torch.distributed check that the ranks issue the same collectives. False shows what happens to a
            user, who has no such check. By default two ranks have it, others not: it doubles what collectives cost.

    Raises:
        RankFailure: if any rank raised, died or hung.
    """
    outcomes = _launch(fn, tp, args, timeout, detail)
    if any(outcome.error for outcome in outcomes):
        raise RankFailure(outcomes)
    return [outcome.value for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def run_ranks_expecting_errors(
    fn: Callable[..., Any], tp: int, *args: Any, timeout: float = 60.0, detail: bool | None = None
) -> list[RankError]:
    """As `run_ranks`, but every rank must raise: returns the errors in rank order.

    Raises:
        RankFailure: if a rank died or hung.
        AssertionError: if a rank returned.
    """
    outcomes = sorted(_launch(fn, tp, args, timeout, detail), key=lambda outcome: outcome.rank)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if any(error.type in ("RankDied", "RankHung") for error in errors):
        raise RankFailure(outcomes)
    returned = [outcome.rank for outcome in outcomes if outcome.error is None]
    if returned:
        raise AssertionError(f"ranks {returned} returned, the others raised {errors}")
    return errors


def _launch(
    fn: Callable[..., Any], tp: int, args: tuple[Any, ...], timeout: float, detail: bool | None
) -> list[Outcome]:
    detail = tp == 2 if detail is None else detail
    payload = _dumps((fn, args))
    processes, connections = [], []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(tp):
                ours, theirs = _context.Pipe()
                process = _context.Process(
                    target=_rank_main, args=(rank, tp, folder, payload, theirs, timeout, detail), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
            outcomes = _collect(processes, connections, Path(folder), timeout)
            for ours in connections:
                with contextlib.suppress(OSError):
                    ours.send("leave")
            for process in processes:
                process.join(LEAVE_TOGETHER)
            return outcomes
        finally:
            for process in processes:
                _kill(process)
            for ours in connections:
                ours.close()


def _collect(processes: list[Any], connections: list[Any], folder: Path, timeout: float) -> list[Outcome]:
    """Waits for every rank to report, die or run out of time. The outcomes come in order of arrival."""
    outcomes: list[Outcome] = []
    waiting = dict(enumerate(connections))
    starting = set(waiting)
    deadline = time.monotonic() + START_LIMIT
    while waiting:
        ready = connection.wait(waiting.values(), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, ours in waiting.items() if ours in ready]:
            outcome = _receive(rank, waiting[rank], processes[rank], folder)
            if outcome is None:  # it has started
                starting.discard(rank)
                if not starting:
                    # the work has a limit of its own, unless a rank has failed already
                    failed = any(one.error for one in outcomes)
                    deadline = min(deadline, time.monotonic() + timeout) if failed else time.monotonic() + timeout
                continue
            del waiting[rank]
            outcomes.append(outcome)
            if outcome.error:
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE)
    if waiting:
        outcomes += _hung(waiting, processes, folder, {outcome.rank for outcome in outcomes if outcome.error})
    return outcomes


def _receive(rank: int, ours: Any, process: Any, folder: Path) -> Outcome | None:
    try:
        kind, content = ours.recv()
    except (EOFError, OSError):
        process.join(STACK_LIMIT)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit status {code}"
        return Outcome(rank, error=RankError("RankDied", how), details=_stacks(folder, rank))
    if kind == "started":
        return None
    if kind == "returned":
        return Outcome(rank, value=_loads(content))
    name, message, trace = content
    return Outcome(rank, error=RankError(name, message), details=trace)


def _hung(waiting: dict[int, Any], processes: list[Any], folder: Path, failed: set[int]) -> list[Outcome]:
    """Prints the stacks of the ranks that are still running."""
    for rank in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    limit = time.monotonic() + STACK_LIMIT
    while time.monotonic() < limit and not all(_stacks(folder, rank) for rank in waiting):
        time.sleep(0.05)
    time.sleep(0.2)  # let them write to the end
    why = f"still running when rank {sorted(failed)} had failed" if failed else "no result in time"
    outcomes = [Outcome(rank, error=RankError("RankHung", why), details=_stacks(folder, rank)) for rank in waiting]
    for outcome in outcomes:
        print(f"rank {outcome.rank} hangs:\n{outcome.details}", file=sys.stderr)
    return outcomes


def _stacks(folder: Path, rank: int) -> str:
    path = folder / f"stacks.{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _kill(process: Any) -> None:
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its own children as well
        process.kill()
    process.join()
    process.close()


def _rank_main(
    rank: int, tp: int, folder: str, payload: bytes, theirs: Any, timeout: float, detail: bool
) -> None:  # pragma: no cover (runs in a child)
    os.setsid()
    _die_with_parent()
    stacks = open(f"{folder}/stacks.{rank}", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    theirs.send(("started", None))
    try:
        fn, args = _loads(payload)
        dist.set_debug_level(dist.DebugLevel.DETAIL if detail else dist.DebugLevel.OFF)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=tp,
            timeout=datetime.timedelta(seconds=timeout / 2),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            value = fn(rank, *args)
        report = ("returned", _dumps(value))
    except BaseException as error:
        report = ("raised", (type(error).__name__, str(error), traceback.format_exc()))
    theirs.send(report)
    theirs.poll(LEAVE_TOGETHER)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the group's sockets close here, after the peers are done with them


def _die_with_parent() -> None:
    """Asks Linux to end this process with the fork server, which ends with the test run, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
