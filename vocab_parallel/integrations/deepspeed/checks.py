"""One Parameter through DeepSpeed's optimizers: what `verify_tied` looks at, and the traps that are refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel import tying
from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.errors import ConfigError, TyingError
from vocab_parallel.shard import RankGroup, VocabShard
from vocab_parallel.tying import vocab_parameters

# Where DeepSpeed's optimizers keep the model's Parameters, and the flat buffers whose parts these are.
_GROUPS = {"bit16_groups": "bit16_groups_flat", "bf16_groups": "bf16_groups_flat", "fp16_groups": "fp16_groups_flat"}


def verify_tied(engine: Any) -> list[tuple[str, str]]:
    """Proves that every tie of an engine's model holds, through ZeRO's partitions and master weights.

    Beyond `vocab_parallel.tying.verify_tied`, with the groups of DeepSpeed's optimizer: the engine has an `mpu` where
    the vocabulary is sharded, no parameter is partitioned over ranks that hold other rows, each carries the mark that
    the gradient norm reads, lies in the optimizer's flat buffer, and equals its master weight. `initialize` calls it,
    and so do the engine's `save_checkpoint` and `load_checkpoint`.

    Returns:
        The tied pairs by name; none for a model without a tie.

    Collectives:
        One all-gather of 64 bytes over the world; one of 4 KiB on an error.

    Raises:
        TyingError: On every rank, naming both parameters.
        ConfigError: On every rank, for an engine that `initialize` would not have built.
    """
    pairs: list[tuple[str, str]] = []
    agree("deepspeed.verify_tied", capture(lambda: pairs.extend(_verify(engine))))
    return pairs


def agree(call: str, fault: Exception | None) -> None:
    """Raises the fault of any rank on every rank of the world."""
    world = RankGroup(dist.group.WORLD if dist.is_initialized() else None, deferred_errors=False)
    Exchange(world, "header", call, fault=fault).wait()


def _verify(engine: Any) -> list[tuple[str, str]]:
    model = engine.module
    shard = shard_of(model)
    if shard.tp_size > 1:
        check_mpu(engine.mpu, shard)
    check_partitions(model)
    pairs = verify_ties(model, _view_of(engine.optimizer))
    names = {first: f"{first} = {second}" for first, second in pairs}
    for name, (parameter, _) in vocab_parameters(model).items():
        label = names.get(name, name)
        if shard.tp_size > 1 and not getattr(parameter, "tensor_model_parallel", False):
            raise TyingError(
                f"{label} has lost the mark tensor_model_parallel: the gradient norm would leave out the rows of every "
                "rank but the first. Something replaced the Parameter after initialize; build the engine anew."
            )
        if parameter.requires_grad:
            _check_master(engine.optimizer, parameter, label)
    return pairs


def shard_of(model: nn.Module) -> VocabShard:
    """The shard that all vocabulary parameters of `model` agree on, in the ranks if not in the ids.

    Raises:
        ConfigError: There is none, or they are over different ranks.
    """
    shards = {name: shard for name, (_, shard) in vocab_parameters(model).items()}
    if not shards:
        raise ConfigError(
            f"{type(model).__name__} has no vocabulary parameter: build it with VocabParallelEmbedding and "
            "VocabParallelLMHead, or convert it (vocab_parallel.integrations.transformers.apply), before initialize."
        )
    (first, shard), *others = shards.items()
    for name, other in others:
        if other.group != shard.group:
            raise ConfigError(f"{first} over {shard} and {name} over {other} are sharded over different ranks.")
    return shard


def check_mpu(mpu: Any, shard: VocabShard) -> None:
    """Raises unless `mpu` tells DeepSpeed which ranks hold other rows."""
    assert shard.group is not None
    ranks = dist.get_process_group_ranks(shard.group)
    if mpu is None:
        raise ConfigError(
            f"the vocabulary is sharded over the ranks {ranks}, but the DeepSpeed engine has no mpu: it has taken them "
            "for data-parallel ranks and overwritten their rows with those of the first. Build the engine with "
            "vocab_parallel.integrations.deepspeed.initialize, or pass mpu=GroupsMPU(shard.group)."
        )
    given = dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group())
    if given != ranks:
        raise ConfigError(
            f"the mpu's tensor-parallel ranks {given} are not those of the vocabulary {ranks}: build the VocabShard "
            "over mpu.get_tensor_model_parallel_group()."
        )


def check_partitions(model: nn.Module) -> None:
    """Raises if ZeRO-3 has partitioned a parameter over ranks that hold other rows."""
    shards = [shard for _, shard in vocab_parameters(model).values() if shard.group is not None]
    if not shards:
        return
    peers = set(dist.get_process_group_ranks(shards[0].group)) - {dist.get_rank()}
    for name, parameter in model.named_parameters():
        group = getattr(parameter, "ds_process_group", None)
        if group is not None and peers & set(dist.get_process_group_ranks(group)):
            raise ConfigError(
                f"{name} is partitioned over the ranks {dist.get_process_group_ranks(group)}, of which "
                f"{sorted(peers)} hold other rows of the vocabulary: zero.Init over the world (also zero.Init(mpu=)) "
                "has overwritten them with rank 0's. Build the model under "
                "vocab_parallel.integrations.deepspeed.zero_init(shard, config=config)."
            )


def check_groups(model: nn.Module, parameters: Iterable[Any] | None) -> None:
    """Raises if the `model_parameters` for an optimizer hold a vocabulary parameter twice, or one of before the tie."""
    if parameters is None:
        return
    listed = list(parameters)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    groups = [{**group, "params": list(group["params"])} for group in groups]
    weights = [parameter for parameter, _ in vocab_parameters(model).values()]
    held = [p for group in groups for p in group["params"] if any(p is weight for weight in weights)]
    known = {id(parameter) for parameter in model.parameters()}
    orphans = any(id(p) not in known for group in groups for p in group["params"])
    if orphans or len(held) != len({id(p) for p in held}):
        verify_ties(model, _optimizer_of(groups))


def verify_ties(model: nn.Module, optimizer: Any) -> list[tuple[str, str]]:
    """`vocab_parallel.tying.verify_tied`, for a model without a tie too, or with a frozen one in no optimizer."""
    trained = all(parameter.requires_grad for parameter, _ in vocab_parameters(model).values())
    return tying.verify_tied(model, optimizer if trained else None, required=False)


def parameter_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """The model's own Parameters that DeepSpeed's optimizer updates, by group."""
    for name in _GROUPS:
        if groups := getattr(optimizer, name, None):
            return list(groups)
    return [group["params"] for group in getattr(optimizer, "param_groups", [])]


def _view_of(optimizer: Any) -> Any:
    """The optimizer as `tying.verify_tied` reads one: by the model's Parameters, not by flat partitions."""
    if optimizer is None or not parameter_groups(optimizer):
        return None
    if not any(hasattr(optimizer, name) for name in _GROUPS):
        return optimizer
    return _optimizer_of([{"params": group} for group in parameter_groups(optimizer)])


def _optimizer_of(groups: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(param_groups=groups, state={})


def _check_master(optimizer: Any, parameter: nn.Parameter, label: str) -> None:
    """Raises unless the weight is a part of the optimizer's flat buffer and equal to its master weight."""
    if getattr(optimizer, "offloaded_states", None):
        return  # moved away for a while; nothing trains meanwhile
    pairs: list[tuple[Tensor, Tensor]] = []
    if hasattr(parameter, "ds_id"):
        pairs = _partitions(optimizer, parameter)
    elif hasattr(parameter, "_hp_mapping"):
        _check_buffer(optimizer, parameter, label)
        mapping = parameter._hp_mapping
        if mapping is not None:
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            pairs = [(parameter.detach().flatten()[start : start + numel], mapping.hp_fragment.detach())]
    for weight, master in pairs:
        if not _same(weight, master.to(weight)):
            raise TyingError(
                f"{label} and its master weight differ: the module was loaded or changed past DeepSpeed, and the next "
                "step would undo it. Load with engine.load_checkpoint, or load before initialize."
            )


def _check_buffer(optimizer: Any, parameter: nn.Parameter, label: str) -> None:
    for groups, flats in _GROUPS.items():
        for group, flat in zip(getattr(optimizer, groups, []), getattr(optimizer, flats, []), strict=False):
            if any(p is parameter for p in group):
                if parameter.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
                    raise TyingError(
                        f"{label} is no longer a part of the optimizer's flat buffer: its storage was replaced "
                        "(to_empty, .data, a move to another device), so steps would go to an orphan. Build the engine "
                        "anew."
                    )
                return


def _partitions(optimizer: Any, parameter: nn.Parameter) -> list[tuple[Tensor, Tensor]]:
    """The flat partitions of ZeRO-3's sub-group with `parameter`, and their masters, where both are in memory."""
    for index, group in enumerate(getattr(optimizer, "fp16_groups", [])):
        if any(p is parameter for p in group):
            weight = optimizer.fp16_partitioned_groups_flat[index]
            master = optimizer.fp32_partitioned_groups_flat[index]
            if weight is not None and weight.numel() == master.numel():
                return [(weight.detach(), master.detach())]
    return []


def _same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one, two) or bool(((one == two) | (one.isnan() & two.isnan())).all())
