"""Settings of ``bench loss``: ``key=value`` words into one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vocab_parallel.app.settings import choice, require

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
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(self.vocab >= 2, "vocab", "at least 2", self.vocab)
        for name in ("chunk_size", "memory_budget"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "null or at least 1", value)
        require(self.timeout_s > 0, "timeout_s", "above 0 seconds", self.timeout_s)
        choice("dtype", self.dtype, DTYPES)
        choice("sweep", self.sweep, tuple(SWEEPS))
        choice("device", self.device, ("auto", "cpu", "cuda"))
        require(self.points is None or self.sweep != "none", "points", "null, as there is no sweep", self.points)
        good = self.points is None or (len(self.points) >= 2 and min(self.points) >= 1)
        require(good, "points", "null or at least two numbers of at least 1", self.points)

    def values(self) -> Sequence[int]:
        """What the sweep goes through, ascending; empty without one."""
        return sorted(set(SWEEPS[self.sweep] if self.points is None else self.points))
