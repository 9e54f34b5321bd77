"""What is done to a training, drawn by a seed, and what must be true of it afterwards."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.chaos.jobs import EXACT, SETTINGS, Ended, run_job
from tests.chaos.saboteur import Strike, notes
from vocab_parallel.app.runlog import read_metrics
from vocab_parallel.checkpoint import latest_checkpoint, open_checkpoint

RESTART = "parallel.timeout_s=10"  # of the scenario that waits for it
DAMAGED = ("flip", "cut", "lose")


@dataclass(frozen=True)
class Reference:
    """A training that nothing was done to.

    Attributes:
        rows: What of ``metrics.jsonl`` must be the same bits.
        collectives: Of one step.
        events: Of one save, by rank.
    """

    folder: Path
    ranks: int
    rows: list[list[Any]]
    collectives: int
    events: dict[int, int]


@dataclass
class Result:
    """What came of one scenario at one number of ranks."""

    kills: int = 0
    other: int = 0
    restarts: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)


def undisturbed(place: Path, ranks: int) -> Reference:
    """Trains once, and counts what there is to strike."""
    folder = place / "run"
    ended = run_job(place, ranks, ["train", *SETTINGS, f"data.cache={place.parent / 'cache'}", f"run={folder}"])
    if ended.status or ended.fault:
        raise RuntimeError(f"the undisturbed training failed: {ended.fault}\n{ended.log}")
    counted = [one for path in place.glob("*.notes") for one in notes(path)]
    [collectives] = {one["collectives"] for one in counted if "collectives" in one}
    events = {one["rank"]: one["events"] for one in counted if "events" in one}
    return Reference(folder, ranks, exact(folder), collectives, events)


def exact(folder: Path) -> list[list[Any]]:
    """What of a run's lines must be the same bits; JSON keeps every bit of a float."""
    return [[row[key] for key in EXACT] for row in read_metrics(folder)]


def victims(drawn: random.Random, ranks: int, count: int) -> list[int]:
    """The first rank, the last one, then any."""
    return [*(0, ranks - 1), *(drawn.randrange(ranks) for _ in range(count))][:count]


def draw_steps(drawn: random.Random, reference: Reference, count: int) -> list[Strike]:
    """Kills between two steps."""
    return [Strike(at, rank, "kill", "step", drawn.randint(1, 6))
            for at, rank in enumerate(victims(drawn, reference.ranks, count))]  # fmt: skip


def draw_collectives(drawn: random.Random, reference: Reference, count: int) -> list[Strike]:
    """Kills before a collective that the others wait in: of the forward, of the gradients, of the clipping."""
    return [Strike(at, rank, "kill", "collective", drawn.randint(1, 6), drawn.randint(1, reference.collectives))
            for at, rank in enumerate(victims(drawn, reference.ranks, count))]  # fmt: skip


def draw_saves(drawn: random.Random, reference: Reference, count: int) -> list[Strike]:
    """Kills before an event of the file system in a save."""
    return [Strike(at, rank, "kill", "save", 2 if at < 2 else 1, drawn.randint(1, reference.events[rank]))
            for at, rank in enumerate(victims(drawn, reference.ranks, count))]  # fmt: skip


def draw_stops(drawn: random.Random, reference: Reference, count: int) -> list[Strike]:
    """SIGSTOP before a collective: the others wait longer than the timeout."""
    return [Strike(at, drawn.randrange(reference.ranks), "stop", "collective", drawn.randint(1, 6),
                   drawn.randint(1, reference.collectives)) for at in range(count)]  # fmt: skip


def draw_disks(drawn: random.Random, reference: Reference, count: int) -> list[Strike]:
    """A disk that is full, or read-only, from an event of a save on."""
    return [Strike(at, rank, how, "save", 2, drawn.randint(1, reference.events[rank]))
            for at, (rank, how) in enumerate(zip(victims(drawn, reference.ranks, count),
                                                 itertools.cycle(("full", "read-only"))))]  # fmt: skip


def draw_damages(drawn: random.Random, reference: Reference, count: int) -> list[Strike]:
    """A kill, then another start that finds the newest checkpoint damaged; again and again."""
    ways = drawn.sample(DAMAGED, len(DAMAGED))
    kills = [Strike(at, drawn.randrange(reference.ranks), "kill", "step", 10 if at == 0 else 6) for at in range(count)]
    return [*kills, *(Strike(at + 1, 0, ways[at % 3], "start", at=drawn.randrange(10**6)) for at in range(count))]


Draw = Callable[[random.Random, Reference, int], list[Strike]]
DRAWS: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "step": (draw_steps, ()),
    "collective": (draw_collectives, ()),
    "save": (draw_saves, ()),
    "async save": (draw_saves, ("train.async_checkpoints=true",)),
    "hang": (draw_stops, (RESTART,)),
    "disk": (draw_disks, ()),
    "async disk": (draw_disks, ("train.async_checkpoints=true",)),
    "damage": (draw_damages, ()),
}


def disturbed(name: str, drawn: random.Random, place: Path, reference: Reference, count: int) -> Result:
    """A training under torchrun with restarts, struck as `name` says, to its end."""
    draw, words = DRAWS[name]
    plan, folder = draw(drawn, reference, count), place / "run"
    restarts = max(one.attempt for one in plan if one.where != "start") + 1
    settings = [*SETTINGS, *words, f"data.cache={place.parent / 'cache'}", f"run={folder}"]
    ended = run_job(
        place, reference.ranks, ["train", *settings], plan, restarts=restarts, limit=60.0 + 90.0 * (restarts + 1)
    )
    result = Result(seconds=ended.seconds, restarts=len(ended.failed), logs=[ended.log])
    result.kills = sum(one["strike"]["how"] == "kill" for one in ended.done)
    result.other = len(ended.done) - result.kills
    result.faults = [*faults_of_job(ended, plan), *faults_of_run(folder, reference)]
    return result


def faults_of_job(ended: Ended, plan: list[Strike]) -> list[str]:
    """Of how it ended, and of what it said."""
    found = [ended.fault] if ended.fault else []
    if ended.status != 0:
        found.append(f"it ended with {ended.status}")
    if len(ended.done) != len(plan):
        found.append(f"{len(ended.done)} of {len(plan)} strikes were done")
    named = iter(ended.failed)
    for one in sorted((one for one in plan if one.where != "start"), key=lambda one: one.attempt):
        code, rank = next(named, (0, -1))
        if one.how == "kill" and (code, rank) != (-signal.SIGKILL, one.rank):
            found.append(f"attempt {one.attempt}: torchrun named exit code {code} of rank {rank}, not the killed one")
        if one.how != "kill" and code != 1:
            found.append(f"attempt {one.attempt}: exit code {code} of rank {rank} after {one.how} of rank {one.rank}")
        said = {"full": "No space left on device", "read-only": "Read-only file system",
                "stop": f"do not answer: rank {one.rank} (pid "}.get(one.how)  # fmt: skip
        if said is not None and said not in ended.log:
            found.append(f"attempt {one.attempt}: nobody said {said!r}")
    damaged = sum(one.where == "start" for one in plan)
    if ended.log.count(" is damaged and is now step-") != damaged:
        found.append(f"{damaged} checkpoints were damaged, and {ended.log.count(' is damaged and is now step-')} found")
    return found


def faults_of_run(folder: Path, reference: Reference) -> list[str]:
    """Of what it left: the losses, the newest checkpoint, and nothing half done."""
    found = []
    if exact(folder) != reference.rows:
        found.append(f"the lines of {folder}/metrics.jsonl differ from the undisturbed run's")
    if not (folder / "summary.json").is_file():
        found.append("it has no summary")
    mine, its = (latest_checkpoint(one / "checkpoints", verify=True) for one in (folder, reference.folder))
    if mine is None or its is None or mine.name != its.name:
        found.append(f"its newest checkpoint is {mine}")
    elif not same_tensors(mine, its):
        found.append(f"{mine} holds other bits than the undisturbed run's")
    left = [path.name for path in (folder / "checkpoints").glob(".*")]
    return [*found, f"left half done: {left}"] if left else found


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same names and bits."""
    mine, its = open_checkpoint(one), open_checkpoint(other)
    return mine.tensors == its.tensors and all(torch.equal(mine.read(key), its.read(key)) for key in mine.tensors)


def agent(drawn: random.Random, place: Path, reference: Reference, count: int) -> Result:
    """Kills torchrun itself, `count` times, and starts the same command again each time."""
    result, folder = Result(), place / "run"
    words = ["train", *SETTINGS, f"data.cache={place.parent / 'cache'}", f"run={folder}"]
    metrics = folder / "metrics.jsonl"
    for at in range(count + 1):
        began, more = changed(metrics), drawn.uniform(0.0, 0.6)

        def kill(job: subprocess.Popen[bytes], began: int = began, more: float = more) -> None:
            end = time.monotonic() + 120
            while changed(metrics) == began and job.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(more)
            if job.poll() is None:
                job.kill()
                result.kills += 1

        ended = run_job(place, reference.ranks, words, [], meanwhile=kill if at < count else lambda job: None)
        result.seconds, result.restarts = result.seconds + ended.seconds, at
        result.logs.append(ended.log)
        result.faults += [ended.fault] if ended.fault else []
        if ended.status != (-signal.SIGKILL if at < count else 0):
            result.faults.append(f"launch {at}: torchrun ended with {ended.status}")
    result.faults += [] if result.kills == count else [f"{result.kills} of {count} kills came before the end"]
    result.faults += faults_of_run(folder, reference)
    return result


def changed(path: Path) -> int:
    """When a file was written last."""
    return path.stat().st_mtime_ns if path.is_file() else 0
