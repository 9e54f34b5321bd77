"""Jobs whose processes are marked: they end within a limit or show their stacks, and nothing of them is left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.saboteur import NOTES, PLAN, Strike, notes

ROOT = Path(__file__).parents[2]
MARK = "VOCAB_PARALLEL_CHAOS_JOB"
SETTINGS = [
    "configs/smoke.yaml", "train.steps=40", "train.warmup=3", "train.validation_every=0", "train.checkpoint_every=4",
    "train.validation_sequences=2", "oracle.every=0", "oracle.gradient_every=0", "data.max_bytes=200000",
    "generate.max_tokens=2", "parallel.timeout_s=60",
]  # fmt: skip
EXACT = ("step", "loss", "validation_loss", "gradient_norm", "learning_rate")


@dataclass
class Ended:
    """A job that is over.

    Attributes:
        log: Everything that its processes and torchrun said.
        fault: What was wrong with its end itself: it hung, or left processes.
        done: The strikes that were done, each with its event.
        failed: Of each failed attempt the exit code and the local rank that torchrun named.
    """

    status: int
    seconds: float
    log: str
    fault: str
    done: list[dict[str, Any]]

    @property
    def failed(self) -> list[tuple[int, int]]:
        found = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", self.log)
        return [(int(code), int(rank)) for code, rank in found]


def run_job(
    place: Path,
    ranks: int,
    words: Sequence[str],
    plan: Sequence[Strike] | None = None,
    *,
    restarts: int = 0,
    limit: float = 240.0,
    meanwhile: Callable[[subprocess.Popen[bytes]], None] = lambda job: None,
) -> Ended:
    """`ranks` of the app under torchrun, each through the saboteur.

    Args:
        place: For log and notes; made if it is not there.
        words: The app's arguments.
        plan: What is done to it; None counts what there is.
        limit: Seconds after which it hangs: the ranks write their stacks to the log and are killed.
        meanwhile: Called once the job runs.
    """
    place.mkdir(parents=True, exist_ok=True)
    mark, began = uuid.uuid4().hex, time.monotonic()
    log, noted = place / f"{mark[:8]}.log", place / f"{mark[:8]}.notes"
    strikes = [dataclasses.asdict(one) for one in plan or ()]
    environment = os.environ | {
        MARK: mark, PLAN: json.dumps(strikes if plan is not None else None), NOTES: str(noted), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT), "TMPDIR": str(place),
    }  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
               "--max-restarts", str(restarts), "-m", "tests.chaos.saboteur", *words]  # fmt: skip
    with log.open("wb") as file:
        job = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    fault = ""
    try:
        meanwhile(job)
        status = job.wait(max(1.0, limit - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        fault, status = f"it hung: not over after {limit:.0f} s; its stacks are in {log}", -1
        _end(mark, signal.SIGUSR1, ranks_only=True)  # see `faulthandler.register` in the saboteur
        time.sleep(3.0)
    left = until_gone(mark, 10.0)
    if left and not fault:
        fault = f"processes were left: {left}"
    _end(mark, signal.SIGKILL)
    job.wait()
    done = [one for one in notes(noted) if "strike" in one]
    return Ended(status, time.monotonic() - began, log.read_text(errors="replace"), fault, done)


def until_gone(mark: str, limit: float) -> list[int]:
    """Waits for all processes of a job to end; those that have not."""
    until = time.monotonic() + limit
    while (left := alive(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def alive(mark: str, *, ranks_only: bool = False) -> list[int]:
    """Processes that carry the mark in their environment; those that torchrun started have a rank there too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment, state = (entry / "environ").read_bytes(), (entry / "stat").read_text().rsplit(")", 1)[1]
            except OSError:  # ended meanwhile, or another user's
                continue
            names = environment.split(b"\0")
            wanted = not ranks_only or any(name.startswith(b"RANK=") for name in names)
            if f"{MARK}={mark}".encode() in names and wanted and state.split()[0] != "Z":
                found.append(int(entry.name))
    return found


def _end(mark: str, how: signal.Signals, *, ranks_only: bool = False) -> None:
    for pid in alive(mark, ranks_only=ranks_only):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
