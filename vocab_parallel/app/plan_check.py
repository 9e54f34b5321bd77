"""Holds the cost model against measurements: a benchmark's file, or the fused loss run on the ranks at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vocab_parallel.app.cost import Machine, Prediction, Workload
from vocab_parallel.app.job import Job
from vocab_parallel.app.machines import DTYPES, seconds
from vocab_parallel.app.memory import peak_extra_bytes
from vocab_parallel.app.plan_config import ITEMSIZES, PlanConfig
from vocab_parallel.app.plan_text import megabytes, milliseconds, table
from vocab_parallel.app.schedules import SCHEDULES, exchange_bytes
from vocab_parallel.errors import ConfigError
from vocab_parallel.loss import linear_cross_entropy

_HABIT = 8  # exchanges after which the size of one no longer holds what came before (see `agreement`)
_SMALL = {"tokens": 1024, "hidden": 1024, "vocab": 32_768}  # of the step that is run here


@dataclass(frozen=True)
class Measured:
    """What one step of one schedule took on a rank; None what is not known."""

    seconds: float | None = None
    peak_bytes: int | None = None
    sent_bytes: int | None = None
    calls: int | None = None


def against_this_job(job: Job, machine: Machine, config: PlanConfig) -> dict[str, Any]:
    """Runs our own schedule at a small size on the ranks of `job`, and compares it with its prediction.

    Returns:
        The figures, and "text"; the same on every rank.
    """
    work = Workload(
        min(config.tokens, _SMALL["tokens"]), min(config.hidden, _SMALL["hidden"]),
        max(job.world, min(config.vocab, _SMALL["vocab"] * job.world)), ITEMSIZES[config.dtype], job.world,
        config.multiple_of,
    )  # fmt: skip
    rows = max(1, min(work.tokens // 4, config.chunk_size or work.tokens))
    shard = job.shard(work.vocab, work.multiple_of)
    options: dict[str, Any] = {"device": job.device, "dtype": DTYPES[config.dtype]}
    generator = torch.Generator(job.device).manual_seed(0)
    input = torch.randn(work.tokens, work.hidden, generator=generator, **options).requires_grad_()
    weight = torch.randn(work.stored, work.hidden, **options).mul_(work.hidden**-0.5).requires_grad_()
    target = torch.randint(work.vocab, (work.tokens,), generator=generator, device=job.device)

    def step() -> None:
        input.grad = weight.grad = None
        linear_cross_entropy(input, weight, target, shard=shard, chunk_size=rows).backward()

    for _ in range(_HABIT):
        step()
    shard.traffic.reset()
    peak = peak_extra_bytes(step, job.device)
    sent, calls = shard.traffic.total_bytes, shard.traffic.total_calls
    found = Measured(seconds(job, shard, step, 5), max(job.gather(peak)), max(job.gather(sent)), calls)
    prediction = SCHEDULES["fused"](work, machine, rows)
    row = compare(prediction, found)
    size = f"{work.tokens:,} tokens x {work.hidden:,}, {work.vocab:,} ids, chunks of {rows}"
    title = f"ours run here: {size}, {job.world} ranks; relative error of the prediction"
    return {"workload": vars(work), "schedules": {"fused": row}, "text": f"{title}\n{_table({'ours': row})}"}


def against_bench(path: Path, machine: Machine, config: PlanConfig) -> dict[str, Any]:
    raise NotImplementedError


def compare(prediction: Prediction, measured: Measured) -> dict[str, Any]:
    """Predicted against measured: for each figure both, and the relative error (None where nothing was measured)."""
    pairs = {
        "seconds": (prediction.seconds, measured.seconds),
        "peak_bytes": (prediction.peak, measured.peak_bytes),
        "sent_bytes": (prediction.total_sent, measured.sent_bytes),
        "calls": (sum(prediction.calls.values()), measured.calls),
    }
    return {
        name: {"predicted": guess, "measured": truth, "relative_error": _error(guess, truth)}
        for name, (guess, truth) in pairs.items()
    }


def _error(guess: float, truth: float | None) -> float | None:
    if truth is None:
        return None
    return (guess - truth) / truth if truth else float(guess != truth)


def _table(rows: Mapping[str, dict[str, Any]]) -> str:
    shown: Sequence[tuple[str, str, Callable[[float], str]]] = (
        ("seconds", "ms", milliseconds),
        ("peak_bytes", "peak MB", megabytes),
        ("sent_bytes", "sent MB", megabytes),
        ("calls", "collectives", lambda count: f"{count:.0f}"),
    )
    header = ["predicted / measured", *(title for _, title, _ in shown)]
    body = []
    for name, row in rows.items():
        cells = [name]
        for figure, _, words in shown:
            one = row[figure]
            if one["measured"] is None:
                cells.append(f"{words(one['predicted'])} / -")
            else:
                cells.append(f"{words(one['predicted'])} / {words(one['measured'])} ({one['relative_error']:+.0%})")
        body.append(cells)
    return table(header, body)
