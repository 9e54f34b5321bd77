"""Files of `torch.save` from other programs: tensors and plain values are read, classes of theirs are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.archives import names_in
from vocab_parallel.checkpoint.rows import BLOCK_BYTES
from vocab_parallel.errors import CheckpointLayoutError


class Opaque:
    """Stands for an object of a class that is not loaded: its attributes, if it was saved with any, and no code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update({name: value for name, value in state.items() if isinstance(name, str)})

    def __repr__(self) -> str:
        return "an object of another program"


def load_plain(path: Path, *, mapped: bool = True) -> Any:
    """What a file of `torch.save` holds; objects of classes that weights-only loading refuses come as `Opaque`.

    Args:
        mapped: Whether tensors lie in the mapped file, and are read where they are used; else they are read now.

    Memory:
        The values that are no tensors.

    Raises:
        CheckpointLayoutError: The file is missing, damaged, of before torch 1.6, or calls the operating system.
    """
    try:
        unknown = names_in(path)
        with torch.serialization.safe_globals([(Opaque, name) for name in unknown]):
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError as error:
        raise CheckpointLayoutError(f"{path} is missing: not all ranks' files of the checkpoint are here") from error
    except Exception as error:  # a broken pickle raises nearly anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        said = next((line for line in lines if line.startswith("Trying to load")), lines[0])[:300]
        raise CheckpointLayoutError(
            f"{path} cannot be read as a file of torch.save ({type(error).__name__}: {said}): it is damaged, or was "
            "not saved by a training job. Copy it again from where it was saved"
        ) from error


class MappedFiles:
    """Elements of tensors in files of `torch.save`, which are mapped while they are read.

    Mapped pages count as this process's memory, so after some of them all files are let go, and opened anew.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}
        self._touched = 0

    def read_into(self, out: Tensor, path: Path, at: tuple[str | int, ...], start: int) -> None:  # out: [n]
        """Fills `out` with elements of a tensor in a file.

        Args:
            out: Of the tensor's dtype.
            path: Of the file.
            at: Keys that lead to the tensor, from the file's value on.
            start: The first element, in memory order.

        Memory:
            What one call reads, or `BLOCK_BYTES` of several calls, stays mapped.
        """
        if self._touched >= BLOCK_BYTES:
            self._open.clear()
            self._touched = 0
        if path not in self._open:
            self._open[path] = load_plain(path)
        value = self._open[path]
        for key in at:
            value = value[key]
        out.copy_(value.reshape(-1)[start : start + len(out)])
        self._touched += out.nbytes
