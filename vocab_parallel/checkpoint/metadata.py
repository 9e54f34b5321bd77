"""The metadata file of `torch.distributed.checkpoint`, not trusted: plain types, names inside its folder."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.futures import Future

from vocab_parallel.archives import PlainUnpickler, UnsafeFile
from vocab_parallel.checkpoint.blocks import check_block
from vocab_parallel.checkpoint.placing import METADATA
from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.files import read_bytes

_LARGEST = 2**28  # bytes: that of a checkpoint of a terabyte in blocks of 4 MiB has a quarter


class PlainReader(FileSystemReader):
    """FileSystemReader whose metadata file may name plain types only, and whose blocks are looked through first."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata, its names and sizes checked against the files.

        Raises:
            CheckpointLayoutError: it names something else than plain types, or files or sizes that cannot be.
        """
        path = Path(self.path)
        try:
            found: Metadata = _MetadataUnpickler(read_bytes(path / METADATA, _LARGEST)).load()
            _check_kinds(found)
            _check_metadata(path, found)
        except CheckpointLayoutError:
            raise
        except VocabularyError as error:
            raise CheckpointLayoutError(str(error)) from error
        except UnsafeFile as error:
            raise CheckpointLayoutError(f"{path / METADATA} is damaged, or made to do harm: {error}") from error
        except Exception as error:  # a broken pickle raises nearly anything
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointLayoutError(f"{path / METADATA} is damaged ({what})") from error
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads the blocks of a plan.

        Raises:
            CheckpointLayoutError: One is damaged, or would become more than its bytes in the file.
        """
        for at in {item.storage_index for item in plan.items}:
            info = self.storage_data[at]
            with (Path(self.path) / info.relative_path).open("rb") as file:
                check_block(file, info.offset, info.length)
        return super().read_data(plan, planner)


class _MetadataUnpickler(PlainUnpickler):
    """Knows a few classes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == _MEGATRON and name in _OF_MEGATRON:
            return _OF_MEGATRON[name]
        if (module, name) in _PLAIN:
            return pickle._Unpickler.find_class(self, module, name)
        if name in ("PosixPath", "WindowsPath") and module in ("pathlib", "pathlib._local"):
            return _joined  # of either system; nothing of it is used
        raise CheckpointLayoutError(f"a checkpoint's .metadata names {module}.{name}, which such a file has no use for")

    def count(self, keys: list[Any]) -> None:
        if not all(type(key) is str or _is_key(key) for key in keys):
            raise UnsafeFile("a key that is no name and no place in a tensor")
        super().count(keys)


_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_OF_MEGATRON = {"MCoreMetadata": Metadata, "MCoreSavePlan": SavePlan}  # its subclasses up to 0.15, without its code
_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
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
                raise CheckpointLayoutError(f"{path}: the file {name[:200]!r} that {METADATA} names is missing")
            if leads_out(path, name):
                raise CheckpointLayoutError(f"{path}: the file {name!r} is a link that leads out of the checkpoint")
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


def _check_kinds(found: Any) -> None:
    """Every part is of its type, and no block is larger than its tensor; the pickle could have put anything there."""
    good = isinstance(found, Metadata) and _is_dict(found.state_dict_metadata, str)
    if not good or not _is_dict(found.storage_data, MetadataIndex):
        raise UnsafeFile("it is no list of tensors and of the blocks that hold them")
    for key, entry in found.state_dict_metadata.items():
        if type(entry) is not BytesStorageMetadata and not _is_tensor(entry):
            is_shaped = type(entry) is TensorStorageMetadata and _is_size(entry.size)
            shape = f" of shape {list(entry.size)}" if is_shaped else ""
            raise UnsafeFile(f"{key[:200]}{shape} is no tensor in blocks that lie in it")
    if not all(_is_place(at, info) for at, info in found.storage_data.items()):
        raise UnsafeFile("it names a place that is none in a file")


def _is_key(key: Any) -> bool:
    if type(key) is MetadataIndex:
        return type(key.fqn) is str and (key.offset is None or _is_size(key.offset))
    return all(type(one) in (str, int) for one in (key if isinstance(key, tuple) else (key,)))


def _joined(*parts: str) -> str:
    return "/".join(parts)


def _is_dict(value: Any, key: type) -> bool:
    return isinstance(value, dict) and all(type(one) is key for one in value)


def _is_tensor(entry: Any) -> bool:
    if type(entry) is not TensorStorageMetadata or not _is_size(entry.size) or type(entry.chunks) is not list:
        return False
    about: Any = entry.properties
    return isinstance(about.dtype, torch.dtype) and all(_fits(one, entry.size) for one in entry.chunks)


def _is_place(at: Any, info: Any) -> bool:
    if type(at.fqn) is not str or type(info) is not _StorageInfo or type(info.relative_path) is not str:
        return False
    good = len(at.fqn) <= 2**16 and len(info.relative_path) <= 2**12 and (at.offset is None or _is_size(at.offset))
    numbers = _is_size((info.offset, info.length))
    return good and numbers and not getattr(info, "transform_descriptors", None)  # such as compression


def _is_size(value: Any) -> bool:
    if not isinstance(value, tuple) or len(value) > 64:
        return False
    return all(type(one) is int and abs(one) < 2**62 for one in value)


def _fits(chunk: Any, size: torch.Size) -> bool:
    if type(chunk) is not ChunkStorageMetadata or not _is_size(chunk.offsets) or not _is_size(chunk.sizes):
        return False
    each = zip(chunk.offsets, chunk.sizes, size, strict=False)
    inside = all(at >= 0 <= count and at + count <= whole for at, count, whole in each)
    return inside and len(chunk.offsets) == len(chunk.sizes) == len(size)


def inside(path: Path, name: str) -> bool:
    """Whether a name from a file stays in its folder; a link in it may lead elsewhere, see `leads_out`."""
    given = Path(name)
    short = len(name) <= 2**11 and all(len(part.encode("utf-8", "replace")) <= 255 for part in given.parts)
    return bool(name) and short and not given.is_absolute() and ".." not in given.parts and "\0" not in name


def leads_out(path: Path, name: str) -> bool:
    """Whether a link, the file itself or a folder on the way to it, leads out of the folder."""
    try:
        return not (path / name).resolve().is_relative_to(path.resolve())
    except (OSError, ValueError, RuntimeError):  # names that are too long, links in a circle
        return True
