"""From what was measured to the numbers that are reported."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vocab_parallel.app.bench.field import Field, Point

# What the keys of bench.json mean.
DEFINITIONS = {
    "step": "forward and backward of the mean loss; gradients of the hidden states and of this rank's weight",
    "seconds": "of each round the slowest rank's, from a barrier; seconds_by_rank holds all; warm-up is not in it",
    "floor": "three matrix products for each chunk of rows, into preallocated buffers: Z = H W^T, Z W, Z^T H; in the "
    "chunks of ours; neither adding up dW nor any other work",
    "over_floor_best": "best_s over the floor's best_s",
    "over_floor_median": "median over the rounds of the ratio to the floor in the same round",
    "peak_extra_bytes": "largest sum of bytes of tensors beside the inputs that are alive at one time in a step, "
    "watched operation by operation in a run of its own (what is compiled runs uncompiled there); the rank with most",
    "beyond_gradients_bytes": "peak_extra_bytes less those of the two gradients in their tensors' dtype",
    "peak_resident_bytes": "rise of the process's resident memory in a step (Linux, CPU); the rank with most. Unlike "
    "peak_extra_bytes it has what matrix products allocate inside, and what the heap wastes",
    "resident_beyond_gradients_bytes": "peak_resident_bytes less those of the two gradients",
    "chunk_rows": "rows of hidden states in the first product with the whole of the rank's head; null if not seen",
    "collectives": "of one step on the first rank, counted at PyTorch's dispatcher; bytes as a ring sends them",
    "errors": "largest absolute error against float64 on a small problem, over the largest absolute entry; "
    "torch_unsharded is cross_entropy(hidden @ weight.T, target) on one rank in the same dtype",
    "best_peer": "of the contestants that are neither ours nor the floor, the one with the least best_s",
}
# How far a sweep may be from a straight line through zero, and from a constant.
_LIMIT = 0.10


def of_point(field: Field, point: Point) -> dict[str, Any]:
    """One point's numbers; the same on all ranks."""
    floor = [max(ranks) for ranks in point.seconds.get("floor", [])]
    results = {name: _of_contestant(point, name, floor) for name in field.running if name in point.seconds}
    shape = point.shape
    found = {
        "value": point.value,
        "problem": {"tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab, "ranks": shape.world},
        "chunk_size": point.choice.chunk_size,
        "memory_budget": point.choice.memory_budget,
        "chunk_rows": point.rows,
        "gradient_bytes": shape.gradient_bytes,
        "results": results,
    }
    peers = {name: numbers["best_s"] for name, numbers in results.items() if name not in ("ours", "floor")}
    if peers and "ours" in results:
        best = min(peers, key=lambda name: peers[name])
        ratios = [a / b for a, b in zip(results["ours"]["seconds"], results[best]["seconds"], strict=True)]
        found["best_peer"] = {
            "name": best,
            "ours_over_it_best": results["ours"]["best_s"] / peers[best],
            "ours_over_it_median": statistics.median(ratios),
        }
    return found


def _of_contestant(point: Point, name: str, floor: Sequence[float]) -> dict[str, Any]:
    seconds = [max(ranks) for ranks in point.seconds[name]]
    numbers: dict[str, Any] = {
        "loss": point.losses.get(name),
        "seconds_by_rank": point.seconds[name],
        "seconds": seconds,
        "best_s": min(seconds),
        "median_s": statistics.median(seconds),
    }
    if len(floor) == len(seconds):
        numbers["over_floor_best"] = min(seconds) / min(floor)
        numbers["over_floor_median"] = statistics.median(a / b for a, b in zip(seconds, floor, strict=True))
    footprints = point.footprints.get(name)
    if footprints:
        peak = max(each.peak_extra for each in footprints)
        resident = [each.peak_resident for each in footprints if each.peak_resident is not None]
        first = footprints[0]
        numbers |= {
            "peak_extra_bytes": peak,
            "beyond_gradients_bytes": peak - point.shape.gradient_bytes,
            "peak_resident_bytes": max(resident) if resident else None,
            "resident_beyond_gradients_bytes": max(resident) - point.shape.gradient_bytes if resident else None,
            "chunk_rows": first.rows,
            "collectives": {"calls": first.calls, "bytes": first.sent},
        }
    return numbers


def checks(sweep: str, points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a sweep has to show of ours: time in proportion to what is varied; over tokens, constant memory."""
    points = [point for point in points if "ours" in point["results"]]
    if sweep not in ("tokens", "vocab") or len(points) < 2:
        return []
    found = [_check(f"time linear in {sweep}", [_number(point, "best_s") / point["value"] for point in points])]
    if sweep == "tokens":
        found.append(_check("memory beyond the gradients flat", [_number(p, "beyond_gradients_bytes") for p in points]))
    return found


def _number(point: dict[str, Any], key: str) -> float:
    return float(point["results"]["ours"][key])


def _check(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Whether all values are within the limit of the middle of the largest and the smallest."""
    middle = (max(values) + min(values)) / 2
    spread = (max(values) - min(values)) / 2 / middle if middle else 0.0
    return {"name": name, "spread": spread, "limit": _LIMIT, "passed": spread <= _LIMIT}


def machine(device: torch.device) -> dict[str, Any]:
    """What the times depend on."""
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads_a_rank": torch.get_num_threads(),
    }
    if device.type == "cpu":
        found["compiler"] = compiler()
    return found


def compiler() -> str | None:
    """The C++ compiler that torch.compile would use on CPU, if it is there."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()
