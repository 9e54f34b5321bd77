"""How many collectives each operation issues, and how many bytes: by the shard's count and an independent one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.multirank.counting import collectives
from tests.multirank.sharded import Case, call, local, shard_of, whole
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import cross_entropy, greedy, linear_cross_entropy, top_k, vocab_parallel_embedding


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


def _logits(rank, rows):
    shard = shard_of(16)
    meter = Meter(shard)
    logits = torch.randn(rows, shard.shard_size).requires_grad_()
    target = torch.arange(rows) % 16
    results = []
    for options in ({}, {}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        loss = meter("forward", lambda options=options: cross_entropy(logits, target, shard=shard, **options))
        results.append((meter.calls, meter.bytes))
        meter("backward", lambda loss=loss: loss.sum().backward())
        assert meter.calls == {}, f"backward issued {meter.calls}"
    return results


def test_cross_entropy_exchanges_once_forward_and_nothing_backward():
    for results in run_ranks(_logits, 2, 2048):
        assert [calls for calls, _ in results] == [{"all_gather": 1}] * 4
    for tp in (2, 4):
        first, *later = run_ranks(_logits, tp, 5000)[0]
        assert first[0] == {"all_gather": 2}  # this call is larger than any before: its payload follows its header
        assert later[0][0] == {"all_gather": 1}
        assert later[0][1] == {"all_gather": (64 + 12 * 5000) * (tp - 1)}  # 12 bytes a row to each of the others


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
