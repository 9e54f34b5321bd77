"""The schedules of a vocabulary-parallel loss step, ours and others', each as a `Prediction` of the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from vocab_parallel.app.plan.cost import ROW_PASS_BYTES, Chunk, Machine, Message, Prediction, Workload, run

_HEADER = 64  # bytes in front of every exchange (see `agreement`)
_WORDS = 3  # statistics of a row: maximum, sum, target score
# Elements of a float32 copy of narrow numbers that is held at a time; on a CPU of a narrow dW product.
_BLOCK, _BLOCK_ELSEWHERE, _PRODUCT = 1 << 18, 1 << 26, 1 << 21


def exchange_bytes(work: Workload, rows: int) -> int:
    """Bytes of one rank's statistics exchange of `rows` rows, once sizes have settled."""
    return _HEADER + _WORDS * work.wide * rows


def fused_memory(work: Workload, rows: int, own_rows: int, *, on_cpu: bool = False) -> dict[str, int]:
    """Bytes by item at the peak of the fused loss, which is in its chunk loop or at the hand-over of the gradients.

    Args:
        rows: Of a chunk.
        own_rows: Whose dH the rank keeps.
        on_cpu: Narrow dW products and logits are widened in blocks; elsewhere kernels widen the logits.
    """
    narrow = work.itemsize < work.wide
    accumulator = work.wide * work.stored * work.hidden
    kept = {
        "dW accumulator": accumulator,
        "dH": work.itemsize * own_rows * work.hidden,
        "rows": (18 + 3 * work.wide) * work.tokens,  # targets as ids, local ids and masks; loss and statistics
    }
    loop = kept | {
        "logits": rows * work.itemsize * work.real,
        "workspace": _workspace(work, rows, on_cpu),
        "exchange": (2 * work.tp + 1) * exchange_bytes(work, rows) if work.tp > 1 else 0,
    }
    scaled = kept | {
        "dW": work.itemsize * work.stored * work.hidden * narrow,
        "scaled dW": work.wide * min(work.stored * work.hidden, _BLOCK if on_cpu else _BLOCK_ELSEWHERE) * narrow,
    }
    return max(loop, scaled, key=lambda items: sum(items.values()))


def _workspace(work: Workload, rows: int, on_cpu: bool) -> int:
    """The larger of what the softmax pass and what the products of a chunk hold beside its logits."""
    row = work.itemsize * work.hidden
    block = work.wide * min(rows * work.real, _BLOCK)
    products = rows * (2 * row + 2 * work.wide * work.hidden)  # rows and product, narrow; dH and scaled rows, wide
    if work.itemsize == work.wide:
        return products
    if not on_cpu:
        return products + work.real * row
    formed = work.itemsize * min(work.real * work.hidden, _PRODUCT)
    return max(rows * row + block, products + rows * row + formed)


def fused(work: Workload, machine: Machine, rows: int) -> Prediction:
    """Ours: three GEMMs a chunk, one exchange behind the second, dH all-reduced behind the later ones."""
    rows = min(rows, work.tokens)
    exchange = Message("all_gather", exchange_bytes(work, rows))
    sizes = _sizes(work.tokens, rows)
    chunks = [(_gradient_chunk(work, machine, size, exchange, _reduction(work, size)), n) for size, n in sizes]
    traffic = ((exchange, _count(sizes)), *((_reduction(work, size), n) for size, n in sizes))
    gemm = 3 * _products(work, machine, sizes)
    memory = fused_memory(work, rows, work.tokens, on_cpu=machine.device.on_cpu)
    return _predict("fused", work, machine, chunks, gemm, traffic, memory, rows)


def fused_sequence_parallel(work: Workload, machine: Machine, rows: int) -> Prediction:
    """Ours, each rank holding its share of the rows: gathered a chunk ahead, dH reduce-scattered."""
    if work.tp == 1:
        return replace(fused(work, machine, rows), schedule="fused, sequence parallel")
    share = -(-work.tokens // work.tp)
    widths = _sizes(share, max(1, rows // work.tp))
    rows = widths[0][0] * work.tp
    exchange = Message("all_gather", exchange_bytes(work, rows))
    targets = Message("all_gather", 8 * share)
    size_of_row = work.itemsize * work.hidden
    chunks, traffic = [], [(exchange, 1 + _count(widths)), (targets, 1)]
    for width, n in widths:
        fetch = Message("all_gather", width * size_of_row)
        scatter = Message("reduce_scatter", width * work.tp * size_of_row)
        chunks.append((_gradient_chunk(work, machine, width * work.tp, exchange, scatter, fetch), n))
        traffic += [(fetch, n), (scatter, n)]
    before = sum(machine.network.seconds(message, work.tp) for message in (exchange, targets))
    gemm = 3 * _products(work, machine, [(width * work.tp, n) for width, n in widths])
    memory = fused_memory(work, rows, share, on_cpu=machine.device.on_cpu) | {"gathered rows": 2 * rows * size_of_row}
    return _predict("fused, sequence parallel", work, machine, chunks, gemm, tuple(traffic), memory, rows, before)


def fused_per_row(work: Workload, machine: Machine, rows: int) -> Prediction:
    """Ours with `reduction="none"`: any upstream gradient of each row, so backward projects again (4 GEMMs)."""
    rows = min(rows, work.tokens)
    exchange = Message("all_gather", exchange_bytes(work, rows))
    sizes = _sizes(work.tokens, rows)
    forward = [
        (Chunk(machine.gemm(work, size, work.real), machine.softmax(float(size) * work.real), exchange), n)
        for size, n in sizes
    ]
    backward = [(_gradient_chunk(work, machine, size, None, _reduction(work, size)), n) for size, n in sizes]
    traffic = ((exchange, _count(sizes)), *((_reduction(work, size), n) for size, n in sizes))
    memory = fused_memory(work, rows, work.tokens, on_cpu=machine.device.on_cpu)
    memory["rows"] += 2 * work.wide * work.tokens
    gemm = 4 * _products(work, machine, sizes)
    return _predict("fused, reduction none", work, machine, [*forward, *backward], gemm, traffic, memory, rows)


def logits_given(work: Workload, machine: Machine, rows: int) -> Prediction:
    """Ours on logits that the head has made whole: `cross_entropy`, one exchange; the head reduces dH."""
    whole = work.tokens * work.stored
    exchange = Message("all_gather", exchange_bytes(work, work.tokens))
    reduction = _reduction(work, work.tokens)
    passes = 2 * machine.softmax(float(work.tokens) * work.real) + machine.stream(work.itemsize * whole)
    memory = {
        "logits": work.itemsize * whole,
        "gradient of logits": work.itemsize * whole,
        "dW": work.itemsize * work.stored * work.hidden,
        "dH": work.itemsize * work.tokens * work.hidden,
        "exchange": (2 * work.tp + 1) * exchange.payload,
    }
    return _whole("logits given (cross_entropy)", work, machine, passes, memory, [exchange, reduction], behind=False)


def megatron(work: Workload, machine: Machine, rows: int) -> Prediction:
    """Megatron-core's plain cross entropy: float32 logits kept whole, three all-reduces; dH reduced behind dW."""
    whole = work.tokens * work.stored
    cast = work.itemsize + 4 if work.itemsize != 4 else 0  # to float32 and back
    # maximum 4, subtract 8, exponential 8, sum 4, divide 8; backward: multiply 8
    passes = machine.stream(float(whole) * (40 + 2 * cast))
    dw, dh = (work.itemsize * rows * work.hidden for rows in (work.stored, work.tokens))
    # Narrow logits are held beside the float32 ones before the products of backward, and alone during them.
    memory = {"logits": (4 + work.itemsize) * whole} if cast else {"logits": 4 * whole, "dW": dw, "dH": dh}
    if cast and 4 * whole < dw + dh:
        memory = {"logits": work.itemsize * whole, "dW": dw, "dH": dh}
    messages = [*[Message("all_reduce", 4 * work.tokens)] * 3, _reduction(work, work.tokens)]
    return _whole("Megatron plain", work, machine, passes, memory, messages, behind=True)


def deepspeed(work: Workload, machine: Machine, rows: int) -> Prediction:
    """DeepSpeed's linear cross entropy: chunks of rows, then of ids; four GEMMs; every collective waited for."""
    share = -(-work.vocab // work.tp)
    sizes = _sizes(work.tokens, -(-work.tokens // max(1, -(-share // work.hidden))))  # its own choice of chunks
    block = -(-work.real // _count(sizes))
    cast = work.itemsize + 4 if work.itemsize != 4 else 0
    mixed = not machine.device.on_cpu
    gemm = 3 * _products(work, machine, sizes)
    gemm += sum(n * machine.gemm(work, size, work.real, wide=not mixed) for size, n in sizes)
    # Forward: maximum 4, subtract 8, exponential 8, sum 4. Backward: shift 8, exponential 8, scale 8.
    each = 48 + cast * (1 if mixed else 3)
    passes = machine.stream(float(work.tokens) * work.real * each + 8.0 * work.tokens * work.hidden * _count(sizes))
    largest = max(sizes[0][0] * work.real, work.tokens * block)
    memory = {
        # One block and the last one's gradient; a product that takes float32 only holds another copy.
        "logits": largest * (8 if not cast else 6 if mixed else 10),
        "dW": work.itemsize * work.stored * work.hidden,
        "dH": (4 + (work.itemsize if cast else 0)) * work.tokens * work.hidden,
    }
    traffic = [(Message("all_reduce", 8), 2), (Message("all_gather", 24), 1)]
    for size, n in sizes:
        traffic += [(Message("all_reduce", 4 * size), n), (Message("all_reduce", 8 * size), n)]
    traffic.append((Message("all_reduce", 4 * work.tokens * work.hidden), 1))
    passes += _count(sizes) * machine.issuing((gemm + passes) / _count(sizes))
    exposed = sum(count * machine.network.seconds(message, work.tp) for message, count in traffic)
    seconds = gemm + passes + exposed
    return Prediction("DeepSpeed linear", seconds, exposed, gemm, memory, tuple(traffic), work.tp, sizes[0][0])


def gather_weights(work: Workload, machine: Machine, rows: int) -> Prediction:
    """Each rank its share of the rows against the whole weight, gathered; dW reduce-scattered.

    At its best: as many rows a chunk as the others, though its logits then take `tp` times as much; the gather hides
    behind the logits' product, the scatter behind dW's.
    """
    share = -(-work.tokens // work.tp)
    padded = work.stored * work.tp
    sizes = _sizes(share, min(rows, share))
    size_of_row = work.itemsize * work.hidden
    gather = Message("all_gather", work.stored * size_of_row)
    scatter = Message("reduce_scatter", padded * size_of_row)
    count = Message("all_reduce", 16)  # sum and count of the mean
    product = sum(n * machine.gemm(work, size, padded) for size, n in sizes)
    weight = sum(n * machine.weight_gemm(work, size, padded) for size, n in sizes)
    passes = machine.softmax(float(share) * work.vocab) + machine.stream(ROW_PASS_BYTES * share * work.hidden)
    times = [machine.network.seconds(message, work.tp) for message in (gather, scatter, count)]
    overlap = machine.device.overlap
    exposed = _exposed(times[0], product, overlap) + _exposed(times[1], weight, overlap) + times[2]
    memory = {
        "logits": sizes[0][0] * padded * work.itemsize,
        "weight of all ranks": padded * size_of_row if work.tp > 1 else 0,
        "dW of all ranks": padded * work.hidden * work.wide,
        "dH": size_of_row * share,
    }
    seconds = 2 * product + weight + passes + exposed
    traffic = ((gather, 1), (scatter, 1), (count, 1))
    return Prediction(
        "gather weights", seconds, exposed, 3 * product, memory, traffic, work.tp, sizes[0][0] * work.tp
    )  # fmt: skip


# How each is called on the command line and in JSON.
SCHEDULES: dict[str, Callable[[Workload, Machine, int], Prediction]] = {
    "fused": fused,
    "sequence_parallel": fused_sequence_parallel,
    "none": fused_per_row,
    "logits": logits_given,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "gather_weights": gather_weights,
}


def _sizes(rows: int, step: int) -> list[tuple[int, int]]:
    """`rows` in chunks of `step`, as (rows of a chunk, such chunks); at least one chunk."""
    whole, rest = divmod(rows, step)
    return [(step, whole)] * (whole > 0) + [(rest, 1)] * (rest > 0) or [(0, 1)]


def _count(sizes: list[tuple[int, int]]) -> int:
    return sum(n for _, n in sizes)


def _products(work: Workload, machine: Machine, sizes: list[tuple[int, int]]) -> float:
    """Seconds of one product with the weight for each chunk."""
    return sum(n * machine.gemm(work, size, work.real) for size, n in sizes)


def _reduction(work: Workload, rows: int) -> Message:
    return Message("all_reduce", work.itemsize * rows * work.hidden)


def _gradient_chunk(
    work: Workload, machine: Machine, rows: int, exchange: Message | None, reduce: Message, fetch: Message | None = None
) -> Chunk:
    product = machine.gemm(work, rows, work.real)
    chunk = Chunk(
        project=product,
        statistics=machine.softmax(float(rows) * work.real),
        exchange=exchange,
        hidden=product,
        finish=machine.stream(float(ROW_PASS_BYTES) * rows * work.hidden),
        reduce=reduce,
        weight=machine.weight_gemm(work, rows, work.real),
        fetch=fetch,
    )
    return replace(chunk, finish=chunk.finish + machine.issuing(chunk.computing))


def _predict(
    name: str, work: Workload, machine: Machine, chunks: list[tuple[Chunk, int]], gemm: float,
    traffic: tuple[tuple[Message, int], ...], memory: dict[str, int], rows: int, before: float = 0.0,
) -> Prediction:  # fmt: skip
    computing = sum(n * chunk.computing for chunk, n in chunks)
    seconds = before + run(chunks, machine, work.tp)
    waiting = seconds - computing
    exposed = waiting if waiting > 1e-9 * seconds else 0.0  # two sums of the same terms differ in their last digits
    return Prediction(name, seconds, exposed, gemm, memory, traffic, work.tp, rows)


def _whole(
    name: str, work: Workload, machine: Machine, passes: float, memory: dict[str, int], messages: list[Message], *,
    behind: bool,
) -> Prediction:  # fmt: skip
    """A schedule over whole logits; `behind`: its last collective runs beside the dW product."""
    product = machine.gemm(work, work.tokens, work.stored)
    times = [machine.network.seconds(message, work.tp) for message in messages]
    if behind:
        times[-1] = _exposed(times[-1], product, machine.device.overlap)
    exposed = sum(times)
    traffic = tuple((message, 1) for message in messages)
    return Prediction(name, 3 * product + passes + exposed, exposed, 3 * product, memory, traffic, work.tp)


def _exposed(seconds: float, behind: float, overlap: float) -> float:
    """What is left of a collective that runs beside `behind` seconds of computing."""
    return max(0.0, overlap * seconds - behind) + (1.0 - overlap) * seconds
