"""What does not fit is refused on every rank before anything changes; what fails on one rank fails on all."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.batch import Attempt, assert_all_raise, attempt
from tests.multirank.checkpoint_cases import build, digest, train
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel.app.hosts import folder as hosts
from vocab_parallel.app.job import Job
from vocab_parallel.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    saving,
    store,
    writing,
)
from vocab_parallel.checkpoint.saver import AsyncSaver
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest

STEP = "step-00000003"
TOKENS = [f"t{at}" for at in range(29)]
OTHER = [*TOKENS[:-2], TOKENS[-1], TOKENS[-2]]


# what: (folder, arguments of build, arguments of load_checkpoint, words of the error)
Refusal = tuple[str, dict[str, Any], dict[str, Any], list[str]]
REFUSED: dict[str, Refusal] = {
    "a flipped byte": ("flipped", {}, {}, ["__0_0.distcp has sha256", "saved with", "start again"]),
    "a flipped byte of the metadata": ("flipped metadata", {}, {}, [".metadata"]),
    "a missing file": ("missing", {}, {}, ["__0_0.distcp is missing", "start again"]),
    "a file that was cut off": ("cut", {}, {}, ["bytes, saved with"]),
    "no state": ("stateless", {}, {}, ["not a whole checkpoint", "state.json"]),
    "an older format": ("format 1", {}, {}, ["format 1", "format 2"]),
    "another size": ("tied", {"vocab": 31, "padded": 36}, {}, ["29 ids", "31", "python -m vocab_parallel migrate"]),
    "another vocabulary": ("tied", {}, {"identity": OTHER}, ["vocabulary.ordered_table_sha256", "migrate"]),
    "another hash": ("tied", {}, {"vocabulary_sha256": "b" * 64}, ["bbbbbbbbbbbbbbbb", "vocab_parallel migrate"]),
    "tied into untied": ("tied", {"tied": False}, {}, ["saved tied", "embedding.weight", "head.weight", 'tie="untie"']),
    "untied into tied": ("untied", {}, {}, ["model.embedding.weight", "model.head.weight", "row 0", "Untie the model"]),
    "equal tables but other moments": ("equal", {}, {}, ["optimizer.", "without the optimizer"]),
    "another width": ("tied", {"width": 4}, {}, ["head.width is 6 saved, 4 here"]),
    "no bias here": ("tied", {"bias": False}, {}, ["bias"]),
    "another dtype": ("tied", {"dtype": torch.float64}, {}, ["float32", "float64"]),
    "weights only": ("weights", {}, {}, ["weights only", "AdamW", "optimizer=None"]),
    "another optimizer": ("tied", {"kind": "SGD"}, {}, ["momentum_buffer: not saved", "[29, 6]"]),
    "more states than saved": ("tied", {"kind": "amsgrad"}, {}, ["max_exp_avg_sq: not saved"]),
    "missing rows": ("rows", {}, {"verify": False}, ["do not hold all rows of model.embedding.weight"]),
    "an option that is not one": ("tied", {}, {"tie": "maybe"}, ["tie='maybe'", "untie"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one rank, and copies of them in which something is wrong."""
    root = tmp_path_factory.mktemp("refused")
    model, optimizer = build(True)
    train(model, optimizer, range(3))
    identity = VocabIdentity.of_tokens(TOKENS)
    save_checkpoint(root / "tied", model, optimizer, 3, identity=identity)
    save_checkpoint(root / "weights", model, None, 3)
    model, optimizer = build(False)
    train(model, optimizer, range(3))
    save_checkpoint(root / "untied", model, optimizer, 3)
    with torch.no_grad():
        model.head.weight.copy_(model.embedding.weight)
    save_checkpoint(root / "equal", model, optimizer, 3)
    copy = functools.partial(copied, root)
    copy("flipped", "__0_0.distcp", lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    copy("flipped metadata", ".metadata", lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:])
    copy("cut", "__0_0.distcp", lambda data: data[:-10])
    copy("format 1", "state.json", lambda data: json.dumps({**json.loads(data), "format": 1}).encode())
    copy("missing", "__0_0.distcp", None)
    copy("rows", ".metadata", fewer_rows)
    copy("stateless", "state.json", None)
    return root


def fewer_rows(data: bytes) -> bytes:
    metadata = pickle.loads(data)
    entry = metadata.state_dict_metadata["model.embedding.weight"]
    entry.chunks = [ChunkStorageMetadata(entry.chunks[0].offsets, torch.Size([20, 6]))]
    return pickle.dumps(metadata)


def copied(root: Path, name: str, file: str, change: Callable[[bytes], bytes] | None) -> None:
    shutil.copytree(root / "tied", root / name)
    path = root / name / STEP / file
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))


def refuse(rank: int, root: str, what: str) -> tuple[Attempt, bool]:
    """One refusal, and whether model and optimizer stayed as they were."""
    folder, made, options, _ = REFUSED[what]
    model, optimizer = build(**{"tied": True, **made})
    options = dict(options)
    if "identity" in options:
        identity = VocabIdentity.of_tokens(options.pop("identity"))
        options["manifest"] = Manifest.of(model, identity=identity)
    before = digest(model)
    how = attempt(lambda: load_checkpoint(Path(root) / folder / STEP, model, optimizer, **options))
    return how, digest(model) == before and not optimizer.state


@functools.cache
def refusals(root: Path) -> Batch:
    return Batch(refuse, [(str(root), what) for what in REFUSED])


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("what", list(REFUSED))
def test_it_is_refused_on_every_rank_with_both_sides_and_nothing_has_changed(place: Path, what: str, tp: int) -> None:
    found = refusals(place)(tp, str(place), what)
    assert_all_raise(what, [how for how, _ in found], ["CheckpointLayoutError"], [])
    missing = [word for word in REFUSED[what][3] if word not in found[0][0].message]
    assert not missing, f"{missing} not in: {found[0][0].message}"
    assert all(unchanged for _, unchanged in found)


def fail_to_write(rank: int, folder: str, bad: int, where: str, by_thread: bool) -> list[Any]:
    """A save in which one rank fails, after one that did not; then one more."""
    model, optimizer = build(True)
    train(model, optimizer, range(1))
    save_checkpoint(folder, model, optimizer, 1)
    target = {"data": (writing.BlockWriter, "write_data"), "commit": (writing.os, "replace"),
              "collect": (type(optimizer), "state")}[where]  # fmt: skip
    saved = getattr(*target, None)

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    def save() -> None:
        if by_thread:
            saver.save(folder, model, optimizer, 2)
            saver.wait()
        else:
            save_checkpoint(folder, model, optimizer, 2)

    with AsyncSaver(model.head.shard) as saver:
        if rank == bad and where == "collect":
            optimizer.state[model.trunk.weight]["name"] = "text"
        elif rank == bad:
            setattr(*target, full)
        try:
            how = attempt(save)
        finally:
            if where != "collect":
                setattr(*target, saved)
        left = sorted(os.listdir(folder)) if rank == 0 else []
        optimizer.state[model.trunk.weight].pop("name", None)
        again = attempt(save)
    return [how, left, again]


WRITES = [(bad, where, by_thread) for by_thread in (False, True)
          for bad, where in ((1, "data"), (0, "data"), (0, "commit"), (1, "collect"))]  # fmt: skip


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, str, bool]], tuple[Path, list[Any]]]:
    root = tmp_path_factory.mktemp("writes")
    cases = {case: (str(root / str(case)), *case) for case in WRITES}
    batch = Batch(fail_to_write, list(cases.values()))
    return lambda case: (Path(cases[case][0]), batch(3, *cases[case]))


@pytest.mark.parametrize("case", WRITES, ids=lambda case: "-".join(map(str, case)))
def test_one_ranks_failure_to_write_is_every_ranks_and_the_checkpoint_before_stays(
    writes: Any, case: tuple[int, str, bool]
) -> None:
    folder, found = writes(case)
    attempts = [how for how, _, _ in found]
    assert len({(how.kind, how.message) for how in attempts}) == 1 and attempts[0].kind is not None, attempts
    words = "is a str" if case[1] == "collect" else "No space left on device"
    assert words in attempts[0].message, attempts[0].message
    assert case[1] != "data" or f"by rank {case[0]} of the group" in attempts[0].message
    assert found[0][1] == ["step-00000001"], "nothing of the failed one is left"
    assert all(again.kind is None for _, _, again in found), found
    latest = latest_checkpoint(folder, verify=True)
    assert latest is not None and latest.name == "step-00000002"


def fail_to_read(rank: int, root: str, bad: int) -> list[Any]:
    """One rank whose disk cannot be read; one that passes another folder; then it works."""
    model, optimizer = build(True)
    before = digest(model)
    path = Path(root) / "tied" / STEP
    real = Path.open

    def broken(self: Path, *args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    if rank == bad:
        Path.open = broken  # type: ignore[method-assign,assignment]
    try:
        how = attempt(lambda: load_checkpoint(path, model, optimizer))
    finally:
        Path.open = real  # type: ignore[method-assign]
    unchanged = digest(model) == before and not optimizer.state
    disagree = attempt(lambda: save_checkpoint(Path(root) / "apart", model, optimizer, 4 + rank))
    model.head.shard.deferred_errors = model.embedding.shard.deferred_errors = True
    for _ in range(3):  # by then the ranks know the call, and would trust each other
        load_checkpoint(path, model, optimizer)
    with torch.no_grad():
        model.trunk.weight.fill_(5.0)
    with failing(store, "match", rank == bad):
        late = attempt(lambda: load_checkpoint(path, model, optimizer))
    unchanged = unchanged and bool((model.trunk.weight == 5.0).all())
    with failing(saving, "plan_part", rank == bad):
        plan = attempt(lambda: save_checkpoint(Path(root) / "apart", model, optimizer, 4))
    halves = attempt(lambda: load_checkpoint(path, model, optimizer if rank else None))
    alone = attempt(lambda: AsyncSaver().save(Path(root) / "apart", model, optimizer, 4))
    return [how, unchanged, disagree, late, plan, halves, alone]


@contextlib.contextmanager
def failing(module: Any, name: str, here: bool) -> Iterator[None]:
    """On one rank a function that finds its file gone."""

    def gone(*args: Any, **options: Any) -> Any:
        raise OSError("gone")

    real = getattr(module, name)
    setattr(module, name, gone if here else real)
    try:
        yield
    finally:
        setattr(module, name, real)


@pytest.fixture(scope="module")
def three(place: Path) -> Callable[..., list[Any]]:
    """One world of three ranks for what follows."""
    cases = [(fail_to_read, str(place), 0), (fail_to_read, str(place), 2),
             (save_files_of_a_host, str(place / "host"), 1)]  # fmt: skip
    batch = Batch(call, cases)
    return lambda *case: batch(3, *case)


def call(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    return fn(rank, *args)


def test_one_ranks_failure_to_read_is_every_ranks_and_ranks_that_disagree_hear_of_it(three: Any, place: Path) -> None:
    for bad in (0, 2):
        found = three(fail_to_read, str(place), bad)
        words = [["Input/output error", f"rank {bad}"], [], ["step-00000004", "step-00000006"],
                 ["gone", f"rank {bad}"], ["could not be begun", "gone"], ["no optimizer", "AdamW"],
                 ["this rank alone", "ranks [0, 1, 2]"]]  # fmt: skip
        assert all(one[1] for one in found), "unchanged"
        for at in (0, 2, 3, 4, 5, 6):
            assert len({one[at].message for one in found}) == 1, [one[at] for one in found]
            assert all(word in found[0][at].message for word in words[at]), found[0][at]
        assert {one[2].kind for one in found} == {one[5].kind for one in found} == {"LayoutMismatchError"}
    assert not list((place / "apart").glob("*")), "nothing is left"


def retie(rank: int, root: str) -> dict[str, Any]:
    """What an option allows."""
    seen: dict[str, Any] = {}
    model, optimizer = build(False)
    load_checkpoint(Path(root) / "tied" / STEP, model, optimizer, tie="untie")
    assert model.head.weight is not model.embedding.weight
    states = [optimizer.state[weight] for weight in (model.embedding.weight, model.head.weight)]
    seen["untied"] = torch.equal(model.head.weight, model.embedding.weight) and all(
        torch.equal(states[0][key], states[1][key]) for key in ("exp_avg", "exp_avg_sq", "step")
    )
    seen["own moments"] = states[0]["exp_avg"].data_ptr() != states[1]["exp_avg"].data_ptr()
    seen["trains"] = len(set(train(model, optimizer, range(3))))
    model, optimizer = build(True)
    load_checkpoint(Path(root) / "equal" / STEP, model)
    seen["tied"] = model.head.weight is model.embedding.weight
    stored = open_checkpoint(Path(root) / "equal" / STEP)
    shard = model.head.shard
    seen["rows"] = torch.equal(
        model.head.weight.detach()[: shard.num_valid],
        stored.read("model.head.weight", shard.start, shard.stop),
    )
    model, optimizer = build(True, dtype=torch.float64)
    load_checkpoint(Path(root) / "tied" / STEP, model, optimizer, cast=True)
    want = open_checkpoint(Path(root) / "tied" / STEP).read("model.embedding.weight", shard.start, shard.stop)
    seen["cast"] = torch.equal(model.embedding.weight.detach()[: shard.num_valid], want.double())
    seen["cast moments"] = optimizer.state[model.embedding.weight]["exp_avg"].dtype == torch.float64
    return seen


def test_with_the_option_a_tie_is_undone_equal_tables_are_tied_and_dtypes_converted(place: Path) -> None:
    for seen in run_ranks(retie, 4, str(place)):
        assert seen == {"untied": True, "own moments": True, "trains": 3, "tied": True, "rows": True, "cast": True,
                        "cast moments": True}  # fmt: skip


def save_files_of_a_host(rank: int, folder: str, bad: int) -> list[Any]:
    """A host's own files: one rank cannot write, then all can, then one cannot read."""
    job = Job(rank, 3, rank, torch.device("cpu"), dist.group.WORLD)
    root, about = Path(folder), {"host": "x", "tp_size": 3}

    def save(step: int, broken: bool = False) -> None:
        def write(place: Path) -> None:
            if broken and rank == bad:
                raise OSError(28, "No space left on device")
            (place / f"rank-{rank}").write_text(str(step))

        hosts.save_whole(job, root, step, write, about=about, extra={"vocabulary_sha256": "a" * 64}, keep=2)

    for step in (1, 2, 8, 9):
        save(step)
    full = attempt(lambda: save(3, broken=True))
    dist.barrier()
    left = sorted(os.listdir(folder))
    dist.barrier()
    save(3)
    latest = hosts.latest_whole(root)
    assert latest is not None
    step = hosts.compare(job, latest, about, "a" * 64)
    read = attempt(lambda: hosts.compare(job, latest if rank != bad else root / "gone", about, "a" * 64))
    other = attempt(lambda: hosts.compare(job, latest, {"host": "x", "tp_size": 2}, "b" * 64))
    return [full, read, other, step, left, sorted(os.listdir(folder))]


def test_a_hosts_own_files_are_whole_or_absent_and_one_ranks_error_is_every_ranks(three: Any, place: Path) -> None:
    root = place / "host"
    found = three(save_files_of_a_host, str(root), 1)
    words = [["No space left", "by rank 1"], ["rank 1"], ["tp_size 3, here 2", "aaaaaaaa", "bbbbbbbb", "parallel.tp"]]
    for at, expected in enumerate(words):
        assert len({(one[at].kind, one[at].message) for one in found}) == 1 and found[0][at].kind, found
        assert all(word in found[0][at].message for word in expected), found[0][at]
    assert found[0][3:] == [9, ["step-00000008", "step-00000009"], ["step-00000003", "step-00000009"]]
    (root / "step-00000009").rename(root / ".step-00000009.old")  # a crash between two renames
    assert hosts.latest_whole(root) == root / ".step-00000009.old"
    (root / ".step-00000009.old" / "host.json").write_text("[]")
    job = Job(0, 1, 0, torch.device("cpu"), None)
    with pytest.raises(CheckpointLayoutError, match="is damaged"):
        hosts.compare(job, root / ".step-00000009.old", {}, "")
