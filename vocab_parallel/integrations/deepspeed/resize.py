"""Another vocabulary size under ZeRO-3, where a parameter shows no rows and each rank would draw its own new ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from vocab_parallel.agreement import capture
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.embedding import VocabParallelEmbedding, init_rows_
from vocab_parallel.errors import ConfigError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.integrations.deepspeed.checks import agree, shard_of, verify_ties
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import VocabShard


@torch.no_grad()
def resize(model: nn.Module, vocab_size: int, *, seed: int = 0, std: float = 0.02) -> VocabShard:
    """Gives every embedding and head of `model` a vocabulary of `vocab_size` ids, before the engine is built.

    Rows of ids that both vocabularies have stay, to the bit; new ones are normal and depend on (seed, id) only, so
    they are the same at any TP size and on every data-parallel rank; new entries of a bias are zero. Parameters that
    `zero_init` partitioned are partitioned again over the same ranks, and a tie stays one Parameter.
    `model.config.vocab_size` follows where there is one.

    Args:
        vocab_size: Real ids from now on; fewer drops the last rows.
        seed, std: Of the new rows, as in `VocabParallelEmbedding.reset_parameters`.

    Returns:
        The new shard, with the layout's `multiple_of`.

    Collectives:
        One comparison of the layouts; per parameter one all-gather over the vocabulary's ranks, and under ZeRO-3 an
        all-gather and a broadcast over its data-parallel ranks.

    Memory:
        One whole table of the old vocabulary on every rank.

    Raises:
        ConfigError: On every rank: an engine has the model already (its optimizer state has the old rows), the
            modules have different vocabularies.
        LayoutError: On every rank: `vocab_size` is below 1.
    """
    agree("deepspeed.resize", capture(_check, model, vocab_size))
    old = shard_of(model)
    layout = VocabLayout(vocab_size, old.tp_size, multiple_of=old.layout.multiple_of)
    new = VocabShard(layout, old.group, deferred_errors=old.deferred_errors)
    made: dict[int, nn.Parameter] = {}
    keep = []  # the old ones, so that no new one is given the id of one that is gone
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding | VocabParallelLMHead):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in made:
                    made[id(parameter)] = _resized(parameter, old, new, seed, std, drawn=name == "weight")
                keep.append(parameter)
                setattr(module, name, made[id(parameter)])
            module.shard = new
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "vocab_size"):
        config.vocab_size = vocab_size
    verify_ties(model, None)
    return new


def _check(model: nn.Module, vocab_size: int) -> None:
    shard = shard_of(model)
    VocabLayout(vocab_size, shard.tp_size, multiple_of=shard.layout.multiple_of)
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding | VocabParallelLMHead):
            if module.shard.layout != shard.layout:
                raise ConfigError(f"{name} has {module.shard}, others {shard}: resize each vocabulary by itself.")
            padding_idx = getattr(module, "padding_idx", None)
            if padding_idx is not None and padding_idx >= vocab_size:
                raise ConfigError(f"{name} has padding_idx {padding_idx}, which {vocab_size} ids do not include.")
            for own, parameter in module.named_parameters(recurse=False):
                if hasattr(parameter, "_z3_optimizer") or hasattr(parameter, "_hp_mapping"):
                    raise ConfigError(
                        f"{name}.{own} belongs to a DeepSpeed engine, whose optimizer state has the old rows: resize "
                        "before initialize."
                    )


def _resized(
    parameter: nn.Parameter, old: VocabShard, new: VocabShard, seed: int, std: float, *, drawn: bool
) -> nn.Parameter:
    with _gathered(parameter):
        table = gather_vocab(old, parameter)
        local = parameter.new_zeros(new.shard_size, *parameter.shape[1:])
    if drawn:
        init_rows_(local, new, seed=seed, std=std)
    both = max(0, min(old.vocab_size, new.stop) - new.start)
    local[:both] = table[new.start : new.start + both]
    made = nn.Parameter(local, requires_grad=parameter.requires_grad)
    if hasattr(parameter, "ds_id"):
        vars(parameter)["convert_to_zero_parameters"](param_list=[made])
    return made


def _gathered(parameter: nn.Parameter) -> Any:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])
