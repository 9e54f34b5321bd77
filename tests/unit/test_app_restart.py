"""A run that goes on by itself: which folder it takes, which checkpoint, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from vocab_parallel import app
from vocab_parallel.app import config as configs
from vocab_parallel.app.config import Config, ParallelConfig
from vocab_parallel.app.hosts.folder import FolderHost, save_whole
from vocab_parallel.app.hosts.stored import StoredHost
from vocab_parallel.app.job import join
from vocab_parallel.app.restart import find_place
from vocab_parallel.app.runlog import read_metrics
from vocab_parallel.checkpoint import latest_checkpoint
from vocab_parallel.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL = [str(ROOT / "configs" / "smoke.yaml"), "data.max_bytes=60000", "model.dim=8", "model.layers=1",
         "model.context=16", "train.steps=6", "train.warmup=2", "train.validation_sequences=2",
         "train.validation_every=0",
         "train.checkpoint_every=2", "oracle.every=0", "oracle.gradient_every=0", "generate.max_tokens=1"]  # fmt: skip
EXACT = ("step", "loss", "validation_loss", "gradient_norm", "learning_rate")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that came to its end: checkpoints of steps 4 and 6; beside it the lines that each save has found."""
    place, lines, true_save = tmp_path_factory.mktemp("restart"), [], StoredHost.save

    def save(host: Any, folder: Path, step: int, *args: Any, **options: Any) -> None:
        lines.append([step, len(read_metrics(folder.parent))])
        true_save(host, folder, step, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredHost, "save", save)
        assert start(place / "run", place) == 0
    (place / "lines.json").write_text(json.dumps(lines))
    names = sorted(path.name for path in (place / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]
    return place / "run"


def start(run: Path, place: Path, *words: str) -> int:
    return app.main(["train", *SMALL, f"data.cache={place / 'cache'}", f"run={run}", *words])


def copy(whole: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    return run


def exact(run: Path) -> list[list[Any]]:
    return [[row[key] for key in EXACT] for row in read_metrics(run)]


def test_a_run_that_has_ended_only_writes_its_end_again(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(whole, tmp_path)
    assert start(run, whole.parent) == 0
    assert f"resuming at step 7: {run}" in capsys.readouterr().out
    assert exact(run) == exact(whole) and (run / "summary.json").is_file()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped byte in a tensor's file": lambda p: flip(p / "__0_0.distcp", 900),
    "a flipped byte in the list of tensors": lambda p: flip(p / ".metadata", 40),
    "a file cut short": lambda p: (p / "__0_0.distcp").write_bytes((p / "__0_0.distcp").read_bytes()[:1000]),
    "a missing file": lambda p: (p / "manifest.json").unlink(),
    "no state": lambda p: (p / "state.json").unlink(),
    "no list of tensors": lambda p: (p / ".metadata").unlink(),
    "a state that is no JSON": lambda p: (p / "state.json").write_text("{"),
    "another number in the state": lambda p: edit(p / "state.json", '"step": 6', '"step": 5'),
    "another value in the state": lambda p: edit(p / "state.json", '"vocabulary": "bytes"', '"vocabulary": "bytez"'),
}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 8
    path.write_bytes(content)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, text[:2000]
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_of_every_kind_is_set_aside_aloud_and_the_checkpoint_before_is_taken(
    what: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(whole, tmp_path)
    checkpoint = run / "checkpoints" / "step-00000006"
    DAMAGE[what](checkpoint)
    left = contents(checkpoint)
    with join(ParallelConfig(device="cpu")) as job:
        config = load(whole, f"run={run}")
        assert find_place(config, job) == (run, run / "checkpoints" / "step-00000004")
        assert "step-00000006 is damaged and is now step-00000006.damaged: " in capsys.readouterr().out
        assert contents(run / "checkpoints" / "step-00000006.damaged") == left and not checkpoint.exists()
        find_place(config, job)
        assert capsys.readouterr().out == ""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(whole: Path, *words: str) -> Config:
    return configs.load(SMALL[0], [*SMALL[1:], f"data.cache={whole.parent / 'cache'}", *words])


def test_a_run_whose_newest_checkpoint_is_damaged_ends_with_the_same_bits(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(whole, tmp_path)
    flip(run / "checkpoints" / "step-00000006" / "__0_0.distcp", 900)
    assert start(run, whole.parent) == 0
    assert f"resuming at step 5: {run}" in capsys.readouterr().out and exact(run) == exact(whole)
    newest = latest_checkpoint(run / "checkpoints", verify=True)
    assert newest is not None and newest.name == "step-00000006"


def test_where_every_checkpoint_is_damaged_nothing_is_begun_over_them(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(whole, tmp_path)
    for step in (4, 6):
        flip(run / "checkpoints" / f"step-{step:08d}" / "__0_0.distcp", 900)
    before = exact(run)
    for _ in range(2):  # the second time they have their new names already
        assert start(run, whole.parent) == 2
        error = capsys.readouterr().err
        assert "holds no whole checkpoint, only step-00000004.damaged, step-00000006.damaged" in error
        assert f"run={run}-2" in error
    assert exact(run) == before


def test_an_explicit_resume_of_a_damaged_checkpoint_is_refused_with_the_command(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(whole, tmp_path)
    flip(run / "checkpoints" / "step-00000006" / "__0_0.distcp", 900)
    assert app.main(["train", str(run)]) == 2
    error = capsys.readouterr().err
    assert "step-00000006 is damaged: __0_0.distcp has sha256" in error and "mv " in error
    flip(run / "checkpoints" / "step-00000006" / "__0_0.distcp", 900)  # back
    DAMAGE["another value in the state"](run / "checkpoints" / "step-00000006")
    assert app.main(["train", str(run)]) == 2
    error = capsys.readouterr().err
    assert "step-00000006 is damaged: state.json is not as it was saved" in error and "mv " in error


def test_another_configuration_is_refused_by_its_key_and_another_place_is_not(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(whole, tmp_path)
    config = (run / "config.yaml").read_text()
    assert start(run, whole.parent, "train.lr=0.5", "model.layers=2") == 2
    error = capsys.readouterr().err
    assert "model.layers=1 there, 2 here; train.lr=0.01 there, 0.5 here" in error
    assert f"python -m vocab_parallel train {run} model.layers=2" in error
    assert (run / "config.yaml").read_text() == config and exact(run) == exact(whole)
    moved = run.rename(tmp_path / "moved")
    words = [f"run={moved}", "parallel.timeout_s=50", f"runs={tmp_path}", "name=other", "data.cache=elsewhere"]
    with join(ParallelConfig(device="cpu")) as job:
        assert find_place(load(whole, *words), job)[1] == moved / "checkpoints" / "step-00000006"


def test_a_folder_that_is_no_runs_is_refused_and_what_a_start_left_is_not(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "papers"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert start(other, whole.parent) == 2 and "holds thesis.txt and no config.yaml" in capsys.readouterr().err
    assert start(other / "thesis.txt", whole.parent) == 2 and "is a file" in capsys.readouterr().err
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    left = tmp_path / "left"
    (left / "tensorboard").mkdir(parents=True)
    (left / "checkpoints" / ".step-00000002.partial").mkdir(parents=True)
    (left / "checkpoints" / ".step-00000002.partial" / "state.json").write_text("{}")
    (left / "metrics.jsonl").write_text('{"step": 1, "lo')
    (left / ".config.yaml.partial").write_text("name: r")
    assert start(left, whole.parent) == 0
    assert f"new run: {left}" in capsys.readouterr().out and exact(left) == exact(whole)
    assert not list((left / "checkpoints").glob(".*"))


def test_a_run_folder_goes_with_no_other_one(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["train", str(whole), f"run={whole}"]) == 2
    assert "expected a YAML file before it" in capsys.readouterr().err
    assert start(whole, whole.parent, f"train.resume={whole}") == 2
    assert "run: expected null with train.resume" in capsys.readouterr().err


def test_the_line_of_a_saved_step_is_written_before_its_checkpoint(whole: Path) -> None:
    assert json.loads((whole.parent / "lines.json").read_text()) == [[2, 2], [4, 4], [6, 6]]


def place_on_ranks(rank: int, words: list[str]) -> tuple[str | None, str]:
    with join(ParallelConfig(device="cpu")) as job:
        latest = find_place(configs.load(SMALL[0], [*SMALL[1:], *words]), job)[1]
        try:
            find_place(configs.load(SMALL[0], [*SMALL[1:], *words, "model.layers=2"]), job)
        except ConfigError as error:
            return None if latest is None else latest.name, str(error)
    return None, ""


def test_every_rank_takes_the_same_checkpoint_though_each_reads_other_files_and_hears_of_a_refusal(
    whole: Path, tmp_path: Path
) -> None:
    run = copy(whole, tmp_path)
    flip(run / "checkpoints" / "step-00000006" / "__0_0.distcp", 900)
    found = run_ranks(place_on_ranks, 3, [f"run={run}", f"data.cache={whole.parent / 'cache'}"])
    assert [name for name, _ in found] == ["step-00000004"] * 3
    assert all("model.layers=1 there, 2 here" in error for _, error in found)
    assert (run / "checkpoints" / "step-00000006.damaged").is_dir()


def test_a_hosts_own_files_are_compared_with_their_sizes(tmp_path: Path) -> None:
    def write(place: Path) -> None:
        (place / "x.pt").write_bytes(b"12345")

    with join(ParallelConfig(device="cpu")) as job:
        save_whole(job, tmp_path, 3, write, about={"host": "deepspeed"}, extra={}, keep=2)
    [checkpoint] = tmp_path.iterdir()
    assert FolderHost.latest(tmp_path) == checkpoint and FolderHost.is_whole(checkpoint)
    assert FolderHost.damage(checkpoint) == []
    (checkpoint / "x.pt").write_bytes(b"123")
    assert FolderHost.damage(checkpoint) == ["x.pt is missing or has another size than 5 bytes"]
    state = json.loads((checkpoint / "host.json").read_text())
    for files in ({"../../x": 5}, ["x.pt"]):
        (checkpoint / "host.json").write_text(json.dumps({**state, "files": files}))
        assert FolderHost.damage(checkpoint) == ["host.json lists no files of its own"]
    (checkpoint / "host.json").write_text(json.dumps({"step": 3}))
    assert "is damaged" in FolderHost.damage(checkpoint)[0]
