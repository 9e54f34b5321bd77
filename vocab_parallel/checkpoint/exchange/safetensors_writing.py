"""Writing safetensors files, block by block, without the `safetensors` package."""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


def write_safetensors(folder: Path, tensors: Mapping[str, ToWrite], *, max_shard_bytes: int) -> None:
    """Writes model.safetensors, or several files and an index if there is more than `max_shard_bytes`.

    Memory:
        One block.
    """
    files: list[dict[str, ToWrite]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if files[-1] and held + tensor.nbytes > max_shard_bytes:
            files.append({})
            held = 0
        files[-1][name] = tensor
        held += tensor.nbytes
    if len(files) == 1:
        write_file(folder / NAME, files[0])
        return
    weight_map: dict[str, str] = {}
    for at, one in enumerate(files, 1):
        name = f"model-{at:05}-of-{len(files):05}.safetensors"
        write_file(folder / name, one)
        weight_map |= dict.fromkeys(one, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with _synced(folder / INDEX) as file:
        file.write((json.dumps(index, indent=2) + "\n").encode())


def write_file(path: Path, tensors: Mapping[str, ToWrite]) -> None:
    """Writes one file: wide dtypes first, so that each tensor lies at a multiple of its number's size."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
    with _synced(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for block in tensors[name].blocks():
                _write_block(file, block)
            end = 8 + len(text) + header[name]["data_offsets"][1]
            if file.tell() != end:
                raise CheckpointLayoutError(f"{path}: the blocks of {name} end at byte {file.tell():,}, not at {end:,}")


def _write_block(file: IO[bytes], block: Tensor) -> None:
    block = block.detach().cpu().contiguous()
    if block.nbytes:
        file.write(memoryview((ctypes.c_ubyte * block.nbytes).from_address(block.data_ptr())))


@contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """A new file that is on the disk when it is closed."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
