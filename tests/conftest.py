"""What all tests share."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# Triton decides when it is imported whether it will interpret. Here, before a host imports it: see tests/kernels.
if sys.platform == "linux" and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401

# The same examples every time, and no time limit per example: the machine may be busy.
settings.register_profile("project", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("project")
