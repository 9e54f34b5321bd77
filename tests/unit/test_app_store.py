"""Checkpoints: the same bits back on the same ranks, refused on others, whole or not there."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import RankFailure, run_ranks
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, tie_weights
from vocab_parallel.checkpoint import latest_checkpoint, load_checkpoint, read_state, save_checkpoint
from vocab_parallel.errors import CheckpointLayoutError

EXTRA = {"vocabulary_sha256": "a" * 64, "note": [1, "x"]}


class Small(nn.Module):
    def __init__(self, shard: VocabShard, width: int = 6, seed: int = 0) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(width, shard=shard)
        self.embedding.reset_parameters(seed=seed, std=1.0)
        generator = torch.Generator().manual_seed(seed)
        self.trunk = nn.Linear(width, width)
        with torch.no_grad():
            for parameter in self.trunk.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.head = VocabParallelLMHead(width, shard=shard, bias=True)
        tie_weights(self.embedding, self.head)

    def loss(self, ids: Tensor) -> Tensor:
        return self.head.loss(self.trunk(self.embedding(ids)), ids.roll(1))


def build(tp: int, vocab_size: int = 9, width: int = 6, seed: int = 0) -> tuple[Small, torch.optim.AdamW]:
    shard = VocabShard(VocabLayout(vocab_size, tp, multiple_of=1), dist.group.WORLD if tp > 1 else None)
    model = Small(shard, width, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def advance(model: Small, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = torch.randint(9, (8,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def save_and_go_on(rank: int, tp: int, folder: str) -> list[float]:
    model, optimizer = build(tp)
    advance(model, optimizer, range(3))
    save_checkpoint(folder, model, optimizer, 3, EXTRA)
    return advance(model, optimizer, range(3, 6))


def load_and_go_on(rank: int, tp: int, folder: str) -> list[float]:
    model, optimizer = build(tp, seed=1)
    latest = latest_checkpoint(folder)
    assert latest is not None
    assert load_checkpoint(latest, model, optimizer, vocabulary_sha256="a" * 64) == (3, EXTRA)
    assert model.embedding.weight is model.head.weight and optimizer.param_groups[0]["lr"] == 0.1
    return advance(model, optimizer, range(3, 6))


@pytest.mark.parametrize("tp", [1, 3])
def test_a_loaded_run_goes_on_bit_for_bit(tp: int, tmp_path: Path) -> None:
    went_on = run_ranks(save_and_go_on, tp, tp, str(tmp_path))
    resumed = run_ranks(load_and_go_on, tp, tp, str(tmp_path))
    assert resumed == went_on and len(set(went_on[0])) == 3


def test_the_tied_weight_has_one_key_and_the_shards_are_one_tensor(tmp_path: Path) -> None:
    run_ranks(save_and_go_on, 2, 2, str(tmp_path))
    path = tmp_path / "step-00000003"
    state = read_state(path)
    assert state["layout"] == {"vocab_size": 9, "padded_size": 10, "tp_size": 2}
    names = set(state["tensors"])
    assert {name for name in names if name.startswith("model.")} == {
        "model.embedding.weight", "model.head.bias", "model.trunk.weight", "model.trunk.bias"}  # fmt: skip
    assert "optimizer.embedding.weight.exp_avg" in names and not any("head.weight" in name for name in names)
    with (path / ".metadata").open("rb") as file:
        saved = pickle.load(file).state_dict_metadata
    for key in ("model.embedding.weight", "optimizer.embedding.weight.exp_avg_sq"):
        assert list(saved[key].size) == [10, 6] and len(saved[key].chunks) == 2
    assert list(saved["model.head.bias"].size) == [10]
    assert len(saved["model.trunk.weight"].chunks) == 1


def load_other(rank: int, tp: int, folder: str, changes: dict[str, Any], sha256: str | None) -> None:
    model, optimizer = build(tp, **changes)
    before = model.embedding.weight.detach().clone()
    try:
        load_checkpoint(Path(folder) / "step-00000003", model, optimizer, vocabulary_sha256=sha256)
    finally:
        assert torch.equal(model.embedding.weight, before), "a refused checkpoint changed the weights"


@pytest.mark.parametrize(
    ("tp", "changes", "sha256", "words"),
    [
        (1, {}, None, ["V=9 padded to 10 over 2 ranks", "V=9 padded to 9 over 1 ranks"]),
        (2, {"vocab_size": 11}, None, ["V=9 padded to 10 over 2 ranks", "V=11 padded to 12 over 2 ranks"]),
        (2, {}, "b" * 64, ["aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb"]),
        (2, {"width": 4}, None, ["model.embedding.weight", "[5, 6]", "[5, 4]"]),
    ],
    ids=["ranks", "vocabulary size", "vocabulary", "width"],
)
def test_another_layout_is_refused_on_every_rank(
    tp: int, changes: dict[str, Any], sha256: str | None, words: list[str], tmp_path: Path
) -> None:
    run_ranks(save_and_go_on, 2, 2, str(tmp_path))
    with pytest.raises(RankFailure) as caught:
        run_ranks(load_other, tp, tp, str(tmp_path), changes, sha256)
    errors = caught.value.errors
    assert set(errors) == set(range(tp)) and len(set(errors.values())) == 1
    for error in errors.values():
        assert error.type == CheckpointLayoutError.__name__ and all(word in error.message for word in words), error


def test_only_whole_checkpoints_count_and_old_ones_go(tmp_path: Path) -> None:
    model, optimizer = build(1)
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "absent") is None
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, model, optimizer, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]
    (tmp_path / "step-00000011").mkdir()
    (tmp_path / ".step-00000012.partial").mkdir()
    os.remove(tmp_path / "step-00000010" / ".metadata")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    with pytest.raises(CheckpointLayoutError, match="not a whole checkpoint"):
        load_checkpoint(tmp_path / "step-00000010", model)


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build(1)
    save_checkpoint(tmp_path, model, optimizer, 1)
    monkeypatch.setattr(json, "dump", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, model, optimizer, 2, keep=1)
    monkeypatch.undo()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    save_checkpoint(tmp_path, model, optimizer, 2, keep=1)  # what the failure left behind is no obstacle
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_saving_a_step_twice_keeps_the_later(tmp_path: Path) -> None:
    model, optimizer = build(1)
    save_checkpoint(tmp_path, model, optimizer, 1, {"round": 1})
    path = save_checkpoint(tmp_path, model, optimizer, 1, {"round": 2})
    assert read_state(path)["extra"] == {"round": 2} and len(list(tmp_path.iterdir())) == 1


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["VOCAB_PARALLEL_TEST_TRACE"],))


def test_a_metadata_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = build(1)
    path = save_checkpoint(tmp_path, model, None, 1)
    trace = tmp_path / "ran"
    monkeypatch.setenv("VOCAB_PARALLEL_TEST_TRACE", str(trace))
    (path / ".metadata").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(CheckpointLayoutError, match="mkdir"):
        load_checkpoint(path, model)
    assert not trace.exists()


def test_weights_alone_load_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = build(1)
    advance(model, optimizer, range(2))
    path = save_checkpoint(tmp_path, model, optimizer, 2)
    other, _ = build(1, seed=1)
    assert load_checkpoint(path, other)[0] == 2
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])
