"""Names and links in files from elsewhere lead nowhere: nothing outside is read or written, no pipe is waited for."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.unit.releases import checkpoint, tokenizer_file
from tests.untrusted.fuzz import SPARE, limit_memory
from tests.untrusted.kinds import KINDS
from vocab_parallel.app import report, runlog
from vocab_parallel.checkpoint.exchange.hugging_face_assets import assets_of
from vocab_parallel.checkpoint.exchange.megatron_files import find_distributed
from vocab_parallel.checkpoint.exchange.safetensors_files import open_safetensors
from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.release.history import History, locked
from vocab_parallel.checkpoint.release.releases import open_current, promote
from vocab_parallel.errors import CheckpointLayoutError, ConfigError, VocabParallelError
from vocab_parallel.integrations.deepspeed.zero_tag import find_tag

NAMES = ["../outside", "a/../../outside", "/etc/passwd", "", ".", "..", "a\0b", "\ud800", "x" * 300, "a/" * 3000 + "b",
         "link/x", "C:\\windows\\system.ini", "\\\\host\\share", "//etc/passwd", "/dev/zero"]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to work in, with a file and a folder outside of it, and a link to them in it."""
    (tmp_path / "outside").write_bytes(b"not to be read" * 1000)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_bytes(b"nor this")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "inner"


def _in_state(folder: Path, name: str) -> Any:
    path = checkpoint(folder)
    (path / "link").symlink_to(folder.parent / "elsewhere")
    state = json.loads((path / "state.json").read_text())
    state["files"][name] = {"bytes": 8, "sha256": "0" * 64}
    (path / "state.json").write_text(json.dumps(state))
    return open_checkpoint(path).verify()


def _in_metadata(folder: Path, name: str) -> Any:
    path = checkpoint(folder)
    (path / "link").symlink_to(folder.parent / "elsewhere")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return open_checkpoint(path)


def _in_index(folder: Path, name: str) -> Any:
    file = KINDS["an index of safetensors"].make(folder)
    file.write_text(json.dumps({"weight_map": {"e.weight": name, "b": name, "s": name}}))
    return open_safetensors(folder)


def _in_bundle(folder: Path, name: str) -> Any:
    file = KINDS["bundle.json"].make(folder)
    record = json.loads(file.read_text())
    record["files"][name] = [8, "0" * 64]
    file.write_text(json.dumps(record))
    return open_current(file.parent.parent)


def _in_latest(folder: Path, name: str) -> Any:
    (folder / "latest").write_text(name, encoding="utf-8", errors="surrogatepass")
    return find_tag(folder)


def _in_tracker(folder: Path, name: str) -> Any:
    (folder / "latest_checkpointed_iteration.txt").write_text(name, encoding="utf-8", errors="surrogatepass")
    return find_distributed(folder)


def _in_link(folder: Path, name: str) -> Any:
    if "\0" in name or not name or "\ud800" in name or len(name) > 255:
        raise CheckpointLayoutError("no link can lead there")
    (folder / "current").symlink_to(name)
    return open_current(folder)


PLACES: list[Callable[[Path, str], Any]] = [
    _in_state, _in_metadata, _in_index, _in_bundle, _in_latest, _in_tracker, _in_link]  # fmt: skip


@pytest.mark.parametrize("where", PLACES, ids=lambda one: one.__name__[1:])
@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:20])
def test_a_name_in_a_file_leads_to_no_file_outside(where: Callable[[Path, str], Any], name: str, place: Path) -> None:
    with pytest.raises(VocabParallelError) as caught:
        where(place, name)
    assert "sha256 " not in str(caught.value), "it was read"
    assert len(str(caught.value)) < 3000


def test_a_link_out_of_a_checkpoint_is_not_followed(place: Path) -> None:
    path = checkpoint(place / "run")
    for name in ("__0_0.distcp", "manifest.json"):
        shutil.move(path / name, place.parent / "elsewhere" / name)
        (path / name).symlink_to(place.parent / "elsewhere" / name)
        with pytest.raises(CheckpointLayoutError, match=r"is a link that leads out of"):
            open_checkpoint(path).verify()
        (path / name).unlink()
        shutil.move(place.parent / "elsewhere" / name, path / name)
    (path / "kept").mkdir()
    shutil.move(path / "__0_0.distcp", path / "kept")
    (path / "__0_0.distcp").symlink_to("kept/__0_0.distcp")
    open_checkpoint(path).verify()  # a link within


def test_files_beside_a_model_are_carried_along_from_its_folder_and_from_the_hubs_cache_only(place: Path) -> None:
    hub = place / "models--a" / "snapshots" / "1"
    hub.mkdir(parents=True)
    (place / "models--a" / "blobs").mkdir()
    (place / "models--a" / "blobs" / "ab").write_text("{}")
    (hub / "config.json").symlink_to("../../blobs/ab")
    (hub / "tokenizer_config.json").symlink_to(place.parent / "outside")
    found, notes = assets_of(hub)
    assert list(found) == ["assets/config.json"]
    assert notes == ["not carried along: tokenizer_config.json"]


def test_a_tokenizer_beside_a_checkpoint_that_it_does_not_list_is_no_part_of_a_release(place: Path) -> None:
    path = checkpoint(place / "run")
    (path / "assets").mkdir(exist_ok=True)
    (path / "assets" / "special_tokens_map.json").symlink_to(place.parent / "outside")
    bundle = promote(place / "releases", path)
    assert [name for name in bundle.record.files if name.startswith("tokenizer/")] == []


def _replace(file: Path, how: str) -> None:
    file.unlink()
    if how == "pipe":
        os.mkfifo(file)
    elif how == "folder":
        file.mkdir()
    else:
        file.symlink_to({"device": "/dev/zero", "nothing": "nowhere", "circle": file.name}[how])


WAYS = ("pipe", "folder", "device", "nothing", "circle")


def _read_what_is_no_file(rank: int, folder: str) -> dict[tuple[str, str], str]:
    limit_memory(SPARE)
    found = {}
    for at, (name, kind) in enumerate(KINDS.items()):
        place = Path(folder) / str(at) / "inner"
        place.mkdir(parents=True)
        file = kind.make(place)
        for how in WAYS:
            _replace(file, how)
            try:
                found[name, how] = f"loaded {kind.read(file)!r:.80}"
            except BaseException as error:
                found[name, how] = type(error).__name__
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
                file.touch()
    return found


@pytest.fixture(scope="module")
def no_files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    (found,) = run_ranks(_read_what_is_no_file, 1, str(tmp_path_factory.mktemp("none")), timeout=100.0)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_no_file_is_refused_and_nobody_waits_for_it(
    kind: str, how: str, no_files: dict[tuple[str, str], str]
) -> None:
    ours = {"CheckpointLayoutError", "VocabularyError", "ConfigError"}
    missing = {"FileNotFoundError", "OSError"} if how in ("nothing", "circle") else set()
    empty = (
        {"loaded []"}
        if (kind in ("metrics.jsonl", "history.jsonl") and how != "pipe") or kind == "metrics.jsonl"
        else set()
    )
    assert no_files[kind, how] in ours | missing | empty


def _run(folder: Path) -> Path:
    """A run folder as far as a report needs it."""
    folder.mkdir()
    checkpoint(folder / "checkpoints").joinpath("manifest.json").rename(folder / "manifest.json")
    KINDS["metrics.jsonl"].make(folder)
    return folder


@pytest.mark.parametrize("name", [".metrics.jsonl.partial", ".config.yaml.partial", "metrics.jsonl", "config.yaml"])
def test_a_resumed_run_writes_through_no_link(name: str, place: Path) -> None:
    run = _run(place / "run")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(place.parent / "outside")
    before = (place.parent / "outside").read_bytes()
    runlog.write_whole(run / name.removeprefix(".").removesuffix(".partial"), "text")
    assert (place.parent / "outside").read_bytes() == before
    assert (run / name.removeprefix(".").removesuffix(".partial")).read_text() == "text"


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_run_whose_folder_is_a_link_elsewhere_is_not_resumed(name: str, place: Path) -> None:
    run = place / "run"
    run.mkdir()
    (run / name).symlink_to(place.parent / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{name} is a link to .*elsewhere"):
        runlog.RunLog(run, resume_step=1)
    assert [path.name for path in (place.parent / "elsewhere").iterdir()] == ["x"]


def test_a_report_replaces_a_link_and_runs_no_script_of_the_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(place / "run")
    (run / "report.html").symlink_to(place.parent / "outside")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["notes"] = {"corpus": {"unigram_entropy": 2.0}, "</pre><script>alert(1)</script>": "<b>"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    (run / "env.txt").write_bytes(b"\xff<script>alert(2)</script>")
    before = (place.parent / "outside").read_bytes()
    monkeypatch.setattr(report, "_svg", lambda draw: "<svg/>")
    page = report.write(run).read_text()
    assert "<script" not in page and "&lt;script" in page
    assert (place.parent / "outside").read_bytes() == before and not (run / "report.html").is_symlink()


@pytest.mark.parametrize("name", ["history.jsonl", ".lock"])
def test_releases_whose_log_or_lock_is_a_link_or_a_pipe_are_not_written_to(name: str, place: Path) -> None:
    releases = place / "releases"
    releases.mkdir()
    for make in (lambda path: path.symlink_to(place.parent / "made"), os.mkfifo):
        make(releases / name)
        with pytest.raises(CheckpointLayoutError, match=rf"{name} is a link, or no regular file"), locked(releases):
            pass
        (releases / name).unlink()
    assert not (place.parent / "made").exists()
    assert History(releases).stack == [] and tokenizer_file(place / "t.json").exists()
