"""Where the numbers of a block lie in a file of `torch.distributed.checkpoint`, so that single rows can be read."""

from __future__ import annotations

import math
import zipfile
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from vocab_parallel.archives import UnsafeFile, check_archive
from vocab_parallel.errors import CheckpointLayoutError


@dataclass(frozen=True)
class Piece:
    """A block of a tensor in a file: `[offset, offset + rows)` of its first dimension, all of the others."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def data_offset(file: IO[bytes], piece: Piece, dtype: torch.dtype) -> int | None:
    """Where a block's numbers begin in it if they lie there row by row; None: load it to know."""
    check_block(file, piece.start, piece.length)
    window: Any = Window(file, piece.start, piece.length)
    try:
        laid = torch.load(window, map_location="meta", weights_only=True)
        nbytes = math.prod(piece.sizes) * dtype.itemsize
        plain = (
            isinstance(laid, Tensor) and tuple(laid.shape) == piece.sizes and laid.dtype == dtype
            and laid.is_contiguous() and laid.storage_offset() == 0
        )  # fmt: skip
        window.seek(0)
        with zipfile.ZipFile(window) as archive:
            entries = [info for info in archive.infolist() if info.filename.split("/")[1:] == ["data", "0"]]
            if not plain or len(entries) != 1 or entries[0].compress_type or entries[0].file_size != nbytes:
                return None
            window.seek(entries[0].header_offset)
            header = window.read(30)
            name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
            return int(entries[0].header_offset) + 30 + name + extra
    except Exception as error:  # a broken archive raises nearly anything
        raise damaged_at(file, piece.start, error) from error


def check_block(file: IO[bytes], start: int, length: int) -> None:
    """Looks through a block of a file before it is loaded.

    Raises:
        CheckpointLayoutError: It is damaged, or would become more than its bytes in the file.
    """
    window: Any = Window(file, start, length)
    try:
        if unknown := check_archive(window, length):
            raise UnsafeFile(f"it names {min(unknown)[:80]}")
    except Exception as error:  # a broken archive raises nearly anything
        raise damaged_at(file, start, error) from error


def damaged_at(file: IO[bytes], start: int, error: Exception) -> CheckpointLayoutError:
    """The words for a block that cannot be read."""
    what = f"{type(error).__name__}: {str(error)[:200]}"
    return CheckpointLayoutError(f"{file.name} is damaged at byte {start} ({what})")


def read_runs(
    file: IO[bytes], base: int, rows: Tensor, target: memoryview, row_bytes: int, places: Tensor
) -> None:  # fmt: skip
    """Reads rows at `base` of a file into places of the target, consecutive ones together."""
    breaks = ((rows[1:] - rows[:-1] != 1) | (places[1:] - places[:-1] != 1)).nonzero()[:, 0] + 1
    edges = [0, *breaks.tolist(), len(rows)]
    first, at = rows[torch.tensor(edges[:-1])].tolist(), places[torch.tensor(edges[:-1])].tolist()
    for begin, end, row, place in zip(edges[:-1], edges[1:], first, at, strict=True):
        file.seek(base + row * row_bytes)
        part = target[place * row_bytes : (place + end - begin) * row_bytes]
        if file.readinto(part) != len(part):  # type: ignore[attr-defined]
            raise CheckpointLayoutError(f"{file.name} ends before its rows do: the file was cut off")


class Window:
    """Bytes `[start, start + length)` of an open file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data

    def readinto(self, target: Any) -> int:
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def readline(self) -> bytes:
        raise OSError("not a text file")

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        pass

    @property
    def closed(self) -> bool:
        return False
