"""The chunk loop of distillation: a student's head against what a teacher says of each row.

    Z = H Wᵀ                   then what the teacher compares it with, one exchange (Jensen-Shannon: two),
    Z <- d loss / d Z          in float32 blocks of rows, and
    dH = Z W                   its reduction in flight during
    dW += Zᵀ H                 and the next chunks

The gradient needs the merged statistics before its first GEMM, so there is nothing to hide the exchange behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, raise_deferred
from vocab_parallel.arguments import target_found
from vocab_parallel.collectives import apply
from vocab_parallel.loss.fused import CallRows, FusedCall, HeadGradients, hand_over
from vocab_parallel.loss.options import LossOptions


class Teacher(Protocol):
    """What a student's logits are compared with, chunk by chunk."""

    def compare(self, chunk: int, logits: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' losses `[C]`, and what of them `gradient` needs, one tensor. Exchanges.

        Args:
            logits: The student's, raw `[C, n]`.
            valid: bool `[C]`; other rows may hold anything.
        """

    def again(self, chunk: int) -> None:
        """Prepares `gradient` of a chunk that was not compared just now."""

    def gradient(self, chunk: int, logits: Tensor, kept: Tensor, factor: Tensor) -> None:
        """Writes `factor` `[C]` times the gradient over the raw logits; 0 where `factor` is 0."""


@dataclass(frozen=True)
class DistillCall:
    """What a distillation was asked to do.

    Attributes:
        fused: Its student's side. The last of its row data is the row weight, if `weighted`.
        teacher: Makes the teacher from the student's side and the teacher's own tensors.
    """

    fused: FusedCall
    options: LossOptions
    weighted: bool
    teacher: Callable[[Student, Sequence[Tensor | None]], Teacher]

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *tensors: Tensor | None) -> Tensor:
        """The loss of the student's tensors and the teacher's."""
        return apply(_PerRow if self.options.reduction == "none" else _Reduced, input, weight, bias, self, *tensors)


class Student:
    """The student's side of one call, and its gradients.

    Attributes:
        head: Its plan of rows, its targets (which say what rows are ignored), and its columns.
        data: The row data of all rows of the group, without the row weight.
        dtype: What losses are computed in, by its own.
    """

    def __init__(
        self, call: DistillCall, rows: CallRows, input: Tensor, weight: Tensor, bias: Tensor | None,
        needs: Sequence[bool], tensors: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        self.call, self.rows = call, rows
        self.head = rows.head(input, weight, bias)
        self.plan, self.shard = self.head.plan, call.fused.shard
        self.data = rows.data[:-1] if call.weighted else rows.data
        self.dtype = torch.promote_types(input.dtype, torch.float32)
        self.gradients = HeadGradients(self.head, weight, bias, needs) if any(needs) else None
        self._teacher = call.teacher(self, tensors)

    def exchange(self, chunk: int, payload: Tensor) -> Tensor:
        """Every rank's payload, `[tp, *payload.shape]`; the first one opens the call."""
        call = self.call.fused
        found = target_found(self.head.targets.ids, self.shard, call.ignore_index) if chunk == 0 else None
        opens = chunk == 0 and not self.rows.opened
        exchange = Exchange(
            self.shard, "loss", self.rows.words, payload=payload, checksum=self.rows.checksum, found=found, opens=opens
        )
        return exchange.wait()

    def forward(self, chunk: int, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """One chunk: the rows' weighted losses, and what a backward needs of them; with `scale`, its gradients."""
        index = self.plan.chunks[chunk]
        valid = self.head.targets.valid[index]
        hidden = self.plan.hidden(chunk).masked_fill(~valid[:, None], 0.0)
        logits = self.head.ranges[0].project(hidden)
        values, kept = self._teacher.compare(chunk, logits, valid)
        factor = self._weight(index, torch.ones_like(values))
        if scale is not None:
            self._add(chunk, hidden, logits, kept, factor, scale)
        return torch.where(valid, factor * values, 0.0), kept

    def backward(self, chunk: int, kept: Tensor, upstream: Tensor) -> None:
        """One chunk again, now that the gradients of the rows' losses `[T]` are known."""
        factor = self._weight(self.plan.chunks[chunk], upstream[self.plan.chunks[chunk]])
        # Rows without a gradient may hold NaN, and a zero factor would not keep it out of dW.
        hidden = self.plan.hidden(chunk).masked_fill((factor == 0)[:, None], 0.0)
        logits = self.head.ranges[0].project(hidden)
        self._teacher.again(chunk)
        self._add(chunk, hidden, logits, kept, factor, torch.ones_like(factor[:1].sum()))

    def _weight(self, index: slice | Tensor, upstream: Tensor) -> Tensor:
        """`upstream` `[C]` times the rows' weights; 0 in ignored rows."""
        weight = self.rows.data[-1][index].to(upstream.dtype) * upstream if self.call.weighted else upstream
        return torch.where(self.head.targets.valid[index], weight, 0.0)

    def _add(self, chunk: int, hidden: Tensor, logits: Tensor, kept: Tensor, factor: Tensor, scale: Tensor) -> None:
        assert self.gradients is not None
        self._teacher.gradient(chunk, logits, kept, factor)
        accumulator = self.gradients.ranges[0]
        product = accumulator.product(logits)
        if product is not None:
            self.plan.reduce(chunk, product.to(scale.dtype) * scale)
        accumulator.add_dense(hidden, logits)


class _Reduced(torch.autograd.Function):
    """A loss that is one number. Its gradients are formed in forward, while both heads' logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: DistillCall, *tensors: Tensor | None
    ) -> Tensor:
        needs, wide = _needs(ctx, call), call.fused.wide
        rows = CallRows.of(call.fused, input, weight, bias, needs)
        student = Student(call, rows, input, weight, bias, needs, tensors)
        plan, count, gradients = student.plan, student.head.targets.count, student.gradients
        scale = torch.ones_like(count, dtype=student.dtype)
        if call.options.reduction == "mean" and wide.size == 1:
            scale = scale / count.clamp(min=1)
        # dH is rounded once if the mean's 1 / count is in it before. float16 would underflow: it scales in backward.
        # With a wider mean the count is known only at the end.
        now = scale if input.dtype != torch.float16 and wide.size == 1 else torch.ones_like(scale)
        values = [student.forward(at, None if gradients is None else now)[0] for at in range(len(plan.chunks))]
        total = plan.in_order(values)
        if call.options.reduction == "mean":
            total, count = wide.reduce(total.sum(dtype=torch.float64), count)
            scale = scale if wide.size == 1 else wide.size * scale / count.clamp(min=1)
        if gradients is not None:
            grad_input = plan.input_grad().view(input.shape) if needs[0] else None
            ctx.save_for_backward(grad_input, gradients.weight, gradients.bias, scale / now, scale)
            ctx.call, ctx.dtypes = call, tuple(None if x is None else x.dtype for x in (input, weight, bias))
        return call.options.reduce(total, count).to(scale.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, grad_weight, grad_bias, input_scale, scale = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.dtypes
        factor, call = grad * scale, ctx.call.fused
        grads = (
            None if grad_input is None else (grad_input * (grad * input_scale)).to(of_input),
            None if grad_weight is None else hand_over(call.main_grad_of, grad_weight, factor, of_weight),
            None if grad_bias is None else (grad_bias * factor).to(of_bias),
        )
        raise_deferred(call.shard)
        return *grads, *[None] * (len(ctx.needs_input_grad) - 3)


class _PerRow(torch.autograd.Function):
    """Rows' losses, each with an upstream gradient of its own: both projections are computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: DistillCall, *tensors: Tensor | None
    ) -> Tensor:
        needs = _needs(ctx, call)
        rows = CallRows.of(call.fused, input, weight, bias, needs)
        student = Student(call, rows, input, weight, bias, [], tensors)
        plan = student.plan
        values, kept = zip(*(student.forward(chunk, None) for chunk in range(len(plan.chunks))), strict=True)
        if any(needs):
            ctx.save_for_backward(input, weight, bias, rows.target, *rows.data, *tensors, *kept)
            ctx.arguments = call, needs, rows.make_plan, len(tensors)
        return plan.mine(plan.in_order(values)).view(call.fused.rows_shape).to(student.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, needs, make_plan, own = ctx.arguments
        raise_deferred(call.fused.shard)
        input, weight, bias, target, *rest = ctx.saved_tensors
        count = len(call.fused.row_data)
        data, tensors, kept = rest[:count], rest[count : count + own], rest[count + own :]
        rows = CallRows(call.fused, make_plan, target, None, tuple(data))
        student = Student(call, rows, input, weight, bias, needs, tensors)
        gradients = student.gradients
        assert gradients is not None
        upstream = student.plan.whole(grad.reshape(-1).contiguous())
        for chunk, numbers in enumerate(kept):
            student.backward(chunk, numbers, upstream)
        one = torch.ones_like(upstream[:1].sum())
        grads = (
            student.plan.input_grad().view(input.shape) if needs[0] else None,
            None
            if gradients.weight is None
            else hand_over(call.fused.main_grad_of, gradients.weight, one, weight.dtype),
            None if gradients.bias is None else gradients.bias.to(bias.dtype),
        )
        return *grads, *[None] * (len(ctx.needs_input_grad) - 3)


def _needs(ctx: Any, call: DistillCall) -> list[bool]:
    """Which of input, weight and bias need a gradient."""
    return [call.fused.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
