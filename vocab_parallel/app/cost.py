"""The cost model of a vocabulary-parallel loss: seconds, bytes sent and memory of one rank, by arithmetic alone.

    compute      each GEMM max(2 C D n / F, bytes / B); an elementwise pass bytes / B; a softmax pass elements / E
    collectives  a ring: start + steps * latency + bytes sent / bandwidth of the slowest link on it
    step         two clocks, of computing and of communicating, moved through the schedule's chunks in its own order

`C` rows of a chunk, `D` hidden width, `n` real vocabulary rows of the largest shard, `F` FLOP/s, `B` bytes/s. What is
counted (bytes sent, collectives, tensors) is exact; what is timed is a prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vocab_parallel.layout import VocabLayout

# Bytes per element of [C, D] that masking, scaling and merging the rows of a chunk read and write, without fusion.
ROW_PASS_BYTES = 48


@dataclass(frozen=True)
class Workload:
    """One loss step: `tokens` rows of `hidden` numbers against `vocab` ids over `tp` ranks.

    Attributes:
        itemsize: Bytes of a number of the input and the weight.
    """

    tokens: int
    hidden: int
    vocab: int
    itemsize: int
    tp: int
    multiple_of: int = 128

    @property
    def stored(self) -> int:
        """Weight rows that a rank stores."""
        return VocabLayout(self.vocab, self.tp, multiple_of=self.multiple_of).shard_size

    @property
    def real(self) -> int:
        """Real weight rows of the largest shard: the slowest rank sets the pace."""
        return min(self.stored, self.vocab)

    @property
    def wide(self) -> int:
        """Bytes of a statistic or of an accumulated gradient's entry: float32, or float64 for float64."""
        return max(4, self.itemsize)

    @property
    def gradients(self) -> int:
        """Bytes of the two results, dW and dH, in the input's dtype."""
        return self.itemsize * self.hidden * (self.stored + self.tokens)


@dataclass(frozen=True)
class Device:
    """What one rank computes with, for one dtype.

    Attributes:
        gemm: FLOP/s of large matrix products; `wide_gemm` of float32 ones.
        stream: Bytes/s, read and written together, of an elementwise pass over a tensor that fits no cache.
        softmax: Elements/s of a pass that forms maximum, exponential and sum of a row and keeps the exponentials.
        mixed_gemm: A GEMM of narrow matrices can add into a float32 one. Without, the product is added in a pass.
        overlap: Share of a collective that can run beside computing; the rest takes the computing cores.
    """

    name: str
    gemm: float
    wide_gemm: float
    stream: float
    softmax: float
    mixed_gemm: bool = True
    overlap: float = 1.0


@dataclass(frozen=True)
class Link:
    """One step of a ring: `latency` seconds, and `bandwidth` bytes/s that one rank sends to the next."""

    name: str
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Message:
    """A collective and the bytes of one rank's input to it."""

    kind: str  # all_gather | all_reduce | reduce_scatter, as `Traffic` names them
    payload: int

    def sent(self, tp: int) -> int:
        """Bytes that one rank sends, to the byte as `Traffic` counts them."""
        if self.kind == "all_gather":
            return self.payload * (tp - 1)
        return (2 if self.kind == "all_reduce" else 1) * self.payload * (tp - 1) // tp


@dataclass(frozen=True)
class Network:
    """The links of a ring: `inside` a node of `ranks_per_node`, `between` nodes. `start`: seconds of any collective."""

    inside: Link
    between: Link
    ranks_per_node: int
    start: float

    def seconds(self, message: Message | None, tp: float) -> float:
        """Of a ring over `tp` ranks, which need not be whole: thresholds are solved for."""
        if message is None or tp <= 1:
            return 0.0
        nodes = -(-tp // self.ranks_per_node)
        rounds = 2 if message.kind == "all_reduce" else 1
        latency = (tp - nodes) * self.inside.latency + (nodes - 1) * self.between.latency
        bandwidth = min(self.inside.bandwidth, self.between.bandwidth) if nodes > 1 else self.inside.bandwidth
        sent = message.payload * (tp - 1) * (1 if message.kind == "all_gather" else rounds / tp)
        return self.start + rounds * latency + sent / bandwidth


@dataclass(frozen=True)
class Machine:
    """A device on every rank, and what links the ranks."""

    device: Device
    network: Network

    def gemm(self, work: Workload, rows: float, columns: float, *, wide: bool = False) -> float:
        """Seconds of one product of `[rows, D]` and `[D, columns]` sizes, in any of its three roles."""
        rate = self.device.wide_gemm if wide else self.device.gemm
        moved = work.itemsize * (rows * work.hidden + columns * work.hidden + rows * columns)
        return max(2.0 * rows * work.hidden * columns / rate, moved / self.device.stream)

    def weight_gemm(self, work: Workload, rows: float, columns: float) -> float:
        """Seconds of a dW product that is added to what earlier chunks gave, in float32."""
        accumulate = 2.0 * work.wide * columns * work.hidden
        if work.itemsize < work.wide and not self.device.mixed_gemm:
            return self.gemm(work, rows, columns) + accumulate / self.device.stream
        moved = work.itemsize * rows * (work.hidden + columns) + accumulate
        return max(2.0 * rows * work.hidden * columns / self.device.gemm, moved / self.device.stream)

    def stream(self, moved: float) -> float:
        """Seconds of elementwise work that reads and writes `moved` bytes."""
        return moved / self.device.stream

    def softmax(self, elements: float) -> float:
        """Seconds of one softmax pass over `elements`."""
        return elements / self.device.softmax


@dataclass(frozen=True)
class Chunk:
    """One chunk of a fused loss: what it computes and sends, in this order.

    `fetch` is started a chunk ahead. `project` and the softmax pass `statistics`; `exchange` starts; `hidden` is the
    product e W; the exchange is waited for; `finish` forms dH; `reduce` starts; `weight` is the dW product.
    """

    project: float
    statistics: float
    exchange: Message | None = None
    hidden: float = 0.0
    finish: float = 0.0
    reduce: Message | None = None
    weight: float = 0.0
    fetch: Message | None = None

    @property
    def computing(self) -> float:
        """Seconds without any collective."""
        return self.project + self.statistics + self.hidden + self.finish + self.weight


def run(chunks: Sequence[Chunk], machine: Machine, tp: int) -> float:
    """Seconds of the chunks in order: a clock for computing and one for the communicator, which runs one at a time."""
    overlap = machine.device.overlap
    now = link = 0.0

    def send(message: Message | None) -> None:
        nonlocal now, link
        seconds = machine.network.seconds(message, tp)
        link = max(link, now) + overlap * seconds
        now += (1.0 - overlap) * seconds

    fetched = 0.0
    for at, chunk in enumerate(chunks):
        if chunk.fetch is not None:
            if at == 0:
                send(chunk.fetch)
                fetched = link
            now = max(now, fetched)
            if at + 1 < len(chunks):
                send(chunks[at + 1].fetch)
                fetched = link
        now += chunk.project + chunk.statistics
        if chunk.exchange is not None:
            send(chunk.exchange)
        arrived = link if chunk.exchange is not None else 0.0
        now = max(now + chunk.hidden, arrived) + chunk.finish
        if chunk.reduce is not None:
            send(chunk.reduce)
        now += chunk.weight
    return max(now, link)


@dataclass(frozen=True)
class Prediction:
    """One schedule on one rank. Every figure but the counts is a model's, not a measurement.

    Attributes:
        seconds: Forward and backward.
        exposed: Seconds of them in which the rank waits for a collective, or shares its cores with one.
        gemm: Seconds of them in matrix products.
        memory: Bytes alive at the peak beside the input and the weight, by item.
        traffic: Collectives of a step, and how often.
    """

    schedule: str
    seconds: float
    exposed: float
    gemm: float
    memory: dict[str, int]
    traffic: tuple[tuple[Message, int], ...] = ()
    tp: int = 1
    chunk: int | None = None
    calls: dict[str, int] = field(init=False)
    sent: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        calls: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for message, count in self.traffic if self.tp > 1 else ():
            calls[message.kind] += count
            sent[message.kind] += count * message.sent(self.tp)
        object.__setattr__(self, "calls", dict(calls))
        object.__setattr__(self, "sent", dict(sent))

    @property
    def total_sent(self) -> int:
        """Bytes that the rank sends."""
        return sum(self.sent.values())

    @property
    def peak(self) -> int:
        """Bytes of all items."""
        return sum(self.memory.values())
