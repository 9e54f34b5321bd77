"""What a plan computes and communicates with: presets from data sheets, or a short measurement on the ranks at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.app.job import Job
from vocab_parallel.app.plan.cost import Device, Link, Machine, Message, Network, Workload
from vocab_parallel.collectives import Pending, all_gather, all_reduce_
from vocab_parallel.layout import VocabLayout
from vocab_parallel.loss import linear_cross_entropy
from vocab_parallel.loss.normalizer import Wanted, statistics
from vocab_parallel.loss.options import Scores
from vocab_parallel.shard import VocabShard

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Peaks of the data sheets (NVIDIA H100 SXM and H200, dense, without TF32): FLOP/s by dtype, then bytes/s of memory.
_PEAKS = {
    "h100": ({"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12}, 3.35e12),
    "h200": ({"bfloat16": 989e12, "float16": 989e12, "float32": 67e12, "float64": 67e12}, 4.8e12),
}
# Seconds in which Python issues one chunk of the fused loss, measured with this module.
_HOST = 0.45e-3
_ATTAINED_GEMM, _ATTAINED_MEMORY = 0.7, 0.85  # of the peak, by large products and by streaming passes
# One thread of an x86 server core with AVX-512 and AMX, measured with this module: GEMM FLOP/s and softmax elements/s
# by dtype, then bytes/s of memory while another thread streams too.
_CPU_GEMM = {"bfloat16": 800e9, "float16": 160e9, "float32": 165e9, "float64": 80e9}
_CPU_SOFTMAX = {"bfloat16": 0.7e9, "float16": 0.75e9, "float32": 0.8e9, "float64": 0.35e9}
_CPU_STREAM = 13e9

# Bytes/s that one rank sends in one direction, and seconds a step of a ring. Bandwidths: NVLink 4 is 450 GB/s each way,
# of which rings reach about 0.8; PCIe 5 x16 63 GB/s, about 55 after its protocol; InfiniBand NDR 400 Gb/s a GPU.
# Latencies: what NCCL's own tuning model has for a ring step of its LL128 protocol (src/graph/tuning.cc, hwLat).
# Loopback: gloo between two processes of one machine, measured with this module.
LINKS = {
    "nvlink": Link("nvlink", 360e9, 1.9e-6),
    "pcie": Link("pcie", 55e9, 2.5e-6),
    "infiniband": Link("infiniband", 50e9, 4.0e-6),
    "loopback": Link("loopback", 1e9, 30e-6),
}
_START = {"loopback": 150e-6}  # seconds to start a collective; gloo's measured
_START_ELSEWHERE = 14e-6  # NCCL's baseLat of the same ring

_LINK_BYTES = 8 << 20  # of the all-reduce that bandwidth is measured with
_STREAM_ELEMENTS = 1 << 25
_FEW_CHUNKS = 8


def preset_device(name: str, dtype: str) -> Device:
    """A device of the presets, at attained rates."""
    if name == "cpu":
        gemm, wide = _CPU_GEMM[dtype], max(_CPU_GEMM[dtype] if dtype == "float64" else 0.0, _CPU_GEMM["float32"])
        return Device(name, gemm, wide, _CPU_STREAM, _CPU_SOFTMAX[dtype], on_cpu=True, host=_HOST, overlap=0.0)
    peaks, memory = _PEAKS[name]
    stream = _ATTAINED_MEMORY * memory
    # Read for the maximum, read for the exponential, written once.
    softmax = stream / (3 * DTYPES[dtype].itemsize)
    return Device(name, _ATTAINED_GEMM * peaks[dtype], _ATTAINED_GEMM * peaks["float32"], stream, softmax, host=_HOST)


def preset_network(link: str, between: str, ranks_per_node: int) -> Network:
    """Links of the presets: `link` inside a node, `between` nodes."""
    start = max(_START.get(name, _START_ELSEWHERE) for name in (link, between))
    return Network(LINKS[link], LINKS[between], ranks_per_node, start)


def measure(job: Job, work: Workload, dtype: str) -> Machine:
    """The ranks of this job: a few products, passes, chunks and collectives; the slowest rank counts. A few seconds.

    Returns:
        The machine; alone, with the loopback preset for its links, for there is none to measure.
    """
    shard = job.shard(max(work.vocab, job.world), 1)
    bench = _Bench(job, shard, DTYPES[dtype], work)
    device = bench.device()
    if job.world == 1:
        return Machine(device, preset_network("loopback", "loopback", 1 << 20))
    return Machine(*bench.linked(device))


class _Bench:
    def __init__(self, job: Job, shard: VocabShard, dtype: torch.dtype, work: Workload) -> None:
        self._job, self._shard, self._dtype = job, shard, dtype
        on_cuda = job.device.type == "cuda"
        self._rows = 4096 if on_cuda else 256
        self._hidden = min(work.hidden, 8192)
        self._columns = max(1, min(work.stored, (1 << 28 if on_cuda else 1 << 23) // self._hidden))

    def device(self) -> Device:
        gemm = self._gemm(self._dtype)
        wide = gemm if self._dtype.itemsize >= 4 else self._gemm(torch.float32)
        stream = self._stream()
        logits = self._random(self._rows, max(1, min(self._columns * self._hidden // self._rows, 1 << 17)))
        softmax = logits.numel() / self._seconds(
            lambda: statistics(logits, scores=Scores(), wanted=Wanted(), in_place=True)
        )
        on_cpu = self._job.device.type == "cpu"
        return Device(str(self._job.device), gemm, wide, stream, softmax, on_cpu, self._host())

    def _host(self) -> float:
        """What a chunk of next to no work takes, the first of a call not counted."""
        shard = VocabShard(VocabLayout(64, 1))
        weight = self._random(shard.shard_size, 8).requires_grad_()
        rows = self._random(_FEW_CHUNKS + 1, 8).requires_grad_()
        target = torch.zeros(len(rows), dtype=torch.int64, device=self._job.device)

        def step(chunk_size: int) -> None:
            loss: Any = linear_cross_entropy(rows, weight, target, shard=shard, chunk_size=chunk_size)
            loss.backward()

        many, one = (self._seconds(partial(step, size), 10) for size in (1, len(rows)))
        return max(0.0, many - one) / _FEW_CHUNKS

    def _stream(self) -> float:
        x, y = (torch.ones(_STREAM_ELEMENTS, device=self._job.device) for _ in range(2))
        return 3 * x.nbytes / self._seconds(lambda: x.add_(y))

    def _gemm(self, dtype: torch.dtype) -> float:
        """FLOP/s of the three products of a chunk."""
        rows, weight = self._random(self._rows, self._hidden, dtype), self._random(self._columns, self._hidden, dtype)
        logits, product, grad = rows @ weight.T, torch.empty_like(rows), torch.empty_like(weight)

        def products() -> None:
            torch.mm(rows, weight.T, out=logits)
            torch.mm(logits, weight, out=product)
            torch.mm(logits.T, rows, out=grad)

        return 6.0 * rows.numel() * self._columns / self._seconds(products)

    def linked(self, device: Device) -> tuple[Device, Network]:
        tp = self._job.world
        few = torch.zeros(64, device=self._job.device)
        large = torch.zeros(_LINK_BYTES // 4, device=self._job.device)
        gather = self._seconds(lambda: all_gather(self._shard, few).wait(), 20)
        reduce = self._seconds(lambda: all_reduce_(self._shard, few).wait(), 20)
        # A gather is start + (tp - 1) steps, a reduction start + 2 (tp - 1) of them.
        latency = max(0.0, (reduce - gather) / (tp - 1))
        start = max(0.0, gather - (tp - 1) * latency)
        whole = self._seconds(lambda: all_reduce_(self._shard, large).wait(), 7)
        sent = Message("all_reduce", large.nbytes).sent(tp)
        link = Link("measured", sent / max(whole - start - 2 * (tp - 1) * latency, 1e-9), latency)
        overlap = self._overlap(large, whole)
        known = Device(**{**vars(device), "overlap": overlap})
        return known, Network(link, link, 1 << 20, start)

    def _overlap(self, large: Tensor, alone: float) -> float:
        """Share of an all-reduce that disappears beside products that take about as long."""
        rows, weight = self._random(self._rows, self._hidden), self._random(self._columns, self._hidden)
        logits = rows @ weight.T
        one = self._seconds(lambda: torch.mm(rows, weight.T, out=logits))
        count = max(1, round(1.5 * alone / one))

        def compute() -> None:
            for _ in range(count):
                torch.mm(rows, weight.T, out=logits)

        def both() -> None:
            pending: Pending = all_reduce_(self._shard, large)
            compute()
            pending.wait()

        computing, together = self._seconds(compute, 5), self._seconds(both, 5)
        return min(1.0, max(0.0, (computing + alone - together) / min(alone, computing)))

    def _random(self, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(rows, columns, device=self._job.device).to(dtype or self._dtype)

    def _seconds(self, fn: Callable[[], object], repeats: int = 3) -> float:
        return seconds(self._job, self._shard, fn, repeats)


def seconds(job: Job, shard: VocabShard, fn: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of `fn`, started together on all ranks: the best of `repeats` after a warm-up, of the slowest rank."""
    token = torch.zeros(1, device=job.device)
    found = []
    for _ in range(1 + repeats):
        all_gather(shard, token).wait()
        _finish(job)
        start = time.perf_counter()
        fn()
        _finish(job)
        found.append(time.perf_counter() - start)
    return float(max(job.gather(min(found[1:]))))


def _finish(job: Job) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
