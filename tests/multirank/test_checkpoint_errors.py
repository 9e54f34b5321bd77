"""What does not fit is refused on every rank before anything changes; what fails on one rank fails on all."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.batch import Attempt, assert_all_raise, attempt
from tests.multirank.checkpoint_cases import build, digest, train
from tests.multirank.shared_world import Batch
from vocab_parallel.checkpoint import latest_checkpoint, load_checkpoint, open_checkpoint, save_checkpoint, writing
from vocab_parallel.checkpoint.saver import AsyncSaver
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
    copy("stateless", "state.json", None)
    return root


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
def writes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[int, str, bool]], tuple[Path, list[Any]]]:
    root = tmp_path_factory.mktemp("writes")
    cases = {(tp, case): (str(root / f"{tp}-{case}"), *case) for tp in (2, 3) for case in WRITES}
    batches = {tp: Batch(fail_to_write, [cases[tp, case] for case in WRITES]) for tp in (2, 3)}
    return lambda tp, case: (Path(cases[tp, case][0]), batches[tp](tp, *cases[tp, case]))


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("case", WRITES, ids=lambda case: "-".join(map(str, case)))
def test_one_ranks_failure_to_write_is_every_ranks_and_the_checkpoint_before_stays(
    writes: Any, case: tuple[int, str, bool], tp: int
) -> None:
    folder, found = writes(tp, case)
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
    load_checkpoint(path, model, optimizer)
    return [how, unchanged, disagree]


READS = [(0,), (2,)]


def test_one_ranks_failure_to_read_is_every_ranks_and_ranks_that_disagree_hear_of_it(place: Path) -> None:
    batch = Batch(fail_to_read, [(str(place), *case) for case in READS])
    for case in READS:
        found = batch(3, str(place), *case)
        assert len({how.message for how, _, _ in found}) == 1
        assert "Input/output error" in found[0][0].message and f"rank {case[0]}" in found[0][0].message
        assert all(unchanged for _, unchanged, _ in found)
        assert {how.kind for _, _, how in found} == {"LayoutMismatchError"}
        assert "step-00000004" in found[0][2].message and "step-00000006" in found[0][2].message


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


@pytest.mark.parametrize("tp", [1, 4])
def test_with_the_option_a_tie_is_undone_equal_tables_are_tied_and_dtypes_converted(place: Path, tp: int) -> None:
    for seen in Batch(retie, [(str(place),)])(tp, str(place)):
        assert seen == {"untied": True, "own moments": True, "trains": 3, "tied": True, "rows": True, "cast": True,
                        "cast moments": True}  # fmt: skip
