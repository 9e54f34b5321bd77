"""A plan in words and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vocab_parallel.app.plan.advice import (
    MOST_RANKS,
    accumulation,
    balance,
    hiding_limit,
    largest_items,
    rows_or_weights,
)
from vocab_parallel.app.plan.cost import Link, Machine, Prediction, Workload

COVERS = (
    "counted: one step of the head's loss, its products, softmax, gradients and collectives. Not counted: the model "
    "below the head, its activations and caches, the optimizer, data and checkpoints"
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def describe(work: Workload, machine: Machine, dtype: str, source: str) -> str:
    """What is planned, and for what machine."""
    device, network = machine.device, machine.network
    links = _link(network.inside)
    if network.between != network.inside:
        links += f" inside nodes of {network.ranks_per_node} ranks, {_link(network.between)} between them"
    size = f"{work.tokens:,} tokens x {work.hidden:,}, {work.vocab:,} ids over {work.tp} ranks of {work.stored:,}"
    return (
        f"{size}, {dtype}\n"
        f"{COVERS}\n"
        f"rates ({source}): {device.name}, products {device.gemm / 1e12:.4g} TFLOP/s, passes {device.stream / 1e9:.4g} "
        f"GB/s, softmax {device.softmax / 1e9:.3g} G elements/s, a chunk issued in {device.host * 1e3:.2f} ms\n"
        f"links: {links}; {network.start * 1e6:.3g} us to start; {device.overlap:.0%} of a collective beside computing"
    )


def schedules(predictions: Sequence[Prediction], gradients: int, floor: float) -> str:
    """The table of schedules: predicted figures of one rank. `floor`: seconds of three bare products."""
    rows = []
    for one in predictions:
        calls = " + ".join(f"{count} {kind.replace('_', '-')}" for kind, count in one.calls.items()) or "none"
        rows.append(
            [
                one.schedule, str(one.chunk or "-"), milliseconds(one.seconds), milliseconds(one.exposed),
                f"{one.seconds / floor:.2f}", megabytes(one.peak), megabytes(max(0, one.peak - gradients)),
                megabytes(one.total_sent), calls,
            ]
        )  # fmt: skip
    header = ["schedule", "chunk", "ms", "exposed ms", "x floor", "peak MB", "beyond dW, dH", "sent MB", "collectives"]
    return table(header, rows)


def memory(predictions: Sequence[Prediction]) -> str:
    """Each schedule's memory by item, largest first."""
    lines = []
    for one in predictions:
        items = sorted(one.memory.items(), key=lambda item: -item[1])
        words = ", ".join(f"{name} {megabytes(size)}" for name, size in items if size)
        lines.append(f"{one.schedule}: {words}")
    return "\n".join(lines)


def curve(predictions: Sequence[Prediction], gradients: int) -> str:
    """Time against memory, by chunk."""
    rows = [
        [str(one.chunk), milliseconds(one.seconds), megabytes(max(0, one.peak - gradients)), str(calls_of(one))]
        for one in predictions
    ]
    return table(["chunk rows", "ms", "MB beyond dW, dH", "collectives"], rows)


def scaling(predictions: Sequence[Prediction]) -> str:
    """Ours over other numbers of ranks."""
    rows = [
        [
            str(one.tp), str(one.chunk), milliseconds(one.seconds), milliseconds(one.exposed), megabytes(one.peak),
            megabytes(one.total_sent), max(one.memory, key=lambda name: one.memory[name]),
        ]
        for one in predictions
    ]  # fmt: skip
    return table(["TP", "chunk", "ms", "exposed ms", "peak MB", "sent MB", "largest item"], rows)


def advice(
    work: Workload, machine: Machine, predictions: Mapping[str, Prediction], budget: int | None, chosen: int | None
) -> tuple[list[str], dict[str, Any]]:
    """What to do, in sentences, and the numbers in them."""
    ours = predictions["fused"]
    rows = ours.chunk or work.tokens
    share, limit = accumulation(work, machine, rows), hiding_limit(work, machine, rows)
    by_rows, by_weights, even = rows_or_weights(work, machine, rows)
    items = largest_items(work, machine, budget)
    allowed = "the default budget allows" if budget is None else f"{megabytes(budget)} MB of logits allow"
    why = "as asked" if chosen else f"within 1% of the fastest that {allowed}"
    lines = [
        f"chunk: {rows:,} rows ({why}); adding each chunk's dW to the earlier ones costs {share:.1%} of its products",
        _hiding(work, machine, rows, limit),
        _gathering(work, by_rows, by_weights, even),
        "largest item of ours' memory: " + ", ".join(f"{item} from TP {tp}" for tp, item in items),
    ]
    fastest = min(predictions.values(), key=lambda one: one.seconds)
    lines.append(f"fastest: {fastest.schedule}, {milliseconds(fastest.seconds)} ms")
    return lines, {
        "chunk_rows": rows,
        "accumulation_share": share,
        "hiding_limit": limit if math.isfinite(limit) else None,
        "gather": _better(by_rows, by_weights),
        "gather_even_tokens": even,
        "largest_items": [{"from_tp": tp, "item": item} for tp, item in items],
        "fastest": fastest.schedule,
    }


def milliseconds(seconds: float) -> str:
    """Seconds as a number of milliseconds."""
    return f"{seconds * 1e3:,.2f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def megabytes(size: float) -> str:
    """Bytes as a number of megabytes."""
    return f"{size / 1e6:,.1f}"


def calls_of(one: Prediction) -> int:
    """Collectives of a step."""
    return sum(one.calls.values())


def _link(link: Link) -> str:
    return f"{link.name} {link.bandwidth / 1e9:.4g} GB/s, {link.latency * 1e6:.3g} us a step"


def _better(by_rows: Prediction, by_weights: Prediction) -> str:
    return "rows" if by_rows.seconds <= by_weights.seconds else "weights"


def _gathering(work: Workload, by_rows: Prediction, by_weights: Prediction, even: float) -> str:
    if work.tp == 1:
        return "gather: one rank holds all rows and all weights"
    rows, weights = (
        f"{milliseconds(one.seconds)} ms, {megabytes(one.total_sent)} MB sent and {megabytes(one.peak)} MB held"
        for one in (by_rows, by_weights)
    )
    return (
        f"gather {_better(by_rows, by_weights)}: rows {rows}; weights, at their best, {weights}; weights send less "
        f"above {even:,.0f} tokens"
    )


def _hiding(work: Workload, machine: Machine, rows: int, limit: float) -> str:
    if machine.device.overlap == 0:
        return "dH reduction: takes the cores that compute (nothing of a collective runs beside), so it never hides"
    collectives, computing = balance(work, machine, rows, work.tp)
    now = f"now {milliseconds(collectives)} ms a chunk against {milliseconds(computing)} ms of computing"
    if limit > MOST_RANKS:
        return f"dH reduction: hides at every TP degree up to {MOST_RANKS:,}; {now}"
    words = f"dH reduction: hides up to TP {math.floor(limit + 1e-6)}, and not past it; {now}"
    return words + "; the last chunk's has only its own dW product to hide behind"
