"""How much memory a piece of work needs beside what was there before it."""

from __future__ import annotations

import resource
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_extra_bytes(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The largest sum of bytes of tensors that `fn` made and that were alive at one time.

    On CUDA this is what the allocator saw. On CPU every operation is watched, in autograd Functions and backward passes
    too: a storage counts once, from the operation that made it until it is freed, and views, results written in place
    and tensors that existed before `fn` count nothing. What a CPU kernel allocates
    and frees inside itself is not seen.

    Args:
        fn: the work, for example one forward and backward.
        device: where its tensors live.

    Returns:
        Bytes.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        torch.cuda.synchronize(device)
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before
    live = _LiveBytes()
    with live:
        fn()
    return live.peak


def peak_process_bytes(device: torch.device | str = "cpu") -> int:
    """The most memory this process has held so far: resident set on CPU, allocated tensors on CUDA."""
    if torch.device(device).type == "cuda":
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the sum of live storages that operations under it have made, and its largest value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # by storage; 0 for one that was there before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._see(tensor, made_here=False)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor, made_here=True)
        return result

    def _see(self, tensor: Tensor, *, made_here: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes() if made_here else 0
        self._sizes[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        # The wrapper lives as long as the storage it stands for, so its end is the memory's end.
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
