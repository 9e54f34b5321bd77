"""The command `migrate`: checkpoints, runs and Hugging Face directories in, the same kind out, checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.byte_tokenizers import COUNT, write_merged_bytes
from tests.multirank.migration_cases import whole
from tests.unit.test_migrating import contents, same_bits, stored
from vocab_parallel.app import main, migrate
from vocab_parallel.app.config import Config, DataConfig, load
from vocab_parallel.app.runlog import read_metrics
from vocab_parallel.app.vocabulary import open_vocabulary
from vocab_parallel.checkpoint import files, open_checkpoint
from vocab_parallel.vocabulary.formats import read_vocabulary
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap

BYTES = 259


def tensors() -> dict[str, Tensor]:
    return {
        "model.embedding.weight": whole(BYTES, 8),
        "model.trunk.weight": whole(8, 8, seed=1),
        "optimizer.embedding.weight.exp_avg": whole(BYTES, 8, seed=2),
        "optimizer.embedding.weight.step": torch.tensor(7.0),
    }


def checkpoint(folder: Path) -> Path:
    """Of the app's bytes, with their table."""
    ties = {"head.weight": "embedding.weight"}
    return stored(
        folder, tensors(), vocab=BYTES, ties=ties, identity=open_vocabulary("bytes").identity, manifest=True
    )  # fmt: skip


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(dataclasses.replace(Config(), data=DataConfig(vocab="bytes")).to_yaml())
    checkpoint(folder / "checkpoints" / "step-00000007")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 5.0}) + "\n" for step in range(1, 10))
    )
    Manifest.read(folder / "checkpoints" / "step-00000007").write(folder)
    return folder


def command(*words: str | Path) -> int:
    return main(["migrate", *map(str, words)])


def expected(old: Tensor, vocab_map: VocabMap, *, means: bool) -> Tensor:
    """New rows of weights are means of two bytes' rows, those of moments zero."""
    rows = []
    for new_id, old_id in enumerate(vocab_map.new_to_old.tolist()):
        if old_id >= 0:
            rows.append(old[old_id])
        else:
            rows.append(old[list(vocab_map.sources[new_id])].double().mean(0).float() if means else torch.zeros(8))
    return torch.stack(rows)


@pytest.mark.parametrize("shuffled", [False, True], ids=["appended", "shuffled"])
def test_a_checkpoint_gets_another_tokenizers_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shuffled: bool
) -> None:
    source, new = checkpoint(tmp_path / "old"), write_merged_bytes(tmp_path / "tokenizer", shuffled=shuffled)
    target, mapping = tmp_path / "new", tmp_path / "map.json"
    assert command(source, target, "--old-vocab", "bytes", "--new-vocab", new, "--save-map", mapping, "--tp", "3") == 0
    text = capsys.readouterr().out
    identity, vocab_map = read_vocabulary(new), VocabMap.read(mapping)
    assert vocab_map.new_size == BYTES + COUNT == identity.size and vocab_map.kept == BYTES
    assert len(vocab_map.sources) == COUNT and all(len(parts) == 2 for parts in vocab_map.sources.values())
    before, after = tensors(), contents(target)
    for key, means in (("model.embedding.weight", True), ("optimizer.embedding.weight.exp_avg", False)):
        assert same_bits(after[key], expected(before[key], vocab_map, means=means))
    assert float(after["optimizer.embedding.weight.step"]) == 7
    found = open_checkpoint(target)
    assert found.state["extra"]["vocabulary_sha256"] == identity.sha256 == open_vocabulary(str(new)).sha256
    assert found.state["layout"]["tp_size"] == 3
    assert sorted(path.name for path in (target / "assets").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert "ok   raw logits of model.embedding.weight: 259 kept ids give the same on 4 hidden rows" in text
    assert "info model.embedding.weight: new rows take" in text and f"wrote {target}" in text
    assert ("259 stay at their id" in text) != shuffled
    report = json.loads((tmp_path / "new.migration.json").read_text())
    assert report["conformance"]["passed"] and report["migration"]["new"] == COUNT
    names = {check["name"] for check in report["conformance"]["checks"]}
    assert {"aliases", "optimizer ownership", "shard ranges", "steps", "other tensors"} < names


def test_the_old_vocabulary_is_the_checkpoints_own_unless_given(tmp_path: Path) -> None:
    source, new = checkpoint(tmp_path / "old"), write_merged_bytes(tmp_path / "tokenizer")
    assert command(source, tmp_path / "new", "--new-vocab", new, "--init", "mean") == 0
    assert command(source, tmp_path / "given", "--old-vocab", "bytes", "--new-vocab", new, "--init", "mean") == 0
    a, b = contents(tmp_path / "new"), contents(tmp_path / "given")
    assert all(same_bits(a[key], b[key]) for key in b)


def test_a_dry_run_names_what_is_new_with_its_parts_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, new = run_folder(tmp_path / "run"), write_merged_bytes(tmp_path / "tokenizer")
    before = sorted(tmp_path.rglob("*"))
    assert command(source, tmp_path / "new", "--new-vocab", new, "--dry-run") == 0
    assert sorted(tmp_path.rglob("*")) == before
    text = capsys.readouterr().out
    assert "64 are new: 259 ('ad') from 100 ('a') + 103 ('d')" in text, text
    assert "table embedding.weight: model.embedding.weight with exp_avg" in text
    assert "bytes of tensors" in text and "was not written" in text


def test_a_run_goes_on_with_the_new_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, new = run_folder(tmp_path / "run"), write_merged_bytes(tmp_path / "tokenizer", shuffled=True)
    target = tmp_path / "new"
    assert command(source, target, "--new-vocab", new) == 0
    assert f"python -m vocab_parallel train {target}" in capsys.readouterr().out
    assert load(target) == dataclasses.replace(load(source), data=DataConfig(vocab=str(new.resolve())))
    assert [row["step"] for row in read_metrics(target)] == list(range(1, 8))
    latest = target / "checkpoints" / "step-00000007"
    open_checkpoint(latest).verify()
    sha256 = open_vocabulary(str(new)).sha256
    assert open_checkpoint(latest).state["extra"]["vocabulary_sha256"] == sha256
    for place in (target, latest):
        assert Manifest.read(place).vocabulary.ordered_table_sha256 == sha256
    assert json.loads((target / "migration.json").read_text())["conformance"]["passed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run", "tokenizer"]


def test_a_mapping_file_and_rows_appended_without_a_tokenizer(tmp_path: Path) -> None:
    source, before = checkpoint(tmp_path / "old"), tensors()["model.embedding.weight"]
    assert command(source, tmp_path / "longer", "--append", "5", "--init", "copy:259=1,260=1,261=2,262=2,263=3") == 0
    after = contents(tmp_path / "longer")["model.embedding.weight"]
    assert same_bits(after[:BYTES], before) and same_bits(after[BYTES:], before[[1, 1, 2, 2, 3]])
    VocabMap.permutation(torch.arange(BYTES).flip(0)).write(tmp_path / "map.json")
    assert command(source, tmp_path / "turned", "--map", tmp_path / "map.json") == 0
    assert same_bits(contents(tmp_path / "turned")["model.embedding.weight"], before.flip(0))


def hugging_face(folder: Path, *, tied: bool) -> dict[str, Tensor]:
    from safetensors.torch import save_file

    write_merged_bytes(folder)
    held = {"model.embed_tokens.weight": whole(BYTES + COUNT, 8), "model.norm.weight": whole(8, seed=1)}
    if not tied:
        held["lm_head.weight"] = whole(BYTES + COUNT, 8, seed=2)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": BYTES + COUNT,
              "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return held


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_hugging_face_directory_stays_one(tmp_path: Path, tied: bool, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    before = hugging_face(tmp_path / "old", tied=tied)
    new = write_merged_bytes(tmp_path / "tokenizer", shuffled=True)
    words = (tmp_path / "old", tmp_path / "new", "--new-vocab", new)
    assert command(*words, "--dry-run") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "tokenizer"]
    assert "0 are new" in (text := capsys.readouterr().out) and "table model.embed_tokens.weight" in text
    assert command(*words) == 0
    after = load_file(tmp_path / "new" / "model.safetensors")
    assert set(after) == set(before)
    old_ids, new_ids = (read_vocabulary(tmp_path / name).tokens for name in ("old", "tokenizer"))
    places = [old_ids.index(token) for token in new_ids]
    for key, value in before.items():
        assert same_bits(after[key], value if "norm" in key else value[places]), key
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (new_ids.index(b"<s>"), new_ids.index(b"</s>"))
    carried = (tmp_path / "new" / "tokenizer.json").read_bytes()
    assert carried == (new / "tokenizer.json").read_bytes() != (tmp_path / "old" / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "new" / "migration.json").read_text())["conformance"]["passed"]


def test_a_hugging_face_directory_is_refused_by_its_own_name_and_the_same_in_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hugging_face(source := tmp_path / "old", tied=True)
    other = write_merged_bytes(tmp_path / "other", shuffled=True)
    VocabMap.append(7, 2).write(tmp_path / "map.json")
    before, new = sorted(tmp_path.rglob("*")), tmp_path / "new"
    for words, found in {
        ("--new-vocab", source): "nothing to migrate",
        ("--new-vocab", source, "--old-vocab", other): f"{source} has the vocabulary",
        ("--map", tmp_path / "map.json"): f"from 7 old ids, {source} has 323 rows",
        ("--append", "2", "--init", "copy:1=0"): "no row is named for the new ids",
        ("--new-vocab", "bytes"): "64 of 323 old tokens are not in the new vocabulary of 259 ids",
    }.items():
        texts = {refused(capsys, source, new, *words, *dry) for dry in ([], ["--dry-run"])}
        assert len(texts) == 1 and found in (text := texts.pop()) and ".partial" not in text and "reshard" not in text
    assert sorted(tmp_path.rglob("*")) == before


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert command(*words) == 2
    return capsys.readouterr().err


def test_refusals_say_what_there_is_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run = checkpoint(tmp_path / "old"), run_folder(tmp_path / "run")
    new, merged = tmp_path / "new", write_merged_bytes(tmp_path / "tokenizer")
    foreign = tmp_path / "foreign" / "checkpoints" / "step-00000003"
    foreign.mkdir(parents=True)
    (foreign / "host.json").touch()
    (tmp_path / "foreign" / "config.yaml").touch()
    before = sorted(tmp_path.rglob("*"))
    assert "python -m vocab_parallel convert" in refused(capsys, tmp_path / "foreign", new, "--append", "3")
    assert "nothing to migrate" in refused(capsys, source, new, "--append", "0")
    assert "--new-vocab PATH" in refused(capsys, source, new)
    assert "--append N" in refused(capsys, source, new, "--append", "3", "--map", "x")
    assert "is none of: a checkpoint" in refused(capsys, tmp_path, new, "--append", "3")
    assert "it needs the new tokenizer" in refused(capsys, run, new, "--append", "3")
    assert "no such file" in refused(capsys, source, new, "--new-vocab", tmp_path / "gone")
    assert "none of: zeros" in refused(capsys, source, new, "--append", "3", "--init", "luck")
    assert "nothing to migrate" in refused(capsys, source, new, "--new-vocab", "bytes")
    assert f"{merged} exists" in refused(capsys, source, merged, "--append", "3")
    text = refused(capsys, source, new, "--old-vocab", merged, "--new-vocab", "bytes", "--allow-drop")
    assert "323 old ids" in text and "259 rows" in text and f"{source} <longer> --append 64" in text
    assert sorted(tmp_path.rglob("*")) == before


def test_a_migration_that_lost_something_ends_with_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, true = checkpoint(tmp_path / "old"), files.StoredTensors.rows_of

    def one_bit_off(self: files.StoredTensors, key: str, ids: Tensor) -> Tensor:
        rows = true(self, key, ids)
        if self.path == source and key == "model.embedding.weight" and len(ids) > 1:
            rows[0, 0] += writing[0]
        return rows

    writing = [1.0]
    monkeypatch.setattr(files.StoredTensors, "rows_of", one_bit_off)
    checked = migrate.check_migration
    monkeypatch.setattr(migrate, "check_migration", lambda *args: (writing.__setitem__(0, 0.0), checked(*args))[1])
    assert command(source, tmp_path / "new", "--append", "3", "--init", "zeros") == 1
    text = capsys.readouterr().out
    assert "FAIL rows of model.embedding.weight: 2 of 259 kept rows have other bits" in text
    assert f"do not use {tmp_path / 'new'}" in text
    assert not json.loads((tmp_path / "new.migration.json").read_text())["conformance"]["passed"]
