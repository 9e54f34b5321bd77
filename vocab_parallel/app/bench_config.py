"""Settings of ``bench loss``: ``key=value`` words into one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from typing import Any

import dacite

from vocab_parallel.app.config import _apply, _as_float, _choice, _require, _type_name
from vocab_parallel.errors import ConfigError

DTYPES = ("float32", "bfloat16")
_KI = 1024
# What each sweep varies, and its values when `points` does not name others.
SWEEPS = {
    "none": (),
    "tokens": (_KI, 2 * _KI, 4 * _KI, 8 * _KI, 16 * _KI),
    "vocab": (32 * _KI, 64 * _KI, 128 * _KI, 256 * _KI),
    "chunk": (128, 256, 512, 1024, 2048, 4096),  # rows
    "budget": tuple(mib * _KI**2 for mib in (32, 64, 128, 256, 512, 1024)),  # bytes
}


@dataclasses.dataclass(frozen=True)
class BenchConfig:
    """One benchmark of the loss step."""

    tokens: int = 4096
    hidden: int = 768
    vocab: int = 131_072  # a multiple of the ranks: some contestants take equal shards only
    dtype: str = "float32"  # float32 | bfloat16
    rounds: int = 5  # timed steps of each contestant; warm-up is one more
    chunk_size: int | None = None  # rows a chunk; null: each contestant's own choice
    memory_budget: int | None = None  # bytes, for ours; null: its own choice
    sweep: str = "none"  # none | tokens | vocab | chunk | budget
    points: list[int] | None = None  # values of what the sweep varies; null: those of SWEEPS
    contestants: list[str] | None = None  # null: all; of a sweep only ours and the floor
    out: str | None = None  # folder of the results; null: runs/bench-<time>
    threads: int = 1  # CPU threads per rank
    device: str = "auto"  # auto | cpu | cuda
    timeout_s: float = 120.0  # a contestant's collective that waits longer than this fails it
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "rounds", "threads"):
            _require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        _require(self.vocab >= 2, "vocab", "at least 2", self.vocab)
        for name in ("chunk_size", "memory_budget"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, "null or at least 1", value)
        _require(self.timeout_s > 0, "timeout_s", "above 0 seconds", self.timeout_s)
        _choice("dtype", self.dtype, DTYPES)
        _choice("sweep", self.sweep, tuple(SWEEPS))
        _choice("device", self.device, ("auto", "cpu", "cuda"))
        _require(self.points is None or self.sweep != "none", "points", "null, as there is no sweep", self.points)
        good = self.points is None or (len(self.points) >= 2 and min(self.points) >= 1)
        _require(good, "points", "null or at least two numbers of at least 1", self.points)

    def values(self) -> Sequence[int]:
        """What the sweep goes through, ascending; empty without one."""
        return sorted(set(SWEEPS[self.sweep] if self.points is None else self.points))


def from_words(words: Sequence[str]) -> BenchConfig:
    """Builds the settings from ``key=value`` words.

    Raises:
        ConfigError: unknown key, wrong type or impossible value.
    """
    data: dict[str, Any] = {}
    for word in words:
        _apply(data, word)
    known = typing.get_type_hints(BenchConfig)
    for key, value in data.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ConfigError(f"unknown key {key}; {hint}")
        if isinstance(value, bool):  # an int to Python
            raise ConfigError(f"{key}: expected {_type_name(known[key])}, got {value!r}")
    try:
        return dacite.from_dict(BenchConfig, data, dacite.Config(strict=True, type_hooks={float: _as_float}))
    except dacite.WrongTypeError as error:
        name = str(error.field_path)
        raise ConfigError(f"{name}: expected {_type_name(known[name])}, got {data[name]!r}") from error
