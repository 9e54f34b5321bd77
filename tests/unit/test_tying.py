"""Ties on one rank: what makes one Parameter, what keeps it one, and every way of losing it that users report."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vocab_parallel import (
    TyingError,
    VocabLayout,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    VocabShard,
    reference,
    tie_weights,
    verify_tied,
    vocab_parameters,
)

VOCAB, HIDDEN = 9, 4
PAIR = ("embedding.weight", "head.weight")


class Model(nn.Module):
    def __init__(self, *, head_first=False, bias=False, device=None, dtype=torch.float64, shard=None):
        super().__init__()
        self.shard = shard or VocabShard(VocabLayout(VOCAB, 1, multiple_of=4))
        parts = {
            "embedding": VocabParallelEmbedding(HIDDEN, shard=self.shard, device=device, dtype=dtype),
            "head": VocabParallelLMHead(HIDDEN, shard=self.shard, bias=bias, device=device, dtype=dtype),
        }
        for name in sorted(parts, reverse=head_first):
            setattr(self, name, parts[name])
        if not self.embedding.weight.is_meta:
            self.head.reset_parameters(seed=1)

    def forward(self, ids, target):
        return self.head.loss(self.embedding(ids), target)


def tied(**settings):
    model = Model(**settings)
    tie_weights(model.embedding, model.head)
    return model


def requires_both_names(error):
    assert all(name in str(error.value) for name in PAIR), str(error.value)


@pytest.mark.parametrize("head_first", [False, True])
def test_a_tie_is_one_parameter_counted_once(head_first):
    model = tied(head_first=head_first)
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == 1
    assert verify_tied(model) == [PAIR]
    optimizer = torch.optim.AdamW(model.parameters())
    assert verify_tied(model, optimizer) == [PAIR]
    ((name, (parameter, shard)),) = vocab_parameters(model).items()
    assert name == (PAIR[1] if head_first else PAIR[0])
    assert parameter is model.embedding.weight and shard is model.shard


def test_untied_parameters_are_each_listed_with_their_shard():
    model = Model(bias=True)
    model.other = nn.Linear(2, 2)
    listed = vocab_parameters(model)
    assert set(listed) == {"embedding.weight", "head.weight", "head.bias"}
    assert all(shard is model.shard for _, shard in listed.values())


def test_the_gradient_has_the_contributions_of_both_uses():
    model = tied()
    ids, target = torch.tensor([0, 3, 3, 8]), torch.tensor([3, 3, 8, -100])
    model(ids, target).backward()
    whole = model.embedding.weight.detach()[:VOCAB].clone().requires_grad_()
    reference.linear_cross_entropy(reference.embedding(ids, whole), whole, target).backward()
    assert torch.allclose(model.embedding.weight.grad[:VOCAB], whole.grad, rtol=1e-12, atol=1e-14)


def test_without_a_tie_there_is_nothing_to_verify():
    with pytest.raises(TyingError, match="tie_weights"):
        verify_tied(Model())


def replace_by_copy(model):
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())


def share_storage_only(model):
    model.head.weight = nn.Parameter(model.embedding.weight.detach())


def replace_embedding(model):
    model.embedding.weight = nn.Parameter(model.embedding.weight.detach().clone())


@pytest.mark.parametrize("untie", [replace_by_copy, share_storage_only, replace_embedding])
def test_values_or_storage_in_common_are_no_tie(untie):
    model = tied()
    untie(model)
    with pytest.raises(TyingError) as error:
        verify_tied(model)
    requires_both_names(error)
    tie_weights(model.embedding, model.head)
    assert verify_tied(model) == [PAIR]


def test_an_optimizer_built_before_the_tie_is_refused():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TyingError) as error:
        tie_weights(model.embedding, model.head, optimizer=optimizer)
    requires_both_names_of_functions = ("embedding.weight", "lm_head.weight")
    assert all(name in str(error.value) for name in requires_both_names_of_functions)
    assert model.head.weight is not model.embedding.weight, "a refused tie must change nothing"
    tie_weights(model.embedding, model.head)
    with pytest.raises(TyingError) as error:
        verify_tied(model, optimizer)
    requires_both_names(error)
    tie_weights(model.embedding, model.head, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_that_lacks_the_tied_parameter_is_refused():
    model = tied(bias=True)
    with pytest.raises(TyingError) as error:
        verify_tied(model, torch.optim.SGD([model.head.bias], lr=0.1))
    requires_both_names(error)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_an_optimizer_that_holds_the_tied_parameter_twice_is_refused():
    model = tied()
    with pytest.raises(TyingError) as error:
        verify_tied(model, torch.optim.SGD([model.embedding.weight, model.head.weight], lr=0.1))
    requires_both_names(error)


def test_to_empty_from_the_meta_device_loses_the_tie_and_is_caught():
    model = tied(device="meta")
    assert verify_tied(model) == [PAIR]
    model.to_empty(device="cpu")
    assert model.head.weight is not model.embedding.weight, "torch keeps ties now: this test is out of date"
    with pytest.raises(TyingError) as error:
        verify_tied(model)
    requires_both_names(error)
    tie_weights(model.embedding, model.head)
    assert verify_tied(model, torch.optim.SGD(model.parameters(), lr=0.1)) == [PAIR]


def test_changes_of_dtype_and_in_place_moves_keep_the_tie():
    model = tied()
    for change in (nn.Module.float, nn.Module.bfloat16, lambda m: m.to_empty(device="cpu")):
        change(model)
        assert verify_tied(model) == [PAIR]


def test_a_deep_copy_is_tied_in_itself_and_not_to_the_original():
    model = tied()
    twin = copy.deepcopy(model)
    assert verify_tied(twin) == [PAIR]
    assert twin.head.weight is twin.embedding.weight
    assert twin.head.weight is not model.head.weight
    state = {PAIR[0]: torch.ones_like(model.head.weight)}
    twin.load_state_dict(state, strict=False, assign=True)
    assert verify_tied(twin) == [PAIR]
    assert (twin.head.weight == 1).all() and not (model.head.weight == 1).any()
    assert verify_tied(model) == [PAIR]


LOADS = pytest.mark.parametrize("assign", [False, True])
ORDERS = pytest.mark.parametrize("head_first", [False, True])


@LOADS
@ORDERS
def test_a_load_keeps_the_tie(assign, head_first):
    model, source = tied(head_first=head_first), tied()
    with torch.no_grad():
        source.head.weight.normal_()
    model.load_state_dict({key: value.clone() for key, value in source.state_dict().items()}, assign=assign)
    assert verify_tied(model, torch.optim.SGD(model.parameters(), lr=0.1)) == [PAIR]
    assert torch.equal(model.head.weight, source.head.weight)


@LOADS
@ORDERS
@pytest.mark.parametrize("key", PAIR)
def test_a_load_of_one_of_the_two_keys_gives_both(assign, head_first, key):
    model = tied(head_first=head_first)
    table = torch.randn(model.shard.shard_size, HIDDEN, dtype=torch.float64)
    model.load_state_dict({key: table}, strict=False, assign=assign)
    assert verify_tied(model) == [PAIR]
    assert torch.equal(model.embedding.weight, table)


@LOADS
@ORDERS
def test_a_load_of_two_different_tensors_is_refused_and_names_both(assign, head_first):
    model = tied(head_first=head_first)
    state = {key: torch.full((model.shard.shard_size, HIDDEN), value).double() for value, key in enumerate(PAIR)}
    with pytest.raises(TyingError) as error:
        model.load_state_dict(state, assign=assign)
    requires_both_names(error)


@LOADS
def test_a_load_after_a_refused_or_partial_one_is_judged_by_itself(assign):
    model = tied()
    size = (model.shard.shard_size, HIDDEN)
    for value in (1.0, 2.0):
        model.load_state_dict({PAIR[0]: torch.full(size, value).double()}, strict=False, assign=assign)
    with pytest.raises(TyingError):
        model.load_state_dict({key: torch.randn(size, dtype=torch.float64) for key in PAIR}, assign=assign)
    table = torch.full(size, 3.0).double()
    model.load_state_dict({key: table.clone() for key in PAIR}, assign=assign)
    assert verify_tied(model) == [PAIR]
    assert torch.equal(model.head.weight, table)


def test_an_optimizer_step_after_a_load_moves_both():
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert verify_tied(model, optimizer) == [PAIR]
    before = model.head.weight.detach().clone()
    model(torch.tensor([1]), torch.tensor([2])).backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)
    assert model.head.weight is model.embedding.weight


def test_an_optimizer_that_outlived_an_assigning_load_is_caught():
    """The load made a new Parameter; the optimizer would go on updating the old one."""
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(TyingError) as error:
        verify_tied(model, optimizer)
    requires_both_names(error)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"device": "meta"}, "meta"),
        ({"shard": VocabShard(VocabLayout(VOCAB, 1, multiple_of=8))}, "padded to 16"),
    ],
)
def test_weights_that_cannot_be_one_are_refused(settings, what):
    model, other = Model(), Model(**settings)
    with pytest.raises(TyingError, match=what) as error:
        tie_weights(model.embedding, other.head)
    assert "embedding.weight" in str(error.value) and "head.weight" in str(error.value)


def test_tying_twice_is_tying_once():
    model = tied()
    tie_weights(model.embedding, model.head)
    assert verify_tied(model) == [PAIR]
    table = torch.randn(model.shard.shard_size, HIDDEN, dtype=torch.float64)
    model.load_state_dict({PAIR[1]: table}, strict=False)
    assert torch.equal(model.embedding.weight, table)
