"""``plan`` with rates measured on the ranks it runs on, under torchrun and alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SIZES = ("tokens=64", "hidden=32", "vocab=2000", "dtype=float32")


def plan(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """``plan``, as a user starts it."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *start, "-m", "vocab_parallel", "plan", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=110, cwd=ROOT, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_measured_rates_and_a_run_of_ours_to_check_the_model_with(ranks: int, tmp_path: Path) -> None:
    job = plan(ranks, "link=measured", *SIZES, f"out={tmp_path / 'plan.json'}")
    assert job.returncode == 0, job.stdout + job.stderr
    found: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    assert found["workload"]["tp"] == ranks  # those of the job
    device, network = found["machine"]["device"], found["machine"]["network"]
    assert device["name"] == "cpu" and device["on_cpu"] and 0 <= device["overlap"] <= 1
    assert all(1e6 < device[rate] < 1e14 for rate in ("gemm", "stream", "softmax"))
    assert network["inside"]["name"] == ("loopback" if ranks == 1 else "measured")
    assert network["inside"]["bandwidth"] > 1e6 and network["inside"]["latency"] >= 0 and network["start"] >= 0
    check = found["self_check"]["schedules"]["fused"]
    for exact in ("sent_bytes", "calls"):
        assert check[exact]["relative_error"] == 0, check
    assert check["seconds"]["measured"] > 0 and check["seconds"]["predicted"] > 0
    assert abs(check["peak_bytes"]["relative_error"]) < 0.1, check
    assert job.stdout.count("predicted by the cost model") == 1  # one rank prints
    assert f"ours run here: 64 tokens x 32, 2,000 ids, chunks of 16, {ranks} ranks; predicted / measured" in job.stdout
    where = "link preset loopback (one rank alone has none to measure)" if ranks == 1 else "link measured now"
    assert f"rates (measured now, {where})" in job.stdout


def test_other_numbers_of_ranks_are_planned_from_the_measured_ones() -> None:
    job = plan(2, "link=measured", *SIZES, "tp=512", "--json")
    assert job.returncode == 0, job.stdout + job.stderr
    found = json.loads(job.stdout)
    assert found["workload"]["tp"] == 512 and found["self_check"]["workload"]["tp"] == 2
    assert found["schedules"]["fused"]["total_sent_bytes"] > found["scaling"][1]["total_sent_bytes"]
