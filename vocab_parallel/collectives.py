"""The only caller of `torch.distributed` tensor collectives. Each is counted. (`adjoints` has them in autograd.)"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.deferral import Step
from vocab_parallel.errors import CollectiveError
from vocab_parallel.shard import RankGroup, VocabShard

# Renamed in torch 2.13, where the old names warn.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

_KNOWN = (torch.uint8, torch.int64)  # to every backend, and what calls send most; others go as bytes

_KEPT_BUFFERS = 64  # of `all_gather_words`
_AT_ONCE = Step("all_gather_at_once", (), torch.int64, torch.device("cpu"))

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Issue = Callable[[], Any]


class Pending:
    """A collective in flight. `wait` returns its result; a failure names the collective and this rank."""

    def __init__(self, name: str, group: RankGroup, result: Tensor, work: Any, keep: Tensor | None = None) -> None:
        self._name, self._group, self._result, self._work, self._keep = name, group, result, work, keep

    def wait(self) -> Tensor:
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _failed(self._name, self._group, error) from error
            self._work = self._keep = None
        return self._result


def _start(
    name: str, group: RankGroup, sent: int, out: Tensor, keep: Tensor, issue: _Issue, note: Step | None = None
) -> Pending:
    group.traffic.add(name, sent)
    group.habit.note(note or Step(name, tuple(keep.shape), keep.dtype, keep.device))
    try:
        return Pending(name, group, out, issue(), keep)
    except RuntimeError as error:
        raise CollectiveError(
            f"{name} could not start on rank {group.rank} of the {group.size} ranks of its group: {short(error)}. "
            f"{lost_rank(error) or ''}".rstrip()
        ) from error


def _failed(name: str, group: RankGroup, error: BaseException) -> CollectiveError:
    return CollectiveError(
        f"{name} failed on rank {group.rank} of the {group.size} ranks of its group: "
        f"{short(error)}. {lost_rank(error) or 'Likely another rank made a different call: see its log.'}"
    )


def lost_rank(error: BaseException) -> str | None:
    """What a backend's error says of the other ranks, in words; None if it is about something else."""
    text = str(error).lower()
    if any(words in text for words in ("timed out", "timeout")):
        return "A rank did not come in time: it hangs, it is slower than the timeout, or it makes another call."
    if any(words in text for words in ("closed by peer", "connection reset", "broken pipe", "socketcreatefailed")):
        return "Another rank has ended; its log has the first error."
    return None


def short(error: BaseException) -> str:
    """A backend's error without what gloo adds to each of its own."""
    return str(error).partition(" This is typically")[0].rstrip(". ")


def all_gather(group: RankGroup, x: Tensor) -> Pending:
    """Starts gathering equal-shaped `x` from all ranks: `[tp, *x.shape]` in rank order."""
    if group.size == 1:
        return Pending("all_gather", group, x[None], None)
    x = x.contiguous()
    flat = x.new_empty(group.size * x.numel())
    out = flat.view(group.size, *x.shape)
    sent = x.nbytes * (group.size - 1)
    mine, every = x if x.dim() == 1 else x.view(-1), flat
    if x.dtype not in _KNOWN:
        if x.numel() < 2:  # contiguous with any stride, and as bytes only with stride 1
            mine = mine.clone(memory_format=torch.contiguous_format)
        mine, every = mine.view(torch.uint8), flat.view(torch.uint8)
    return _start(
        "all_gather", group, sent, out, x,
        lambda: getattr(dist, _ALL_GATHER)(every, mine, group=group.group, async_op=True),
    )  # fmt: skip


def all_gather_at_once(group: RankGroup, x: Tensor) -> Pending:
    """`all_gather` of few bytes, where a step costs more than they do.

    gloo's all-gather passes blocks round a ring, in tp - 1 steps that wait for each other. So on a CPU every rank sends
    its block to all the others itself, by an all-to-all: the same bytes in one step. NCCL chooses for itself.
    Gives `[tp, *x.shape]` in rank order; counted as an all-gather.
    """
    if group.size == 1 or x.device.type != "cpu":
        return all_gather(group, x)
    return _send_to_all(group, x.reshape(-1).repeat(group.size), x.new_empty(group.size, *x.shape), x)


def all_gather_words(group: RankGroup, words: list[int]) -> list[list[int]]:
    """`all_gather_at_once` of n of Python's integers, on a CPU, to the end: `[tp][n]` in rank order."""
    n, size = len(words), group.size
    if n not in group.buffers:  # a tensor more costs more than all of the host's work here
        if len(group.buffers) == _KEPT_BUFFERS:
            group.buffers.clear()
        group.buffers[n] = _Buffers.of(n, size)
    sent, mine, received, every = group.buffers[n]
    struct.pack_into(f"={n * size}q", sent, 0, *words * size)
    group.traffic.add("all_gather", 8 * n * (size - 1))
    group.habit.note(_AT_ONCE._replace(shape=(n,)))
    try:
        dist.all_to_all_single(every, mine, group=group.group)
    except RuntimeError as error:
        group.buffers.clear()  # the backend may still write to them
        raise _failed("all_gather", group, error) from error
    gathered = memoryview(received).cast("q").tolist()
    return [gathered[at : at + n] for at in range(0, n * size, n)]


class _Buffers(NamedTuple):
    """What `all_gather_words` sends and receives, and both as tensors of the same bytes."""

    sent: bytearray
    mine: Tensor
    received: bytearray
    every: Tensor

    @classmethod
    def of(cls, n: int, size: int) -> _Buffers:
        sent, received = bytearray(8 * n * size), bytearray(8 * n * size)
        return cls(
            sent, torch.frombuffer(sent, dtype=torch.int64), received, torch.frombuffer(received, dtype=torch.int64)
        )


def broadcast_words(group: RankGroup, words: list[int], root: int) -> list[int]:
    """The `words` of rank `root` of the group, `[n]`, on every rank; the others pass any n. On a CPU, to the end.

    Like `gather_words_to`, not within calls that ranks expect of each other (see `Habit`): ranks send different bytes.
    """
    buffer = torch.tensor(words)
    sent = buffer.nbytes * (group.size - 1) if group.rank == root else 0
    return _start(
        "broadcast", group, sent, buffer, buffer,
        lambda: dist.broadcast(buffer, group=group.group, group_src=root, async_op=True),
    ).wait().tolist()  # fmt: skip


def gather_words_to(group: RankGroup, words: list[int], root: int) -> list[list[int]] | None:
    """The ranks' `words` `[n]` in rank order on rank `root` of the group, None on the others. On a CPU, to the end."""
    mine, here = torch.tensor(words), group.rank == root
    every = mine.new_empty(group.size, len(words)) if here else None
    found = _start(
        "gather", group, 0 if here else mine.nbytes, mine if every is None else every, mine,
        lambda: dist.gather(
            mine, None if every is None else list(every.unbind()), group=group.group, group_dst=root, async_op=True
        ),
    ).wait()  # fmt: skip
    return found.tolist() if here else None


def _send_to_all(group: RankGroup, sent: Tensor, out: Tensor, x: Tensor) -> Pending:
    """Starts sending the blocks of `sent`, each of them `x`, into `out`."""
    mine, every = sent, out.view(-1)
    if x.dtype not in _KNOWN:
        mine, every = mine.view(torch.uint8), every.view(torch.uint8)
    return _start(
        "all_gather", group, x.nbytes * (group.size - 1), out, sent,
        lambda: dist.all_to_all_single(every, mine, group=group.group, async_op=True),
        Step("all_gather_at_once", tuple(x.shape), x.dtype, x.device),
    )  # fmt: skip


def all_reduce_(group: RankGroup, x: Tensor) -> Pending:
    """Starts summing contiguous `x` over the ranks, in place; the same bits on every rank."""
    if group.size == 1:
        return Pending("all_reduce", group, x, None)
    sent = 2 * x.nbytes * (group.size - 1) // group.size
    return _start("all_reduce", group, sent, x, x, lambda: dist.all_reduce(x, group=group.group, async_op=True))


def reduce_scatter(group: RankGroup, x: Tensor) -> Pending:
    """Starts summing `x` `[tp * n, ...]` over the ranks and keeping this rank's block: `[n, ...]`."""
    if group.size == 1:
        return Pending("reduce_scatter", group, x, None)
    x = x.contiguous()
    out = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    sent = x.nbytes * (group.size - 1) // group.size
    return _start(
        "reduce_scatter", group, sent, out, x,
        lambda: getattr(dist, _REDUCE_SCATTER)(out, x, group=group.group, async_op=True),
    )  # fmt: skip


def all_to_all(group: RankGroup, x: Tensor) -> Pending:
    """Starts sending block r of `x` `[tp * n, ...]` to rank r: `[tp * n, ...]`, the blocks that the ranks sent here."""
    if group.size == 1:
        return Pending("all_to_all", group, x, None)
    x = x.contiguous()
    out = torch.empty_like(x)
    sent = x.nbytes * (group.size - 1) // group.size
    return _start(
        "all_to_all", group, sent, out, x, lambda: dist.all_to_all_single(out, x, group=group.group, async_op=True)
    )


def all_to_all_rows(group: RankGroup, x: Tensor, sent: list[int], received: list[int]) -> Pending:
    """Starts sending the first `sent[0]` rows of `x` `[sum(sent), ...]` to rank 0, the next to rank 1, and so on.

    Gives `[sum(received), ...]`: `received[r]` rows of each rank r, in rank order. Not within calls that ranks expect
    of each other (see `Habit`): no other rank could imitate it.
    """
    if group.size == 1:
        return Pending("all_to_all", group, x, None)
    x = x.contiguous()
    out = x.new_empty(sum(received), *x.shape[1:])
    row_bytes = x.nbytes // max(1, len(x))
    sent_bytes = row_bytes * (sum(sent) - sent[group.rank])
    return _start(
        "all_to_all", group, sent_bytes, out, x,
        lambda: dist.all_to_all_single(out, x, received, sent, group=group.group, async_op=True),
    )  # fmt: skip


def repeat(group: RankGroup, step: Step) -> None:
    """Issues a collective like `step`, of zeros."""
    collectives = {
        "all_gather": all_gather, "all_gather_at_once": all_gather_at_once, "all_reduce": all_reduce_,
        "reduce_scatter": reduce_scatter, "all_to_all": all_to_all,
    }  # fmt: skip
    collectives[step.name](group, torch.zeros(step.shape, dtype=step.dtype, device=step.device)).wait()


def gather_rows(group: RankGroup, x: Tensor, rows: list[int]) -> Tensor:
    """The ranks' `x` `[rows[rank], ...]` in rank order: `[sum(rows), ...]`. One all-gather of `max(rows)`."""
    if group.size == 1:
        return x
    blocks = all_gather(group, pad_rows(x, max(rows))).wait()
    return torch.cat([blocks[rank, :count] for rank, count in enumerate(rows)])


def scatter_rows(group: RankGroup, x: Tensor, rows: list[int]) -> Tensor:
    """Sums `x` `[sum(rows), ...]` over the ranks, keeps this rank's rows: `[rows[rank], ...]`. One reduce-scatter."""
    if group.size == 1:
        return x
    blocks = torch.cat([pad_rows(block, max(rows)) for block in torch.split(x, rows)])
    return reduce_scatter(group, blocks).wait()[: rows[group.rank]]


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x` with zero rows added up to `rows`."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def gather_vocab(shard: VocabShard, local: Tensor, dim: int = 0) -> Tensor:
    """The whole table of `vocab_size` real rows along `dim`, on every rank, from each rank's `shard_size` rows.

    Collectives:
        One all-gather of `local`.
    """
    shard.habit.end()  # not a part of the call before
    blocks = all_gather(shard, local.detach().movedim(dim, 0)).wait()
    return blocks.flatten(0, 1)[: shard.vocab_size].movedim(0, dim)


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """`function.apply`, which torch leaves untyped; out of autocast's reach, where float32 sums stay float32."""
    device = args[0].device.type
    off = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
    with off:
        result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Leaves an operation out of the graphs of `torch.compile`, which would break at each of its collectives."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling():  # only then: `disable` imports the compiler, which takes seconds
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return,no-untyped-call]
        return function(*args, **kwargs)

    return wrapper
