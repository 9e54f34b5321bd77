"""The autograd functions over the chunk loop: one loss with its gradients formed in forward, or per-row values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import raise_deferred
from vocab_parallel.loss.checks import row_checksum
from vocab_parallel.loss.engine import Head, Soft
from vocab_parallel.loss.gradients import RangeGradients, scaled
from vocab_parallel.loss.invariant import InvariantRows, aligned
from vocab_parallel.loss.normalizer import Normalizer
from vocab_parallel.loss.objective import Objective
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.outputs import RowOutputs
from vocab_parallel.loss.rows import ReplicatedRows, RowPlan, SequenceParallelRows, agree_on_rows
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import VocabShard


@dataclass(frozen=True)
class FusedCall:
    """What a fused operation was asked to do, besides `input`, weight and bias.

    Attributes:
        name: In words, with its options.
        objective: Makes the objective from the row data of all T rows of the group.
        target: Ids `[...]`, or a distribution `[..., shard_size]` ("probabilities" or "log-probabilities" by `soft`).
        row_data: Tensors whose rows follow the target's.
        ids: The ranges of ids of all ranks, in order.
        wide: Over which ranks a mean goes.
        every_row: Values of ignored rows matter too.
        main_grad_of: The parameter whose `main_grad` takes dW, if any.
        grad_enabled: Read before the autograd function turns it off.
    """

    name: str
    objective: Callable[[tuple[Tensor, ...]], Objective]
    target: Tensor
    row_data: tuple[Tensor, ...]
    shard: VocabShard
    ids: Sequence[range]
    scores: Scores
    ignore_index: int
    chunk_size: int
    wide: WideMean
    soft: str = ""
    sequence_parallel: bool = False
    outputs: RowOutputs | None = None
    every_row: bool = False
    tp_invariant: bool = False
    main_grad_of: Tensor | None = None
    grad_enabled: bool = True

    @property
    def rows_shape(self) -> torch.Size:
        """Of per-row values."""
        return self.target.shape[:-1] if self.soft else self.target.shape

    @property
    def ignored_id(self) -> int:
        """What marks an ignored row; with a distribution, whose rows have the id 0, a filler row."""
        return -1 if self.soft else self.ignore_index


class Reduced(torch.autograd.Function):
    """A loss that is one number. Its gradients are formed in forward, while the exponentials are at hand."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: FusedCall, options: LossOptions
    ) -> Tensor:
        needs = [call.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        rows = CallRows.of(call, input, weight, bias, needs)
        head, objective = rows.head(input, weight, bias), rows.objective()
        plan, count = head.plan, head.targets.count
        gradients = HeadGradients(head, weight, bias, needs, call.tp_invariant) if any(needs) else None
        scale = torch.ones_like(count, dtype=torch.promote_types(input.dtype, torch.float32))
        if options.reduction == "mean" and call.wide.size == 1:
            scale = scale / count.clamp(min=1)
        # dH is rounded once if the mean's 1 / count is in it before. float16 would underflow: it scales in backward.
        # With a wider mean the count is known only at the end.
        early = input.dtype != torch.float16 and call.wide.size == 1
        now = scale if early else torch.ones_like(scale)
        values = [
            head.forward(chunk, objective, None if gradients is None else gradients.ranges, now)[0][0]
            for chunk in range(len(plan.chunks))
        ]
        head.finish(objective)
        _fill(call, plan)
        total = plan.in_order(values)
        if options.reduction == "mean":
            total, count = call.wide.reduce(total.sum(dtype=torch.float64), count)
            scale = scale if call.wide.size == 1 else call.wide.size * scale / count.clamp(min=1)
        if gradients is not None:
            gradients.finish()
            grad_input = plan.input_grad().view(input.shape) if needs[0] else None
            ctx.save_for_backward(grad_input, gradients.weight, gradients.bias, scale / now, scale)
            ctx.call, ctx.dtypes = call, tuple(None if x is None else x.dtype for x in (input, weight, bias))
        return options.reduce(total, count).to(scale.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, grad_weight, grad_bias, input_scale, scale = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.dtypes
        factor = grad * scale
        grads = (
            None if grad_input is None else scaled(grad_input, grad * input_scale, of_input),
            None if grad_weight is None else hand_over(ctx.call.main_grad_of, grad_weight, factor, of_weight),
            None if grad_bias is None else (grad_bias * factor).to(of_bias),
        )
        raise_deferred(ctx.call.shard)
        return *grads, None, None


class PerRow(torch.autograd.Function):
    """Per-row values, each with an upstream gradient of its own: the projection is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: FusedCall) -> tuple[Tensor, ...]:
        needs = [call.grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        rows = CallRows.of(call, input, weight, bias, needs)
        head, objective = rows.head(input, weight, bias), rows.objective()
        plan = head.plan
        chunks = [head.forward(chunk, objective, None, None) for chunk in range(len(plan.chunks))]
        head.finish(objective)
        _fill(call, plan)
        if any(needs):
            every = [normalizer.kept() for _, normalizer in chunks]
            kept = {name: plan.in_order([one[name] for one in every]) for name in every[0]}
            ctx.save_for_backward(input, weight, bias, rows.target, rows.soft, *rows.data, *kept.values())
            ctx.arguments = call, needs, rows.make_plan, list(kept)
        columns = zip(*(values for values, _ in chunks), strict=True)
        return tuple(plan.mine(plan.in_order(list(parts))).view(call.rows_shape) for parts in columns)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, needs, make_plan, names = ctx.arguments
        raise_deferred(call.shard)
        input, weight, bias, target, soft, *rest = ctx.saved_tensors
        data, kept = rest[: len(call.row_data)], rest[len(call.row_data) :]
        rows = CallRows(call, make_plan, target, soft, tuple(data))
        head, objective = rows.head(input, weight, bias), rows.objective()
        gradients = HeadGradients(head, weight, bias, needs, call.tp_invariant)
        of_rows = Normalizer(**dict(zip(names, kept, strict=True)))
        upstream = [head.plan.whole(grad.reshape(-1).to(of_rows.maximum.dtype).contiguous()) for grad in grads]
        for chunk, index in enumerate(head.plan.chunks):
            normalizer, targets = of_rows.rows(index), head.targets.rows(index)
            given = tuple(grad[index] for grad in upstream)
            coefficients = objective.evaluate(normalizer, targets, index, given)[1]
            assert coefficients is not None
            head.backward(chunk, normalizer, coefficients, gradients.ranges)
        gradients.finish()
        one = torch.ones_like(upstream[0][:1].sum())
        return (
            head.plan.input_grad().view(input.shape) if needs[0] else None,
            None if gradients.weight is None else hand_over(call.main_grad_of, gradients.weight, one, weight.dtype),
            None if gradients.bias is None else gradients.bias.to(weight.dtype),
            None,
        )


@dataclass(frozen=True)
class CallRows:
    """The rows of a call: how to plan them, and what belongs to each of all T rows of the group."""

    call: FusedCall
    make_plan: Callable[[Tensor], RowPlan]
    target: Tensor  # [T] ids; zeros with a soft target
    soft: Tensor | None  # [T, shard_size]
    data: tuple[Tensor, ...]  # each [T, ...]
    words: str = ""
    checksum: Tensor | int = 0
    opened: bool = False

    @classmethod
    def of(cls, call: FusedCall, input: Tensor, weight: Tensor, bias: Tensor | None, needs: Sequence[bool]) -> CallRows:
        flat = input.reshape(-1, input.shape[-1])
        words = (
            f"{call.name}, input {_shape(input, call.sequence_parallel)}, weight {_shape(weight)}, "
            f"bias {_shape(bias)}, target {_shape(call.target, call.sequence_parallel)}, "
            f"row data {', '.join(_shape(rows, call.sequence_parallel) for rows in call.row_data) or 'none'}, "
            f"chunk_size {call.chunk_size}, input gradient {'wanted' if needs[0] else 'not wanted'}"
        )
        check = row_checksum(*(() if call.soft else (call.target,)), *call.row_data, device=flat.device)
        make_plan, opened = _plan(call, flat, words, check)
        plan = make_plan(flat)
        target, soft = call.target.reshape(-1), None
        if call.soft:
            soft = plan.whole(call.target.reshape(-1, call.target.shape[-1]))
            target = target.new_zeros(call.rows_shape.numel(), dtype=torch.int64)
        whole = plan.whole(target.to(torch.int64), call.ignored_id)
        flat_data = (rows.detach().reshape(-1, *rows.shape[len(call.rows_shape) :]) for rows in call.row_data)
        data = tuple(plan.whole(rows) for rows in flat_data)
        return cls(call, make_plan, whole, soft, data, words, 0 if opened else check, opened)

    def objective(self) -> Objective:
        return self.call.objective(self.data)

    def head(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
        call = self.call
        return Head(
            self.make_plan(input.reshape(-1, input.shape[-1])), weight, bias,
            target=self.target, soft=None if self.soft is None else Soft(self.soft, call.soft == "log-probabilities"),
            shard=call.shard, ids=call.ids, scores=call.scores, ignore_index=call.ignored_id, words=self.words,
            checksum=self.checksum, outputs=call.outputs, every_row=call.every_row,
            leaves=call.tp_invariant, opens=not self.opened,
        )  # fmt: skip


def _plan(call: FusedCall, flat: Tensor, words: str, check: Tensor) -> tuple[Callable[[Tensor], RowPlan], bool]:
    """How to plan the rows of a flat input; and whether the ranks have compared `check` in an exchange for it."""
    shard = call.shard
    if not call.sequence_parallel or shard.tp_size == 1:
        plan = InvariantRows if call.tp_invariant else ReplicatedRows
        return partial(plan, shard=shard, chunk_size=call.chunk_size), False
    counts, local = agree_on_rows(flat, call.rows_shape.numel(), shard, words, check)
    return partial(SequenceParallelRows, shard=shard, chunk_size=call.chunk_size, rows=counts, local_target=local), True


class HeadGradients:
    """dW and db of this rank, with an accumulator for each range of ids."""

    def __init__(
        self, head: Head, weight: Tensor, bias: Tensor | None, needs: Sequence[bool], leaves: bool = False
    ) -> None:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.weight = None
        if needs[1]:
            self.weight = _accumulator(weight, dtype)
            self.weight[sum(len(some.weight) for some in head.ranges) :] = 0.0  # padding rows
        self.bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needs[2] else None
        self._copies: list[tuple[Tensor, Tensor]] = []  # parts of dW, and the leaves that stand in for them
        self.ranges = [
            RangeGradients(
                some.weight,
                None if self.weight is None else self._part(self.weight[some.storage], leaves),
                None if self.bias is None else self.bias[some.storage],
                needs[0],
                head.scores,
            )
            for some in head.ranges
        ]

    def _part(self, of_weight: Tensor, leaf: bool) -> Tensor:
        part = aligned(of_weight) if leaf else of_weight
        if part is not of_weight:
            self._copies.append((of_weight, part))
        return part

    def finish(self) -> None:
        """To be called after the last chunk."""
        for some in self.ranges:
            some.finish()
        for of_weight, part in self._copies:
            of_weight.copy_(part)


def _accumulator(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for dW; laid out as its transpose where a CPU forms that (see `RangeGradients`)."""
    if weight.is_cuda or weight.dtype == dtype:
        return torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    return weight.new_empty(*reversed(weight.shape), dtype=dtype).T


def hand_over(parameter: Tensor | None, grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """What autograd gets: dW; or zeros, with dW added to the parameter's float32 `main_grad` as Megatron's layers do.

    The zeros take no memory. They make the host's hooks fire, and a tied embedding's gradient can add to them.
    """
    if parameter is None:
        return scaled(grad, factor, dtype)
    parameter.main_grad.addcmul_(grad, factor)  # type: ignore[attr-defined]
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return grad.new_zeros(1, dtype=dtype).expand_as(grad)


def _fill(call: FusedCall, plan: RowPlan) -> None:
    if call.outputs is not None:
        call.outputs.fill(lambda parts: plan.mine(plan.in_order(parts)), call.rows_shape)


def _shape(tensor: Tensor | None, any_rows: bool = False) -> str:
    if tensor is None:
        return "none"
    shape = ["*", *tensor.shape[1:]] if any_rows else list(tensor.shape)
    return f"[{', '.join(map(str, shape))}] {tensor.dtype}"
