"""What takes a tie apart in DeepSpeed, and what makes it train other rows: refused on every rank, with the fix."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.batch import assert_all_raise, attempt, run_batch
from tests.integrations.deepspeed_models import ADAMW, Case, Model, build, host, make_shard, start, tensor_groups, train
from vocab_parallel import tie_weights

PACKAGE = "vocab_parallel.integrations.deepspeed"
PAIR = ["embedding.weight", "head.weight"]
Z1, Z3 = Case(1, 1, 2), Case(3, 1, 2)


def initialize(model: Any, case: Case, **more: Any) -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    more.setdefault("optimizer", functools.partial(torch.optim.AdamW, **ADAMW))
    return integration.initialize(model, config=case.config(), **more)


def verify(engine: Any) -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    return integration.verify_tied(engine)


def copied_values() -> Any:
    model = build(Z1)
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return lambda: initialize(model, Z1)


def one_storage() -> Any:
    model = build(Z1)
    model.head.weight = nn.Parameter(model.embedding.weight.detach())
    return lambda: initialize(model, Z1)


def on_one_rank_only() -> Any:
    model = build(Z1)
    if dist.get_rank() == 1:
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return lambda: initialize(model, Z1)


def optimizer_first() -> Any:
    model = Model(make_shard(2, 9), tie=False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    tie_weights(model.embedding, model.head)
    return lambda: initialize(model, Z1, optimizer=optimizer)


def parameters_first() -> Any:
    model = Model(make_shard(2, 9), tie=False)
    parameters = list(model.parameters())
    tie_weights(model.embedding, model.head)
    return lambda: initialize(model, Z1, model_parameters=parameters)


def twice_in_groups() -> Any:
    model = build(Z1)
    groups = [{"params": model.parameters()}, {"params": [model.head.weight], "weight_decay": 0.0}]
    return lambda: initialize(model, Z1, model_parameters=groups)


def meta_to_empty() -> Any:
    shard = make_shard(2, 9)
    with torch.device("meta"):
        model = Model(shard)
    model.to_empty(device="cpu")
    return lambda: initialize(model, Z1)


def copy_in_the_engine(case: Case) -> Any:
    engine = start(case)
    engine.module.head.weight = nn.Parameter(torch.zeros(5, 4))
    return lambda: verify(engine)


def assigned_in_the_engine() -> Any:
    engine = start(Z1)
    state = {name: tensor.clone() for name, tensor in engine.module.state_dict().items() if name != "head.weight"}
    engine.module.load_state_dict(state, strict=False, assign=True)
    return lambda: verify(engine)


def to_empty_in_the_engine() -> Any:
    engine = start(Z1)
    engine.module.to_empty(device="cpu")
    return lambda: verify(engine)


def loaded_past_the_master(case: Case) -> Any:
    engine = start(case)
    with torch.no_grad():
        if case.stage == 3:
            engine.module.embedding.weight.ds_tensor.add_(1.0)
        else:
            engine.module.load_state_dict({k: v + 1.0 for k, v in engine.module.state_dict().items()})
    return lambda: verify(engine)


def saved_when_broken() -> Any:
    engine = start(Z1)
    engine.module.head.weight = nn.Parameter(torch.zeros(5, 4))
    return lambda: engine.save_checkpoint("/nowhere")


def two_ids() -> Any:
    model = build(Case(3, 1, 2, construct="zero_init"))
    other = build(Case(3, 1, 2, construct="zero_init"))
    model.head.weight = other.head.weight
    assert model.head.weight.ds_id != model.embedding.weight.ds_id
    return lambda: initialize(model, Z3)


def without_its_mark() -> Any:
    engine = start(Z1)
    del engine.module.embedding.weight.tensor_model_parallel
    return lambda: verify(engine)


def no_mpu() -> Any:
    import deepspeed

    model = Model(make_shard(2, 9))
    deepspeed.utils.groups.mpu = None
    config = Case(1, 2, 1).config()
    engine = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))[0]
    return lambda: verify(engine)


def zero_init_over_the_world() -> Any:
    import deepspeed

    shard = make_shard(2, 9)
    with deepspeed.zero.Init(config_dict_or_path=Case(3, 2, 1).config()):
        model = Model(shard)
    return lambda: initialize(model, Z3)


def zero_init_with_an_mpu() -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    return lambda: integration.zero_init(make_shard(2, 9), config=Z3.config(), mpu=object())


def zero_init_over_the_vocabulary() -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    return lambda: integration.zero_init(make_shard(2, 9), config=Z3.config(), data_group=dist.group.WORLD)


def mpu_over_other_ranks() -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    mpu = integration.GroupsMPU(alone, dist.group.WORLD)
    return lambda: initialize(build(Z1), Z1, mpu=mpu)


def data_group_over_the_vocabulary() -> Any:
    return lambda: initialize(build(Z1), Z1, data_group=tensor_groups(2)[0])


def mpu_and_data_group() -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    shard = make_shard(2, 9)
    data_group = integration.data_parallel_group(shard.group)
    mpu = integration.GroupsMPU(shard.group, data_group)
    return lambda: initialize(Model(shard), Z1, mpu=mpu, data_group=data_group)


def autotp() -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    config = Z1.config(tensor_parallel={"autotp_size": 2})
    return lambda: integration.initialize(build(Z1), config=config)


def nothing_to_shard() -> Any:
    return lambda: initialize(nn.Linear(2, 2), Z1)


def two_vocabulary_groups() -> Any:
    model = build(Z1)
    model.other = Model(make_shard(1, 9))
    return lambda: initialize(model, Z1)


TRAPS: dict[str, tuple[Callable[[], Any], str, list[str]]] = {
    "values copied": (copied_values, "TyingError", PAIR),
    "two Parameters on one storage": (one_storage, "TyingError", [*PAIR, "storage"]),
    "broken on one rank only": (on_one_rank_only, "TyingError", PAIR),
    "the optimizer before the tie": (optimizer_first, "TyingError", [*PAIR, "tie_weights"]),
    "the list of parameters before the tie": (parameters_first, "TyingError", [*PAIR, "tie_weights"]),
    "the tied parameter twice in groups": (twice_in_groups, "TyingError", [*PAIR, "2 times"]),
    "to_empty from meta": (meta_to_empty, "TyingError", PAIR),
    "a copy in the engine, stage 1": (functools.partial(copy_in_the_engine, Z1), "TyingError", PAIR),
    "a copy in the engine, stage 3": (functools.partial(copy_in_the_engine, Z3), "TyingError", PAIR),
    "assigned in the engine": (assigned_in_the_engine, "TyingError", PAIR),
    "to_empty in the engine": (to_empty_in_the_engine, "TyingError", [*PAIR, "flat buffer"]),
    "loaded past the master, stage 1": (
        functools.partial(loaded_past_the_master, Z1), "TyingError", [*PAIR, "engine.load_checkpoint"],
    ),
    "loaded past the master, stage 3": (
        functools.partial(loaded_past_the_master, Z3), "TyingError", [*PAIR, "engine.load_checkpoint"],
    ),
    "saved when broken": (saved_when_broken, "TyingError", PAIR),
    "two ZeRO-3 ids": (two_ids, "TyingError", PAIR),
    "without its mark": (without_its_mark, "TyingError", [*PAIR, "tensor_model_parallel"]),
    "no mpu": (no_mpu, "ConfigError", ["mpu", f"{PACKAGE}.initialize"]),
    "zero.Init over the world": (zero_init_over_the_world, "ConfigError", ["embedding.weight", f"{PACKAGE}.zero_init"]),
    "zero_init with an mpu": (zero_init_with_an_mpu, "ConfigError", ["mpu", "data_group"]),
    "zero_init over the vocabulary's ranks": (zero_init_over_the_vocabulary, "ConfigError", ["data-parallel"]),
    "an mpu over other ranks": (mpu_over_other_ranks, "ConfigError", ["mpu"]),
    "a data group over the vocabulary's ranks": (data_group_over_the_vocabulary, "ConfigError", ["data-parallel"]),
    "an mpu and a data group": (mpu_and_data_group, "ConfigError", ["mpu", "data_group"]),
    "DeepSpeed's own tensor parallelism": (autotp, "ConfigError", ["tensor_parallel.autotp_size"]),
    "nothing to shard": (nothing_to_shard, "ConfigError", ["VocabParallelEmbedding"]),
    "vocabularies over different ranks": (two_vocabulary_groups, "ConfigError", ["other.embedding.weight"]),
}  # fmt: skip


def _run(rank: int, world: int, name: str) -> Any:
    with host():
        return attempt(TRAPS[name][0]())


@functools.cache
def _observed() -> dict[str, Any]:
    return run_batch(_run, 2, list(TRAPS), timeout=110, detail=False)


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_refused_on_every_rank_with_the_fix_named(name: str) -> None:
    found = _observed()[name]
    assert not isinstance(found, str), found
    _, kind, words = TRAPS[name]
    assert_all_raise(name, found, [kind], words)


def _norm_without_the_mark(rank: int, world: int, marked: bool) -> float:
    with host():
        engine = start(Z1)
        if not marked:
            del engine.module.embedding.weight.tensor_model_parallel
        return train(Z1, engine, range(1))["norms"][0]


def test_the_mark_is_what_makes_the_gradient_norm_whole() -> None:
    found = run_batch(_norm_without_the_mark, 2, [True, False], timeout=60, detail=False)
    assert found[True][0] - found[False][0] > 1e-3, "without the mark the second rank's rows are left out"
