"""Benchmarks of the loss step: ours, other libraries' and the bare matrix products, interleaved in one run."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vocab_parallel.app import runlog
from vocab_parallel.app.bench import report as bench_report
from vocab_parallel.app.bench import results as bench_results
from vocab_parallel.app.bench import select as bench_select
from vocab_parallel.app.bench.config import BenchConfig
from vocab_parallel.app.bench.field import Field, Point
from vocab_parallel.app.bench.peers import CONTESTANTS, Choice
from vocab_parallel.app.bench.problem import Shape, make
from vocab_parallel.app.config import Config, ParallelConfig
from vocab_parallel.app.job import Job, join
from vocab_parallel.app.settings import from_words
from vocab_parallel.errors import ConfigError


def run(config: BenchConfig) -> bool:
    """Measures, prints, and writes the results folder.

    Returns:
        Whether ours did not fail and every check of a sweep passed; the same on all ranks.
    """
    names = chosen(config)
    # Its own collectives wait for the slowest contestant; the contestants' groups have the configured limit.
    parallel = ParallelConfig(threads=config.threads, device=config.device, timeout_s=10 * config.timeout_s + 600)
    with join(parallel) as job, _process_group(job):
        if config.vocab % job.world:
            raise ConfigError(f"vocab: expected a multiple of the {job.world} ranks, got {config.vocab}")
        _quieten(job)
        field = Field(job, names, timedelta(seconds=config.timeout_s))
        field.enter()
        points = _points(config, job)
        field.warm_up(points)
        _rounds(config, job, field, points)
        field.take_footprints(points)
        errors = field.errors(_small(points[0].shape), config.seed)
        report = _report(config, job, field, points, errors)
        text = bench_report.text(report)
        job.say(text)
        if job.first:
            job.say(f"results: {_write(report, text, _folder(config))}")
        # The launcher ends the other ranks as soon as one leaves with a status that is not 0.
        job.agree(None)
        return bool(report["passed"])


def chosen(config: BenchConfig) -> list[str]:
    """The contestants to run: those of the configuration, or the default of its sweep."""
    if config.contestants is None:
        return list(CONTESTANTS) if config.sweep == "none" else ["floor", "ours"]
    for name in config.contestants:
        if name not in CONTESTANTS:
            near = difflib.get_close_matches(name, CONTESTANTS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(CONTESTANTS)}"
            raise ConfigError(f"contestants: unknown name {name!r}; {hint}")
    # The floor is what the others are measured in.
    return [name for name in CONTESTANTS if name == "floor" or name in config.contestants]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``bench``."""
    parser.add_argument("what", choices=("loss", "select"), help="which part of the package")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example tokens=8192 dtype=bfloat16")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel bench``."""
    if args.what == "select":
        return bench_select.main(args.overrides)
    return 0 if run(from_words(BenchConfig, args.overrides)) else 1


def _points(config: BenchConfig, job: Job) -> list[Point]:
    """What is measured: one point, or one for each value of the sweep."""
    base = Shape(
        config.tokens, config.hidden, config.vocab, getattr(torch, config.dtype), job.device, job.rank, job.world
    )
    choice = Choice(config.chunk_size, config.memory_budget)
    if config.sweep == "none":
        return [Point(None, make(base, config.seed), choice)]
    points: list[Point] = []
    for value in config.values():
        shape = base
        if config.sweep == "tokens":
            shape = dataclasses.replace(base, tokens=value)
        elif config.sweep == "vocab":
            shape = dataclasses.replace(base, vocab=value)
        else:
            choice = Choice(value, None) if config.sweep == "chunk" else Choice(None, value)
        if shape.vocab % job.world:
            raise ConfigError(f"points: expected multiples of the {job.world} ranks, got {value}")
        points.append(Point(value, make(shape, config.seed, points[-1].problem if points else None), choice))
    return points


def _rounds(config: BenchConfig, job: Job, field: Field, points: Sequence[Point]) -> None:
    """Times every contestant at every point once a round, each round in another order."""
    for number in range(config.rounds):
        start = time.perf_counter()
        trials = [(point, name) for point in points for name in field.running]
        shift = number * len(trials) // config.rounds
        for point, name in trials[shift:] + trials[:shift]:
            if name in field.running:
                field.time(point, name)
        job.say(f"round {number + 1}/{config.rounds}: {time.perf_counter() - start:.1f} s")


def _small(shape: Shape) -> Shape:
    """A problem of the same kind that one rank can solve in float64."""
    vocab = min(shape.vocab, 16_384 // shape.world * shape.world)
    return dataclasses.replace(shape, tokens=min(shape.tokens, 256), vocab=vocab)


def _report(
    config: BenchConfig, job: Job, field: Field, points: Sequence[Point], errors: dict[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, as it is written; the same on all ranks."""
    measured = [bench_results.of_point(field, point) for point in points]
    checks = bench_results.checks(config.sweep, measured)
    standing = field.standing()
    report = {
        "command": "bench loss",
        "config": dataclasses.asdict(config),
        "environment": {**runlog.versions(), **bench_results.machine(job.device), "ranks": job.world},
        "definitions": bench_results.DEFINITIONS,
        "contestants": standing,
        "points": measured,
        "errors": errors,
        "checks": checks,
        "passed": standing.get("ours", {}).get("status") in (None, "ran") and all(check["passed"] for check in checks),
    }
    return dict(job.agree(report))


def _write(report: dict[str, Any], text: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "bench.txt").write_text(text + "\n", encoding="utf-8")
    bench_report.plot(report, folder / "bench.png")
    return folder


def _folder(config: BenchConfig) -> Path:
    return runlog.new_folder(Config(name=f"bench-{config.dtype}")) if config.out is None else Path(config.out)


@contextmanager
def _process_group(job: Job) -> Iterator[None]:
    """A process group of one, for the contestants that need one also alone."""
    if job.world > 1:
        yield
        return
    backend = "nccl" if job.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def _quieten(job: Job) -> None:
    """Leaves out other libraries' warnings, and their compilation where there is no compiler."""
    for module in ("megatron", "deepspeed", "torch.distributed"):
        warnings.filterwarnings("ignore", module=module)
    if job.device.type == "cpu" and bench_results.compiler() is None:
        import torch._dynamo

        torch._dynamo.config.disable = True
