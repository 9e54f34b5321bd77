"""What a piece of work adds to the memory of a process that is idle otherwise."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.ranks import run_ranks

SAMPLE_SECONDS = 0.001


class Added(NamedTuple):
    """Largest growth of a process while a piece of work ran, in bytes.

    Attributes:
        resident: of all resident memory, pages of mapped files among it; as the kernel records it, no peak is missed.
        private: of memory that is no file's (RssAnon), sampled once a millisecond.
    """

    resident: int
    private: int


def added_memory(work: Callable[..., Any], *args: Any, warm_up: tuple[Any, ...], timeout: float = 120.0) -> Added:
    """What `work(*args)` adds to a process of its own that has done `work(*warm_up)` before and is idle since.

    The warm-up is the same work on a small input: what is imported and allocated once belongs to the idle process.

    Args:
        work: A module-level function; the process imports it by name. What it reads should be made elsewhere.
        args: Sent by value, as `warm_up` is.
    """
    return added_by_each(work, [args], warm_up=[warm_up], timeout=timeout)[0]


def added_by_each(
    work: Callable[..., Any], inputs: list[tuple[Any, ...]], *, warm_up: list[tuple[Any, ...]], timeout: float = 120.0
) -> list[Added]:
    """The same of several pieces of work, one after another in one process, idle before each."""
    (added,) = run_ranks(_measure, 1, work, inputs, warm_up, timeout=timeout)
    return [Added(*each) for each in added]


def _measure(
    rank: int, work: Callable[..., Any], inputs: list[tuple[Any, ...]], warm_up: list[tuple[Any, ...]]
) -> list[tuple[int, int]]:
    for args in warm_up:
        work(*args)
    return [_added(work, args) for args in inputs]


def _added(work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, int]:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the recorded peak begins anew
    resident, private = _status("VmRSS"), _status("RssAnon")
    peak, done = [private], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], _status("RssAnon"))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        work(*args)
    finally:
        done.set()
        sampler.join()
    return _status("VmHWM") - resident, peak[0] - private


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(name + ":"))
