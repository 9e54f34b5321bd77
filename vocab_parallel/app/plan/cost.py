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
        on_cpu: Has no product of narrow matrices into float32, and makes its passes in blocks that stay in cache.
        host: Seconds in which the host issues a chunk. On a CPU they are added; elsewhere a chunk takes no less.
        overlap: Share of a collective that can run beside computing; the rest takes the computing cores.
    """

    name: str
    gemm: float
    wide_gemm: float
    stream: float
    softmax: float
    on_cpu: bool = False
    host: float = 0.0
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

    def floor(self, work: Workload) -> float:
        """Seconds of the three bare products of a step, in one chunk."""
        return 3 * self.gemm(work, work.tokens, work.real)

    def weight_gemm(self, work: Workload, rows: float, columns: float) -> float:
        """Seconds of a dW product that is added to what earlier chunks gave, in float32.

        Of float32 the product adds by itself; a narrow one is formed, then read and added, on a CPU out of cache.
        """
        total = 2.0 * work.wide * columns * work.hidden  # read and written
        if work.itemsize < work.wide:
            formed = 0 if self.device.on_cpu else work.itemsize * columns * work.hidden
            return self.gemm(work, rows, columns) + (total + formed) / self.device.stream
        moved = work.itemsize * rows * (work.hidden + columns) + total
        return max(2.0 * rows * work.hidden * columns / self.device.gemm, moved / self.device.stream)

    def stream(self, moved: float) -> float:
        """Seconds of elementwise work that reads and writes `moved` bytes."""
        return moved / self.device.stream

    def issuing(self, seconds: float) -> float:
        """What the host adds to a chunk that computes for `seconds`."""
        return self.device.host if self.device.on_cpu else max(0.0, self.device.host - seconds)

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


def run(chunks: Sequence[tuple[Chunk, int]], machine: Machine, tp: int) -> float:
    """Seconds of the chunks in order, each so many times in a row."""
    clocks = _Clocks(machine, tp)
    for at, (chunk, times) in enumerate(chunks):
        following = chunks[at + 1][0] if at + 1 < len(chunks) else None
        done, state = 0, None
        while done < times - 1:
            before = clocks.now
            clocks.step(chunk, chunk.fetch)
            done += 1
            if clocks.relative == state:  # from here on each chunk is like the one before
                clocks.skip((times - 1 - done) * (clocks.now - before))
                done = times - 1
            state = clocks.relative
        clocks.step(chunk, following.fetch if following is not None else None)
    return max(clocks.now, clocks.link)


class _Clocks:
    """One clock for computing and one for the communicator, which does one thing at a time."""

    def __init__(self, machine: Machine, tp: int) -> None:
        self._network, self._overlap, self._tp = machine.network, machine.device.overlap, tp
        self.now = self.link = self._fetched = 0.0
        self._first = True

    def step(self, chunk: Chunk, fetch: Message | None) -> None:
        """One chunk; `fetch` is that of the next one."""
        if chunk.fetch is not None:
            if self._first:
                self._fetched = self._send(chunk.fetch)
            self.now = max(self.now, self._fetched)
            if fetch is not None:
                self._fetched = self._send(fetch)
        self._first = False
        self.now += chunk.project + chunk.statistics
        arrived = self._send(chunk.exchange)
        self.now = max(self.now + chunk.hidden, arrived) + chunk.finish
        self._send(chunk.reduce)
        self.now += chunk.weight

    def skip(self, seconds: float) -> None:
        """Moves all clocks on."""
        self.now, self.link, self._fetched = self.now + seconds, self.link + seconds, self._fetched + seconds

    @property
    def relative(self) -> tuple[float, float]:
        """How far the other clocks are ahead of that of computing, as far as digits go."""
        step = max(self.now, self.link) * 1e-12 or 1.0
        return round(max(0.0, self.link - self.now) / step), round(max(0.0, self._fetched - self.now) / step)

    def _send(self, message: Message | None) -> float:
        """Starts a collective when the communicator is free; returns when it ends, 0 if there is none."""
        if message is None:
            return 0.0
        seconds = self._network.seconds(message, self._tp)
        self.link = max(self.link, self.now) + self._overlap * seconds
        self.now += (1.0 - self._overlap) * seconds
        return self.link


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
