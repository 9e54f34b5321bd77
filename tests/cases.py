"""The shared cases: small inputs taken from public bug reports, each with its right value.

`tests/data/cases.json` is the file, `load_cases` reads it, `WAITING` says which cases need a part of the package
that does not exist yet. Every other case is a test in `tests/multirank/test_cases.py`, which
`tests/unit/test_cases_listed.py` proves.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CASES_FILE = Path(__file__).parent / "data" / "cases.json"

# Four ranks are as many as a small machine runs at once. The tp_sizes above (8, in three selection cases) are left out
# by this line and by no other.
MAX_TP = 4

# part of the package that brings the operation -> {case id: the missing operation}
WAITING: dict[str, dict[str, str]] = {}

# Inputs that are handed to an operation as numbers of the tested dtype.
FLOAT_INPUTS = ("logits", "logits_real", "hidden", "weight", "grad_output", "local_logits_every_rank", "embed", "head")


@dataclass(frozen=True)
class Case:
    """One entry of the file, its fields unchanged."""

    id: str
    op: str
    title: str
    tp_sizes: tuple[int, ...]
    dtype: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    expect: dict[str, Any]
    tol: dict[str, float]

    @property
    def tested_tp_sizes(self) -> tuple[int, ...]:
        return tuple(tp for tp in self.tp_sizes if tp <= MAX_TP)

    @property
    def tested_dtypes(self) -> tuple[str, ...]:
        """The dtype the case names, and each other dtype of `tol` that holds its inputs exactly."""
        names = [name.removesuffix("_rel") for name in self.tol]
        return tuple(name for name in names if name == self.dtype or self._exact_in(name))

    def _exact_in(self, name: str) -> bool:
        for key in FLOAT_INPUTS:
            if key in self.inputs:
                exact = as_tensor(self.inputs[key], torch.float64)
                if not torch.equal(exact.to(getattr(torch, name)).double(), exact):
                    return False
        return True

    def vocab_size(self) -> int:
        for given in (self.params, self.inputs):
            for name in ("vocab_size", "vocab"):
                if name in given:
                    return int(given[name])
        if "logits" in self.inputs:
            return as_tensor(self.inputs["logits"]).shape[-1]
        return as_tensor(self.inputs["weight"]).shape[0]

    def shard_size(self, tp: int) -> int:
        padded = self.params.get("pad_to", math.ceil(self.vocab_size() / tp) * tp)
        assert padded % tp == 0, f"{self.id}: {padded} rows do not divide over {tp} ranks"
        return int(padded) // tp


@functools.cache
def load_cases() -> dict[str, Case]:
    """Every case of the file by id, in the file's order; an id that comes twice is an error."""
    entries = json.loads(CASES_FILE.read_text(encoding="utf-8"))["cases"]
    cases: dict[str, Case] = {}
    for entry in entries:
        assert entry["id"] not in cases, f"{entry['id']} comes twice in {CASES_FILE.name}"
        cases[entry["id"]] = Case(
            id=entry["id"],
            op=entry["op"],
            title=entry["title"],
            tp_sizes=tuple(entry["tp_sizes"]),
            dtype=entry["dtype"],
            inputs=entry["inputs"] or {},
            params=entry["params"] or {},
            expect=entry["expect"],
            tol=entry["tol"],
        )
    return cases


def waiting_ids() -> list[str]:
    """Ids of the cases that wait, one entry for each time an id is listed."""
    return [case_id for ids in WAITING.values() for case_id in ids]


def active_cases() -> list[Case]:
    """The cases whose operation exists."""
    waiting = set(waiting_ids())
    return [case for case in load_cases().values() if case.id not in waiting]


def as_tensor(value: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The file's way of writing a tensor: nested lists with "nan" and "-inf", or {"fill": x, "shape": [...]}."""
    if isinstance(value, dict):
        return torch.full(value["shape"], value["fill"], dtype=dtype)

    def number(item: Any) -> Any:
        return [number(child) for child in item] if isinstance(item, list) else float(item)

    return torch.tensor(number(value), dtype=torch.float64).to(dtype)


def as_target(value: Any) -> torch.Tensor:
    return as_tensor(value).to(torch.int64)


def local_part(whole: torch.Tensor, dim: int, shard_size: int, rank: int, fill: float = math.nan) -> torch.Tensor:
    """One rank's `shard_size` rows of `dim`, written apart from the package; rows past the end hold `fill`."""
    size = whole.shape[dim]
    start, stop = min(rank * shard_size, size), min((rank + 1) * shard_size, size)
    real = whole.narrow(dim, start, stop - start)
    padding_shape = list(real.shape)
    padding_shape[dim] = shard_size - (stop - start)
    return torch.cat([real, real.new_full(padding_shape, fill)], dim).contiguous()


def assert_close(actual: torch.Tensor, expected: Any, case: Case, dtype: str, what: str) -> None:
    """Compares with the file's value within the file's tolerance: absolute up to 1, relative above, or relative only.

    Raises:
        AssertionError: with the case, the quantity, and the largest difference over its tolerance.
    """
    wanted = as_tensor(expected)
    got = actual.detach().double()
    assert got.shape == wanted.shape, f"{case.id} {what}: shape {list(got.shape)}, expected {list(wanted.shape)}"
    relative_only = f"{dtype}_rel" in case.tol
    tolerance = case.tol[f"{dtype}_rel"] if relative_only else case.tol[dtype]
    allowed = tolerance * (wanted.abs() if relative_only else wanted.abs().clamp(min=1.0))
    difference = (got - wanted).abs()
    # Written so that a NaN counts as wrong.
    wrong = ~(difference <= allowed)
    assert not wrong.any(), (
        f"{case.id} {what} in {dtype}: {int(wrong.sum())} of {wrong.numel()} values differ, the first by "
        f"{difference[wrong][0].item():.3g} where {allowed[wrong][0].item():.3g} is allowed\n"
        f"got      {got.tolist()}\nexpected {wanted.tolist()}"
    )
