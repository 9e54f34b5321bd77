"""``verify`` as a user starts it: the whole ladder on the quickstart's 131,072 ids, on 1 to 4 ranks."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests import ranks
from vocab_parallel import app

ranks.preload("vocab_parallel.app.verify.rungs")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verify.md").read_text()
RUNGS = [
    "head unit", "normalization", "training schedule", "vocabulary migration", "distributed loss",
    "processor pipeline", "stochastic policy", "search", "end to end",
]  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_quickstart_climbs_the_whole_ladder(count: int, tmp_path: Path) -> None:
    printed = under_torchrun(tmp_path) if count == 2 else in_ranks(count, tmp_path)
    assert printed.count("9 of 9 rungs passed") == 1 and "FAIL" not in printed  # one rank prints
    [folder] = tmp_path.glob("verify-quickstart-*")
    report = json.loads((folder / "verify.json").read_text())
    assert report["passed"] and [rung["name"] for rung in report["rungs"]] == RUNGS
    assert all(rung["passed"] and rung["checks"] for rung in report["rungs"])
    assert report["about"]["ranks"] == count and "V=131072" in report["about"]["layout"]
    page = (folder / "verify.html").read_text()
    assert all(f"<h2>{number} {name}</h2>" in page for number, name in enumerate(RUNGS, 1))
    for check in (check for rung in report["rungs"] for check in rung["checks"]):
        assert f"  pass  {check['check']}" in printed
        assert count != 2 or f"  pass  {check['check']}" in PAGE, "the page shows other checks"


def under_torchrun(runs: Path) -> str:
    """Two ranks, as the pages say it."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.run(
        [sys.executable, *start, "-m", "vocab_parallel", "verify", "configs/quickstart.yaml", f"runs={runs}"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=115, cwd=ROOT, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def in_ranks(count: int, runs: Path) -> str:
    """The same command in ranks that have imported torch already."""
    every = ranks.run_ranks(command, count, str(runs), timeout=110.0)
    assert not any(status for status, _ in every), every
    return "".join(printed for _, printed in every)


def command(rank: int, runs: str) -> tuple[int, str]:
    """Exit status, and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        status = app.main(["verify", str(ROOT / "configs" / "quickstart.yaml"), f"runs={runs}"])
    return status, printed.getvalue()
