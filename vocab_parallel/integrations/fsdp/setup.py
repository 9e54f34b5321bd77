"""Puts a model under FSDP2, and proves that its ties survived."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from vocab_parallel import tying
from vocab_parallel.errors import ConfigError, TyingError
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    shard: VocabShard,
    dp_dim: str | tuple[str, str] = "dp",
    tp_dim: str = "tp",
    blocks: Iterable[nn.Module] | None = None,
    reshard_after_forward: bool = True,
    **options: Any,
) -> list[str]:
    """Puts a model whose vocabulary is sharded over `mesh[tp_dim]` under FSDP2 over `mesh[dp_dim]`. In place.

    Before the optimizer is built. Embedding and head stay in the outermost group, gathered from a forward to its
    backward, so the loss may be computed in the model's forward or right after it. A model on the meta device, tied
    there, stays tied through the `to_empty` that follows.

    FSDP averages gradients over the data-parallel ranks. Where these hold different numbers of targets, the mean over
    all tokens needs `lm_head.loss(..., mean_group=mesh.get_group(dp_dim))`.

    Args:
        mesh: With the named dimensions, for example `init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))`.
        shard: What the model was built with, over `mesh.get_group(tp_dim)`.
        dp_dim: Two names are replication and sharding (HSDP).
        blocks: Modules that become groups of their own, gathered one after the other; not with a part of the
            vocabulary. Default: every element of each `nn.ModuleList`.
        reshard_after_forward: Of the blocks.
        options: Of `fully_shard`, such as `mp_policy` and `offload_policy`.

    Returns:
        The names of the vocabulary parameters that became DTensors.

    Collectives:
        None; a tied weight is sharded, gathered and reduced once.

    Raises:
        ConfigError: Mesh, model and shard do not fit. On every rank.
        TyingError: A tie is broken.
    """
    found = vocab_parameters(model)
    _check(model, mesh, shard, dp_dim, tp_dim)
    tying.verify_tied(model, required=False)
    for parameter, _ in found.values():
        _replace(model, parameter, DTensor.from_local(parameter.detach(), mesh[tp_dim], [Shard(0)], run_check=False))
    _refuse_plain_assignments(model)
    for block in _blocks(model) if blocks is None else blocks:
        fully_shard(block, mesh=mesh[dp_dim], reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, mesh=mesh[dp_dim], reshard_after_forward=False, **options)
    tying.verify_tied(model, required=False)
    return list(found)


def verify_tied(model: nn.Module, optimizer: Any = None, *, required: bool = True) -> list[tuple[str, str]]:
    """`vocab_parallel.verify_tied` of the parameters as the optimizer has them: gathered ones are freed first.

    Raises:
        TyingError: As there; or a tied weight is not, or no longer, sharded by `apply`.
    """
    reshard(model)
    pairs = tying.verify_tied(model, optimizer, required=required)
    for name, (parameter, _) in vocab_parameters(model).items():
        if not isinstance(parameter, DTensor):
            both = next((" and ".join(pair) for pair in pairs if name in pair), name)
            raise TyingError(
                f"{both}: the Parameter is no DTensor, so FSDP does not shard it or reduce its gradient. Likely it was "
                "replaced after fsdp.apply (a tie, a load with assign=True). Tie first, then apply, then load."
            )
    return pairs


def _check(model: nn.Module, mesh: DeviceMesh, shard: VocabShard, dp_dim: str | tuple[str, str], tp_dim: str) -> None:
    found = vocab_parameters(model)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no VocabParallelEmbedding or VocabParallelLMHead: nothing to shard over the "
            "vocabulary. Build it with them, or convert it first (integrations.transformers.apply)."
        )
    dims = mesh.mesh_dim_names or ()
    missing = [name for name in (*((dp_dim,) if isinstance(dp_dim, str) else dp_dim), tp_dim) if name not in dims]
    if missing:
        raise ConfigError(
            f"the mesh has the dimensions {dims}, not {', '.join(missing)}. For one kind of parallelism only, give the "
            'other a dimension of size 1: init_device_mesh(device, (1, tp), mesh_dim_names=("dp", "tp")).'
        )
    ranks = dist.get_process_group_ranks(mesh.get_group(tp_dim))
    own = [dist.get_rank()] if shard.group is None else dist.get_process_group_ranks(shard.group)
    if own != ranks:
        raise ConfigError(
            f"the shard is over ranks {own}, the mesh dimension {tp_dim!r} over {ranks}: build the shard with "
            f"VocabShard(layout, mesh.get_group({tp_dim!r}))."
        )
    for name, (parameter, its) in found.items():
        if isinstance(parameter, DTensor):
            raise ConfigError(f"{name} is a DTensor already: apply is for a model that is not under FSDP yet.")
        if its.layout != shard.layout or its.group != shard.group:
            raise ConfigError(f"{name} is over {its}, not over {shard}: build the model with this shard.")


def _replace(model: nn.Module, old: nn.Parameter, data: DTensor) -> None:
    """Puts one new Parameter where `old` is, in every module that has it."""
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        setattr(new, name, value)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)


def _refuse_plain_assignments(model: nn.Module) -> None:
    """`load_state_dict(assign=True)` must not put a plain tensor where FSDP manages a DTensor."""
    pairs = tying.verify_tied(model, required=False)
    owners = {id(parameter) for parameter, _ in vocab_parameters(model).values()}

    def refuse(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        for name in module._parameters:
            given = state.get(f"{prefix}{name}")
            if metadata.get("assign_to_params_buffers", False) and given is not None and not isinstance(given, DTensor):
                both = next((" and ".join(pair) for pair in pairs if f"{prefix}{name}" in pair), f"{prefix}{name}")
                raise TyingError(
                    f"{both}: load_state_dict(assign=True) would replace the DTensor that FSDP manages by a plain "
                    f"tensor {list(given.shape)}. Load with fsdp.load, or without assign from a state dict of DTensors."
                )

    for module in model.modules():
        if any(id(parameter) in owners for parameter in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Elements of module lists that hold no part of the vocabulary; of nested ones the innermost come first."""
    owners = {id(parameter) for parameter, _ in vocab_parameters(model).values()}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    found = [block for container in reversed(lists) for block in container if not isinstance(block, nn.ModuleList)]
    return [block for block in found if not any(id(parameter) in owners for parameter in block.parameters())]


def reshard(model: nn.Module) -> None:
    """Frees what is gathered, so that modules hold the Parameters that the optimizer has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
