"""Safetensors files: read by rows and written by blocks as the `safetensors` package has them; damaged ones refused."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vocab_parallel.checkpoint.exchange.safetensors_files import (
    DTYPES,
    INDEX,
    NAME,
    SafetensorsFiles,
    open_safetensors,
    read_header,
    row_blocks,
)
from vocab_parallel.checkpoint.exchange.safetensors_writing import ToWrite, write_file, write_safetensors
from vocab_parallel.checkpoint.rows import BLOCK_BYTES
from vocab_parallel.errors import CheckpointLayoutError

HEADER = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}


def of_every_kind():
    """Random bits of each dtype, NaN payloads among them; 0-dimensional, empty and long ones too."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"an odd one": torch.arange(3, dtype=torch.int8)}  # what follows it is not aligned by itself
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "no columns": torch.empty(3, 0)}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 256, (6 * 4 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        raw = raw % 2 if dtype == torch.bool else raw
        tensors[f"of {name}"] = raw.view(dtype).view(6, 4)
    tensors["long"] = torch.randn(BLOCK_BYTES // 8, 3, generator=generator)  # one and a half blocks
    return tensors


def to_write(tensor):
    shape = tuple(tensor.shape)
    return ToWrite(
        tensor.dtype, shape, lambda: row_blocks(shape, tensor.dtype, lambda a, b: tensor[a:b] if shape else tensor)
    )


def same(one, two):
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)) if one.numel() else True


def write_raw(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_what_safetensors_writes_is_read_by_rows_bit_for_bit(tmp_path):
    tensors = of_every_kind()
    save_file(tensors, tmp_path / NAME, metadata={"format": "pt"})
    found = open_safetensors(tmp_path)
    assert found.metadata == {"format": "pt"}
    assert {name: (place.dtype, place.shape) for name, place in found.places.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }
    for name, tensor in tensors.items():
        assert same(found.read(name), tensor), name
        if len(tensor.shape) and len(tensor) > 1:
            assert same(found.read(name, 1, len(tensor) - 1), tensor[1:-1]), name
    blocks = list(row_blocks(tensors["long"].shape, torch.float32, lambda a, b: found.read("long", a, b)))
    assert len(blocks) > 20 and all(block.nbytes <= BLOCK_BYTES for block in blocks)
    assert same(torch.cat(blocks), tensors["long"])


def test_what_is_written_here_safetensors_reads_bit_for_bit(tmp_path):
    tensors = of_every_kind()
    write_safetensors(tmp_path, {name: to_write(t) for name, t in tensors.items()}, max_shard_bytes=2**30)
    read = load_file(tmp_path / NAME)
    assert set(read) == set(tensors)
    for name, tensor in tensors.items():
        assert same(read[name], tensor), name
    with safe_open(tmp_path / NAME, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for place in read_header(tmp_path / NAME).places.values():
        assert place.start % place.dtype.itemsize == 0, "numbers are aligned"


def test_a_file_of_one_dtype_is_byte_for_byte_what_safetensors_writes(tmp_path):
    tensors = {name: torch.randn(3, 5) for name in ("model.b", "model.ä", "lm_head")}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_file(tmp_path / "ours", {name: to_write(tensor) for name, tensor in tensors.items()})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_more_than_a_shard_goes_to_several_files_with_an_index(tmp_path):
    tensors = {f"t{at}": torch.randn(at + 1, 100) for at in range(9)}  # 400 to 3,600 bytes
    write_safetensors(tmp_path, {name: to_write(t) for name, t in tensors.items()}, max_shard_bytes=3_000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == f"model-00001-of-{len(names) - 1:05}.safetensors" and names[-1] == INDEX
    held = {name: load_file(tmp_path / name) for name in names[:-1]}
    for one in held.values():
        assert sum(tensor.nbytes for tensor in one.values()) <= 3_000 or len(one) == 1
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {key: name for name, one in held.items() for key in one} == index["weight_map"]
    found = open_safetensors(tmp_path)
    assert all(same(found.read(name), tensor) for name, tensor in tensors.items())


def test_blocks_that_do_not_fill_their_tensor_are_an_error(tmp_path):
    short = ToWrite(torch.float32, (4,), lambda: iter([torch.zeros(3)]))
    with pytest.raises(CheckpointLayoutError, match="the blocks of a end at"):
        write_file(tmp_path / "x", {"a": short})


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointLayoutError, match=r"a is of torch\.complex128"):
        write_file(tmp_path / "x", {"a": to_write(torch.zeros(2, dtype=torch.complex128))})


def changed(**fields):
    return {"a": {**HEADER["a"], **fields}}


DAMAGED = {
    "empty": (None, b"", "0"),
    "cut in the length": (None, b"\x00\x00", "2"),
    "a header past the end": (None, (2**40).to_bytes(8, "little") + b"{}", "1,099,511,627,776"),
    "a header of no bytes": (None, (0).to_bytes(8, "little"), "header"),
    "not JSON": (b"{not json}", b"", "not JSON"),
    "nested junk": (b'{"a":' + b"[" * 5_000, b"", "not JSON"),
    "a list": (b"[]", b"", "no JSON object"),
    "a name of half a character": (b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', b"", "not JSON"),
    "a key twice": (b'{"a":{},"a":{}}', b"", "twice"),
    "a huge number": (b'{"a":' + b"9" * 5_000 + b"}", b"", "not JSON"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 16]}}, bytes(16), "a is not described"),
    "an unknown dtype": (changed(dtype="F7"), bytes(16), "'F7'"),
    "a shape of floats": (changed(shape=[2.0, 2]), bytes(16), "shape"),
    "a shape of bools": (changed(shape=[True, 4]), bytes(16), "shape"),
    "a negative size": (changed(shape=[-2, -2]), bytes(16), "shape"),
    "a size beyond memory": (changed(shape=[2**56, 2**56]), bytes(16), "needs"),
    "negative offsets": (changed(data_offsets=[-16, 0]), bytes(16), "data_offsets"),
    "offsets too far apart": (changed(data_offsets=[0, 20]), bytes(20), "needs 16 bytes"),
    "past the end of the file": (HEADER, bytes(12), "cut off"),
    "bytes after the end": (HEADER, bytes(20), "cut off or added"),
    "an overlap": (
        HEADER | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, bytes(16), "what lies before it ends"
    ),
    "a hole": (
        HEADER | {"b": {"dtype": "F32", "shape": [2], "data_offsets": [24, 32]}}, bytes(32), "what lies before it ends"
    ),
    "metadata of numbers": (HEADER | {"__metadata__": {"a": 1}}, bytes(16), "__metadata__"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_file_is_refused_with_its_name_and_the_reason(how, tmp_path):
    header, data, words = DAMAGED[how]
    path = tmp_path / NAME
    if header is None:
        path.write_bytes(data)
    else:
        write_raw(path, header, data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointLayoutError) as raised:
            open_safetensors(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**22, "nothing is allocated by what a broken file claims"
    finally:
        tracemalloc.stop()
    assert str(path) in str(raised.value) and words in str(raised.value)


@given(data=st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_change_of_a_header_is_read_or_refused(data, tmp_path):
    tensors = {"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3, dtype=torch.int8)}
    save_file(tensors, tmp_path / NAME)
    raw = bytearray((tmp_path / NAME).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / NAME).write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        found = open_safetensors(tmp_path)
    except CheckpointLayoutError:
        return
    for name in found.places:
        found.read(name)


def test_a_file_that_was_cut_after_it_was_opened_is_an_error(tmp_path):
    save_file({"a": torch.zeros(4, 4)}, tmp_path / NAME)
    found = open_safetensors(tmp_path)
    raw = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(raw[:-8])
    assert found.read("a", 0, 3).shape == (3, 4)
    with pytest.raises(CheckpointLayoutError, match="cut off"):
        found.read("a")


def test_rows_and_names_that_are_not_there_are_errors(tmp_path):
    save_file({"a": torch.zeros(4, 4)}, tmp_path / NAME)
    found = open_safetensors(tmp_path)
    with pytest.raises(CheckpointLayoutError, match=r"a has 4 rows, asked for \[2, 5\)"):
        found.read("a", 2, 5)
    with pytest.raises(CheckpointLayoutError, match="no tensor b here; there are a"):
        found.read("b")


def indexed(folder, weight_map, **files):
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_every_tensor_of_the_files_of_an_index_is_read_as_transformers_does(tmp_path):
    one, two = {"a": torch.ones(2), "extra": torch.ones(1)}, {"b": torch.zeros(2)}
    indexed(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=one, two=two)
    assert isinstance(open_safetensors(tmp_path), SafetensorsFiles)
    assert set(open_safetensors(tmp_path).places) == {"a", "b", "extra"}


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../one.safetensors"}, "'../one.safetensors', expected a plain name"),
        ({"a": "/etc/passwd"}, "expected a plain name"),
        ({"a": "three.safetensors"}, "three.safetensors, which is missing"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "a is in two files: one.safetensors and two.safetensors"),
        ({"z": "one.safetensors"}, "says that z is in one.safetensors, where it is not"),
        ({"a": 1}, "weight_map.a"),
        ([], "weight_map"),
        (None, "weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(weight_map, words, tmp_path):
    indexed(tmp_path, weight_map, one={"a": torch.ones(2)}, two={"a": torch.ones(2), "b": torch.zeros(2)})
    with pytest.raises(CheckpointLayoutError) as raised:
        open_safetensors(tmp_path)
    assert words in str(raised.value)


def test_pickled_files_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointLayoutError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        open_safetensors(tmp_path)


def test_a_folder_without_tensors_is_refused(tmp_path):
    with pytest.raises(CheckpointLayoutError, match=f"neither {NAME} nor {INDEX}"):
        open_safetensors(tmp_path)
