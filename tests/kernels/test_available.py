"""When the kernels may be used, each case in a process of its own, for Triton decides at its import."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.conftest import VARIABLE
from tests.kernels.test_compiled import run
from vocab_parallel.loss.kernels import available

CASES = {
    "Triton is missing": "sys.modules['triton'] = None; os.environ[VARIABLE] = '1'",
    "Triton was imported before": "import triton; os.environ[VARIABLE] = '1'",
}


@pytest.mark.parametrize("case", CASES)
def test_a_cpu_without_an_interpreting_triton(case: str) -> None:
    code = (
        f"import os, sys, torch; from vocab_parallel.loss.kernels import available; VARIABLE = '{VARIABLE}'\n"
        "x = torch.zeros(2); assert not available(x) and 'triton' not in sys.modules\n"
        f"{CASES[case]}; assert not available(x)"
    )
    run("-c", code)


def test_here(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(2, device=device)
    assert all(available(tensor.to(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float64))
    assert not available(tensor.to(torch.int64)) and not available(tensor.to(torch.float8_e4m3fn))
    if device == "cpu":
        monkeypatch.delenv(VARIABLE)
        assert not available(tensor)
    else:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not available(tensor)
