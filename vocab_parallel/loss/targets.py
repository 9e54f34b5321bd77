"""Targets as one range of token ids sees them: global ids, or a distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.loss.normalizer import row_blocks
from vocab_parallel.loss.options import Scores

MOST_MASS = 1.35  # of log-probabilities in bfloat16, less a logsumexp of up to 128 that was rounded to bfloat16 too


class Targets:
    """Global target ids `[T]`, seen from the ids `[start, stop)`.

    Attributes:
        valid: bool `[T]`, not ignored.
        owned: bool `[T]`, valid and in `[start, stop)`.
        local: int64 `[T]`, the target's row in this range, 0 where not owned.
        ids: `[T]`, as given.
        count: int64 scalar tensor, number of valid rows.
    """

    def __init__(self, target: Tensor, start: int, stop: int, ignore_index: int) -> None:
        target = target.to(torch.int64)  # an int8 is never compared with 300, which torch would wrap to its 8 bits
        self.ids = target
        self.valid = target != ignore_index
        self.owned = self.valid & (target >= start) & (target < stop)
        self.local = torch.where(self.owned, target.to(torch.int64) - start, 0)
        self.count = self.valid.sum()

    def pick(self, logits: Tensor, scores: Scores) -> Tensor:
        """The owned target scores of raw `logits` `[T, n]`, 0 elsewhere: float32 (float64 for float64) `[T]`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        if logits.shape[1] == 0:
            return logits.new_zeros(len(logits), dtype=dtype)
        picked = scores.apply_(logits.gather(1, self.local[:, None])[:, 0].to(dtype))
        return torch.where(self.owned, picked, 0.0)  # select, not multiply: the clamped column may hold -inf or NaN

    def rows(self, index: Tensor | slice) -> Targets:
        """The targets of some rows (`count` stays that of all)."""
        some = object.__new__(Targets)
        some.valid, some.owned, some.local = self.valid[index], self.owned[index], self.local[index]
        some.ids, some.count = self.ids[index], self.count
        return some


def soft_statistics(
    logits: Tensor,  # [T, n] raw
    maximum: Tensor,  # [T], the range's m
    sumexp: Tensor,  # [T], the range's s
    target: Tensor,  # [T, n] probabilities or log-probabilities
    scores: Scores,
    is_log: bool,
) -> Tensor:
    """What a soft target q adds to the exchange, `[3, T]`: `sum q (z - m)`, `sum q`, `sum q (log q - log p)`.

    p is normalised within the range, so that the last term, of two distributions that are nearly the same, is a sum of
    small numbers instead of a difference of large ones. What has q = 0 counts as 0.
    """
    out = maximum.new_zeros(3, len(maximum))
    for block in row_blocks(logits) if logits.shape[1] else ():
        empty = maximum[block] == -torch.inf
        shift = torch.where(empty, 0.0, maximum[block])
        log_s = torch.where(empty, 0.0, sumexp[block].log())
        work = scores.apply_(logits[block].to(maximum.dtype, copy=True)).sub_(shift[:, None])
        q, log_q = probabilities(target[block], maximum.dtype, is_log)
        out[0, block] = torch.where(q == 0, 0.0, q * work).sum(1)
        out[1, block] = q.sum(1)
        out[2, block] = torch.where(q == 0, 0.0, q * (log_q - work + log_s[:, None])).sum(1)
    return out


def probabilities(target: Tensor, dtype: torch.dtype, is_log: bool) -> tuple[Tensor, Tensor]:
    """`q` and `log q` of a soft target."""
    target = target.to(dtype)
    return (target.exp(), target) if is_log else (target, target.log())
