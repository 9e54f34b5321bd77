"""A reliability curve, exact sums over rows by bins of confidence; and the rows that it is made of, over shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.agreement import checksum, first_row
from vocab_parallel.arguments import check_logits, check_target, target_found
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.logarithm import exact_log
from vocab_parallel.select.masses import Masses, measure
from vocab_parallel.select.scores import Scores, peak_of, value_at
from vocab_parallel.select.support import require_support
from vocab_parallel.shard import VocabShard

UNIT = 2.0**32  # sums over rows are integers of 1 / UNIT


@dataclass(frozen=True)
class Reliability:
    """How often rows of a confidence are correct. `a + b` is the curve of the rows of both.

    Attributes:
        counts: Rows in each bin, by confidence ascending: bin m of n holds confidences in `(m / n, (m + 1) / n]`.
        hits: Those whose first id is the target.
        confidence_sums: Their confidences' sum, in units of 2**-32.
        nll_sum: Sum of -log p(target) over the rows that have one, in nats times 2**32.
        impossible: Rows whose target has probability 0; they are in no sum but `counts` and `confidence_sums`.
    """

    counts: tuple[int, ...]
    hits: tuple[int, ...]
    confidence_sums: tuple[int, ...]
    nll_sum: int
    impossible: int = 0

    @classmethod
    def of(cls, confidence: Tensor, correct: Tensor, nll: Tensor, valid: Tensor, bins: int) -> Reliability:
        """The curve of rows `[T]`: float64 confidences and nats; those not valid are left out."""
        confidence, correct, nll = confidence[valid], correct[valid], nll[valid]
        at = (confidence * bins).ceil().to(torch.int64).clamp(1, bins) - 1
        zeros = torch.zeros(3, bins, dtype=torch.int64, device=confidence.device)
        zeros[0].index_add_(0, at, torch.ones_like(at))
        zeros[1].index_add_(0, at, correct.to(torch.int64))
        zeros[2].index_add_(0, at, (confidence * UNIT).round().to(torch.int64))
        finite = nll.isfinite()
        sums = (tuple(zeros[0].tolist()), tuple(zeros[1].tolist()), tuple(zeros[2].tolist()))
        return cls(*sums, exact_sum(nll[finite]), int((~finite).sum()))

    @classmethod
    def none(cls, bins: int) -> Reliability:
        """The curve of no rows."""
        return cls((0,) * bins, (0,) * bins, (0,) * bins, 0)

    def __add__(self, other: Reliability) -> Reliability:
        if len(self.counts) != len(other.counts):
            raise ValueError(f"curves of {len(self.counts)} and {len(other.counts)} bins do not add up")
        return Reliability(
            _added(self.counts, other.counts),
            _added(self.hits, other.hits),
            _added(self.confidence_sums, other.confidence_sums),
            self.nll_sum + other.nll_sum,
            self.impossible + other.impossible,
        )

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def accuracy(self) -> list[float]:
        """Share of correct rows in each bin; NaN in an empty one."""
        return [hit / count if count else float("nan") for hit, count in zip(self.hits, self.counts, strict=True)]

    @property
    def confidence(self) -> list[float]:
        """Mean confidence in each bin; NaN in an empty one."""
        pairs = zip(self.confidence_sums, self.counts, strict=True)
        return [total / UNIT / count if count else float("nan") for total, count in pairs]

    @property
    def ece(self) -> float:
        """Expected calibration error: the bins' |accuracy - confidence|, weighted by their rows; NaN of no rows."""
        gaps = [abs(hit - total / UNIT) for hit, total in zip(self.hits, self.confidence_sums, strict=True)]
        return sum(gaps) / self.rows if self.rows else float("nan")

    @property
    def mce(self) -> float:
        """Largest |accuracy - confidence| of a bin with rows; NaN of no rows."""
        pairs = zip(self.accuracy, self.confidence, strict=True)
        return max((abs(a - c) for a, c in pairs if a == a), default=float("nan"))

    @property
    def nll(self) -> float:
        """Mean -log p(target) in nats; inf where some target is impossible, NaN of no rows."""
        if self.impossible:
            return float("inf")
        return self.nll_sum / UNIT / self.rows if self.rows else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """Counts and summary numbers as JSON holds them; empty bins have null."""
        bins = [
            {
                "rows": count,
                "accuracy": accuracy if count else None,
                "confidence": confidence if count else None,
            }
            for count, accuracy, confidence in zip(self.counts, self.accuracy, self.confidence, strict=True)
        ]
        numbers = {"ece": self.ece, "mce": self.mce, "nll": self.nll}
        known = {name: value if abs(value) < float("inf") else None for name, value in numbers.items()}
        return {"rows": self.rows, "impossible": self.impossible, **known, "bins": bins}


def _added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def check_temperature(temperature: object) -> None:
    """Raises unless it is a finite number above 0."""
    good = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not good or not 0.0 < temperature < float("inf"):  # type: ignore[operator]
        raise ValueError(f"temperature must be a number above 0, got {temperature!r}")


def exact_sum(values: Tensor) -> int:
    """The sum of finite float64 `[T]` in units of 2**-32: the same in any order. Python's integers never overflow."""
    return sum(int(value) for value in (values * UNIT).round().tolist())


class Known(NamedTuple):
    """What is known of rows at any temperature; replicated.

    Attributes:
        largest: float64 `[T]`, the largest scores at temperature 1.
        gap: float64 `[T]`, those less the targets' scores.
        correct: bool `[T]`, whether the first id is the target.
    """

    largest: Tensor
    gap: Tensor
    correct: Tensor


@dataclass(frozen=True)
class Rows:
    """A batch of rows over shards, in one call.

    Attributes:
        scores: At temperature 1.
        target: int64 `[T]`.
        valid: bool `[T]`, which rows have one.
        known: Once it is exchanged.
    """

    scores: Scores
    target: Tensor
    valid: Tensor
    known: Known | None = None

    @classmethod
    def open(cls, logits: Tensor, target: Tensor, channel: Channel, shard: VocabShard, ignore_index: int) -> Rows:
        """Checks this rank's arguments; the channel's guard takes the errors to the others."""
        check_logits(logits, shard)
        check_target(target, shard, ignore_index)
        if target.shape != logits.shape[:-1]:
            raise LayoutMismatchError(
                f"target {list(target.shape)} and logits {list(logits.shape)} disagree: expected one target a row."
            )
        found = target_found(target, shard, ignore_index)
        if found is not None:  # read here, also where errors are deferred
            row, value = found.words.tolist()
            if row >= 0:
                raise found.describe(row, value)
        channel.checksum = checksum(target)
        ids = target.detach().reshape(-1).to(torch.int64)
        return cls(Scores.of(logits, shard, channel), ids, ids != ignore_index)

    def learn(self) -> Rows:
        """Exchanges the peaks and the targets' scores: 8 bytes a row each (16 and 8 for float64)."""
        peak = peak_of(self.scores)
        require_support(self.scores, peak.values, infinite=False)
        at_target = value_at(self.scores, torch.where(self.valid, self.target, peak.token_ids))
        largest = peak.values.double()
        correct = self.valid & (peak.token_ids == self.target)
        return replace(self, known=Known(largest, largest - at_target.double(), correct))

    def at(self, temperature: float) -> AtTemperature:
        """Measures the rows' distributions; one exchange of 32 bytes a row."""
        known, scores = self.known, self.scores
        assert known is not None
        values = scores.values.double() / temperature
        masses = measure(scores.with_values(values, largest=known.largest / temperature), moments=True)
        scores.channel.group.raise_deferred()  # the host reads what follows
        return AtTemperature(known, self.valid, known.gap / temperature, masses)

    def require_reachable(self) -> None:
        """Raises on every rank for the first row whose target has probability 0."""
        assert self.known is not None
        if not len(self.target):
            return
        row = first_row(self.valid & ~self.known.gap.isfinite())
        target = self.target.index_select(0, row.clamp(min=0)[None])[0]
        self.scores.channel.judge(torch.stack([row, target]), NonFiniteError, _unreachable)


class AtTemperature(NamedTuple):
    """Rows at one temperature; `gap` is the target's below the largest, in nats."""

    known: Known
    valid: Tensor
    gap: Tensor
    masses: Masses

    def curve(self, bins: int) -> Reliability:
        total = self.masses.total.double() * 2.0**-self.masses.bits  # in units of the peak's
        return Reliability.of(1.0 / total, self.known.correct, self.gap + exact_log(total), self.valid, bins)

    def slope(self) -> int:
        """Sum of E[s] - s_target, nats in units of 2**-32."""
        return exact_sum((self.gap - self.masses.mean_gap)[self.valid])

    def curvature(self) -> int:
        """Sum of Var[s], nats squared in units of 2**-32."""
        return exact_sum(self.masses.variance[self.valid])


def _unreachable(flags: list[int]) -> Exception:
    row, target = flags
    return NonFiniteError(
        f"row {row}: its target {target} has a score of -inf, so no temperature gives it a probability. Fit on raw "
        "logits, or leave the row out with ignore_index."
    )
