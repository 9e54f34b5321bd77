"""Settings of ``bench select``."""

from __future__ import annotations

import dataclasses

from vocab_parallel.app.bench.select_contestants import CONTESTANTS, OPERATIONS
from vocab_parallel.app.bench.select_problem import KINDS
from vocab_parallel.app.settings import choice, require


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """One benchmark of selecting tokens from sharded logits."""

    vocab: list[int] = dataclasses.field(default_factory=lambda: [32_768, 131_072])  # multiples of the ranks
    batch: list[int] = dataclasses.field(default_factory=lambda: [1, 8, 64])  # rows of a call
    kinds: list[str] = dataclasses.field(default_factory=lambda: list(KINDS))  # of logits
    operations: list[str] = dataclasses.field(default_factory=lambda: list(OPERATIONS))
    contestants: list[str] = dataclasses.field(default_factory=lambda: list(CONTESTANTS))
    rounds: int = 7  # timed samples of each contestant
    sample_ms: float = 40.0  # calls are repeated in a sample until it takes about as long
    out: str | None = None  # folder of the results; null: runs/bench-select-<time>
    threads: int = 1  # CPU threads per rank
    device: str = "auto"  # auto | cpu | cuda
    timeout_s: float = 120.0  # of a collective
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "threads"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("sample_ms", "timeout_s"):
            require(getattr(self, name) > 0, name, "above 0", getattr(self, name))
        for name, least in (("vocab", 64), ("batch", 1)):
            values = getattr(self, name)
            require(bool(values) and min(values) >= least, name, f"numbers of at least {least}", values)
        for name, known in (("kinds", KINDS), ("operations", OPERATIONS), ("contestants", CONTESTANTS)):
            require(bool(getattr(self, name)), name, "at least one", getattr(self, name))
            for value in getattr(self, name):
                choice(name, value, tuple(known))
        require("ours" in self.contestants, "contestants", "ours among them", self.contestants)
        choice("device", self.device, ("auto", "cpu", "cuda"))
