"""A pickle that runs code runs none in any reader of this package, whatever file it is put in place of."""

from __future__ import annotations

import contextlib
import pickle
import random
import shutil
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path, WindowsPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from tests.unit.releases import checkpoint
from tests.untrusted.harm import running, torch_file
from tests.untrusted.kinds import KINDS
from vocab_parallel.checkpoint.exchange.hugging_face import from_hugging_face
from vocab_parallel.checkpoint.exchange.opaque import Opaque, load_plain
from vocab_parallel.checkpoint.files import StoredTensors
from vocab_parallel.errors import CheckpointLayoutError, VocabParallelError
from vocab_parallel.integrations.deepspeed.trust import require_known

WAYS = list(running(Path("x")))
READ = [".metadata", "a .distcp", "safetensors", "DeepSpeed's model states", "DeepSpeed's optimizer states",
        "Megatron's common.pt", "a translator", "state.json", "tokenizer.json", "a policy in YAML"]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_each_pickle_does_run_where_it_is_trusted(way: str, tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    with contextlib.suppress(Exception):  # after it has run
        pickle.loads(running(tmp_path / "ran")[way])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", READ)
def test_no_reader_runs_a_pickle_that_stands_for_its_file(name: str, tmp_path: Path) -> None:
    """As it is, and in an archive of torch."""
    kind = KINDS[name]
    (tmp_path / "inner").mkdir()
    file = kind.make(tmp_path / "inner")
    for way, content in running(tmp_path / "ran").items():
        for data in (content, torch_file(content), torch_file(content, packed=True)):
            file.write_bytes(data)
            with contextlib.suppress(VocabParallelError):
                kind.read(file)
            shutil.rmtree(tmp_path / "ours", ignore_errors=True)
            assert not (tmp_path / "ran").exists(), way


@pytest.mark.parametrize("crc", [True, False])
def test_what_torch_saves_is_looked_through_and_loaded(crc: bool, tmp_path: Path) -> None:
    state = random.Random(1).getstate()
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    plain = {
        "bytes": [b"abc" * 100, *(bytes([at]) for at in range(256))], "array": [bytearray(b"xyz"), bytearray()],
        "set": {1, 2}, "dict": OrderedDict(a=Counter("abc")), "shape": [torch.Size([3, 4])] * 300, "random": state,
        "numbers": [2**200, 1 + 2j, -1, 0.5, None, True], "device": torch.device("cpu"), "dtype": torch.bfloat16,
        "layout": torch.strided, "text": ["again"] * 3000,
    }  # fmt: skip
    torch.serialization.set_crc32_options(crc)
    try:
        torch.save({"plain": plain, "model": model, "optimizer": optimizer.state_dict()}, tmp_path / "whole.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    found = load_plain(tmp_path / "whole.pt")
    assert found["plain"] == plain and isinstance(found["model"], Opaque)
    assert found["optimizer"]["state"][0]["exp_avg"].shape == (4, 3)


class _Windows:
    """Pickled as a path of another system."""

    def __reduce__(self) -> Any:
        return WindowsPath, ("C:", "checkpoints")


def test_a_list_of_tensors_that_was_written_on_another_system_is_read(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step-00000003")
    _metadata_of(path, lambda metadata: setattr(metadata, "storage_meta", StorageMeta(_Windows())))  # type: ignore[arg-type]
    assert StoredTensors(path).tensors


def _metadata_of(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("way", WAYS)
def test_a_pickle_beside_the_whole_list_of_tensors_does_not_run(way: str, tmp_path: Path) -> None:
    """In a place of the list that nobody reads, such as the ranks' plans of Megatron."""
    path = checkpoint(tmp_path / "step-00000003")
    whole = (path / ".metadata").read_bytes()
    assert StoredTensors(path).tensors
    body = running(tmp_path / "ran")[way]
    (path / ".metadata").write_bytes(body[:-1] + b"0" + whole[2:])
    with pytest.raises(CheckpointLayoutError, match="metadata"):
        StoredTensors(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("way", WAYS)
def test_what_deepspeed_would_unpickle_is_refused_before_it_does(way: str, tmp_path: Path) -> None:
    content = running(tmp_path / "ran")[way]
    (tmp_path / "zero").mkdir()
    for data in (content, torch_file(content)):
        (tmp_path / "zero" / "fp32.pt").write_bytes(data)
        with pytest.raises(CheckpointLayoutError, match=r"fp32\.pt (names|is damaged)"):
            require_known(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_classes_that_deepspeed_pickles_itself_are_known_and_others_are_named(tmp_path: Path) -> None:
    torch.save({"args": types.SimpleNamespace(a=1), "t": torch.ones(2)}, tmp_path / "own.pt")
    require_known(tmp_path)
    torch.save({"who": pytest.Cache}, tmp_path / "other.pt")
    with pytest.raises(CheckpointLayoutError, match=r"other\.pt names _pytest\.cacheprovider\.Cache, .*from_deepspeed"):
        require_known(tmp_path)


def test_pickled_weights_of_a_hugging_face_directory_are_not_opened(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    shutil.copy(KINDS["config.json"].make(tmp_path), source)
    (source / "pytorch_model.bin").write_bytes(running(tmp_path / "ran")["a call by name"])
    with pytest.raises(CheckpointLayoutError, match=r"pytorch_model\.bin is a pickle"):
        from_hugging_face(source, tmp_path / "ours")
    assert not (tmp_path / "ran").exists()
