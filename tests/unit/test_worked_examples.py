"""The worked ledger of an output head: what it holds and multiplies for all rows of a prompt, and for the last."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vocab_parallel import VocabLayout, VocabParallelLMHead, VocabShard, chunk_rows
from vocab_parallel.app.plan.cost import Device, Link, Machine, Network, Workload
from vocab_parallel.app.plan.schedules import fused_memory, logits_given
from vocab_parallel.decode import Coverage, LengthPenalty

BATCH, LENGTH, WIDTH, VOCAB = 8, 2048, 4096, 32_000
MIB = 2**20
PARAMETERS = 131_072_000
MACS, MACS_OF_LAST = 2_147_483_648_000, 1_048_576_000
SHARD = VocabShard(VocabLayout(VOCAB, 1))


class Products(TorchDispatchMode):
    """Counts the multiply-accumulates of matrix products."""

    macs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            (rows, inner), (_, columns) = args[0].shape, args[1].shape
            self.macs += rows * inner * columns
        return func(*args, **(kwargs or {}))


def projected(rows):
    """The logits of a bfloat16 head, without memory, and the multiply-accumulates that they took."""
    head = VocabParallelLMHead(WIDTH, shard=SHARD, device="meta", dtype=torch.bfloat16)
    hidden = torch.empty(BATCH, LENGTH, WIDTH, device="meta", dtype=torch.bfloat16)
    with Products() as products, torch.no_grad():
        logits = head(hidden, rows=rows)
    return head, logits, products.macs


def test_a_head_of_32_000_by_4096_has_131_072_000_parameters_in_250_mib():
    head, _, _ = projected(-1)
    (weight,) = head.parameters()
    assert weight.numel() == PARAMETERS and weight.nbytes == 250 * MIB
    work = Workload(BATCH * LENGTH, WIDTH, VOCAB, 2, 1)
    assert (work.stored, work.real) == (VOCAB, VOCAB)
    with_bias = VocabParallelLMHead(WIDTH, shard=SHARD, device="meta", bias=True)
    assert sum(one.numel() for one in with_bias.parameters()) == PARAMETERS + VOCAB


def test_rows_selected_before_the_projection_cost_2048_times_less():
    _, every, macs = projected(None)
    assert every.shape == (BATCH, LENGTH, VOCAB) and every.numel() == 524_288_000
    assert every.nbytes == 1000 * MIB and macs == MACS
    for rows, shape in ((-1, (BATCH, VOCAB)), (slice(-1, None), (BATCH, 1, VOCAB))):
        _, last, macs_of_last = projected(rows)
        assert last.shape == shape and last.numel() == 256_000
        assert last.nbytes / MIB == pytest.approx(0.488, abs=5e-4)
        assert macs_of_last == MACS_OF_LAST and macs == LENGTH * macs_of_last


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_plan_counts_what_the_head_does(tp):
    rate, link = 1e15, Link("", 1e18, 0.0)
    machine = Machine(Device("", rate, rate, 1e18, 1e18), Network(link, link, 8, 0.0))
    every, last = (
        logits_given(Workload(rows, WIDTH, VOCAB, 2, tp, multiple_of=1), machine, rows)
        for rows in (BATCH * LENGTH, BATCH)
    )
    assert every.memory["logits"] * tp == 1000 * MIB and last.memory["logits"] * tp == 512_000
    assert every.memory["dW"] * tp == 250 * MIB, "of the weight's size"
    assert every.gemm * tp * rate == pytest.approx(3 * 2 * MACS), "logits, dH and dW"
    assert every.gemm / last.gemm == pytest.approx(LENGTH)


def test_a_chunk_of_logits_is_bounded_by_its_rows_whatever_the_batch():
    rows = chunk_rows(SHARD, torch.bfloat16)
    assert rows * VOCAB * 2 <= 128 * MIB < (rows + 1) * VOCAB * 2
    for tokens in (BATCH * LENGTH, 100 * BATCH * LENGTH):
        held = fused_memory(Workload(tokens, WIDTH, VOCAB, 2, 1), rows, tokens)
        assert held.get("logits", 0) in (0, rows * VOCAB * 2)  # 0: at its peak the loop is over


def test_the_gnmt_length_and_coverage_have_their_worked_values():
    penalty = LengthPenalty(1.0, "gnmt")
    assert [penalty.of(length) for length in (1, 7, 13)] == [1.0, 2.0, 3.0]
    assert LengthPenalty(0.5, "gnmt").of(7) == pytest.approx(math.sqrt(2.0))
    attended = torch.tensor([0.5, 0.25, 3.0])
    assert Coverage(0.2).of(attended).item() == pytest.approx(0.2 * (math.log(0.5) + math.log(0.25)))
