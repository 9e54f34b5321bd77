"""A training killed in mid-step ends soon and by name, and goes on from its last checkpoint to the same bits.

As a script this is the training with one rank that kills itself: ``test_resume.py <rank> <step> train ...``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXACT = ("loss", "validation_loss", "gradient_norm", "oracle_loss", "learning_rate")
RUN = [
    "train.steps=8",
    "train.checkpoint_every=5",
    "train.validation_every=4",
    "train.warmup=3",
    "generate.max_tokens=4",
]


def torchrun(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Two ranks of what follows ``torchrun``; also its seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    job = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )  # fmt: skip
    return job, time.monotonic() - start


def test_a_killed_training_resumes_to_the_same_bits(tmp_path: Path) -> None:
    from vocab_parallel.app.runlog import read_metrics
    from vocab_parallel.checkpoint import latest_checkpoint, read_state

    settings = ["configs/smoke.yaml", *RUN, f"data.cache={tmp_path / 'cache'}"]
    whole, _ = torchrun("-m", "vocab_parallel", "train", *settings, f"runs={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    killed, seconds = torchrun(__file__, "1", "7", "train", *settings, f"runs={tmp_path / 'killed'}")
    log = killed.stdout + killed.stderr

    assert killed.returncode != 0, log
    assert seconds < 60, f"{seconds:.0f} s\n{log}"
    cause = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-\d+)", log, re.DOTALL)
    assert cause and cause.groups() == ("1", str(-signal.SIGKILL)), log

    [folder], [whole_folder] = (tmp_path / "killed").iterdir(), (tmp_path / "whole").iterdir()
    before = read_metrics(folder)
    assert [row["step"] for row in before] == [1, 2, 3, 4, 5, 6]  # the kill came in step 7
    latest = latest_checkpoint(folder / "checkpoints")
    assert latest is not None and read_state(latest)["step"] == 5
    assert not (folder / "summary.json").exists()

    resumed, _ = torchrun("-m", "vocab_parallel", "train", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step 6" in resumed.stdout
    after, want = read_metrics(folder), read_metrics(whole_folder)
    assert [exact(row) for row in after] == [exact(row) for row in want] and len(want) == 8
    assert [exact(row) for row in before] == [exact(row) for row in want[:6]]
    assert len({row["loss"] for row in want}) == 8
    assert (folder / "summary.json").exists() and latest_checkpoint(folder / "checkpoints").name == "step-00000008"


def exact(row: dict[str, Any]) -> list[Any]:
    """What must be the same bits; JSON keeps every bit of a float."""
    return [row[key] for key in EXACT]


def main(rank: int, step: int, arguments: list[str]) -> int:
    """The app, with `rank` killed between the lookup and the loss of `step`."""
    from vocab_parallel import app
    from vocab_parallel.app.train import Run

    true_step = Run.step

    def dying_step(run: Run, number: int) -> dict[str, Any]:
        if number == step and run.job.rank == rank:
            run.model.loss = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)
        return true_step(run, number)

    Run.step = dying_step
    return app.main(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
