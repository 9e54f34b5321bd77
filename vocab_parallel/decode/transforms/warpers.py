"""Warpers as transforms of a policy: what changes the distribution of a row, or cuts its support, by the row alone.

Each names the parameters of a function on scores. Every parameter is a number, or one for each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.transform import PROCESSED, RowValue, Transform, View, row_values
from vocab_parallel.decode.transforms.truncation import keep_epsilon, keep_eta, keep_top_n_sigma, keep_typical
from vocab_parallel.select.filters import keep_min_p, keep_top_k, keep_top_p, temper
from vocab_parallel.select.scores import Scores

__all__ = ["Epsilon", "Eta", "MinP", "RowTransform", "Temperature", "TopK", "TopNSigma", "TopP", "Typical"]

MAX_TEMPERATURE = float(torch.finfo(torch.float32).max)


class RowTransform(Transform):
    """A transform whose fields are all numbers, or one number a request.

    Attributes:
        bounds: Options of `row_values` for each field.
    """

    gives: ClassVar[str | None] = PROCESSED  # of log-probabilities too: what is left no longer sums to one
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def check(self, vocab_size: int, rows: int | None) -> None:
        rows = self.row_count() or 1 if rows is None else rows
        for name in self.bounds:
            self.row(name, rows)

    def row(self, name: str, rows: int) -> Tensor:
        """A field as one value a row `[rows]` on the CPU; ValueError naming row and value if it is out of bounds."""
        return row_values(getattr(self, name), rows, f"{self.name}'s {name}", **self.bounds[name])


@dataclass(frozen=True, eq=False)
class Temperature(RowTransform):
    """`z / T`. 0 (and what is below 2**-64) keeps the best token alone. T in [0, 3.4e38], float32's."""

    name: ClassVar[str] = "temperature"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"temperature": {"low": 0.0, "high": MAX_TEMPERATURE}}
    per_row: ClassVar[tuple[str, ...]] = ("temperature",)
    temperature: RowValue = 1.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return temper(scores, self.row("temperature", scores.rows))


@dataclass(frozen=True, eq=False)
class TopK(RowTransform):
    """The k best by value descending, then id ascending: exactly k. From `vocab_size` up it is off."""

    name: ClassVar[str] = "top_k"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"k": {"low": 1, "dtype": torch.int64}}
    per_row: ClassVar[tuple[str, ...]] = ("k",)
    k: RowValue = 50

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_top_k(scores, self.row("k", scores.rows))


@dataclass(frozen=True, eq=False)
class TopP(RowTransform):
    """The smallest set of best tokens with a mass of p, the crossing one kept. 1 is off. p in (0, 1]."""

    name: ClassVar[str] = "top_p"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"p": {"low": 0.0, "high": 1.0, "low_open": True}}
    per_row: ClassVar[tuple[str, ...]] = ("p",)
    p: RowValue = 1.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_top_p(scores, self.row("p", scores.rows))


@dataclass(frozen=True, eq=False)
class MinP(RowTransform):
    """What is at least `min_p` times as likely as the best token. 0 is off. min_p in [0, 1]."""

    name: ClassVar[str] = "min_p"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"min_p": {"low": 0.0, "high": 1.0}}
    per_row: ClassVar[tuple[str, ...]] = ("min_p",)
    min_p: RowValue = 0.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_min_p(scores, self.row("min_p", scores.rows))


@dataclass(frozen=True, eq=False)
class Typical(RowTransform):
    """`keep_typical`: the tokens with a surprise nearest to the entropy, with a mass of p. 1 is off. p in (0, 1]."""

    name: ClassVar[str] = "typical"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"p": {"low": 0.0, "high": 1.0, "low_open": True}}
    per_row: ClassVar[tuple[str, ...]] = ("p",)
    p: RowValue = 1.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_typical(scores, self.row("p", scores.rows))


@dataclass(frozen=True, eq=False)
class Epsilon(RowTransform):
    """`keep_epsilon`: a probability of at least epsilon. 0 is off. epsilon in [0, 1]."""

    name: ClassVar[str] = "epsilon"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"epsilon": {"low": 0.0, "high": 1.0}}
    per_row: ClassVar[tuple[str, ...]] = ("epsilon",)
    epsilon: RowValue = 0.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_epsilon(scores, self.row("epsilon", scores.rows))


@dataclass(frozen=True, eq=False)
class Eta(RowTransform):
    """`keep_eta`: a probability of at least `min(epsilon, sqrt(epsilon) exp(-H))`. 0 is off. epsilon in [0, 1]."""

    name: ClassVar[str] = "eta"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"epsilon": {"low": 0.0, "high": 1.0}}
    per_row: ClassVar[tuple[str, ...]] = ("epsilon",)
    epsilon: RowValue = 0.0

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_eta(scores, self.row("epsilon", scores.rows))


@dataclass(frozen=True, eq=False)
class TopNSigma(RowTransform):
    """`keep_top_n_sigma`: at most n standard deviations of the scores below the best. inf is off. Any n >= 0."""

    name: ClassVar[str] = "top_n_sigma"
    bounds: ClassVar[Mapping[str, Mapping[str, Any]]] = {"n": {"low": 0.0}}
    per_row: ClassVar[tuple[str, ...]] = ("n",)
    n: RowValue = float("inf")

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return keep_top_n_sigma(scores, self.row("n", scores.rows))
