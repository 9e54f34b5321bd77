"""Ranks that live through thousands of cases: a case that hangs or kills them is a finding, and they start anew."""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import io
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.case import GROUPS, REPLICAS, WORLD, FuzzCase, Place
from tests.ranks import START_LIMIT, _context, _die_with_parent, _kill, preload
from tests.tolerances import bits

AHEAD = 8  # cases that ranks have been given, beside the one that is waited for
LIMIT = 30.0  # seconds that a case may take
AFTER_FAILURE = 3.0  # seconds that the other ranks have once one has raised

preload("tests.fuzz.kinds.every")


@dataclass
class Outcome:
    """How a case ended: every rank's result, or what went wrong and on which ranks."""

    case: FuzzCase
    results: list[Any] = field(default_factory=list)
    trouble: str = ""  # "", "error", "hang" or "died"
    details: str = ""


@dataclass
class Raised:
    """What a rank raised."""

    kind: str
    trace: str


class World:
    """`WORLD` gloo ranks. A context manager: nothing outlives it."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit, self.starts = limit, 0
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        # in memory where the machine has such a folder
        self._folder = Path(
            tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        )

    def run(self, cases: Iterable[FuzzCase]) -> Iterator[Outcome]:
        """Runs the cases and yields how they ended, in any order. After trouble the rest go to new ranks."""
        left, given = iter(cases), collections.OrderedDict[int, Outcome]()
        again: list[FuzzCase] = []
        number, more = 0, True
        while more or given or again:
            while len(given) < AHEAD and (more or again):
                case = again.pop(0) if again else next(left, None)
                if case is None:
                    more = False
                    break
                self._start()
                number += 1
                given[number] = Outcome(case, [None] * len(case.ranks))
                for rank in sorted(set(case.ranks)):
                    with contextlib.suppress(OSError):  # a rank that died is found where its result is waited for
                        self._pipes[rank].send((number, case))
            if not given:
                return
            done, trouble = self._collect(given)
            yield from done
            if trouble is not None:
                again += [one.case for one in given.values() if one is not trouble]
                given.clear()
                self.stop()
                yield trouble

    def _collect(self, given: collections.OrderedDict[int, Outcome]) -> tuple[list[Outcome], Outcome | None]:
        """Waits until a case is through or in trouble."""
        began = time.monotonic()
        while True:
            first = next(iter(given))
            raised = any(isinstance(result, Raised) for result in given[first].results)
            limit = min(self.limit, AFTER_FAILURE) if raised else self.limit
            ready = connection.wait(self._pipes, max(0.0, began + limit - time.monotonic()))
            if not ready:
                return [], self._stuck(given[first])
            done: list[Outcome] = []
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    number, value = _loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    return done, self._died(rank, given)
                outcome = given[number]
                outcome.results[outcome.case.ranks.index(rank)] = value
                if all(result is not None for result in outcome.results):
                    del given[number]
                    shutil.rmtree(self._folder / f"case.{number}", ignore_errors=True)
                    if any(isinstance(result, Raised) for result in outcome.results):
                        return done, _raised(outcome)
                    done.append(outcome)
            if done:
                return done, None

    def _stuck(self, outcome: Outcome) -> Outcome:
        waiting = [rank for rank, result in zip(outcome.case.ranks, outcome.results, strict=True) if result is None]
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        raised = [one for one in outcome.results if isinstance(one, Raised)]
        outcome.trouble = "hang"
        outcome.details = f"ranks {waiting} of {list(outcome.case.ranks)} did not end in time\n" + "\n".join(
            [one.trace for one in raised] + [f"rank {rank}:\n{self._stacks(rank)}" for rank in waiting]
        )
        return outcome

    def _died(self, rank: int, given: collections.OrderedDict[int, Outcome]) -> Outcome:
        """The first case that the dead rank has not ended is the one that it was in."""
        outcome = next(
            (
                one
                for one in given.values()
                for at, of in enumerate(one.case.ranks)
                if of == rank and one.results[at] is None
            ),
            next(iter(given.values())),
        )
        self._processes[rank].join(1.0)
        outcome.trouble = "died"
        outcome.details = f"rank {rank} ended with {self._processes[rank].exitcode}\n{self._stacks(rank)}"
        return outcome

    def _stacks(self, rank: int) -> str:
        path = self._folder / f"stacks.{rank}"
        return path.read_text(errors="replace")[-6000:] if path.exists() else ""

    def _start(self) -> None:
        if self._processes:
            return
        self.starts += 1
        store = self._folder / f"store.{self.starts}"
        for rank in range(WORLD):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, str(self._folder), str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            assert pipe.poll(START_LIMIT), "a rank did not start"
            assert pipe.recv_bytes() == b"ready"

    def stop(self) -> None:
        for process in self._processes:
            _kill(process)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _raised(outcome: Outcome) -> Outcome:
    outcome.trouble = "error"
    outcome.details = "\n".join(
        f"rank {rank}: {one.trace if isinstance(one, Raised) else 'returned'}"
        for rank, one in zip(outcome.case.ranks, outcome.results, strict=True)
    )
    return outcome


def _serve(rank: int, folder: str, store: str, pipe: Any) -> None:  # pragma: no cover (runs in a child)
    """A rank: runs what it is sent until it is killed."""
    os.setsid()
    _die_with_parent()
    stacks = open(f"{folder}/stacks.{rank}", "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    groups: dict[tuple[int, ...], Any] = {}
    for ranks in [*GROUPS, *(pair for pairs in REPLICAS.values() for pair in pairs)]:
        if ranks == tuple(range(WORLD)):
            groups[ranks] = dist.group.WORLD
        elif ranks not in groups:
            groups[ranks] = dist.new_group(list(ranks), sort_ranks=False)
    dist.barrier()
    pipe.send_bytes(b"ready")
    warnings.simplefilter("error")
    while True:
        try:
            number, case = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        place = Place(case.ranks.index(rank), case.ranks, groups, f"{folder}/case.{number}")
        pipe.send_bytes(_dumps((number, _answer(case, place))))


def _answer(case: FuzzCase, place: Place) -> Any:  # pragma: no cover (runs in a child)
    try:
        value = case.run(place)
        return () if value is None else value
    except Exception as error:
        return Raised(type(error).__name__, traceback.format_exc())


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: torch's own way makes an archive of each."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.dtype, tuple(value.shape), bits(value).numpy().tobytes())
        return NotImplemented


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: bytes) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    return pickle.loads(data)
