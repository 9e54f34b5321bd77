"""The command ``convert``: formats told by content, what it prints, what it refuses."""

from __future__ import annotations

import json
import resource

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.test_hugging_face_exchange import EMBEDDING, HEAD, V, model_tensors, same, tied_tensors, write_folder
from vocab_parallel import app
from vocab_parallel.app.convert import tell
from vocab_parallel.checkpoint.exchange.hugging_face import from_hugging_face
from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.errors import ConfigError

UNTIED = {"vocab_size": V, "tie_word_embeddings": False}


@pytest.fixture
def convert(capsys):
    """Runs the command; returns its status and what it printed."""

    def run(*words):
        status = app.main(["convert", *map(str, words)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_a_directory_becomes_a_checkpoint_and_comes_back(convert, tmp_path):
    tensors = tied_tensors([EMBEDDING, HEAD])
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": True})
    status, printed = convert(source, tmp_path / "ours", "--tp", 2)
    assert status == 0
    for words in ("found    ", "a Hugging Face directory", "no tokenizer", f"{EMBEDDING} [9, 4] float32, tied: {HEAD}",
                  "rows     9 real ones, files cut for TP 2", "a checkpoint of vocab_parallel", " MB in "):  # fmt: skip
        assert words in printed, words
    assert open_checkpoint(tmp_path / "ours").state["layout"]["tp_size"] == 2
    status, printed = convert(tmp_path / "ours", tmp_path / "back", "--tied", "both")
    assert status == 0 and "a Hugging Face directory" in printed
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(tensors) and all(same(back[name], tensor) for name, tensor in tensors.items())


def test_a_directory_becomes_another_by_way_of_a_checkpoint_that_does_not_stay(convert, tmp_path):
    tensors = model_tensors(rows=12)
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": 12, "tie_word_embeddings": False})
    status, printed = convert(
        source, tmp_path / "half", "--to", "hf", "--dtype", "bfloat16", "--vocab-size", V, "--max-shard", "150B"
    )
    assert status == 0 and "3 rows past" in printed and "vocab_size 12 is now 9" in printed
    assert json.loads((tmp_path / "half" / "config.json").read_text())["vocab_size"] == V
    files = sorted((tmp_path / "half").glob("*.safetensors"))
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) == 2 and same(held[HEAD], tensors[HEAD][:V].bfloat16())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "hf"]


@pytest.mark.parametrize("within", ["run/checkpoints", "run"])
def test_a_run_folder_means_its_newest_checkpoint(within, convert, tmp_path):
    source = write_folder(tmp_path / "hf", model_tensors(), UNTIED)
    for step in (5, 20):
        from_hugging_face(source, tmp_path / within / f"step-{step:08d}", step=step)
    status, printed = convert(tmp_path / "run", tmp_path / "back")
    assert status == 0 and "step-00000020: a checkpoint" in printed and "step 20" in printed


def test_other_formats_are_told_by_what_they_hold(tmp_path):
    held = {
        "megatron": [["metadata.json", ".metadata"], ["latest_checkpointed_iteration.txt"]],
        "deepspeed": [["latest"], ["mp_rank_00_model_states.pt"], ["zero_pp_rank_0_mp_rank_00_model_states.pt"]],
        "hf": [["config.json"], ["model.safetensors.index.json", "metadata.json"], ["model.safetensors", "latest"]],
    }
    for kind, folders in held.items():
        for at, names in enumerate(folders):
            folder = tmp_path / f"{kind}{at}"
            folder.mkdir()
            for name in names:
                (folder / name).write_text("")
            assert tell(folder) == (kind, folder), names
    for step in (9, 10):  # a run with host=deepspeed
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "latest").write_text("state")
    assert tell(tmp_path / "run") == ("deepspeed", tmp_path / "run" / "checkpoints" / "step-00000010")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"no format that is known here.*it holds notes\.txt"):
        tell(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="not there"):
        tell(tmp_path / "elsewhere")


def test_megatron_and_deepspeed_are_handed_on_with_their_options(convert, tmp_path, monkeypatch):
    calls = []
    hf = write_folder(tmp_path / "hf", model_tensors(), UNTIED)

    def reading(name):
        def call(source, target, **options):
            calls.append((name, source, options))
            return from_hugging_face(hf, target, tables=[EMBEDDING, HEAD]).path

        return call

    def writing(source, target, **options):
        calls.append(("to megatron", open_checkpoint(source).step, options))
        target.mkdir()
        (target / "file").write_bytes(b"12345")
        return target

    monkeypatch.setattr("vocab_parallel.app.convert.from_megatron", reading("megatron"))
    monkeypatch.setattr("vocab_parallel.app.convert.to_megatron", writing)
    monkeypatch.setattr("vocab_parallel.app.convert.from_deepspeed", reading("deepspeed"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "latest").write_text("tag")
    assert convert(tmp_path / "m", tmp_path / "a", "--tp", 2, "--vocab-size", 9, "--rename", "x=y")[0] == 0
    assert convert(tmp_path / "d", tmp_path / "b", "--tp", 4)[0] == 0
    status, printed = convert(tmp_path / "a", tmp_path / "c", "--to", "megatron", "--padded-size", 12)
    assert status == 0 and "0.0 MB" in printed
    assert convert(tmp_path / "d", tmp_path / "e", "--to", "hf")[0] == 0
    assert convert(tmp_path / "m", tmp_path / "f", "--weights-only")[0] == 0
    assert convert(tmp_path / "m", tmp_path / "g", "--to", "hf")[0] == 0
    options = {"multiple_of": 128, "optimizer": True}
    weights = {"tp_size": 1, "vocab_size": None, "rename": None, "multiple_of": 128, "optimizer": False}
    assert calls[-2:] == [("megatron", tmp_path / "m", weights)] * 2
    assert calls[:-2] == [
        ("megatron", tmp_path / "m", {"tp_size": 2, "vocab_size": 9, "rename": {"x": "y"}} | options),
        ("deepspeed", tmp_path / "d", {"tp_size": 4, "vocab_size": None, "multiple_of": 128}),
        ("to megatron", 0, {"padded_size": 12, "rename": None}),
        ("deepspeed", tmp_path / "d", {"tp_size": 1, "vocab_size": None, "multiple_of": 128}),
    ]
    assert set(load_file(tmp_path / "e" / "model.safetensors")) == set(model_tensors())


def test_what_has_no_meaning_or_does_not_fit_is_refused_with_status_2(convert, tmp_path):
    hf = write_folder(tmp_path / "hf", model_tensors(), UNTIED)
    ours = from_hugging_face(hf, tmp_path / "ours").path
    save_file({"x": torch.zeros(1)}, tmp_path / "taken")
    new = tmp_path / "new"
    refusals = [
        ((ours, new, "--to", "ours"), "python -m vocab_parallel reshard"),
        ((ours, new, "--tp", 2), "--tp has no meaning from a checkpoint of vocab_parallel to a Hugging Face directory"),
        ((hf, new, "--tied", "one"), "--tied has no meaning"),
        ((hf, new, "--padded-size", 12), "--padded-size has no meaning"),
        ((hf, new, "--rename", "a=b"), "--rename has no meaning"),
        ((ours, new, "--tables", "a"), "--tables has no meaning"),
        ((ours, new, "--to", "megatron", "--rename", "a"), "--rename a: expected NAME=NAME"),
        ((ours, new, "--to", "megatron", "--rename", "a=b", "--rename", "a=c"), "--rename a=c: expected NAME=NAME"),
        ((hf, hf, "--overwrite"), "nothing is replaced"),
        ((hf, tmp_path / "taken", "--overwrite"), "no folder"),
        ((hf, new, "--tp", 0), "--tp 0: expected at least 1"),
        ((ours, new, "--max-shard", "big"), "--max-shard big"),
        ((ours, new, "--max-shard", "0GB"), "--max-shard 0GB"),
        ((ours, new, "--tied", "both"), "tied=both"),
        ((ours, ours.parent / "hf"), "hf exists: give another name, or --overwrite"),
        ((ours, tmp_path / "taken"), "exists"),
        ((hf, new, "--tables", "nothing"), "no table nothing"),
        ((hf, new, "--vocab-size", 10), "9 rows"),
        ((tmp_path / "none", new), "not there"),
    ]
    before = sorted(tmp_path.iterdir())
    for words, message in refusals:
        status, printed = convert(*words)
        assert status == 2 and message in printed, (words, printed)
    assert sorted(tmp_path.iterdir()) == before


def test_overwrite_replaces_a_target_and_a_refusal_leaves_it(convert, tmp_path):
    hf = write_folder(tmp_path / "hf", model_tensors(), UNTIED)
    ours = tmp_path / "ours"
    assert convert(hf, ours, "--tables", f"{EMBEDDING}, {HEAD}")[0] == 0
    (ours / "mine").write_text("")
    assert convert(hf, ours, "--overwrite", "--vocab-size", 10)[0] == 2 and (ours / "mine").exists()
    assert convert(hf, ours, "--overwrite", "--vocab-size", 8)[0] == 0 and not (ours / "mine").exists()
    assert open_checkpoint(ours).state["layout"]["vocab_size"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


@pytest.mark.parametrize("to", ["ours", "hf", "megatron"])
def test_a_full_disk_is_a_refusal_that_leaves_nothing(to, convert, tmp_path):
    tensors = {"embedding.word_embeddings.weight": torch.randn(V, 4_000), "output_layer.weight": torch.randn(V, 4_000)}
    hf = write_folder(tmp_path / "hf", tensors, UNTIED)
    source = hf if to == "ours" else from_hugging_face(hf, tmp_path / "ours").path
    before, limits = sorted(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # Python ignores the signal
    try:
        status, printed = convert(source, tmp_path / "new", "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2 and "ConfigError" in printed and "File too large" in printed
    assert sorted(tmp_path.iterdir()) == before
