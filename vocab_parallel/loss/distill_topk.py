"""Distillation from a teacher's most likely tokens: ids and log-probabilities, as servers and stored data sets give.

With the given `q_k` of ids `i_k`, their sum Q, the student's distribution p, and "rest" for all ids but the given ones:

    loss = sum_k q_k (log q_k - log p_k) + r (log r - log p_rest)
    dz_v = (Q + r) p_v - q_v             for the given ids
           (Q + r - r / p_rest) p_v      for the others

r is the mass of the bucket that stands for the rest, 0 without one. What a shard sends is the maximum and the sum of
its *other* ids, and the scores of the given ids it owns: so `log p_rest` is exact where `log(1 - sum_k p_k)` would have
lost every digit, and all normalizers follow from these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.agreement import judge
from vocab_parallel.collectives import uncompiled
from vocab_parallel.loss.distill import prepare_student
from vocab_parallel.loss.distill_checks import TAILS, check_given, filled_slots, problems
from vocab_parallel.loss.distill_loop import Student
from vocab_parallel.loss.normalizer import Normalizer, require_finite, row_blocks
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.rows import row_numbers
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import VocabShard


@uncompiled
def linear_topk_distillation(
    input: Tensor,  # [..., D], the same on every rank; with sequence_parallel this rank's rows [t, ..., D]
    linear_weight: Tensor,  # [shard_size, D]
    teacher_ids: Tensor,  # [..., K] int64
    teacher_logprobs: Tensor,  # [..., K] floating
    *,
    shard: VocabShard,
    tail: str = "ignore",
    temperature: float = 1.0,
    linear_bias: Tensor | None = None,  # [shard_size]
    softcap: float | None = None,
    target: Tensor | None = None,  # [...] int64
    ignore_index: int = -100,
    row_weight: Tensor | None = None,  # [...]
    reduction: str = "mean",
    mean_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """Forward Kullback-Leibler divergence of a student from a teacher of which each row gives K ids.

    Args:
        input, linear_weight, linear_bias: The student's, as in `linear_cross_entropy`.
        teacher_ids: Ids over the whole vocabulary, the same on every rank, each at most once in a row. A slot that
            holds `ignore_index` is empty, so rows may have fewer than K; a row without any has a loss of 0, and counts.
        teacher_logprobs: `log q_k`, at the temperature of the loss (it divides the student's scores only). Values of
            empty slots are never read; -inf is a probability of 0.
        tail: What becomes of the probability that is not given. "ignore": `sum_k q_k (log q_k - log p_k)`, which may
            be negative. "renormalize": q is divided by its sum; unnormalised values will do. "bucket": one more class
            stands for all other ids, with `1 - sum_k q_k` at the teacher; the student's is exact. Where a row gives
            every id there is no bucket.
        target: Says which rows to leave out: those that hold `ignore_index`. None: no row is left out.

    The other arguments: as in `linear_distillation`.

    Returns:
        Nats, float32 (float64 for float64 input): for "none" `[...]`, else a scalar over all rows of the group.

    Collectives:
        Forward, per chunk: one all-gather of `8 + 4 K` bytes a row, and one all-reduce of dH as in
        `linear_distillation`. With `sequence_parallel` the ids and log-probabilities of this rank's rows are gathered
        once.

    Memory:
        One buffer `[chunk_size, num_valid]`; dW in float32; dH; a few tensors of `[chunk_size, K]`. With "none",
        `8 + 4 K` bytes a row are kept.

    Raises:
        TargetRangeError: An id outside the vocabulary.
        NonFiniteError: A row of the student with NaN, +inf or no finite logit; a log-probability that is NaN or +inf.
        ValueError: An id twice in a row; log-probabilities whose sum of probabilities is above 1 (logits, likely),
            unless they are renormalised.
        LayoutMismatchError, UngatheredWeightError, ValueError: As in `linear_distillation`. All on every rank.
    """
    slots = LossOptions(reduction, ignore_index, scores=Scores(softcap, temperature))
    options = slots if target is not None else replace(slots, ignore_index=-100)
    name = f"linear_topk_distillation({slots}, tail={tail!r})"
    with WideMean(shard, mean_group, name) as wide:

        def check() -> None:
            slots.check()
            if tail not in TAILS:
                raise ValueError(f"tail must be one of {', '.join(TAILS)}, got {tail!r}")
            ids, logprobs, valid = check_given(input, teacher_ids, teacher_logprobs, target, ignore_index)
            if not shard.defers(ids.device):
                for found in problems(ids, logprobs, valid, shard, ignore_index, tail):
                    row, value = found.words.tolist()
                    if row >= 0:
                        raise found.describe(row, value)

        def teach(student: Student, _: Sequence[Tensor | None]) -> SparseTeacher:
            return SparseTeacher(student, tail, ignore_index)

        input, weight, bias, call = prepare_student(
            name, check, teach, input, linear_weight, linear_bias, target, shard, options, wide,
            row_data=(teacher_ids, teacher_logprobs), row_weight=row_weight, sequence_parallel=sequence_parallel,
            chunk_size=chunk_size, memory_budget=memory_budget,
        )  # fmt: skip
        return call(input, weight, bias)


class Given(NamedTuple):
    """What the teacher says of a chunk's rows, and where a shard has it. Empty slots have probability 0.

    Attributes:
        filled: bool `[C, K]`.
        log_q, q: `[C, K]`.
        rest: r, `[C]`.
        owned, local: Whether the shard holds the id, and its column there, 0 where it does not; `[C, K]`.
    """

    filled: Tensor
    log_q: Tensor
    q: Tensor
    rest: Tensor
    owned: Tensor
    local: Tensor


class SparseTeacher:
    """A teacher known by some ids of each row."""

    def __init__(self, student: Student, tail: str, ignore_index: int) -> None:
        self._student, self._tail, self._ignore_index = student, tail, ignore_index
        self._ids, self._logprobs = student.data
        self._scores = student.head.scores

    def compare(self, chunk: int, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        shard, given = self._student.shard, self._given(chunk)
        gathered = self._student.exchange(chunk, self._statistics(logits, given))
        if chunk == 0 and shard.defers(logits.device):
            every = self._student.head.targets.valid
            for found in problems(self._ids, self._logprobs, every, shard, self._ignore_index, self._tail):
                judge(shard, found.words, found.error, partial(_describe, found.describe))
        values, kept, normalizer = self._merge(gathered, given)
        require_finite(shard, normalizer, gathered, valid, row_numbers(self._student.plan.chunks[chunk]))
        return values, kept

    def again(self, chunk: int) -> None:
        """Nothing: the ids are at hand."""

    def gradient(self, chunk: int, logits: Tensor, kept: Tensor, factor: Tensor) -> None:
        given, slopes = self._given(chunk), self._scores.softcap is not None
        maximum, on_rest, at_given = kept[:, 0], kept[:, 1], kept[:, 2:]
        shift = torch.where(maximum == -torch.inf, 0.0, maximum)
        scale = factor / self._scores.temperature
        on_rest, at_given = on_rest * scale, torch.where(given.owned, at_given * scale[:, None], 0.0)
        for block in row_blocks(logits) if logits.shape[1] else ():
            d, slope = self._scores.apply_with_slope_(logits[block].to(kept.dtype, copy=True), wanted=slopes)
            _mask(d, given, block).sub_(shift[block, None]).exp_().mul_(on_rest[block, None])
            d.scatter_add_(1, given.local[block], at_given[block])
            if slope is not None:
                d.mul_(slope)
            logits[block] = d.masked_fill_((factor[block] == 0)[:, None], 0.0)  # an ignored row may hold NaN

    def _given(self, chunk: int) -> Given:
        index, shard = self._student.plan.chunks[chunk], self._student.shard
        ids = self._ids[index].to(torch.int64)
        filled = filled_slots(ids, self._student.head.targets.valid[index], self._ignore_index)
        log_q = torch.where(filled, self._logprobs[index].to(self._student.dtype), -torch.inf)
        if self._tail == "renormalize":
            total = log_q.logsumexp(1, keepdim=True)
            log_q = log_q - torch.where(total == -torch.inf, 0.0, total)
        q = log_q.exp()
        rest = torch.zeros_like(q[:, 0])
        if self._tail == "bucket":
            rest = torch.where(filled.sum(1) == shard.vocab_size, 0.0, (1.0 - q.sum(1)).clamp(min=0.0))
        owned = filled & (ids >= shard.start) & (ids < shard.stop)
        return Given(filled, log_q, q, rest, owned, torch.where(owned, ids - shard.start, 0))

    def _statistics(self, logits: Tensor, given: Given) -> Tensor:
        """What a shard sends: maximum and sum of its ids that are not given, its scores of the given: `[2 + K, C]`."""
        picked = torch.zeros_like(given.q)
        maximum, sumexp = torch.full_like(given.rest, -torch.inf), torch.zeros_like(given.rest)
        for block in row_blocks(logits) if logits.shape[1] else ():
            scores = self._scores.apply_(logits[block].to(picked.dtype, copy=True))
            mine = scores.gather(1, given.local[block])
            picked[block] = torch.where(given.owned[block], mine, 0.0)
            m = _mask(scores, given, block).amax(1)
            sumexp[block] = scores.sub_(torch.where(m == -torch.inf, 0.0, m)[:, None]).exp_().sum(1)
            # The maximum tells the other ranks of a score that is NaN or +inf, be its id given or not.
            bad = given.owned[block] & ~(mine < torch.inf)
            maximum[block] = torch.maximum(m, torch.where(bad, mine, -torch.inf).amax(1))
        return torch.cat([maximum[None], sumexp[None], picked.T])

    def _merge(self, gathered: Tensor, given: Given) -> tuple[Tensor, Tensor, Normalizer]:
        """Losses `[C]`; what `gradient` needs: the rest's maximum, its factor, dz at the ids `[C, 2 + K]`; and M, S."""
        m, s = gathered[:, 0], gathered[:, 1]
        of_rest = m.amax(0)
        none = of_rest == -torch.inf
        sum_of_rest = torch.where(m == -torch.inf, 0.0, s * (m - torch.where(none, 0.0, of_rest)).exp()).sum(0)
        z = torch.where(given.filled, gathered[:, 2:].sum(0).T, -torch.inf)
        maximum = torch.maximum(of_rest, z.amax(1))
        share = torch.where(none, 0.0, (of_rest - maximum).exp())
        total = sum_of_rest * share + (z - maximum[:, None]).exp().sum(1)
        log_p = z - maximum[:, None] - total.log()[:, None]
        log_p_rest = of_rest - maximum + sum_of_rest.log() - total.log()
        values = torch.where(given.q == 0, 0.0, given.q * (given.log_q - log_p)).sum(1)
        values = values + torch.where(given.rest == 0, 0.0, given.rest * (given.rest.log() - log_p_rest))
        mass = given.q.sum(1) + given.rest
        on_rest = torch.where(none, 0.0, mass * share / total - given.rest / sum_of_rest)
        at_given = mass[:, None] * log_p.exp() - given.q
        kept = torch.cat([of_rest[:, None], on_rest[:, None], at_given], 1)
        return values, kept, Normalizer(maximum, total, torch.zeros_like(total))


def _mask(scores: Tensor, given: Given, block: slice) -> Tensor:
    """`scores` `[B, n]` with the given ids at -inf, in place. A slot of another shard's id leaves its column alone."""
    low = torch.where(given.owned[block], -torch.inf, torch.inf).to(scores.dtype)
    return scores.scatter_reduce_(1, given.local[block], low, "amin")


def _describe(describe: Callable[[int, int], Exception], words: list[int]) -> Exception:
    return describe(*words)
