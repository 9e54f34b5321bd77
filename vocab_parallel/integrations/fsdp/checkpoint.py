"""Checkpoints of a model under FSDP2: `torch.distributed.checkpoint` files that hold real rows, a tied weight once."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.tensor import DTensor

from vocab_parallel import tying
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.fsdp.setup import reshard
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # in names of parameters, not in names of checkpoints


def save(folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Saves model and optimizer state with `torch.distributed.checkpoint`: real rows, a tied weight once.

    Tables have their `[vocab_size, ...]` in the files, whatever the padding, so that `load` takes them at any other
    number of ranks, and any reader of DCP finds plain tensors. Keys: `model.<name>`, `optimizer.<name>.<moment>`.

    Collectives:
        Those of `torch.distributed.checkpoint`; not counted in `shard.traffic`.
    """
    save_dcp(_state(model, optimizer), storage_writer=FileSystemWriter(folder))


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Loads what `save` wrote, in place, at any number of ranks of either kind and any padding.

    Padding rows become zero.

    Args:
        optimizer: Gets its moments and step counts; its learning rate and other settings stay as they are.

    Raises:
        CheckpointLayoutError: Another vocabulary size or architecture; on every rank.
        TyingError: A tie is broken after the load.
    """
    if optimizer is not None and not optimizer.state:
        optimizer.zero_grad()  # or torch would not make the state that is to be filled
    state = _state(model, optimizer)
    reader = FileSystemReader(folder)
    _compare(os.fspath(folder), reader.read_metadata().state_dict_metadata, state)
    load_dcp(state, storage_reader=reader)
    for value in state.values():
        if isinstance(value, _RealRows):
            value.padding.zero_()
    tying.verify_tied(model, optimizer, required=False)


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded model on every rank, by name: real rows, a tied weight under its first name only.

    Collectives:
        All-gathers of each parameter; the vocabulary's over both dimensions.
    """
    reshard(model)
    layouts = {_plain(name): shard.layout for name, (_, shard) in vocab_parameters(model).items()}
    whole = {}
    for name, value in _model_state(model).items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        whole[name] = tensor[: layouts[name].vocab_size].clone() if name in layouts else tensor
    return whole


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _model_state(model: nn.Module) -> dict[str, Any]:
    """What `get_model_state_dict` gives, a tied weight under its first name only."""
    once = {_plain(name) for name, _ in model.named_parameters()}
    aliases = {_plain(name) for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: value for name, value in get_model_state_dict(model).items() if name not in aliases}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What is saved, and loaded into in place: tensors by key, the vocabulary's as their real rows."""
    reshard(model)
    sharded = {_plain(name): (parameter, shard) for name, (parameter, shard) in vocab_parameters(model).items()}
    state = {f"model.{name}": _rows(value, *sharded.get(name, ())) for name, value in _model_state(model).items()}
    if optimizer is not None:
        moments: Any = get_optimizer_state_dict(model, optimizer)["state"]
        for name, values in moments.items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{name}.{key}"] = _rows(value, *sharded.get(name, ()))
    return state


def _rows(value: Any, parameter: nn.Parameter | None = None, shard: VocabShard | None = None) -> Any:
    """The real rows of a table that is sharded like `parameter`; anything else as it is."""
    if shard is None or parameter is None or not isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    first = shard.rank * shard.shard_size
    for dim, placement in enumerate(value.placements[:-1]):  # of the data-parallel dimensions
        if not placement.is_replicate():
            size = value.device_mesh.size(dim)
            first += value.device_mesh.get_local_rank(dim) * -(-shard.shard_size // size)
    local = value.to_local().detach()
    count = max(0, min(len(local), shard.stop - first))
    return _RealRows(local[:count], local[count:], first, shard.vocab_size)


class _RealRows(Tensor):
    """For `torch.distributed.checkpoint`: a table `[vocab_size, ...]` of which this rank has some consecutive rows.

    Implements its `_Checkpointable` protocol; no operation works on it.
    """

    padding: Tensor
    _local: Tensor
    _offsets: torch.Size

    @staticmethod
    def __new__(cls, local: Tensor, padding: Tensor, first: int, vocab_size: int) -> _RealRows:
        size = (vocab_size, *local.shape[1:])
        make: Any = Tensor._make_wrapper_subclass
        made: _RealRows = make(cls, size, dtype=local.dtype, device=local.device)
        made.padding, made._local = padding, local
        made._offsets = torch.Size([first, *[0] * (local.dim() - 1)])
        return made

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(self._offsets, self._local.shape)] if len(self._local) else []

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._local

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on rows that are only described for a checkpoint")


def _compare(folder: str, saved: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raises unless the checkpoint has each tensor that is wanted, in its size. The same on every rank: one file."""
    wrong = []
    for key, value in mine.items():
        there = saved.get(key)
        size = list(there.size) if isinstance(there, TensorStorageMetadata) else None
        if isinstance(value, Tensor) and size != list(value.shape):
            wrong.append(f"{key}: saved {size}, here {list(value.shape)}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointLayoutError(
            f"{folder} does not fit this model: {'; '.join(wrong[:3])}{more}. Likely another vocabulary, or a "
            "model that is tied where the saved one was not."
        )
