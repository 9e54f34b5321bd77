"""Predicts what a loss step costs on each schedule, before anything is rented: time, memory and bytes per rank."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from vocab_parallel.app.config import ParallelConfig
from vocab_parallel.app.job import Job, join
from vocab_parallel.app.plan import check, text
from vocab_parallel.app.plan.advice import MOST_RANKS, chunk_curve, chunk_rows, scaling
from vocab_parallel.app.plan.config import ITEMSIZES, PlanConfig
from vocab_parallel.app.plan.cost import Device, Link, Machine, Network, Prediction, Workload
from vocab_parallel.app.plan.machines import measure, preset_device, preset_network
from vocab_parallel.app.plan.schedules import SCHEDULES
from vocab_parallel.app.settings import from_words
from vocab_parallel.errors import ConfigError

_DEGREES = [1 << power for power in range(11)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``plan``."""
    known = ", ".join(field.name for field in dataclasses.fields(PlanConfig))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"keys: {known}")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, and nothing else")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel plan``."""
    config = _for_check(from_words(PlanConfig, args.overrides))
    if config.measured:
        with join(ParallelConfig(threads=config.threads, device=config.where)) as job:
            _plan(config, job, args.json)
    elif int(os.environ.get("RANK", "0")) == 0:
        _plan(config, None, args.json)
    return 0


def make(config: PlanConfig, machine: Machine, world: int | None = None) -> dict[str, Any]:
    """A plan of `config` for `machine`: what is printed and written, as plain data.

    Args:
        world: Ranks of this job, which `tp` defaults to; None for 8.
    """
    work = workload(config, world)
    rows = config.chunk_size or chunk_rows(work, machine, config.memory_budget)
    predictions = {name: schedule(work, machine, rows) for name, schedule in SCHEDULES.items()}
    words, numbers = text.advice(work, machine, predictions, config.memory_budget, config.chunk_size)
    degrees = scaling(work, machine, config.memory_budget, _DEGREES)
    curve = chunk_curve(work, machine, config.memory_budget)
    parts = [
        "predicted by the cost model, not measured\n"
        + text.describe(work, machine, config.dtype, _source(config, machine.network)),
        text.schedules(list(predictions.values()), work.gradients, machine.floor(work)),
        "memory at the peak beside input and weight, MB by item\n" + text.memory(list(predictions.values())),
        "ours by chunk, up to the budget\n" + text.curve(curve, work.gradients),
        f"ours by TP degree, up to {MOST_RANKS:,}\n" + text.scaling(degrees),
        "advice\n" + "\n".join(f"  {line}" for line in words),
    ]
    return {
        "kind": "prediction",
        "covers": text.COVERS,
        "config": dataclasses.asdict(config),
        "workload": dataclasses.asdict(work),
        "machine": dataclasses.asdict(machine),
        "rates": _source(config, machine.network),
        "schedules": {name: as_data(one) for name, one in predictions.items()},
        "chunk_curve": [as_data(one) for one in curve],
        "scaling": [as_data(one) for one in degrees],
        "advice": numbers | {"words": words},
        "text": "\n\n".join(parts),
    }


def workload(config: PlanConfig, world: int | None = None) -> Workload:
    """The step that a configuration describes."""
    tp = config.tp or world or 8
    return Workload(config.tokens, config.hidden, config.vocab, ITEMSIZES[config.dtype], tp, config.multiple_of)


def as_data(one: Prediction) -> dict[str, Any]:
    """A prediction as plain data."""
    return {
        "schedule": one.schedule, "tp": one.tp, "chunk_rows": one.chunk,
        "predicted_seconds": one.seconds, "predicted_exposed_seconds": one.exposed, "predicted_gemm_seconds": one.gemm,
        "memory_bytes": one.memory, "peak_bytes": one.peak,
        "calls": one.calls, "sent_bytes": one.sent, "total_sent_bytes": one.total_sent,
    }  # fmt: skip


def machine_of(config: PlanConfig, job: Job | None) -> Machine:
    """Presets, a measurement on the ranks of `job`, or some of both; then what the configuration replaces."""
    found = measure(job, workload(config, job.world), config.dtype) if job is not None and config.measured else None
    if found is not None and config.device_name == "measured":
        device = found.device
    else:
        device = preset_device(config.device_name, config.dtype)
    if found is not None and config.link_name == "measured":
        network = found.network
    else:
        network = preset_network(config.link_name, config.between, config.ranks_per_node)
    return Machine(_replaced_device(device, config), _replaced_network(network, config))


def _plan(config: PlanConfig, job: Job | None, as_json: bool) -> None:
    machine = machine_of(config, job)
    if config.check is not None:
        fit = config.gemm_tflops is None
        found: dict[str, Any] = {
            "kind": "check",
            "rates": _source(config, machine.network),
            "machine": dataclasses.asdict(machine),
        }
        found |= check.against_bench(Path(config.check), machine, fit=fit)
    else:
        found = make(config, machine, job.world if job is not None else None)
        if job is not None and config.device_name == config.link_name == "measured":
            found["self_check"] = check.against_this_job(job, machine, config)
            found["text"] += "\n\n" + found["self_check"].pop("text")
    if job is not None and not job.first:
        return
    printed = found.pop("text")
    written = json.dumps(found, indent=1)
    if config.out is not None:
        path = Path(config.out)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(written + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"out: cannot write {path}: {error.strerror}") from error
    print(written if as_json else printed, flush=True)


def _for_check(config: PlanConfig) -> PlanConfig:
    """A benchmark on a CPU is compared with the presets of a CPU, if nothing else is asked for."""
    if config.check is None or config.device is not None or config.link is not None:
        return config
    report = check.read_bench(Path(config.check))
    on_cpu = report.get("environment", {}).get("device", "cpu") == "cpu"
    return dataclasses.replace(config, device="cpu") if on_cpu else config


def _source(config: PlanConfig, network: Network) -> str:
    replaced = [
        name
        for name in ("gemm_tflops", "memory_gbs", "softmax_gps", "link_gbs", "link_us")
        if getattr(config, name) is not None
    ]
    words = "measured now" if config.device_name == "measured" else f"preset {config.device_name}"
    words += f", link {'measured now' if network.inside.name == 'measured' else 'preset ' + network.inside.name}"
    if config.link_name == "measured" != network.inside.name:
        words += " (one rank alone has none to measure)"
    return words + (f", {' and '.join(replaced)} as given" if replaced else "")


def _replaced_device(device: Device, config: PlanConfig) -> Device:
    return dataclasses.replace(
        device,
        gemm=config.gemm_tflops * 1e12 if config.gemm_tflops else device.gemm,
        stream=config.memory_gbs * 1e9 if config.memory_gbs else device.stream,
        softmax=config.softmax_gps * 1e9 if config.softmax_gps else device.softmax,
    )


def _replaced_network(network: Network, config: PlanConfig) -> Network:
    inside = network.inside
    link = Link(
        inside.name,
        config.link_gbs * 1e9 if config.link_gbs else inside.bandwidth,
        config.link_us * 1e-6 if config.link_us else inside.latency,
    )
    return dataclasses.replace(network, inside=link)
