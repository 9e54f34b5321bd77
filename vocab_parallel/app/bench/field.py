"""The contestants of one benchmark: who runs, and what was measured of each at each point."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from vocab_parallel.app.bench import measure
from vocab_parallel.app.bench.peers import CONTESTANTS, Choice, Contestant, Place, Step
from vocab_parallel.app.bench.problem import Problem, Shape
from vocab_parallel.app.job import Job

_T = TypeVar("_T")


@dataclasses.dataclass
class Point:
    """One problem, and what was measured on it, by contestant."""

    value: int | None  # of what the sweep varies
    problem: Problem
    choice: Choice  # ours
    seen_rows: int | None = None  # of a chunk of ours, while it ran
    seconds: dict[str, list[list[float]]] = dataclasses.field(default_factory=dict)  # a round's, by rank
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    footprints: dict[str, list[measure.Footprint]] = dataclasses.field(default_factory=dict)  # by rank

    @property
    def rows(self) -> int | None:
        """Of a chunk of ours: as seen, else as chosen."""
        return self.seen_rows or self.choice.chunk_size

    @property
    def shape(self) -> Shape:
        """The size of its problem."""
        return self.problem.shape


class Field:
    """Who runs: a contestant that fails on any rank runs on none, and is named with the reason.

    Args:
        job: the ranks.
        names: of `CONTESTANTS`.
        timeout: how long a contestant's collective may wait.

    Attributes:
        running: names of those that have not failed, in order.
    """

    def __init__(self, job: Job, names: Sequence[str], timeout: timedelta) -> None:
        self._job = job
        self._names = names
        self._timeout = timeout
        self._steps: dict[str, Step] = {}
        self._out: dict[str, tuple[str, str]] = {}

    @property
    def running(self) -> list[str]:
        return [name for name in self._steps if name not in self._out]

    def enter(self) -> None:
        """Finds out who is there, and prepares those."""
        place = Place(self._job, self._timeout)
        for name in self._names:
            contestant = CONTESTANTS[name]
            reason = measure.agreed(self._job.gather(contestant.missing(self._job)))
            if reason is not None:
                self._drop(name, "missing", reason)
                continue
            made: list[Step] = []
            _, reason = measure.attempt(self._job, partial(_prepare, contestant, place, made))
            if reason is not None:
                self._drop(name, "failed", reason)
            else:
                self._steps[name] = made[0]

    def warm_up(self, points: Sequence[Point]) -> None:
        """Runs every step once at every point, ours first: others follow its chunks."""
        for point in points:
            for name in sorted(self.running, key=lambda name: name != "ours"):
                if self._too_large(name, point):
                    continue
                losses = self._attempt(name, partial(self._loss, point, name))
                if losses and losses[0] is not None:
                    point.losses[name] = losses[0]
                if name == "ours":
                    step = partial(self._step, point, name)
                    rows = self._attempt(name, partial(measure.projection_rows, point.problem, step))
                    point.seen_rows = rows[0] if rows else None
        gc.freeze()  # what lives now is not looked through again before each step

    def time(self, point: Point, name: str) -> None:
        """One timed step."""
        step = partial(self._step, point, name)
        seconds = self._attempt(name, partial(measure.seconds, self._job, point.problem, step))
        if seconds:
            point.seconds.setdefault(name, []).append(seconds)

    def take_footprints(self, points: Sequence[Point]) -> None:
        """Memory and collectives of every step at every point, outside of the timing."""
        for point in points:
            for name in self._losses_only():
                step = partial(self._step, point, name)
                found = self._attempt(name, partial(measure.footprint, self._job, point.problem, step))
                if found:
                    point.footprints[name] = found

    def errors(self, shape: Shape, seed: int) -> dict[str, Any]:
        """Every loss against float64 on a small problem, in at least four chunks where it can be told."""
        small = measure.Float64(shape, seed)
        choice = Choice(max(1, shape.tokens // 4))
        found = {"torch_unsharded": dataclasses.asdict(small.unsharded())}
        for name in self._losses_only():
            step = partial(self._steps[name], small.problem, choice)
            compared = self._attempt(name, partial(small.compare, step))
            if compared:
                found[name] = dataclasses.asdict(measure.Errors.largest(compared))
        problem = {
            "tokens": shape.tokens,
            "hidden": shape.hidden,
            "vocab": shape.vocab,
            "chunk_size": choice.chunk_size,
        }
        return {"problem": problem, "results": found}

    def standing(self) -> dict[str, dict[str, Any]]:
        """Of every contestant: what it is, and whether it ran, else why not."""
        found = {}
        for name in self._names:
            status, reason = self._out.get(name, ("ran", None))
            contestant = CONTESTANTS[name]
            found[name] = {
                "about": contestant.about, "version": contestant.version(), "status": status, "reason": reason,
            }  # fmt: skip
        return found

    def _losses_only(self) -> list[str]:
        return [name for name in self.running if name != "floor"]

    def _step(self, point: Point, name: str) -> Tensor | None:
        return self._steps[name](point.problem, point.choice if name == "ours" else Choice(point.rows))

    def _loss(self, point: Point, name: str) -> float | None:
        loss = self._step(point, name)
        point.problem.clear()
        return None if loss is None else loss.item()

    def _attempt(self, name: str, fn: Callable[[], _T]) -> list[_T]:
        """Every rank's result; none, and the contestant is out, if it failed on any."""
        results, failure = measure.attempt(self._job, fn)
        if failure is not None:
            self._drop(name, "failed", failure)
            return []
        return results

    def _too_large(self, name: str, point: Point) -> bool:
        """Whether whole logits would not fit; then it is out, rather than the job killed."""
        shape = point.shape
        needed = CONTESTANTS[name].logit_bytes * shape.tokens * shape.shard_size
        free = self._job.gather(measure.available_bytes(self._job.device))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self._job.world))
        ranks = here if self._job.device.type == "cpu" else 1  # that share this memory
        short = [bytes for bytes in free if bytes is not None and bytes < needed * ranks]
        if short:
            words = f"needs about {needed * ranks / 1e9:.1f} GB, {min(short) / 1e9:.1f} GB are free"
            self._drop(name, "too large", f"{words} at {shape.tokens} tokens, {shape.vocab} ids")
        return bool(short)

    def _drop(self, name: str, status: str, reason: str) -> None:
        self._out[name] = (status, reason)
        self._job.say(f"{name}: {status}: {reason}")


def _prepare(contestant: Contestant, place: Place, made: list[Step]) -> None:
    made.append(contestant.prepare(place))  # not returned: results are gathered, and a step cannot be
