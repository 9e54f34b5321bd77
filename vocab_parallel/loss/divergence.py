"""Divergences between two softmaxes over one sharded vocabulary, of which a rank holds the same columns.

Student scores z and teacher scores y, `s = softmax(z)`, `t = softmax(y)`, each with its pair (M, S) of `normalizer`.
Let a be the one that the expectation is under (t for the forward divergence, s for the reverse one), u its scores, and
b and w the other's:

    KL(a || b) = E_a[(u - M_a) - (w - M_b)] - log S_a + log S_b

A shard sends (m, s) of both and `c = sum exp(u - m_a) ((u - m_a) - (w - m_b))`. Merging moves both maxima:

    E_a[..] = sum_r exp(m_a,r - M_a) (c_r + s_a,r ((m_a,r - M_a) - (m_b,r - M_b))) / S_a

The generalised Jensen-Shannon divergence is `beta KL(t || m) + (1 - beta) KL(s || m)` with `m = beta t + (1 - beta) s`.
Its derivative by s_v is `(1 - beta) log(s_v / m_v)`: what m contributes is a constant, which softmax removes. `log m`
needs both normalizers first, so the two sums are exchanged a second time. The gradients by z:

    forward          s - t
    reverse          s (log s - log t - KL(s || t))
    Jensen-Shannon   (1 - beta) s (log s - log m - KL(s || m))

A class of probability 0 contributes 0, whatever logarithm stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.loss.normalizer import row_blocks
from vocab_parallel.loss.options import Scores, is_number

NAMES = ("forward_kl", "reverse_kl", "jensen_shannon")


class Merged(NamedTuple):
    """Numbers of rows that every rank has, each `[C]`.

    Attributes:
        own: The KL divergence of a from b; for Jensen-Shannon `KL(s || m)`, once it is known.
    """

    student_maximum: Tensor
    student_sum: Tensor
    teacher_maximum: Tensor
    teacher_sum: Tensor
    own: Tensor


@dataclass(frozen=True)
class Divergence:
    """One of the divergences, of scores made of raw logits in two ways, computed in `dtype`."""

    name: str
    beta: float
    student: Scores
    teacher: Scores
    dtype: torch.dtype = torch.float32

    def check(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"divergence must be one of {', '.join(NAMES)}, got {self.name!r}")
        if not (is_number(self.beta) and 0.0 < self.beta < 1.0):
            raise ValueError(
                f"beta must be in (0, 1), got {self.beta!r}: at its ends the Jensen-Shannon divergence is 0; the "
                'Kullback-Leibler divergences have names of their own, "forward_kl" and "reverse_kl"'
            )
        self.student.check()
        try:
            self.teacher.check()
        except ValueError as error:
            raise ValueError(f"teacher_{error}") from None

    @property
    def mixes(self) -> bool:
        """Whether a second exchange is needed."""
        return self.name == "jensen_shannon"

    @property
    def _over(self) -> int:
        """Of the two heads the one that the expectation is under: 0 the student, 1 the teacher."""
        return 0 if self.name == "reverse_kl" else 1

    def statistics(self, z: Tensor, y: Tensor) -> Tensor:
        """What a shard of raw logits `[C, n]` sends: m and s of the student, of the teacher, and c: `[5, C]`.

        Jensen-Shannon has no c: `[4, C]`.
        """
        out = z.new_zeros(4 if self.mixes else 5, len(z), dtype=self.dtype)
        out[0] = out[2] = -torch.inf
        for block, student, teacher in self._scores(z, y):
            for at, scores in ((0, student), (2, teacher)):
                out[at, block] = maximum = scores.amax(1)
                scores.sub_(torch.where(maximum == -torch.inf, 0.0, maximum)[:, None])
            if self.mixes:
                out[1, block], out[3, block] = student.exp_().sum(1), teacher.exp_().sum(1)
                continue
            over, other = (student, teacher) if self._over == 0 else (teacher, student)
            e = over.exp()
            out[1 + 2 * self._over, block] = e.sum(1)
            out[4, block] = _expectation(e, over.sub_(other))
            out[3 - 2 * self._over, block] = other.exp_().sum(1)
        return out

    def merge(self, gathered: Tensor) -> Merged:
        """From all shards' statistics `[R, k, C]`, in their order, so that every rank forms the same bits."""
        heads: list[Tensor] = []
        shifts, weights = [], []
        for m, s in ((gathered[:, 0], gathered[:, 1]), (gathered[:, 2], gathered[:, 3])):
            maximum = m.amax(0)
            shifts.append(torch.where(m == -torch.inf, 0.0, m - maximum))  # -inf - -inf would be NaN
            weights.append(shifts[-1].exp())  # of an empty shard what it multiplies is 0
            heads += [maximum, (s * weights[-1]).sum(0)]
        if self.mixes:
            return Merged(heads[0], heads[1], heads[2], heads[3], torch.zeros_like(heads[0]))
        over, other = self._over, 1 - self._over
        moved = gathered[:, 4] + gathered[:, 1 + 2 * over] * (shifts[over] - shifts[other])
        expected = _expectation(weights[over], moved, dim=0) / heads[1 + 2 * over]
        own = expected - heads[1 + 2 * over].log() + heads[1 + 2 * other].log()
        return Merged(heads[0], heads[1], heads[2], heads[3], own)

    def mixture(self, z: Tensor, y: Tensor, rows: Merged) -> Tensor:
        """A shard's part of `KL(s || m)` and `KL(t || m)`: `[2, C]`."""
        out = rows.own.new_zeros(2, len(z))
        for block, log_s, log_t in self._log_probabilities(z, y, rows):
            log_m = self._log_mixture(log_s, log_t)
            out[0, block] = _expectation(log_s.exp(), log_s - log_m)
            out[1, block] = _expectation(log_t.exp(), log_t.sub_(log_m))
        return out

    def gradient(self, z: Tensor, y: Tensor, rows: Merged, factor: Tensor) -> None:
        """Writes `factor` `[C]` times the gradient of the student's raw logits over them; 0 where `factor` is 0."""
        scale = factor / self.student.temperature * ((1.0 - self.beta) if self.mixes else 1.0)
        slopes = self.student.softcap is not None
        for block, log_s, log_t in self._log_probabilities(z, y, rows):
            if self.name == "forward_kl":
                d = log_s.exp_().sub_(log_t.exp_())
            else:
                log_b = self._log_mixture(log_s, log_t) if self.mixes else log_t
                s = log_s.exp()
                d = log_s.sub_(log_b).sub_(rows.own[block, None]).mul_(s).masked_fill_(s == 0, 0.0)
            d.mul_(scale[block, None])
            slope = self.student.apply_with_slope_(z[block].to(self.dtype, copy=True))[1] if slopes else None
            if slope is not None:
                d.mul_(slope)
            z[block] = d.masked_fill_((factor[block] == 0)[:, None], 0.0)  # an ignored row may hold NaN

    def _log_mixture(self, log_s: Tensor, log_t: Tensor) -> Tensor:
        return torch.logaddexp(log_s + math.log1p(-self.beta), log_t + math.log(self.beta))

    def _log_probabilities(self, z: Tensor, y: Tensor, rows: Merged) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks of `log s` and `log t`; the maximum goes first: `M + log S` would round at large offsets."""
        for block, student, teacher in self._scores(z, y):
            student.sub_(rows.student_maximum[block, None]).sub_(rows.student_sum[block, None].log())
            teacher.sub_(rows.teacher_maximum[block, None]).sub_(rows.teacher_sum[block, None].log())
            yield block, student, teacher

    def _scores(self, z: Tensor, y: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Blocks of rows of both heads' scores, copies."""
        for block in row_blocks(z) if z.shape[1] else ():
            student = self.student.apply_(z[block].to(self.dtype, copy=True))
            yield block, student, self.teacher.apply_(y[block].to(self.dtype, copy=True))


def _expectation(weight: Tensor, value: Tensor, dim: int = 1) -> Tensor:
    """`sum weight value`, without the terms of weight 0: their value may be infinite or NaN. Overwrites `value`."""
    return value.mul_(weight).masked_fill_(weight == 0, 0.0).sum(dim)
