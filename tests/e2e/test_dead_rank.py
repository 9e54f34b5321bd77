"""A rank that dies takes the job with it, soon, by name, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.chaos.jobs import MARK, alive

ROOT = Path(__file__).parents[2]


def torchrun(dying_rank: int, mark: str) -> subprocess.CompletedProcess[str]:
    """The job under a real torchrun of two ranks, its processes marked in their environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, str(ROOT / "tests" / "data" / "dead_rank.py"), str(dying_rank)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for left processes in /proc")
@pytest.mark.parametrize("dying_rank", [0, 1])
def test_a_killed_rank_ends_the_job_with_an_error_that_names_it_and_no_process_left(dying_rank: int) -> None:
    mark, start = uuid.uuid4().hex, time.monotonic()
    job = torchrun(dying_rank, mark)
    seconds = time.monotonic() - start
    log = job.stdout + job.stderr
    assert job.returncode != 0, log
    assert seconds < 60, f"{seconds:.0f} s\n{log}"
    for rank in (0, 1):
        assert f"rank {rank} step 3 loss" in log, log  # the kill came after three real steps
        assert f"rank {rank} step 5 loss" not in log and f"rank {rank} finished" not in log, log
    root_cause = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-\d+)", log, re.DOTALL)
    assert root_cause and root_cause.groups() == (str(dying_rank), "-9"), log
    assert alive(mark) == [], log
