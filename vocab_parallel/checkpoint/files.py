"""Reading checkpoints by row, in one process, without trusting them: no code runs, nothing outside is read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from vocab_parallel.checkpoint.blocks import Piece, Window, check_block, damaged_at, data_offset, read_runs
from vocab_parallel.checkpoint.metadata import PlainReader, inside, leads_out
from vocab_parallel.checkpoint.placing import METADATA, STATE, is_whole
from vocab_parallel.checkpoint.writing import FORMAT, described, is_unchanged
from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.files import parse_json, read_bytes, shortened

_LARGEST_JSON, _MOST_LISTS = 2**28, 2**22
_MOST_RANKS = 2**16  # that share a vocabulary


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
        inner = sorted(one.parent for pattern in ("*", "checkpoints/*") for one in path.glob(f"{pattern}/{STATE}"))
        hint = f". Did you mean {inner[-1]}?" if inner else ""
        raise CheckpointLayoutError(f"{path} is not a whole checkpoint: expected {STATE} and {METADATA} in it{hint}")
    file = path / STATE
    try:
        state = parse_json(read_bytes(file, _LARGEST_JSON), file, _MOST_LISTS)
    except VocabularyError as error:
        raise CheckpointLayoutError(f"{file} is not JSON ({error}): it is damaged, use another checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        given = state.get("format") if isinstance(state, dict) else None
        found = None if given is None else shortened(given)
        raise CheckpointLayoutError(
            f"{path} has checkpoint format {found}, this version reads format {FORMAT}. It was written by another "
            "version of vocab_parallel: load it with that one, or start from another checkpoint"
        )
    kinds = {"step": int, "layout": dict, "tables": list, "ties": dict, "tensors": dict, "scalars": dict,
             "extra": dict, "files": dict}  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise CheckpointLayoutError(f"{file}: {name} is {shortened(state.get(name))}, expected {kind.__name__}")
    _check_values(file, state)
    return state


def _check_values(file: Path, state: dict[str, Any]) -> None:
    """What a reader counts on without looking again."""

    layout = state["layout"]
    good = {
        "step": type(state["step"]) is int and 0 <= state["step"] < 2**63,
        "layout": layout.keys() == {"vocab_size", "padded_size", "tp_size"}
        and all(type(one) is int and 1 <= one <= 2**40 for one in layout.values()) and layout["tp_size"] <= _MOST_RANKS
        and layout["vocab_size"] <= layout["padded_size"] and layout["padded_size"] % layout["tp_size"] == 0,
        "tables": all(isinstance(one, str) for one in state["tables"]),
        "ties": all(isinstance(one, str) for one in state["ties"].values()),
        "scalars": all(isinstance(one, int | float) and abs(one) < 2**63 for one in state["scalars"].values()),
        "files": METADATA in state["files"] and all(isinstance(one, dict) for one in state["files"].values()),
    }  # fmt: skip
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
        self._row_bounds: dict[str, Tensor] = {}

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
            Those rows, twice where a block is cut over another dimension than the first.
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
        edges = torch.searchsorted(ordered, self._bounds(key))
        hit = edges[:, 0] < edges[:, 1]
        for at, (begin, end) in zip(hit.nonzero()[:, 0].tolist(), edges[hit].tolist(), strict=True):
            filled += (end - begin) * math.prod(pieces[at].sizes[1:])
            self._take(pieces[at], ordered[begin:end] - pieces[at].offsets[0], result, buffer, places[begin:end])
        if filled != result.numel():
            raise CheckpointLayoutError(f"{self.path}: the files do not hold all rows of {key}")
        return result

    def require_all_rows(self, key: str) -> None:
        """Raises if blocks of a tensor are missing."""
        held = sum(math.prod(piece.sizes) for piece in self.pieces[key])
        if held != math.prod(self.tensors[key][1]):
            raise CheckpointLayoutError(f"{self.path}: the files do not hold all rows of {key}")

    def _bounds(self, key: str) -> Tensor:  # -> int64 [blocks, 2]
        """First row of each block, and the one after its last."""
        if key not in self._row_bounds:
            pairs = [(piece.offsets[0], piece.offsets[0] + piece.sizes[0]) for piece in self.pieces[key]]
            self._row_bounds[key] = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        return self._row_bounds[key]

    def _entry(self, key: str) -> tuple[torch.dtype, torch.Size]:
        if key not in self.tensors:
            raise CheckpointLayoutError(f"{self.path} holds no {key}; it has {', '.join(sorted(self.tensors)[:8])} ...")
        return self.tensors[key]

    def _take(self, piece: Piece, rows: Tensor, result: Tensor, buffer: bytearray, places: Tensor) -> None:
        """Copies `rows` of a block to `places` of the result, which lies in `buffer`."""
        dtype, row_bytes = result.dtype, math.prod(piece.sizes[1:]) * result.dtype.itemsize
        with self._open(piece) as file:
            if piece not in self.data_offsets:
                self.data_offsets[piece] = data_offset(file, piece, dtype)
            at = self.data_offsets[piece]
            if at is not None and piece.sizes[1:] == tuple(result.shape[1:]):
                read_runs(file, piece.start + at, rows, memoryview(buffer), row_bytes, places)
                return
            if at is not None and row_bytes:  # some columns of each row
                part = bytearray(len(rows) * row_bytes)
                read_runs(file, piece.start + at, rows, memoryview(part), row_bytes, torch.arange(len(rows)))
                value = torch.frombuffer(part, dtype=dtype).view(len(rows), *piece.sizes[1:])
            else:
                value = self._load(file, piece, dtype)[rows]
            columns = (slice(o, o + n) for o, n in zip(piece.offsets[1:], piece.sizes[1:], strict=True))
            window: Any = (places, *columns)
            result[window] = value

    def _whole(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        with self._open(piece) as file:
            return self._load(file, piece, dtype)

    def _load(self, file: IO[bytes], piece: Piece, dtype: torch.dtype) -> Tensor:
        check_block(file, piece.start, piece.length)
        window: Any = Window(file, piece.start, piece.length)
        try:
            value = torch.load(window, map_location="cpu", weights_only=True)
        except Exception as error:
            raise damaged_at(file, piece.start, error) from error
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
        used = {info.relative_path for info in self.metadata.storage_data.values()}
        if unknown := sorted(used - state["files"].keys()):
            raise CheckpointLayoutError(damaged(path, [f"{name} has no hash in {STATE}" for name in unknown]))

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def verify(self) -> None:
        """Reads every file and compares it with its hash, as `check_files`."""
        check_files(self.path, self.state["files"])
        require_unchanged(self.path, self.state)


def require_unchanged(path: Path, state: Mapping[str, Any]) -> None:
    """Raises unless the state that was read is the one that was saved."""
    if not is_unchanged(state):
        raise CheckpointLayoutError(damaged(path, [f"{STATE} is not as it was saved"]))


def check_files(path: Path, files: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Compares sizes, and a rank's share of the hashes: of n ranks, rank r reads files r, r + n, ...

    Raises:
        CheckpointLayoutError: Naming the files that are missing or changed.
    """
    mine = {*sorted(files)[rank::size]}
    wrong = [found for name in files if (found := check_file(path, name, files, content=name in mine))]
    if wrong:
        raise CheckpointLayoutError(damaged(path, wrong))


def check_file(path: Path, name: str, files: Mapping[str, Any], *, content: bool = True) -> str | None:
    """What is wrong with a file of a checkpoint, in words; None if nothing. Without `content` its size is all."""
    try:
        if not inside(path, name):
            return f"{name[:200]} is no name of a file in it"
        if leads_out(path, name):
            return f"{name} is a link that leads out of it"
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
    except OSError as error:
        return f"{name} cannot be read ({error.strerror or error})"
    return None


def damaged(path: Path, wrong: list[str]) -> str:
    """The words for a checkpoint whose files are not those that were saved."""
    return (
        f"{path} is damaged: {'; '.join(wrong[:4])}. Restore the file from a copy, or use the checkpoint before: "
        f"mv {path} {path}.damaged, then start again; the newest whole one is taken"
    )
