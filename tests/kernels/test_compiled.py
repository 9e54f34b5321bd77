"""The kernels compile for a GPU, and to good code. Where a GPU runs all these tests, the interpreter does as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.conftest import INTERPRETED, VARIABLE

ROOT = Path(__file__).parents[2]


def run(*command: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = str(tmp_path_factory.mktemp("triton"))
    found: dict[str, Any] = json.loads(run("-m", "tests.kernels.ahead_of_time", TRITON_CACHE_DIR=cache))
    return found


def test_the_kernels_compile_for_hopper(compiled: dict[str, Any]) -> None:
    assert len(compiled) == 17


def test_no_register_is_spilled(compiled: dict[str, Any]) -> None:
    assert {name: kernel["spilled"] for name, kernel in compiled.items() if kernel["spilled"]} == {}


def test_matrices_are_read_and_written_16_bytes_at_a_time(compiled: dict[str, Any]) -> None:
    """Also a row that ends anywhere, if its stride is a multiple of 16: beside whole loads only its last columns."""
    for name, kernel in compiled.items():
        if name.startswith(("merge", "one", "no column")):
            continue
        wide = {"ld": 0, "st": 0}
        for access, count in kernel["accesses"].items():
            if access.endswith(("v4.b32", "v2.b64")):
                wide[access[:2]] += count
        single = sum(kernel["accesses"].values()) - sum(wide.values())
        assert wide["ld"] >= 2 and (wide["st"] >= 2 or name == "not in place"), (name, kernel)
        assert single <= 14, (name, kernel)  # scalars of the row and the last columns


if not INTERPRETED:

    def test_again_in_the_interpreter() -> None:
        run("-m", "pytest", "-q", "tests/kernels", **{VARIABLE: "1"})
