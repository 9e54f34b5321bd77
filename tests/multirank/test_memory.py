"""Extra memory of the losses: it grows with the chunk, not with the number of rows; no [T, v] tensor is ever made."""

from __future__ import annotations

import pytest
import torch

from tests.multirank.counting import Allocations
from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import RowOutputs, cross_entropy, linear_cross_entropy
from vocab_parallel.loss import chunk_rows, linear_kl_div, linear_row_loss, linear_token_logprobs

HIDDEN, VOCAB = 32, 4096
BLOCK = 1 << 20  # bytes of a block of rows that one elementwise pass works on


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


def surprise(rows, scale):
    """A row loss without the entropy: it hides its exchange, and needs no dense gradient."""
    return -rows.logprob * scale


# Losses of hidden states and weight, with their targets: ids, or this rank's part of a distribution.
LOSSES = {
    "mean": lambda h, w, y, **o: linear_cross_entropy(h, w, y, **o),
    "capped": lambda h, w, y, **o: linear_cross_entropy(h, w, y, softcap=5.0, label_smoothing=0.1, **o),
    "none": lambda h, w, y, **o: linear_cross_entropy(h, w, y, reduction="none", **o),
    "invariant": lambda h, w, y, **o: linear_cross_entropy(h, w, y, tp_invariant=True, **o),
    "sequence parallel": lambda h, w, y, **o: linear_cross_entropy(h, w, y, sequence_parallel=True, **o),
    "sequence parallel, none": lambda h, w, y, **o: linear_cross_entropy(
        h, w, y, sequence_parallel=True, reduction="none", **o
    ),
    "log-probabilities": lambda h, w, y, **o: torch.stack(linear_token_logprobs(h, w, y, **o)),
    "row loss": lambda h, w, y, **o: linear_row_loss(h, w, y, surprise, torch.ones(len(y)), entropy=False, **o),
    "outputs": lambda h, w, y, **o: linear_cross_entropy(h, w, y, outputs=RowOutputs(*RowOutputs.NAMES), **o),
}


def _call(shard, name, rows, dtype, **options):
    """Peak bytes of forward and of backward, and elements of the largest tensor."""
    mine = rows // shard.tp_size if "sequence parallel" in name else rows
    input = torch.randn(mine, HIDDEN, dtype=dtype).requires_grad_()
    weight = torch.randn(shard.shard_size, HIDDEN, dtype=dtype).requires_grad_()
    target = torch.arange(mine) % VOCAB
    with Allocations(input, weight, target) as forward:
        value = LOSSES[name](input, weight, target, shard=shard, **options)
    with Allocations(input, weight, target) as backward:
        value.sum().backward()
    return forward.peak, backward.peak, max(forward.largest, backward.largest)


def _rows_and_chunks(name, dtype):
    """Few rows, many rows, and few rows in a wide chunk."""
    shard = shard_of(VOCAB)
    _call(shard, name, 2048, dtype, chunk_size=256)  # the exchanges settle on the size they need
    settings = [(1024, 256), (2048, 256), (1024, 1024)]
    return [_call(shard, name, rows, dtype, chunk_size=chunk) for rows, chunk in settings]


GROWTH = [(name, torch.float32) for name in LOSSES] + [(name, torch.bfloat16) for name in ("mean", "invariant")]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), GROWTH, ids=str)
def test_nothing_grows_with_the_rows_but_the_gradient_and_a_few_words(name, dtype, tp):
    """A row's gradient, and its target and statistics: 14 bytes, 12 more for a later backward, 25 of all outputs.

    Each leaf of `tp_invariant` sees the targets for itself, in 9 bytes.
    """
    gradient = HIDDEN * dtype.itemsize // (tp if "sequence parallel" in name else 1)
    words = 48 + {"outputs": 25, "invariant": 9 * 8 // tp}.get(name, 0)
    for few, many, _ in GROWING(tp, _rows_and_chunks, name, dtype):
        for what, at in (("forward", 0), ("backward", 1)):
            grown = (many[at] - few[at]) / (2048 - 1024)
            assert grown <= gradient + words, f"{what}: {grown:.0f} bytes a row, of which {gradient} are its gradient"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "dtype"), GROWTH, ids=str)
def test_a_chunk_costs_its_logits_once(name, dtype, tp):
    """And for each range of ids a few rows as wide as the hidden states, in float32."""
    row, leaves = VOCAB // tp * dtype.itemsize, 8 // tp if name == "invariant" else 1
    for few, many, wide in GROWING(tp, _rows_and_chunks, name, dtype):
        assert few[2] == many[2], "the largest tensor depends on the number of rows"
        grown = (max(wide[:2]) - max(few[:2])) / (1024 - 256)
        limit = row + 4 * HIDDEN * 4 * leaves + 512
        assert 0.98 * row <= grown <= limit, f"{grown:.0f} bytes a row of a chunk, whose logits take {row}"
        assert wide[2] >= 1024 * VOCAB // tp // (8 // tp if name == "invariant" else 1), (
            "the meter has missed the logits"
        )


def _budget(dtype, budget, name):
    """Rows of a chunk by the package, peak bytes, and elements of the largest tensor."""
    shard = shard_of(VOCAB)
    return chunk_rows(shard, dtype, budget), *_call(shard, name, 1024, dtype, memory_budget=budget)


BUDGETS = [
    (dtype, budget, name)
    for dtype in (torch.float32, torch.bfloat16)
    for budget in (2 << 20, 8 << 20)
    for name in ("mean", "none", "invariant", "sequence parallel")
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("dtype", "budget", "name"), BUDGETS, ids=str)
def test_the_logits_of_a_chunk_take_the_memory_budget_and_no_more(dtype, budget, name, tp):
    columns, leaves = VOCAB // tp, 8 // tp if name == "invariant" else 1
    for rows, forward, backward, largest in WORLD(tp, _budget, dtype, budget, name):
        assert rows * columns * dtype.itemsize == budget
        if name == "invariant":  # the same chunks at every TP size, so those of one rank
            rows //= tp
        logits = min(rows, 1024) * columns // leaves
        assert logits <= largest <= max(logits, BLOCK // 4, columns * HIDDEN)
        gradients = (1024 + columns) * HIDDEN * 4
        assert max(forward, backward) <= budget + 2 * gradients + 4 * BLOCK


def _values(budget):
    shard = shard_of(VOCAB)
    draw = torch.Generator().manual_seed(0)
    input = torch.randn(64, HIDDEN, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(shard.shard_size, HIDDEN, generator=draw, dtype=torch.float64).requires_grad_()
    value = linear_cross_entropy(input, weight, torch.arange(64), shard=shard, memory_budget=budget)
    return value.detach(), *torch.autograd.grad(value, [input, weight])


@pytest.mark.parametrize("budget", [1, 100_000])
def test_the_budget_changes_memory_and_no_value(budget):
    for mine, expected in zip(WORLD(2, _values, budget)[0], WORLD(2, _values, 1 << 30)[0], strict=True):
        assert torch.allclose(mine, expected, rtol=1e-12, atol=1e-14)


def _distribution(dtype):
    """Peak bytes by the number of rows; the first is for the exchanges to settle."""
    shard = shard_of(VOCAB)
    results = []
    for rows in (512, 512, 1024):
        target = torch.rand(rows, shard.shard_size, dtype=dtype)
        input = torch.randn(rows, HIDDEN, dtype=dtype).requires_grad_()
        weight = torch.randn(shard.shard_size, HIDDEN, dtype=dtype).requires_grad_()
        with Allocations(input, weight, target) as meter:
            linear_kl_div(input, weight, target, shard=shard, chunk_size=64).backward()
        results.append(meter.peak)
    return results[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_distribution_is_not_copied(dtype):
    for few, many in WORLD(2, _distribution, dtype):
        assert (many - few) / 512 <= 2 * HIDDEN * dtype.itemsize + 96, f"{(many - few) / 512:.0f} bytes a row"


def _of_logits(rows):
    """Peak bytes of forward and backward."""
    shard = shard_of(VOCAB)
    logits = torch.randn(rows, shard.shard_size).requires_grad_()
    target = torch.arange(rows) % VOCAB
    for _ in range(2):  # the exchange settles on the size it needs
        with Allocations(logits, target) as meter:
            loss = cross_entropy(logits, target, shard=shard)
    forward = meter.peak
    with Allocations(logits, target) as meter:
        loss.backward()
    return forward, meter.peak


@pytest.mark.parametrize("tp", [1, 2])
def test_cross_entropy_copies_no_logits_forward_and_makes_only_their_gradient_backward(tp):
    few_forward, few_backward = WORLD(tp, _of_logits, 1024)[0]
    many_forward, many_backward = WORLD(tp, _of_logits, 3072)[0]
    row_of_logits = 4 * VOCAB // tp
    forward, backward = (many_forward - few_forward) / 2048, (many_backward - few_backward) / 2048
    assert forward <= 160, f"{forward:.0f} bytes a row, its logits take {row_of_logits}"
    assert row_of_logits <= backward <= row_of_logits + 160, f"{backward:.0f} bytes a row"
    assert many_forward <= 6e6, "the working memory of the statistics does not depend on the number of rows"


def _run(rank, function, *args):
    return function(*args)


GROWING = Batch(_run, [(_rows_and_chunks, *case) for case in GROWTH])
WORLD = Batch(
    _run,
    [
        *[(_budget, *case) for case in BUDGETS],
        *[(_values, budget) for budget in (1, 100_000, 1 << 30)],
        *[(_distribution, dtype) for dtype in (torch.float32, torch.bfloat16)],
        *[(_of_logits, rows) for rows in (1024, 3072)],
    ],
)
