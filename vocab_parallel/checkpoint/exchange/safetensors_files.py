"""Safetensors files, read by rows; their headers are not trusted.

The format: 8 bytes that say how long the header is (little-endian), the header (JSON: dtype, shape and place of each
tensor), then the numbers. Read without the `safetensors` package, which maps files into memory: what it has touched
stays resident.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.checkpoint.rows import rows_in_block
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest.strict_json import parse, read_json

NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_LARGEST_HEADER = 100_000_000  # as the safetensors package has it
_MOST_TENSORS = 2**20
_LARGEST_SIZE = 2**56


class Place(NamedTuple):
    """A tensor in a file, at bytes `[start, stop)` of it."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class SafetensorsFiles:
    """The tensors of one file, or of several with an index.

    Attributes:
        places: By name, in the order of the files.
        metadata: Texts beside the tensors, of all files.
    """

    places: Mapping[str, Place]
    metadata: Mapping[str, str]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `[start, stop)` of a tensor; a 0-dimensional one whole.

        Memory:
            Those rows.

        Raises:
            CheckpointLayoutError: No such tensor or rows, or a file that has become shorter.
        """
        if name not in self.places:
            raise CheckpointLayoutError(f"no tensor {name} here; there are {', '.join(sorted(self.places)[:8])} ...")
        place = self.places[name]
        if not place.shape:
            return _bytes_at(place, place.start, place.stop).view(())
        stop = place.shape[0] if stop is None else stop
        if not 0 <= start <= stop <= place.shape[0]:
            raise CheckpointLayoutError(f"{place.path}: {name} has {place.shape[0]} rows, asked for [{start}, {stop})")
        row = math.prod(place.shape[1:]) * place.dtype.itemsize
        found = _bytes_at(place, place.start + start * row, place.start + stop * row)
        return found.view(stop - start, *place.shape[1:])


def open_safetensors(folder: Path) -> SafetensorsFiles:
    """The tensors of a folder with model.safetensors, or with an index of several such files.

    Raises:
        CheckpointLayoutError: Neither is there, a file is damaged, or index and files do not fit together.
    """
    if (folder / NAME).is_file():
        return read_header(folder / NAME)
    if (folder / INDEX).is_file():
        return _indexed(folder)
    others = sorted(one.name for one in folder.glob("*.bin")) + sorted(one.name for one in folder.glob("*.pt*"))
    why = ""
    if others:
        why = (
            f"; {others[0]} is a pickle, which can run code as it is read, and is not opened: save the model once more "
            "with model.save_pretrained(folder), which writes safetensors"
        )
    raise CheckpointLayoutError(f"{folder} has neither {NAME} nor {INDEX}{why}")


def read_header(path: Path) -> SafetensorsFiles:
    """The tensors of one file.

    Raises:
        CheckpointLayoutError: The header is no such header, or its tensors do not lie one after the other in the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                raise _wrong(path, f"its header would have {length:,} bytes, the file has {size:,}")
            header = _parsed(path, file.read(length))
    except OSError as error:
        raise CheckpointLayoutError(f"cannot read {path}: {error.strerror or error}") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise _wrong(path, "__metadata__ is no mapping of texts")
    places = [(name, _placed(path, name, entry, 8 + length)) for name, entry in header.items()]
    places.sort(key=lambda pair: pair[1][3:])
    end = 8 + length
    for name, place in places:
        if place.start != end:
            raise _wrong(path, f"{name} begins at byte {place.start:,}, what lies before it ends at {end:,}")
        end = place.stop
    if end != size:
        raise _wrong(path, f"its tensors end at byte {end:,}, the file has {size:,}: it was cut off or added to")
    return SafetensorsFiles(dict(places), metadata)


def row_blocks(shape: Sequence[int], dtype: torch.dtype, read: Callable[[int, int], Tensor]) -> Iterator[Tensor]:
    """Consecutive rows, `rows_in_block` each, by `read(start, stop)`; a 0-dimensional tensor by `read(0, 1)`."""
    return (read(start, stop) for start, stop in row_ranges(shape, dtype))


def row_ranges(shape: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Cuts rows into `[start, stop)` of `rows_in_block` each."""
    rows = shape[0] if shape else 1
    step = rows_in_block(shape, dtype)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


def _indexed(folder: Path) -> SafetensorsFiles:
    """Every tensor of the files that an index names, as Transformers reads them."""
    path = folder / INDEX
    index = read_json(path, "an index of safetensors files")
    weight_map: dict[str, str] = parse(Mapping[str, str], index.get("weight_map"), f"{path}: weight_map")
    places: dict[str, Place] = {}
    metadata: dict[str, str] = {}
    for name in sorted(set(weight_map.values())):
        is_plain = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
        if not is_plain or len(name.encode("utf-8", "replace")) > 255:
            raise CheckpointLayoutError(f"{path} names the file {name!r:.200}, expected a plain name in its own folder")
        if not (folder / name).is_file():
            raise CheckpointLayoutError(f"{path} names {name}, which is missing: copy the whole folder again")
        found = read_header(folder / name)
        metadata |= found.metadata
        if twice := next((key for key in found.places if key in places), None):
            raise CheckpointLayoutError(f"{twice} is in two files: {places[twice].path.name} and {name}")
        places |= found.places
    for key, name in weight_map.items():
        if key not in places or places[key].path.name != name:
            raise CheckpointLayoutError(f"{path} says that {key} is in {name}, where it is not")
    return SafetensorsFiles(places, metadata)


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    if text[:1] != b"{" or text.count(b"{") > _MOST_TENSORS:
        raise _wrong(path, f"its header is no JSON object of at most {_MOST_TENSORS:,} tensors")
    try:
        header = json.loads(text, object_pairs_hook=_unique)
        "".join(header).encode()  # a name can be half a character
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"its header is not JSON ({str(error)[:100]})") from error
    assert isinstance(header, dict)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in it")
    return found


def _placed(path: Path, name: str, entry: Any, base: int) -> Place:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _wrong(path, f"{name} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _wrong(path, f"{name} has dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPES)}")
    if not _sizes(shape) or not _sizes(offsets) or len(shape) > 64 or len(offsets) != 2:
        raise _wrong(path, f"shape {str(shape)[:60]} or data_offsets {str(offsets)[:60]} of {name} cannot be")
    start, stop = offsets
    need = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != need:
        raise _wrong(path, f"{name} of {dtype} {shape} needs {need:,} bytes, its data_offsets hold {stop - start:,}")
    return Place(path, DTYPES[dtype], tuple(shape), base + start, base + stop)


def _sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and 0 <= one <= _LARGEST_SIZE for one in values)


def _wrong(path: Path, why: str) -> CheckpointLayoutError:
    return CheckpointLayoutError(f"{path} is no whole safetensors file: {why}")


def _bytes_at(place: Place, start: int, stop: int) -> Tensor:
    """The numbers at bytes `[start, stop)` of a file, `[count]`."""
    if start == stop:
        return torch.empty(0, dtype=place.dtype)
    buffer = bytearray(stop - start)
    with place.path.open("rb", buffering=0) as file:
        file.seek(start)
        view, filled = memoryview(buffer), 0
        while filled < len(buffer):
            count = file.readinto(view[filled:])
            if not count:
                raise CheckpointLayoutError(f"{place.path} ends before its rows do: the file was cut off")
            filled += count
    return torch.frombuffer(buffer, dtype=place.dtype)
