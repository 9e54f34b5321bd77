"""A training killed in mid-step ends soon and by name, and goes on from its last checkpoint to the same bits.

As a script this is the training with one rank that kills itself: ``test_resume.py <rank> <step> train ...``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXACT = ("loss", "validation_loss", "gradient_norm", "oracle_loss", "learning_rate")
RUN = [
    "train.steps=8",
    "train.checkpoint_every=5",
    "train.validation_every=4",
    "train.warmup=3",
    "generate.max_tokens=4",
]


def torchrun(*arguments: str, ranks: int = 2) -> tuple[subprocess.CompletedProcess[str], float]:
    """Ranks of what follows ``torchrun``; also its seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return launch([*command, *arguments])


def launch(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = time.monotonic()
    job = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )  # fmt: skip
    return job, time.monotonic() - start


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that came to its end in ``whole``, one that was killed in ``killed``, and a copy of that in ``moved``."""
    from vocab_parallel.app.runlog import read_metrics
    from vocab_parallel.checkpoint import latest_checkpoint, read_state

    tmp_path = tmp_path_factory.mktemp("resume")
    settings = ["configs/smoke.yaml", *RUN, f"data.cache={tmp_path / 'cache'}"]
    whole, _ = torchrun("-m", "vocab_parallel", "train", *settings, f"runs={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    killed, seconds = torchrun(__file__, "1", "7", "train", *settings, f"runs={tmp_path / 'killed'}")
    log = killed.stdout + killed.stderr

    assert killed.returncode != 0, log
    assert seconds < 60, f"{seconds:.0f} s\n{log}"
    cause = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-\d+)", log, re.DOTALL)
    assert cause and cause.groups() == ("1", str(-signal.SIGKILL)), log

    [folder] = (tmp_path / "killed").iterdir()
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4, 5, 6]  # the kill came in step 7
    latest = latest_checkpoint(folder / "checkpoints")
    assert latest is not None and read_state(latest)["step"] == 5
    assert not (folder / "summary.json").exists()
    shutil.copytree(folder, tmp_path / "moved" / "run")
    return tmp_path


def test_a_killed_training_resumes_to_the_same_bits(place: Path) -> None:
    from vocab_parallel.app.runlog import read_metrics
    from vocab_parallel.checkpoint import latest_checkpoint

    [folder], [whole_folder] = (place / "killed").iterdir(), (place / "whole").iterdir()
    before = read_metrics(folder)
    resumed, _ = torchrun("-m", "vocab_parallel", "train", str(folder))
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step 6" in resumed.stdout
    after, want = read_metrics(folder), read_metrics(whole_folder)
    assert [exact(row) for row in after] == [exact(row) for row in want] and len(want) == 8
    assert [exact(row) for row in before] == [exact(row) for row in want[:6]]
    assert len({row["loss"] for row in want}) == 8
    latest = latest_checkpoint(folder / "checkpoints")
    assert (folder / "summary.json").exists() and latest is not None and latest.name == "step-00000008"


def test_a_training_goes_on_at_four_ranks_and_its_text_comes_from_one_rank_and_from_three(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vocab_parallel import app
    from vocab_parallel.app.runlog import read_metrics
    from vocab_parallel.checkpoint import latest_checkpoint, read_state

    folder, [whole_folder] = place / "moved" / "run", (place / "whole").iterdir()
    resumed, _ = torchrun("-m", "vocab_parallel", "train", str(folder), "train.async_checkpoints=true", ranks=4)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at step 6" in resumed.stdout and "over 4 ranks" in resumed.stdout
    for row, want in zip(read_metrics(folder), read_metrics(whole_folder), strict=True):
        assert row["step"] == want["step"] and row["loss"] == pytest.approx(want["loss"], abs=1e-5)
    latest = latest_checkpoint(folder / "checkpoints", verify=True)
    assert latest is not None and latest.name == "step-00000008" and (latest / "vocabulary.json").is_file()
    assert read_state(latest)["layout"]["tp_size"] == 4

    words = ["generate", str(folder), "generate.method=greedy"]
    three, _ = torchrun("-m", "vocab_parallel", *words, ranks=3)
    assert three.returncode == 0, three.stderr
    assert app.main(words) == 0
    assert capsys.readouterr().out == three.stdout and len(three.stdout) > 10


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
