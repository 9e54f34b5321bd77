"""A file made to do harm in a checkpoint that ranks load together: each of them refuses it, and none waits."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.batch import Attempt, assert_all_raise, attempt
from tests.multirank.checkpoint_cases import build, digest, train
from tests.multirank.shared_world import Batch
from tests.untrusted.harm import END, growing, running, torch_file
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint

STEP = "step-00000001"
HARM = [
    "code in the list",
    "code in a block",
    "a packed block",
    "bytes of 64 GiB in a block",
    "a list for ever",
    "a pipe",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("harm")
    model, optimizer = build(True)
    train(model, optimizer, range(1))
    save_checkpoint(root / "whole", model, optimizer, 1)
    code = running(root / "ran")["a call by name"]
    blocks = {"code in a block": torch_file(code), "a packed block": growing()["a packed archive"],
              "bytes of 64 GiB in a block": growing()["an array of bytes"]}  # fmt: skip
    lists = {"code in the list": code, "a list for ever": b"\x80\x02Nr\xff\xff\xff\x7f" + END}
    for what in HARM:
        path = root / what / STEP
        shutil.copytree(root / "whole" / STEP, path)
        if what in lists:
            (path / ".metadata").write_bytes(lists[what])
        elif what == "a pipe":
            (path / "__0_0.distcp").unlink()
            os.mkfifo(path / "__0_0.distcp")
        else:
            _replace_blocks(path, blocks[what])
    return root


def _replace_blocks(path: Path, content: bytes) -> None:
    """Every block becomes `content`; the list says so."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "__0_0.distcp").write_bytes(content + b"\0" * 4096)


def _load(rank: int, root: str, what: str) -> tuple[Attempt, bool]:
    model, optimizer = build(True)
    before = digest(model)
    how = attempt(lambda: load_checkpoint(Path(root) / what / STEP, model, optimizer, verify=False))
    return how, digest(model) == before


@functools.cache
def _loads(root: Path) -> Batch:
    return Batch(_load, [(str(root), what) for what in HARM])


@pytest.mark.parametrize("tp", [3])
@pytest.mark.parametrize("what", HARM)
def test_every_rank_refuses_it_and_nothing_runs_or_changes(place: Path, what: str, tp: int) -> None:
    found: list[Any] = _loads(place)(tp, str(place), what)
    assert_all_raise(what, [how for how, _ in found], ["CheckpointLayoutError"], [])
    assert all(unchanged for _, unchanged in found) and not (place / "ran").exists()
