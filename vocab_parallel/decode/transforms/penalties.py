"""The three penalties over a window of recent ids, in one step, as llama.cpp has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.transform import PROCESSED, RowValue, Transform, View, row_values
from vocab_parallel.select.scores import Scores

_LARGEST = torch.finfo(torch.float32).max
_BOUNDS: dict[str, dict[str, float | bool]] = {
    "repeat": {"low": 0.0, "high": _LARGEST, "low_open": True},
    "frequency": {"low": -_LARGEST, "high": _LARGEST},
    "presence": {"low": -_LARGEST, "high": _LARGEST},
}


@dataclass(frozen=True, eq=False)
class RecentPenalties(Transform):
    """Of the last n ids, prompt included: `z_v / r` where `z_v > 0`, else `r z_v`; then minus `f n_v + c`.

    n_v is how often id v is among them; ids that are not keep their scores.

    Args:
        last_n: n; 0 is off, -1 all ids.
        repeat: r > 0; 1 is off.
        frequency: f in nats an occurrence.
        presence: c in nats.

    Source:
        llama.cpp's penalties sampler (`llama_sampler_init_penalties`).
    """

    name: ClassVar[str] = "recent_penalties"
    gives: ClassVar[str | None] = PROCESSED
    per_row: ClassVar[tuple[str, ...]] = ("last_n", "repeat", "frequency", "presence")
    last_n: RowValue = 64
    repeat: RowValue = 1.0
    frequency: RowValue = 0.0
    presence: RowValue = 0.0

    def check(self, vocab_size: int, rows: int | None) -> None:
        count = rows if rows is not None else self.row_count() or 1
        row_values(self.last_n, count, f"{self.name}'s last_n", low=-1, dtype=torch.int64)
        for name in _BOUNDS:
            self._value(name, count)

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        z = scores.values
        last_n = row_values(self.last_n, len(z), f"{self.name}'s last_n", dtype=torch.int64, device=z.device)
        there = view.prefix >= 0
        from_end = there.to(torch.int64).flip(1).cumsum(1).flip(1)  # 1 for the last id
        recent = torch.where(there & ((from_end <= last_n[:, None]) | (last_n < 0)[:, None]), view.prefix, -1)
        counts = scores.counts(recent)
        repeat, frequency, presence = (self._value(name, len(z), z)[:, None] for name in _BOUNDS)
        moved = torch.where(z <= 0, z * repeat, z / repeat) - (counts * frequency + presence)
        return scores.with_values(torch.where(counts > 0, moved, z))

    def _value(self, name: str, rows: int, like: Tensor | None = None) -> Tensor:
        device = None if like is None else like.device
        value = row_values(getattr(self, name), rows, f"{self.name}'s {name}", device=device, **_BOUNDS[name])  # type: ignore[arg-type]
        return value if like is None else value.to(like.dtype)
