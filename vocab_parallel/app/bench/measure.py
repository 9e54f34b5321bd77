"""Measures steps that all ranks run together: time, memory, collectives, error against float64.

Whatever fails is agreed on: a contestant runs on all ranks or on none.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from vocab_parallel import reference
from vocab_parallel.app.bench.problem import Problem, Shape, make, weight_rows
from vocab_parallel.app.bench.watch import CollectiveCounter, ProjectionRows
from vocab_parallel.app.job import Job
from vocab_parallel.app.memory import peak_extra_bytes

_T = TypeVar("_T")


def attempt(job: Job, fn: Callable[[], _T]) -> tuple[list[_T], str | None]:
    """Runs `fn` on every rank.

    Returns:
        The results of the ranks where it did not fail, and why it failed on any, None if on none; the same on all.
    """
    outcome: tuple[_T | None, str | None]
    try:
        outcome = fn(), None
    except Exception as error:  # any failure of another library's code is its result here
        outcome = None, f"{type(error).__name__}: {error}".strip()
    both = job.gather(outcome)
    return [result for result, failure in both if failure is None], agreed([failure for _, failure in both])


def agreed(failures: list[str | None]) -> str | None:
    """One line on the ranks' failures, None if there is none."""
    found = {rank: " ".join(failure.split())[:500] for rank, failure in enumerate(failures) if failure is not None}
    if len(found) == len(failures) and len(set(found.values())) == 1:
        return found[0]
    return "; ".join(f"rank {rank}: {failure}" for rank, failure in found.items()) or None


def seconds(job: Job, problem: Problem, step: Callable[[], object]) -> float:
    """The time of one step on this rank, from a common start."""
    problem.clear()
    gc.collect()
    if job.group is not None:
        dist.barrier()
    _synchronize(job.device)
    start = time.perf_counter()
    step()
    _synchronize(job.device)
    taken = time.perf_counter() - start
    problem.clear()
    return taken


def projection_rows(problem: Problem, step: Callable[[], object]) -> int | None:
    """Rows of hidden states in the step's first product with this rank's head; None if it was not seen."""
    problem.clear()
    projection = ProjectionRows(problem.shape.hidden, problem.shape.shard_size)
    with projection:
        step()
    problem.clear()
    return projection.rows


@dataclasses.dataclass(frozen=True)
class Footprint:
    """What one step needs on this rank.

    Attributes:
        peak_extra: bytes of tensors beside the inputs.
        peak_resident: by how many bytes the process grows; None where not known.
        rows: of hidden states in one projection; None if it was not seen.
        calls, sent: collectives, and their bytes, by kind.
    """

    peak_extra: int
    peak_resident: int | None
    rows: int | None
    calls: dict[str, int]
    sent: dict[str, int]


def footprint(job: Job, problem: Problem, step: Callable[[], object]) -> Footprint:
    """Two steps: one watched operation by operation, one by its process's resident memory."""
    counter = CollectiveCounter(job.world)
    projection = ProjectionRows(problem.shape.hidden, problem.shape.shard_size)

    def watched() -> None:
        with projection, counter:
            step()

    problem.clear()
    gc.collect()
    peak = peak_extra_bytes(watched, job.device)
    problem.clear()
    resident = _peak_resident(step) if job.device.type == "cpu" else None
    problem.clear()
    return Footprint(peak, resident, projection.rows, dict(counter.calls), dict(counter.bytes))


@dataclasses.dataclass(frozen=True)
class Errors:
    """Largest absolute error against float64, over the largest absolute entry."""

    loss: float
    hidden_grad: float
    weight_grad: float

    @classmethod
    def largest(cls, ranks: Iterable[Errors]) -> Errors:
        """Over all ranks."""
        return cls(*map(max, zip(*map(dataclasses.astuple, ranks), strict=True)))


class Float64:
    """A small problem solved in float64 on one rank, from the very same tensors.

    Args:
        shape: its size; every rank holds the whole of it in float64.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.problem = make(shape, seed)
        weights = [weight_rows(shape, rank, seed) for rank in range(shape.world)]
        self._weight = torch.cat(weights)
        self._mine = slice(shape.rank * shape.shard_size, (shape.rank + 1) * shape.shard_size)
        self._expected = self._solve(torch.float64, reference.linear_cross_entropy)

    def compare(self, step: Callable[[], Tensor | None]) -> Errors:
        """Runs a step on the problem; this rank's errors."""
        self.problem.clear()
        loss = step()
        found = self._errors((loss, self.problem.hidden.grad, self.problem.weight.grad), self._mine)
        self.problem.clear()
        return found

    def unsharded(self) -> Errors:
        """Of PyTorch's own computation on one rank, in the problem's dtype."""
        loss = lambda hidden, weight, target: functional.cross_entropy(hidden @ weight.T, target)  # noqa: E731
        return self._errors(self._solve(self.problem.hidden.dtype, loss), slice(None))

    def _solve(self, dtype: torch.dtype, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.problem.hidden.detach().to(dtype).requires_grad_()
        weight = self._weight.to(dtype).requires_grad_()
        value = loss(hidden, weight, self.problem.target)
        hidden_grad, weight_grad = torch.autograd.grad(value, (hidden, weight))
        return value.detach(), hidden_grad, weight_grad

    def _errors(self, got: Iterable[Tensor | None], rows: slice) -> Errors:
        loss, hidden, weight = self._expected
        errors = []
        for mine, wanted, whole in zip(got, (loss, hidden, weight[rows]), self._expected, strict=True):
            if mine is None or mine.shape != wanted.shape:
                raise ValueError(f"expected a result of shape {list(wanted.shape)}, got {mine!r:.80}")
            errors.append(((mine.detach().double() - wanted).abs().max() / whole.abs().max()).item())
        return Errors(*errors)


def available_bytes(device: torch.device) -> int | None:
    """Memory that is free on the device, or on this machine; None where it cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _peak_resident(step: Callable[[], object]) -> int | None:
    """How far the resident memory of this process rises during a step; only Linux tells."""
    if sys.platform != "linux":
        step()
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what was freed before must not hide what is needed now
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes the present size
        before = _status("VmRSS")
        step()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(f"no {name} in /proc/self/status")
    return int(found[1]) * 1024


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
