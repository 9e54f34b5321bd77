"""The benchmark in short: a real torchrun of two ranks, and alone, with whatever other libraries are there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"megatron": "megatron", "megatron_fused": "megatron", "deepspeed": "deepspeed",
            "deepspeed_same_chunk": "deepspeed"}  # fmt: skip
TOKENS, HIDDEN, VOCAB, CHUNK = 256, 32, 2048, 32


def bench(out: Path, *words: str, ranks: int = 1) -> tuple[dict[str, Any], str, int]:
    """The results of ``bench loss``, what it printed, and its exit status."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    # What other libraries would compile takes longer than all of this.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_COMPILE_DISABLE": "1"}
    job = subprocess.run(
        [sys.executable, *launcher, "-m", "vocab_parallel", "bench", "loss", f"out={out}", *words],
        env=environment, capture_output=True, text=True, timeout=110, cwd=ROOT, check=False,
    )  # fmt: skip
    assert (out / "bench.json").is_file(), job.stdout + job.stderr
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG") and (out / "bench.txt").read_text() in job.stdout
    return json.loads((out / "bench.json").read_text()), job.stdout, job.returncode


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Results and output of all contestants on two ranks."""
    report, printed, status = bench(
        tmp_path_factory.mktemp("bench"), f"tokens={TOKENS}", f"hidden={HIDDEN}", f"vocab={VOCAB}",
        f"chunk_size={CHUNK}", "rounds=2", ranks=2,
    )  # fmt: skip
    assert status == 0, printed
    return report, printed


def test_everyone_who_is_there_is_measured_and_who_is_not_is_named(two_ranks: tuple[dict[str, Any], str]) -> None:
    report, printed = two_ranks
    contestants, (point,) = report["contestants"], report["points"]
    ran = {name for name, about in contestants.items() if about["status"] == "ran"}
    assert ran >= {"floor", "ours", "loss_parallel"} and set(point["results"]) == ran
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            reason = f"ModuleNotFoundError: No module named '{package}'"
            assert contestants[name]["status"] == "missing" and contestants[name]["reason"] == reason
            assert f"{name}: missing: {reason}" in printed
        else:
            assert name in ran, contestants[name]
    assert contestants["torch_linear"]["reason"] == "runs on one rank only"
    assert contestants["liger"]["reason"] == contestants["cut_cross_entropy"]["reason"] == "needs a GPU"
    assert report["environment"]["ranks"] == 2 and report["environment"]["threads_a_rank"] == 1
    for name in ran:
        numbers = point["results"][name]
        assert [len(by_rank) for by_rank in numbers["seconds_by_rank"]] == [2, 2]
        assert 0 < numbers["best_s"] <= numbers["median_s"] and numbers["over_floor_best"] > 0
        if name != "floor":
            assert numbers["peak_extra_bytes"] > point["gradient_bytes"]


def test_collectives_memory_and_errors_are_right(two_ranks: tuple[dict[str, Any], str]) -> None:
    report, _ = two_ranks
    results = report["points"][0]["results"]
    ours, other = results["ours"], results["loss_parallel"]
    chunks = TOKENS // CHUNK
    assert ours["chunk_rows"] == CHUNK and other["chunk_rows"] == TOKENS
    # A chunk: a header of 64 bytes and 12 bytes a row to the other rank; its float32 dH, reduced as a ring does.
    assert ours["collectives"] == {
        "calls": {"all_gather": chunks, "all_reduce": chunks},
        "bytes": {"all_gather": chunks * (64 + 12 * CHUNK), "all_reduce": TOKENS * HIDDEN * 4},
    }
    # Maximum, sum and target logit of each row, and dH.
    assert other["collectives"] == {
        "calls": {"all_reduce": 4},
        "bytes": {"all_reduce": TOKENS * 3 * 4 + TOKENS * HIDDEN * 4},
    }
    # One chunk of logits for ours; whole ones, more than once, for the other.
    logits = TOKENS * VOCAB // 2 * 4
    assert logits // chunks < ours["beyond_gradients_bytes"] < logits < 2 * logits < other["beyond_gradients_bytes"]
    errors = report["errors"]["results"]
    assert set(errors) == {"torch_unsharded", *results} - {"floor"}
    limits = {name: 5e-3 if name == "megatron_fused" else 5e-6 for name in errors}  # it rounds to bfloat16
    assert all(error < limits[name] for name, each in errors.items() for error in each.values()), errors
    losses = [numbers["loss"] for name, numbers in results.items() if name != "floor"]
    assert losses[0] > 7 and max(losses) - min(losses) < 1e-5


def test_alone_a_sweep_over_tokens_is_checked(tmp_path: Path) -> None:
    report, printed, status = bench(
        tmp_path, "sweep=tokens", "points=[64, 128]", "hidden=16", "vocab=512", "chunk_size=32", "rounds=1",
        "contestants=[ours, torch_linear]",
    )  # fmt: skip
    assert [point["value"] for point in report["points"]] == [64, 128]
    assert all(set(point["results"]) == {"floor", "ours", "torch_linear"} for point in report["points"])
    assert all(point["results"]["ours"]["collectives"]["calls"] == {} for point in report["points"])
    straight, flat = report["checks"]
    assert (straight["name"], flat["name"]) == ("time linear in tokens", "memory beyond the gradients flat")
    # So short a step says nothing of its time; its memory is exact.
    assert flat["passed"], flat
    assert status == (0 if straight["passed"] else 1)
    assert ("pass" if straight["passed"] else "FAIL") + "  time linear in tokens" in printed
