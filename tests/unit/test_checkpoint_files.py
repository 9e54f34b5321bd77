"""Files of checkpoints in one process: rows in blocks, damage and malice found, folders, other layouts."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import tracemalloc
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load

from vocab_parallel import app
from vocab_parallel.checkpoint import latest_checkpoint, open_checkpoint, placing, read_state, rows
from vocab_parallel.checkpoint.folders import checkpoints, prune
from vocab_parallel.checkpoint.placing import Turn, open_aside
from vocab_parallel.checkpoint.resharding import reshard_checkpoint
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import commit, make_state, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.row_states import is_row_state

V, D = 3000, 8
LAYOUT = {"vocab_size": V, "padded_size": 3072, "tp_size": 2}
TRUNK = torch.randn(50, 30, generator=torch.Generator().manual_seed(1)).t()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BLOCK_BYTES", 100 * D * 4)


def table() -> Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0))


def write(folder: Path, step: int = 3, *, cut: int = 1700, extra: Any = None) -> Path:
    """A checkpoint of two ranks."""
    whole = table() + step
    parts = [
        {"model.e": Rows.of(whole[:cut], 0, V), "model.t": TRUNK, "optimizer.e.step": torch.tensor(float(step))},
        {"model.e": Rows.of(whole[cut:], cut, V), "model.t": TRUNK},
    ]
    tensors = {"model.e": whole, "model.t": TRUNK, "optimizer.e.step": torch.tensor(float(step))}
    state = make_state(step, tensors, layout=LAYOUT, tables=["e"], extra=extra)
    assets = {"assets/config.json": b"{}"}
    return write_checkpoint(folder / f"step-{step:08d}", parts, state=state, assets=assets)


def test_rows_come_back_by_number_in_any_order_and_in_any_run(tmp_path: Path) -> None:
    stored, whole = open_checkpoint(write(tmp_path)), table() + 3
    stored.verify()
    assert torch.equal(stored.read("model.e"), whole) and torch.equal(stored.read("model.t"), TRUNK)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:700]
    assert torch.equal(stored.rows_of("model.e", ids), whole[ids])
    assert torch.equal(stored.read("model.e", 1690, 1711), whole[1690:1711])
    assert stored.read("model.e", 5, 5).shape == (0, D) and stored.read("optimizer.e.step").item() == 3.0
    assert len(stored.pieces["model.e"]) == 17 + 13, "blocks of 100 rows"
    with pytest.raises(CheckpointLayoutError, match=r"3000 rows, asked for 3000"):
        stored.rows_of("model.e", torch.tensor([V]))
    with pytest.raises(CheckpointLayoutError, match=r"holds no model\.other"):
        stored.read("model.other")


def test_rows_that_are_made_take_one_block_at_a_time(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def make(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return table()[start:stop] * 2

    made = Rows.made((V, D), torch.float32, 0, V, make)
    state = make_state(1, {"model.e": table()}, layout=LAYOUT, tables=["e"])
    path = write_checkpoint(tmp_path / "step-00000001", [{"model.e": made}], state=state)
    assert asked == [(at, min(at + 100, V)) for at in range(0, V, 100)]
    assert torch.equal(open_checkpoint(path).read("model.e", 90, 110), table()[90:110] * 2)
    with pytest.raises(NotImplementedError, match="only described"):
        made + 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_any_reader_of_dcp_finds_plain_tensors(tmp_path: Path) -> None:
    path = write(tmp_path)
    state = {"model.e": torch.full((V, D), torch.nan), "model.t": torch.zeros(30, 50)}
    load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["model.e"], table() + 3) and torch.equal(state["model.t"], TRUNK)


def test_the_same_content_gives_the_same_bytes_wherever_it_is_written(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a"), write(tmp_path / "b" / "c")
    assert read_state(one) == read_state(two)
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in one.iterdir() if path.is_file())


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch " + os.environ["VOCAB_PARALLEL_TEST_TRACE"],))


def global_named(module: str, name: str) -> bytes:
    """A pickle that calls ``module.name`` with the command, by the opcode that takes dotted names."""
    text = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)]
    command = f"touch {os.environ['VOCAB_PARALLEL_TEST_TRACE']}".encode()
    return b"\x80\x04" + text[0] + text[1] + b"\x93\x8c" + bytes([len(command)]) + command + b"\x85R."


def with_attribute(kind: type, name: str, value: type) -> bytes:
    """A pickle that sets an attribute of a class that it may name."""

    def named(one: type) -> bytes:
        return b"c" + f"{one.__module__}\n{one.__qualname__}\n".encode()

    return b"\x80\x02" + named(kind) + b"N}U" + bytes([len(name)]) + name.encode() + named(value) + b"s\x86b."


def changed(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    """The metadata with something in it changed, as pickle."""

    def apply(data: bytes) -> bytes:
        found = pickle.loads(data)
        change(found)
        return pickle.dumps(found)

    return apply


def place_at(name: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    return change


def resize(*size: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["model.e"].size = torch.Size(size) if min(size) >= 0 else size

    return change


def move(offset: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).offset = offset

    return change


def drop_a_block(metadata: Any) -> None:
    at = next(index for index in metadata.storage_data if index.fqn == "model.e" and index.offset[0] == 200)
    del metadata.storage_data[at]


METADATA: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a call": (lambda data: pickle.dumps(Malicious()), "posix.system"),
    "a dotted name of an allowed module": (
        lambda data: global_named("torch.distributed.checkpoint.metadata", "os.system"), "os.system"),
    "a global of an allowed class": (
        lambda data: global_named("torch.distributed.checkpoint.filesystem", "os.system"), "os.system"),
    "a module that torch imports": (lambda data: global_named("torch.utils.model_zoo", "os.system"), "os.system"),
    "a builtin": (lambda data: global_named("builtins", "eval"), "eval"),
    "a change of a class": (lambda data: with_attribute(MetadataIndex, "__hash__", OrderedDict), "changes the classes"),
    "a new attribute": (lambda data: with_attribute(ChunkStorageMetadata, "fqn", OrderedDict), "changes the classes"),
    "no pickle": (lambda data: b"nothing", "damaged"),
    "a file outside": (changed(place_at("../../outside")), "outside"),
    "an absolute file": (changed(place_at("/etc/passwd")), "/etc/passwd"),
    "an absurd size": (changed(resize(2**50, D)), "bytes, its blocks have"),
    "a negative size": (changed(resize(-3, D)), "-3"),
    "a block past the end": (changed(move(2**40)), "cut off"),
    "a negative offset": (changed(move(-5)), "-5"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(METADATA))
def test_metadata_that_lies_or_would_run_code_is_refused_and_nothing_runs(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOCAB_PARALLEL_TEST_TRACE", str(tmp_path / "ran"))
    (tmp_path / "outside").write_bytes(b"x" * 10**6)
    change, words = METADATA[what]
    file = write(tmp_path / "run") / ".metadata"
    file.write_bytes(change(file.read_bytes()))
    tracemalloc.start()
    with pytest.raises(CheckpointLayoutError) as caught:
        open_checkpoint(file.parent)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert words in str(caught.value) and not (tmp_path / "ran").exists()
    assert hash(MetadataIndex("a")) == hash(MetadataIndex("a")) and not hasattr(ChunkStorageMetadata, "fqn")
    assert peak < 50e6


def test_a_block_that_is_missing_is_noticed_when_its_rows_are_read(tmp_path: Path) -> None:
    file = write(tmp_path) / ".metadata"
    file.write_bytes(changed(drop_a_block)(file.read_bytes()))
    stored = open_checkpoint(file.parent)
    assert stored.read("model.e", 0, 200).shape == (200, D)
    with pytest.raises(CheckpointLayoutError, match="do not hold all rows"):
        stored.read("model.e", 150, 350)


STATES: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "is not JSON"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "a list": (b"[]", "format None"),
    "another format": ({"format": 1}, "format 1"),
    "no step": ({"step": None}, "step is"),
    "a step that is a truth value": ({"step": True}, "step holds"),
    "an endless step": ({"step": 10**300}, "step holds"),
    "a layout of nothing": ({"layout": {}}, "layout holds"),
    "a layout that does not add up": ({"layout": {**LAYOUT, "padded_size": V - 1}}, "layout holds"),
    "a scalar that is no number": ({"scalars": {"a": float("nan")}}, "NaN is not a JSON number"),
    "no files": ({"files": {}}, "files holds"),
    "tensors without a hash": ({"files": {".metadata": {"bytes": 3, "sha256": ""}}}, "__0_0.distcp has no hash"),
    "a layout of words": ({"layout": {"vocab_size": "9"}}, "layout holds"),
    "no ranks": ({"layout": {**LAYOUT, "tp_size": 0}}, "layout holds"),
    "a tie to a number": ({"ties": {"a": 3}}, "ties holds"),
    "a scalar that is text": ({"scalars": {"a": "3"}}, "scalars holds"),
    "files without hashes": ({"files": {".metadata": 3}}, "files holds"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(STATES))
def test_a_state_that_cannot_be_is_refused_in_words(what: str, tmp_path: Path) -> None:
    content, words = STATES[what]
    file = write(tmp_path) / "state.json"
    if not isinstance(content, bytes):
        content = json.dumps({**json.loads(file.read_bytes()), **content}).encode()
    file.write_bytes(content)
    with pytest.raises(CheckpointLayoutError, match=words):
        open_checkpoint(file.parent)


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.int8, torch.bool,
     torch.uint16, torch.complex64],
)  # fmt: skip
def test_a_table_of_any_dtype_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(2, (300, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    tensors = {"model.e": raw, "model.scale": raw[0, 0].clone(), "model.none": raw[:0]}
    state = make_state(1, tensors, layout={"vocab_size": 300, "padded_size": 300, "tp_size": 1}, tables=["e"])
    parts = [{**tensors, "model.e": Rows.of(raw[:200], 0, 300)}, {"model.e": Rows.of(raw[200:], 200, 300)}]
    stored = open_checkpoint(write_checkpoint(tmp_path / "step-00000001", parts, state=state))
    for key, value in tensors.items():
        found = stored.read(key)
        assert found.dtype == dtype and found.shape == value.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


def test_damage_that_is_met_in_reading_is_told_in_one_kind_of_error(tmp_path: Path) -> None:
    file = write(tmp_path) / "__0_0.distcp"
    data, kinds = file.read_bytes(), set()
    for at in range(0, len(data), 1499):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            open_checkpoint(file.parent).read("model.t")
            open_checkpoint(file.parent).read("model.e", 0, 1700)
        except Exception as error:
            kinds.add(type(error))
    assert kinds == {CheckpointLayoutError}


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointLayoutError, match=r"is no checkpoint.*mv"):
        write(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    (tmp_path / "step-00000003" / "thesis.tex").unlink()
    write(tmp_path, 3)  # an empty one may be


def test_names_of_files_never_leave_the_folder(tmp_path: Path) -> None:
    file = write(tmp_path) / "state.json"
    state = json.loads(file.read_bytes())
    state["files"]["../../secret"] = {"bytes": 6, "sha256": "0" * 64}
    file.write_text(json.dumps(state))
    with pytest.raises(CheckpointLayoutError, match="no name of a file in it"):
        open_checkpoint(file.parent).verify()


def test_verify_names_the_file_whose_byte_has_flipped(tmp_path: Path) -> None:
    path = write(tmp_path)
    for name in ("__1_0.distcp", "assets/config.json"):
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (path / name).write_bytes(data)
        with pytest.raises(CheckpointLayoutError, match=name):
            open_checkpoint(path).verify()


def test_the_newest_whole_checkpoint_is_found_whatever_a_crash_has_left(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "absent") is None
    for step in (2, 10, 100_000_000):
        write(tmp_path, step)
    (tmp_path / "step-00000011").mkdir()
    shutil.copytree(tmp_path / "step-00000010", tmp_path / ".step-00000012.partial")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100000000"
    os.rename(tmp_path / "step-100000000", tmp_path / ".step-100000000.old")  # the crash came between two renames
    assert latest_checkpoint(tmp_path) == tmp_path / ".step-100000000.old"
    assert latest_checkpoint(tmp_path, verify=True) == tmp_path / ".step-100000000.old"
    write(tmp_path, 100_000_000, extra={"again": True})
    assert read_state(tmp_path / "step-100000000")["extra"] == {"again": True}
    assert not (tmp_path / ".step-100000000.old").exists()
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-000000000020")  # no name of ours
    prune(tmp_path, 2, tmp_path / "step-100000000")
    left = {"step-00000010", "step-100000000", "step-00000011", "step-000000000020"}
    assert {path.name for path in tmp_path.iterdir()} == left
    with pytest.raises(CheckpointLayoutError, match=r"Did you mean .*step-100000000\?"):
        open_checkpoint(tmp_path)


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning_if_asked(tmp_path: Path) -> None:
    write(tmp_path, 1)
    newest = write(tmp_path, 2)
    data = bytearray((newest / "__0_0.distcp").read_bytes())
    data[300] ^= 1
    (newest / "__0_0.distcp").write_bytes(data)
    assert latest_checkpoint(tmp_path) == newest
    with pytest.warns(UserWarning, match=r"step-00000002 is damaged: __0_0\.distcp"):
        assert latest_checkpoint(tmp_path, verify=True) == tmp_path / "step-00000001"


def test_a_save_over_what_a_crash_left_between_two_renames_never_lacks_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = write(tmp_path, 1)
    os.rename(final, tmp_path / ".step-00000001.old")
    aside = open_aside(final)
    shutil.copytree(write(tmp_path / "other", 1, extra={"new": 1}), aside, dirs_exist_ok=True)
    real, seen = os.replace, []

    def watched(*args: Any) -> None:
        seen.append(len(checkpoints(tmp_path)))
        real(*args)

    monkeypatch.setattr(os, "replace", watched)
    commit(aside, final, read_state(aside))
    assert seen and all(count == 1 for count in seen)
    assert read_state(final)["extra"] == {"new": 1}


def test_a_removal_that_is_cut_short_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)

    def cut_short(folder: Path, **options: Any) -> None:
        for path in list(Path(folder).glob("__0_0.distcp")):
            path.unlink()

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    prune(tmp_path, 1, tmp_path / "step-00000003")
    assert checkpoints(tmp_path) == [tmp_path / "step-00000003"]
    monkeypatch.undo()
    prune(tmp_path, 1, tmp_path / "step-00000003")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_resharding_cuts_the_files_along_the_new_shards_and_keeps_every_bit(tmp_path: Path) -> None:
    source = write(tmp_path, extra={"a": 1})
    target = reshard_checkpoint(source, tmp_path / "resharded", 3, multiple_of=1)
    before, after = open_checkpoint(source), open_checkpoint(target)
    after.verify()
    assert after.tensors == before.tensors and after.state["extra"] == {"a": 1}
    assert all(torch.equal(before.read(key), after.read(key)) for key in before.tensors)
    assert after.state["layout"] == {"vocab_size": V, "padded_size": 3000, "tp_size": 3}
    for piece in after.pieces["model.e"]:
        rank = int(piece.file.split("_")[2])
        assert rank * 1000 <= piece.offsets[0] and piece.offsets[0] + piece.sizes[0] <= (rank + 1) * 1000
    assert (target / "assets" / "config.json").read_bytes() == b"{}"
    with pytest.raises(CheckpointLayoutError, match="exists"):
        reshard_checkpoint(source, target, 2)


def test_the_command_reshards_a_run_and_says_from_what_to_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run" / "checkpoints")
    words = ["reshard", str(tmp_path / "run"), str(tmp_path / "out"), "--tp", "4"]
    assert app.main(words) == 0
    text = capsys.readouterr().out
    assert "V=3000 padded to 3072 over 2 ranks" in text and "V=3000 padded to 3072 over 4 ranks" in text
    assert app.main(words) == 2 and "exists" in capsys.readouterr().err
    (tmp_path / "none" / "checkpoints").mkdir(parents=True)
    assert app.main(["reshard", str(tmp_path / "none"), str(tmp_path / "x"), "--tp", "4"]) == 2


@pytest.mark.parametrize(
    ("name", "value", "parameter", "of_rows"),
    [
        ("exp_avg", [9, 6], [9, 6], True),
        ("momentum_buffer", [9], [9], True),
        ("row_var", [9, 1], [9, 6], True),
        ("exp_avg_sq_row", [9], [9, 6], True),
        ("exp_avg_sq_col", [9], [9, 9], False),
        ("col_var", [1, 6], [1, 6], False),
        ("row_var", [1, 1], [1, 6], True),
        ("step", [], [9, 6], False),
        ("step", [1], [1, 6], False),
        ("master_weight", [9, 6], [9, 6], True),
    ],
)
def test_what_of_an_optimizers_state_has_a_row_a_token(
    name: str, value: list[int], parameter: list[int], of_rows: bool
) -> None:
    assert is_row_state(name, value, parameter) is of_rows


def test_no_warning_comes_from_reading(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_checkpoint(write(tmp_path)).verify()


def test_a_save_that_keeps_all_removes_what_a_crash_has_left_and_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000004.partial")
    prune(tmp_path, None, tmp_path / "step-00000003")
    assert {path.name for path in tmp_path.iterdir()} == {f"step-0000000{step}" for step in (1, 2, 3)}


def test_one_at_a_time_has_the_turn_to_write_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_PATIENCE_S", 0.2)
    first, second = Turn(), Turn()
    first.take(tmp_path / "run")
    with pytest.raises(CheckpointLayoutError, match="another process has been writing"):
        second.take(tmp_path / "run")
    second.give_back()
    assert first._descriptor is not None
    with subprocess.Popen(["sleep", "30"], pass_fds=[first._descriptor]) as worker:  # as forked workers of data loaders
        first.give_back()
        second.take(tmp_path / "run")
        worker.kill()
    second.give_back()
    second.give_back()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_without_locks_is_written_to_without_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(placing.fcntl, "flock", flock)
    first, second = Turn(), Turn()
    first.take(tmp_path)
    second.take(tmp_path)
    first.give_back()
    second.give_back()
