"""Normal numbers that belong to a cell of a table: a function of (seed, token id, column) and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vocab_parallel.select.logarithm import exact_log
from vocab_parallel.select.streams import philox

_MASK = 0xFFFFFFFF
_KIND = 0x696E6974  # "init": keys cells apart from the draws of requests

# Wichura's AS 241 (PPND16): numerator and denominator near the middle, in the tails, and far out in them.
_MIDDLE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.7454501427834140764e-4, 2.27238449892691845833e-2, 2.4178072517745061177e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.7694972214606914055e0, 4.6303378461565452959e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 1.51986665636164571966e-2, 1.4810397642748007459e-1,
     6.8976733498510000455e-1, 1.6763848301838038494e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip


def normal_rows(ids: Sequence[int], columns: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard normal numbers, float64 `[n, columns]`, of IEEE operations alone: the same bits on every machine.

    Args:
        ids: Token ids, the rows.
        seed: At most 64 bits.

    Source:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011): Philox4x32-10 with key = seed and counter
        = (column, "init", id). Wichura, Algorithm AS 241 (Applied Statistics 37, 1988), the inverse of the normal
        distribution function.
    """
    row = torch.tensor(list(ids), dtype=torch.int64, device=device).repeat_interleave(columns)
    column = torch.arange(columns, device=device).repeat(len(ids))
    key = torch.full_like(row, seed - 2**64 if seed >= 2**63 else seed)
    words = philox(key, [column & _MASK, torch.full_like(row, _KIND), row & _MASK, row >> 32])
    bits = (words[0] & (2**26 - 1)) << 26 | words[1] & (2**26 - 1)
    return normal_quantile((bits.to(torch.float64) + 0.5) * 2.0**-52).view(len(ids), columns)


def normal_quantile(p: Tensor) -> Tensor:
    """The standard normal number below which a share `p` lies: float64, for 0 < p < 1; to about 1e-15."""
    centred = p - 0.5
    lower = torch.where(centred <= 0, p, 1.0 - p)
    r = torch.sqrt(-exact_log(lower))
    middle = _ratio(_MIDDLE, 0.180625 - centred * centred) * centred
    tails = torch.where(r <= 5.0, _ratio(_TAIL, r - 1.6), _ratio(_FAR, r - 5.0))
    return torch.where(centred.abs() <= 0.425, middle, torch.where(centred < 0, -tails, tails))


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    above, below = (torch.zeros_like(x), torch.zeros_like(x))
    for total, coefficients in zip((above, below), polynomials, strict=True):
        for coefficient in coefficients:
            total.mul_(x).add_(coefficient)
    return above / below
