"""Settings of ``plan``: ``key=value`` words into one frozen, validated dataclass."""

from __future__ import annotations

import dataclasses

from vocab_parallel.app.plan.advice import MOST_RANKS
from vocab_parallel.app.settings import choice, require

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DEVICES = ("h100", "h200", "cpu", "measured")
LINKS = ("nvlink", "pcie", "infiniband", "loopback", "measured")


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """One loss step, and what it would run on."""

    tokens: int = 8192  # rows of a step, over all ranks that share the vocabulary
    hidden: int = 4096
    vocab: int = 131_072
    dtype: str = "bfloat16"  # float64 | float32 | bfloat16 | float16
    tp: int | None = None  # ranks that share the vocabulary; null: all of this job if measured, else 8
    multiple_of: int = 128  # each shard's rows are a multiple of this
    chunk_size: int | None = None  # rows; null: what the budget and the accumulation of dW make best
    memory_budget: int | None = None  # bytes that the logits of a chunk may take; null: 128 MiB, at most 4,096 rows
    device: str | None = None  # h100 | h200 | cpu | measured; null: what the link implies
    link: str | None = None  # of the ranks of a node: nvlink | pcie | infiniband | loopback | measured; null: likewise
    between: str = "infiniband"  # of nodes
    ranks_per_node: int = 8
    gemm_tflops: float | None = None  # these five replace what the preset or the measurement says
    memory_gbs: float | None = None
    softmax_gps: float | None = None  # elements (billions a second) of a maximum, exponential and sum pass
    link_gbs: float | None = None  # of `link`
    link_us: float | None = None  # a ring step on `link`
    check: str | None = None  # a bench.json to compare with
    out: str | None = None  # file for the plan as JSON
    threads: int = 1  # CPU threads per rank, for measuring
    where: str = "auto"  # measure on auto | cpu | cuda

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "vocab", "multiple_of", "ranks_per_node", "threads"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        good = self.tp is None or 1 <= self.tp <= MOST_RANKS
        require(good, "tp", f"null or a number of ranks up to {MOST_RANKS:,}", self.tp)
        for name in ("chunk_size", "memory_budget"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "null or at least 1", value)
        for name in ("gemm_tflops", "memory_gbs", "softmax_gps", "link_gbs", "link_us"):
            value = getattr(self, name)
            require(value is None or value > 0, name, "null or above 0", value)
        choice("dtype", self.dtype, tuple(ITEMSIZES))
        choice("between", self.between, LINKS[:-1])
        choice("where", self.where, ("auto", "cpu", "cuda"))
        if self.device is not None:
            choice("device", self.device, DEVICES)
        if self.link is not None:
            choice("link", self.link, LINKS)

    @property
    def device_name(self) -> str:
        """The device; if not set: a CPU on loopback, a measured one on a measured link, else an H100."""
        return self.device or {"loopback": "cpu", "measured": "measured"}.get(self.link or "", "h100")

    @property
    def link_name(self) -> str:
        """The link; if not set: loopback of a CPU, measured if the device is, else NVLink."""
        return self.link or {"cpu": "loopback", "measured": "measured"}.get(self.device or "", "nvlink")

    @property
    def measured(self) -> bool:
        """Whether something is to be measured on the ranks of this job."""
        return "measured" in (self.device_name, self.link_name)
