"""The cost model: its arithmetic, its counts against real runs, and what is concluded from it."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabParallelLMHead, VocabShard, cross_entropy, linear_cross_entropy
from vocab_parallel.app.memory import peak_extra_bytes
from vocab_parallel.app.plan import advice
from vocab_parallel.app.plan.cost import Chunk, Device, Link, Machine, Message, Network, Prediction, Workload, run
from vocab_parallel.app.plan.machines import DTYPES, LINKS, preset_device, preset_network
from vocab_parallel.app.plan.schedules import SCHEDULES, exchange_bytes, fused, fused_memory, gather_weights
from vocab_parallel.loss.linear import chunk_rows
from vocab_parallel.shard import Traffic

LINK = Link("link", 50e9, 0.0)
MACHINE = Machine(Device("device", 700e12, 700e12, 3e12, 500e9), Network(LINK, LINK, 1 << 20, 0.0))
WORK = Workload(tokens=8192, hidden=4096, vocab=131_072, itemsize=2, tp=8)
ROWS = 1024


def ring(tp: int, *messages: Message) -> tuple[int, int]:
    """Calls and bytes as `Traffic` counts them."""
    traffic = Traffic()
    for message in messages:
        traffic.add(message.kind, message.sent(tp))
    return traffic.total_calls, traffic.total_bytes


def test_a_workload_is_that_of_its_largest_shard() -> None:
    work = Workload(10, 4, 9, 2, 4, multiple_of=1)
    assert (work.stored, work.real, work.wide) == (3, 3, 4)
    assert replace(work, vocab=5, multiple_of=4).real == 4 and replace(work, vocab=3, multiple_of=4).real == 3
    assert work.gradients == 2 * 4 * (3 + 10) and replace(work, itemsize=8).wide == 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_sends_nothing_and_waits_for_nothing(name: str) -> None:
    alone = SCHEDULES[name](replace(WORK, tp=1), MACHINE, ROWS)
    assert alone.calls == {} and alone.sent == {} and alone.total_sent == 0 and alone.exposed == 0
    assert alone.seconds >= alone.gemm > 0


@pytest.mark.parametrize("name", ["fused", "sequence_parallel", "none", "logits", "megatron", "deepspeed"])
def test_time_and_bytes_are_linear_in_the_tokens(name: str) -> None:
    one, two, four = (SCHEDULES[name](replace(WORK, tokens=tokens), MACHINE, ROWS) for tokens in (2**15, 2**16, 2**17))
    assert four.seconds - two.seconds == pytest.approx(2 * (two.seconds - one.seconds), rel=0.01)
    assert four.total_sent / two.total_sent == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("name", ["fused", "none", "logits", "megatron", "gather_weights"])
def test_time_is_linear_in_the_vocabulary_where_computing_decides(name: str) -> None:
    fast = replace(
        MACHINE, network=replace(MACHINE.network, inside=Link("fast", 1e18, 0.0), between=Link("", 1e18, 0.0))
    )
    one, two, four = (SCHEDULES[name](replace(WORK, vocab=vocab), fast, ROWS) for vocab in (2**17, 2**18, 2**19))
    assert four.seconds - two.seconds == pytest.approx(2 * (two.seconds - one.seconds), rel=0.01)
    assert four.gemm == pytest.approx(4 * one.gemm, rel=0.01)


def test_three_or_four_products_of_six_or_eight_flop_a_token_and_weight() -> None:
    flop = WORK.tokens * WORK.hidden * WORK.vocab / WORK.tp
    for name, share in {
        "fused": 6,
        "sequence_parallel": 6,
        "none": 8,
        "logits": 6,
        "megatron": 6,
        "deepspeed": 8,
    }.items():
        seconds = SCHEDULES[name](WORK, MACHINE, 4096).gemm
        assert seconds == pytest.approx(share * flop / MACHINE.device.gemm, rel=0.02), name
    assert MACHINE.floor(WORK) == pytest.approx(6 * flop / MACHINE.device.gemm)


def test_a_ring_sends_what_traffic_counts() -> None:
    assert Message("all_gather", 100).sent(4) == 300
    assert Message("all_reduce", 101).sent(4) == 2 * 101 * 3 // 4
    assert Message("reduce_scatter", 101).sent(4) == 101 * 3 // 4
    assert all(Message(kind, 100).sent(1) == 0 for kind in ("all_gather", "all_reduce", "reduce_scatter"))


def test_a_ring_over_nodes_goes_at_the_pace_of_its_slowest_link() -> None:
    network = Network(Link("fast", 100.0, 1.0), Link("slow", 10.0, 5.0), ranks_per_node=8, start=2.0)
    gather = Message("all_gather", 1000)
    assert network.seconds(gather, 1) == 0 and network.seconds(None, 8) == 0
    assert network.seconds(gather, 8) == 2 + 7 * 1 + 7000 / 100
    assert network.seconds(gather, 16) == 2 + 14 * 1 + 1 * 5 + 15_000 / 10
    assert network.seconds(Message("all_reduce", 1600), 16) == 2 + 2 * (14 * 1 + 5) + 3000 / 10
    assert network.seconds(Message("reduce_scatter", 1600), 16) == 2 + 14 + 5 + 1500 / 10


def _step(reduce: int, chunks: int = 3, **times: float) -> tuple[float, float]:
    """Seconds of a step of equal chunks, and of its computing, on a link of one byte a second over 2 ranks."""
    network = Network(Link("", 1.0, 0.0), Link("", 1.0, 0.0), 8, 0.0)
    times = {"project": 10.0, "statistics": 2.0, "hidden": 10.0, "finish": 1.0, "weight": 10.0} | times
    chunk = Chunk(**times, exchange=Message("all_gather", 4), reduce=Message("all_reduce", reduce))
    machine = replace(MACHINE, network=network)
    seconds = run([(chunk, chunks)], machine, 2)
    assert run([(chunk, 1)] * chunks, machine, 2) == pytest.approx(seconds, rel=1e-12)
    return seconds, chunks * chunk.computing


def test_collectives_that_are_short_enough_hide_but_for_nothing() -> None:
    seconds, computing = _step(reduce=10)
    assert seconds == computing


def test_the_last_reduction_hides_behind_its_own_weight_product_only() -> None:
    seconds, computing = _step(reduce=15)  # 15 s: longer than dW's 10, shorter than dW and the next chunk's start
    assert seconds == computing + 5


def test_a_reduction_that_outlasts_its_chunk_delays_the_next_exchange() -> None:
    reduce = 40
    seconds, computing = _step(reduce=reduce)
    # In the middle: 40 of reduction and 4 of exchange against 10 + 10 + 2 + 10 of computing. At the end: 40 against 10.
    assert seconds == computing + 2 * (reduce + 4 - 32) + (reduce - 10)


def test_an_exchange_longer_than_its_product_is_waited_for() -> None:
    seconds, computing = _step(reduce=1, hidden=1.0)
    assert seconds == computing + 3 * (4 - 1)


@given(
    st.lists(st.integers(0, 50), min_size=8, max_size=8), st.integers(1, 400), st.booleans(),
    st.sampled_from([0, 0.3, 1]),
)  # fmt: skip
def test_equal_chunks_in_a_row_take_what_they_take_one_by_one(
    numbers: list[int], chunks: int, fetched: bool, overlap: float
) -> None:
    network = Network(Link("", 1.0, 0.0), Link("", 1.0, 0.0), 8, 0.5)
    machine = replace(MACHINE, network=network, device=replace(MACHINE.device, overlap=overlap))
    *times, exchange, reduce, fetch = numbers
    chunk = Chunk(
        *times[:2], Message("all_gather", exchange), *times[2:4], Message("all_reduce", reduce), times[4],
        Message("all_gather", fetch) if fetched else None,
    )  # fmt: skip
    last = replace(chunk, project=chunk.project / 3, weight=chunk.weight / 3)
    one_by_one = run([*[(chunk, 1)] * chunks, (last, 1)], machine, 2)
    assert run([(chunk, chunks), (last, 1)], machine, 2) == pytest.approx(one_by_one, rel=1e-9)


def test_without_overlap_everything_is_exposed() -> None:
    alone = replace(MACHINE, device=replace(MACHINE.device, overlap=0.0))
    one = fused(WORK, alone, ROWS)
    expected = sum(count * alone.network.seconds(message, WORK.tp) for message, count in one.traffic)
    assert one.exposed == pytest.approx(expected) and one.exposed > fused(WORK, MACHINE, ROWS).exposed


@given(
    tp=st.sampled_from([2, 8, 64, 1024]), tokens=st.integers(1, 3000), hidden=st.integers(1, 5000),
    vocab=st.integers(1024, 300_000), rows=st.integers(1, 8192), itemsize=st.sampled_from([2, 4, 8]),
    link=st.sampled_from([link for link in LINKS]), name=st.sampled_from(list(SCHEDULES)),
)  # fmt: skip
def test_every_prediction_is_sane(
    tp: int, tokens: int, hidden: int, vocab: int, rows: int, itemsize: int, link: str, name: str
) -> None:
    machine = Machine(preset_device("h100", "bfloat16"), preset_network(link, "infiniband", 8))
    one = SCHEDULES[name](Workload(tokens, hidden, vocab, itemsize, tp), machine, rows)
    assert one.seconds >= one.gemm > 0 and 0 <= one.exposed <= one.seconds
    assert one.peak == sum(one.memory.values()) > 0 and min(one.memory.values()) >= 0
    assert one.total_sent == sum(count * message.sent(tp) for message, count in one.traffic) >= 0
    assert sum(one.calls.values()) == sum(count for _, count in one.traffic)


# What real calls send. 7 rows in chunks of 3 are 3 chunks; 11 rows over 2 or 3 ranks are uneven shares.
REAL = [
    ("fused", 7, 3), ("fused", 8, 8), ("fused", 5, 64), ("sequence_parallel", 12, 4), ("sequence_parallel", 11, 4),
    ("sequence_parallel", 11, 64), ("none", 7, 3), ("logits", 7, 0),
]  # fmt: skip
HIDDEN, VOCAB = 6, 40


def _settled_traffic(rank: int, tp: int, dtype: torch.dtype) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Calls and bytes of one step of each of `REAL`, after enough of them to have settled on the exchange's size."""
    found = []
    for name, tokens, rows in REAL:
        shard = VocabShard(VocabLayout(VOCAB, tp, multiple_of=4), dist.group.WORLD)
        whole = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
        target = torch.arange(tokens) % VOCAB
        head = VocabParallelLMHead(HIDDEN, shard=shard, dtype=dtype)
        share = [tokens // tp + (other < tokens % tp) for other in range(tp)]
        mine = slice(sum(share[:rank]), sum(share[: rank + 1])) if name == "sequence_parallel" else slice(None)
        input = whole[mine].requires_grad_()
        for _ in range(10):
            shard.traffic.reset()
            if name == "logits":
                loss = cross_entropy(head.logits(input), target, shard=shard)
            else:
                loss = linear_cross_entropy(
                    input, head.weight, target[mine], shard=shard, chunk_size=rows,
                    reduction="none" if name == "none" else "mean", sequence_parallel=name == "sequence_parallel",
                )  # fmt: skip
            loss.sum().backward()
        found.append((dict(shard.traffic.calls), dict(shard.traffic.bytes)))
    return found


@pytest.mark.parametrize(("tp", "dtype"), [(2, "float32"), (2, "bfloat16"), (3, "float64")])
def test_counts_are_those_of_real_runs(tp: int, dtype: str) -> None:
    predicted = [
        SCHEDULES[name](Workload(tokens, HIDDEN, VOCAB, DTYPES[dtype].itemsize, tp, multiple_of=4), MACHINE, rows or 1)
        for name, tokens, rows in REAL
    ]
    for found in run_ranks(_settled_traffic, tp, tp, DTYPES[dtype]):
        for case, one, (calls, sent) in zip(REAL, predicted, found, strict=True):
            assert (one.calls, one.sent) == (calls, sent), case


def test_the_exchange_is_a_header_and_twelve_bytes_a_row() -> None:
    assert exchange_bytes(WORK, 100) == 64 + 12 * 100
    one = fused(replace(WORK, tokens=2500), MACHINE, 1000)  # the short last chunk sends as much as the others
    assert one.sent["all_gather"] == 3 * (64 + 12_000) * 7
    assert ring(8, *[Message("all_gather", 12_064)] * 3) == (3, one.sent["all_gather"])


def test_others_issue_their_collectives() -> None:
    assert SCHEDULES["megatron"](WORK, MACHINE, ROWS).calls == {"all_reduce": 4}
    # 8 chunks of its own choice: three exchanges of bounds and two a chunk, as counted when it ran; then dH.
    work = Workload(tokens=64, hidden=4, vocab=64, itemsize=4, tp=2, multiple_of=1)
    assert SCHEDULES["deepspeed"](work, MACHINE, ROWS).calls == {"all_reduce": 2 + 2 * 8 + 1, "all_gather": 1}


def _peaks(rank: int, tp: int, cases: list[tuple[int, int, str]]) -> list[int]:
    return [_peak(tp, *case) for case in cases]


def _peak(tp: int, tokens: int, rows: int, dtype: str) -> int:
    shard = VocabShard(VocabLayout(8192, tp), dist.group.WORLD if tp > 1 else None)
    input = torch.randn(tokens, 64).to(DTYPES[dtype]).requires_grad_()
    weight = torch.randn(shard.shard_size, 64).to(DTYPES[dtype]).requires_grad_()
    target = torch.arange(tokens)

    def step() -> None:
        input.grad = weight.grad = None
        linear_cross_entropy(input, weight, target, shard=shard, chunk_size=rows).backward()

    for _ in range(9):
        step()
    return peak_extra_bytes(step)


MEMORY = [
    (1024, 64, "float32"), (1024, 512, "float32"), (4096, 256, "float32"), (4096, 2048, "bfloat16"),
    (256, 16, "bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_is_that_of_real_runs(tp: int) -> None:
    [found, *_] = run_ranks(_peaks, tp, tp, MEMORY)
    for (tokens, rows, dtype), measured in zip(MEMORY, found, strict=True):
        work = Workload(tokens, 64, 8192, DTYPES[dtype].itemsize, tp)
        on_cpu = replace(MACHINE, device=replace(MACHINE.device, on_cpu=True))
        assert fused(work, on_cpu, rows).peak == pytest.approx(measured, rel=0.1), (tokens, rows, dtype)


@given(
    st.integers(1, 400_000), st.integers(1, 64), st.none() | st.integers(1, 1 << 31),
    st.sampled_from(list(DTYPES.items())),
)  # fmt: skip
def test_the_budget_is_read_as_the_loss_reads_it(
    vocab: int, tp: int, budget: int | None, dtype: tuple[str, torch.dtype]
) -> None:
    work = Workload(1 << 40, 64, vocab, dtype[1].itemsize, tp)
    rows = advice.rows_in_budget(work, budget)
    shard: VocabShard = SimpleNamespace(shard_size=work.stored)  # type: ignore[assignment]
    assert rows == chunk_rows(shard, dtype[1], budget)
    assert advice.rows_in_budget(replace(work, tokens=5), budget) == min(5, rows)
    if budget is not None and rows > 1:
        logits = fused_memory(work, rows, 0).get("logits", 0)
        assert logits <= budget < (rows + 1) * work.stored * work.itemsize


def test_a_larger_chunk_adds_dw_up_less_often() -> None:
    shares = [advice.accumulation(WORK, MACHINE, rows) for rows in (128, 512, 2048)]
    assert shares[0] > shares[1] > shares[2] >= 0
    # bfloat16 off a CPU: 2 bytes of product and 4 of sum read, 4 written, for 6 C FLOP.
    assert shares[1] == pytest.approx(10 / MACHINE.device.stream / (6 * 512 / MACHINE.device.gemm))
    # Where products add by themselves, they pay only while reading and writing the sum outlasts their FLOP.
    wide = replace(WORK, itemsize=4)
    enough = int(5 * MACHINE.device.gemm / MACHINE.device.stream)
    assert advice.accumulation(wide, MACHINE, enough) == 0 < advice.accumulation(wide, MACHINE, enough // 2)


def test_the_host_issues_chunks_beside_a_gpu_and_instead_of_a_cpu() -> None:
    host = 10.0  # longer than any of these chunks
    gpu = replace(MACHINE, device=replace(MACHINE.device, host=host))
    one = replace(WORK, tp=1, tokens=3 * ROWS)
    assert fused(one, gpu, ROWS).seconds == pytest.approx(3 * host)
    assert fused(one, replace(MACHINE, device=replace(MACHINE.device, host=1e-9)), ROWS) == fused(one, MACHINE, ROWS)
    cpu, busy = (replace(MACHINE, device=replace(MACHINE.device, on_cpu=True, host=some)) for some in (0.0, host))
    assert fused(one, busy, ROWS).seconds == pytest.approx(fused(one, cpu, ROWS).seconds + 3 * host)


@pytest.mark.parametrize("budget", [1 << 22, 1 << 28, 1 << 32])
def test_the_chunk_is_the_smallest_near_the_fastest_that_fits(budget: int) -> None:
    rows = advice.chunk_rows(WORK, MACHINE, budget)
    curve = {one.chunk: one.seconds for one in advice.chunk_curve(WORK, MACHINE, budget)}
    assert rows * WORK.stored * WORK.itemsize <= budget and rows in curve
    fastest = min(curve.values())
    assert curve[rows] <= 1.01 * fastest
    assert all(curve[other] > 1.01 * fastest for other in curve if other is not None and other < rows)


def test_the_hiding_limit_satisfies_its_equation() -> None:
    for machine in (MACHINE, replace(MACHINE, network=preset_network("pcie", "pcie", 8))):
        limit = advice.hiding_limit(WORK, machine, ROWS)
        collectives, computing = advice.balance(WORK, machine, ROWS, limit)
        assert 2 < limit < 1024 and collectives == pytest.approx(computing, rel=1e-6)
        assert advice.hiding_limit(WORK, machine, ROWS) < advice.hiding_limit(
            replace(WORK, vocab=262_144), machine, ROWS
        )


def test_the_hiding_limit_in_closed_form() -> None:
    """Products and bandwidth alone: 2 (tp - 1) / tp C D s / b = 6 C D V / (tp F), so tp = 1 + 3 V b / (s F)."""
    device = Device("", 700e12, 700e12, 1e30, 1e30)
    work = replace(WORK, hidden=1 << 24)  # beside which a row's 12 bytes are nothing
    limit = advice.hiding_limit(work, Machine(device, MACHINE.network), ROWS)
    assert limit == pytest.approx(1 + 3 * WORK.vocab * 50e9 / (2 * 700e12), rel=1e-3)


def test_the_step_itself_turns_exposed_at_the_hiding_limit() -> None:
    """Twice as many chunks cost twice the computing and no more below the limit, and more above."""
    limit = advice.hiding_limit(WORK, MACHINE, ROWS)

    def exposed_by_more_chunks(tp: int) -> float:
        some = [fused(replace(WORK, tp=tp, tokens=n * ROWS, multiple_of=1), MACHINE, ROWS).exposed for n in (20, 40)]
        return some[1] - some[0]

    below, above = math.floor(limit * 0.97), math.ceil(limit * 1.03)
    assert exposed_by_more_chunks(below) == pytest.approx(0, abs=1e-9)
    collectives, computing = advice.balance(WORK, MACHINE, ROWS, above)
    assert exposed_by_more_chunks(above) == pytest.approx(20 * (collectives - computing), rel=0.05)


def test_the_hiding_limit_is_a_full_node_where_the_next_link_decides() -> None:
    network = Network(Link("fast", 1e15, 0.0), Link("slow", 1e6, 0.0), ranks_per_node=8, start=0.0)
    assert advice.hiding_limit(WORK, replace(MACHINE, network=network), ROWS) == pytest.approx(8)
    free = Network(Link("free", 1e30, 0.0), Link("free", 1e30, 0.0), 8, 0.0)
    assert advice.hiding_limit(WORK, replace(MACHINE, network=free), ROWS) == math.inf


def test_rows_and_weights_send_the_same_at_the_even_tokens() -> None:
    even = advice.rows_or_weights(WORK, MACHINE, ROWS)[2]
    for factor, fewer in ((0.9, "rows"), (1.1, "weights")):
        tokens = round(even * factor / WORK.tp) * WORK.tp
        by_rows, by_weights, _ = advice.rows_or_weights(replace(WORK, tokens=tokens), MACHINE, ROWS)
        assert ("rows" if by_rows.total_sent < by_weights.total_sent else "weights") == fewer
        # 8-byte targets and 64-byte headers are what the even point leaves out.
        assert by_rows.total_sent / by_weights.total_sent == pytest.approx(factor, rel=0.01)
    padded = WORK.stored * WORK.tp * WORK.hidden * WORK.itemsize
    assert by_weights.total_sent == 2 * padded * (WORK.tp - 1) // WORK.tp + Message("all_reduce", 16).sent(WORK.tp)


def test_holding_all_weights_takes_memory_that_does_not_shrink_with_the_ranks() -> None:
    eight, many = (gather_weights(replace(WORK, tp=tp), MACHINE, ROWS) for tp in (8, 64))
    assert many.memory["weight of all ranks"] == eight.memory["weight of all ranks"] == WORK.vocab * WORK.hidden * 2


def test_the_largest_item_goes_from_the_weight_gradient_to_what_ranks_do_not_share() -> None:
    items = advice.largest_items(WORK, MACHINE, None)
    assert items[0] == (1, "dW accumulator") and [tp for tp, _ in items] == sorted({tp for tp, _ in items})
    assert len(items) > 1 and items[-1][1] in ("workspace", "dH", "exchange") and items[-1][0] <= advice.MOST_RANKS
    for tp, item in items:
        some = replace(WORK, tp=tp)
        memory = fused_memory(some, advice.rows_in_budget(some, None), some.tokens)
        assert memory[item] == max(memory.values())


def test_scaling_goes_to_the_most_ranks() -> None:
    found = advice.scaling(WORK, MACHINE, None, [1, 8, advice.MOST_RANKS])
    assert [one.tp for one in found] == [1, 8, 1024] and all(isinstance(one, Prediction) for one in found)
    assert found[0].gemm == pytest.approx(8 * found[1].gemm, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["h100", "h200", "cpu"])
def test_presets_have_rates_for_every_dtype(name: str, dtype: str) -> None:
    device = preset_device(name, dtype)
    assert 1e9 < device.gemm < 1e15 and 1e9 < device.stream < 1e13 and 1e8 < device.softmax < 1e13
    assert device.on_cpu == (name == "cpu") and 0 <= device.overlap <= 1
