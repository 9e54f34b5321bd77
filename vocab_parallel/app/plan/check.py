"""Holds the cost model against measurements: a benchmark's file, or the fused loss run on the ranks at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vocab_parallel.app.job import Job
from vocab_parallel.app.memory import peak_extra_bytes
from vocab_parallel.app.plan.config import ITEMSIZES, PlanConfig
from vocab_parallel.app.plan.cost import Machine, Prediction, Workload
from vocab_parallel.app.plan.machines import DTYPES, seconds
from vocab_parallel.app.plan.schedules import SCHEDULES
from vocab_parallel.app.plan.text import megabytes, milliseconds, table
from vocab_parallel.errors import ConfigError
from vocab_parallel.loss import linear_cross_entropy
from vocab_parallel.vocabulary.files import read_bytes

# Which schedule models which contestant of ``bench loss``.
CONTESTANTS = {"ours": "fused", "megatron": "megatron", "deepspeed": "deepspeed"}
_HABIT = 8  # exchanges after which the size of one no longer holds what came before (see `agreement`)
_SMALL = {"tokens": 1024, "hidden": 1024, "vocab": 16_384}  # of the step that is run here


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
        loss: Any = linear_cross_entropy(input, weight, target, shard=shard, chunk_size=rows)
        loss.backward()

    for _ in range(1 + _HABIT * rows // work.tokens):
        step()
    shard.traffic.reset()
    peak = peak_extra_bytes(step, job.device)
    sent, calls = shard.traffic.total_bytes, shard.traffic.total_calls
    found = Measured(seconds(job, shard, step), max(job.gather(peak)), max(job.gather(sent)), calls)
    prediction = SCHEDULES["fused"](work, machine, rows)
    row = compare(prediction, found)
    size = f"{work.tokens:,} tokens x {work.hidden:,}, {work.vocab:,} ids, chunks of {rows}"
    title = f"ours run here: {size}, {job.world} ranks; predicted / measured"
    return {"workload": vars(work), "schedules": {"fused": row}, "text": f"{title}\n{_table({'ours': row})}"}


def against_bench(path: Path, machine: Machine, *, fit: bool) -> dict[str, Any]:
    """Compares every point of a ``bench loss`` file with what the model says for its sizes.

    Args:
        path: The file, or its folder.
        machine: The rates to predict with.
        fit: Take the rate of matrix products from the file's own floor, so that the rest of the model is judged.

    Returns:
        The figures by point and contestant, and "text".

    Raises:
        ConfigError: No such file, or not one that ``bench loss`` wrote.
    """
    report = read_bench(path)
    points, blocks, compared = [], [], []
    for point in report["points"]:
        problem = point["problem"]
        dtype = report["config"]["dtype"]
        work = Workload(
            problem["tokens"], problem["hidden"], problem["vocab"], ITEMSIZES[dtype], problem["ranks"], multiple_of=1
        )
        fitted = _fitted(machine, work, point["results"].get("floor")) if fit else machine
        rows = {}
        for name, numbers in point["results"].items():
            if name in CONTESTANTS:
                chunk = numbers.get("chunk_rows") or point.get("chunk_rows") or work.tokens
                rows[name] = compare(SCHEDULES[CONTESTANTS[name]](work, fitted, chunk), _measured(numbers))
        compared.append(rows)
        without = [name for name in point["results"] if name not in rows and name != "floor"]
        points.append({"workload": vars(work), "gemm_rate": fitted.device.gemm, "contestants": rows})
        title = (
            f"{work.tokens:,} tokens x {work.hidden:,}, {work.vocab:,} ids, {work.tp} ranks, {dtype}, products at "
            f"{fitted.device.gemm / 1e12:.3g} TFLOP/s{' (the floor of the file)' if fitted is not machine else ''}"
        )
        blocks.append(f"{title}\n{_table(rows)}" + (f"\nno model of {', '.join(without)}" if without else ""))
    ours = [rows["ours"]["sent_bytes"] for rows in compared if "ours" in rows]
    unsettled = any(one["measured"] not in (None, one["predicted"]) for one in ours)
    if unsettled:
        blocks.append(
            f"ours sends what is predicted once its exchanges have settled on a size: after {_HABIT} of them; before, "
            "48 KiB or what the largest of the last ones needed"
        )
    text = "predicted / measured (relative error of the prediction)\n" + "\n\n".join(blocks)
    return {"file": str(path), "points": points, "text": text}


def read_bench(path: Path) -> dict[str, Any]:
    """The content of a ``bench.json``, checked for what is needed of it; the errors are those of `against_bench`."""
    path = path / "bench.json" if path.is_dir() else path
    try:
        report = json.loads(read_bytes(path))
    except OSError as error:
        raise ConfigError(f"check: cannot read {path}: {error.strerror}; write one with bench loss") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"check: {path} is not JSON: {str(error)[:200]}") from error
    try:
        if report["config"]["dtype"] not in ITEMSIZES:
            raise ConfigError(f"check: {path}: dtype {report['config']['dtype']!r} has no model")
        for point in report["points"]:
            good = all(isinstance(point["problem"][name], int) for name in ("tokens", "hidden", "vocab", "ranks"))
            if not good or not isinstance(point["results"], dict):
                raise KeyError("problem")
    except (KeyError, TypeError) as error:
        raise ConfigError(f"check: {path} is not a file of bench loss: no {error}") from error
    return dict(report)


def _fitted(machine: Machine, work: Workload, floor: Mapping[str, Any] | None) -> Machine:
    """With the products as fast as the measured floor's, if there is one."""
    if not floor or not floor.get("best_s"):
        return machine
    gemm = 6.0 * work.tokens * work.hidden * work.real / floor["best_s"]
    wide = gemm if work.itemsize >= 4 else machine.device.wide_gemm
    return replace(machine, device=replace(machine.device, gemm=gemm, wide_gemm=wide))


def _measured(numbers: Mapping[str, Any]) -> Measured:
    collectives = numbers.get("collectives") or {}
    calls, sent = collectives.get("calls"), collectives.get("bytes")
    return Measured(
        numbers.get("best_s"),
        numbers.get("peak_extra_bytes"),
        None if sent is None else sum(sent.values()),
        None if calls is None else sum(calls.values()),
    )


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
    header = ["", *(title for _, title, _ in shown)]
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
