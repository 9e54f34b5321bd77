"""The softmax normalizer over shards: local statistics, their exchange's payload, and their merge.

Per row, with `m = max z` and `s = sum exp(z - m)` over one shard's real ids,

    M = max_r m_r      S = sum_r s_r exp(m_r - M)      -log p_target = log S + (M - z_target)

(the online softmax of Milakov and Gimelshein 2018, arXiv:1805.02867, merged over shards instead of blocks). Kept as
a pair because `lse = M + log S` rounds at large offsets, where `M - z_target` is still exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import first_row, judge
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.loss import kernels
from vocab_parallel.loss.options import Scores
from vocab_parallel.shard import VocabShard

# Elements of a block of rows that one elementwise pass handles at a time: on a CPU what stays in cache
# (measured: 1,024 x 32,768 bfloat16 took 0.30 s in whole passes and 0.07 s in blocks of 32 rows).
_BLOCK_ELEMENTS = {"cpu": 1 << 18}
_BLOCK_ELEMENTS_ELSEWHERE = 1 << 26
_LOWEST = -1e4  # exp of it is 0 in every dtype, and 0 times it is 0, which 0 times -inf is not


@dataclass(frozen=True)
class Wanted:
    """What an operation needs of each row beside m, s and the target's score (12 bytes a row in float32).

    Attributes:
        shifted_sum: `sum (z - m)`, for label smoothing. 4 bytes.
        expected: `sum exp(z - m) (z - m)`, for the entropy. 4 bytes.
        top: The second largest score and the id of the largest. 8 bytes.
        soft: `soft_statistics` of a target distribution. 12 bytes.
    """

    shifted_sum: bool = False
    expected: bool = False
    top: bool = False
    soft: bool = False

    def also(self, other: Wanted) -> Wanted:
        """What either needs."""
        return Wanted(**{name: mine or vars(other)[name] for name, mine in vars(self).items()})

    @property
    def words(self) -> tuple[str, ...]:
        """The names of the payload's rows, in order."""
        return (
            "maximum", "sumexp", "target_score",
            *(("shifted_sum",) if self.shifted_sum else ()),
            *(("expected",) if self.expected else ()),
            *(("second", "argmax") if self.top else ()),
            *(("cross", "mass", "divergence") if self.soft else ()),
        )  # fmt: skip


@dataclass(frozen=True)
class LocalStatistics:
    """One shard's statistics, each `[T]`, float32 (float64 for float64); `argmax` int64. None what was not asked.

    An empty shard or an all -inf row has m = -inf and s = 0; NaN or +inf in a row gives m = NaN or +inf.
    """

    maximum: Tensor
    sumexp: Tensor
    shifted_sum: Tensor | None = None
    expected: Tensor | None = None
    second: Tensor | None = None
    argmax: Tensor | None = None

    def pack(self, target_score: Tensor, soft: Tensor | None = None) -> Tensor:
        """The payload `[k, T]`, its rows as `Wanted.words` names them."""
        rows = [self.maximum, self.sumexp, target_score]
        rows += [row for row in (self.shifted_sum, self.expected, self.second) if row is not None]
        if self.argmax is not None:  # the integer's bits: an id is never rounded
            bits = torch.int64 if self.maximum.dtype == torch.float64 else torch.int32
            rows.append(self.argmax.to(bits).view(self.maximum.dtype))
        return torch.stack([*rows, *(soft if soft is not None else ())])


def statistics(logits: Tensor, *, scores: Scores, wanted: Wanted, in_place: bool) -> LocalStatistics:
    """One shard's statistics of raw `logits` `[T, n]` (n real columns, may be 0), any floating dtype.

    Args:
        in_place: Replace `logits` by `exp(z - m)`, in its own dtype, for the gradient GEMMs.
    """
    if kernels.available(logits):
        from vocab_parallel.loss.kernels.statistics import statistics as statistics_kernel

        found = statistics_kernel(
            logits, softcap=scores.softcap, temperature=scores.temperature, shifted_sum=wanted.shifted_sum,
            expected=wanted.expected, top=wanted.top, in_place=in_place,
        )  # fmt: skip
        return LocalStatistics(*found[:6])
    rows, columns = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    maximum = logits.new_full((rows,), -torch.inf, dtype=dtype)
    sumexp = torch.zeros_like(maximum)
    shifted_sum = torch.zeros_like(maximum) if wanted.shifted_sum else None
    expected = torch.zeros_like(maximum) if wanted.expected else None
    second = torch.full_like(maximum, -torch.inf) if wanted.top else None
    argmax = torch.zeros_like(maximum, dtype=torch.int64) if wanted.top else None
    blocks = row_blocks(logits) if columns else []
    here = in_place and logits.dtype == dtype
    scratch = None if here or not blocks else logits.new_empty(blocks[0].stop, columns, dtype=dtype)
    for block in blocks:
        z = logits[block]
        work = scores.apply_(z if scratch is None else scratch[: len(z)].copy_(z))
        m = work.amax(1)
        if second is not None and argmax is not None:
            argmax[block] = (work == m[:, None]).to(torch.uint8).argmax(1)  # argmax alone need not take the first
            if columns > 1:
                second[block] = work.topk(2, dim=1).values[:, 1]
        work.sub_(torch.where(m == -torch.inf, 0.0, m)[:, None])
        if shifted_sum is not None:
            shifted_sum[block] = work.sum(1)
        shifted = work.clamp(min=_LOWEST) if expected is not None else None
        work.exp_()
        maximum[block], sumexp[block] = m, work.sum(1)
        if expected is not None and shifted is not None:
            expected[block] = shifted.mul_(work).sum(1)
        if in_place and scratch is not None:
            z.copy_(work)
    return LocalStatistics(maximum, sumexp, shifted_sum, expected, second, argmax)


def row_blocks(logits: Tensor) -> list[slice]:
    """Consecutive blocks of rows of `logits` `[T, n]` for elementwise passes."""
    elements = _BLOCK_ELEMENTS.get(logits.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    step = max(1, elements // max(1, logits.shape[1]))
    return [slice(at, min(at + step, len(logits))) for at in range(0, len(logits), step)]


@dataclass(frozen=True)
class Normalizer:
    """The merged statistics of rows, each `[T]`, the same bits on every rank. None what was not asked.

    Attributes:
        maximum, sumexp: M and S.
        target_score: 0 for rows without a target.
        shifted_sum: `sum_v (z_v - M)` over the whole vocabulary.
        mean_shift: `sum_v p_v (z_v - M)`, at most 0.
        second, argmax: The second largest score; the global id of the largest, the lowest where several are equal.
        cross, mass, divergence: `sum q (z - M)`, `sum q` and `sum q (log q - log p)` of a soft target.
    """

    maximum: Tensor
    sumexp: Tensor
    target_score: Tensor
    shifted_sum: Tensor | None = None
    mean_shift: Tensor | None = None
    second: Tensor | None = None
    argmax: Tensor | None = None
    cross: Tensor | None = None
    mass: Tensor | None = None
    divergence: Tensor | None = None

    @property
    def log_sum(self) -> Tensor:
        """`log S`, at least 0."""
        return self.sumexp.log()

    @property
    def lse(self) -> Tensor:
        """`log sum exp z` in nats."""
        return self.maximum + self.log_sum

    @property
    def target_logprob(self) -> Tensor:
        """`log p_target` in nats. Meaningless for rows without a target."""
        return self.target_score - self.maximum - self.log_sum

    @property
    def entropy(self) -> Tensor:
        """`- sum p log p` in nats."""
        assert self.mean_shift is not None, "the entropy was not asked for"
        return self.log_sum - self.mean_shift

    def kept(self) -> dict[str, Tensor]:
        """What a backward pass needs: 12 bytes a row in float32, 4 more each with the entropy and a soft target."""
        names = ("maximum", "sumexp", "target_score", "mean_shift", "mass")
        return {name: row for name in names if (row := getattr(self, name)) is not None}

    def rows(self, index: Tensor | slice) -> Normalizer:
        """Those of some rows."""
        some: dict[str, Any] = {name: None if row is None else row[index] for name, row in vars(self).items()}
        return Normalizer(**some)


def merge(gathered: Tensor, wanted: Wanted, ids: Sequence[range]) -> Normalizer:
    """Merges the ranges' statistics in their order, so that every rank forms the same bits.

    Args:
        gathered: `[R, k, T]`, a payload of each range of ids.
        ids: The ranges; ascending.
    """
    of = dict(zip(wanted.words, gathered.unbind(1), strict=True))
    m, s = of["maximum"], of["sumexp"]
    maximum = m.amax(0)
    empty = m == -torch.inf  # -inf - -inf would be NaN
    shift = torch.where(empty, 0.0, m - maximum)
    weight = torch.where(empty, 0.0, shift.exp())
    sumexp = (s * weight).sum(0)
    shifted_sum = mean_shift = second = argmax = cross = mass = divergence = None
    if wanted.shifted_sum:
        lost = torch.where(empty, -torch.inf, shift)  # a range of -inf only: its classes have log p = -inf
        counts = _column([len(some) for some in ids], m)
        shifted_sum = torch.where(counts > 0, of["shifted_sum"] + counts * lost, 0.0).sum(0)
    if wanted.expected:
        mean_shift = ((of["expected"] + shift * s) * weight).sum(0) / sumexp
    if wanted.top:
        second = torch.cat([m, of["second"]]).topk(2, dim=0).values[1]
        first = (m == maximum).to(torch.uint8).argmax(0, keepdim=True)  # the lowest range holds the lowest ids
        local = of["argmax"].view(torch.int64 if m.dtype == torch.float64 else torch.int32)
        starts = _column([some.start for some in ids], local.to(torch.int64))
        argmax = (local + starts).gather(0, first)[0]
    if wanted.soft:
        mass = of["mass"].sum(0)
        within = torch.where(empty, torch.inf, sumexp.log() - shift - torch.where(empty, 1.0, s).log())
        divergence = (of["divergence"] + torch.where(of["mass"] == 0, 0.0, of["mass"] * within)).sum(0)
        lost = torch.where(empty, -torch.inf, shift)
        cross = (of["cross"] + torch.where(of["mass"] == 0, 0.0, of["mass"] * lost)).sum(0)
    return Normalizer(
        maximum, sumexp, of["target_score"].sum(0), shifted_sum, mean_shift, second, argmax, cross, mass, divergence
    )


def _column(values: Sequence[int], like: Tensor) -> Tensor:
    """`[len(values), 1]` of `like`'s dtype and device, without a copy from the host, which would wait for a GPU."""
    column = like.new_empty(len(values), 1)
    for row, value in enumerate(values):
        column[row].fill_(value)
    return column


def require_finite(
    shard: VocabShard, normalizer: Normalizer, gathered: Tensor, valid: Tensor, rows: Tensor | range
) -> None:
    """Raises for the first valid row with NaN, with +inf, or with no finite logit; the same on every rank.

    Args:
        gathered: As in `merge`.
        rows: What to call the rows in the message: their number in the caller's tensor.
    """
    if not len(valid):
        return
    at = first_row(~normalizer.maximum.isfinite() & valid)
    here = at.clamp(min=0)[None]
    local = gathered[:, 0].index_select(1, here)[:, 0]
    part = first_row(~local.isfinite() & (local != -torch.inf))
    number = at + rows.start if isinstance(rows, range) else rows.index_select(0, here)[0]
    value = normalizer.maximum.index_select(0, here)[0]
    words = torch.stack([at.double(), number.double(), value.double(), part.double()])
    judge(shard, words, error=NonFiniteError, describe=partial(not_finite, len(gathered) // shard.tp_size))


def not_finite(parts_a_rank: int, words: list[float]) -> NonFiniteError:
    """The error of a row, from what `judge` read: flag, row, maximum, and which payload it came from."""
    _, row, value, part = words
    if value == -torch.inf:
        what = "has no finite logit: every one of the vocabulary is -inf. Leave at least one id unmasked"
    else:
        what = (
            f"holds {'NaN' if value != value else '+inf'} among the logits of rank {int(part) // parts_a_rank} of the "
            "group. Likely an overflow upstream (float16, a learning rate too high) or an uninitialised weight"
        )
    return NonFiniteError(f"row {int(row)} {what}; to leave the row out, set its target to ignore_index.")
