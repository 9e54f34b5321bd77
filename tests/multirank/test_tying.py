"""A tied model on 1 to 4 ranks against the oracle: one gradient with both contributions, steps that keep the tie."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
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


WIDE = 6  # of hidden states, where the table has HIDDEN


def projections():
    draw = torch.Generator().manual_seed(6)
    shapes = {"inner": (WIDE, HIDDEN), "projection.weight": (HIDDEN, WIDE), "projection.bias": (HIDDEN,)}
    return {name: torch.randn(*shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}


def _project(rank, vocab, spread, how):
    """A tied model whose hidden states are wider than its table; with `spread` each rank has its own rows of them."""
    shard = shard_of(vocab, 1)
    given = projections()
    model = nn.Module()
    model.embedding = VocabParallelEmbedding(HIDDEN, shard=shard, sequence_parallel=spread, dtype=torch.float64)
    projection = nn.Linear(WIDE, HIDDEN, dtype=torch.float64)
    model.head = VocabParallelLMHead(HIDDEN, shard=shard, projection=projection, dtype=torch.float64)
    with torch.no_grad():
        model.embedding.weight.copy_(shard.slice(table()[:vocab]))
        projection.weight.copy_(given["projection.weight"])
        projection.bias.copy_(given["projection.bias"])
    tie_weights(model.embedding, model.head)
    ids, target = IDS.flatten() % vocab, TARGET.flatten() % vocab
    hidden = (model.embedding(ids) @ given["inner"].T).tanh()
    if how == "loss":
        loss = model.head.loss(hidden, target, sequence_parallel=spread, chunk_size=2)
    else:
        logits = model.head.logits(hidden, sequence_parallel=spread)[..., : shard.num_valid]
        loss = (logits * (shard.start + torch.arange(shard.num_valid))).sum()
    loss.backward()
    assert [name for name, _ in model.named_parameters()][0::2] == ["embedding.weight", "head.projection.bias"]
    verify_tied(model)
    return {
        "loss": loss.detach() if how == "loss" else None, "table": gather_vocab(shard, model.head.weight.grad),
        "projection.weight": projection.weight.grad, "projection.bias": projection.bias.grad,
    }  # fmt: skip


PROJECTED = Batch(_project, list(product([13, 9], [False, True], ["loss", "logits"])))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["loss", "logits"])
@pytest.mark.parametrize("spread", [False, True], ids=["replicated", "sequence_parallel"])
@pytest.mark.parametrize("vocab", [13, 9])
def test_a_projection_between_unequal_widths_has_its_whole_gradient_on_every_rank(tp, vocab, spread, how):
    weight = table()[:vocab].requires_grad_()
    given = {name: value.requires_grad_(name != "inner") for name, value in projections().items()}
    hidden = (reference.embedding(IDS.flatten() % vocab, weight) @ given["inner"].T).tanh()
    projected = hidden @ given["projection.weight"].T + given["projection.bias"]
    if how == "loss":
        loss = reference.linear_cross_entropy(projected, weight, TARGET.flatten() % vocab)
    else:
        loss = (reference.logits(projected, weight) * torch.arange(vocab)).sum()
    loss.backward()
    ranks = PROJECTED(tp, vocab, spread, how)
    expected = {name: given[name].grad for name in ("projection.weight", "projection.bias")} | {"table": weight.grad}
    for name, value in expected.items():
        require_equal(f"gradient of {name} on every rank", [rank[name] for rank in ranks])
        require_close(f"gradient of {name}", ranks[0][name], value, torch.float64)
    if how == "loss":
        require_close("loss", ranks[0]["loss"], loss.detach(), torch.float64)


TOKENS = [f"<{index}>" for index in range(VOCAB)]


def _three_uses(rank):
    """Source, target and output over one table, as in a translation model."""
    shard = shard_of(VOCAB, 4)
    model = nn.Module()
    model.source = VocabParallelEmbedding(HIDDEN, shard=shard, dtype=torch.float64)
    model.target = VocabParallelEmbedding(HIDDEN, shard=shard, dtype=torch.float64)
    model.head = VocabParallelLMHead(HIDDEN, shard=shard, dtype=torch.float64)
    with torch.no_grad():
        model.target.weight.copy_(shard.slice(table()))
    tie_weights(model.target, model.head, model.source, vocabularies=[TOKENS, TOKENS, TOKENS])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hidden = (model.source(IDS).sum(1, keepdim=True) + model.target(IDS)).tanh()
    loss = model.head.loss(hidden, TARGET)
    loss.backward()
    gradient = gather_vocab(shard, model.source.weight.grad).clone()
    optimizer.step()
    return loss.detach(), gradient, verify_tied(model, optimizer), len(list(model.parameters()))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_one_table_for_source_target_and_output_has_one_gradient_of_three_uses(tp):
    weight = table().requires_grad_()
    hidden = (reference.embedding(IDS, weight).sum(1, keepdim=True) + reference.embedding(IDS, weight)).tanh()
    loss = reference.linear_cross_entropy(hidden, weight, TARGET)
    loss.backward()
    for got, gradient, pairs, count in run_ranks(_three_uses, tp):
        require_close("loss", got, loss.detach(), torch.float64)
        require_close("gradient", gradient, weight.grad, torch.float64)
        assert pairs == [("target.weight", "head.weight"), ("target.weight", "source.weight")] and count == 1
