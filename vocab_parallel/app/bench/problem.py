"""The tensors of a loss benchmark: made from a seed, the same for every contestant."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

# Of the logits: about that of a language model in training.
_STANDARD_DEVIATION = 2.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a problem, and this rank's place in it."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    device: torch.device
    rank: int
    world: int

    @property
    def shard_size(self) -> int:
        """Rows of the head on each rank."""
        return self.vocab // self.world

    @property
    def gradient_bytes(self) -> int:
        """Of dH and dW, each in its tensor's dtype."""
        return (self.tokens + self.shard_size) * self.hidden * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Problem:
    """One loss step: hidden states and targets the same on every rank, and this rank's rows of the head."""

    shape: Shape
    hidden: Tensor  # [T, D], requires grad
    weight: Tensor  # [V / ranks, D], requires grad
    target: Tensor  # [T], global ids

    def clear(self) -> None:
        """Forgets the gradients of the last step."""
        self.hidden.grad = self.weight.grad = None


def make(shape: Shape, seed: int, like: Problem | None = None) -> Problem:
    """Draws a problem; it shares the weight of `like` if that has the same shard, so that a sweep holds it once."""
    hidden = torch.randn(shape.tokens, shape.hidden, generator=_generator(seed, 0))
    target = torch.randint(shape.vocab, (shape.tokens,), generator=_generator(seed, 1))
    if like is not None and dataclasses.replace(like.shape, tokens=shape.tokens) == shape:
        weight = like.weight
    else:
        weight = weight_rows(shape, shape.rank, seed).requires_grad_()
    return Problem(shape, hidden.to(shape.device, shape.dtype).requires_grad_(), weight, target.to(shape.device))


def weight_rows(shape: Shape, rank: int, seed: int) -> Tensor:
    """The rows of the head that `rank` holds: `[V / ranks, D]`."""
    rows = torch.randn(shape.shard_size, shape.hidden, generator=_generator(seed, 2 + rank))
    return rows.mul_(_STANDARD_DEVIATION * shape.hidden**-0.5).to(shape.device, shape.dtype)


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + stream)
