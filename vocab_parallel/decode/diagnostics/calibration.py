"""Does confidence match how often the top token is right, over shards; and the temperature that makes it.

Confidence is the probability of a row's first id in the total order, a row is correct where that id is the target.
Sums over rows are integers (units of 2**-32), so a curve does not depend on the rows' order, on how they are cut into
batches, or on the TP size; curves of parts add up to the curve of the whole.

What it is not: a target is one valid continuation, others may be as good, and rows of one text are not independent.
Calibration is a statement about the rows that it was measured on, and calibrated is not the same as right. A fitted
temperature belongs to the decoding policy: no weight of the model changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode.diagnostics.reliability import Known, Reliability, Rows, check_temperature
from vocab_parallel.decode.search.searching import at_least_one
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.nan import nan_found
from vocab_parallel.shard import VocabShard

Batch = tuple[Tensor, Tensor]  # logits [..., shard_size] of this rank, target [...]
Batches = Batch | Callable[[], Iterable[Batch]]


@uncompiled
def reliability(
    logits: Tensor,  # [..., shard_size] floating, this rank's
    target: Tensor,  # [...] global ids or ignore_index, the same on every rank
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    bins: int = 15,
    ignore_index: int = -100,
) -> Reliability:
    """The reliability curve of the distribution `softmax(logits / temperature)` on these rows.

    Args:
        target: Rows that hold `ignore_index` are left out: with it, a curve of one group of rows is measured.
        bins: Confidences in `((m - 1) / bins, m / bins]` make bin m.

    Returns:
        `Reliability`, the same on every rank and at every TP size; add those of further batches to it.

    Collectives:
        Three all-gathers, of 8, 8 and 32 bytes a row (16, 8 and 32 for float64). None at tp_size 1.

    Raises:
        TargetRangeError, NonFiniteError, LayoutMismatchError, ValueError: On every rank.

    Source:
        Bins and expected calibration error: Guo et al. 2017 (arXiv:1706.04599), section 2.
    """
    call = f"reliability(temperature={temperature}, bins={bins}, ignore_index={ignore_index})"
    channel = Channel(shard, call, found=nan_found(logits, shard))
    with channel.guard():
        at_least_one(bins=bins)
        check_temperature(temperature)
        batch = Rows.open(logits, target, channel, shard, ignore_index)
    return batch.learn().at(temperature).curve(bins)


@dataclass(frozen=True)
class FittedTemperature:
    """A temperature for a decoding policy, and the curves that say what it does on the rows that it was fitted on.

    Attributes:
        temperature: Minimises the mean negative log-likelihood.
        at_bound: The minimum is outside the bounds: the temperature is the nearer one of them.
        converged: Whether the search ended before `max_evaluations`.
        before, after: Curves at temperature 1 and at this one. Measure on other rows what it is worth.
        evaluations: How often all rows were measured.
        task: The rows it was fitted on, in the caller's words.
    """

    temperature: float
    at_bound: bool
    converged: bool
    before: Reliability
    after: Reliability
    evaluations: int
    task: str = ""

    def to_policy(self) -> dict[str, Any]:
        """The temperature as a transform of a policy file."""
        return {"name": "temperature", "temperature": self.temperature}

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON holds it."""
        curves = {"before": self.before.to_dict(), "after": self.after.to_dict()}
        about = {"task": self.task, "at_bound": self.at_bound, "converged": self.converged}
        return {"transform": self.to_policy(), **about, **curves}


@uncompiled
def fit_temperature(
    batches: Batches,
    *,
    shard: VocabShard,
    bounds: tuple[float, float] = (0.05, 20.0),
    tolerance: float = 1e-6,
    max_evaluations: int = 40,
    bins: int = 15,
    ignore_index: int = -100,
    task: str = "",
) -> FittedTemperature:
    """The temperature T that minimises the mean of `-log softmax(logits / T)[target]`, by Newton's method.

    With beta = 1 / T and s = beta z the mean of `lse(s) - s_target` is convex in beta. Its derivatives are the means of
    `(E[s] - s_target) / beta` and `Var[s] / beta**2` under softmax(s). Newton's steps stay within the bracket
    of the derivative's signs; where one would leave it, it is halved (in log beta) instead.

    Args:
        batches: `(logits [..., shard_size], target [...])`; or a function that returns an iterable of such pairs, the
            same ones at each call.
        bounds: Smallest and largest temperature, `0 < low < high`; 1 between them.
        tolerance: Relative change of T that ends the search.
        task: What the rows are, in words; kept in the result.

    Returns:
        `FittedTemperature`, the same on every rank and at every TP size.

    Collectives:
        For each batch: two all-gathers of 8 bytes a row (16 and 8 for float64) at first, then one of 32 for each
        evaluation; where `batches` is a function, a header for each evaluation. None at tp_size 1.

    Memory:
        A float64 copy of one batch's logits, and 17 bytes for each row.

    Raises:
        TargetRangeError, NonFiniteError, LayoutMismatchError, ValueError: On every rank: also a target whose score is
            -inf, whose likelihood no temperature raises; no row; batches that differ from one call to the next.

    Source:
        Guo et al. 2017 (arXiv:1706.04599), section 4.2.
    """
    call = (
        f"fit_temperature(bounds={bounds}, tolerance={tolerance}, max_evaluations={max_evaluations}, bins={bins}, "
        f"ignore_index={ignore_index})"
    )
    with Channel(shard, call).guard():
        _check_fit(bounds, tolerance, max_evaluations, bins)
    problem = _Problem(batches, shard, call, ignore_index, bins)
    first = problem.evaluate(1.0)
    best = _newton(problem, first, bounds, tolerance, max_evaluations)
    after = problem.evaluate(best.temperature)
    return FittedTemperature(*best, first.curve, after.curve, problem.evaluations, task)


class _Evaluation(NamedTuple):
    """All rows at one temperature: the curve, and sums over the rows in units of 2**-32."""

    curve: Reliability
    slope: int  # of E[s] - s_target, nats
    curvature: int  # of Var[s], nats squared


class _Search(NamedTuple):
    temperature: float
    at_bound: bool
    converged: bool


def _newton(
    problem: _Problem, found: _Evaluation, bounds: tuple[float, float], tolerance: float, limit: int
) -> _Search:
    """From the evaluation at 1. Plain arithmetic on integers that every rank has."""
    low, high = 1.0 / bounds[1], 1.0 / bounds[0]  # of beta
    inner_low, inner_high, beta = low, high, 1.0
    tried = {beta}
    while True:
        if (beta == low and found.slope > 0) or (beta == high and found.slope < 0):
            return _Search(bounds[1] if beta == low else bounds[0], True, True)
        if found.slope < 0:
            inner_low = beta
        else:
            inner_high = beta
        step = beta * (1.0 - found.slope / found.curvature) if found.curvature > 0 else 0.0
        if found.slope and not inner_low < step < inner_high:
            edge = inner_high if found.slope < 0 else inner_low
            step = edge if edge not in tried else (inner_low * inner_high) ** 0.5
        if found.slope == 0 or abs(step - beta) <= tolerance * beta:
            return _Search(1.0 / step if found.slope else 1.0 / beta, False, True)
        if problem.evaluations >= limit:
            return _Search(1.0 / beta, False, False)
        beta = step
        tried.add(beta)
        found = problem.evaluate(1.0 / beta)


class _Problem:
    """The rows of all batches; what every temperature shares is exchanged once."""

    def __init__(self, batches: Batches, shard: VocabShard, call: str, ignore_index: int, bins: int) -> None:
        self._batches, self._shard, self._call, self._bins = batches, shard, call, bins
        self._ignore_index = ignore_index
        self._known: list[Known] = []
        self.evaluations = 0

    def evaluate(self, temperature: float) -> _Evaluation:
        """One pass over the batches."""
        total = _Evaluation(Reliability.none(self._bins), 0, 0)
        for number, rows in enumerate(self._passed(temperature)):
            if number == len(self._known):
                rows = rows.learn()
                rows.require_reachable()
                assert rows.known is not None
                self._known.append(rows.known)
            found = rows.at(temperature)
            total = _Evaluation(
                total.curve + found.curve(self._bins), total.slope + found.slope(), total.curvature + found.curvature()
            )
        if total.curve.rows == 0:
            raise ValueError("no row to fit a temperature to: every target is ignore_index, or there is no batch")
        self.evaluations += 1
        return total

    def _passed(self, temperature: float) -> Iterator[Rows]:
        """The batches, each checked on every rank. The ranks also agree on where they end."""
        left = iter(self._batches() if callable(self._batches) else (self._batches,))
        for number in itertools.count():
            channel = Channel(self._shard, f"{self._call}, batch {number} at {temperature!r}")
            with channel.guard():
                batch = next(left, None)
                self._compare(number, batch)
                if batch is not None:
                    channel.found = nan_found(batch[0], self._shard)
                    rows = Rows.open(*batch, channel, self._shard, self._ignore_index)
                    known = self._known[number] if self.evaluations else None
            if batch is None:
                channel.call += ": there is none"
                channel.open()
                return
            yield replace(rows, known=known)
            if not callable(self._batches):
                return

    def _compare(self, number: int, batch: Batch | None) -> None:
        """Raises unless the batch is like the one with this number at the first evaluation."""
        if self.evaluations == 0:
            return
        had = len(self._known[number].gap) if number < len(self._known) else None
        got = None if batch is None else batch[1].numel()
        if had != got:
            raise ValueError(
                f"batch {number} has {got} rows and had {had} at first (None: there was no such batch): the function "
                "must return the same batches each time. A generator that is used up is one likely cause."
            )


def _check_fit(bounds: tuple[float, float], tolerance: float, max_evaluations: int, bins: int) -> None:
    low, high = bounds
    if not 0.0 < low <= 1.0 <= high < float("inf") or low == high:
        raise ValueError(f"bounds must be temperatures low <= 1 <= high, low above 0 and below high, got {bounds}")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must be in (0, 1), got {tolerance}")
    at_least_one(max_evaluations=max_evaluations, bins=bins)
