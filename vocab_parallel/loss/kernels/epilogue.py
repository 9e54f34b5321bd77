"""What follows the exchange: the merge of the shards' statistics, and a chunk's dH with the left factor of its dW.

Each kernel's eager twin is beside it.
"""

# Kernels are not Python functions: their arguments have no Python types.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128  # of one program of the merge
_COLUMNS = 1024  # of one program of the scaling: 16 bytes a thread in bfloat16


def merge(
    maximum: Tensor,  # [R, C]
    sumexp: Tensor,  # [R, C]
    target_score: Tensor,  # [R, C], 0 from shards that do not own the target
) -> tuple[Tensor, Tensor, Tensor]:
    """M, S and the target's score of each row, `[C]`, from those of R shards, added in rank order.

    A shard with m = -inf adds nothing. M is NaN if one m is.
    """
    ranks, rows = maximum.shape
    out = torch.empty_like(maximum[0]), torch.empty_like(sumexp[0]), torch.empty_like(target_score[0])
    if rows:
        with torch.cuda.device_of(maximum):
            merge_kernel[(triton.cdiv(rows, _ROWS),)](
                maximum, sumexp, target_score, *out, rows,
                *maximum.stride(), *sumexp.stride(), *target_score.stride(),
                RANKS=ranks, BLOCK=_ROWS, num_warps=_ROWS // 32, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def merge_reference(maximum: Tensor, sumexp: Tensor, target_score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`merge` in eager operations."""
    largest = maximum.amax(0)
    weight = torch.where(maximum == -torch.inf, 0.0, (maximum - largest).exp())  # -inf - -inf would be NaN
    return largest, (sumexp * weight).sum(0), target_score.sum(0)


@triton.jit
def merge_kernel(
    maximum, sumexp, target_score, out_maximum, out_sumexp, out_target_score, rows,
    maximum_rank, maximum_row, sumexp_rank, sumexp_row, target_rank, target_row,
    RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `merge`. A thread takes a row."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    maximum += row * maximum_row
    sumexp += row * sumexp_row
    target_score += row * target_row
    largest = tl.full([BLOCK], -float("inf"), out_maximum.dtype.element_ty)
    for rank in range(RANKS):
        m = tl.load(maximum + rank * maximum_rank, mask=inside, other=0.0)
        largest = tl.where((m > largest) | (m != m), m, largest)  # maximum() may pass over NaN
    total = tl.zeros([BLOCK], out_sumexp.dtype.element_ty)
    score = tl.zeros([BLOCK], out_target_score.dtype.element_ty)
    for rank in range(RANKS):
        m = tl.load(maximum + rank * maximum_rank, mask=inside, other=0.0)
        s = tl.load(sumexp + rank * sumexp_rank, mask=inside, other=0.0)
        total += s * tl.where(m == -float("inf"), 0.0, tl.exp(m - largest))
        score += tl.load(target_score + rank * target_rank, mask=inside, other=0.0)
    tl.store(out_maximum + row, largest, mask=inside)
    tl.store(out_sumexp + row, total, mask=inside)
    tl.store(out_target_score + row, score, mask=inside)


def scale(
    product: Tensor | None,  # [C, D], `e W` without the target's term
    hidden: Tensor,  # [C, D]
    weight: Tensor,  # [n, D]
    local: Tensor,  # [C] int64, the target's row of `weight`; read where at_target is not 0
    alpha: Tensor,  # [C]
    at_target: Tensor,  # [C], 0 where this shard does not own the target
    input_scale: Tensor,  # [C], may be one number expanded
    weight_scale: Tensor | None,  # [C], likewise
    uniform: Tensor | None = None,  # [C]
    sum_of_rows: Tensor | None = None,  # [D], with `uniform`
) -> tuple[Tensor | None, Tensor | None]:
    """A chunk's partial dH, and the left factor of its dW, each row of the three matrices read at most once.

    Returns:
        `input_scale (alpha product + at_target weight[local] - uniform sum_of_rows)`, float32 (float64), None without
        `product`; and `alpha weight_scale hidden`, in hidden's dtype, None without `weight_scale`.
    """
    (rows, columns), device = hidden.shape, hidden.device
    grad = None if product is None else torch.empty(rows, columns, dtype=alpha.dtype, device=device)
    scaled = None if weight_scale is None else torch.empty(rows, columns, dtype=hidden.dtype, device=device)
    if rows == 0 or columns == 0 or (product is None and weight_scale is None):
        return grad, scaled
    product = hidden if product is None else product  # not read then
    vectors = (None if x is None else x.contiguous() for x in (local, alpha, at_target, uniform, sum_of_rows))
    with torch.cuda.device_of(hidden):
        scale_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
            product, hidden, weight, *vectors, input_scale, weight_scale, grad, scaled,
            columns, *product.stride(), *hidden.stride(), *weight.stride(), *input_scale.stride(),
            0 if weight_scale is None else weight_scale.stride(0),
            HAS_TARGET=len(weight) > 0, BLOCK=_COLUMNS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return grad, scaled


def scale_reference(
    product: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    local: Tensor,
    alpha: Tensor,
    at_target: Tensor,
    input_scale: Tensor,
    weight_scale: Tensor | None,
    uniform: Tensor | None = None,
    sum_of_rows: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """`scale` in eager operations."""
    grad = scaled = None
    if product is not None:
        grad = alpha[:, None] * product
        if len(weight):
            row = weight[local].to(grad.dtype).masked_fill_(at_target[:, None] == 0, 0.0)  # may hold NaN, if another's
            grad.addcmul_(at_target[:, None], row)
        if uniform is not None and sum_of_rows is not None:
            grad.sub_(uniform[:, None] * sum_of_rows)
        grad.mul_(input_scale[:, None])
    if weight_scale is not None:
        scaled = ((alpha * weight_scale)[:, None] * hidden).to(hidden.dtype)
    return grad, scaled


@triton.jit
def scale_kernel(
    product, hidden, weight, local, alpha, at_target, uniform, sum_of_rows, input_scale, weight_scale, grad, scaled,
    columns, product_row, product_column, hidden_row, hidden_column, weight_row, weight_column,
    input_scale_row, weight_scale_row,
    HAS_TARGET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `scale`. A program takes BLOCK columns of a row."""
    FLOAT: tl.constexpr = alpha.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)  # row * stride can pass 2^31
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    a = tl.load(alpha + row)
    if grad is not None:
        value = tl.load(product + row * product_row + column * product_column, mask=inside, other=0.0).to(FLOAT)
        value = a * value
        if HAS_TARGET:
            t = tl.full([BLOCK], tl.load(at_target + row), FLOAT)
            at = tl.load(local + row).to(tl.int64)
            read = inside & (t != 0.0)
            w = tl.load(weight + at * weight_row + column * weight_column, mask=read, other=0.0).to(FLOAT)
            value += t * w
        if uniform is not None:
            value -= tl.load(uniform + row) * tl.load(sum_of_rows + column, mask=inside, other=0.0)
        value *= tl.load(input_scale + row * input_scale_row)
        tl.store(grad + row * columns + column, value, mask=inside)
    if scaled is not None:
        value = tl.load(hidden + row * hidden_row + column * hidden_column, mask=inside, other=0.0).to(FLOAT)
        value *= a * tl.load(weight_scale + row * weight_scale_row)
        tl.store(scaled + row * columns + column, value.to(scaled.dtype.element_ty), mask=inside)
