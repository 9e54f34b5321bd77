"""A run that is migrated to another tokenizer, killed at it again and again, and trained on.

As a program this makes the migrations, one process forked for each: ``migration.py RUN PLACE TOKENIZER SEED COUNT``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.byte_tokenizers import write_merged_bytes
from tests.chaos.jobs import ROOT, run_job
from tests.chaos.saboteur import FileEvents, Strike
from tests.chaos.scenarios import Reference, Result, exact, same_tensors
from vocab_parallel.checkpoint import latest_checkpoint

MORE = "train.steps=46"


def migration(drawn: random.Random, place: Path, reference: Reference, count: int) -> Result:
    """Kills `migrate` of the undisturbed run, then a training of what a last try has written."""
    place.mkdir(parents=True)
    tokenizer, seed = write_merged_bytes(place / "tokenizer"), drawn.randrange(10**6)
    words = [str(reference.folder), str(place), str(tokenizer), str(seed), str(count - 1)]
    job = subprocess.run(
        [sys.executable, "-m", "tests.chaos.migration", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=120 + 60 * count, check=False,
    )  # fmt: skip
    if job.returncode:
        return Result(faults=[f"the migrations failed:\n{job.stdout}{job.stderr}"], logs=[job.stderr])
    said = json.loads(job.stdout.splitlines()[-1])
    result = Result(kills=said["kills"], faults=said["faults"], logs=[job.stderr])
    if result.faults:
        return result
    settings = [MORE, f"data.cache={place.parent / 'cache'}"]
    whole = run_job(place, reference.ranks, ["train", str(place / "whole"), *settings], [])
    strike = Strike(0, drawn.randrange(reference.ranks), "kill", "step", drawn.randint(2, 5))
    struck = run_job(place, reference.ranks, ["train", str(place / "new"), *settings], [strike], restarts=1)
    result.kills, result.restarts = result.kills + len(struck.done), len(struck.failed)
    result.seconds = whole.seconds + struck.seconds
    result.logs += [whole.log, struck.log]
    for name, ended in (("undisturbed", whole), ("killed", struck)):
        if ended.status or ended.fault:
            result.faults.append(f"the {name} training of the migrated run: {ended.status} {ended.fault}")
    if exact(place / "new") != exact(place / "whole") or len(exact(place / "new")) != 46:
        result.faults.append("the losses of the two migrated runs differ")
    return result


def main(run: Path, place: Path, tokenizer: str, seed: int, count: int) -> dict[str, Any]:
    """Kills `migrate` at `count` events; what is left is looked at each time, and by a last try that is left alone."""
    drawn, before = random.Random(seed), contents(run)
    events = migrate(run, place / "whole", tokenizer, 0, place / "events")
    assert events > count, events
    faults, kills = [], 0
    for at in sorted(drawn.sample(range(1, events + 1), count)):
        target = place / "new"
        shutil.rmtree(target, ignore_errors=True)
        kills += migrate(run, target, tokenizer, at, place / "events") == at
        if contents(run) != before:
            faults.append(f"killed at event {at}: the source has changed")
        if target.exists() and not same_run(target, place / "whole"):
            faults.append(f"killed at event {at}: the target is there, and not whole")
    shutil.rmtree(place / "new", ignore_errors=True)
    migrate(run, place / "new", tokenizer, 0, place / "events")
    if not same_run(place / "new", place / "whole"):
        faults.append("migrated again: other bits")
    left = sorted(path.name for path in place.glob(".*"))
    return {"kills": kills, "faults": [*faults, *([f"left half done: {left}"] if left else [])]}


def migrate(run: Path, target: Path, tokenizer: str, at: int, noted: Path) -> int:
    """In a forked process, killed at event `at` unless that is 0. Returns the number of events that it came to."""
    noted.write_text("0")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            from vocab_parallel.app import main as app

            count, descriptor = 0, os.open(noted, os.O_WRONLY)

            def tell(name: str, half: Any) -> None:
                nonlocal count
                count += 1
                os.pwrite(descriptor, str(count).encode(), 0)
                if count == at:
                    half()
                    os.kill(os.getpid(), signal.SIGKILL)

            FileEvents(tell)
            os.dup2(2, 1)
            status = app(["migrate", str(run), str(target), "--new-vocab", tokenizer])
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert ended == (signal.SIGKILL if at else 0), f"migrate ended with {ended} at event {noted.read_text()} of {at}"
    return int(noted.read_text())


def contents(folder: Path) -> dict[str, str]:
    """The hash of every file."""
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}  # fmt: skip


def same_run(one: Path, other: Path) -> bool:
    """Whether two migrated runs have checkpoints of the same bits, by their hashes whole."""
    mine, its = (latest_checkpoint(path / "checkpoints", verify=True) for path in (one, other))
    return mine is not None and its is not None and mine.name == its.name and same_tensors(mine, its)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))))
