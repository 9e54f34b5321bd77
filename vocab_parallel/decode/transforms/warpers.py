"""Warpers as transforms of a policy: what changes the distribution of a row, or cuts its support, by the row alone.

Each names the parameters of a function on scores. Every parameter is a number, or one for each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.row_transform import LARGEST, MASS, SHARE, Bounds, RowTransform
from vocab_parallel.decode.transforms.transform import RowValue, View
from vocab_parallel.decode.transforms.truncation import keep_epsilon, keep_eta, keep_top_n_sigma, keep_typical
from vocab_parallel.select.filters import keep_min_p, keep_top_k, keep_top_p, temper
from vocab_parallel.select.scores import Scores

__all__ = ["Epsilon", "Eta", "MinP", "Temperature", "TopK", "TopNSigma", "TopP", "Typical"]


@dataclass(frozen=True, eq=False)
class Temperature(RowTransform):
    """`z / T`. 0 (and what is below 2**-64) keeps the best token alone. T in [0, 3.4e38], float32's."""

    name: ClassVar[str] = "temperature"
    bounds: ClassVar[Bounds] = {"temperature": {"low": 0.0, "high": LARGEST}}
    per_row: ClassVar[tuple[str, ...]] = ("temperature",)
    temperature: RowValue = 1.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return temper(scores, self.row("temperature", scores.rows))


@dataclass(frozen=True, eq=False)
class TopK(RowTransform):
    """The k best by value descending, then id ascending: exactly k. From `vocab_size` up it is off."""

    name: ClassVar[str] = "top_k"
    bounds: ClassVar[Bounds] = {"k": {"low": 1, "dtype": torch.int64}}
    per_row: ClassVar[tuple[str, ...]] = ("k",)
    k: RowValue = 50

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_top_k(scores, self.row("k", scores.rows))


@dataclass(frozen=True, eq=False)
class TopP(RowTransform):
    """The smallest set of best tokens with a mass of p, the crossing one kept. 1 is off. p in (0, 1]."""

    name: ClassVar[str] = "top_p"
    bounds: ClassVar[Bounds] = {"p": MASS}
    per_row: ClassVar[tuple[str, ...]] = ("p",)
    p: RowValue = 1.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_top_p(scores, self.row("p", scores.rows))


@dataclass(frozen=True, eq=False)
class MinP(RowTransform):
    """What is at least `min_p` times as likely as the best token. 0 is off. min_p in [0, 1]."""

    name: ClassVar[str] = "min_p"
    bounds: ClassVar[Bounds] = {"min_p": SHARE}
    per_row: ClassVar[tuple[str, ...]] = ("min_p",)
    min_p: RowValue = 0.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_min_p(scores, self.row("min_p", scores.rows))


@dataclass(frozen=True, eq=False)
class Typical(RowTransform):
    """`keep_typical`: the tokens with a surprise nearest to the entropy, with a mass of p. 1 is off. p in (0, 1]."""

    name: ClassVar[str] = "typical"
    bounds: ClassVar[Bounds] = {"p": MASS}
    per_row: ClassVar[tuple[str, ...]] = ("p",)
    p: RowValue = 1.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_typical(scores, self.row("p", scores.rows))


@dataclass(frozen=True, eq=False)
class Epsilon(RowTransform):
    """`keep_epsilon`: a probability of at least epsilon. 0 is off. epsilon in [0, 1]."""

    name: ClassVar[str] = "epsilon"
    bounds: ClassVar[Bounds] = {"epsilon": SHARE}
    per_row: ClassVar[tuple[str, ...]] = ("epsilon",)
    epsilon: RowValue = 0.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_epsilon(scores, self.row("epsilon", scores.rows))


@dataclass(frozen=True, eq=False)
class Eta(RowTransform):
    """`keep_eta`: a probability of at least `min(epsilon, sqrt(epsilon) exp(-H))`. 0 is off. epsilon in [0, 1]."""

    name: ClassVar[str] = "eta"
    bounds: ClassVar[Bounds] = {"epsilon": SHARE}
    per_row: ClassVar[tuple[str, ...]] = ("epsilon",)
    epsilon: RowValue = 0.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_eta(scores, self.row("epsilon", scores.rows))


@dataclass(frozen=True, eq=False)
class TopNSigma(RowTransform):
    """`keep_top_n_sigma`: at most n standard deviations of the scores below the best. inf is off. Any n >= 0."""

    name: ClassVar[str] = "top_n_sigma"
    bounds: ClassVar[Bounds] = {"n": {"low": 0.0}}
    per_row: ClassVar[tuple[str, ...]] = ("n",)
    n: RowValue = float("inf")

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_top_n_sigma(scores, self.row("n", scores.rows))
