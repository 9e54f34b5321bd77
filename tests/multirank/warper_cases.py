"""Every warper and controller with its parameters for a batch of rows, and the oracle's answer."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.transform import Transform
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from vocab_parallel.reference import warpers as oracle
from vocab_parallel.select.scores import Scores

PARAMETERS = 8  # of each warper
ROWS = 4 * PARAMETERS


def rows(*values: float) -> tuple[float, ...]:
    """One value for each row of a batch."""
    return values * (ROWS // len(values))


SHARE = rows(0.3, 1e-9, 0.5, 0.75, 0.9, 1.0, 0.125, 0.999)
FLOOR = rows(0.125, 0.0, 1e-9, 0.05, 0.25, 1.0, 3e-4, 0.5)
MU = rows(0.0, -2.0, 1.0, 3.0, 2.5, 100.0, 4.0, 0.3)

TRANSFORMS: dict[str, Transform] = {
    "temperature": Temperature(rows(0.5, 0.0, 1.0, 2.0, 1e-6, 0.7, 3.3, 1e-12)),
    "top_k": TopK(rows(1, 2, 3, 5, 8, 100_000, 2, 4)),
    "top_p": TopP(SHARE),
    "min_p": MinP(FLOOR),
    "typical": Typical(SHARE),
    "epsilon": Epsilon(FLOOR),
    "eta": Eta(FLOOR),
    "top_n_sigma": TopNSigma(rows(1.0, 0.0, 0.5, 2.0, float("inf"), 1.5, 0.25, 3.0)),
    "dynamic_temperature": DynamicTemperature(
        rows(0.0, 0.5, 1.0, 0.2, 0.0, 1.0, 0.7, 0.1), rows(0.0, 1.5, 1.0, 2.0, 4.0, 1.2, 0.7, 1.0),
        rows(1, 2, 1, 0.5, 1, 0, 3, 1),
    ),
    "mirostat_v2": MirostatV2(5.0),
}  # fmt: skip
CUTS = [name for name in TRANSFORMS if "temperature" not in name]


def expected_kept(name: str, logits: Tensor) -> Tensor:
    """The oracle's support, bool `[T, V]`."""
    transform = TRANSFORMS[name]
    if name == "mirostat_v2":
        return oracle.mirostat_v2(logits, torch.tensor(MU, dtype=torch.float64))
    (field,) = transform.per_row
    value = torch.tensor(getattr(transform, field), dtype=torch.float64)
    found: Tensor = getattr(oracle, name)(logits, value)
    return found


def expected_temperature(name: str, logits: Tensor) -> Tensor:
    """The oracle's temperature of each row `[T]`."""
    transform = TRANSFORMS[name]
    values = [torch.tensor(getattr(transform, field), dtype=torch.float64) for field in transform.per_row]
    return values[0] if name == "temperature" else oracle.dynamic_temperature(logits, *values)


def placed(scores: Scores) -> Tensor:
    """This rank's columns of the scores at their ids: `[T, V]`, -inf in the columns of other ranks."""
    whole = torch.full((scores.rows, scores.vocab_size + 1), -torch.inf, dtype=scores.values.dtype)
    return whole.scatter(1, scores.token_ids.expand_as(scores.values), scores.values)[:, : scores.vocab_size]
