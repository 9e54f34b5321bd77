"""What all tests share."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same examples every time, and no time limit per example: the machine may be busy.
settings.register_profile("project", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("project")
