"""``python -m vocab_parallel release``: what it prints and what it returns."""

from __future__ import annotations

import argparse
import json
import os

import pytest

from tests.unit.releases import POLICY, checkpoint, tokenizer_file
from vocab_parallel.app import release
from vocab_parallel.checkpoint.release import open_current
from vocab_parallel.checkpoint.release.writing import remove
from vocab_parallel.errors import CheckpointLayoutError, ConfigError


def command(*words: object) -> int:
    parser = argparse.ArgumentParser()
    release.add_arguments(parser)
    return release.main(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints, and files beside it; its releases are removed at the end."""
    checkpoint(tmp_path / "run" / "checkpoints", seed=1)
    checkpoint(tmp_path / "run" / "checkpoints", seed=2, tied=False)
    tokenizer_file(tmp_path / "tokenizer.json")
    (tmp_path / "policy.json").write_text(json.dumps(POLICY))
    (tmp_path / "acceptance.json").write_text('{"corpus": "held-out", "max_loss": 1.5}')
    yield tmp_path
    for path in (tmp_path / "releases").iterdir() if (tmp_path / "releases").is_dir() else ():
        remove(path)


def promoted(run, *more: object) -> str:
    assert command("promote", run / "releases", run / "run" / "checkpoints" / "step-00000001", *more) == 0
    return open_current(run / "releases").id


def test_promote_prints_the_bundle_and_takes_the_latest_checkpoint_of_a_run(run, capsys):
    files = ("--tokenizer", run / "tokenizer.json", "--policy", run / "policy.json", "--acceptance",
             run / "acceptance.json")  # fmt: skip
    first = promoted(run, *files)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"bundle      {first}  11 files, ")
    assert "tie         head.weight is embedding.weight" in lines
    assert "tokenizer   tokenizer.json" in lines
    assert "policy      careful, sample" in lines
    assert lines[-1] == f"promoted; in use: {run}/releases/current -> {first}"
    assert command("promote", run / "releases", run / "run") == 0
    out = capsys.readouterr().out
    assert f"made after  {first}" in out and "tie         none" in out
    assert open_current(run / "releases").record.conformance["head"] == "model.head.weight"
    promoted(run, *files)
    assert "promoted again: the same content" in capsys.readouterr().out


def test_the_tokenizer_of_a_run_goes_into_the_bundle_and_is_asked_for_where_it_is_gone(run, capsys):
    config = run / "run" / "config.yaml"
    config.write_text(f"data:\n  vocab: {run / 'tokenizer.json'}\n")
    promoted(run)
    assert "tokenizer   tokenizer.json" in capsys.readouterr().out.splitlines()
    config.write_text("data:\n  vocab: bytes\n")
    promoted(run)
    assert "tokenizer   none" in capsys.readouterr().out.splitlines()
    config.write_text("data:\n  vocab: gone/tokenizer.json\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: data.vocab: .*gone/tokenizer\.json.*--tokenizer PATH"):
        promoted(run)


def test_rollback_verify_and_list_tell_what_is_in_use(run, capsys):
    first = promoted(run, "--policy", run / "policy.json")
    assert command("promote", run / "releases", run / "run") == 0
    second = open_current(run / "releases").id
    capsys.readouterr()
    assert command("list", run / "releases") == 0
    out = capsys.readouterr().out
    assert f"* {second} " in out and f"  {first} " in out and f"rollback goes to {first}" in out
    assert [line[2:18] for line in out.splitlines()[1:3]] == [first, second], "not in the order of their promotion"
    assert command("rollback", run / "releases") == 0
    assert f"rolled back from {second}; in use: {run}/releases/current -> {first}" in capsys.readouterr().out
    assert command("verify", run / "releases") == command("verify", run / "releases" / second) == 0
    assert "every file, gate and conformance test is as promoted" in capsys.readouterr().out
    assert command("list", run / "releases") == 0
    out = capsys.readouterr().out
    assert f"* {first}         7          9  " in out and "careful" in out and "no bundle to roll back to" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("  20")] == [
        "promote",
        "promote",
        "rollback",
    ]


def test_verify_and_list_show_a_bundle_that_is_not_whole(run, capsys):
    bundle = open_current(run / "releases").path if promoted(run) else None
    os.chmod(bundle, 0o755)
    os.chmod(bundle / "policy.json", 0o644)
    (bundle / "policy.json").write_text("null ")
    assert command("verify", run / "releases") == 1
    captured = capsys.readouterr()
    assert "policy.json has sha256" in captured.out or "policy.json has 5 bytes" in captured.out
    assert captured.err.endswith("releases: 1 fault\n")
    os.chmod(bundle / "bundle.json", 0o644)
    (bundle / "bundle.json").write_text("{")
    assert command("verify", run / "releases") == 1
    assert command("list", run / "releases") == 0
    assert f"* {bundle.name}  not whole" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (("promote", "releases", "nothing"), ConfigError, "neither a checkpoint nor a run folder.*convert"),
        (("promote", "releases", "run", "--policy", "nothing.json"), ConfigError, "there is no file"),
        (("promote", "releases", "run", "--policy", "beams.json"), ConfigError, "section `search` is no part"),
        (("promote", "releases", "run", "--policy", "far.json"), ConfigError, "9"),
        (("promote", "releases", "run", "--acceptance", "broken.json"), CheckpointLayoutError, "acceptance criteria"),
        (("promote", "releases", "run", "--tokenizer", "broken.json"), ConfigError, "not JSON"),
        (("promote", "releases", "run", "--tokenizer", "nothing"), CheckpointLayoutError, "holds no tokenizer"),
        (("promote", "policy.json", "run"), ConfigError, "policy.json: File exists"),
        (("rollback", "releases"), CheckpointLayoutError, "is no folder of releases"),
        (("verify", "run"), None, "no bundle is in use"),
    ],
)
def test_what_cannot_work_is_refused_with_both_sides(run, monkeypatch, capsys, words, error, text):
    monkeypatch.chdir(run)
    (run / "beams.json").write_text('{"transforms": [], "search": {"beams": 4}}')
    (run / "far.json").write_text('{"transforms": [{"name": "suppress", "token_ids": [9]}]}')
    (run / "broken.json").write_text("{")
    if error is None:
        assert command(*words) == 1
        assert text in capsys.readouterr().out
        return
    with pytest.raises(error, match=text):
        command(*words)


def test_a_part_alone_is_refused_on_the_command_line_too(run):
    promoted(run)
    assert command("promote", run / "releases", run / "run") == 0
    with pytest.raises(CheckpointLayoutError, match="policy alone is not rolled back"):
        command("rollback", run / "releases", "--only", "policy")
