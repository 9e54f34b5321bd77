"""The token mean over ranks that hold other rows: their sums and counts, exchanged once a call."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.agreement import Exchange
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.shard import RankGroup, VocabShard


class WideMean:
    """The exchange of one call over its `mean_group`, around all of the call that can raise.

        with WideMean(shard, mean_group, "cross_entropy(...)") as wide:
            ...
            total, count = wide.reduce(total, count)

    The ranks of a vocabulary-parallel group raise together, but those of the other groups wait for them in `reduce`.
    So an exception that leaves the block before `reduce` is told to them, and they raise one of its class.

    Args:
        group: A process group. None, or a group of one, exchanges nothing.
        call: What must be the same on every rank of `group`: operation and options, but no row counts.

    Collectives:
        One all-gather of 80 bytes over `group`, counted in the shard's traffic; on an error, one of 4 KiB.
    """

    def __init__(self, shard: VocabShard, group: object, call: str) -> None:
        self._shard, self._call = shard, call
        self._wide: RankGroup | None = None
        self._error: Exception | None = None
        self._done = False
        if group is None:
            return
        if group is dist.GroupMember.NON_GROUP_MEMBER or (isinstance(group, dist.ProcessGroup) and group.rank() < 0):
            self._error = LayoutMismatchError("this rank is no member of its mean_group")
        elif not isinstance(group, dist.ProcessGroup):
            self._error = LayoutMismatchError(f"mean_group must be a process group, got {type(group).__name__}")
        else:
            self._wide = shard.wider(group)

    @property
    def size(self) -> int:
        """Ranks that share the mean.

        Raises:
            LayoutMismatchError: On this rank, for a `mean_group` that is none or that it is no member of.
        """
        if self._error is not None:
            raise self._error
        return self._wide.size if self._wide is not None else 1

    def reduce(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over the group of `total` (float64 scalar) and `count` (int64 scalar), the same bits on every rank.

        Raises:
            VocabParallelError: Of the class that a rank of another vocabulary-parallel group has raised.
            LayoutMismatchError: On every rank, if the calls differ.
        """
        self._done = True
        if self.size == 1 or self._wide is None:
            return total, count
        payload = torch.stack([total.detach().to(torch.float64), count.detach().to(torch.float64)])
        status = self._shard.unread.code()  # errors of this call that no host has read
        gathered = Exchange(self._wide, "mean", self._call, payload=payload, status=status).wait()
        summed = gathered.sum(0)  # of the same tensor, in rank order, on every rank
        return summed[0], summed[1].to(count.dtype)

    def fail(self, error: Exception) -> None:
        """Tells the other groups that this one has raised `error`. Does nothing after `reduce`."""
        if self._done or self._wide is None or self._wide.size == 1:
            return
        self._done = True
        with suppress(Exception):  # the error comes back, with the others'; the caller has it
            Exchange(self._wide, "mean", self._call, fault=error).wait()

    def __enter__(self) -> WideMean:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.fail(error)
