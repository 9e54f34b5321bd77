"""What a loss makes of a row's merged statistics: its value, and its gradient with respect to the scores.

Every loss here has a gradient of one form, with five numbers a row:

    dz_v = a p_v - b [v = target] - u - c q_v - k p_v (log p_v + H)

Cross entropy of a target distribution with mass `b` on the target and `u` on every class has a = b + V u = 1; z-loss
`ζ lse²` adds 2 ζ lse to a; the log-probability of the target has a = b = -1; the entropy H has k = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vocab_parallel.agreement import first_row, judge
from vocab_parallel.loss.normalizer import Normalizer, Wanted
from vocab_parallel.loss.options import LossOptions
from vocab_parallel.loss.targets import MOST_MASS, Targets
from vocab_parallel.shard import VocabShard


@dataclass(frozen=True)
class Coefficients:
    """The numbers a, b, u, c and k of rows, each `[T]`; None stands for zeros. Upstream gradients are in them."""

    probability: Tensor
    target: Tensor | None = None
    uniform: Tensor | None = None
    soft: Tensor | None = None
    entropy: Tensor | None = None

    def scaled(self, factor: Tensor | float) -> Coefficients:
        """All of them times `factor`, a number or `[T]`."""
        return Coefficients(*(None if row is None else row * factor for row in vars(self).values()))  # type: ignore[arg-type]

    @property
    def active(self) -> Tensor:
        """Which rows have a gradient, bool `[T]`."""
        active = self.probability != 0
        for row in (self.target, self.uniform, self.soft, self.entropy):
            active = active if row is None else active | (row != 0)
        return active

    def at_target(self, normalizer: Normalizer) -> Tensor:
        """`dz` at the target less the uniform part, `[T]`: `(a - b) p + b (p - 1) - k p (log p + H)`.

        `p - 1` is `expm1(log p)`: exact where p rounds to 1, so a confident row keeps its gradient in bfloat16.
        """
        log_p = normalizer.target_logprob
        p = log_p.exp()
        if self.target is None:
            return torch.zeros_like(p)
        at = (self.probability - self.target) * p + self.target * torch.expm1(log_p)
        if self.entropy is not None:
            at = at - self.entropy * p * (log_p.clamp(min=-1e4) + normalizer.entropy)
        return at


class Objective(Protocol):
    """A loss or a per-row quantity, from merged statistics."""

    @property
    def wanted(self) -> Wanted:
        """What it needs exchanged beyond m, s and the target's score."""

    @property
    def dense(self) -> bool:
        """Whether its `dz` needs more than `exp(z - m)`, the target's entry and rank-one terms."""

    @property
    def foreign(self) -> bool:
        """Whether it runs a caller's code, which may raise on one rank only."""

    def evaluate(
        self, normalizer: Normalizer, targets: Targets, index: slice | Tensor, upstream: tuple[Tensor, ...] | None
    ) -> tuple[tuple[Tensor, ...], Coefficients | None]:
        """Values of the rows `index` of the group, each `[C]`, and the coefficients of their gradient.

        Args:
            upstream: The gradient of each value, `[C]`; None if no gradient is wanted.
        """


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy (or divergence) of ids or of a distribution, with smoothing, z-loss and row weights."""

    options: LossOptions
    vocab_size: int
    row_weight: Tensor | None = None  # [T]
    foreign = False

    @property
    def wanted(self) -> Wanted:
        return Wanted(shifted_sum=self.options.label_smoothing > 0, soft=bool(self.options.soft))

    @property
    def dense(self) -> bool:
        return bool(self.options.soft)

    def evaluate(
        self, normalizer: Normalizer, targets: Targets, index: slice | Tensor, upstream: tuple[Tensor, ...] | None
    ) -> tuple[tuple[Tensor, ...], Coefficients | None]:
        on_target, uniform = self.options.weights(self.vocab_size)
        mass = 1.0 if normalizer.mass is None else on_target * normalizer.mass + self.options.label_smoothing
        rows = mass * normalizer.log_sum
        if on_target:  # 0 times the infinite loss of a class without probability would be NaN
            lost = normalizer.maximum - normalizer.target_score if normalizer.cross is None else -normalizer.cross
            rows = rows + on_target * lost
        if self.options.relative and normalizer.divergence is not None:
            rows = normalizer.divergence
        if normalizer.shifted_sum is not None:
            rows = rows - uniform * normalizer.shifted_sum
        z_loss = self.options.z_loss
        if z_loss:
            rows = rows + z_loss * normalizer.lse.square()
        weight = torch.ones_like(rows) if self.row_weight is None else self.row_weight[index].to(rows.dtype)
        rows = torch.where(targets.valid, weight * rows, 0.0)
        if upstream is None:
            return (rows,), None
        weight = torch.where(targets.valid, weight * upstream[0], 0.0)
        total = mass + 2.0 * z_loss * normalizer.lse if z_loss else mass
        return (rows,), Coefficients(
            torch.where(targets.valid, weight * total, 0.0),
            target=None if self.options.soft else weight * on_target,
            uniform=weight * uniform if uniform else None,
            soft=weight * on_target if self.options.soft else None,
        )


def require_distribution(
    shard: VocabShard, normalizer: Normalizer, objective: Objective, index: slice | Tensor, rows: Tensor | range
) -> None:
    """Raises for the first row whose soft target is no distribution, as logits are not; the same on every rank.

    Of probabilities one is below 0, or log-probabilities sum to more than 1. Read from what the ranks have exchanged
    anyway; what a row weight of 0 leaves out is not looked at.

    Args:
        index: The rows at hand, of the objective's.
        rows: What to call them in the message, as in `require_finite`.
    """
    mass, divergence = normalizer.mass, normalizer.divergence
    if not isinstance(objective, CrossEntropy) or mass is None or divergence is None or not len(mass):
        return
    is_log = objective.options.soft == "log-probabilities"
    bad = mass > MOST_MASS if is_log else divergence.isnan() & mass.isfinite()  # the log of a q below 0 is NaN
    if objective.row_weight is not None:
        bad = bad & (objective.row_weight[index] != 0)
    if not isinstance(rows, range):
        bad = bad & (rows >= 0)  # not those that fill up a chunk
    at = first_row(bad)
    here = at.clamp(min=0)[None]
    number = at + rows.start if isinstance(rows, range) else rows.index_select(0, here)[0]
    words = torch.stack([at.double(), number.double(), mass.index_select(0, here)[0].double()])
    judge(shard, words, error=ValueError, describe=no_log_probabilities if is_log else no_probabilities)


def no_log_probabilities(words: list[float]) -> ValueError:
    """The error of a row whose log-probabilities sum to too much."""
    return ValueError(
        f"the target of row {int(words[1])} holds log-probabilities whose probabilities sum to {words[2]:.4g}, more "
        "than 1: these look like logits, or like log-probabilities at another temperature. Subtract their logsumexp "
        "over the whole vocabulary."
    )


def no_probabilities(words: list[float]) -> ValueError:
    """The error of a row with a probability below 0."""
    return ValueError(
        f"the target of row {int(words[1])} holds a probability below 0: these look like logits or log-probabilities. "
        "Pass their softmax, or log-probabilities to kl_div(..., log_target=True)."
    )


@dataclass(frozen=True)
class LogProbability:
    """The target's log-probability (0 for ignored rows) and the entropy of every row."""

    wanted = Wanted(expected=True)
    dense = True
    foreign = False

    def evaluate(
        self, normalizer: Normalizer, targets: Targets, index: slice | Tensor, upstream: tuple[Tensor, ...] | None
    ) -> tuple[tuple[Tensor, ...], Coefficients | None]:
        values = (torch.where(targets.valid, normalizer.target_logprob, 0.0), normalizer.entropy)
        if upstream is None:
            return values, None
        on_target = torch.where(targets.valid, -upstream[0], 0.0)
        return values, Coefficients(on_target, target=on_target, entropy=upstream[1])
