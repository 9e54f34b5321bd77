"""Controllers: warpers whose strength follows the row's entropy, or what the request has drawn so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.row_transform import LARGEST, Bounds, RowTransform
from vocab_parallel.decode.transforms.transform import Choice, RowValue, View
from vocab_parallel.decode.transforms.truncation import entropy_temperature, keep_surprise
from vocab_parallel.select.filters import temper
from vocab_parallel.select.scores import Scores, with_peak

__all__ = ["DynamicTemperature", "MirostatV2"]

_LN2 = math.log(2.0)
_LARGE = 1e6  # more than any use of an exponent, of bits, of a gain


@dataclass(frozen=True, eq=False)
class DynamicTemperature(RowTransform):
    """`z / T` with `T = low + (high - low) (H / log n)**exponent`: the flatter the row, the nearer to `high`.

    H is the entropy in nats of the n tokens that are left. A row of one token stays as it is; a T of 0 is greedy. T is
    rounded to float32.

    Attributes:
        low, high: Temperatures, `0 <= low <= high`.
        exponent: At least 0; above 1 only flat rows get near `high`.

    Source:
        llama.cpp's `temp_ext` sampler: its `temp - delta` and `temp + delta` are `low` and `high`.
    """

    name: ClassVar[str] = "dynamic_temperature"
    bounds: ClassVar[Bounds] = {
        "low": {"low": 0.0},
        "high": {"low": 0.0, "high": LARGEST},
        "exponent": {"low": 0.0, "high": _LARGE},
    }
    per_row: ClassVar[tuple[str, ...]] = ("low", "high", "exponent")
    low: RowValue = 1.0
    high: RowValue = 1.0
    exponent: RowValue = 1.0

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        count = self.count(rows)
        pairs = zip(self.row("low", count).tolist(), self.row("high", count).tolist(), strict=True)
        for row, (low, high) in enumerate(pairs):
            if low > high:
                raise ValueError(
                    f"dynamic_temperature's low must be at most its high, got {low!r} and {high!r} in row {row}: "
                    "they are the temperatures of the sharpest and of the flattest row."
                )

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        scores = with_peak(scores)  # whatever the entropies say, `temper` then exchanges nothing
        bounds = (self.row(name, scores.rows) for name in ("low", "high", "exponent"))
        return temper(scores, entropy_temperature(scores, *bounds))


@dataclass(frozen=True, eq=False)
class MirostatV2(RowTransform):
    """Keeps what surprises by at most mu bits, and moves mu so that the drawn tokens surprise by tau on average.

    After each draw `mu -= eta (-log2 q(drawn) - tau)`, q being the distribution that the token was drawn from: put it
    last in a policy. mu begins at `2 tau`. It is not clamped: where even the best token surprises by more than mu, that
    one alone stays, its surprise is 0, and mu rises.

    State:
        mu: float64 `[T]`, bits; belongs to the request. Rows that are not active keep theirs.

    Attributes:
        tau: Target surprise in bits a token, at least 0.
        eta: Gain, at least 0.

    Source:
        Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", algorithm 1
        with the truncation by surprise of llama.cpp's `mirostat_v2`.
    """

    name: ClassVar[str] = "mirostat_v2"
    bounds: ClassVar[Bounds] = {
        "tau": {"low": 0.0, "high": _LARGE},
        "eta": {"low": 0.0, "high": _LARGE},
    }
    per_row: ClassVar[tuple[str, ...]] = ("tau", "eta")
    tau: RowValue = 5.0
    eta: RowValue = 0.1

    def start(self, rows: int) -> dict[str, Tensor]:
        return {"mu": 2 * self.row("tau", rows)}

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_surprise(scores, state["mu"])

    def after(self, state: dict[str, Tensor], choice: Choice) -> dict[str, Tensor]:
        mu = state["mu"]
        tau, eta = (self.row(name, len(mu)).to(mu.device) for name in ("tau", "eta"))
        surprise = choice.logprobs.to(mu.device) / -_LN2
        return {"mu": torch.where(choice.active.to(mu.device), mu - eta * (surprise - tau), mu)}
