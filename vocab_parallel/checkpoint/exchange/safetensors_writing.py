"""Writing safetensors files, block by block, without the `safetensors` package."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.checkpoint.exchange.safetensors_files import DTYPES, INDEX, NAME
from vocab_parallel.errors import CheckpointLayoutError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ToWrite(NamedTuple):
    """A tensor to write: its blocks, in order, are asked for once, when it is its turn."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(
    folder: Path, tensors: Mapping[str, ToWrite], *, max_shard_bytes: int, metadata: Mapping[str, str] | None = None
) -> list[str]:
    """Writes model.safetensors, or several files and an index if there is more than `max_shard_bytes`.

    Returns:
        The names of the files.

    Memory:
        One block.
    """
    metadata = {"format": "pt"} if metadata is None else metadata
    files: list[dict[str, ToWrite]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if files[-1] and held + tensor.nbytes > max_shard_bytes:
            files.append({})
            held = 0
        files[-1][name] = tensor
        held += tensor.nbytes
    if len(files) == 1:
        write_file(folder / NAME, files[0], metadata)
        return [NAME]
    names = [f"model-{at:05}-of-{len(files):05}.safetensors" for at in range(1, len(files) + 1)]
    for name, one in zip(names, files, strict=True):
        write_file(folder / name, one, metadata)
    weight_map = {key: name for name, one in zip(names, files, strict=True) for key in one}
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with Synced(folder / INDEX) as file:
        file.write((json.dumps(index, indent=2) + "\n").encode())
    return [*names, INDEX]


def write_file(path: Path, tensors: Mapping[str, ToWrite], metadata: Mapping[str, str]) -> None:
    """Writes one file: wide dtypes first, so that each tensor lies at a multiple of its number's size."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise CheckpointLayoutError(f"{name} is of {tensor.dtype}, which safetensors does not know: give a dtype")
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with Synced(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for block in tensors[name].blocks():
                _write_block(file, block.to(tensors[name].dtype))
            end = 8 + len(text) + header[name]["data_offsets"][1]
            if file.tell() != end:
                raise CheckpointLayoutError(f"{path}: the blocks of {name} end at byte {file.tell():,}, not at {end:,}")


def _write_block(file: IO[bytes], block: Tensor) -> None:
    block = block.detach().cpu().contiguous()
    if block.nbytes:
        file.write(memoryview((ctypes.c_ubyte * block.nbytes).from_address(block.data_ptr())))


class Synced:
    """A new file that is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> IO[bytes]:
        self._file: IO[bytes] = self._path.open("wb")
        return self._file

    def __exit__(self, *_: object) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
