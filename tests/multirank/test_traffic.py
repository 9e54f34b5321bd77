"""How many collectives each operation issues, and how many bytes: by the shard's count and an independent one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.multirank.counting import collectives
from tests.multirank.sharded import Case, call, local, shard_of, whole
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import (
    RowOutputs,
    cross_entropy,
    greedy,
    linear_cross_entropy,
    token_logprobs,
    top_k,
    vocab_parallel_embedding,
)


class Meter:
    """What a piece of code sends, after checking that both counts agree."""

    def __init__(self, shard):
        self.shard = shard

    def __call__(self, name, fn):
        self.shard.traffic.reset()
        with collectives() as (calls, sent):
            result = fn()
        assert Counter(calls) == self.shard.traffic.calls, f"{name}: {calls} issued, {self.shard.traffic.calls} counted"
        assert Counter(sent) == self.shard.traffic.bytes, f"{name}: {sent} sent, {self.shard.traffic.bytes} counted"
        self.calls, self.bytes = dict(calls), dict(sent)
        return result


# What one row costs in the exchange of statistics, in bytes, by what is asked for.
ROW_BYTES = {
    "plain": (12, {}),
    "z-loss, softcap and temperature": (12, {"options": {"z_loss": 0.1, "softcap": 3.0, "temperature": 0.7}}),
    "weights": (12, {"weighted": True}),
    "smoothing": (16, {"options": {"label_smoothing": 0.1}}),
    "smoothing over others": (16, {"options": {"label_smoothing": 0.1, "smoothing_over": "others"}}),
    "logprob and lse": (12, {"outputs": ("logprob", "lse")}),
    "entropy": (16, {"outputs": ("entropy",)}),
    "argmax": (20, {"outputs": ("argmax",)}),
    "correct": (20, {"outputs": ("correct",)}),
    "margin": (20, {"outputs": ("margin",)}),
    "argmax, correct and margin": (20, {"outputs": ("argmax", "correct", "margin")}),
    "all": (28, {"outputs": ("logprob", "entropy", "lse", "margin"), "options": {"label_smoothing": 0.1}}),
    "distribution": (24, {"soft": True}),
    "distribution smoothed": (28, {"soft": True, "options": {"label_smoothing": 0.1}}),
    "distribution and entropy": (28, {"soft": True, "outputs": ("entropy",)}),
    "divergence": (24, {"soft": True, "function": "kl_div"}),
    "log-probabilities": (16, {"function": "token_logprobs"}),
    "none": (12, {"options": {"reduction": "none"}}),
    "bfloat16": (12, {"dtype": torch.bfloat16}),
    "float64": (24, {"dtype": torch.float64}),
}
ROWS, CHUNK, WIDTH = 6, 2, 5


def _settled(rank, linear, settings):
    """Calls and bytes of forward and backward, once exchanges have settled on the size that they need."""
    case = Case(
        "", linear=linear, leading=(ROWS,), hidden=WIDTH, chunk_size=CHUNK, **{"dtype": torch.float32} | settings
    )
    shard = shard_of(case.vocab)
    meter = Meter(shard)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    for _ in range(4 if linear else 9):  # a size is remembered for eight exchanges
        outputs = RowOutputs(*case.outputs) if case.outputs else None
        loss = meter("forward", lambda outputs=outputs: call(case, mine, shard, outputs))
        forward = meter.calls, meter.bytes
        meter("backward", lambda loss=loss: loss.backward(mine["upstream"].to(loss.dtype)))
    return forward, (meter.calls, meter.bytes)


SETTLED = Batch(_settled, [(linear, settings) for linear in (False, True) for _, settings in ROW_BYTES.values()])


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", ROW_BYTES)
def test_the_loss_of_logits_exchanges_once_and_no_byte_more_than_its_statistics(name, tp):
    row, settings = ROW_BYTES[name]
    for forward, backward in SETTLED(tp, False, settings):
        assert forward == ({"all_gather": 1}, {"all_gather": (64 + row * ROWS) * (tp - 1)})
        assert backward == ({}, {})


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", ROW_BYTES)
def test_the_fused_loss_exchanges_once_a_chunk_and_no_byte_more_than_its_statistics(name, tp):
    """dH is reduced in the input's dtype, where the gradients are formed: in backward if rows have one each."""
    row, settings = ROW_BYTES[name]
    size = settings.get("dtype", torch.float32).itemsize
    reduced = {"all_reduce": 3}, {"all_reduce": 3 * (2 * CHUNK * WIDTH * size * (tp - 1) // tp)}
    per_row = name in ("none", "log-probabilities")
    for forward, backward in SETTLED(tp, True, settings):
        exchanged = {"all_gather": 3}, {"all_gather": 3 * (64 + row * CHUNK) * (tp - 1)}
        assert forward == (exchanged if per_row else tuple(a | b for a, b in zip(exchanged, reduced, strict=True)))
        assert backward == (reduced if per_row else ({}, {}))


@pytest.mark.parametrize("target_local", [True, False])
def test_sequence_parallel_rows_travel_once_each_way(target_local):
    """6 rows of 3 chunks on 2 ranks: an opening exchange, the targets if local, then rows and statistics by chunk."""
    settings = {"spread": "even", "target_local": target_local}
    for forward, backward in run_ranks(_settled, 2, True, settings):
        statistics = 64 + 12 * CHUNK
        rows = CHUNK // 2 * WIDTH * 4
        assert forward == (
            {"all_gather": 1 + target_local + 3 + 3, "reduce_scatter": 3},
            {
                "all_gather": statistics + target_local * 8 * ROWS // 2 + 3 * (rows + statistics),
                "reduce_scatter": 3 * CHUNK * WIDTH * 4 // 2,
            },
        )
        assert backward == ({}, {})


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("entropy", [True, False])
def test_a_row_loss_adds_one_exchange_of_a_header(entropy, reduction):
    """What its function raises on one rank has to reach the others after the last chunk too."""
    row = 16 if entropy else 12
    for (calls, sent), _ in run_ranks(_row_loss, 2, entropy, reduction):
        assert calls["all_gather"] == 3 + 1
        assert sent["all_gather"] == 3 * (64 + row * CHUNK) + 64


def _row_loss(rank, entropy, reduction):
    options = {"reduction": reduction, "entropy": entropy}
    return _settled(rank, True, {"function": "row_loss", "options": options})


def _wide(rank, linear):
    """Two replicas of two ranks each."""
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shard = shard_of(9, group=shards[rank // 2])
    meter = Meter(shard)
    rows = 4 + 2 * (rank // 2)  # the replicas may have other numbers of rows
    case = Case("", linear=linear, leading=(rows,), chunk_size=CHUNK, options={"mean_group": pairs[rank % 2]})
    mine = local(replace(case, options={}), whole(replace(case, options={})), shard)
    for name in case.names:
        mine[name].requires_grad_()
    for _ in range(9):
        loss = meter("forward", lambda: call(case, mine, shard))
        forward = meter.calls, meter.bytes
        meter("backward", lambda loss=loss: loss.backward())
    return rows, forward, (meter.calls, meter.bytes)


@pytest.mark.parametrize("linear", [False, True])
def test_a_mean_group_costs_one_exchange_of_80_bytes_a_call(linear):
    for rows, (calls, sent), backward in run_ranks(_wide, 4, linear):
        chunks, of_chunk = (rows // CHUNK, CHUNK) if linear else (1, rows)
        assert calls["all_gather"] == chunks + 1
        assert sent["all_gather"] == chunks * (64 + 24 * of_chunk) + 80
        assert backward == ({}, {})


def _growing(rank):
    """A call that is larger than any before, the same again, and a small one."""
    shard = shard_of(16)
    meter = Meter(shard)
    seen = []
    for rows in (5000, 5000, 3, *[3] * 8):
        logits, target = torch.randn(rows, shard.shard_size), torch.arange(rows) % 16
        meter("forward", lambda logits=logits, target=target: cross_entropy(logits, target, shard=shard))
        seen.append((meter.calls["all_gather"], meter.bytes["all_gather"]))
    return seen


@pytest.mark.parametrize("tp", [2, 4])
def test_a_payload_larger_than_any_before_follows_its_header_once(tp):
    header, large, small = 64, 12 * 5000, 12 * 3
    for seen in run_ranks(_growing, tp):
        others = tp - 1
        assert seen[0] == (2, (header + 48 * 1024 + large) * others)
        assert seen[1] == (1, (header + large) * others)
        assert seen[2] == (1, (header + large) * others), "the size is remembered for eight exchanges"
        assert seen[-1] == (1, (header + small) * others)


def _first(rank):
    """Up to 4,096 rows need no second all-gather even the first time."""
    shard = shard_of(16)
    meter = Meter(shard)
    logits, target = torch.randn(4096, shard.shard_size), torch.arange(4096) % 16
    meter("loss", lambda: cross_entropy(logits, target, shard=shard))
    first = meter.calls
    meter("log-probabilities", lambda: token_logprobs(logits[:3072], target[:3072], shard=shard))
    return first, meter.calls


def test_the_first_call_of_4096_rows_exchanges_once():
    assert run_ranks(_first, 2) == [({"all_gather": 1},) * 2] * 2


def _fused(rank, case, settings):
    shard = shard_of(case.vocab)
    meter = Meter(shard)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_(name not in case.frozen)
    with torch.set_grad_enabled(settings.get("grad", True)):
        loss = meter("forward", lambda: call(case, mine, shard))
    forward = meter.calls
    if loss.requires_grad:
        meter("backward", lambda: loss.backward(mine["upstream"].to(loss.dtype)))
        return forward, meter.calls
    return forward, {}


# 7 rows in chunks of 3 are 3 chunks.
FUSED = {
    "mean": (Case("", chunk_size=3), {}, {"all_gather": 3, "all_reduce": 3}, {}),
    "smoothing": (
        Case("", chunk_size=3, bias=True, options={"label_smoothing": 0.1, "reduction": "sum"}),
        {},
        {"all_gather": 3, "all_reduce": 3},
        {},
    ),
    "one chunk": (Case("", chunk_size=7), {}, {"all_gather": 1, "all_reduce": 1}, {}),
    "default chunk": (Case(""), {}, {"all_gather": 1, "all_reduce": 1}, {}),
    "none": (Case("", chunk_size=3, options={"reduction": "none"}), {}, {"all_gather": 3}, {"all_reduce": 3}),
    "no grad": (Case("", chunk_size=3), {"grad": False}, {"all_gather": 3}, {}),
    "frozen input": (Case("", chunk_size=3, frozen=("input",)), {}, {"all_gather": 3}, {}),
    "frozen weight": (Case("", chunk_size=3, frozen=("weight",)), {}, {"all_gather": 3, "all_reduce": 3}, {}),
    "all frozen": (Case("", chunk_size=3, frozen=("weight", "input")), {}, {"all_gather": 3}, {}),
}


FUSED_BATCH = Batch(_fused, [(case, settings) for case, settings, _, _ in FUSED.values()])


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("tp", [2, 3])
def test_the_fused_loss_exchanges_once_a_chunk_and_reduces_the_input_gradient_once_a_chunk(name, tp):
    case, settings, forward, backward = FUSED[name]
    assert FUSED_BATCH(tp, case, settings) == [(forward, backward)] * tp


@pytest.mark.parametrize("target_local", [True, False])
def test_sequence_parallel_rows_are_gathered_and_their_gradient_scattered_once_a_chunk(target_local):
    """Forward: one header, the targets if they are local, and for each of 3 chunks its rows and its statistics."""
    case = Case("", chunk_size=4, spread="even", leading=(12,), target_local=target_local)
    extra = 1 + target_local
    for forward, backward in run_ranks(_fused, 2, case, {}):
        assert forward == {"all_gather": extra + 3 + 3, "reduce_scatter": 3}
        assert backward == {}
    for forward, backward in run_ranks(_fused, 2, case, {"grad": False}):
        assert forward == {"all_gather": extra + 3 + 3}
        assert backward == {}


def _others(rank):
    shard = shard_of(16)
    meter = Meter(shard)
    logits = torch.randn(5, shard.shard_size, generator=torch.Generator().manual_seed(rank))
    counts = {}
    meter("greedy", lambda: greedy(logits, shard=shard))
    counts["greedy"] = meter.calls
    meter("top_k", lambda: top_k(logits, 3, shard=shard))
    counts["top_k"] = meter.calls
    ids = torch.arange(10) % 16
    weight = torch.randn(shard.shard_size, 4).requires_grad_()
    for spread in (False, True):
        out = meter("embedding", lambda spread=spread: vocab_parallel_embedding(
            ids, weight, shard=shard, sequence_parallel=spread))  # fmt: skip
        counts[f"embedding {spread}"] = meter.calls
        meter("embedding backward", lambda out=out: out.sum().backward())
        counts[f"embedding backward {spread}"] = meter.calls
    return counts


def test_selection_exchanges_once_and_the_embedding_reduces_once():
    for counts in run_ranks(_others, 2):
        assert counts == {
            "greedy": {"all_gather": 1},
            "top_k": {"all_gather": 1},
            "embedding False": {"all_gather": 1, "all_reduce": 1},
            "embedding backward False": {},
            "embedding True": {"all_gather": 1, "reduce_scatter": 1},
            "embedding backward True": {"all_gather": 1},
        }


def _alone(rank):
    shard = shard_of(9, 4)
    meter = Meter(shard)
    case = Case("", multiple_of=4, bias=True)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    meter("fused", lambda: call(case, mine, shard).backward())
    assert meter.calls == {}
    logits = torch.randn(3, shard.shard_size)
    for name, fn in {
        "loss": lambda: cross_entropy(logits, torch.arange(3), shard=shard),
        "sequence parallel": lambda: linear_cross_entropy(
            torch.randn(3, 5).double(), mine["weight"], torch.arange(3), shard=shard, sequence_parallel=True
        ),
        "greedy": lambda: greedy(logits, shard=shard),
        "top_k": lambda: top_k(logits, 2, shard=shard),
        "embedding": lambda: vocab_parallel_embedding(torch.arange(3), mine["weight"], shard=shard),
    }.items():
        meter(name, fn)
        assert meter.calls == {}, f"{name} issued {meter.calls} in a world of one"


def test_one_rank_issues_no_collective():
    run_ranks(_alone, 1)
