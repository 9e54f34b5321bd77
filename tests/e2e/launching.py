"""Launch scripts as a user starts them, shortened: 3 steps of the smoke configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vocab_parallel.app import runlog

ROOT = Path(__file__).parents[2]
STEPS = 3
SETTINGS = ["configs/smoke.yaml", f"train.steps={STEPS}", "train.warmup=2", "train.validation_sequences=2",
            "oracle.gradient_every=2", "generate.max_tokens=2"]  # fmt: skip


def start(script: str, place: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A script of launch/ with its run folders in `place`, and the corpus's cache beside it."""
    return start_command([str(ROOT / "launch" / script)], place, *arguments, **environment)


def start_command(command: list[str], place: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The same of any command that takes the app's arguments."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [*command, *arguments, f"runs={place}", f"data.cache={place.parent / 'cache'}"],
        env=os.environ | {"NPROC": "2", "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip


def finish(job: subprocess.Popen[str]) -> str:
    """Its output; it must end well, and soon."""
    try:
        output = job.communicate(timeout=110)[0]
    finally:
        job.kill()
    assert job.returncode == 0, output
    return output


def metrics(place: Path) -> list[dict[str, Any]]:
    """Of the one run in `place`, which must have come to its end."""
    [folder] = place.glob("smoke-*")
    assert (folder / "report.html").is_file()
    return runlog.read_metrics(folder)
