"""What follows from the cost model: the chunk, rows or weights, the TP degrees past which something else decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vocab_parallel.app.plan.cost import Machine, Message, Prediction, Workload
from vocab_parallel.app.plan.schedules import (
    exchange_bytes,
    fused,
    fused_memory,
    fused_sequence_parallel,
    gather_weights,
)

MOST_RANKS = 1024
DEFAULT_BUDGET, DEFAULT_ROWS = 128 << 20, 4096  # of a chunk of `linear_cross_entropy`
_GRAIN = 128  # rows: chunks are tried in steps that keep GEMM tiles whole
_SLACK = 1.01  # a smaller chunk is taken if it costs at most 1% more


def rows_in_budget(work: Workload, budget: int | None) -> int:
    """The most rows whose logits take `budget` bytes, as the fused loss counts it: at least 1, at most all.

    None: its default, 128 MiB and at most 4,096 rows.
    """
    row = work.stored * work.itemsize
    most = min(DEFAULT_ROWS, DEFAULT_BUDGET // row) if budget is None else budget // row
    return max(1, min(work.tokens, most))


def chunk_rows(work: Workload, machine: Machine, budget: int | None) -> int:
    """The fewest rows within 1% of the fastest chunk that the budget allows."""
    most = rows_in_budget(work, budget)
    seconds = {rows: fused(work, machine, rows).seconds for rows in _candidates(most)}
    fastest = min(seconds.values())
    return min(rows for rows, found in seconds.items() if found <= _SLACK * fastest)


def chunk_curve(work: Workload, machine: Machine, budget: int | None) -> list[Prediction]:
    """The fused loss at chunks from small to what the budget allows."""
    return [fused(work, machine, rows) for rows in _candidates(rows_in_budget(work, budget))]


def accumulation(work: Workload, machine: Machine, rows: int) -> float:
    """What adding a chunk's dW to the earlier ones costs, as a share of the chunk's three products."""
    product = machine.gemm(work, rows, work.real)
    return (machine.weight_gemm(work, rows, work.real) - product) / (3 * product)


def balance(work: Workload, machine: Machine, rows: int, tp: float) -> tuple[float, float]:
    """Of one chunk in the middle of a step: seconds of its collectives, seconds of computing that they can hide behind.

    The link is busy with one exchange and one dH reduction a chunk; the rank with three products and the softmax pass,
    of which the dW product and the next chunk's start hide the reduction. `tp` need not be whole; every rank then holds
    `vocab / tp` ids. Were the products and the bandwidth all, both would be equal at tp = 1 + 3 V b / (s F).
    """
    columns = work.vocab / tp
    network, link_share = machine.network, machine.device.overlap
    reduce = network.seconds(Message("all_reduce", work.itemsize * rows * work.hidden), tp)
    exchange = network.seconds(Message("all_gather", exchange_bytes(work, rows)), tp)
    computing = 2 * machine.gemm(work, rows, columns) + machine.weight_gemm(work, rows, columns)
    return link_share * (reduce + exchange), computing + machine.softmax(rows * columns)


def hiding_limit(work: Workload, machine: Machine, rows: int) -> float:
    """The TP degree at which a chunk's collectives take as long as its computing: past it they no longer hide.

    Where the link itself changes (one node is full) and that decides, the ranks of one node. Infinite if they hide at
    any degree up to 2^20.
    """
    low, high = 1.0, float(1 << 20)
    if _excess(work, machine, rows, high) <= 0:
        return float("inf")
    for _ in range(200):  # the collectives grow with tp and the computing shrinks: one crossing
        middle = (low + high) / 2
        low, high = (low, middle) if _excess(work, machine, rows, middle) > 0 else (middle, high)
    return low


def rows_or_weights(work: Workload, machine: Machine, rows: int) -> tuple[Prediction, Prediction, float]:
    """Gathering rows, gathering weights, and the tokens at which both send the same bytes (headers left out)."""
    weight_bytes = 2.0 * work.stored * work.hidden * work.itemsize  # a rank and peer: one gather, one scatter
    row_bytes = 2.0 * work.hidden * work.itemsize / work.tp + 3 * work.wide
    return fused_sequence_parallel(work, machine, rows), gather_weights(work, machine, rows), weight_bytes / row_bytes


def largest_items(work: Workload, machine: Machine, budget: int | None) -> list[tuple[int, str]]:
    """From which TP degree on, up to 1,024, which item is the largest of the fused loss's memory."""
    found: list[tuple[int, str]] = []
    for tp in range(1, MOST_RANKS + 1):
        some = replace(work, tp=tp)
        rows = rows_in_budget(some, budget)
        memory = fused_memory(some, rows, some.tokens, on_cpu=machine.device.on_cpu)
        item = max(memory, key=lambda name: memory[name])
        if not found or found[-1][1] != item:
            found.append((tp, item))
    return found


def scaling(work: Workload, machine: Machine, budget: int | None, degrees: Sequence[int]) -> list[Prediction]:
    """The fused loss over other numbers of ranks, its chunk chosen anew for each."""
    found = []
    for tp in degrees:
        some = replace(work, tp=tp)
        found.append(fused(some, machine, chunk_rows(some, machine, budget)))
    return found


def _candidates(most: int) -> list[int]:
    """Chunks to try: doublings of the grain, three halves of them, and the most itself."""
    steps = [_GRAIN << power for power in range(24)]
    steps += [3 * step // 2 for step in steps]
    return sorted({step for step in steps if step < most} | {most})


def _excess(work: Workload, machine: Machine, rows: int, tp: float) -> float:
    collectives, computing = balance(work, machine, rows, tp)
    return collectives - computing
