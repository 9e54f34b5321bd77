"""The whole model in full precision, out of ZeRO's partitions and the vocabulary's shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.agreement import capture
from vocab_parallel.collectives import all_gather, gather_vocab
from vocab_parallel.integrations.deepspeed.checks import agree
from vocab_parallel.shard import RankGroup
from vocab_parallel.tying import vocab_parameters


def full_state_dict(engine: Any, *, every_rank: bool = False) -> dict[str, Tensor]:
    """The model's parameters and persistent buffers by name, on CPU: float32 master weights, real rows, ties once.

    What `zero_to_fp32` and the 16-bit consolidation refuse or get wrong under tensor parallelism.

    Args:
        every_rank: Keep it on every rank; else the world's first rank has it and the others an empty dictionary.

    Returns:
        A tied weight under its first name; a model loads it with `strict=False`, and both uses get it. A
        vocabulary's `[vocab_size, ...]`; a parameter that Megatron's `tensor_model_parallel` marks is whole too.

    Collectives:
        Per parameter: one of DeepSpeed's over the data-parallel ranks (stages 1 and 2: an all-reduce, stage 3: an
        all-gather, stage 0: none), and one all-gather over its tensor-parallel ranks if it is sharded.

    Memory:
        Beside the result, one whole parameter in float32 on every rank.
    """
    keep = every_rank or dist.get_rank() == 0
    vocabulary = vocab_parameters(engine.module)
    state: dict[str, Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        whole = _full_precision(engine, parameter)
        if name in vocabulary:
            whole = gather_vocab(vocabulary[name][1], whole)
        elif getattr(parameter, "tensor_model_parallel", False) and engine.mpu is not None:
            group = RankGroup(engine.mpu.get_tensor_model_parallel_group())
            parts = all_gather(group, whole).wait()
            whole = torch.cat(list(parts), dim=getattr(parameter, "partition_dim", 0))
        if keep:
            state[name] = whole.to("cpu", copy=True)
    if keep:
        names = set(engine.module.state_dict()) - set(state)
        state |= {name: b.detach().to("cpu", copy=True) for name, b in engine.module.named_buffers() if name in names}
    return state


def export(engine: Any, path: str | Path) -> None:
    """Saves `full_state_dict` with `torch.save`, written aside and renamed.

    Collectives:
        Those of `full_state_dict`; one all-gather of 64 bytes over the world.

    Raises:
        OSError: The first rank could not write; a `VocabParallelError` with its words on the others.
    """
    state = full_state_dict(engine)
    agree("deepspeed.export", capture(_write, state, Path(path)))


def _write(state: dict[str, Tensor], path: Path) -> None:
    if dist.get_rank() == 0:
        aside = path.with_name(f".{path.name}.part")
        torch.save(state, aside)
        os.replace(aside, path)


@torch.no_grad()
def _full_precision(engine: Any, parameter: nn.Parameter) -> Tensor:
    """This tensor-parallel rank's whole parameter in float32 (float64 if it is that)."""
    import deepspeed

    if parameter.requires_grad:
        full = deepspeed.utils.safe_get_full_fp32_param(parameter)
        if full is None:
            full = _master_of_stage_0(engine.optimizer, parameter)
        if full is not None:
            whole: Tensor = full.detach().reshape(getattr(parameter, "ds_shape", parameter.shape))
            return whole
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


def _master_of_stage_0(optimizer: Any, parameter: nn.Parameter) -> Tensor | None:
    """The master weight that DeepSpeed keeps for a 16-bit parameter without ZeRO."""
    flats = getattr(optimizer, "fp32_groups_flat", None)
    for index, group in enumerate(getattr(optimizer, "fp16_groups", [])):
        for place, one in enumerate(group):
            if one is parameter:
                if flats is None:
                    master: Tensor = optimizer.fp32_groups[index][place]
                    return master
                start = sum(p.numel() for p in group[:place])
                flat: Tensor = flats[index]
                return flat[start : start + one.numel()].view_as(one)
    return None
