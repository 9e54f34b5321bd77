"""The metadata file of `torch.distributed.checkpoint`, not trusted: plain types, names inside its folder."""

from __future__ import annotations

import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from vocab_parallel.checkpoint.placing import METADATA
from vocab_parallel.errors import CheckpointLayoutError


class PlainReader(FileSystemReader):
    """FileSystemReader whose metadata file may name plain types only; it loads tensors weights-only by itself."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, its names and sizes checked against the files.

        Raises:
            CheckpointLayoutError: it names something else than plain types, or files or sizes that cannot be.
        """
        path = Path(self.path)
        try:
            with (path / METADATA).open("rb") as file:
                found: Metadata = _MetadataUnpickler(file).load_plain()
            _check_metadata(path, found)
        except CheckpointLayoutError:
            raise
        except Exception as error:  # a broken pickle raises nearly anything
            raise CheckpointLayoutError(f"{path / METADATA} is damaged ({type(error).__name__}: {error})") from error
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _MetadataUnpickler(pickle.Unpickler):
    """Knows a few classes; one that was changed by the file, as a pickle can, is put back."""

    def load_plain(self) -> Any:
        self.before: dict[type, dict[str, Any]] = {}
        try:
            return self.load()
        finally:
            changed = {kind: now for kind, old in self.before.items() if (now := dict(vars(kind))) != old}
            for kind, now in changed.items():
                for name in now.keys() - self.before[kind].keys():
                    delattr(kind, name)
                for name, value in self.before[kind].items():
                    if now.get(name) is not value:
                        setattr(kind, name, value)
            if changed:
                names = ", ".join(kind.__name__ for kind in changed)
                raise CheckpointLayoutError(f"a checkpoint's .metadata changes the classes {names}")

    def find_class(self, module: str, name: str) -> Any:
        if module == _MEGATRON and name in _OF_MEGATRON:
            return self._seen(_OF_MEGATRON[name])
        if (module, name) in _PLAIN:
            found = super().find_class(module, name)
            return self._seen(found) if isinstance(found, type) else partial(found) if callable(found) else found
        raise CheckpointLayoutError(f"a checkpoint's .metadata names {module}.{name}, which such a file has no use for")

    def _seen(self, kind: type) -> type:
        self.before.setdefault(kind, dict(vars(kind)))
        return kind


_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_OF_MEGATRON = {"MCoreMetadata": Metadata, "MCoreSavePlan": SavePlan}  # its subclasses up to 0.15, without its code
_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    *(
        (f"{_DCP}.metadata", name)
        for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "StorageMeta",
                     "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING")
    ),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *(  # Megatron-core 0.16 keeps its ranks' plans beside
        (f"{_DCP}.planner", name)
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
}  # fmt: skip


def _check_metadata(path: Path, found: Metadata) -> None:
    """Every block lies in a file of the folder, and no tensor claims more bytes than its blocks have."""
    lengths: dict[str, int] = {}
    held: dict[str, int] = {}
    for index, info in found.storage_data.items():
        name = str(info.relative_path)
        if name not in lengths:
            if not inside(path, name) or not (path / name).is_file():
                raise CheckpointLayoutError(f"{path}: the file {name!r} that {METADATA} names is missing")
            lengths[name] = (path / name).stat().st_size
        if info.offset < 0 or info.length < 0 or info.offset + info.length > lengths[name]:
            raise CheckpointLayoutError(
                f"{path / name} has {lengths[name]} bytes, {METADATA} expects {index.fqn} at {info.offset} to "
                f"{info.offset + info.length}: the file was cut off"
            )
        held[index.fqn] = held.get(index.fqn, 0) + int(info.length)
    for key, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        claimed = math.prod(entry.size) * entry.properties.dtype.itemsize
        if min(entry.size, default=0) < 0 or claimed > held.get(key, 0):
            raise CheckpointLayoutError(
                f"{path}: {key} of shape {list(entry.size)} needs {claimed} bytes, its blocks have {held.get(key, 0)}"
            )


def inside(path: Path, name: str) -> bool:
    """Whether a name from a file stays in its folder."""
    given = Path(name)
    return bool(name) and not given.is_absolute() and ".." not in given.parts
