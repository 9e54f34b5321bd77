"""The README's commands, shortened: a real torchrun of the quickstart, then the other commands on its run folder."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vocab_parallel import app
from vocab_parallel.app import report, runlog, selftests
from vocab_parallel.checkpoint import latest_checkpoint, read_state
from vocab_parallel.vocabulary.manifest import Manifest

ROOT = Path(__file__).parents[2]
STEPS = 4


def torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``torchrun -m vocab_parallel ...`` as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, "-m", "vocab_parallel", *arguments],
        env=environment, capture_output=True, text=True, timeout=110, cwd=ROOT, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run folder and output of a short quickstart on two ranks: all of the vocabulary, part of the text."""
    place = tmp_path_factory.mktemp("quickstart")
    job = torchrun(
        2, "train", "configs/quickstart.yaml", f"runs={place}", f"data.cache={place / 'cache'}",
        "data.max_bytes=1500000",
        f"train.steps={STEPS}", "train.validation_every=2", "train.checkpoint_every=2", "train.validation_sequences=2",
        "oracle.gradient_every=2", "generate.max_tokens=4",
    )  # fmt: skip
    assert job.returncode == 0, job.stdout + job.stderr
    [folder] = place.glob("quickstart-*")
    return folder, job.stdout + job.stderr


def test_the_run_folder_holds_everything(quickstart: tuple[Path, str]) -> None:
    folder, _ = quickstart
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "env.txt", "manifest.json", "metrics.jsonl", "tensorboard", "checkpoints",
                     "summary.json", "report.html"}  # fmt: skip
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["steps"] == STEPS
    assert "torch" in (folder / "env.txt").read_text()
    assert list((folder / "tensorboard").glob("events.*")) and "<svg" in (folder / "report.html").read_text()
    manifest = Manifest.read(folder)
    assert manifest.vocabulary.size == 131_072 and manifest.checkpoint is not None
    assert manifest.checkpoint.shard_ranges == ((0, 65_536), (65_536, 131_072))
    assert len(manifest.vocabulary.ordered_table_sha256 or "") == 64
    assert manifest.tying.tied and manifest.loss is not None and manifest.loss.unit == "nats"
    latest = latest_checkpoint(folder / "checkpoints")
    assert latest is not None and read_state(latest)["step"] == STEPS


def test_every_step_is_logged_and_agrees_with_the_oracle(quickstart: tuple[Path, str]) -> None:
    rows = runlog.read_metrics(quickstart[0])
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["loss"] == pytest.approx(math.log(131_072), abs=0.1)
    for row in rows:
        assert row["oracle_difference"] == abs(row["loss"] - row["oracle_loss"]) < 1e-4
        checked = row["step"] % 2 == 0
        assert (row["oracle_gradient_difference"] is not None) == (row["validation_loss"] is not None) == checked
        assert row["oracle_gradient_difference"] is None or row["oracle_gradient_difference"] < 1e-4
        assert row["tokens_per_second"] > 0 and row["peak_memory_bytes"] > 10**8
    # 256 rows of 64 float32, on two ranks: an all-reduce sends each row once, for the lookup and for dH.
    rows_sent = 2 * 256 * 64 * 4
    # The first exchanges are as long as a guess; then a chunk needs a 64-byte header and 12 bytes for each of 64 rows.
    assert rows[-1]["bytes_sent"] - rows_sent < 4 * (64 + 12 * 64) + 200 < rows[0]["bytes_sent"] - rows_sent
    # Header and rows of the lookup, statistics and dH of four chunks, the norm; the first may be one more.
    assert rows[-1]["collectives"] == 2 + 2 * 4 + 1


def test_the_closing_table_and_sample_are_printed(quickstart: tuple[Path, str]) -> None:
    folder, output = quickstart
    for words in ("train loss", "validation loss", "NOT under the unigram entropy", "oracle, loss", "bytes sent",
                  "loss memory", "whole logits", "134.2 MB", "sample: 'import ", str(folder),
                  f"step {STEPS}/{STEPS}"):  # fmt: skip
        assert words in output, f"{words!r} not in\n{output}"
    summary = runlog.read_json(folder, "summary.json")
    # A rank keeps its half of the table's gradient; the rest is a chunk of 64 rows, far under whole logits.
    gradient = 65_536 * 64 * 4
    assert gradient < summary["loss_memory_bytes"] < gradient + 3 * 64 * 65_536 * 4
    assert summary["loss_memory_bytes"] < summary["whole_logits_bytes"] == 256 * 131_072 * 4


def test_generate_continues_on_the_ranks_of_the_training(quickstart: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = quickstart
    job = torchrun(
        2, "generate", str(folder), "--policy", "configs/policies/creative.yaml", "--seed", "3", "--prompt", "def f(",
        "--prompt", "x", "--request", "one", "--request", "two", "--trace", str(tmp_path / "trace.jsonl"),
        "generate.max_tokens=3",
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith("--- one\ndef f(") and job.stdout.count("def f(") == 1  # one rank prints
    assert "\n--- two\nx" in job.stdout
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(line["request"], line["step"]) for line in lines][:2] == [("one", 0), ("two", 0)]
    assert len(lines) <= 6 and all(line["support"] <= line["legal"] == 131_072 for line in lines)


def test_report_rebuilds_the_page(quickstart: tuple[Path, str]) -> None:
    page = quickstart[0] / "report.html"
    before = page.read_text()
    page.unlink()
    assert app.main(["report", str(quickstart[0])]) == 0
    assert page.read_text().count("<svg") == before.count("<svg") == 6
    assert report.write(quickstart[0]) == page


def test_doctor_passes_on_two_ranks() -> None:
    job = torchrun(2, "doctor", "configs/quickstart.yaml")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "24 of 24 passed" in job.stdout and "FAIL" not in job.stdout
    assert "65,536" in job.stdout and job.stdout.count("environment\n") == 1


def test_doctor_fails_when_an_operation_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy, sample, top_p = selftests.greedy, selftests.sample, selftests.top_p
    monkeypatch.setattr(selftests, "greedy", lambda logits, *, shard: greedy(logits, shard=shard) + 1)
    monkeypatch.setattr(selftests, "top_k", lambda *args, **options: (_ for _ in ()).throw(ValueError("broken")))
    monkeypatch.setattr(selftests, "top_p", lambda logits, p, *, shard: top_p(logits, p * 0.99, shard=shard))
    monkeypatch.setattr(selftests, "sample", lambda *args, **given: sample(*args, **given | {"top_p": 1.0}))
    assert app.main(["doctor", "data.vocab=bytes"]) == 1
    output = capsys.readouterr().out
    assert all(f"FAIL  {name}" in output for name in ("greedy", "top_k", "top_p", "sample"))
    assert "ValueError: broken" in output and "20 of 24 passed" in output


def test_a_wrong_number_of_ranks_and_a_typo_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["train", str(ROOT / "configs" / "smoke.yaml"), "parallel.tp=3"]) == 2
    assert "parallel.tp=3, but the job has 1 ranks" in capsys.readouterr().err
    assert app.main(["train", str(ROOT / "configs" / "smoke.yaml"), "train.stepz=3"]) == 2
    assert "unknown key train.stepz; did you mean train.steps?" in capsys.readouterr().err
