"""Jensen-Shannon divergence between distributions over shards: a sum of integers, the same bits at every TP size."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.select.logarithm import exact_log
from vocab_parallel.select.masses import Masses, fixed_exp
from vocab_parallel.select.scores import Scores

_BITS = 56  # of the fixed point: a row's sum is at most 2 log 2
_SERIES = {torch.float32: 7, torch.float64: 12}  # terms of the logarithm: to 5e-13, and to float64's last bit
_CACHED_ELEMENTS = 1 << 15  # that stay in cache from one elementwise pass to the next


def divergences(
    scores: Scores,  # [T, V] over the ranks
    masses: Masses,
    others: Scores,  # [T * M, V], M distributions for each row
    other_masses: Masses,
    count: int,
) -> Tensor:
    """`(KL(p | m) + KL(q | m)) / 2`, `m = (p + q) / 2`, of each row's p with each of its M q: float64 `[T, M]`, nats.

    Args:
        count: M.

    Columns are formed from exact steps, rounded to 2**-56 and added as integers.

    Collectives:
        One all-gather of 8 bytes a row of `others`.

    Source:
        Lin 1991, "Divergence Measures Based on the Shannon Entropy", equation 4.1 with equal weights.
    """
    rows, n = scores.values.shape
    local = torch.zeros(rows, count, dtype=torch.int64, device=scores.values.device)
    elements = _CACHED_ELEMENTS if local.device.type == "cpu" else 1 << 24
    width = max(1, min(n, elements))
    height = max(1, elements // width)
    for layer in range(count):
        for top in range(0, rows, height):
            mine = slice(top, top + height)
            theirs = slice(top * count + layer, (top + height) * count, count)
            for left in range(0, n, width):
                columns = slice(left, left + width)
                p = _probabilities(scores, masses, mine, columns)
                q = _probabilities(others, other_masses, theirs, columns)
                local[mine, layer] += _column_sums(p, q, _SERIES[scores.values.dtype])
    return scores.channel.gather(local).sum(0).double() * 2.0 ** -(_BITS + 1)


def _probabilities(scores: Scores, masses: Masses, rows: slice, columns: slice) -> Tensor:
    """float64: as `masses.probabilities`, of a part."""
    gap = scores.values[rows, columns].double() - masses.largest[rows, None].double()
    return fixed_exp(gap, masses.bits, scores.values.dtype).div_(masses.total[rows, None].double())


def _column_sums(p: Tensor, q: Tensor, terms: int) -> Tensor:
    """int64 `[T]`: the sum over columns `[T, n]` of `p log(p / m) + q log(q / m)`, in 2**-56 nats."""
    half = (p + q).mul_(0.5)
    total = torch.zeros_like(p)
    for one in (p, q):
        there = one > 0
        total.add_(exact_log(torch.where(there, one / half, 1.0), terms).mul_(one))
    return total.mul_(2.0**_BITS).round_().to(torch.int64).sum(1)
