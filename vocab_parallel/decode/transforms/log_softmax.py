"""Normalization as a transform: scores become log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vocab_parallel.decode.transforms.transform import LOGPROB, Transform, View
from vocab_parallel.select.masses import measure
from vocab_parallel.select.scores import Scores, with_largest


@dataclass(frozen=True, eq=False)
class Normalize(Transform):
    """`log p_v = z_v - log sum_j exp z_j`, in nats: the row's own distribution, renormalised over what is left of it.

    Changes no choice by itself. Where it stands decides what a later transform that reads probabilities reads.

    Collectives:
        Those of `measure`.
    """

    name: ClassVar[str] = "normalize"
    gives: ClassVar[str | None] = LOGPROB

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        scores = with_largest(scores)
        masses = measure(scores)
        # the gap first: a formed log-sum-exp would lose digits of large scores
        values = (scores.values.double() - masses.largest.double()[:, None]) - masses.log_total[:, None]
        largest = -masses.log_total
        return scores.with_values(values.to(scores.values.dtype), largest.to(scores.values.dtype))
