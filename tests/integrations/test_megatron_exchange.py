"""Megatron's own checkpoints to ours and back: its models load them at another TP size and padding, and train on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.batch import run_batch
from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import EMBEDDING, HEAD, HIDDEN, Setup
from vocab_parallel.checkpoint.exchange.megatron import from_megatron, to_megatron
from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError

pytestmark = pytest.mark.timeout(300)

BEFORE, VOCAB = 2, 12
TIED, UNTIED = Setup(tp=2, vocab=VOCAB), Setup(tp=2, vocab=11, padded=16, tied=False)
SIXTEEN = Setup(tp=2, vocab=VOCAB, dtype="bfloat16")
SHARDED = Setup(tp=2, vocab=VOCAB, dtype="bfloat16", distributed=True)
FULLY, BY_BUCKET = "fully_reshardable", "dp_reshardable"
SAVED = {
    "tied": (TIED, FULLY),
    "untied": (UNTIED, FULLY),
    "bfloat16": (SIXTEEN, FULLY),
    "distributed": (SHARDED, FULLY),
    "buckets": (SHARDED, BY_BUCKET),
}
# Loaded by Megatron's own model ("own") or by one with our modules, of the saved kind, at this TP size and padding.
LOADED = {
    "tied alone": ("tied", "own", 1, None),
    "tied over four, padded": ("tied", "ours", 4, 16),
    "untied alone": ("untied", "own", 1, None),
    "untied over four, padded": ("untied", "ours", 4, 20),
    "bfloat16 alone": ("bfloat16", "own", 1, None),
    "bfloat16 over four, padded": ("bfloat16", "ours", 4, 16),
}


def _state(setup: Setup, model: Any, optimizer: Any, sharding: str, loading: bool = False) -> dict[str, Any]:
    parameters = model.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": sharding} if setup.distributed else {}
    states = optimizer.sharded_state_dict(parameters, is_loading=loading, metadata=metadata)
    return {"model": parameters, "optimizer": states, "iteration": BEFORE}


def _logits(setup: Setup, wrapped: Any) -> Tensor:
    """Of the real ids, on a batch."""
    with torch.no_grad():
        local = models.call(wrapped.module, models.batch(9, VOCAB - 1), labels=False)
    parts = [torch.empty_like(local) for _ in range(setup.tp)]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts, dim=-1)[..., : setup.vocab].float()


def _whole(setup: Setup, parameter: Tensor) -> Tensor:
    parts = [torch.empty_like(parameter) for _ in range(setup.tp)]
    dist.all_gather(parts, parameter.detach().contiguous())
    return torch.cat(parts)[: setup.vocab]


def _tables(setup: Setup, wrapped: Any, optimizer: Any) -> dict[str, Tensor]:
    """Real rows of the tables, of their masters and first moments, by our keys."""
    found = {}
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    for name, parameter in wrapped.named_parameters():
        name = name[name.rindex("module.") + 7 :]
        if name not in (EMBEDDING, HEAD):
            continue
        found[f"model.{name}"] = _whole(setup, parameter)
        master = getattr(parameter, "main_param", parameter)
        if setup.distributed:
            continue
        if master is not parameter:
            found[f"optimizer.{name}.master_weight"] = _whole(setup, master)
        found[f"optimizer.{name}.exp_avg"] = _whole(setup, part.optimizer.state[master]["exp_avg"])
    return found


def _save(rank: int, world: int, entry: tuple[str, str]) -> dict[str, Any]:
    """Megatron alone: trains, saves, and takes one step more."""
    from megatron.core import dist_checkpointing

    name, folder = entry
    setup, sharding = SAVED[name]
    path = Path(folder) / name / "megatron"
    with models.parallel(setup):
        model = models.build(setup)
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        for step in range(BEFORE):
            models.step_of(setup, wrapped, optimizer, step)
        if rank == 0:
            path.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(_state(setup, model, optimizer, sharding), str(path))
        seen: dict[str, Any] = {"tables": _tables(setup, wrapped, optimizer), "logits": _logits(setup, wrapped)}
        models.step_of(setup, wrapped, optimizer, BEFORE)
        return seen | {"next": _tables(setup, wrapped, optimizer)}


def _load(rank: int, world: int, entry: tuple[str, str]) -> dict[str, Any]:
    """In a fresh process and model: loads what came back, and takes the same step."""
    from megatron.core import dist_checkpointing

    what, folder = entry
    name, kind, tp, padded = LOADED[what]
    setup = replace(SAVED[name][0], tp=tp, padded=padded)
    with models.parallel(setup):
        model = models.build(setup) if kind == "own" else models.adopted(setup)
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        path = str(Path(folder) / name / f"back{padded or ''}")
        state = dist_checkpointing.load(_state(setup, model, optimizer, FULLY, loading=True), path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        seen: dict[str, Any] = {"tables": _tables(setup, wrapped, optimizer), "iteration": state["iteration"]}
        if kind == "own":
            seen["logits"] = _logits(setup, wrapped)
        models.step_of(setup, wrapped, optimizer, BEFORE)
        return seen | {"next": _tables(setup, wrapped, optimizer)}


def _load_table(rank: int, world: int, folder: str) -> Tensor:
    """A table trained by ours into Megatron's own model, by name and of another padding."""
    from megatron.core import dist_checkpointing

    setup = Setup(tp=world, vocab=VOCAB, padded=16)
    with models.parallel(setup):
        model = models.build(setup)
        wanted = {EMBEDDING: model.sharded_state_dict()[EMBEDDING]}
        loaded = dist_checkpointing.load(wanted, folder)
        model.load_state_dict({**model.state_dict(), **{k: v for k, v in loaded.items() if k == EMBEDDING}})
        return _whole(replace(setup, vocab=16), model.embedding.word_embeddings.weight)


def _load_weights(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    """All weights into Megatron's own model, which also asks for objects that are not there."""
    from megatron.core import dist_checkpointing

    setup = Setup(tp=world, vocab=VOCAB)
    with models.parallel(setup):
        model = models.build(setup)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder, strict="ignore_all")
        model.load_state_dict(state["model"], strict=False)
        filled = [name for name, value in model.named_parameters() if bool((value == 7.0).any())]
        return {"table": _whole(setup, model.embedding.word_embeddings.weight), "filled": torch.tensor(len(filled))}


OWN = torch.arange(VOCAB * HIDDEN, dtype=torch.float32).view(VOCAB, HIDDEN)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where Megatron saved, what it saw, and both conversions."""
    folder = tmp_path_factory.mktemp("megatron")
    found = run_batch(_save, 2, [(name, str(folder)) for name in SAVED], timeout=100, detail=False)
    seen = {}
    for name, (setup, sharding) in SAVED.items():
        ranks = found[name, str(folder)]
        assert not isinstance(ranks, str), ranks
        seen[name] = ranks[0]
        if sharding == FULLY:
            place = folder / name
            from_megatron(place / "megatron", place / "ours", vocab_size=setup.vocab, tp_size=3, multiple_of=1)
            for padded in {padded for kind, _, _, padded in LOADED.values() if kind == name}:
                size = padded or setup.vocab
                to_megatron(place / "ours", place / f"back{padded or ''}", padded_size=size)
    return folder, seen


@pytest.fixture(scope="module")
def loaded(saved: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    folder, found = str(saved[0]), {}
    for world in (1, 4):
        entries = [(what, folder) for what, (_, _, tp, _) in LOADED.items() if tp == world]
        ranks = run_batch(_load, world, entries, timeout=100, detail=False)
        found |= {what: ranks[what, folder] for what, _ in entries}
    return found


@pytest.mark.parametrize("name", [name for name, (_, sharding) in SAVED.items() if sharding == FULLY])
def test_ours_has_megatrons_rows_and_moments_bit_for_bit(name: str, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = saved
    stored = open_checkpoint(folder / name / "ours")
    stored.verify()
    setup = SAVED[name][0]
    for key, value in seen[name]["tables"].items():
        assert torch.equal(stored.read(key), value), key
    assert stored.state["tables"] == ([EMBEDDING] if setup.tied else [EMBEDDING, HEAD])
    assert stored.state["ties"] == ({HEAD: EMBEDDING} if setup.tied else {})
    assert stored.step == BEFORE
    for state in ("exp_avg", "exp_avg_sq", "step", *(["master_weight"] if setup.dtype != "float32" else [])):
        assert f"optimizer.{EMBEDDING}.{state}" in stored.tensors
    assert stored.read(f"optimizer.{EMBEDDING}.step") == BEFORE
    if setup.dtype != "float32":
        master = stored.read(f"optimizer.{EMBEDDING}.master_weight")
        assert torch.equal(master.bfloat16(), stored.read(f"model.{EMBEDDING}"))


@pytest.mark.parametrize("what", LOADED)
def test_megatron_loads_it_at_another_tp_size_and_padding_and_goes_on(
    what: str, saved: tuple[Path, dict[str, Any]], loaded: dict[str, Any]
) -> None:  # fmt: skip
    name = LOADED[what][0]
    before, limit = saved[1][name], 2e-6 if SAVED[name][0].dtype == "float32" else 2e-2
    assert not isinstance(loaded[what], str), loaded[what]
    for found in loaded[what]:
        assert set(found["tables"]) == set(before["tables"])
        for key, value in before["tables"].items():
            assert torch.equal(found["tables"][key], value), key
        assert found["iteration"] == BEFORE
        if "logits" in found:
            torch.testing.assert_close(found["logits"], before["logits"], rtol=0, atol=10 * limit)
        if name != "untied":  # whose loss Megatron takes over its 16 rows, padding too
            for key, value in before["next"].items():
                torch.testing.assert_close(found["next"][key], value, rtol=0, atol=limit)


def test_state_by_bucket_is_refused_and_its_weights_convert_alone(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:  # fmt: skip
    folder, seen = saved
    source = folder / "buckets" / "megatron"
    with pytest.raises(CheckpointLayoutError, match=r"gbuf_idx_0.*fully_reshardable.*optimizer=False"):
        from_megatron(source, tmp_path / "ours", vocab_size=VOCAB)
    stored = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=VOCAB, optimizer=False))
    assert torch.equal(stored.read(f"model.{EMBEDDING}"), seen["buckets"]["tables"][f"model.{EMBEDDING}"])
    assert not [key for key in stored.tensors if key.startswith("optimizer.")]


def test_a_table_that_ours_trained_loads_into_megatrons_model_by_name(tmp_path: Path) -> None:
    layout = {"vocab_size": VOCAB, "padded_size": VOCAB, "tp_size": 1}
    tensors = {"model.wte.weight": OWN}
    state = make_state(3, tensors, layout=layout, tables=["wte.weight"])
    write_checkpoint(tmp_path / "ours", [tensors], state=state)
    to_megatron(tmp_path / "ours", tmp_path / "there", rename={"wte.weight": EMBEDDING})
    found = run_batch(_load_table, 2, [str(tmp_path / "there")], timeout=60, detail=False)[str(tmp_path / "there")]
    assert not isinstance(found, str), found
    for table in found:
        assert torch.equal(table[:VOCAB], OWN)
        assert not table[VOCAB:].any()


def test_weights_without_megatrons_objects_load_where_strict_allows_for_it(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:  # fmt: skip
    stored = open_checkpoint(saved[0] / "tied" / "ours")
    tensors = {key: stored.read(key) for key in stored.tensors if key.startswith("model.")}
    kept = {name: stored.state[name] for name in ("layout", "tables", "ties")}
    write_checkpoint(tmp_path / "ours", [tensors], state=make_state(3, tensors, **kept))
    to_megatron(tmp_path / "ours", tmp_path / "there")
    found = run_batch(_load_weights, 2, [str(tmp_path / "there")], timeout=60, detail=False)[str(tmp_path / "there")]
    assert not isinstance(found, str), found
    for one in found:
        assert torch.equal(one["table"], stored.read(f"model.{EMBEDDING}"))
        assert one["filled"] == 0
