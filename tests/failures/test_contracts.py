"""Failures of what goes from one artifact to the next: conformance, vocabularies, migrations, ties."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.failures.lab import failure, whole_shard
from vocab_parallel import (
    CheckpointLayoutError,
    TyingError,
    VocabIdentity,
    VocabMap,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    linear_cross_entropy,
    migrate_model_,
    tie_weights,
    verify_tied,
)
from vocab_parallel.app import selftests
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint
from vocab_parallel.vocabulary import CopyOf, conformance_report, record_model

VOCAB, WIDTH = 6, 4


class Model(nn.Module):
    """An embedding, a trunk and a head."""

    def __init__(self, *, tie: bool, seed: int = 0) -> None:
        super().__init__()
        shard = whole_shard(VOCAB)
        self.embedding = VocabParallelEmbedding(WIDTH, shard=shard)
        self.head = VocabParallelLMHead(WIDTH, shard=shard)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if tie:
            tie_weights(self.embedding, self.head)


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """One step in which every id is an input and a target."""
    optimizer.zero_grad()
    ids = torch.arange(model.head.shard.vocab_size)
    model.head.loss(model.trunk(model.embedding(ids)), ids.roll(1)).backward()
    optimizer.step()


def rows_change_places(input, weight, target, **options):
    """A loss whose rows are swapped: the mean is right, the row losses are not."""
    value = linear_cross_entropy(input, weight, target, **options)
    return value.flip(0) if value.dim() else value


def gradient_doubled(input, weight, target, **options):
    """A loss with the right value and twice the gradient."""
    value = linear_cross_entropy(input, weight, target, **options)
    return value + (value - value.detach())


@failure(
    52,
    "A loss that passes because its mean is right",
    "shown",
    "`doctor` compares the loss of each row and every gradient with the oracle, so rows in other places and a wrong "
    "gradient under a right mean both fail.",
)
def test_a_right_mean_is_no_proof_of_a_loss(monkeypatch):
    job = SimpleNamespace(tp=1, device="cpu", shard=lambda vocab, multiple_of: whole_shard(vocab))
    tests = {name: (test, limit) for name, test, limit in selftests.SelfTests(job).all()}
    input, weight, target = torch.randn(7, 4), torch.randn(9, 4), torch.arange(7)
    right = linear_cross_entropy(input, weight, target, shard=whole_shard(9))
    caught = {rows_change_places: "linear_cross_entropy, none", gradient_doubled: "linear_cross_entropy, mean"}
    for broken, name in caught.items():
        assert torch.equal(broken(input, weight, target, shard=whole_shard(9)), right)
        test, limit = tests[name]
        assert test() <= limit
        monkeypatch.setattr(selftests, "linear_cross_entropy", broken)
        assert test() > 100 * limit, f"{broken.__name__} passes"
        monkeypatch.undo()


@failure(
    53,
    "Vocabularies compared by their size",
    "refused",
    "A checkpoint keeps the hash of its ordered table; a load compares it with the vocabulary in use, and names both "
    "and the command that moves rows.",
)
def test_rows_of_another_ordered_table_are_refused_though_every_shape_fits(tmp_path):
    tokens = ["<eos>", "a", "b", "c", "d", "e"]
    mine = VocabIdentity.of_tokens(tokens, special_ids={"eos": 0})
    other = VocabIdentity.of_tokens([*tokens[:3], "d", "c", "e"], special_ids={"eos": 0})
    saved, model = Model(tie=True), Model(tie=True, seed=1)
    folder = save_checkpoint(tmp_path, saved, None, 1, identity=mine)
    model.load_state_dict(saved.state_dict())  # shapes are all that this looks at
    assert torch.equal(model.head.weight, saved.head.weight) and mine.named(3) != other.named(3)
    model = Model(tie=True, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointLayoutError) as refused:
        load_checkpoint(folder, model, vocabulary_sha256=other.sha256)
    words = str(refused.value)
    assert mine.sha256[:16] in words and other.sha256[:16] in words and "vocab_parallel migrate" in words
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "something was loaded"
    load_checkpoint(folder, model, vocabulary_sha256=mine.sha256)
    assert torch.equal(model.head.weight, saved.head.weight)


@failure(
    54,
    "Rows appended in the belief that old probabilities stay",
    "shown",
    "A migration keeps the bits of old raw logits, and its report says how much probability the new rows take.",
)
def test_appended_rows_keep_logits_and_take_probability():
    model = Model(tie=True)
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
    before, record = model.head.logits(hidden).detach(), record_model(model)
    added = VocabMap.append(VOCAB, 2)
    migrate_model_(model, None, added, init=CopyOf({6: 1, 7: 2}))
    after = model.head.logits(hidden).detach()[:, : VOCAB + 2]
    assert torch.equal(after[:, :VOCAB], before)
    left = after.softmax(1)[:, :VOCAB] / before.softmax(1)
    taken = after.softmax(1)[:, VOCAB:].sum(1, keepdim=True)
    assert torch.allclose(left, (1 - taken).expand_as(left), atol=1e-6) and (taken > 0.01).all()
    report = conformance_report(record, model, None, added)
    assert report.passed and 0.0 < report.masses["embedding.weight"].mean < 1.0
    assert any("new rows take" in line for line in report.lines())


@failure(
    55,
    "Rows migrated without the optimizer's moments and master weights",
    "refused",
    "`migrate_model_` moves all row state by one map; after it, an optimizer that was left out, a fresh one and a "
    "state from before are errors at their first step or load.",
)
def test_moments_move_with_their_rows_or_nothing_steps():
    order = [3, 0, 1, 2, 5, 4]
    swap = VocabMap.permutation(order)

    def trained():
        model = Model(tie=False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        return model, optimizer

    model, optimizer = trained()
    moment = optimizer.state[model.head.weight]["exp_avg"].clone()
    old = optimizer.state_dict()
    migrate_model_(model, optimizer, swap)
    moved = optimizer.state[model.head.weight]["exp_avg"]
    assert torch.equal(moved[torch.tensor(order)], moment)
    assert not torch.equal(moved, moment), "in place, the moments would be those of other tokens"
    before = model.head.weight.detach().clone()
    with pytest.raises(CheckpointLayoutError, match="those of other tokens"):
        optimizer.load_state_dict(old)
    with pytest.raises(TyingError, match="a fresh one"):
        step(model, torch.optim.Adam(model.parameters(), lr=0.1))
    assert torch.equal(model.head.weight, before)
    step(model, optimizer)

    model, optimizer = trained()
    migrate_model_(model, None, swap)
    with pytest.raises(TyingError, match="a migration has replaced"):
        step(model, optimizer)


@failure(
    56,
    "A tie restored as two equal weights",
    "refused",
    'A tied checkpoint loads into a tied model only, unless `tie="untie"` says otherwise, and stays one Parameter '
    "with one set of moments; `verify_tied` finds two, however equal.",
)
def test_a_tie_comes_back_as_one_parameter_with_one_owner(tmp_path):
    saved = Model(tie=True)
    optimizer = torch.optim.Adam(saved.parameters(), lr=0.1)
    step(saved, optimizer)
    folder = save_checkpoint(tmp_path, saved, optimizer, 1)

    copies = Model(tie=False)
    copies.load_state_dict(saved.state_dict())
    assert torch.equal(copies.embedding.weight, copies.head.weight)
    step(copies, torch.optim.Adam(copies.parameters(), lr=0.1))
    assert not torch.equal(copies.embedding.weight, copies.head.weight), "equal values part at the first step"
    with pytest.raises(TyingError, match="no tied head"):
        verify_tied(copies)
    with pytest.raises(CheckpointLayoutError, match="was saved tied"):
        load_checkpoint(folder, copies)

    tied = Model(tie=True, seed=1)
    its = torch.optim.Adam(tied.parameters(), lr=0.1)
    load_checkpoint(folder, tied, its)
    assert tied.head.weight is tied.embedding.weight
    assert verify_tied(tied, its) == [("embedding.weight", "head.weight")]
    for model, one in ((saved, optimizer), (tied, its)):
        step(model, one)
    assert torch.equal(tied.head.weight, saved.head.weight)
