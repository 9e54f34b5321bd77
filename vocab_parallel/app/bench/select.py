"""``bench select``: time and bytes of selecting tokens over shards, beside gathering the logits, interleaved."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.app import runlog
from vocab_parallel.app.bench import results as bench_results
from vocab_parallel.app.bench import select_report
from vocab_parallel.app.bench.select_config import SelectConfig
from vocab_parallel.app.bench.select_contestants import CONTESTANTS, OPERATIONS
from vocab_parallel.app.bench.select_problem import Problem, make
from vocab_parallel.app.bench.watch import CollectiveCounter
from vocab_parallel.app.config import Config, ParallelConfig
from vocab_parallel.app.job import Job, join
from vocab_parallel.app.settings import from_words
from vocab_parallel.errors import ConfigError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import VocabShard


def run(config: SelectConfig) -> bool:
    """Measures, prints, and writes the results folder.

    Returns:
        Whether ours was the faster in every case from `select_report.FROM_BYTES` on; the same on all ranks, and True on
        one.
    """
    with join(ParallelConfig(threads=config.threads, device=config.device, timeout_s=config.timeout_s)) as job:
        for vocab in config.vocab:
            if vocab % job.world:
                raise ConfigError(f"vocab: expected multiples of the {job.world} ranks, got {vocab}")
        points = [_measured(config, job, problem) for problem in _problems(config, job)]
        report = dict(job.agree(_report(config, job, points)))
        text = select_report.text(report)
        job.say(text)
        if job.first:
            folder = runlog.new_folder(Config(name="bench-select")) if config.out is None else Path(config.out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            (folder / "bench.txt").write_text(text + "\n", encoding="utf-8")
            job.say(f"results: {folder}")
        job.agree(None)  # the launcher ends the others as soon as one rank leaves with a status that is not 0
        return bool(report["passed"])


def main(words: Sequence[str]) -> int:
    """Entry of ``python -m vocab_parallel bench select``."""
    return 0 if run(from_words(SelectConfig, words)) else 1


def _problems(config: SelectConfig, job: Job) -> Iterator[Problem]:
    for vocab in config.vocab:
        shard = VocabShard(VocabLayout(vocab, job.world, multiple_of=1), job.group)
        alone = VocabShard(VocabLayout(vocab, 1, multiple_of=1))
        for rows in config.batch:
            for kind in config.kinds:
                yield make(job, kind, rows, shard, alone, config.seed)


def _measured(config: SelectConfig, job: Job, problem: Problem) -> dict[str, Any]:
    """One point: every operation by every contestant, interleaved; the same on all ranks."""
    start = time.perf_counter()
    trials = {
        (operation, name): CONTESTANTS[name](OPERATIONS[operation], problem)
        for operation in config.operations
        for name in config.contestants
    }
    calls, ids, sent = {}, {}, {}
    for key, step in trials.items():
        ids[key] = step()  # and everything is allocated
        with CollectiveCounter(job.world) as counter:
            step()
        sent[key] = dict(counter.calls), dict(counter.bytes)
        once = max(job.gather(_seconds(job, step, 2)))
        calls[key] = max(1, math.ceil(config.sample_ms / 1e3 / once))
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in trials}
    keys = list(trials)
    for number in range(config.rounds):
        shift = number * len(keys) // config.rounds
        for key in keys[shift:] + keys[:shift]:
            seconds[key].append(max(job.gather(_seconds(job, trials[key], calls[key]))))
    vocab = problem.shard.vocab_size
    job.say(f"V {vocab:,}, B {problem.rows}, {problem.kind}: {time.perf_counter() - start:.1f} s")
    operations = {
        operation: {
            name: _numbers(problem.rows, seconds[operation, name], *sent[operation, name])
            for name in config.contestants
        }
        for operation in config.operations
    }
    for operation, results in operations.items():
        results["compared"] = _compared(results, {name: ids[operation, name] for name in config.contestants})
    return {"vocab": vocab, "rows": problem.rows, "kind": problem.kind, "operations": operations}


def _seconds(job: Job, step: Callable[[], Tensor], calls: int) -> float:
    """A call's time on this rank, from a common start."""
    job.barrier()
    _wait(job)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    _wait(job)
    return (time.perf_counter() - start) / calls


def _wait(job: Job) -> None:
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)


def _numbers(rows: int, seconds: list[float], calls: dict[str, int], sent: dict[str, int]) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "best_s": min(seconds),
        "collectives": sum(calls.values()),
        "bytes_a_row": sum(sent.values()) / rows,
    }


def _compared(results: dict[str, Any], ids: dict[str, Tensor]) -> dict[str, Any]:
    """Ours beside each of the others, round by round."""
    found: dict[str, Any] = {}
    for name in results:
        if name != "ours":
            pairs = zip(results[name]["seconds"], results["ours"]["seconds"], strict=True)
            found[name] = {"speedup_median": statistics.median(other / ours for other, ours in pairs)}
    if "gather_ours" in ids:
        found["same_ids_gathered"] = bool(torch.equal(ids["ours"], ids["gather_ours"]))
    return found


def _report(config: SelectConfig, job: Job, points: list[dict[str, Any]]) -> dict[str, Any]:
    slower: list[str] = []
    slower_small: list[str] = []
    other: list[str] = []
    for point in points:
        counts = point["rows"] * point["vocab"] * 4 // job.world >= select_report.FROM_BYTES
        for operation, results in point["operations"].items():
            where = f"{operation}, V {point['vocab']:,}, B {point['rows']}, {point['kind']}"
            compared = results["compared"]
            if not compared.get("same_ids_gathered", True):
                other.append(where)
            for name in set(compared) - {"same_ids_gathered"}:
                speedup = compared[name]["speedup_median"]
                if job.world > 1 and speedup <= 1.0:
                    (slower if counts else slower_small).append(f"{where}: {name} takes {speedup:.2f} of our time")
    return {
        "command": "bench select",
        "config": dataclasses.asdict(config),
        "environment": {**runlog.versions(), **bench_results.machine(job.device), "ranks": job.world},
        "definitions": select_report.DEFINITIONS,
        "points": points,
        "slower": sorted(slower),
        "slower_small": sorted(slower_small),
        "other_ids": sorted(other),
        "passed": not slower and not other,
    }
