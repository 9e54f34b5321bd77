"""Extra memory of the losses: it grows with the chunk, not with the number of rows; no [T, v] tensor is ever made."""

from __future__ import annotations

import pytest
import torch

from tests.multirank.counting import Allocations
from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import cross_entropy, linear_cross_entropy

HIDDEN, VOCAB = 8, 4096


def test_the_meter_sees_what_is_alive_at_once_and_only_that():
    known = torch.ones(1000)
    with Allocations(known) as meter:
        for _ in range(5):
            known.add_(1)
            held = known * 2
            del held
        assert meter.peak == 4000
        kept = [known * 2 for _ in range(3)]
        view = torch.empty(50_000)[:10]
    assert meter.peak == 12000 + 200_000
    assert meter.largest == 50_000
    del kept, view


def _fused(rank, options):
    """Peak bytes and the largest tensor's elements, for three pairs of rows and chunk size."""
    shard = shard_of(VOCAB)
    results = []
    # The first is for the exchanges to settle on the size they need; it is not measured.
    for rows, chunk_size in [(1024, 64), (256, 64), (1024, 64), (1024, 256)]:
        mine = rows // shard.tp_size if "sequence_parallel" in options else rows
        input, weight = (
            torch.randn(mine, HIDDEN).requires_grad_(),
            torch.randn(shard.shard_size, HIDDEN).requires_grad_(),
        )
        target = torch.arange(rows)
        with Allocations(input, weight, target) as meter:
            loss = linear_cross_entropy(input, weight, target, shard=shard, chunk_size=chunk_size, **options)
            loss.sum().backward()
        results.append((meter.peak, meter.largest))
        del loss
    return results[1:]


FUSED = Batch(_fused, [({},), ({"label_smoothing": 0.1},), ({"reduction": "none"},), ({"sequence_parallel": True},)])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("options", [options for (options,) in FUSED.cases], ids=str)
def test_memory_of_the_fused_loss_grows_with_the_chunk_and_not_with_the_rows(tp, options):
    row_of_logits = 4 * VOCAB // tp
    (few, _), (many, largest), (wide, _) = FUSED(tp, options)[0]
    assert largest <= max(64 * VOCAB // tp, VOCAB // tp * HIDDEN), f"a tensor of {largest} elements"
    # A row may cost a few hidden-sized vectors and some words of statistics, not a row of logits.
    per_row = (many - few) / (1024 - 256)
    assert per_row <= 6 * 4 * HIDDEN + 160, f"{per_row:.0f} bytes a row; its logits would take {row_of_logits}"
    per_chunk_row = (wide - many) / (256 - 64)
    assert row_of_logits <= per_chunk_row <= 2.5 * row_of_logits, f"{per_chunk_row:.0f} bytes a row of the chunk"


def _of_logits(rank, rows):
    shard = shard_of(VOCAB)
    logits = torch.randn(rows, shard.shard_size).requires_grad_()
    target = torch.arange(rows) % VOCAB
    with Allocations(logits, target) as meter:
        loss = cross_entropy(logits, target, shard=shard)
    forward = meter.peak
    with Allocations(logits, target) as meter:
        loss.backward()
    return forward, meter.peak


@pytest.mark.parametrize("tp", [1, 2])
def test_cross_entropy_copies_no_logits_forward_and_makes_only_their_gradient_backward(tp):
    few_forward, few_backward = run_ranks(_of_logits, tp, 1024)[0]
    many_forward, many_backward = run_ranks(_of_logits, tp, 3072)[0]
    row_of_logits = 4 * VOCAB // tp
    forward, backward = (many_forward - few_forward) / 2048, (many_backward - few_backward) / 2048
    assert forward <= 160, f"{forward:.0f} bytes a row, its logits take {row_of_logits}"
    assert row_of_logits <= backward <= row_of_logits + 160, f"{backward:.0f} bytes a row"
    assert many_forward <= 6e6, "the working memory of the statistics does not depend on the number of rows"
