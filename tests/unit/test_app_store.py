"""Checkpoints of one process without torch.distributed: kept, replaced, pruned, and what an optimizer keeps."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.multirank.checkpoint_cases import Model, build, digest, make_optimizer, train
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.checkpoint import latest_checkpoint, load_checkpoint, open_checkpoint, read_state, save_checkpoint
from vocab_parallel.checkpoint.saver import AsyncSaver
from vocab_parallel.errors import CheckpointLayoutError, VocabParallelError
from vocab_parallel.vocabulary import VocabIdentity
from vocab_parallel.vocabulary.formats import read_vocabulary
from vocab_parallel.vocabulary.manifest import Manifest


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adafactor", "Muon"])
def test_a_loaded_run_goes_on_bit_for_bit_and_settings_stay(kind: str, tmp_path: Path) -> None:
    model, optimizer = build(False, kind)
    train(model, optimizer, range(3))
    path = save_checkpoint(tmp_path, model, optimizer, 3, {"a": [1, None]})
    want = train(model, optimizer, range(3, 6))
    model, optimizer = build(False, kind)
    optimizer.param_groups[0]["lr"] *= 1.0
    gradient = model.trunk.bias.grad = torch.ones(6)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert load_checkpoint(path, model, optimizer) == (3, {"a": [1, None]})
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert model.trunk.bias.grad is gradient and model.trunk.weight.grad is None, "gradients are the caller's"
    assert train(model, optimizer, range(3, 6)) == want


def test_old_ones_go_and_a_step_saved_twice_keeps_the_later(tmp_path: Path) -> None:
    model, optimizer = build(True)
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, model, optimizer, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]
    path = save_checkpoint(tmp_path, model, optimizer, 10, {"round": 2})
    assert read_state(path)["extra"] == {"round": 2} and len(list(tmp_path.iterdir())) == 2
    path = save_checkpoint(tmp_path, model, optimizer, 5, keep=2)  # a run that went back: what it saves is there
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name, "step-00000010"]


def test_a_checkpoint_from_before_the_first_step_begins_the_same_optimizer_anew(tmp_path: Path) -> None:
    model, optimizer = build(True)
    path = save_checkpoint(tmp_path, model, optimizer, 0)
    want = train(model, optimizer, range(3))
    assert load_checkpoint(path, model, optimizer)[0] == 0 and not optimizer.state
    assert train(model, optimizer, range(3)) == want
    with pytest.raises(CheckpointLayoutError, match="no state for this SGD"):
        load_checkpoint(path, model, make_optimizer("SGD", model))


class Stubborn(torch.optim.AdamW):
    """Counts its steps in its groups, and fails in the third."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1
        super().step(closure)
        if self.param_groups[0]["step"] == 3:
            raise RuntimeError("out of something")


def test_an_optimizer_is_as_before_if_a_load_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(True)
    train(model, optimizer, range(1))
    path = save_checkpoint(tmp_path, model, optimizer, 1)
    stubborn = Stubborn(model.parameters())
    stubborn.param_groups[0]["step"] = 2
    with pytest.raises(VocabParallelError, match="out of something"):
        load_checkpoint(path, model, stubborn)
    assert not stubborn.state and stubborn.param_groups[0]["step"] == 2
    other, _ = build(False)
    for without_state in (torch.optim.SGD(other.parameters(), lr=0.1), Stubborn(other.parameters())):
        with pytest.raises(CheckpointLayoutError, match=r"saved tied"):
            load_checkpoint(path, other, without_state)
        assert not without_state.state and "step" not in without_state.param_groups[0]


def test_a_number_of_steps_or_checkpoints_that_cannot_be_is_refused(tmp_path: Path) -> None:
    model, optimizer = build(True)
    bad: list[Any] = [-1, True, 1.0, torch.tensor(3), 2**70, "4", None]
    for step in bad:
        with pytest.raises(CheckpointLayoutError, match=r"step=.*expected an int, at least 0"):
            save_checkpoint(tmp_path, model, optimizer, step)
    for keep in (0, -1):
        with pytest.raises(CheckpointLayoutError, match=r"keep=.*at least 1"):
            save_checkpoint(tmp_path, model, optimizer, 1, keep=keep)
        with pytest.raises(CheckpointLayoutError, match="keep="):
            AsyncSaver(keep=keep)
    assert not list(tmp_path.iterdir())


def test_manifest_and_vocabulary_stand_beside_the_tensors(tmp_path: Path) -> None:
    model, optimizer = build(True)
    identity = VocabIdentity.of_tokens([f"t{at}" for at in range(29)], special_ids={"bos": 1})
    path = save_checkpoint(tmp_path, model, optimizer, 4, identity=identity)
    assert read_vocabulary(path / "vocabulary.json").sha256 == identity.sha256
    manifest = Manifest.read(path)
    assert manifest.vocabulary.ordered_table_sha256 == identity.sha256 and manifest.tying.tied
    assert manifest.checkpoint is not None and manifest.checkpoint.step == 4
    stored = open_checkpoint(path)
    assert {key: (spec.dtype, spec.shape) for key, spec in manifest.checkpoint.tensors.items()} == {
        key: (str(dtype).removeprefix("torch."), tuple(size)) for key, (dtype, size) in stored.tensors.items()
    }
    with pytest.raises(CheckpointLayoutError, match="vocabulary sha256"):
        load_checkpoint(path, model, vocabulary_sha256="c" * 64)
    assert load_checkpoint(path, model, vocabulary_sha256=identity.sha256)[0] == 4
    other = VocabIdentity.of_tokens([f"t{at}" for at in reversed(range(29))])
    with pytest.raises(CheckpointLayoutError, match="migrate"):
        load_checkpoint(path, model, manifest=Manifest.of(model, identity=other))
    mine = dataclasses.replace(Manifest.of(model, identity=identity), notes={"a": 1})
    assert load_checkpoint(path, model, manifest=mine)[0] == 4


def test_weights_alone_load_without_an_optimizer_and_a_frozen_part_has_no_state(tmp_path: Path) -> None:
    model, optimizer = build(False)
    model.trunk.requires_grad_(False)
    train(model, optimizer, range(2))
    path = save_checkpoint(tmp_path, model, optimizer, 2)
    assert not any("trunk" in key for key in open_checkpoint(path).tensors if key.startswith("optimizer."))
    other, fresh = build(False)
    with torch.no_grad():
        other.trunk.weight.zero_()
    assert load_checkpoint(path, other)[0] == 2 and not fresh.state
    assert digest(other) == digest(model)
    load_checkpoint(path, other, fresh)
    assert len(fresh.state) == len(optimizer.state) == 3


def test_a_state_of_a_number_and_one_of_a_tensor_fill_each_other(tmp_path: Path) -> None:
    model, optimizer = build(True)
    train(model, optimizer, range(2))
    weight = model.trunk.weight
    optimizer.state[weight]["step"] = 2
    path = save_checkpoint(tmp_path, model, optimizer, 2)
    assert read_state(path)["scalars"] == {"optimizer.trunk.weight.step": 2}
    other, tensors = build(True)
    load_checkpoint(path, other, tensors)
    assert tensors.state[other.trunk.weight]["step"].item() == 2.0
    path = save_checkpoint(tmp_path, other, tensors, 3)
    load_checkpoint(path, model, optimizer)
    assert optimizer.state[weight]["step"] == 2 and isinstance(optimizer.state[weight]["step"], int)
    optimizer.state[weight]["note"] = {"a": 1}
    with pytest.raises(CheckpointLayoutError, match=r"optimizer\.trunk\.weight\.note is a dict"):
        save_checkpoint(tmp_path, model, optimizer, 4)


def test_what_has_no_vocabulary_or_no_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointLayoutError, match="no vocabulary-sharded embedding"):
        save_checkpoint(tmp_path, nn.Linear(2, 2), None, 1)
    model = Model(VocabShard(VocabLayout(29, 1, multiple_of=1)), True, device="meta")
    with pytest.raises(CheckpointLayoutError, match="meta device"):
        save_checkpoint(tmp_path, model, None, 1)
    model, _ = build(True)
    with pytest.raises(CheckpointLayoutError, match="that the model does not have"):
        stale = copy.deepcopy(model)
        optimizer = make_optimizer("AdamW", stale)
        train(stale, optimizer, range(1))
        save_checkpoint(tmp_path, model, optimizer, 1)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error_in_words_now_or_at_the_next_wait(tmp_path: Path) -> None:
    model, optimizer = build(True)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(VocabParallelError, match="could not be begun by rank 0 of the group: NotADirectoryError"):
        save_checkpoint(tmp_path / "file", model, optimizer, 1)
    saver = AsyncSaver()
    saver.save(tmp_path / "file", model, optimizer, 1)
    with pytest.raises(VocabParallelError, match="could not be begun"):
        saver.save(tmp_path / "good", model, optimizer, 2)
    saver.save(tmp_path / "good", model, optimizer, 2)  # the error was raised once
    assert saver.wait() == latest_checkpoint(tmp_path / "good")
    with pytest.raises(ZeroDivisionError), saver:
        saver.save(tmp_path / "good", model, optimizer, 3)
        raise ZeroDivisionError
    assert saver.wait() == tmp_path / "good" / "step-00000003"


def test_values_that_json_does_not_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model, optimizer = build(True)
    bad: list[Any] = [float("nan"), {1, 2}]
    for value in bad:
        with pytest.raises(VocabParallelError, match="could not be collected"):
            save_checkpoint(tmp_path, model, optimizer, 1, {"value": value})
    optimizer.state[model.trunk.weight]["scale"] = float("inf")
    with pytest.raises(CheckpointLayoutError, match=r"optimizer\.trunk\.weight\.scale is a float \(inf\)"):
        save_checkpoint(tmp_path, model, optimizer, 1)
    optimizer.state = {"all": {"a": 1}}  # type: ignore[assignment]
    with pytest.raises(CheckpointLayoutError, match="a state of 'all' that the model does not have"):
        save_checkpoint(tmp_path, model, optimizer, 1)
    assert not list(tmp_path.iterdir())


def test_values_that_change_while_a_save_goes_on_are_saved_as_they_were(tmp_path: Path) -> None:
    model, optimizer = build(True)
    extra = {"losses": [1.0]}
    with AsyncSaver() as saver:
        path = saver.save(tmp_path, model, optimizer, 1, extra)
        extra["losses"].append(2.0)
    assert read_state(path)["extra"] == {"losses": [1.0]}


def test_master_weights_that_the_optimizer_here_does_not_keep_are_left(tmp_path: Path) -> None:
    model, optimizer = build(True)
    train(model, optimizer, range(1))
    optimizer.state[model.embedding.weight]["master_weight"] = model.embedding.weight.detach().clone()
    path = save_checkpoint(tmp_path, model, optimizer, 1)
    assert open_checkpoint(path).tensors["optimizer.embedding.weight.master_weight"][1] == torch.Size([29, 6])
    other, fresh = build(True)
    load_checkpoint(path, other, fresh)
    assert digest(other) == digest(model) and "master_weight" not in fresh.state[other.embedding.weight]
