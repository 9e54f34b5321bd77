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


class Wrapped:
    """What Megatron-core's data-parallel wrapper does to a parameter, without its collectives."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.accumulators = []  # or they would be made anew, without hooks
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros(parameter.shape)
            parameter.grad_added_to_main_grad = False
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(lambda *_, parameter=parameter: self.take(parameter))
            self.accumulators.append(accumulator)

    def take(self, parameter):
        assert parameter.grad is not None, "the wrapper needs a gradient to know that it is ready"
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def zero_grad_buffer(self):
        for parameter in self.parameters:
            parameter.grad_added_to_main_grad = False
            parameter.main_grad.zero_()


BATCHES = [
    (torch.tensor([0, 3, 3, 8]), torch.tensor([3, 3, 8, -100])),
    (torch.tensor([7, 7, 1, 0]), torch.tensor([0, 8, 2, 5])),
]


def both_contributions(model):
    """The oracle's gradient of the batches: of the lookup, of the projection, and their sum, in float64."""
    weight = model.embedding.weight.detach()[:VOCAB].double()
    lookup, projection = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    for ids, target in BATCHES:
        reference.linear_cross_entropy(reference.embedding(ids, lookup), projection, target).backward()
    return lookup.grad, projection.grad, lookup.grad + projection.grad


def untouched(model):
    return model


def deep_copied(model):
    return copy.deepcopy(model)


def loaded(model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def tied_again(model):
    weight = model.embedding.weight.detach().clone()
    model.to_empty(device="cpu")
    tie_weights(model.embedding, model.head)
    model.embedding.weight.data.copy_(weight)
    return model


@pytest.mark.parametrize("change", [untouched, deep_copied, loaded, tied_again])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_gets_both_contributions_of_a_tied_parameter(change, dtype):
    model = tied(dtype=dtype)
    model.head.reset_parameters(std=1.0)
    model = change(model)
    assert verify_tied(model) == [PAIR]
    wrapper = Wrapped(model)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for _ in range(2):  # steps, each of all batches
        wrapper.zero_grad_buffer()
        for ids, target in BATCHES:
            model(ids, target).backward()
        weight = model.embedding.weight
        assert weight.grad is None and weight.grad_added_to_main_grad
        lookup, projection, total = both_contributions(model)
        assert (weight.main_grad[:VOCAB] - total).norm() <= tolerance * total.norm()
        assert bool((weight.main_grad[VOCAB:] == 0).all())
        for one in (lookup, projection):
            assert (one - total).norm() > 0.2 * total.norm(), "one use alone would do"


def test_without_the_mark_the_lookups_gradient_would_be_lost():
    """What the mark is for: if this fails, the emulation above has stopped to show anything."""
    model = tied(dtype=torch.float32)
    model.embedding.weight.zero_out_wgrad = False
    Wrapped(model)
    for ids, target in BATCHES:
        model(ids, target).backward()
    _, projection, total = both_contributions(model)
    got = model.embedding.weight.main_grad[:VOCAB].double()
    assert torch.allclose(got, projection, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got, total, rtol=1e-3, atol=1e-3)


def test_an_untied_head_needs_no_mark_and_a_lookup_uses_grad():
    model = Model(dtype=torch.float32)
    assert not hasattr(model.head.weight, "zero_out_wgrad")
    Wrapped(model)
    for ids, target in BATCHES:
        model(ids, target).backward()
    head, lookup = model.head.weight, model.embedding.weight
    assert head.grad_added_to_main_grad and not lookup.grad_added_to_main_grad
    whole = [tensor.detach()[:VOCAB].double().requires_grad_() for tensor in (lookup, head)]
    for ids, target in BATCHES:
        reference.linear_cross_entropy(reference.embedding(ids, whole[0]), whole[1], target).backward()
    for parameter, expected in zip((lookup, head), whole, strict=True):
        assert torch.allclose(parameter.main_grad[:VOCAB].double(), expected.grad, rtol=1e-5, atol=1e-6)


def test_logits_of_a_tied_head_add_their_gradient_too():
    """A product outside the loss gives an ordinary gradient, in a step whose loss has added to main_grad already."""
    model = tied(dtype=torch.float32)
    Wrapped(model)
    ids, target = BATCHES[0]
    model(ids, target).backward()
    before = model.head.weight.main_grad.clone()
    model.head(torch.ones(1, HIDDEN)).sum().backward()
    assert torch.allclose(model.head.weight.main_grad - before, torch.ones_like(before))


def two_of_one_tensor(model):
    model.head.weight = nn.Parameter(model.embedding.weight.detach())


def overlapping_rows(model):
    rows = model.shard.shard_size
    whole = torch.zeros(rows + 2, HIDDEN, dtype=torch.float64)
    model.embedding.weight, model.head.weight = nn.Parameter(whole[:rows]), nn.Parameter(whole[2:])


@pytest.mark.parametrize("share", [two_of_one_tensor, overlapping_rows])
def test_untied_parameters_that_share_storage_are_refused(share):
    model = Model()
    assert verify_tied(model, required=False) == []
    share(model)
    with pytest.raises(TyingError, match="share storage") as error:
        verify_tied(model, required=False)
    requires_both_names(error)


def test_untied_parameters_side_by_side_in_one_buffer_are_fine():
    """So do ZeRO and Megatron's wrapper lay them out."""
    model = Model()
    flat = torch.zeros(2, model.shard.shard_size, HIDDEN, dtype=torch.float64)
    model.embedding.weight.data, model.head.weight.data = flat[0], flat[1]
    assert verify_tied(model, required=False) == []


@LOADS
def test_one_tensor_under_two_keys_loads_into_two_parameters_of_an_untied_model(assign):
    model = Model()
    table = torch.randn(model.shard.shard_size, HIDDEN, dtype=torch.float64)
    model.load_state_dict({PAIR[0]: table, PAIR[1]: table.view_as(table)}, assign=assign)
    assert verify_tied(model, required=False) == []
    before = table.clone()
    with torch.no_grad():
        model.head.weight += 1.0
    assert torch.equal(model.embedding.weight, before) and torch.equal(model.head.weight, before + 1.0)


def test_a_tied_head_that_is_assigned_a_tensor_keeps_that_tensor():
    """The copy is for the untied only: a tie needs no second table."""
    model = tied()
    table = torch.randn(model.shard.shard_size, HIDDEN, dtype=torch.float64)
    model.load_state_dict({key: table for key in PAIR}, assign=True)
    assert model.head.weight.data_ptr() == table.data_ptr()


def test_a_tied_parameter_that_no_name_leads_to_is_refused():
    model = tied()
    weight = model.embedding.weight
    for module in (model.embedding, model.head):
        del module.weight
        object.__setattr__(module, "weight", weight)
    with pytest.raises(TyingError, match="0 times among the model's named parameters") as error:
        verify_tied(model)
    requires_both_names(error)


def test_a_tied_parameter_marked_as_a_copy_of_another_stage_is_refused():
    model = tied()
    model.embedding.weight.shared = True
    with pytest.raises(TyingError, match="shared") as error:
        verify_tied(model)
    requires_both_names(error)


def test_two_partition_ids_are_named_and_one_id_for_two_parameters_is_refused():
    model = tied()
    model.other = nn.Linear(2, 2)
    model.embedding.weight.ds_id, model.other.weight.ds_id = 4, 5
    assert verify_tied(model) == [PAIR]
    model.other.weight.ds_id = 4
    with pytest.raises(TyingError, match=r"other\.weight") as error:
        verify_tied(model)
    requires_both_names(error)
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    model.head.weight.ds_id = 7
    with pytest.raises(TyingError, match="4 and 7") as error:
        verify_tied(model)
    requires_both_names(error)


def test_optimizer_state_of_a_parameter_that_it_no_longer_holds_is_refused():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1]), torch.tensor([2])).backward()
    optimizer.step()
    tie_weights(model.embedding, model.head)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    assert len(optimizer.state) == 2
    with pytest.raises(TyingError, match="state of 1 Parameters") as error:
        verify_tied(model, optimizer)
    requires_both_names(error)
    optimizer.state = {p: state for p, state in optimizer.state.items() if p is model.embedding.weight}
    assert verify_tied(model, optimizer) == [PAIR]


def test_anything_with_param_groups_is_an_optimizer():
    model = tied()

    class Groups:
        param_groups = [{"params": list(model.parameters())}]  # noqa: RUF012

    assert verify_tied(model, Groups()) == [PAIR]
    Groups.param_groups.append({"params": [model.head.weight]})
    with pytest.raises(TyingError, match="2 times") as error:
        verify_tied(model, Groups())
    requires_both_names(error)


def three():
    """Two embeddings and a head over one layout."""
    model = Model()
    model.source = VocabParallelEmbedding(HIDDEN, shard=model.shard, dtype=torch.float64)
    return model


TOKENS = [f"<{index}>" for index in range(VOCAB)]
IDS_OF = {token: index for index, token in enumerate(TOKENS)}


@pytest.mark.parametrize(
    "vocabularies", [[TOKENS, tuple(TOKENS), IDS_OF], ["sha256:1", "sha256:1", "sha256:1"]], ids=["tokens", "hash"]
)
def test_one_table_for_three_uses_of_one_ordered_vocabulary(vocabularies):
    model = three()
    tie_weights(model.embedding, model.head, model.source, vocabularies=vocabularies)
    assert model.source.weight is model.head.weight is model.embedding.weight
    optimizer = torch.optim.AdamW(model.parameters())
    pairs = [PAIR, ("embedding.weight", "source.weight")]
    assert verify_tied(model, optimizer) == pairs
    assert verify_tied(copy.deepcopy(model)) == pairs
    table = torch.randn(model.shard.shard_size, HIDDEN, dtype=torch.float64)
    model.load_state_dict({"source.weight": table}, strict=False, assign=True)
    assert verify_tied(model) == pairs
    assert torch.equal(model.head.weight, table)
    model.source.weight = nn.Parameter(table.clone())
    with pytest.raises(TyingError, match=r"source\.weight"):
        verify_tied(model)


SWAPPED = [*TOKENS[:4], TOKENS[5], TOKENS[4], *TOKENS[6:]]


@pytest.mark.parametrize(
    ("vocabularies", "words"),
    [
        (None, ["none", "Equal sizes"]),
        ([TOKENS, TOKENS], ["3 entries", "got 2"]),
        ([TOKENS, TOKENS, SWAPPED], ["also[0].weight", "id 4", "<4>", "<5>"]),
        ([TOKENS, SWAPPED, TOKENS], ["lm_head.weight", "id 4"]),
        ([IDS_OF, IDS_OF, {token: index for index, token in enumerate(SWAPPED)}], ["also[0].weight", "id 4"]),
        ([TOKENS, TOKENS, TOKENS[:-1]], ["also[0].weight", "8 tokens"]),
        ([TOKENS, TOKENS, {**IDS_OF, "<0>": 8}], ["also[0].weight", "one each"]),
        (["sha256:1", "sha256:1", "sha256:2"], ["also[0].weight", "sha256:2"]),
        (["sha256:1", TOKENS, TOKENS], ["hash"]),
    ],
    ids=["none", "too few", "swapped", "head swapped", "mapping", "short", "no table", "hash", "mixed"],
)  # fmt: skip
def test_uses_that_may_mean_other_tokens_are_refused_and_nothing_is_tied(vocabularies, words):
    model = three()
    with pytest.raises(TyingError) as error:
        tie_weights(model.embedding, model.head, model.source, vocabularies=vocabularies)
    for word in ["embedding.weight", "lm_head.weight" if vocabularies is None else "weight", *words]:
        assert word in str(error.value), str(error.value)
    assert len({id(module.weight) for module in (model.embedding, model.head, model.source)}) == 3
    assert verify_tied(model, required=False) == []


def test_two_uses_are_checked_too_where_their_vocabularies_are_given():
    model = Model()
    with pytest.raises(TyingError, match="id 4"):
        tie_weights(model.embedding, model.head, vocabularies=[TOKENS, SWAPPED])
    tie_weights(model.embedding, model.head, vocabularies=[TOKENS, TOKENS])
    assert verify_tied(model) == [PAIR]


def test_an_optimizer_that_holds_a_further_embedding_is_refused():
    model = three()
    optimizer = torch.optim.SGD([model.source.weight], lr=0.1)
    with pytest.raises(TyingError, match=r"also\[0\]\.weight"):
        tie_weights(model.embedding, model.head, model.source, vocabularies=[TOKENS] * 3, optimizer=optimizer)
    assert model.head.weight is not model.embedding.weight


def test_widths_that_differ_are_refused_with_the_projection_named():
    model = Model()
    wide = VocabParallelLMHead(HIDDEN + 2, shard=model.shard, dtype=torch.float64)
    with pytest.raises(TyingError, match="projection=") as error:
        tie_weights(model.embedding, wide)
    assert "embedding.weight" in str(error.value) and "lm_head.weight" in str(error.value)
