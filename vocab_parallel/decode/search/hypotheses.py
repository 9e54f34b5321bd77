"""Finished hypotheses of a beam search: how they are scored, which are kept, and when no other can still be better."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vocab_parallel.select.logarithm import exact_log

_NO_ATTENTION = 1e-10  # a source position's, where log 0 would rule a hypothesis out for good


@dataclass(frozen=True)
class LengthPenalty:
    """What a hypothesis' sum of log-probabilities is divided by: g of its number of generated tokens, its end included.

    Args:
        alpha: 0: nothing. Above 0 longer ones are favoured, below 0 shorter ones.
        kind: "power": `length**alpha`. "gnmt": `((5 + length) / 6)**alpha`.

    Source: "power" is Transformers' `length_penalty`; "gnmt" Wu et al. (2016), equation 14.
    """

    alpha: float = 0.0
    kind: str = "power"

    def __post_init__(self) -> None:
        if self.kind not in ("power", "gnmt"):
            raise ValueError(f'kind must be "power" or "gnmt", got {self.kind!r}')
        finite("alpha", self.alpha)

    def of(self, length: int) -> float:
        """The divisor for `length` (at least 1) tokens."""
        base = float(length) if self.kind == "power" else (5.0 + length) / 6.0
        return float(base**self.alpha)

    def check(self, max_length: int) -> None:
        """Raises unless the divisors of all lengths are numbers to divide by."""
        try:
            good = 0.0 < self.of(max_length) < math.inf
        except OverflowError:
            good = False
        if not good:
            raise ValueError(f"alpha {self.alpha:g} is too far from 0 for {max_length} tokens: g overflows")

    def bound_length(self, length: int, max_length: int) -> int:
        """The length from `length` on at which a sum of at most 0 that stays as it is has its best score."""
        return max_length if self.alpha > 0 else length


@dataclass(frozen=True)
class Coverage:
    """GNMT's reward for having attended to all of the source: `beta * sum_i log(min(sum_j a_ij, 1))`, at most 0.

    `a_ij` is the attention of generated token j to source position i, as the caller's model gives it; a position that
    nothing has attended to counts as 1e-10.

    Args:
        beta: At least 0; 0: nothing.

    Source: Wu et al. (2016), equation 14.
    """

    beta: float = 0.0

    def __post_init__(self) -> None:
        finite("beta", self.beta, 0.0)

    def of(
        self,
        attended: Tensor,  # [..., S] sums over the generated tokens
        source: Tensor | None = None,  # bool, broadcasts with it: which positions there are
    ) -> Tensor:
        """cp, float64 `[...]`, in nats."""
        log = exact_log(attended.double().clamp(_NO_ATTENTION, 1.0))
        log = log if source is None else torch.where(source, log, 0.0)
        total = torch.zeros_like(log[..., 0]) if log.shape[-1] else log.new_zeros(log.shape[:-1])
        for position in log.unbind(-1):  # one order, whatever the batch
            total = total + position
        return self.beta * total


@dataclass(frozen=True)
class Finished:
    """The best finished hypotheses of each request, best first.

    Attributes:
        scores: float64 `[B, R]`, normalised; -inf where there are fewer.
        sums: float64 `[B, R]`, what the search added up, in nats.
        lengths: int64 `[B, R]`, tokens generated.
        token_ids: int64 `[B, R, L]`, the generated tokens; -1 after the last.
        parents: int64 `[B, R, L]`: which beam of its request each token continued; -1 after the last.
        ended: bool `[B, R]`: by an end token, not by the length.
    """

    scores: Tensor
    sums: Tensor
    lengths: Tensor
    token_ids: Tensor
    parents: Tensor
    ended: Tensor

    @classmethod
    def empty(cls, requests: int, count: int, max_length: int, device: torch.device | None = None) -> Finished:
        """No hypotheses yet, room for the best `count`."""
        none = torch.full((requests, count), -torch.inf, dtype=torch.float64, device=device)
        ids = torch.full((requests, count, max_length), -1, dtype=torch.int64, device=device)
        zeros = torch.zeros(requests, count, dtype=torch.int64, device=device)
        return cls(none, none.clone(), zeros, ids, ids.clone(), zeros > 0)

    def add(self, other: Finished) -> Finished:
        """The best of both, as many as there is room here; of equal scores those that were here stay first."""
        return Finished.best([self, other], self.scores.shape[1])

    @staticmethod
    def best(sets: list[Finished], count: int) -> Finished:
        """The best `count` of several sets of the same requests."""
        scores = torch.cat([one.scores for one in sets], 1)
        scores, at = scores.sort(dim=1, descending=True, stable=True)
        at = at[:, :count]

        def pick(name: str) -> Tensor:
            every = torch.cat([getattr(one, name) for one in sets], 1)
            index = at if every.dim() == 2 else at[:, :, None].expand(-1, -1, every.shape[2])
            return every.gather(1, index)

        names = ("sums", "lengths", "token_ids", "parents", "ended")
        return Finished(scores[:, :count], *(pick(name) for name in names))

    @property
    def full(self) -> Tensor:
        """Bool `[B]`: whether there are as many as there is room."""
        return self.scores[:, -1] > -torch.inf


def can_improve(
    finished: Finished,
    best_live: Tensor,  # float64 [B], the best sum of a live beam; -inf: none is left
    length: int,
    max_length: int,
    penalty: LengthPenalty,
    early_stopping: bool | str,
) -> Tensor:
    """Whether a live beam of `length` tokens may still become one of the request's best.

    Log-probabilities are at most 0, so a sum only falls, and a live beam's score never passes its sum over the g of the
    length that suits it best: `max_length` for alpha > 0, else the shortest, for which the present one stands.
    Coverage is at most 0, so it needs no bound of its own.

    Args:
        early_stopping: "never": that bound: no beam is given up that could win. False: the present length for every
            alpha, Transformers' default: for alpha > 0 a longer hypothesis may be missed. True: stop when the set is
            full.

    Returns:
        Bool `[B]`.

    Source: Transformers, `_check_early_stop_heuristic`; Huang et al. (2017), section 3, for alpha 0.
    """
    at = penalty.bound_length(length, max_length) if early_stopping == "never" else length
    improves = best_live / penalty.of(at) > finished.scores[:, -1]
    return improves & ~finished.full if early_stopping is True else improves


def finite(name: str, value: object, low: float = -math.inf) -> None:
    """Raises unless `value` is a finite number of at least `low`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < low:  # type: ignore[arg-type, operator]
        least = "" if low == -math.inf else f" of at least {low:g}"
        raise ValueError(f"{name} must be a finite number{least}, got {value!r}")


def check_early_stopping(value: object) -> None:
    """Raises unless it is True, False or "never"."""
    if not (isinstance(value, bool) or value == "never"):
        raise ValueError(f'early_stopping must be True, False or "never", got {value!r}')
