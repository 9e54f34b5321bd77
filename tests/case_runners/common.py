"""What the runners of the shared cases have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.cases import Case
from tests.tolerances import bits
from vocab_parallel import (
    VocabLayout,
    VocabShard,
)


@dataclass(frozen=True)
class Ranks:
    """Where one rank stands in a run."""

    rank: int
    tp: int
    world: int

    def shard(self, case: Case, vocab: int | None = None) -> VocabShard:
        """A shard of the case's layout, over the whole world, or over this rank's block of `tp` ranks."""
        size = case.shard_size(self.tp) if vocab is None else math.ceil(vocab / self.tp)
        vocab = case.vocab_size() if vocab is None else vocab
        layout = VocabLayout.from_padded(vocab, size * self.tp, self.tp)
        return VocabShard(layout, group=self.group())

    def group(self) -> dist.ProcessGroup | None:
        if self.tp == 1:
            return None
        if self.world == self.tp:
            return dist.group.WORLD
        groups = [dist.new_group(list(range(at, at + self.tp))) for at in range(0, self.world, self.tp)]
        return groups[self.rank // self.tp]

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp


class Expected:
    """A case's `expect`, which remembers what was looked at."""

    def __init__(self, case: Case) -> None:
        self._left = dict(case.expect)

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def take(self, key: str) -> Any:
        return self._left.pop(key)

    def left(self) -> set[str]:
        return set(self._left)


@dataclass(frozen=True)
class Runner:
    """How an operation of the file is run and compared. Without `observe` nothing runs on ranks."""

    check: Callable[[Case, str, int, Expected, list[Any]], None]
    observe: Callable[[Case, torch.dtype, Ranks], Any] | None = None
    world: int | None = None  # ranks to start when that is more than the TP size
    every_dtype: bool = True  # or the case's own only, where no number of the case depends on it


def differentiate(
    loss_of: Callable[..., torch.Tensor], leaves: list[torch.Tensor], upstream: Any = None
) -> dict[str, Any]:
    """Loss and gradients, and whether the inputs stayed as they were and a second backward gives the same bits."""
    inputs = [leaf.clone().requires_grad_() for leaf in leaves]
    loss = loss_of(*inputs)
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
    grads = torch.autograd.grad(loss, inputs, upstream, retain_graph=True)
    again = torch.autograd.grad(loss, inputs, upstream)
    return {
        "loss": loss.detach(),
        "grads": [grad.clone() for grad in grads],
        "second backward": all(same_bits(one, two) for one, two in zip(grads, again, strict=True)),
        "inputs unchanged": all(same_bits(one.detach(), leaf) for one, leaf in zip(inputs, leaves, strict=True)),
    }


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(bits(one), bits(two))


def replicated(what: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The one value that all ranks hold, bit for bit."""
    for rank, tensor in enumerate(tensors):
        assert same_bits(tensor, tensors[0]), f"{what}: ranks 0 and {rank} differ: {tensors[0]} and {tensor}"
    return tensors[0]


def joined(what: str, case: Case, dim: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole table from the shards' parts, whose padding must be zero."""
    size, vocab = case.shard_size(len(parts)), case.vocab_size()
    real = []
    for rank, part in enumerate(parts):
        assert part.shape[dim] == size, f"{what}: rank {rank} has shape {list(part.shape)}"
        count = max(0, min(size, vocab - rank * size))
        assert not part.narrow(dim, count, size - count).any(), f"{what}: padding of rank {rank} has a gradient"
        real.append(part.narrow(dim, 0, count))
    return torch.cat(real, dim)
