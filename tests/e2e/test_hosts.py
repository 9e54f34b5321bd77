"""Each host's launch script as a user starts it, on 2 ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import ROOT, SETTINGS, STEPS, finish, metrics, start, start_command

ZERO = "host_config=configs/deepspeed/zero2.json"
# Python imports it at its start, in the ranks too.
STAND_IN = """
import contextlib, os
if "RANK" in os.environ:
    from tests.integrations.megatron_cpu import cuda_stand_in
    stack = contextlib.ExitStack()
    stack.enter_context(cuda_stand_in())
"""


def test_the_plain_host_agrees_with_the_oracle(plain: list[dict[str, Any]]) -> None:
    check_steps(plain)


@pytest.mark.parametrize(("script", "settings"), [("deepspeed.sh", [ZERO]), ("fsdp.sh", ["parallel.tp=1"])])
def test_a_host_with_the_same_model_trains_as_the_plain_one(
    script: str, settings: list[str], launches: Path, plain: list[dict[str, Any]]
) -> None:
    finish(start(script, launches / script, *SETTINGS, *settings))
    rows = metrics(launches / script)
    check_steps(rows)
    for row, want in zip(rows, plain, strict=True):
        assert row["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert row["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=1e-4)
        assert row["learning_rate"] == want["learning_rate"]
    assert rows[-1]["validation_loss"] == pytest.approx(plain[-1]["validation_loss"], abs=1e-5)


def test_a_llama_of_transformers_trains_and_accelerate_starts_the_same_run(launches: Path) -> None:
    finish(start("transformers.sh", launches / "transformers", *SETTINGS))
    rows = metrics(launches / "transformers")
    check_steps(rows)
    launch = ["accelerate", "launch", "--config_file", "configs/accelerate/two_ranks.yaml", "-m", "vocab_parallel"]
    finish(start_command([*launch, "train", "--host", "transformers"], launches / "accelerate", *SETTINGS))
    again = metrics(launches / "accelerate")
    kept = ("loss", "gradient_norm", "validation_loss", "bytes_sent", "collectives")
    assert [[row[name] for name in kept] for row in again] == [[row[name] for name in kept] for row in rows]


def test_a_gpt_of_megatron_trains_with_a_stand_in_for_cuda(launches: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    finish(start("megatron.sh", launches / "megatron", *SETTINGS, PYTHONPATH=paths))
    check_steps(metrics(launches / "megatron"))


def check_steps(rows: list[dict[str, Any]]) -> None:
    """Every step is there, learns something, and its loss and gradient are those of one rank in float64."""
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    losses = [row["loss"] for row in rows]
    assert losses[0] == pytest.approx(math.log(259), abs=0.3) and losses[-1] < losses[0]
    assert all(row["oracle_difference"] == abs(row["loss"] - row["oracle_loss"]) < 1e-5 for row in rows)
    assert [row["oracle_gradient_difference"] is not None for row in rows] == [False, True, False]
    assert 0 < rows[1]["oracle_gradient_difference"] < 1e-5
    assert all(0 < row["gradient_norm"] < 100 and row["collectives"] > 0 for row in rows)
