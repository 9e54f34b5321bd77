"""A tied model on 1 to 4 ranks against the oracle: one gradient with both contributions, steps that keep the tie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.multirank.sharded import shard_of
from tests.ranks import run_ranks
from tests.tolerances import require_close, require_equal
from vocab_parallel import (
    TyingError,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    reference,
    tie_weights,
    verify_tied,
)
from vocab_parallel.collectives import gather_vocab

VOCAB, HIDDEN, STEPS = 13, 4, 3
IDS = torch.tensor([[0, 3, 3], [12, 7, 0]])
TARGET = torch.tensor([[3, 3, 12], [7, 0, -100]])


def table():
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _train(rank, spread):
    """Plain SGD on a model of an embedding and a head; with `spread` both work on sequence-parallel rows."""
    shard = shard_of(VOCAB, 4)
    model = nn.Module()
    model.embedding = VocabParallelEmbedding(HIDDEN, shard=shard, sequence_parallel=spread, dtype=torch.float64)
    model.head = VocabParallelLMHead(HIDDEN, shard=shard, dtype=torch.float64)
    with torch.no_grad():
        model.embedding.weight.copy_(shard.slice(table()))
    tie_weights(model.embedding, model.head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        hidden = model.embedding(IDS.flatten()).tanh()
        loss = model.head.loss(hidden, TARGET.flatten(), sequence_parallel=spread, chunk_size=2)
        loss.backward()
        results += [loss.detach(), gather_vocab(shard, model.embedding.weight.grad)]
        optimizer.step()
        verify_tied(model, optimizer)
    return [*results, gather_vocab(shard, model.head.weight)]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("spread", [False, True], ids=["replicated", "sequence_parallel"])
def test_a_tied_model_trains_as_on_one_rank(tp, spread):
    weight = table().requires_grad_()
    expected = []
    for _ in range(STEPS):
        hidden = reference.embedding(IDS.flatten(), weight).tanh()
        loss = reference.linear_cross_entropy(hidden, weight, TARGET.flatten())
        (gradient,) = torch.autograd.grad(loss, weight)
        expected += [loss.detach(), gradient]
        weight = (weight - 0.5 * gradient).detach().requires_grad_()
    ranks = run_ranks(_train, tp, spread)
    for index, value in enumerate([*expected, weight.detach()]):
        step, what = divmod(index, 2)
        name = f"{['loss', 'gradient'][what]} of step {step}" if step < STEPS else "weight after training"
        require_equal(f"{name} on every rank", [result[index] for result in ranks])
        require_close(name, ranks[0][index], value, torch.float64)


def _other_layout(rank):
    embedding = VocabParallelEmbedding(HIDDEN, shard=shard_of(VOCAB, 4))
    head = VocabParallelLMHead(HIDDEN, shard=shard_of(VOCAB - 1, 4))
    try:
        tie_weights(embedding, head)
    except TyingError as error:
        return str(error)
    return None


def test_a_head_over_another_vocabulary_cannot_be_tied():
    for message in run_ranks(_other_layout, 2):
        assert message and "V=13" in message and "V=12" in message
