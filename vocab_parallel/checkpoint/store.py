"""Checkpoints by torch.distributed.checkpoint: vocabulary rows from their owners, replicated tensors once."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters

FORMAT = 1
STATE = "state.json"  # written last: a folder without it is not a checkpoint


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int | None = None,
) -> Path:
    """Saves `model` and `optimizer` as ``folder/step-<step>``.

    Written aside, then renamed by one rank after a barrier: a crash leaves the previous checkpoint whole. Each
    vocabulary row and its moments are written by the rank that owns them; a tied weight has one key; what is
    replicated is written once.

    Args:
        folder: holds the checkpoints of one run; on storage that every rank sees.
        model: contains at least one vocabulary-sharded parameter.
        optimizer: its moments are saved too; None saves weights only.
        step: names the checkpoint.
        extra: JSON values to keep beside the tensors; ``vocabulary_sha256`` among them is compared at load.
        keep: how many checkpoints to keep; None keeps all.

    Returns:
        The checkpoint's folder.

    Collectives:
        Barriers, and the plan exchange of torch.distributed.checkpoint; not counted in ``shard.traffic``.
    """
    root = Path(folder)
    final, aside = root / _name(step), root / f".{_name(step)}.partial"
    shard = _shard_of(model)
    if shard.rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _barrier(shard)
    tensors = _tensors(model, optimizer)
    with _quiet_alone():
        save(
            _as_global(tensors, model, shard),
            storage_writer=FileSystemWriter(aside),
            process_group=shard.group,
            no_dist=shard.group is None,
        )
    _barrier(shard)
    if shard.rank == 0:
        state = {"format": FORMAT, "step": step, "layout": _layout(shard), "tensors": _listing(tensors)}
        with (aside / STATE).open("w", encoding="utf-8") as file:
            json.dump({**state, "extra": dict(extra or {})}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _swap_in(aside, final)
        _prune(root, keep)
    _barrier(shard)
    return final


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    vocabulary_sha256: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """Loads a checkpoint into `model`, and into `optimizer` if given, in place.

    Args:
        folder: one checkpoint, as `save_checkpoint` returned it.
        model: same architecture and layout as saved.
        optimizer: over the model's parameters; its learning rate and other settings stay as they are.
        vocabulary_sha256: of the vocabulary in use; compared with the saved one when both are known.

    Returns:
        The step, and the `extra` values that were saved.

    Raises:
        CheckpointLayoutError: on every rank: not a whole checkpoint, another vocabulary, layout, TP size or
            architecture.
    """
    path = Path(folder)
    shard = _shard_of(model)
    state = read_state(path)
    reader = _Reader(path)
    reader.read_metadata()  # refuses what it must not name before any rank waits for another
    _compare_layout(path, state, shard, vocabulary_sha256)
    if optimizer is not None:
        _make_moments(optimizer)
    tensors = _tensors(model, optimizer)
    _compare_tensors(path, state["tensors"], _listing(tensors))
    with _quiet_alone():
        load(
            _as_global(tensors, model, shard),
            storage_reader=reader,
            process_group=shard.group,
            no_dist=shard.group is None,
        )
    return int(state["step"]), dict(state["extra"])


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint with the highest step in `folder`; None if there is none."""
    found = _whole_checkpoints(Path(folder))
    return found[-1] if found else None


def read_state(path: Path) -> dict[str, Any]:
    """The JSON part of a checkpoint: step, layout, tensor shapes, extra.

    Raises:
        CheckpointLayoutError: `path` is not a whole checkpoint of this format.
    """
    if not _is_whole(path):
        raise CheckpointLayoutError(f"{path} is not a whole checkpoint: expected {STATE} and .metadata in it")
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise CheckpointLayoutError(
            f"{path} has checkpoint format {state.get('format')!r}, this version reads {FORMAT}"
        )
    return state


class _Reader(FileSystemReader):
    """FileSystemReader whose metadata file may name plain types only; it loads tensors weights-only by itself."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found: Metadata = _MetadataUnpickler(file).load()
        found.storage_meta = getattr(found, "storage_meta", None) or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        plain = module.startswith("torch.distributed.checkpoint.") and not name.startswith("_load")
        if plain or (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise CheckpointLayoutError(f"a checkpoint's .metadata names {module}.{name}, which such a file has no use for")


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in _DTYPES),
}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every tensor to keep. Parameters come once each, so a tie has one key; moments carry their owner's name."""
    named = dict(model.named_parameters())
    tensors = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
    persistent = model.state_dict(keep_vars=True)
    tensors.update({f"model.{name}": b for name, b in model.named_buffers() if name in persistent})
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in named.items()}
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{names[id(parameter)]}.{key}"] = value
    return tensors


def _as_global(tensors: dict[str, Tensor], model: nn.Module, shard: VocabShard) -> dict[str, Tensor]:
    """Presents each local vocabulary shard, and each moment of its shape, as its part of one global tensor."""
    if shard.group is None:
        return dict(tensors)
    mesh = DeviceMesh.from_group(shard.group, next(iter(tensors.values())).device.type)
    sharded = {name: parameter.shape for name, (parameter, _) in vocab_parameters(model).items()}
    result: dict[str, Tensor] = {}
    for key, value in tensors.items():
        shape = next((s for n, s in sharded.items() if key == f"model.{n}" or key.startswith(f"optimizer.{n}.")), None)
        is_sharded = shape is not None and value.shape == shape
        result[key] = DTensor.from_local(value, mesh, [Shard(0)], run_check=False) if is_sharded else value
    return result


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Lets a fresh optimizer create its state, by one step with zero gradients and rate that changes no weight."""
    if optimizer.state:
        return
    groups = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0 * group["lr"]
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group["lr"] = saved["lr"]


def _compare_layout(path: Path, state: dict[str, Any], shard: VocabShard, sha256: str | None) -> None:
    saved, mine = state["layout"], _layout(shard)
    if saved != mine:
        raise CheckpointLayoutError(
            f"{path} holds the vocabulary layout {_words(saved)}; this job has {_words(mine)}. "
            "Start with the saved number of ranks, vocabulary and padding"
        )
    there = state["extra"].get("vocabulary_sha256")
    if sha256 is not None and there is not None and there != sha256:
        raise CheckpointLayoutError(
            f"{path} was made with the vocabulary sha256 {there[:16]}…, {_words(saved)}; this job uses sha256 "
            f"{sha256[:16]}…, {_words(mine)}: the same ids would mean other tokens"
        )


def _compare_tensors(path: Path, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    wrong = [f"{key}: saved {saved.get(key)}, here {mine[key]}" for key in mine if saved.get(key) != mine[key]]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointLayoutError(f"{path} does not fit this model: {'; '.join(wrong[:3])}{more}")


def _listing(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in tensors.items()}


def _layout(shard: VocabShard) -> dict[str, int]:
    layout = shard.layout
    return {"vocab_size": layout.vocab_size, "padded_size": layout.padded_size, "tp_size": layout.tp_size}


def _words(layout: dict[str, int]) -> str:
    return f"V={layout['vocab_size']} padded to {layout['padded_size']} over {layout['tp_size']} ranks"


def _shard_of(model: nn.Module) -> VocabShard:
    shards = [shard for _, shard in vocab_parameters(model).values()]
    if not shards:
        raise CheckpointLayoutError("the model has no vocabulary-sharded parameter, so no layout to save or compare")
    return shards[0]


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """One rank without torch.distributed is meant; DCP warns of it each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _barrier(shard: VocabShard) -> None:
    if shard.group is not None:
        dist.barrier(group=shard.group)


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _is_whole(path: Path) -> bool:
    return (path / STATE).is_file() and (path / ".metadata").is_file()


def _whole_checkpoints(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if re.fullmatch(r"step-\d{8,}", path.name) and _is_whole(path))


def _swap_in(aside: Path, final: Path) -> None:
    """Gives `aside` its name; one of that name (a step saved twice) goes only after."""
    old = aside.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        os.replace(final, old)
    os.replace(aside, final)
    shutil.rmtree(old, ignore_errors=True)


def _prune(root: Path, keep: int | None) -> None:
    for path in _whole_checkpoints(root)[: -keep if keep else 0]:
        shutil.rmtree(path)
