"""A tie that was broken on purpose is an error that names both parameters, on every rank that shares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import EMBEDDING, HEAD, Setup, megatron
from tests.multirank.shared_world import Batch

ONE_STAGE = Setup(tp=2)
TWO_STAGES = Setup(pp=2)
SHARDED = Setup(tp=2, distributed=True)


def _embedding(model: Any) -> Any:
    return model.embedding.word_embeddings


def _copied(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    model.output_layer.weight = nn.Parameter(_embedding(model).weight.detach().clone())
    return optimizer


def _same_storage(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    model.output_layer.weight = nn.Parameter(_embedding(model).weight.data)
    return optimizer


def _replaced_on_one_rank(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    if models.dist.get_rank() == 1:
        weight = _embedding(model).weight
        _embedding(model).weight = nn.Parameter(weight.detach().clone())
    return optimizer


def _optimizer_first(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    """The optimizer was built on Parameters of before: here those of another model."""
    other = models.wrap(setup, models.build(setup))
    return models.optimizer_of(setup, other)


def _orphan_in_a_torch_optimizer(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    orphan = nn.Parameter(torch.zeros(3))
    return torch.optim.AdamW([*model.parameters(), orphan])


def _twice_in_a_torch_optimizer(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    found = torch.optim.AdamW([{"params": [_embedding(model).weight]}])
    found.param_groups.append({**found.param_groups[0], "params": [_embedding(model).weight]})
    return found


def _state_of_an_orphan(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    part.optimizer.state[nn.Parameter(torch.zeros(3))] = {}
    return optimizer


def _assign_load(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    model.load_state_dict({name: torch.clone(value) if value is not None else None
                           for name, value in model.state_dict().items()}, assign=True)  # fmt: skip
    return optimizer


def _to_empty(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    model.to_empty(device="cpu")
    return optimizer


def _data_assigned(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    _embedding(model).weight.data = _embedding(model).weight.data.clone()
    return optimizer


def _two_masters(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    """Not two ids, as in ZeRO-3: two entries of one Parameter, each with a shard of its own."""
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    part.model_fp32_groups[0].append(_embedding(model).weight)
    return optimizer


def _copies_drift(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    if model.post_process:
        with torch.no_grad():
            model.output_layer.weight[0, 0] += 1e-3
    return optimizer


def _mark_lost(name: str) -> Callable[..., Any]:
    def lose(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
        if model.post_process:
            setattr(model.output_layer.weight if setup.pp > 1 else _embedding(model).weight, name, False)
        return optimizer

    return lose


def _not_adopted(setup: Setup, model: Any, wrapped: Any, optimizer: Any) -> Any:
    model.share_embeddings_and_output_weights = False
    return optimizer


BREAKS: dict[str, tuple[Setup, Callable[..., Any], str]] = {
    "copied values": (ONE_STAGE, _copied, "no longer one Parameter"),
    "one storage": (ONE_STAGE, _same_storage, "share storage"),
    "replaced on one rank": (ONE_STAGE, _replaced_on_one_rank, "not the Parameter that apply found"),
    "optimizer first": (ONE_STAGE, _optimizer_first, "no longer has"),
    "optimizer first, distributed": (SHARDED, _optimizer_first, "no longer has"),
    "orphan": (ONE_STAGE, _orphan_in_a_torch_optimizer, "no longer has"),
    "state of an orphan": (ONE_STAGE, _state_of_an_orphan, "in none of its groups"),
    "twice": (ONE_STAGE, _twice_in_a_torch_optimizer, "2 times, expected once"),
    "assign-load": (ONE_STAGE, _assign_load, "assign=True"),
    "to_empty": (SHARDED, _to_empty, "no longer in DistributedDataParallel's buffer"),
    "data assigned": (SHARDED, _data_assigned, "no longer in DistributedDataParallel's buffer"),
    "two masters": (SHARDED, _two_masters, "2 times, expected once"),
    "no norm mark": (ONE_STAGE, _mark_lost("tensor_model_parallel"), "'tensor_model_parallel'"),
    "no zero_out_wgrad": (ONE_STAGE, _mark_lost("zero_out_wgrad"), "'zero_out_wgrad'"),
    "not tied": (ONE_STAGE, _not_adopted, "are not tied"),
    "copies drift": (TWO_STAGES, _copies_drift, "no longer equal"),
    "copy counted twice": (TWO_STAGES, _mark_lost("shared"), "'shared'"),
    "copies cut differently": (TWO_STAGES, _mark_lost("shared_embedding"), "'shared_embedding'"),
}


def _broken(rank: int, name: str) -> str:
    setup, break_it, _ = BREAKS[name]
    with models.parallel(setup):
        model = models.adopted(setup)
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        assert megatron.verify_tied(wrapped, optimizer) == [(EMBEDDING, HEAD)]
        models.step_of(setup, wrapped, optimizer, 0)
        assert megatron.verify_tied([wrapped], optimizer) == [(EMBEDDING, HEAD)]
        try:
            optimizer = break_it(setup, model, wrapped, optimizer)
            megatron.verify_tied(wrapped, optimizer)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


WORLD = Batch(_broken, [(name,) for name in BREAKS])


@pytest.mark.parametrize("name", list(BREAKS), ids=lambda name: name.replace(" ", "_"))
def test_a_broken_tie_is_an_error_that_names_both_parameters(name: str) -> None:
    for message in WORLD(2, name):
        assert message.startswith("TyingError"), message
        assert EMBEDDING in message and HEAD in message, message
        assert BREAKS[name][2] in message, message


def _other_weight(rank: int, sequence_parallel: bool) -> list[str]:
    """The model passes another weight to the output layer than the one it was tied to, on one rank."""
    setup = Setup(tp=2, sequence_parallel=sequence_parallel)
    found = []
    with models.parallel(setup):
        model = models.adopted(setup)
        if rank == 1:
            other = nn.Parameter(_embedding(model).weight.detach().clone())
            model.shared_embedding_or_output_weight = lambda: other
        for labels in (True, False) if sequence_parallel else (True,):
            try:
                models.call(model, models.batch(0, setup.vocab), labels=labels)
                found.append("no error")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found


OTHER = Batch(_other_weight, [(False,), (True,)])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_weight_that_is_not_the_tied_one_is_an_error_in_forward_on_every_rank(sequence_parallel: bool) -> None:
    for messages in OTHER(2, sequence_parallel):
        for message in messages:
            assert message.startswith("TyingError") and EMBEDDING in message and HEAD in message, message


def _load_assigned(rank: int) -> dict[str, Any]:
    """A load with assign=True before anything is built on the Parameters."""
    setup = Setup(tp=2)
    with models.parallel(setup):
        model = models.adopted(setup)
        state = {name: None if value is None else value + 1 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        weight = _embedding(model).weight
        pairs = megatron.verify_tied(model, torch.optim.AdamW(model.parameters()))
        return {"pairs": pairs, "marks": weight.tensor_model_parallel, "value": torch.equal(weight, state[EMBEDDING])}


def test_a_load_with_assign_before_the_wrapper_keeps_the_tie_and_the_marks() -> None:
    from tests.ranks import run_ranks

    for found in run_ranks(_load_assigned, 2):
        assert found == {"pairs": [(EMBEDDING, HEAD)], "marks": True, "value": True}
