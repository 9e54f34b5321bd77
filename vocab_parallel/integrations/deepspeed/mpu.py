"""What DeepSpeed asks a model-parallel unit, answered from process groups, or from Megatron's parallel state."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from vocab_parallel.errors import ConfigError


class GroupsMPU:
    """An `mpu` for `deepspeed.initialize`, of a tensor-parallel and a data-parallel group.

    Args:
        tensor_group: The ranks that share the vocabulary, `shard.group`.
        data_group: The ranks that hold this rank's rows too; default `data_parallel_group(tensor_group)`.

    Raises:
        ConfigError: The two groups meet in another rank than this one.
    """

    def __init__(self, tensor_group: dist.ProcessGroup, data_group: dist.ProcessGroup | None = None) -> None:
        self._tensor = tensor_group
        self._data = data_group if data_group is not None else data_parallel_group(tensor_group)
        check_data_group(self._data, tensor_group)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._tensor

    def get_tensor_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_tensor_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_global_rank(self._tensor, 0)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._data)


class MegatronMPU(GroupsMPU):
    """An `mpu` over `megatron.core.parallel_state`, which lacks some of what DeepSpeed asks.

    Args:
        parallel_state: The module, initialised.

    Raises:
        ConfigError: It is cut over pipeline stages or contexts too: DeepSpeed would average gradients over the wrong
            ranks.
    """

    def __init__(self, parallel_state: Any) -> None:
        for name in ("pipeline_model", "context"):
            size = getattr(parallel_state, f"get_{name}_parallel_world_size")()
            if size != 1:
                raise ConfigError(
                    f"Megatron's parallel state has {name.replace('_', ' ')} parallelism of {size}; with DeepSpeed "
                    "only tensor and data parallelism are supported. Initialise it with that size 1."
                )
        super().__init__(parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group())


def data_parallel_group(tensor_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The ranks with this rank's place in their tensor-parallel groups, which must cut the world without overlap.

    Collectives:
        One object all-gather over the world; one `new_group` for each place of a group.

    Raises:
        ConfigError: On every rank, when the groups are of different sizes or overlap.
    """
    mine = dist.get_process_group_ranks(tensor_group)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    groups = sorted({tuple(ranks) for ranks in gathered})
    if len({len(group) for group in groups}) != 1 or sum(map(len, groups)) != len(gathered):
        raise ConfigError(
            f"the tensor-parallel groups {groups} do not cut the {len(gathered)} ranks into equal parts, so their "
            "data-parallel groups cannot be told: pass data_group."
        )
    made = None
    for place in range(len(mine)):
        group = dist.new_group([ranks[place] for ranks in groups])
        if mine[place] == dist.get_rank():
            made = group
    assert isinstance(made, dist.ProcessGroup)
    return made


def check_data_group(data_group: dist.ProcessGroup, tensor_group: dist.ProcessGroup) -> None:
    """Raises unless this rank is all that the two groups share."""
    data, tensor = dist.get_process_group_ranks(data_group), dist.get_process_group_ranks(tensor_group)
    if set(data) & set(tensor) != {dist.get_rank()}:
        raise ConfigError(
            f"the data-parallel group {data} and the vocabulary's group {tensor} share ranks other than this one: "
            "ranks that hold different rows must not be averaged or partitioned together."
        )
