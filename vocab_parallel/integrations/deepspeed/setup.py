"""Engines: parameters marked, ranks told apart, ties verified before and after."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vocab_parallel.agreement import capture
from vocab_parallel.errors import ConfigError
from vocab_parallel.integrations.deepspeed.checks import (
    agree,
    check_groups,
    check_mpu,
    check_partitions,
    parameter_groups,
    shard_of,
    verify_tied,
    verify_ties,
)
from vocab_parallel.integrations.deepspeed.mpu import GroupsMPU, check_data_group, data_parallel_group
from vocab_parallel.integrations.deepspeed.padding import partition_padding
from vocab_parallel.integrations.deepspeed.universal import (
    UNIVERSAL_INFO,
    check_layout,
    read_by_shard,
    universal_info,
    write_layout,
)
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters


def initialize(
    model: nn.Module,
    *,
    config: dict[str, Any] | str,
    data_group: dist.ProcessGroup | None = None,
    mpu: Any = None,
    **kwargs: Any,
) -> Any:
    """`deepspeed.initialize` for a model with a sharded vocabulary.

    Sets on the vocabulary's parameters what DeepSpeed reads (`tensor_model_parallel`, `partition_dim`,
    `partition_stride`), on the model `universal_checkpoint_info`, passes an `mpu` of the shards' group, and verifies
    the ties before and after. On the engine, `save_checkpoint` and `load_checkpoint` verify them too, note the
    layout beside the checkpoint and compare it; universal checkpoints are read by real rows.

    Args:
        model: With `VocabParallelEmbedding` and `VocabParallelLMHead`, tied if it is to be.
        config: DeepSpeed's, a dictionary or a path.
        data_group: The ranks that hold this rank's rows too; default: those in this rank's place of the other
            vocabulary groups. Only where tp_size is above 1.
        mpu: One of your own over the same ranks, such as `MegatronMPU(parallel_state)`, instead of `data_group`.
        kwargs: The other arguments of `deepspeed.initialize`.

    Returns:
        DeepSpeed's tuple: engine, optimizer, dataloader, scheduler.

    Collectives:
        DeepSpeed's; three all-gathers of 64 bytes over the world; those of `data_parallel_group` if it is called.

    Raises:
        TyingError: On every rank, naming both parameters: an optimizer from before the tie, a parameter twice in its
            groups, two Parameters for one weight.
        ConfigError: On every rank: no vocabulary parameter, an `mpu` or a `data_group` over other ranks, parameters
            that `zero.Init` partitioned over ranks with other rows, DeepSpeed's own tensor parallelism.
    """
    import deepspeed

    parameters = kwargs.get("model_parameters")
    if parameters is not None:
        kwargs["model_parameters"] = parameters = _listed(parameters)
    agree("deepspeed.initialize", capture(_check, model, config, mpu, data_group, kwargs.get("optimizer"), parameters))
    shard = shard_of(model)
    if mpu is None and shard.group is not None and shard.tp_size > 1:
        mpu = GroupsMPU(shard.group, data_group or _partition_group(model))
    mark(model)
    vars(model)[UNIVERSAL_INFO] = vars(model).get(UNIVERSAL_INFO, {}) | universal_info(model)
    deepspeed.utils.groups.mpu = mpu  # DeepSpeed would keep that of an earlier engine where this one has none
    made = deepspeed.initialize(model=model, config=config, mpu=mpu, **kwargs)
    engine = made[0]
    _correct_paddings(engine.optimizer)
    read_by_shard(engine)
    _guard_checkpoints(engine)
    verify_tied(engine)
    return made


def zero_init(
    shard: VocabShard,
    *,
    config: dict[str, Any] | str | None = None,
    data_group: dist.ProcessGroup | None = None,
    **kwargs: Any,
) -> Any:
    """`deepspeed.zero.Init` that partitions over the ranks with the same rows, never over the vocabulary's own.

    Args:
        shard: The vocabulary's.
        config: DeepSpeed's, of stage 3.
        data_group: As in `initialize`, which uses the same group later.
        kwargs: The other arguments of `deepspeed.zero.Init`.

    Returns:
        A context manager to build the model under; tie within it or after it.

    Collectives:
        Those of `data_parallel_group`, if `data_group` is not given and tp_size is above 1.

    Raises:
        ConfigError: `data_group` holds ranks with other rows; or `mpu` or `data_parallel_group` among `kwargs`.
    """
    import deepspeed

    refused = {"mpu", "data_parallel_group", "sequence_data_parallel_group"} & set(kwargs)
    if refused:
        raise ConfigError(f"zero_init chooses {sorted(refused)} from the shard: pass data_group instead.")
    if shard.group is None or shard.tp_size == 1:
        return deepspeed.zero.Init(data_parallel_group=data_group, config_dict_or_path=config, **kwargs)
    group = data_group or data_parallel_group(shard.group)
    check_data_group(group, shard.group)
    mpu = GroupsMPU(shard.group, group)
    return deepspeed.zero.Init(data_parallel_group=group, config_dict_or_path=config, mpu=mpu, **kwargs)


def mark(model: nn.Module) -> None:
    """What DeepSpeed's norm, optimizers and checkpoints read on parameters that differ between the ranks."""
    for parameter, _ in vocab_parameters(model).values():
        vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)


def _check(
    model: nn.Module,
    config: dict[str, Any] | str,
    mpu: Any,
    data_group: dist.ProcessGroup | None,
    optimizer: Any,
    parameters: list[Any] | None,
) -> None:
    shard = shard_of(model)
    if mpu is not None and data_group is not None:
        raise ConfigError("give initialize an mpu or a data_group, not both: the mpu has its own data-parallel group.")
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    settings = load_ds_config(config)
    if settings.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        raise ConfigError(
            "tensor_parallel.autotp_size: DeepSpeed's own tensor parallelism would shard the embedding and the head a "
            "second time. Remove it from the config, or shard the vocabulary with it alone."
        )
    if shard.group is not None and shard.tp_size > 1:
        if mpu is not None:
            check_mpu(mpu, shard)
            check_data_group(mpu.get_data_parallel_group(), shard.group)
        if data_group is not None:
            check_data_group(data_group, shard.group)
    check_partitions(model)
    verify_ties(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None)
    check_groups(model, parameters)


def _check_load(engine: Any, load_dir: str, tag: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_layout(engine, load_dir, tag)
    names = ("load_module_strict", "load_optimizer_states")
    asked = dict(zip(names, args, strict=False)) | kwargs
    weights_alone = not asked.get("load_optimizer_states", True) or asked.get("load_module_only")
    if weights_alone and engine.zero_optimization_stage() == 3 and shard_of(engine.module).tp_size > 1:
        raise ConfigError(
            "stage 3 reads weights without the optimizer through zero_to_fp32, which refuses tensor parallelism: load "
            "the optimizer's states too, or export the checkpoint and load its rows before initialize."
        )


def _listed(parameters: Iterable[Any]) -> list[Any]:
    """The same, with generators read once."""
    return [{**p, "params": list(p["params"])} if isinstance(p, dict) else p for p in parameters]


def _partition_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The group that `zero_init` has partitioned over, so that no second one is made."""
    groups = [getattr(parameter, "ds_process_group", None) for parameter in model.parameters()]
    return next((group for group in groups if group is not None), None)


def _correct_paddings(optimizer: Any) -> None:
    """The padding that checkpoints leave out; DeepSpeed 0.19's bfloat16 optimizer looks for all of it on one rank."""
    if hasattr(optimizer, "group_paddings"):
        for index, group in enumerate(parameter_groups(optimizer)):
            data_group = optimizer.real_dp_process_group[index]
            ranks = dist.get_world_size(data_group)
            numel = sum(parameter.numel() for parameter in group)
            alignment = optimizer.nccl_start_alignment_factor * ranks
            plan = partition_padding(numel, ranks, alignment=alignment)
            optimizer.group_paddings[index] = plan.padding[dist.get_rank(data_group)]


def _guard_checkpoints(engine: Any) -> None:
    """Has the engine verify ties and layouts whenever it saves or loads."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        verify_tied(engine)
        saved = save(save_dir, tag, *args, **kwargs)
        folder = Path(save_dir) / str(tag if tag is not None else f"global_step{engine.global_steps}")
        agree("deepspeed.save_checkpoint", capture(write_layout, engine.module, folder))
        return saved

    @functools.wraps(load)
    def load_checkpoint(load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        agree("deepspeed.load_checkpoint", capture(_check_load, engine, load_dir, tag, args, kwargs))
        loaded = load(load_dir, tag, *args, **kwargs)
        verify_tied(engine)
        return loaded

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
