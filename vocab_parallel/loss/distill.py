"""Distillation between two heads over one sharded vocabulary, from their hidden states: no whole logits of either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture, first_row, judge
from vocab_parallel.collectives import all_gather, uncompiled
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.loss.checks import check_positive
from vocab_parallel.loss.distill_checks import check_teacher
from vocab_parallel.loss.distill_loop import DistillCall, Student
from vocab_parallel.loss.divergence import Divergence, Merged
from vocab_parallel.loss.linear import autocast, chunk_rows, prepare
from vocab_parallel.loss.normalizer import not_finite
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.rows import row_numbers
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import VocabShard


@uncompiled
def linear_distillation(
    input: Tensor,  # [..., D], the same on every rank; with sequence_parallel this rank's rows [t, ..., D]
    linear_weight: Tensor,  # [shard_size, D]
    teacher_input: Tensor,  # [..., E], rows as in input
    teacher_weight: Tensor,  # [shard_size, E]
    *,
    shard: VocabShard,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    linear_bias: Tensor | None = None,  # [shard_size]
    teacher_bias: Tensor | None = None,  # [shard_size]
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    target: Tensor | None = None,  # [...] int64
    ignore_index: int = -100,
    row_weight: Tensor | None = None,  # [...]
    reduction: str = "mean",
    mean_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """Divergence of a student's distribution over the vocabulary from a teacher's, row by row.

    Both heads are sharded the same way; their widths and dtypes may differ. Rows go in chunks. For a mean or a sum the
    gradients are formed in forward (4 GEMMs a chunk); with `reduction="none"` backward computes both projections again
    (6 GEMMs).

    Args:
        input, linear_weight, linear_bias: The student's, as in `linear_cross_entropy`.
        teacher_input, teacher_weight, teacher_bias: The teacher's. They get no gradient: while gradients are recorded
            they must not require one, so that a teacher which should train is not frozen in silence. Detach them.
        divergence: With the distributions t of the teacher and s of the student, "forward_kl" is `KL(t || s)`,
            "reverse_kl" `KL(s || t)`, and "jensen_shannon" `beta KL(t || m) + (1 - beta) KL(s || m)` with
            `m = beta t + (1 - beta) s`. Where a class of -inf has a probability on the other side, a KL divergence is
            +inf; the reverse one has no gradient there (NaN), as in PyTorch.
        beta: In (0, 1).
        temperature: Divides the scores of both, after the softcaps. The loss is not multiplied by its square.
        target: Says which rows to leave out: those that hold `ignore_index`, whose values are never read. The other
            ids must be real but are no matter. None: no row is left out.
        row_weight, reduction, mean_group: As in `cross_entropy`.
        sequence_parallel: As in `linear_cross_entropy`. Without `target`, a row weight and the rows' losses are of this
            rank's rows.
        chunk_size: Rows of a chunk, over the whole group.
        memory_budget: Bytes for a chunk's logits of both heads. Default: 128 MiB, and at most 2,048 rows.

    Returns:
        Nats, float32 (float64 for float64 `input`): for "none" `[...]`, else a scalar over all rows of the group.

    Collectives:
        Forward, per chunk: one all-gather of 20 bytes a row (Jensen-Shannon: 16, then a second one of 8, for its two
        sums need both normalizers); and, if `input` needs a gradient, one all-reduce of the chunk's dH, in flight
        during the dW GEMM and later chunks. Backward: none ("none": the dH reductions move there). With
        `sequence_parallel` as in `linear_cross_entropy`, and one more all-gather per chunk, of the teacher's rows.

    Memory:
        Two buffers `[chunk_size, num_valid]`, one in the dtype of each head; dW in float32; dH. Nothing else grows with
        T but 4 bytes a row ("none": 20).

    Raises:
        TargetRangeError, LayoutMismatchError, NonFiniteError, UngatheredWeightError, ValueError: On every rank, though
        only one may have seen it.

    Source:
        Generalised Jensen-Shannon divergence for distillation: Agarwal et al. 2023 (arXiv:2306.13649).
    """
    if target is None:
        ignore_index = -100
    options = LossOptions(reduction, ignore_index, scores=Scores(softcap, temperature))
    between = Divergence(divergence, beta, options.scores, Scores(teacher_softcap, temperature))
    name = f"linear_distillation({options}, {between})"
    with WideMean(shard, mean_group, name) as wide:
        teacher_input, teacher_weight, teacher_bias = autocast(teacher_input, teacher_weight, teacher_bias)
        teacher = (teacher_input, teacher_weight, teacher_bias)

        def check() -> None:
            between.check()
            check_teacher(input, *teacher, shard)

        def teach(student: Student, tensors: Sequence[Tensor | None]) -> SecondHead:
            return SecondHead(student, tensors, between)

        input, weight, bias, call = prepare_student(
            name, check, teach, input, linear_weight, linear_bias, target, shard, options, wide,
            row_weight=row_weight, sequence_parallel=sequence_parallel, chunk_size=chunk_size,
            memory_budget=memory_budget, beside=teacher_weight,
        )  # fmt: skip
        return call(input, weight, bias, *(None if tensor is None else tensor.detach() for tensor in teacher))


def prepare_student(
    name: str, check: Callable[[], None], teacher: Any, input: Tensor, weight: Tensor, bias: Tensor | None,
    target: Tensor | None, shard: VocabShard, options: LossOptions, wide: WideMean, *,
    row_data: tuple[Tensor, ...] = (), row_weight: Tensor | None = None, sequence_parallel: bool = False,
    chunk_size: int | None = None, memory_budget: int | None = None, beside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, DistillCall]:  # fmt: skip
    """Checks a distillation's arguments and describes it; a fault, also one of `check`, is raised on every rank.

    Args:
        teacher: As in `DistillCall`.
        beside: The weight of a second head, whose logits share the memory.
    """

    def check_sizes() -> None:
        check_positive("chunk_size", chunk_size)
        check_positive("memory_budget", memory_budget)
        check()

    fault = capture(check_sizes)
    if fault is not None:
        Exchange(shard, "loss", name, fault=fault).wait()
    if beside is not None:
        name = f"{name}, teacher_weight {list(beside.shape)} {beside.dtype}"
        if chunk_size is None:
            wider = torch.promote_types(beside.dtype, getattr(weight, "dtype", beside.dtype))  # not yet checked
            chunk_size = max(1, chunk_rows(shard, wider, memory_budget) // 2)
    if target is None and isinstance(input, Tensor):  # else the next check complains about input
        target = torch.zeros(input.shape[:-1], dtype=torch.int64, device=input.device)
    input, weight, bias, fused = prepare(
        name, None, input, weight, bias, target, shard, options, wide,
        row_data=row_data if row_weight is None else (*row_data, row_weight), row_weight=row_weight,
        sequence_parallel=sequence_parallel, chunk_size=chunk_size, memory_budget=memory_budget,
    )  # fmt: skip
    return input, weight, bias, DistillCall(fused, options, row_weight is not None, teacher)


class SecondHead:
    """A teacher that is a head of its own: its logits are computed beside the student's, chunk by chunk."""

    def __init__(self, student: Student, tensors: Sequence[Tensor | None], between: Divergence) -> None:
        input, weight, bias = tensors
        assert input is not None and weight is not None
        self._student = student
        self._between = replace(between, dtype=torch.promote_types(student.dtype, input.dtype))
        self._head = student.rows.head(input, weight, bias)
        self._logits = input.new_empty(0)

    def compare(self, chunk: int, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        self.again(chunk)
        between, shard = self._between, self._student.shard
        gathered = self._student.exchange(chunk, between.statistics(logits, self._logits))
        rows = between.merge(gathered)
        _require_finite(self._student, rows, gathered, valid, self._head.plan.chunks[chunk])
        if not between.mixes:
            return rows.own, torch.stack(rows)
        # Not another `Exchange`: the ranks have agreed on this call, and this one needs less room.
        own, others = all_gather(shard, between.mixture(logits, self._logits, rows)).wait().sum(0)
        return between.beta * others + (1.0 - between.beta) * own, torch.stack([*rows[:4], own])

    def again(self, chunk: int) -> None:
        self._logits = self._head.ranges[0].project(self._head.plan.hidden(chunk))

    def gradient(self, chunk: int, logits: Tensor, kept: Tensor, factor: Tensor) -> None:
        self._between.gradient(logits, self._logits, Merged(*kept), factor)


def _require_finite(
    student: Student, rows: Merged, gathered: Tensor, valid: Tensor, chunk: slice | Tensor
) -> None:  # fmt: skip
    """As `normalizer.require_finite`, of both heads: the student's rows first."""
    count = len(valid)
    if not count:
        return
    maxima = torch.cat([rows.student_maximum, rows.teacher_maximum])
    at = first_row(~maxima.isfinite() & valid.repeat(2))
    here = at.clamp(min=0)[None]
    local = torch.cat([gathered[:, 0], gathered[:, 2]], 1).index_select(1, here)[:, 0]
    part = first_row(~local.isfinite() & (local != -torch.inf))
    numbers = row_numbers(chunk)
    row = at % count
    number = row + numbers.start if isinstance(numbers, range) else numbers.index_select(0, here % count)[0]
    value = maxima.index_select(0, here)[0]
    words = torch.stack([at.double(), number.double(), value.double(), part.double(), (at // count).double()])
    judge(student.shard, words, error=NonFiniteError, describe=_describe)


def _describe(words: list[float]) -> NonFiniteError:
    whose = "of the student" if words[4] == 0 else "of the teacher"
    return NonFiniteError(f"{whose}: {not_finite(1, words[:4])}")
