"""Reading checkpoints by row, in one process, without trusting them: no code runs, nothing outside is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vocab_parallel.checkpoint.blocks import Piece, Window, data_offset, read_runs
from vocab_parallel.checkpoint.metadata import PlainReader, inside
from vocab_parallel.checkpoint.writing import FORMAT, METADATA, STATE, described, is_whole
from vocab_parallel.errors import CheckpointLayoutError

_LARGEST_JSON = 256 * 2**20


def open_checkpoint(folder: str | os.PathLike[str]) -> StoredCheckpoint:
    """A whole checkpoint to read from.

    Raises:
        CheckpointLayoutError: it is not one, of another format, or its parts do not fit together.
    """
    path = Path(folder)
    return StoredCheckpoint(path, read_state(path))


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint (`writing.make_state`).

    Raises:
        CheckpointLayoutError: `path` is not a whole checkpoint of this format.
    """
    if not is_whole(path):
        raise CheckpointLayoutError(f"{path} is not a whole checkpoint: expected {STATE} and {METADATA} in it")
    file = path / STATE
    if file.stat().st_size > _LARGEST_JSON:
        raise CheckpointLayoutError(f"{file} has {file.stat().st_size} bytes, expected at most {_LARGEST_JSON}")
    try:
        state = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointLayoutError(f"{file} is not JSON ({error}): it is damaged, use another checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise CheckpointLayoutError(
            f"{path} has checkpoint format {found!r}, this version reads format {FORMAT}. It was written by another "
            "version of vocab_parallel: load it with that one, or start from another checkpoint"
        )
    kinds = {"step": int, "layout": dict, "tables": list, "ties": dict, "tensors": dict, "scalars": dict,
             "extra": dict, "files": dict}  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointLayoutError(f"{file}: {name} is {str(state.get(name))[:80]!r}, expected {kind.__name__}")
    _check_values(file, state)
    return state


def _check_values(file: Path, state: dict[str, Any]) -> None:
    """What a reader counts on without looking again."""

    def number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, complex)

    good = {
        "step": not isinstance(state["step"], bool) and state["step"] >= 0,
        "layout": all(type(one) is int and 1 <= one <= 2**40 for one in state["layout"].values()),
        "tables": all(isinstance(one, str) for one in state["tables"]),
        "ties": all(isinstance(one, str) for one in state["ties"].values()),
        "scalars": all(number(one) for one in state["scalars"].values()),
        "files": all(isinstance(one, dict) for one in state["files"].values()),
    }
    for name in (name for name, fits in good.items() if not fits):
        raise CheckpointLayoutError(f"{file}: {name} holds values that cannot be: {str(state[name])[:80]}")


class StoredTensors:
    """The tensors of a folder that `torch.distributed.checkpoint` wrote.

    Attributes:
        tensors: dtype and whole shape by key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = PlainReader(path).read_metadata()
        self.tensors: dict[str, tuple[torch.dtype, torch.Size]] = {
            key: (entry.properties.dtype, entry.size)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.data_offsets: dict[Piece, int | None] = {}

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """Where each tensor's blocks are, in order of their rows."""
        sizes = {
            (key, tuple(chunk.offsets)): tuple(chunk.sizes)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        found: dict[str, list[Piece]] = {key: [] for key in self.tensors}
        for index, info in self.metadata.storage_data.items():
            if index.fqn in found:
                at = tuple(index.offset) if index.offset is not None else (0,) * len(self.tensors[index.fqn][1])
                if (index.fqn, at) not in sizes:
                    raise CheckpointLayoutError(f"{self.path / METADATA} lists a block of {index.fqn} that it lacks")
                piece = Piece(at, sizes[index.fqn, at], info.relative_path, info.offset, info.length)
                found[index.fqn].append(piece)
        return {key: sorted(pieces, key=lambda piece: piece.offsets) for key, pieces in found.items()}

    def read(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `[start, stop)` of a tensor; a 0-dimensional one whole.

        Memory:
            Those rows, and one block where a block is cut over another dimension than the first.
        """
        dtype, size = self._entry(key)
        if not size:
            return self._whole(self.pieces[key][0], dtype)
        stop = size[0] if stop is None else stop
        return self.rows_of(key, torch.arange(start, stop))

    def rows_of(self, key: str, ids: Tensor) -> Tensor:  # ids: int64 [n], any order
        """Rows by their global number, in the order of `ids`; read in runs of consecutive rows."""
        dtype, size = self._entry(key)
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < size[0]):
            raise CheckpointLayoutError(f"{self.path}: {key} has {size[0]} rows, asked for {int(ids.max())}")
        shape = (len(ids), *size[1:])
        buffer = bytearray(math.prod(shape) * dtype.itemsize)
        result = torch.frombuffer(buffer, dtype=dtype).view(shape) if buffer else torch.empty(shape, dtype=dtype)
        filled, pieces = 0, self.pieces[key]
        ordered, places = torch.sort(ids, stable=True)
        bounds = torch.tensor([(piece.offsets[0], piece.offsets[0] + piece.sizes[0]) for piece in pieces]).view(-1, 2)
        for piece, (begin, end) in zip(pieces, torch.searchsorted(ordered, bounds).tolist(), strict=True):
            if begin < end:
                filled += (end - begin) * math.prod(piece.sizes[1:])
                self._take(piece, ordered[begin:end] - piece.offsets[0], result, buffer, places[begin:end])
        if filled != result.numel():
            raise CheckpointLayoutError(f"{self.path}: the files do not hold all rows of {key}")
        return result

    def _entry(self, key: str) -> tuple[torch.dtype, torch.Size]:
        if key not in self.tensors:
            raise CheckpointLayoutError(f"{self.path} holds no {key}; it has {', '.join(sorted(self.tensors)[:8])} ...")
        return self.tensors[key]

    def _take(self, piece: Piece, rows: Tensor, result: Tensor, buffer: bytearray, places: Tensor) -> None:
        """Copies `rows` of a block to `places` of the result, which lies in `buffer`."""
        dtype, whole_rows = result.dtype, piece.sizes[1:] == tuple(result.shape[1:])
        with self._open(piece) as file:
            if whole_rows and piece not in self.data_offsets:
                self.data_offsets[piece] = data_offset(file, piece, dtype)
            at = self.data_offsets[piece] if whole_rows else None
            if at is None:
                value = self._load(file, piece, dtype)[rows]
                window: Any = (
                    places,
                    *(slice(o, o + n) for o, n in zip(piece.offsets[1:], piece.sizes[1:], strict=True)),
                )
                result[window] = value
                return
            row_bytes = math.prod(result.shape[1:]) * dtype.itemsize
            read_runs(file, piece.start + at, rows, memoryview(buffer), row_bytes, places)

    def _whole(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        with self._open(piece) as file:
            return self._load(file, piece, dtype)

    def _load(self, file: IO[bytes], piece: Piece, dtype: torch.dtype) -> Tensor:
        window: Any = Window(file, piece.start, piece.length)
        value = torch.load(window, map_location="cpu", weights_only=True)
        if not isinstance(value, Tensor) or tuple(value.shape) != piece.sizes or value.dtype != dtype:
            raise CheckpointLayoutError(f"{self.path / piece.file} does not hold what {METADATA} says of it")
        return value

    def _open(self, piece: Piece) -> IO[bytes]:
        return (self.path / piece.file).open("rb")


class StoredCheckpoint(StoredTensors):
    """A checkpoint of this package.

    Attributes:
        state: `writing.make_state`, with ``files``.
    """

    def __init__(self, path: Path, state: dict[str, Any]) -> None:
        super().__init__(path)
        self.state = state

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def verify(self) -> None:
        """Reads every file and compares it with its hash.

        Raises:
            CheckpointLayoutError: naming the files that are missing or changed.
        """
        wrong = [found for name in self.state["files"] if (found := check_file(self.path, name, self.state["files"]))]
        if wrong:
            raise CheckpointLayoutError(damaged(self.path, wrong))


def check_file(path: Path, name: str, files: Mapping[str, Any], *, content: bool = True) -> str | None:
    """What is wrong with a file of a checkpoint, in words; None if nothing. Without `content` its size is all."""
    try:
        if not inside(path, name):
            return f"{name} is no name of a file in it"
        if not (path / name).is_file():
            return f"{name} is missing"
        size, want = (path / name).stat().st_size, files[name]
        if size != want["bytes"]:
            return f"{name} has {size} bytes, saved with {want['bytes']}"
        found = described(path / name) if content else want
        if found["sha256"] != want["sha256"]:
            return f"{name} has sha256 {found['sha256'][:16]}…, saved with {str(want['sha256'])[:16]}…"
    except (KeyError, TypeError):
        return f"{name} is listed without size and hash"
    return None


def damaged(path: Path, wrong: list[str]) -> str:
    """The words for a checkpoint whose files are not those that were saved."""
    return (
        f"{path} is damaged: {'; '.join(wrong[:4])}. Restore the file from a copy, or use the checkpoint before: "
        f"mv {path} {path}.damaged, then start again; the newest whole one is taken"
    )
