"""Counts collectives without asking the package, and memory without asking the allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Methods of a process group, by the name under which `shard.traffic` counts them. All collectives end in one of them.
_KINDS = {
    "all_gather": ["all_gather_single", "_allgather_base", "allgather", "allgather_coalesced"],
    "all_reduce": ["allreduce", "allreduce_coalesced"],
    "reduce_scatter": ["reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter"],
    "broadcast": ["broadcast"],
    "gather": ["gather"],
    "other": [
        *("alltoall", "alltoall_base", "all_to_all_single", "barrier", "monitored_barrier"),
        *("scatter", "reduce", "send", "recv", "recv_anysource"),
    ],
}
_TO_EACH = ("alltoall_base", "all_to_all_single")


def _alike(blocks: torch.Tensor, ranks: int) -> bool:
    """Whether a rank sends the same to everyone: an all-gather in one step."""
    each = blocks.view(ranks, -1)
    return torch.equal(each, each[:1].expand_as(each))


@contextmanager
def collectives() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Yields `(calls, bytes)` by kind, of all collectives of this process; bytes as a ring sends them.

    An all-to-all of equal blocks counts as the all-gather that it is.
    """
    calls: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    originals = {}

    def counted(kind: str, name: str, original: Any) -> Any:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            if name in _TO_EACH and _alike(args[1], group.size()):
                calls["all_gather"] += 1
                sent["all_gather"] += args[1].nbytes * (group.size() - 1) // group.size()
                return original(group, *args, **kwargs)
            calls[kind] += 1
            others = group.size() - 1
            if kind == "all_gather":
                sent[kind] += args[1].nbytes * others
            elif kind == "reduce_scatter":
                sent[kind] += args[1].nbytes * others // group.size()
            elif kind == "all_reduce":
                sent[kind] += 2 * args[0][0].nbytes * others // group.size()
            elif kind == "broadcast":
                sent[kind] += args[0][0].nbytes * others if group.rank() == args[1].rootRank else 0
            elif kind == "gather":
                sent[kind] += args[1][0].nbytes if group.rank() != args[2].rootRank else 0
            return original(group, *args, **kwargs)

        return method

    try:
        for kind, names in _KINDS.items():
            for name in names:
                if name in vars(dist.ProcessGroup):
                    originals[name] = vars(dist.ProcessGroup)[name]  # getattr would lose what binds it to a group
                    setattr(dist.ProcessGroup, name, counted(kind, name, getattr(dist.ProcessGroup, name)))
        yield calls, sent
    finally:
        for name, original in originals.items():
            setattr(dist.ProcessGroup, name, original)


class Allocations(TorchDispatchMode):
    """Follows every storage that appears while it is on, until it dies.

    Attributes:
        peak: Largest number of bytes alive at once.
        largest: Elements of the largest tensor that was made.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its compiler to keep it out of here: seconds on every rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known and key not in self._alive:
                    self._alive[key] = (StorageWeakRef(storage), storage.nbytes())
                    self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
