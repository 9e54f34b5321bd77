"""`VocabShard`: a layout bound to a process group and this rank. Every operation takes one; nothing is looked up."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.deferral import Habit, UnreadFlags
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.layout import VocabLayout

# Of an exchange's payload, while nothing is known: 4,096 rows of a loss.
_FIRST_BYTES = {"loss": 48 * 1024, "select": 512, "sample": 512, "candidates": 512, "header": 0, "mean": 16}
_WINDOW = 8  # exchanges that a size is remembered for


@dataclass
class Traffic:
    """What this rank has sent: calls and bytes by collective, bytes as a ring algorithm sends them.

    For `b` bytes a rank: all_gather sends `b (tp - 1)`, all_reduce `2 b (tp - 1) / tp`, reduce_scatter of a `b`-byte
    input `b (tp - 1) / tp`.
    """

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)

    def add(self, collective: str, sent: int) -> None:
        self.calls[collective] += 1
        self.bytes[collective] += sent

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()

    @property
    def total_calls(self) -> int:
        return self.calls.total()

    @property
    def total_bytes(self) -> int:
        return self.bytes.total()


class RankGroup:
    """What a collective needs: a process group and what this rank keeps about it.

    Args:
        group: None is a group of this rank alone.
        within: The group whose calls exchange something over this one too: errors, traffic and deferral are its.

    Attributes:
        rank, size: This rank within the group, and its number of ranks.
        traffic: Counts of what its operations have sent.
        payload_sizes: Bytes that the last exchanges of each kind needed, the same on every rank (see `agreement`).
        unread: Flags of errors that the host has not read yet.
        deferred_errors: True: the host reads flags of errors at the next call or in backward; False: at once; None:
            at once except on CUDA.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        traffic: Traffic | None = None,
        within: RankGroup | None = None,
        deferred_errors: bool | None = None,
    ) -> None:
        self.group, self.within = group, within
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.traffic: Traffic = traffic or (within.traffic if within else Traffic())
        self.unread: UnreadFlags = within.unread if within else UnreadFlags()
        self.deferred_errors: bool | None = within.deferred_errors if within else deferred_errors
        self.payload_sizes: dict[str, deque[int]] = {}
        self.headers: dict[tuple[Any, ...], Tensor] = {}
        self.device: torch.device | None = None
        self.buffers: dict[int, Any] = {}  # of `collectives.all_gather_words`, by its number of words
        self._habit, self._generation = Habit(), 0
        self._wider: dict[dist.ProcessGroup, RankGroup] = {}
        self._of_ranks: dict[tuple[int, ...], RankGroup] = {}

    def defers(self, device: torch.device) -> bool:
        """Whether calls on tensors of this device return before the host knows of errors in them."""
        return device.type == "cuda" if self.deferred_errors is None else self.deferred_errors

    @property
    def habit(self) -> Habit:
        """Which call the group expects next."""
        self._drop_what_is_void()
        return self._habit

    def sizes(self, kind: str) -> deque[int]:
        """`payload_sizes` of a kind."""
        self._drop_what_is_void()
        return self.payload_sizes.setdefault(kind, deque([_FIRST_BYTES[kind]] * _WINDOW, maxlen=_WINDOW))

    def _drop_what_is_void(self) -> None:
        """After an error that was read late: the ranks have stopped at different places."""
        if self._generation != self.unread.generation:
            self._habit, self._generation = Habit(), self.unread.generation
            self.payload_sizes.clear()

    def wider(self, group: dist.ProcessGroup) -> RankGroup:
        """Another group of this rank, over which calls of this one exchange something too."""
        if group not in self._wider:
            self._wider[group] = RankGroup(group, within=self)
        return self._wider[group]

    def of_ranks(self, ranks: tuple[int, ...]) -> RankGroup:
        """`wider` of a group of these ranks of the job, in ascending order.

        Collectives:
            Of the first call for them, over these ranks alone: they make the group.
        """
        if ranks not in self._of_ranks:
            self._of_ranks[ranks] = self.wider(dist.new_group([*ranks], use_local_synchronization=True))
        return self._of_ranks[ranks]

    def raise_deferred(self) -> None:
        """Reads all unread flags and raises the first error. Every rank must call it at the same places."""
        self._habit.end()
        self.unread.read()

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGroup:
        """A copied module stays on the same ranks: process groups cannot be copied, and need not be."""
        return self


class VocabShard(RankGroup):
    """This rank's part of the vocabulary, and the group it shares the rest with.

    Args:
        layout: The layout, the same on every rank of the group.
        group: The process group of `layout.tp_size` ranks. None is allowed only at `tp_size` 1, which needs no
            `torch.distributed` and issues no collective.
        deferred_errors: As in `RankGroup`; the same on every rank.

    Attributes:
        start, stop: Its real ids are `[start, stop)`.
        num_valid: `stop - start`; 0 on a rank whose shard is all padding.

    Collectives:
        One, at construction: the ranks compare their layouts.

    Raises:
        LayoutMismatchError: On every rank, when the layouts differ or the group has another size.
    """

    def __init__(
        self, layout: VocabLayout, group: dist.ProcessGroup | None = None, *, deferred_errors: bool | None = None
    ) -> None:
        if group is None and layout.tp_size != 1:
            raise LayoutMismatchError(
                f"a layout over {layout.tp_size} ranks needs their process group: VocabShard(layout, group). "
                "Without a group only tp_size 1 is possible."
            )
        super().__init__(group, deferred_errors=deferred_errors)
        self.layout = layout
        if group is not None:
            _compare_layouts(layout, group, deferred_errors)
        self._token_ids: dict[torch.device, Tensor] = {}
        ids = layout.range(self.rank)
        self.start, self.stop, self.num_valid = ids.start, ids.stop, len(ids)

    @property
    def vocab_size(self) -> int:
        return self.layout.vocab_size

    @property
    def shard_size(self) -> int:
        return self.layout.shard_size

    @property
    def tp_size(self) -> int:
        return self.size

    def token_ids(self, device: torch.device) -> Tensor:
        """int64 `[num_valid]`: its real ids, kept for the next call; not to be written to."""
        if device not in self._token_ids:
            self._token_ids[device] = torch.arange(self.start, self.stop, device=device)
        return self._token_ids[device]

    def slice(self, table: Tensor, dim: int = 0, fill: float = 0.0) -> Tensor:
        """This rank's rows of a whole table of `vocab_size` entries along `dim`, padded to `shard_size` with `fill`."""
        if table.shape[dim] != self.vocab_size:
            raise LayoutMismatchError(
                f"a whole table must have vocab_size {self.vocab_size} entries in dimension {dim}, "
                f"got shape {list(table.shape)}"
            )
        shape = list(table.shape)
        shape[dim] = self.shard_size
        local = table.new_full(shape, fill)
        local.narrow(dim, 0, self.num_valid).copy_(table.narrow(dim, self.start, self.num_valid))
        return local

    def __repr__(self) -> str:
        return f"VocabShard({self.layout}, rank={self.rank}, ids=[{self.start}, {self.stop}))"


def _compare_layouts(layout: VocabLayout, group: dist.ProcessGroup, deferred_errors: bool | None) -> None:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    mine = (layout.vocab_size, layout.padded_size, layout.tp_size)
    dist.all_gather_object(gathered, (mine, deferred_errors), group=group)
    every = [other for other, _ in gathered]
    if any(other != every[0] for other in every) or len(every) != layout.tp_size:
        table = "; ".join(f"rank {r}: V={v} padded to {p} over tp_size {t}" for r, (v, p, t) in enumerate(every))
        raise LayoutMismatchError(
            f"the {len(every)} ranks of the group must hold one layout with tp_size {len(every)}, got {table}. "
            "Build the layout from the same config on every rank, with tp_size equal to the group's size."
        )
    if any(deferred != deferred_errors for _, deferred in gathered):
        table = ", ".join(f"rank {r}: {deferred}" for r, (_, deferred) in enumerate(gathered))
        raise LayoutMismatchError(f"deferred_errors must be the same on every rank of the group, got {table}.")


def device_of(shard: RankGroup) -> torch.device:
    """Where the group's collectives expect their buffers when no tensor argument says so."""
    if shard.device is not None:  # where they were last time
        return shard.device
    if shard.group is not None and dist.get_backend(shard.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
