"""Decides how the kernels run here: compiled, if there is a GPU, else in Triton's interpreter on the CPU.

Triton decides when it is imported, which tests/conftest.py does. The variable is set for that moment and for the tests
of this folder: elsewhere in this process, and in the processes that other tests start, losses on the CPU stay eager.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import numpy
import pytest
import torch

VARIABLE = "TRITON_INTERPRET"
INTERPRETED = os.environ.get(VARIABLE) == "1" or not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"

if sys.platform != "linux":
    collect_ignore_glob = ["test_*"]  # there is no Triton
else:
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv(VARIABLE, "1")
        from vocab_parallel.loss import kernels

        if not kernels.available(torch.empty(0, device=DEVICE)):
            raise pytest.UsageError(
                "the kernels cannot run: Triton is missing, or was imported before tests/kernels/conftest.py could "
                f"choose how. Run tests/kernels alone, or with {VARIABLE}=1"
            )


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    monkeypatch.setenv(VARIABLE, "1")
    with numpy.errstate(all="ignore"):  # a GPU does not warn about inf - inf either
        yield


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(params=["whole rows", "blocks"])
def blocking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test twice: with rows that a program holds whole, and in blocks of 16 columns."""
    from vocab_parallel.loss.kernels import statistics

    if request.param == "blocks":
        monkeypatch.setattr(statistics, "_WHOLE", 0)
        monkeypatch.setattr(statistics, "_BLOCK", 16)
    return str(request.param)
