"""What both losses take besides tensors: the score transform, the target distribution, the reduction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How raw logits x become scores: `z = softcap tanh(x / softcap) / temperature`."""

    softcap: float | None = None
    temperature: float = 1.0

    def check(self) -> None:
        if self.softcap is not None:
            _check_positive("softcap", self.softcap)
        _check_positive("temperature", self.temperature)

    def apply_(self, raw: Tensor) -> Tensor:
        """Turns raw logits into scores, in place. Give it float32 or float64."""
        return self.apply_with_slope_(raw, wanted=False)[0]

    def apply_with_slope_(self, raw: Tensor, wanted: bool = True) -> tuple[Tensor, Tensor | None]:
        """`apply_`, and `d capped / d raw = 1 - tanh²(raw / softcap)`; None without a softcap.

        The factor `1 / temperature` of the scores' derivative is not in it.
        """
        if self.softcap is None:
            # Division by a number rounds differently on a GPU.
            return (raw if self.temperature == 1.0 else raw.mul_(1.0 / self.temperature)), None
        tanh = raw.mul_(1.0 / self.softcap).tanh_()
        slope = 1.0 - tanh.square() if wanted else None
        return tanh.mul_(self.softcap / self.temperature), slope


@dataclass(frozen=True)
class LossOptions:
    """See `cross_entropy` for their meaning.

    Attributes:
        soft: The target is a distribution over the vocabulary: "probabilities" or "log-probabilities"; "" for ids.
        relative: Subtract the target's own entropy: the Kullback-Leibler divergence instead of the cross entropy.
    """

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing_over: str = "all"
    z_loss: float = 0.0
    scores: Scores = field(default_factory=Scores)
    soft: str = ""
    relative: bool = False

    def check(self) -> None:
        if self.reduction not in ("none", "mean", "sum"):
            raise ValueError(f'reduction must be "none", "mean" or "sum", got {self.reduction!r}')
        if self.smoothing_over not in ("all", "others"):
            raise ValueError(f'smoothing_over must be "all" or "others", got {self.smoothing_over!r}')
        if not (is_number(self.label_smoothing) and 0.0 <= self.label_smoothing <= 1.0):
            raise ValueError(f"label_smoothing must be in [0, 1], got {self.label_smoothing!r}")
        if not (is_number(self.z_loss) and self.z_loss >= 0.0):
            raise ValueError(f"z_loss must be a finite number, at least 0, got {self.z_loss!r}")
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index must be an integer, got {self.ignore_index!r}")
        if self.soft and self.label_smoothing and self.smoothing_over == "others":
            raise ValueError('smoothing_over="others" needs targets that are ids: a distribution has no other classes')
        self.scores.check()

    def weights(self, vocab_size: int) -> tuple[float, float]:
        """`(on_target, uniform)`: the target distribution is `uniform` everywhere plus `on_target` times the target.

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


def _check_positive(name: str, value: object) -> None:
    if not (is_number(value) and value > 0):  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def is_number(value: object) -> bool:
    """Whether `value` is a finite int or float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
