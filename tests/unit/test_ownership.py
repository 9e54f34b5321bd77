"""An optimizer's state belongs to one vocabulary: another one's is refused, and nothing else is."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.tolerances import bits
from vocab_parallel import (
    CheckpointLayoutError,
    LayoutError,
    TyingError,
    UngatheredWeightError,
    VocabLayout,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    VocabShard,
    tie_weights,
    verify_tied,
)
from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration import migrate_model_
from vocab_parallel.vocabulary.ownership import verify_ownership
from vocab_parallel.vocabulary.row_states import is_known_other, is_master_weight, is_row_state

VOCAB, WIDTH = 6, 4
REVERSED = VocabMap.permutation(list(range(VOCAB - 1, -1, -1)))


class Model(nn.Module):
    def __init__(self, tied: bool = False, vocab: int = VOCAB, multiple_of: int = 1) -> None:
        super().__init__()
        shard = VocabShard(VocabLayout(vocab, 1, multiple_of=multiple_of))
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.embedding = VocabParallelEmbedding(WIDTH, shard=shard)
        self.head = VocabParallelLMHead(WIDTH, shard=shard, bias=True)
        if tied:
            tie_weights(self.embedding, self.head)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    rest = [p for name, p in model.named_parameters() if not name.startswith("trunk")]
    return torch.optim.AdamW([{"params": list(model.trunk.parameters())}, {"params": rest}], lr=0.1)


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ids = torch.arange(model.embedding.shard.vocab_size)
    model.head.loss(model.trunk(model.embedding(ids)), ids).backward()
    optimizer.step()


def trained(tied: bool = False, **options: Any) -> tuple[Model, torch.optim.AdamW]:
    model = Model(tied, **options)
    optimizer = adamw(model)
    step(model, optimizer)
    return model, optimizer


def saved(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_fresh_optimizer_over_the_old_state_is_refused_at_its_first_step_with_nothing_changed():
    model, optimizer = trained(tied=True)
    old = saved(optimizer.state_dict())
    migrate_model_(model, optimizer, REVERSED)
    before = bits(model.embedding.weight).clone()
    for state in (old, None):
        fresh = adamw(model)
        if state is not None:
            fresh.load_state_dict(state)  # no hook of ours is on it
        with pytest.raises(TyingError, match="a fresh one, or has loaded a state from before the migration"):
            step(model, fresh)
        assert torch.equal(bits(model.embedding.weight), before)
    step(model, optimizer)
    again = adamw(model)
    again.load_state_dict(saved(optimizer.state_dict()))
    step(model, again)
    assert not torch.equal(bits(model.embedding.weight), before)
    migrate_model_(model, again, REVERSED)
    step(model, again)


def test_steps_of_other_models_and_of_one_migrated_without_an_optimizer_are_not_guarded():
    model, optimizer = trained()
    migrate_model_(model, optimizer, REVERSED)
    kept = weakref.ref(model.embedding.weight)
    trained()
    del model, optimizer
    gc.collect()
    assert kept() is None
    model, _ = trained()
    migrate_model_(model, None, REVERSED)
    step(model, adamw(model))


@pytest.mark.parametrize("tied", [False, True])
def test_a_migrated_optimizer_refuses_a_state_from_before_even_of_equal_size(tied: bool):
    model, optimizer = trained(tied)
    old = saved(optimizer.state_dict())
    migrate_model_(model, optimizer, REVERSED)
    before = saved(optimizer.state_dict())
    with pytest.raises(CheckpointLayoutError, match=r"is of before any migration.*python -m vocab_parallel migrate"):
        optimizer.load_state_dict(old)
    after = optimizer.state_dict()
    assert str(after) == str(before), "a refused load has changed the optimizer"
    verify_tied(model, optimizer, required=tied)


@pytest.mark.parametrize("tied", [False, True])
def test_a_fresh_optimizer_over_a_migrated_model_is_found(tied: bool):
    model, optimizer = trained(tied)
    migrate_model_(model, optimizer, REVERSED)
    for verify in (verify_ownership, lambda m, o: verify_tied(m, o, required=tied)):
        with pytest.raises(TyingError, match="a fresh one"):
            verify(model, adamw(model))


def test_a_fresh_optimizer_that_loads_the_old_state_is_found_and_one_with_the_new_state_is_not():
    model, optimizer = trained()
    old = saved(optimizer.state_dict())
    migrate_model_(model, optimizer, REVERSED)
    new = saved(optimizer.state_dict())
    fresh = adamw(model)
    fresh.load_state_dict(old)  # nobody is there to refuse it yet
    with pytest.raises(TyingError, match="a state from before the migration"):
        verify_ownership(model, fresh)
    fresh.load_state_dict(new)
    verify_ownership(model, fresh)
    step(model, fresh)
    optimizer.load_state_dict(new)
    verify_ownership(model, optimizer)


def test_a_state_of_an_earlier_migration_is_refused():
    model, optimizer = trained()
    migrate_model_(model, optimizer, REVERSED)
    once = saved(optimizer.state_dict())
    migrate_model_(model, optimizer, REVERSED)
    with pytest.raises(CheckpointLayoutError, match="rows are those of other tokens"):
        optimizer.load_state_dict(once)
    fresh = adamw(model)
    fresh.load_state_dict(once)
    with pytest.raises(CheckpointLayoutError, match="this optimizer's state of sha256"):
        verify_ownership(model, fresh)


def test_the_mark_is_the_hash_of_the_ordered_table_where_the_map_knows_it():
    vocab_map = VocabMap(REVERSED.old_to_new, REVERSED.new_to_old, {}, "a" * 64, "b" * 64)
    model, optimizer = trained()
    report = migrate_model_(model, optimizer, vocab_map)
    assert report.sha256 == optimizer.param_groups[1]["vocabulary_sha256"] == "b" * 64
    assert "vocabulary_sha256" not in optimizer.param_groups[0], "the trunk's group is not of the vocabulary"
    assert saved(optimizer.state_dict())["param_groups"][1]["vocabulary_sha256"] == "b" * 64


def test_a_state_of_another_padding_is_refused():
    model, optimizer = trained()
    old = saved(optimizer.state_dict())
    migrate_model_(model, optimizer, VocabMap.append(VOCAB, 0), layout=VocabLayout(VOCAB, 1, multiple_of=8))
    assert len(model.embedding.weight) == 8
    old["param_groups"][1]["vocabulary_sha256"] = optimizer.param_groups[1]["vocabulary_sha256"]
    with pytest.raises(CheckpointLayoutError, match=r"\[6, 4\] for a Parameter of shape \[8, 4\]"):
        optimizer.load_state_dict(old)


@pytest.mark.parametrize("tied", [False, True])
def test_models_and_optimizers_that_were_never_migrated_raise_no_alarm(tied: bool):
    model, optimizer = trained(tied)
    state = saved(optimizer.state_dict())
    for one in (optimizer, adamw(model), torch.optim.SGD(model.trunk.parameters(), lr=1.0)):
        verify_ownership(model, one)
    fresh = adamw(model)
    fresh.load_state_dict(state)
    verify_ownership(model, fresh)
    optimizer.load_state_dict(state)
    verify_tied(model, fresh, required=tied)


def test_a_state_from_after_a_migration_loads_into_a_new_process():
    model, optimizer = trained()
    migrate_model_(model, optimizer, REVERSED)
    state, weights = saved(optimizer.state_dict()), saved(model.state_dict())
    resumed = Model()
    resumed.load_state_dict(weights)
    its = adamw(resumed)
    its.load_state_dict(state)
    verify_ownership(resumed, its)
    step(resumed, its)
    step(model, optimizer)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), resumed.parameters(), strict=True))


def test_a_model_migrated_without_state_asks_for_none():
    for optimizer_of in (lambda model: None, adamw):
        model = Model()
        migrate_model_(model, optimizer_of(model), VocabMap.append(VOCAB, 3))
        verify_ownership(model, adamw(model))


def test_an_optimizer_that_was_not_migrated_with_the_model_is_found():
    model, optimizer = trained()
    migrate_model_(model, None, REVERSED)
    with pytest.raises(TyingError, match="that a migration has replaced"):
        verify_ownership(model, optimizer)


def test_a_copy_of_a_migrated_model_remembers():
    model, optimizer = trained(True)
    migrate_model_(model, optimizer, REVERSED)
    twin = copy.deepcopy(model)
    with pytest.raises(TyingError, match="a fresh one"):
        verify_tied(twin, adamw(twin))


def test_state_of_parameters_that_are_gone_is_found():
    model, optimizer = trained()
    stale = model.embedding.weight
    migrate_model_(model, optimizer, REVERSED)
    optimizer.state[stale] = {"exp_avg": torch.zeros(VOCAB, WIDTH)}
    with pytest.raises(TyingError, match="neither in its groups"):
        verify_ownership(model, optimizer)


def test_a_state_with_other_rows_than_its_parameter_is_found():
    model, optimizer = trained()
    migrate_model_(model, optimizer, REVERSED)
    optimizer.state[model.embedding.weight]["exp_avg"] = torch.zeros(VOCAB + 1, WIDTH)
    with pytest.raises(CheckpointLayoutError, match=r"exp_avg of embedding.weight has shape \[7, 4\]"):
        verify_ownership(model, optimizer)


def test_a_migrated_model_is_not_migrated_again_with_a_fresh_optimizer():
    model, optimizer = trained()
    migrate_model_(model, optimizer, REVERSED)
    with pytest.raises(TyingError, match="a fresh one"):
        migrate_model_(model, adamw(model), REVERSED)


def test_a_tie_survives_a_load_after_the_migration():
    model, optimizer = trained(True)
    migrate_model_(model, optimizer, VocabMap.append(VOCAB, 2))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    verify_tied(model)
    state["head.weight"] = state["head.weight"] + 1
    with pytest.raises(TyingError, match="two different tensors"):
        model.load_state_dict(state)


class DistributedDataParallel(nn.Module):
    """By its name torch's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class ZeroRedundancyOptimizer(torch.optim.AdamW):
    """By its name torch's."""


def set_on(name: str, value: Any = 1) -> Callable[[Model, Any], Any]:
    return lambda model, optimizer: setattr(model.embedding.weight, name, value)


def without_head(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["params"].pop()


def other_vocabulary(model: Model, optimizer: Any) -> None:
    model.source = VocabParallelEmbedding(WIDTH, shard=VocabShard(VocabLayout(9, 1)))


def config_of(**ids: Any) -> Callable[[Model, Any], Any]:
    def change(model: Model, optimizer: Any) -> None:
        model.config = type("Config", (), {})()
        vars(model.config).update(vocab_size=VOCAB, **ids)

    return change


DROP = VocabMap.from_pairs(VOCAB, 4, {0: 0, 1: 1, 2: 2}, allow_drop=True)
REFUSALS: dict[str, tuple[Callable[[Model, Any], Any], type[Exception], str]] = {
    "FSDP2": (set_on("to_local"), UngatheredWeightError, "DTensor.*python -m vocab_parallel migrate"),
    "ZeRO-3": (set_on("ds_id"), UngatheredWeightError, "ZeRO-3.*python -m vocab_parallel migrate"),
    "Megatron's buffer": (set_on("main_grad"), UngatheredWeightError, "python -m vocab_parallel migrate"),
    "Megatron's layer": (lambda m, o: m.head.__dict__.update(adopted=None), VocabularyError, "Megatron layer"),
    "a hook": (lambda m, o: m.head.bias.register_hook(lambda g: g), VocabularyError, r"head\.bias has hooks"),
    "a hook after": (
        lambda m, o: m.head.bias.register_post_accumulate_grad_hook(lambda p: None), VocabularyError, "has hooks",
    ),
    "a parameter without owner": (without_head, TyingError, r"hold head\.bias 0 times"),
    "a state of unknown shape": (
        lambda m, o: o.state[m.head.weight].update(q=torch.zeros(3, 3)), VocabularyError, r"q of head\.weight",
    ),
    "two vocabularies": (other_vocabulary, LayoutError, "over different vocabularies"),
    "a padding id that is dropped": (
        lambda m, o: setattr(m.embedding, "padding_idx", 5), VocabularyError, "padding_idx is 5, an id that the map",
    ),
    "an end that is dropped": (config_of(eos_token_id=[1, 4]), VocabularyError, "eos_token_id is 4"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_migrated_in_place_is_refused_and_stays_as_it_was(what: str):
    model, optimizer = trained()
    change, error, words = REFUSALS[what]
    change(model, optimizer)
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    shard = model.embedding.shard
    with pytest.raises(error, match=words):
        migrate_model_(model, optimizer, DROP)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(bits(one), bits(two)) for one, two in zip(values, model.parameters(), strict=True))
    assert model.embedding.shard is shard and all("vocabulary_sha256" not in g for g in optimizer.param_groups)


def test_wrappers_and_optimizers_that_keep_state_elsewhere_are_refused():
    model, optimizer = trained()
    with pytest.raises(VocabularyError, match="wrapped by DistributedDataParallel"):
        migrate_model_(DistributedDataParallel(model), optimizer, DROP)
    for other in (ZeroRedundancyOptimizer(model.parameters()), torch.optim.LBFGS(model.parameters()), object()):
        with pytest.raises(TyingError, match="cannot be migrated in place"):
            migrate_model_(model, other, DROP)


def test_a_map_or_layout_of_other_sizes_is_refused():
    model, optimizer = trained()
    for vocab_map, layout in (
        (VocabMap.append(VOCAB + 1, 1), None),
        (DROP, VocabLayout(5, 1)),
        (DROP, VocabLayout(4, 2)),
    ):
        with pytest.raises(VocabularyError, match="the map is of"):
            migrate_model_(model, optimizer, vocab_map, layout=layout)
    with pytest.raises(LayoutError, match="nothing to migrate"):
        migrate_model_(nn.Linear(2, 2), None, DROP)


def test_sizes_and_special_ids_that_are_repeated_elsewhere_are_corrected():
    model, optimizer = trained()
    config_of(eos_token_id=[1, 2], pad_token_id=None, bos_token_id=0)(model, optimizer)
    model.embedding.num_embeddings, model.vocab_size, model.embedding.padding_idx = VOCAB, VOCAB, 2
    model.generation_config = type("Config", (), {})()
    model.generation_config.eos_token_id = 2
    migrate_model_(model, optimizer, VocabMap.from_pairs(VOCAB, 4, {0: 3, 1: 1, 2: 0}, allow_drop=True))
    assert vars(model.config) == {"vocab_size": 4, "eos_token_id": [1, 0], "pad_token_id": None, "bos_token_id": 3}
    assert model.embedding.num_embeddings == model.vocab_size == 4
    assert model.embedding.padding_idx == model.generation_config.eos_token_id == 0


@pytest.mark.parametrize(
    ("name", "value", "parameter", "by_row"),
    [
        ("exp_avg", (8, 4), (8, 4), True), ("exp_avg", (8,), (8,), True), ("momentum_buffer", (8, 4), (8, 4), True),
        ("row_var", (8, 1), (8, 4), True), ("col_var", (1, 4), (8, 4), False), ("exp_avg_sq_row", (8,), (8, 4), True),
        ("exp_avg_sq_col", (8,), (8, 8), False), ("col_var", (1, 1), (1, 1), False), ("row_var", (1, 1), (1, 4), True),
        ("step", (), (8, 4), False), ("step", (1,), (1, 4), False), ("exp_avg", (1, 4), (1, 4), True),
        ("optimizer.head.weight.exp_avg_sq_col", (8,), (8, 8), False), ("master_weight", (8, 4), (8, 4), True),
    ],
)  # fmt: skip
def test_states_by_row_are_told_by_name_and_shape(
    name: str, value: tuple[int, ...], parameter: tuple[int, ...], by_row: bool
):
    assert is_row_state(name, value, parameter) == by_row
    assert by_row or is_known_other(name, value)
    assert is_master_weight(name) == ("master" in name)
