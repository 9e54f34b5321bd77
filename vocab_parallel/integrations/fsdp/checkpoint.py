"""Checkpoints of a model under FSDP2: the files of `checkpoint`, which load at any number of ranks of either kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from vocab_parallel.checkpoint.saving import Contents, save_together
from vocab_parallel.checkpoint.store import load_checkpoint
from vocab_parallel.checkpoint.together import caught, ranks_of
from vocab_parallel.integrations.fsdp.setup import reshard, verify_tied
from vocab_parallel.tying import vocab_parameters
from vocab_parallel.vocabulary.manifest.describing import plain_name, shard_of


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Saves model and optimizer as the checkpoint `folder`: real rows, a tied weight once.

    `checkpoint.save_checkpoint` and `AsyncSaver` take such a model too, after `reshard(model)`, and keep a run's
    checkpoints apart by step. Any reader of `torch.distributed.checkpoint` finds plain tensors in the files.

    Collectives:
        As `save_checkpoint`, over the ranks of the model's mesh.
    """
    reshard(model)
    contents = Contents(step, extra=extra or {})
    fault = caught("the state could not be collected", contents.fill, model, optimizer)
    save_together(ranks_of(model, shard_of(model), None), Path(folder), contents, fault)


def load(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[int, dict[str, Any]]:
    """Loads a checkpoint in place, of this or another host, at any number of ranks of either kind and any padding.

    Padding rows become zero.

    Args:
        optimizer: Gets its moments and step counts; its learning rate and other settings stay as they are.
        options: Of `checkpoint.load_checkpoint`.

    Returns:
        The step, and the `extra` values that were saved.

    Raises:
        CheckpointLayoutError: Another vocabulary size or architecture; on every rank.
        TyingError: A tie is broken after the load.
    """
    reshard(model)
    found = load_checkpoint(folder, model, optimizer, **options)
    verify_tied(model, optimizer, required=False)
    return found


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded model on every rank, by name: real rows, a tied weight under its first name only.

    Collectives:
        All-gathers of each parameter; the vocabulary's over both dimensions.
    """
    reshard(model)
    layouts = {plain_name(name): shard.layout for name, (_, shard) in vocab_parameters(model).items()}
    whole = {}
    for name, value in _model_state(model).items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        whole[name] = tensor[: layouts[name].vocab_size].clone() if name in layouts else tensor
    return whole


def _model_state(model: nn.Module) -> dict[str, Any]:
    """What `get_model_state_dict` gives, a tied weight under its first name only."""
    once = {plain_name(name) for name, _ in model.named_parameters()}
    aliases = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: value for name, value in get_model_state_dict(model).items() if name not in aliases}
