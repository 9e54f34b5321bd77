"""Targets and the options that turn them into a distribution: ignored rows, label smoothing, reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vocab_parallel.shard import VocabShard


@dataclass(frozen=True)
class LossOptions:
    """What both losses take besides tensors. See `cross_entropy` for their meaning."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing_over: str = "all"

    def check(self) -> None:
        if self.reduction not in ("none", "mean", "sum"):
            raise ValueError(f'reduction must be "none", "mean" or "sum", got {self.reduction!r}')
        if self.smoothing_over not in ("all", "others"):
            raise ValueError(f'smoothing_over must be "all" or "others", got {self.smoothing_over!r}')
        if not (math.isfinite(self.label_smoothing) and 0.0 <= self.label_smoothing <= 1.0):
            raise ValueError(f"label_smoothing must be in [0, 1], got {self.label_smoothing!r}")
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index must be an integer, got {self.ignore_index!r}")

    def weights(self, vocab_size: int) -> tuple[float, float]:
        """`(on_target, uniform)`: the target distribution is `uniform` on every class plus `on_target` on the target.

        "all" spreads `label_smoothing` over the V classes (PyTorch); "others" over the V - 1 that are not the target
        (NeMo, Megatron's documented intent). With one class there are no others, and nothing to spread.
        """
        if self.smoothing_over == "all":
            return 1.0 - self.label_smoothing, self.label_smoothing / vocab_size
        if vocab_size == 1:
            return 1.0, 0.0
        uniform = self.label_smoothing / (vocab_size - 1)
        return 1.0 - self.label_smoothing - uniform, uniform

    def reduce(self, rows: Tensor, count: Tensor) -> Tensor:
        """Row losses `[T]` to the reduced loss; the mean of no valid rows is 0."""
        if self.reduction == "none":
            return rows
        total = rows.sum(dtype=torch.float64)  # T float32 terms: their sum should not cost the loss a digit
        return (total if self.reduction == "sum" else total / count.clamp(min=1)).to(rows.dtype)


class Targets:
    """Global targets `[T]` as one shard sees them.

    Attributes:
        valid: bool `[T]`, not ignored.
        owned: bool `[T]`, valid and in this shard.
        local: int64 `[T]`, this shard's row of the target, 0 where not owned.
        count: int64 scalar tensor, number of valid rows.
    """

    def __init__(self, target: Tensor, shard: VocabShard, ignore_index: int) -> None:
        self.valid = target != ignore_index
        self.owned = self.valid & (target >= shard.start) & (target < shard.stop)
        self.local = torch.where(self.owned, target.to(torch.int64) - shard.start, 0)
        self.count = self.valid.sum()

    def pick(self, logits: Tensor) -> Tensor:
        """The owned target logits of `logits` `[T, num_valid]`, 0 elsewhere: float32 (float64 for float64) `[T]`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if logits.shape[1] == 0:
            return logits.new_zeros(len(logits), dtype=dtype)
        picked = logits.gather(1, self.local[:, None])[:, 0].to(dtype)
        return torch.where(self.owned, picked, 0.0)  # select, not multiply: the clamped column may hold -inf or NaN

    def rows(self, index: Tensor | slice) -> Targets:
        """The targets of some rows (`count` stays that of all)."""
        some = object.__new__(Targets)
        some.valid, some.owned, some.local = self.valid[index], self.owned[index], self.local[index]
        some.count = self.count
        return some
