"""Per-row quantities that ride on the loss's own exchange: for metrics, without gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vocab_parallel.loss.normalizer import Normalizer, Wanted
from vocab_parallel.loss.targets import Targets


class RowOutputs:
    """Collects per-row quantities of the next loss it is passed to: `cross_entropy(..., outputs=rows)`.

    Args:
        names: Of those below, the ones to fill; the others stay None. "entropy" adds 4 bytes a row to the exchange,
            "argmax", "correct" and "margin" together 8.

    Attributes:
        logprob: `log p_target` in nats, 0 for ignored rows.
        entropy: `- sum p log p` in nats, of every row.
        lse: `log sum exp z` in nats, of every row.
        argmax: int64, the global id of the largest score, the lowest id where several are equal.
        correct: bool, argmax equals the target; False for ignored rows. Its mean over valid rows is the accuracy.
        margin: Largest score less the second largest; +inf with one class.
            All have the target's shape, float32 (float64 for float64), the same bits on every rank, no gradient.

    Raises:
        ValueError: An unknown name.
    """

    NAMES = ("logprob", "entropy", "lse", "argmax", "correct", "margin")

    logprob: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None
    argmax: Tensor | None = None
    correct: Tensor | None = None
    margin: Tensor | None = None

    def __init__(self, *names: str) -> None:
        unknown = [name for name in names if name not in self.NAMES]
        if unknown:
            raise ValueError(f"outputs must be among {', '.join(self.NAMES)}; got {', '.join(map(repr, unknown))}")
        self.names = names
        self._chunks: list[list[Tensor]] = []

    @property
    def wanted(self) -> Wanted:
        """What of it the exchange has to carry."""
        return Wanted(expected="entropy" in self.names, top=not {"argmax", "correct", "margin"}.isdisjoint(self.names))

    def begin(self) -> None:
        """Forgets the chunks of a call that failed before its end."""
        self._chunks = []

    def collect(self, normalizer: Normalizer, targets: Targets) -> None:
        """Takes a chunk's rows."""
        self._chunks.append([self._value(name, normalizer, targets) for name in self.names])

    def fill(self, in_order: Callable[[Sequence[Tensor]], Tensor], shape: torch.Size) -> None:
        """Sets the attributes from all chunks, which `in_order` puts together as the rows of `shape`."""
        chunks, self._chunks = self._chunks, []
        for name, parts in zip(self.names, zip(*chunks, strict=True), strict=True):
            setattr(self, name, in_order(parts).view(shape))

    def _value(self, name: str, normalizer: Normalizer, targets: Targets) -> Tensor:
        if name == "logprob":
            return torch.where(targets.valid, normalizer.target_logprob, 0.0)
        if name == "correct":
            assert normalizer.argmax is not None
            return targets.valid & (normalizer.argmax == targets.ids)
        if name == "margin":
            assert normalizer.second is not None
            return normalizer.maximum - normalizer.second
        value: Tensor = getattr(normalizer, name)
        return value
