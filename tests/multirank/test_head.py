"""The sharded head: logits and their backward, row selection, and a loss that is `linear_cross_entropy`."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.multirank.sharded import SPREADS, TP, shard_of
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import require_close, require_equal
from vocab_parallel import VocabParallelLMHead, linear_cross_entropy, reference
from vocab_parallel.collectives import gather_vocab

VOCAB, HIDDEN = 13, 4
TARGET = torch.tensor([0, 12, -100, 5, 6, 7])


def tensors(leading):
    draw = torch.Generator().manual_seed(21)
    return [torch.randn(*shape, generator=draw, dtype=torch.float64)
            for shape in ((*leading, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), (*leading, VOCAB))]  # fmt: skip


def head_of(shard, weight, bias):
    head = VocabParallelLMHead(HIDDEN, shard=shard, bias=bias is not None, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(shard.slice(weight))
        if bias is not None:
            head.bias.copy_(shard.slice(bias))
    return head


SELECTIONS = {
    "all": ((5,), None),
    "batch": ((2, 3), None),
    "last": ((2, 3), -1),
    "slice": ((2, 3), slice(1, None)),
    "index": ((5,), torch.tensor([4, 0, 0])),
    "no rows": ((0,), None),
    "none selected": ((2, 3), torch.tensor([], dtype=torch.int64)),
}


def _logits(rank, name, bias):
    shard = shard_of(VOCAB, 4)
    leading, rows = SELECTIONS[name]
    input, weight, table_bias, upstream = tensors(leading)
    head = head_of(shard, weight, table_bias if bias else None)
    mine = input.clone().requires_grad_()
    logits = head.logits(mine, rows)
    assert logits.shape[-1] == shard.shard_size
    if rows is None:
        require_equal("forward is logits", [logits, head(mine)])
    chosen = upstream if rows is None else upstream[..., rows, :]
    real = logits[..., : shard.num_valid]
    real.backward(chosen[..., shard.start : shard.stop])
    parameters = [gather_vocab(shard, parameter.grad) for parameter in head.parameters()]
    return [gather_vocab(shard, logits, dim=-1), mine.grad, *parameters]


LOGITS = Batch(_logits, [(name, bias) for name, bias in product(SELECTIONS, [False, True])])


@TP
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SELECTIONS)
def test_logits_and_the_full_gradient_of_the_input_on_every_rank(tp, name, bias):
    leading, rows = SELECTIONS[name]
    input, weight, table_bias, upstream = tensors(leading)
    wholes = [tensor.requires_grad_() for tensor in ([input, weight, table_bias] if bias else [input, weight])]
    expected = reference.logits(*wholes)
    if rows is not None:
        expected, upstream = expected[..., rows, :], upstream[..., rows, :]
    gradients = torch.autograd.grad(expected, wholes, upstream)
    results = LOGITS(tp, name, bias)
    for index, value in enumerate([expected.detach(), *gradients]):
        what = ["logits", "d_input", "d_weight", "d_bias"][index]
        require_equal(f"{what} on every rank", [result[index] for result in results])
        require_close(what, results[0][index], value, torch.float64)


def _sequence_parallel_logits(rank, spread, rows):
    shard = shard_of(VOCAB, 4)
    input, weight, _, upstream = tensors((6, 2))
    counts = SPREADS[spread](6, shard.tp_size)
    mine = input.split(counts)[rank].clone().requires_grad_()
    head = head_of(shard, weight, None)
    logits = head.logits(mine, rows, sequence_parallel=True)
    chosen = upstream if rows is None else upstream[..., rows, :]
    logits[..., : shard.num_valid].backward(chosen[..., shard.start : shard.stop])
    return gather_vocab(shard, logits, dim=-1), gather_vocab(shard, head.weight.grad), mine.grad


SPREAD_LOGITS = Batch(_sequence_parallel_logits, list(product(SPREADS, [None, -1])))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("rows", [None, -1])
def test_sequence_parallel_logits_cover_all_rows_and_give_each_rank_its_gradient(tp, spread, rows):
    input, weight, _, upstream = tensors((6, 2))
    wholes = [input.requires_grad_(), weight.requires_grad_()]
    expected = reference.logits(*wholes)
    if rows is not None:
        expected, upstream = expected[..., rows, :], upstream[..., rows, :]
    d_input, d_weight = torch.autograd.grad(expected, wholes, upstream)
    results = SPREAD_LOGITS(tp, spread, rows)
    for rank, (logits, gradient, _) in enumerate(results):
        require_close(f"logits on rank {rank}", logits, expected.detach(), torch.float64)
        require_close(f"d_weight on rank {rank}", gradient, d_weight, torch.float64)
    require_close("d_input", torch.cat([mine for _, _, mine in results]), d_input, torch.float64)


def _loss(rank, spread, options):
    shard = shard_of(VOCAB, 4)
    input, weight, bias, _ = tensors((6,))
    rows = SPREADS["even"](6, shard.tp_size)
    start = sum(rows[:rank]) if spread else 0
    mine = input[start : start + rows[rank]] if spread else input
    head = head_of(shard, weight, bias)
    copies = [mine.clone(), head.weight.detach().clone(), head.bias.detach().clone()]
    for tensor in copies:
        tensor.requires_grad_()
    mine = mine.clone().requires_grad_()
    ours = head.loss(mine, TARGET, sequence_parallel=spread, chunk_size=2, **options)
    plain = linear_cross_entropy(
        copies[0], copies[1], TARGET, shard=shard, linear_bias=copies[2],
        sequence_parallel=spread, chunk_size=2, **options,
    )  # fmt: skip
    require_equal("loss", [ours, plain])
    ours.sum().backward()
    plain.sum().backward()
    for name, left, right in zip(["input", "weight", "bias"], [mine, head.weight, head.bias], copies, strict=True):
        require_equal(f"gradient of {name}", [left.grad, right.grad])
    return ours.detach()


@pytest.mark.parametrize("spread", [False, True], ids=["replicated", "sequence_parallel"])
@pytest.mark.parametrize("options", [{}, {"reduction": "none", "label_smoothing": 0.1}], ids=["mean", "none"])
def test_the_heads_loss_is_linear_cross_entropy_with_its_weights(spread, options):
    input, weight, bias, _ = tensors((6,))
    expected = reference.linear_cross_entropy(input, weight, TARGET, bias=bias, **options)
    for loss in run_ranks(_loss, 2, spread, options):
        require_close("loss", loss, expected, torch.float64)


def _initial(rank, multiple_of):
    shard = shard_of(VOCAB, multiple_of)
    head = VocabParallelLMHead(HIDDEN, shard=shard, bias=True)
    assert (head.weight[shard.num_valid :] == 0).all()
    assert (head.bias == 0).all()
    return gather_vocab(shard, head.weight)


def test_initial_rows_are_the_same_bits_at_every_number_of_ranks():
    one = run_ranks(_initial, 1, 1)[0]
    require_equal("rows", [one, *run_ranks(_initial, 2, 4), *run_ranks(_initial, 3, 1)])
