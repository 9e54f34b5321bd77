"""Processors that move scores: biases and penalties, by global id on the columns that this rank holds.

None of them has a collective: what a rank needs to know is in the parameters and in the requests' ids, which every rank
has. The same works on candidates that every rank holds. Those that remove ids are in `bans`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.bans import BadWords, Force, MinLength, NoRepeatNgram, Suppress
from vocab_parallel.decode.transforms.bias import Bias
from vocab_parallel.decode.transforms.history import (
    SCOPES,
    Processor,
    changed,
    check_choice,
    check_table,
    ids_of,
    occurrences,
)
from vocab_parallel.decode.transforms.row_transform import LARGEST, SMALLEST, Bounds
from vocab_parallel.decode.transforms.transform import RowValue, View, row_values
from vocab_parallel.select.scores import Scores

__all__ = [
    "BadWords", "Bias", "Force", "FrequencyPenalty", "MinLength", "NoRepeatNgram", "PresencePenalty", "Prior",
    "RepetitionPenalty", "Suppress",
]  # fmt: skip

_FINITE: Mapping[str, float] = {"low": -LARGEST, "high": LARGEST}
_Self = TypeVar("_Self", bound="Prior")


@dataclass(frozen=True, eq=False)
class _Penalty(Processor):
    """A penalty on the ids that have occurred."""

    bounds: ClassVar[Bounds] = {"penalty": _FINITE}
    per_row: ClassVar[tuple[str, ...]] = ("penalty",)
    penalty: RowValue = 0.0
    scope: str = "generated"

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        check_choice(self.scope, SCOPES, f"{self.name}'s scope")


@dataclass(frozen=True, eq=False)
class RepetitionPenalty(_Penalty):
    """`z_v / r` where `z_v > 0`, else `r z_v`, for every id that has occurred: lower either way if r > 1.

    Args:
        penalty: r > 0; 1 is off.
        scope: Which ids have occurred: "all", those "generated", or those of the "prompt".

    Source:
        Keskar et al. 2019, "CTRL", section 4.1; the form by sign as in Transformers, vLLM and llama.cpp.
    """

    name: ClassVar[str] = "repetition_penalty"
    bounds: ClassVar[Bounds] = {"penalty": {"low": SMALLEST, "high": LARGEST}}  # z / r is a number
    penalty: RowValue = 1.0
    scope: str = "all"

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        r = self.row("penalty", scores.rows, scores.values)

        def lower(seen: Tensor, rows: Tensor, places: Tensor) -> Tensor:
            return torch.where(seen < 0, seen * r[rows], seen / r[rows])

        return changed(scores, ids_of(view, self.scope), lower)


@dataclass(frozen=True, eq=False)
class FrequencyPenalty(_Penalty):
    """`z_v - c n_v`, n_v being how often id v has occurred.

    Args:
        penalty: c in nats an occurrence, any sign; 0 is off.
        scope: As in `RepetitionPenalty`.

    Source:
        `frequency_penalty` of the OpenAI API, which counts the generated ids.
    """

    name: ClassVar[str] = "frequency_penalty"

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        c = self.row("penalty", scores.rows, scores.values)
        ids = ids_of(view, self.scope)
        counts = occurrences(ids)
        return changed(scores, ids, lambda seen, rows, places: seen - c[rows] * counts[rows, places])


@dataclass(frozen=True, eq=False)
class PresencePenalty(_Penalty):
    """`z_v - c` for every id that has occurred, however often.

    Args:
        penalty: c in nats, any sign; 0 is off.
        scope: As in `RepetitionPenalty`.

    Source:
        `presence_penalty` of the OpenAI API, which looks at the generated ids.
    """

    name: ClassVar[str] = "presence_penalty"

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        c = self.row("penalty", scores.rows, scores.values)
        return changed(scores, ids_of(view, self.scope), lambda seen, rows, places: seen - c[rows])


@dataclass(frozen=True, eq=False)
class Prior(Processor):
    """`z_v - s log pi_v`, pi being how frequent the ids are in some text: `pi_v = (f_v + a) / sum(f + a)`.

    Args:
        frequencies: `[V]` f, counts or probabilities, at least 0.
        smoothing: a, added to every frequency. At 0 an id of frequency 0 is an error: its prior has no logarithm.
        strength: s; 0 is off, 1 takes the whole prior away.
    """

    name: ClassVar[str] = "prior"
    bounds: ClassVar[Bounds] = {"strength": _FINITE}
    per_row: ClassVar[tuple[str, ...]] = ("strength",)
    frequencies: Tensor | Sequence[float]
    smoothing: float
    strength: RowValue = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "frequencies", torch.as_tensor(self.frequencies, dtype=torch.float64))

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        row_values(self.smoothing, 1, "prior's smoothing", low=0.0, high=LARGEST)
        check_table(self.frequencies, vocab_size, "prior's frequencies")
        assert isinstance(self.frequencies, Tensor)
        f = self.frequencies
        bad = (~(f.isfinite() & (f >= 0) & (f + self.smoothing > 0))).nonzero()
        if len(bad):
            token_id = int(bad[0, 0])
            raise ValueError(
                f"prior's frequency of token id {token_id} is {f[token_id].item()}: frequencies must be "
                "finite and at least 0, and above 0 if smoothing is 0. Give a smoothing above 0."
            )

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        z, s = scores.values, self.row("strength", scores.rows, scores.values)[:, None]
        return scores.with_values(z - s * scores.take(self.log_prior.to(z.device, z.dtype)))

    def for_rows(self: _Self, index: Sequence[int]) -> _Self:
        chosen = super().for_rows(index)
        chosen.__dict__["log_prior"] = self.log_prior  # a row's strength is its own, the prior is of all
        return chosen

    @cached_property
    def log_prior(self) -> Tensor:
        """`log pi`, float64 `[V]`, in nats."""
        smoothed = [one + self.smoothing for one in torch.as_tensor(self.frequencies).tolist()]
        total = math.fsum(smoothed)
        return torch.tensor([math.log(one / total) for one in smoothed], dtype=torch.float64)
