"""A training changes its tokenizer: migrated in the middle, it goes on from where it was at any number of ranks."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.byte_tokenizers import COUNT, write_merged_bytes
from vocab_parallel.app import main
from vocab_parallel.app.runlog import read_metrics
from vocab_parallel.checkpoint import latest_checkpoint, open_checkpoint
from vocab_parallel.checkpoint.files import StoredCheckpoint

ROOT = Path(__file__).parents[2]
BYTES, STEPS, MORE = 259, 20, 26
RUN = ["configs/smoke.yaml", f"train.steps={STEPS}", "train.warmup=3", "train.validation_every=0",
       "train.validation_sequences=2", "data.max_bytes=300000", "oracle.gradient_every=6",
       "generate.max_tokens=2"]  # fmt: skip


def python(*words: str | Path) -> str:
    """What a command of the package prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *map(str, words)]
    job = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def torchrun(*words: str | Path) -> str:
    return python("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vocab_parallel", *words)


def newest(run: Path) -> StoredCheckpoint:
    path = latest_checkpoint(run / "checkpoints")
    assert path is not None
    return open_checkpoint(path)


def nats_per_byte(run: Path, rows: list[dict[str, Any]]) -> float:
    corpus = json.loads((run / "manifest.json").read_text())["notes"]["corpus"]
    tokens = corpus["train_tokens"] + corpus["validation_tokens"]
    return sum(row["loss"] for row in rows) / len(rows) * tokens / corpus["text_bytes"]


@pytest.mark.timeout(240)  # five jobs
def test_a_run_migrated_to_a_larger_tokenizer_goes_on_at_two_ranks_and_at_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    torchrun("train", *RUN, f"runs={tmp_path / 'runs'}", f"data.cache={tmp_path / 'cache'}")
    [run] = (tmp_path / "runs").iterdir()
    tokenizer, new = write_merged_bytes(tmp_path / "tokenizer"), tmp_path / "new"
    text = python("vocab_parallel", "migrate", run, new, "--new-vocab", tokenizer)
    assert "ok   rows of model.embedding.weight: 259 kept rows have the same bits" in text
    assert "aliases: one key each: lm_head.weight is embedding.weight" in text and "FAIL" not in text

    old, moved = newest(run), newest(new)
    assert (old.step, moved.step) == (STEPS, STEPS)
    for key in old.tensors:
        got = moved.read(key)
        assert torch.equal(
            got[:BYTES] if key.startswith(("model.emb", "optimizer.emb")) and got.dim() else got, old.read(key)
        )
    assert moved.tensors["model.embedding.weight"][1][0] == BYTES + COUNT

    shutil.copytree(new, tmp_path / "alone")
    assert main(["train", str(tmp_path / "alone"), "data.vocab=bytes", f"train.steps={MORE}"]) == 2
    refusal = capsys.readouterr().err
    assert "python -m vocab_parallel migrate" in refusal and "323" in refusal and "259" in refusal, refusal
    said = torchrun("train", new, f"train.steps={MORE}")
    assert f"resuming at step {STEPS + 1}" in said and "V=323" in said
    assert main(["train", str(tmp_path / "alone"), f"train.steps={MORE}"]) == 0
    before = read_metrics(run)
    for folder in (new, tmp_path / "alone"):
        rows = read_metrics(folder)
        assert [row["step"] for row in rows] == list(range(1, MORE + 1))
        assert [row["loss"] for row in rows[:STEPS]] == [row["loss"] for row in before]
        assert all(math.isfinite(row["loss"]) and row["oracle_difference"] < 1e-4 for row in rows)
        # A token has more bytes now, so its loss is higher; the first step after must not begin anew at log V.
        assert rows[STEPS]["loss"] < math.log(BYTES + COUNT) - 1
        assert abs(nats_per_byte(folder, rows[STEPS:]) / nats_per_byte(run, before[-6:]) - 1) < 0.4
    both = [[row["loss"] for row in read_metrics(folder)[STEPS:]] for folder in (new, tmp_path / "alone")]
    assert both[0] == pytest.approx(both[1], abs=1e-3)
