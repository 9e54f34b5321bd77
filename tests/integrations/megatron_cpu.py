"""A stand-in for the CUDA that Megatron-core takes for granted: enough of it for gloo ranks on a CPU.

As a program it sets the stand-in up and hands over to the app:

    torchrun --nproc-per-node 2 tests/integrations/megatron_cpu.py train configs/smoke.yaml --host megatron
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _CudaIsCpu(TorchFunctionMode):
    """Tensors asked for on CUDA come on the CPU, and say they are CUDA's where Megatron reads their type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return func(*(CPU if _is_cuda(arg) else arg for arg in args), **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


@contextlib.contextmanager
def cuda_stand_in() -> Iterator[None]:
    """Within, Megatron-core runs on the CPU: dropout 0, no compiler, checkpoints written without child processes."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")  # of Megatron and its imports; ours would be errors in the tests of our own
        import torch._dynamo.config
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        torch._dynamo.config.disable = True
        replaced = {
            (torch.cuda, "current_device"): lambda: CPU,
            (torch.cuda, "synchronize"): lambda *_: None,
            (torch.cuda, "empty_cache"): lambda: None,
            # Ranks of the tests are daemons, which may not have children.
            (filesystem_async, "_results_queue"): queue.Queue(),
            (filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc"): staticmethod(_write_here),
        }
        for (owner, name), value in replaced.items():
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # a CPU has no CUDA random state
        stack.enter_context(_CudaIsCpu())
        yield


def _write_here(transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written = {}
    for index, bucket in enumerate(buckets):
        result: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, result, count, False)
        written[index] = result.get()[1]
        if isinstance(written[index], Exception):
            raise written[index]
    results.put(written)


if __name__ == "__main__":
    from vocab_parallel.app import main

    with cuda_stand_in():
        code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
