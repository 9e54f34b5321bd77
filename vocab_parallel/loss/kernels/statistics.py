"""One shard's softmax statistics in one pass over the logits, and their exponentials in place in a second one.

A program takes a row. It keeps the running maximum m, and rescales the sums when m grows:

    s <- s exp(m - m') + sum exp(z - m')

(the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867). A row that fits into registers is read once.
The eager twin is `vocab_parallel.loss.normalizer.statistics`.
"""

# Kernels are not Python functions: their arguments have no Python types.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a program holds at a time. A row of at most `_WHOLE` is read once; a longer one in blocks of `_BLOCK`,
# small enough for several programs on a multiprocessor, which hide each other's loads. Half of it where a column takes
# twice the registers. 16 warps at most: two programs on a multiprocessor, and no more threads than AMD allows.
_WHOLE = 1 << 14
_BLOCK = 1 << 12
_MOST_WARPS = 16

# exp of it is 0 in every dtype, and 0 times it is 0, which 0 times -inf is not.
_LOWEST = tl.constexpr(-1e4)


class Statistics(NamedTuple):
    """Each `[T]`, float32 (float64 for float64 logits), `argmax` int64; None what was not asked."""

    maximum: Tensor
    sumexp: Tensor
    shifted_sum: Tensor | None
    expected: Tensor | None
    second: Tensor | None
    argmax: Tensor | None
    target_score: Tensor | None


def statistics(
    logits: Tensor,  # [T, n]; any strides
    *,
    softcap: float | None,
    temperature: float,
    shifted_sum: bool,
    expected: bool,
    top: bool,
    in_place: bool,
    target: Tensor | None = None,  # [T] int64
) -> Statistics:
    """Statistics of the scores `z = softcap tanh(x / softcap) / temperature` of raw logits x; n may be 0.

    Args:
        shifted_sum: Also `sum(z - m)`.
        expected: Also `sum exp(z - m) (z - m)`, to which z = -inf adds 0.
        top: Also the second largest z (two equal maxima: the same; one column: -inf) and the first column of the
            largest (-0.0 equals 0.0).
        in_place: Replace x by `exp(z - m)`, in its own dtype.
        target: Also z of this column of each row, as the other statistics see it: 0 where it is negative.

    Returns:
        An empty or all -inf row has m = -inf, s = 0, and 0 in place. NaN in a row gives m = NaN, else +inf gives
        m = +inf; the row's other values are then undefined, `argmax` still a column.
    """
    rows, columns = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)

    def new(wanted: bool, dtype: torch.dtype = dtype) -> Tensor | None:
        return torch.empty(rows, dtype=dtype, device=logits.device) if wanted else None

    maximum, sumexp = (torch.empty(rows, dtype=dtype, device=logits.device) for _ in range(2))
    out = Statistics(
        maximum, sumexp, new(shifted_sum), new(expected), new(top), new(top, torch.int64), new(target is not None)
    )
    if rows == 0:
        return out
    many = softcap is not None or top or (shifted_sum and expected)
    block, warps, whole = _launch_shape(columns, (2 if dtype == torch.float64 else 1) * (2 if many else 1))
    with torch.cuda.device_of(logits):
        statistics_kernel[(rows,)](
            logits, None if target is None else target.contiguous(), *out,
            columns, logits.stride(0), logits.stride(1),
            1.0 / (softcap or temperature), (softcap or 1.0) / temperature,
            CAPPED=softcap is not None, TEMPERED=temperature != 1.0, IN_PLACE=in_place,
            WHOLE=whole, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _launch_shape(columns: int, registers: int) -> tuple[int, int, bool]:
    """Columns of a block, warps of a program, and whether a block is a whole row."""
    whole = columns <= _WHOLE // registers
    block = max(16, triton.next_power_of_2(columns) if whole else _BLOCK // registers)
    of_a_thread = (32 if whole else 16) // registers
    return block, min(_MOST_WARPS, max(1, block // (32 * of_a_thread))), whole


@triton.jit
def statistics_kernel(
    logits, target, maximum, sumexp, shifted_sum, expected, second, argmax, target_score, columns,
    row_stride, column_stride, inner: tl.float64, outer: tl.float64,
    CAPPED: tl.constexpr, TEMPERED: tl.constexpr, IN_PLACE: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `statistics`; what is None is not wanted. `z = outer tanh(inner x)` if CAPPED, else `inner x`."""
    FLOAT: tl.constexpr = maximum.dtype.element_ty
    SHIFTED: tl.constexpr = shifted_sum is not None
    EXPECTED: tl.constexpr = expected is not None
    TOP: tl.constexpr = second is not None
    row = tl.program_id(0).to(tl.int64)  # row * row_stride can pass 2^31
    logits += row * row_stride
    inner = tl.full([], inner, FLOAT)
    outer = tl.full([], outer, FLOAT)

    if target_score is not None:  # before this row is overwritten; 0 has the score 0
        at = tl.load(target + row).to(tl.int64)
        raw = tl.load(logits + at * column_stride, mask=at >= 0, other=0.0).to(FLOAT)
        tl.store(target_score + row, _score(raw, inner, outer, CAPPED, TEMPERED))

    # m, s, shifted sum, expected, second, argmax
    lowest = tl.full([], -float("inf"), FLOAT)
    zero = tl.full([], 0.0, FLOAT)
    state = (lowest, zero, zero, zero, lowest, tl.full([], 0, tl.int32))

    # A mask that ends anywhere makes loads of single elements, one that ends at a multiple of 16 does not: the last
    # columns come apart. They come first, since a row that is held whole is written relative to the final m.
    even = columns // 16 * 16
    if even < columns:
        tail = _load(logits, even, columns, column_stride, inner, outer, CAPPED, TEMPERED, True, 16)
        state = _fold(state, tail, even, columns, 0, SHIFTED, EXPECTED, TOP, True, 16)
    seen = columns - even
    if WHOLE:
        z = _load(logits, 0, even, column_stride, inner, outer, CAPPED, TEMPERED, True, BLOCK)
        state = _fold(state, z, 0, even, seen, SHIFTED, EXPECTED, TOP, True, BLOCK)
        if IN_PLACE:
            _store(logits, 0, even, column_stride, z, state[0], True, BLOCK)
    else:
        full = even // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            block = _load(logits, start, even, column_stride, inner, outer, CAPPED, TEMPERED, False, BLOCK)
            state = _fold(state, block, start, even, seen + start, SHIFTED, EXPECTED, TOP, False, BLOCK)
        if full < even:
            rest = _load(logits, full, even, column_stride, inner, outer, CAPPED, TEMPERED, True, BLOCK)
            state = _fold(state, rest, full, even, seen + full, SHIFTED, EXPECTED, TOP, True, BLOCK)
        if IN_PLACE:
            for start in range(0, full, BLOCK):
                _rewrite(logits, start, even, column_stride, inner, outer, state[0], CAPPED, TEMPERED, False, BLOCK)
            if full < even:
                _rewrite(logits, full, even, column_stride, inner, outer, state[0], CAPPED, TEMPERED, True, BLOCK)
    if IN_PLACE and even < columns:
        _rewrite(logits, even, columns, column_stride, inner, outer, state[0], CAPPED, TEMPERED, True, 16)

    m, s, shifted, weighted, m2, first = state
    tl.store(maximum + row, tl.where(s == s, m, s))  # a maximum may pass over NaN, a sum does not
    tl.store(sumexp + row, s)
    if SHIFTED:
        tl.store(shifted_sum + row, shifted)
    if EXPECTED:
        tl.store(expected + row, weighted)
    if TOP:
        tl.store(second + row, m2)
        tl.store(argmax + row, first.to(tl.int64))


@triton.jit
def _load(
    logits, start, stop, column_stride, inner, outer,
    CAPPED: tl.constexpr, TEMPERED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The columns `start` to `start + BLOCK` of a row as scores, -inf from `stop` on."""
    column = start + tl.arange(0, BLOCK)
    pointer = logits + column.to(tl.int64) * column_stride
    raw = tl.load(pointer, mask=column < stop, other=0.0) if MASKED else tl.load(pointer)
    z = _score(raw.to(inner.dtype), inner, outer, CAPPED, TEMPERED)
    if MASKED:
        z = tl.where(column < stop, z, -float("inf"))
    return z


@triton.jit
def _store(logits, start, stop, column_stride, z, m, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the exponentials of scores over the logits that they came from."""
    column = start + tl.arange(0, BLOCK)
    pointer = logits + column.to(tl.int64) * column_stride
    value = tl.exp(z - _shift(m)).to(logits.dtype.element_ty)
    if MASKED:
        tl.store(pointer, value, mask=column < stop)
    else:
        tl.store(pointer, value)


@triton.jit
def _rewrite(
    logits, start, stop, column_stride, inner, outer, m,
    CAPPED: tl.constexpr, TEMPERED: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_load`, then `_store`."""
    z = _load(logits, start, stop, column_stride, inner, outer, CAPPED, TEMPERED, MASKED, BLOCK)
    _store(logits, start, stop, column_stride, z, m, MASKED, BLOCK)


@triton.jit
def _fold(
    state, z, start, stop, seen,
    SHIFTED: tl.constexpr, EXPECTED: tl.constexpr, TOP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a block of scores to the statistics of `seen` other columns."""
    m, s, shifted, weighted, m2, first = state
    column = start + tl.arange(0, BLOCK)
    largest = tl.max(z, axis=0)
    new = tl.maximum(m, largest)
    below = z - _shift(new)
    fall = tl.where(m == -float("inf"), 0.0, m - _shift(new))  # -inf: all sums are 0 (or -inf), and stay so
    factor = tl.exp(fall)
    e = tl.exp(below)
    if SHIFTED:
        shifted += fall * seen + tl.sum(tl.where(column < stop, below, 0.0) if MASKED else below, axis=0)
    if EXPECTED:
        weighted = factor * (weighted + s * tl.maximum(fall, _LOWEST)) + tl.sum(e * tl.maximum(below, _LOWEST), axis=0)
    if TOP:
        at = tl.min(tl.where(z == largest, column, 2147483647), axis=0)
        m2 = tl.maximum(m2, tl.max(tl.where(column == at, -float("inf"), z), axis=0))
        m2 = tl.maximum(m2, tl.minimum(m, largest))
        first = tl.where((largest > m) | ((largest == m) & (at < first)), at, first)
    return new, factor * s + tl.sum(e, axis=0), shifted, weighted, m2, first


@triton.jit
def _score(raw, inner, outer, CAPPED: tl.constexpr, TEMPERED: tl.constexpr):
    """Scores of raw logits."""
    if CAPPED:
        z = _tanh(raw * inner) * outer
    else:
        z = raw * inner if TEMPERED else raw
    return z


@triton.jit
def _tanh(x):
    """`tanh x`, to a few units in the last place.

    Near 0 `1 - exp(-2x)` would cancel: there a polynomial, or a quotient of two for float64 (Moshier's Cephes).
    """
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    inverse = 1.0 / (1.0 + e)
    y = x * x
    if x.dtype == tl.float64:
        top = (-9.64399179425052238628e-1 * y - 9.92877231001918586564e1) * y - 1.61468768441708447952e3
        bottom = ((y + 1.12811678491632931402e2) * y + 2.23548839060100448583e3) * y + 4.84406305325125486048e3
        tail = top / bottom
    else:
        tail = (-5.70498872745e-3 * y + 2.06390887954e-2) * y - 5.37397155531e-2
        tail = (tail * y + 1.33314422036e-1) * y - 3.33332819422e-1
    far = (1.0 - e) * inverse
    return tl.where(size < 0.625, x + x * y * tail, tl.where(x < 0.0, -far, far))


@triton.jit
def _shift(m):
    """What to subtract before exp: m, or 0 if that is infinite, for inf - inf is NaN."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)
