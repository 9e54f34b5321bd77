"""This process's place in the job: rank, device and process group, under torchrun or alone."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from vocab_parallel.app.config import ParallelConfig
from vocab_parallel.app.meeting import meet
from vocab_parallel.app.roll_call import RollCall
from vocab_parallel.errors import ConfigError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import RankGroup, VocabShard


@contextmanager
def join(config: ParallelConfig) -> Iterator[Job]:
    """Joins the ranks that torchrun started; alone, it is a job of one rank without torch.distributed.

    Where torch.distributed runs already, its ranks are the job, and it stays as it is.

    With ``parallel.tp`` under the number of ranks, each run of `tp` ranks in order holds the whole vocabulary: a
    replica.

    Raises:
        ConfigError: the number of ranks is not a multiple of ``parallel.tp``, or the device is not there.
        CollectiveError: a collective of the body failed, with the ranks that do not answer (see `roll_call`).
    """
    rank, world, local_rank = (int(os.environ.get(k, v)) for k, v in zip(_NAMES, ("0", "1", "0"), strict=True))
    running = dist.is_initialized()
    if running:
        rank, world = dist.get_rank(), dist.get_world_size()
    if config.tp is not None and world % config.tp:
        raise ConfigError(
            f"parallel.tp={config.tp}, but the job has {world} ranks: every {config.tp} of them share the vocabulary. "
            f"Start it with torchrun --nproc-per-node {config.tp} (or a multiple), or set parallel.tp=null"
        )
    device = _device(config.device, local_rank)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if device.type == "cpu":
        _keep_freed_memory()
    if world == 1 and not running:
        yield Job(rank, world, local_rank, device, None)
        return
    timeout = timedelta(seconds=config.timeout_s)
    roll_call = None if running else _start_group(rank, world, device, timeout)
    try:
        part_group, data_group = split_ranks(rank, world, config.tp or world, timeout)
        yield Job(rank, world, local_rank, device, dist.group.WORLD, data_group, part_group)
    except RuntimeError as error:
        explained = None if roll_call is None else roll_call.explain(error)
        if explained is None:
            raise
        raise explained from error
    finally:
        if not running:
            dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Job:
    """One rank of the job.

    Attributes:
        group: all ranks; None where there is one.
        data_group: the ranks that hold the same rows of the vocabulary as this one; None if no other does.
        part_group: with a `data_group`, the ranks that share the vocabulary with this one; None if no other does.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    data_group: dist.ProcessGroup | None = None
    part_group: dist.ProcessGroup | None = None

    @functools.cached_property
    def replicas(self) -> RankGroup:
        """The ranks of `data_group`, of which this one has number ``replicas.rank``."""
        return RankGroup(self.data_group)

    @property
    def tp(self) -> int:
        """How many ranks share one vocabulary."""
        return self.world // self.replicas.size

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one vocabulary; None where there is one."""
        return self.group if self.data_group is None else self.part_group

    @property
    def first(self) -> bool:
        """Whether this rank writes the logs and files."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Prints on the first rank only."""
        if self.first:
            print(text, flush=True)

    def agree(self, value: Any) -> Any:
        """The first rank's `value`, on every rank. One object broadcast, none at world size 1."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Waits for all ranks. None at world size 1."""
        if self.group is not None:
            dist.barrier(group=self.group)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` in rank order, on every rank. One object gather, none at world size 1."""
        found: list[Any] = [value] * self.world
        if self.group is not None:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def shard(self, vocab_size: int, multiple_of: int) -> VocabShard:
        """The vocabulary over the ranks of `tp_group`."""
        return VocabShard(VocabLayout(vocab_size, self.tp, multiple_of=multiple_of), self.tp_group)


_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_START = timedelta(minutes=2)  # ranks that start together import at different speeds


def builds_files() -> bool:
    """Whether this process is the one of its machine that prepares shared files; needs no process group."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def split_ranks(
    rank: int, world: int, tp: int, timeout: timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's `Job.part_group` and `data_group` at `tp` ranks a replica; every rank of the job must call it."""
    if tp == world:
        return None, None
    if tp == 1:
        return None, dist.group.WORLD
    parts = [dist.new_group(list(range(first, first + tp)), timeout=timeout) for first in range(0, world, tp)]
    across = [dist.new_group(list(range(first, world, tp)), timeout=timeout) for first in range(tp)]
    return parts[rank // tp], across[rank % tp]


def _start_group(rank: int, world: int, device: torch.device, timeout: timedelta) -> RollCall:
    """Starts torch.distributed over the ranks that the environment names."""
    shared, _, _ = next(rendezvous("env://", timeout=timeout))
    shared.set_timeout(timeout)
    store = meet(shared, rank, world, max(timeout, _START))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    own = PrefixStore("default_pg", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)
    return RollCall(store, rank, world)


def _keep_freed_memory() -> None:
    """Makes glibc reuse large freed buffers instead of returning each to the kernel.

    Otherwise every buffer over 32 MB is page-faulted in anew, which took longer than the arithmetic on it: one
    float64 check of 256 tokens over 131,072 ids fell from 0.8 to 0.2 s.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def _device(name: str, local_rank: int) -> torch.device:
    count = torch.cuda.device_count() if name != "cpu" and torch.cuda.is_available() else 0
    if name == "cuda" and count <= local_rank:
        raise ConfigError(f"parallel.device=cuda, but local rank {local_rank} finds {count} CUDA devices")
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if name == "cpu" or count < local_world:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
