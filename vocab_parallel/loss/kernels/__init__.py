"""Optional Triton kernels of the loss. Nothing here imports Triton before a kernel is wanted.

Ask `available(tensor)` first, then import `statistics` or `epilogue`. They equal the eager functions of the same names
up to rounding, so all ranks of a group should be able to use them, or none: the bits of replicated values differ.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor


def available(tensor: Tensor) -> bool:
    """Whether the kernels can take `tensor`.

    True on a GPU (NVIDIA: Ampere or newer) if Triton is installed, and everywhere if Triton interprets, which it does
    if `TRITON_INTERPRET=1` was set before its first import and still is. On a GPU Triton compiles at the first call,
    for which it needs a C compiler.
    """
    if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits < 16:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return _mode() == "interpreted"
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (8, 0) and _mode() == "compiled"


@functools.cache
def _mode() -> str:
    """How this process runs kernels: "compiled", "interpreted", or "unusable"."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return "unusable"
    from vocab_parallel.loss.kernels import epilogue, statistics

    # Triton decides at decoration, so that its own functions and ours may differ if the variable was set in between.
    functions = (tl.sum, statistics.statistics_kernel, epilogue.merge_kernel)
    compiled = {isinstance(function, triton.JITFunction) for function in functions}
    if len(compiled) == 2:
        return "unusable"
    return "compiled" if True in compiled else "interpreted"
