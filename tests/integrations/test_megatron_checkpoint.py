"""Distributed checkpoints: real rows and the tie once, into another TP size, another padding, another pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import EMBEDDING, HEAD, Setup, megatron
from tests.ranks import run_ranks
from tests.tolerances import require_equal

BEFORE, AFTER = 3, 3
SAVED = Setup(tp=2)
SHARDED = Setup(distributed=True, dtype="bfloat16")  # in float32 0.16.1 fails to copy into a leaf
LOADED = [
    (2, Setup(tp=2)),
    (1, Setup(tp=1)),
    (2, Setup(tp=2, padded=16)),
    (2, Setup(tp=2, sequence_parallel=True)),
    (2, Setup(pp=2)),
    (4, Setup(tp=4)),
]


def _state(setup: Setup, model: Any, optimizer: Any, loading: bool = False) -> dict[str, Any]:
    parameters = model.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"} if setup.distributed else {}
    states = optimizer.sharded_state_dict(parameters, is_loading=loading, metadata=metadata)
    return {"model": parameters, "optimizer": states}


def _moments(setup: Setup, wrapped: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The tied weight's first moments, whole."""
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    model = wrapped.module
    if setup.distributed or not (model.pre_process or model.post_process):
        return {}
    weight = model.shared_embedding_or_output_weight()
    shard = (model.embedding.word_embeddings if model.pre_process else model.output_layer).shard
    return {"exp_avg": models.gather_vocab(shard, part.optimizer.state[weight]["exp_avg"]).clone()}


def _save(rank: int, setup: Setup, folder: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    with models.parallel(setup):
        model = models.adopted(setup)
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        for step in range(BEFORE):
            models.step_of(setup, wrapped, optimizer, step)
        dist_checkpointing.save(_state(setup, model, optimizer), folder)
        keys = dist_checkpointing.load_tensors_metadata(folder)
        saved = {**models.tables(setup, wrapped), **_moments(setup, wrapped, optimizer)}
        losses = [models.step_of(setup, wrapped, optimizer, BEFORE + step)[0].item() for step in range(AFTER)]
        shapes = {name: tuple(tensor.global_shape) for name, tensor in keys.items()}
        return {"saved": saved, "losses": losses, "shapes": shapes}


def _load(rank: int, setup: Setup, folder: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    with models.parallel(setup):
        model = models.adopted(setup)
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        if setup.distributed:  # with torch's Adam, 0.16.1 loads only where there are states with a step
            models.step_of(setup, wrapped, optimizer, 0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        state = dist_checkpointing.load(_state(setup, model, optimizer, loading=True), folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if setup.distributed:  # and gives all parameters one tensor for their steps, with the step from before the load
            for one in optimizer.chained_optimizers[0].optimizer.state.values():
                one["step"] = torch.tensor(float(BEFORE))
        pairs = megatron.verify_tied(wrapped, optimizer)
        loaded = {**models.tables(setup, wrapped), **_moments(setup, wrapped, optimizer)}
        losses = [models.step_of(setup, wrapped, optimizer, BEFORE + step)[0] for step in range(AFTER)]
        return {
            "loaded": loaded, "losses": [None if loss is None else loss.item() for loss in losses],
            "pairs": [pairs, megatron.verify_tied(wrapped, optimizer)],
        }  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("megatron") / "checkpoint"
    folder.mkdir()
    return folder, run_ranks(_save, 2, SAVED, str(folder))[0]


def test_the_tied_weight_is_saved_once(saved: tuple[Path, dict[str, Any]]) -> None:
    shapes = saved[1]["shapes"]
    tables = [name for name in shapes if EMBEDDING in name or HEAD in name]
    moments = [f"optimizer.state.{moment}.{EMBEDDING}" for moment in ("exp_avg", "exp_avg_sq")]
    assert sorted(tables) == sorted([EMBEDDING, *moments])
    assert shapes[EMBEDDING] == (SAVED.layout.padded_size, models.HIDDEN)


@pytest.mark.parametrize(("ranks", "setup"), LOADED, ids=str)
def test_a_checkpoint_goes_on_in_a_fresh_process(saved: tuple[Path, dict[str, Any]], ranks: int, setup: Setup) -> None:
    folder, before = saved
    results = run_ranks(_load, ranks, setup, str(folder))
    for result in results:
        for name, table in result["loaded"].items():
            wanted = before["saved"]["embedding" if name == "head" else name]
            require_equal(f"{name} after the load", [table, wanted])
        if result["losses"][0] is not None:
            for found, wanted in zip(result["losses"], before["losses"], strict=True):
                assert abs(found - wanted) < 1e-5, f"{result['losses']}, expected {before['losses']}"
        assert result["pairs"] == [[(EMBEDDING, HEAD)]] * 2


def test_the_distributed_optimizer_goes_on_in_a_fresh_process(tmp_path: Path) -> None:
    before = run_ranks(_save, 2, SHARDED, str(tmp_path))
    for result, wanted in zip(run_ranks(_load, 2, SHARDED, str(tmp_path)), before, strict=True):
        require_equal("embedding after the load", [result["loaded"]["embedding"], wanted["saved"]["embedding"]])
        assert result["losses"] == wanted["losses"]
        assert result["pairs"] == [[(EMBEDDING, HEAD)]] * 2


def _load_without_us(rank: int, setup: Setup, folder: str) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    with models.parallel(setup):
        model = models.build(setup)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)["model"])
        return {"embedding": model.embedding.word_embeddings.weight.detach()[: setup.vocab]}


def test_megatrons_own_model_loads_the_same_checkpoint(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, before = saved
    (found,) = run_ranks(_load_without_us, 1, Setup(), str(folder))
    require_equal("embedding", [found["embedding"], before["saved"]["embedding"]])
