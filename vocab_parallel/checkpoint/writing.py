"""Writing checkpoints: block by block, hashed on the way, aside until they are whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from vocab_parallel.checkpoint.placing import METADATA, STATE, open_aside, put_in_place, require_replaceable

if TYPE_CHECKING:
    from vocab_parallel.vocabulary.manifest import Manifest

FORMAT = 2
VOCABULARY = "vocabulary.json"
MANIFEST = "manifest.json"
ASSETS = "assets"
_COPY = 2**20


class Described(Protocol):
    """A tensor, or what stands for one."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Sequence[int]: ...


def write_checkpoint(
    final: Path,
    parts: Sequence[Mapping[str, Tensor]],
    *,
    state: Mapping[str, Any],
    manifest: Manifest | None = None,
    assets: Mapping[str, Path | bytes] | None = None,
) -> Path:
    """Writes a whole checkpoint from one process, without a process group.

    Args:
        final: the folder's name; one that is there is replaced.
        parts: tensors and `Rows` by key; those of ``parts[i]`` go to the files of rank i. What is in several parts
            and no `Rows` is written once.
        state: as `make_state` makes it, without ``files``.
        manifest: saved beside it.
        assets: files to carry along, by their name in the folder ``assets``, or of ``vocabulary.json``.

    Memory:
        One block of `BLOCK_BYTES` at a time, and the largest tensor that is no `Rows`.
    """
    require_replaceable(final)
    aside = open_aside(final)
    try:
        writer = BlockWriter(aside)
        _save_alone(parts, writer)
        commit(aside, final, {**state, "files": writer.files | write_extras(aside, manifest, assets)})
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def make_state(
    step: int,
    tensors: Mapping[str, Described],
    *,
    layout: Mapping[str, int],
    tables: Sequence[str],
    ties: Mapping[str, str] | None = None,
    scalars: Mapping[str, float | int | bool] | None = None,
    extra: Mapping[str, Any] | None = None,
    optimizer: str | None = None,
) -> dict[str, Any]:
    """The JSON part of a checkpoint; `tensors` by key in their whole shapes, `optimizer` the name of its class."""
    return {
        "format": FORMAT,
        "step": step,
        "layout": dict(layout),
        "tables": list(tables),
        "ties": dict(ties or {}),
        "tensors": {key: [dtype_name(value.dtype), list(value.shape)] for key, value in tensors.items()},
        "scalars": dict(scalars or {}),
        "extra": dict(extra or {}),
        "optimizer": optimizer,
    }


class BlockWriter(FileSystemWriter):
    """A `FileSystemWriter` that holds one block at a time and hashes what it writes.

    Attributes:
        files: size and sha256 of each file that this process has written, by name.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[str, dict[str, Any]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file a rank, its items in order."""
        name: str = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        done: Future[list[WriteResult]] = Future()
        if not plan.items:
            done.set_result(results)
            return done
        with _Hashed(Path(self.path) / name) as file:
            for item in plan.items:
                value, offset = planner.resolve_data(item), file.tell()
                if isinstance(value, Tensor):
                    _save_tensor(value, file)
                else:
                    file.write(value.getbuffer())
                length = file.tell() - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        self.files[name] = file.described()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        """Without the folder's path and a random number: the same content gives the same bytes, anywhere."""
        return StorageMeta()

    def finish(self, metadata: Any, results: Any) -> None:
        """On the coordinator: the list of what is where."""
        super().finish(metadata, results)
        self.files[METADATA] = described(Path(self.path) / METADATA)


def write_extras(
    aside: Path, manifest: Manifest | None, assets: Mapping[str, Path | bytes] | None
) -> dict[str, dict[str, Any]]:
    """Writes what stands beside the tensors; returns size and sha256 by name."""
    files = {name: write_file(aside / name, content) for name, content in (assets or {}).items()}
    if manifest is not None:
        files[MANIFEST] = write_file(aside / MANIFEST, manifest.to_text().encode())
    return files


def commit(aside: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Writes the state with its own hash, and gives `aside` its name."""
    write_file(aside / STATE, json_bytes({**state, "sha256": _digest(state)}))
    put_in_place(aside, final)


def is_unchanged(state: Mapping[str, Any]) -> bool:
    """Whether a state that was read is the one that was saved; True of one that was saved without a hash."""
    return "sha256" not in state or bool(state["sha256"] == _digest(state))


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json_bytes({key: state[key] for key in state if key != "sha256"})).hexdigest()


def write_file(path: Path, content: Path | bytes) -> dict[str, Any]:
    """Writes or copies a file; returns its size and sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _Hashed(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as source:
                while block := source.read(_COPY):
                    file.write(block)
    return file.described()


def described(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, read block by block."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_COPY):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def json_bytes(value: Any) -> bytes:
    """Readable JSON of finite numbers."""
    return json.dumps(value, indent=1, allow_nan=False).encode()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


class _Hashed:
    """A new file that hashes what is written to it and is on the disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest, self._size = path, hashlib.sha256(), 0
        self._file: BinaryIO

    def __enter__(self) -> _Hashed:
        self._file = self._path.open("wb")
        return self

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def described(self) -> dict[str, Any]:
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}


def _save_tensor(value: Tensor, file: _Hashed) -> None:
    try:
        torch.save(_alone_in_storage(value), cast(IO[bytes], file))
    except RuntimeError as error:  # torch hides that the disk is full behind an error of its archive
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def _alone_in_storage(value: Tensor) -> Tensor:
    """On the CPU, contiguous, in a storage of its own: else the whole storage would be written."""
    value = value.detach().cpu().contiguous()
    return value.clone() if value.untyped_storage().nbytes() != value.nbytes else value


def plan_part(part: Mapping[str, Tensor], writer: BlockWriter, first: bool) -> tuple[DefaultSavePlanner, SavePlan]:
    """What one rank has to write, before it is known what others write."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(part), writer.storage_meta(), first)
    return planner, planner.create_local_plan()


def merge_plans(
    planner: DefaultSavePlanner, writer: BlockWriter, plans: list[SavePlan]
) -> tuple[list[SavePlan], Metadata]:
    """What each rank writes, each block once; and the metadata. The same from the same plans, on any rank."""
    merged, metadata = planner.create_global_plan(plans)
    return writer.prepare_global_plan(merged), metadata


def _save_alone(parts: Sequence[Mapping[str, Tensor]], writer: BlockWriter) -> None:
    """What `torch.distributed.checkpoint.save` does over ranks, for several parts in one process."""
    writer.set_up_storage_writer(True)
    planners, plans = zip(*(plan_part(part, writer, at == 0) for at, part in enumerate(parts)), strict=True)
    merged, metadata = merge_plans(planners[0], writer, list(plans))
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, merged, strict=True)
    ]
    writer.finish(metadata, results)
