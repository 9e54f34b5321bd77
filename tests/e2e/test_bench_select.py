"""``bench select`` in short: a real torchrun of two ranks, and alone in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vocab_parallel import app

ROOT = Path(__file__).parents[2]
VOCAB, HEADER, FIRST = 512, 64, 512  # FIRST: what the first exchange of a kind has room for


def words(out: Path, *more: str) -> list[str]:
    return ["bench", "select", f"out={out}", f"vocab=[{VOCAB}]", "kinds=[flat]", "rounds=3", "sample_ms=0.1", *more]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The results, and what was printed."""
    out = tmp_path_factory.mktemp("bench")
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vocab_parallel",
         *words(out, "batch=[1, 16]")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=110, cwd=ROOT, check=False,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    assert (out / "bench.txt").read_text() in job.stdout
    return json.loads((out / "bench.json").read_text()), job.stdout


def test_every_operation_is_timed_by_every_contestant_at_every_point(two_ranks: tuple[dict[str, Any], str]) -> None:
    report, printed = two_ranks
    assert [(p["rows"], p["kind"]) for p in report["points"]] == [(1, "flat"), (16, "flat")]
    assert report["environment"]["ranks"] == 2 and "V 512, B 16, flat" in printed
    for point in report["points"]:
        assert set(point["operations"]) == {"greedy", "top_k", "sample", "top_p", "top_k_top_p"}
        for operation, results in point["operations"].items():
            assert operation in printed
            assert results["compared"]["same_ids_gathered"] is True
            for name in ("ours", "gather", "gather_ours"):
                assert len(results[name]["seconds"]) == 3 and 0 < results[name]["best_s"] <= results[name]["median_s"]
                assert results["compared"].get(name, {"speedup_median": 1.0})["speedup_median"] > 0


def test_bytes_are_the_counted_ones(two_ranks: tuple[dict[str, Any], str]) -> None:
    for point in two_ranks[0]["points"]:
        rows = point["rows"]
        for operation, results in point["operations"].items():
            for name in ("gather", "gather_ours"):
                assert results[name]["bytes_a_row"] == 4 * VOCAB / 2 and results[name]["collectives"] == 1
            # 8 bytes a row and a header, in the room that a first exchange has
            if operation == "greedy" and point is two_ranks[0]["points"][0]:
                assert results["ours"]["bytes_a_row"] == HEADER + FIRST
            if operation == "greedy" and rows == 16:
                assert results["ours"]["bytes_a_row"] <= (HEADER + FIRST) / 16 and results["ours"]["collectives"] == 1


def test_small_vocabularies_are_not_judged(two_ranks: tuple[dict[str, Any], str]) -> None:
    report, printed = two_ranks
    assert report["passed"] and report["slower"] == [] and report["other_ids"] == [] and "pass  " in printed


def test_alone_nothing_is_sent_and_a_part_of_it_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(words(tmp_path, "batch=[2]", "operations=[top_p]", "contestants=[ours]")) == 0
    assert "pass  nothing to beat" in capsys.readouterr().out
    report = json.loads((tmp_path / "bench.json").read_text())
    ((operation, results),) = report["points"][0]["operations"].items()
    assert operation == "top_p" and results["ours"]["bytes_a_row"] == 0 and results["compared"] == {}
