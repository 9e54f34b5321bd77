"""What of a model and its optimizers a migration touches, and which models it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.errors import LayoutError, TyingError, UngatheredWeightError, VocabularyError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.moving import moves
from vocab_parallel.vocabulary.migration.settings import SIZES, holds_ids, moved_ids
from vocab_parallel.vocabulary.ownership import verify_ownership
from vocab_parallel.vocabulary.row_states import is_master_weight

_BY_CHECKPOINT = (
    "Save a checkpoint, migrate that (python -m vocab_parallel migrate CHECKPOINT TARGET --map FILE), and start again "
    "from it."
)
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
_NOT_BY_PARAMETER = ("ZeroRedundancyOptimizer", "LBFGS")  # keep state that is not their Parameters' own
_OWN_SIZES = ("num_embeddings", "out_features", *SIZES)  # of a module over the vocabulary


@dataclass
class Parts:
    """What a migration touches.

    Attributes:
        parameters: Each vocabulary Parameter once, by its first name.
        row_states: (parameter name, state name) of what moves with it.
        other_states: "parameter.state" of what stays as it is.
        alike: Names of other parameters and buffers with as many rows or columns: they stay as they are.
        settings: (object, attribute, value) to be set, such as the vocabulary's size in a configuration.
    """

    modules: list[nn.Module]
    parameters: dict[str, nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    row_states: list[tuple[str, str]] = field(default_factory=list)
    other_states: list[str] = field(default_factory=list)
    alike: list[str] = field(default_factory=list)
    settings: list[tuple[Any, str, Any]] = field(default_factory=list)

    def states(self) -> dict[tuple[str, str], Tensor]:
        """The tensors of `row_states`."""
        return {(name, key): self.state_of(name)[key] for name, key in self.row_states}

    def state_of(self, name: str) -> dict[Any, Any]:
        """The state of one Parameter in the optimizer that has it."""
        parameter = self.parameters[name]
        return next((o.state[parameter] for o in self.optimizers if parameter in o.state), {})

    def set_to(self) -> list[str]:
        """The settings in words."""
        return [f"{type(holder).__name__}.{key} = {value}" for holder, key, value in self.settings]

    @property
    def masters(self) -> list[tuple[str, str]]:
        """Those of `row_states` that are the weight in full precision."""
        return [(name, key) for name, key in self.row_states if is_master_weight(key)]


def vocabulary_shard(model: nn.Module) -> tuple[list[nn.Module], VocabShard]:
    """The modules over the vocabulary, and their one shard.

    Raises:
        LayoutError: No such module, or over different vocabularies.
    """
    kinds = (VocabParallelEmbedding, VocabParallelLMHead)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    if not modules:
        raise LayoutError(f"{type(model).__name__} has no module over the vocabulary: nothing to migrate")
    shards: list[VocabShard] = [module.shard for module in modules]
    if any(shard.layout != shards[0].layout or shard.group != shards[0].group for shard in shards):
        raise LayoutError(
            "the model's embeddings and heads are over different vocabularies or ranks ("
            + ", ".join(sorted({str(shard.layout) for shard in shards}))
            + "): one map cannot serve them all. Call migrate on the tensors of each."
        )
    return list(modules), shards[0]


def several(optimizer: Any) -> list[Any]:
    """The optimizers that a caller gave: none, one, or a sequence of them."""
    return [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def find_parts(
    model: nn.Module, optimizers: list[Any], vocab_map: VocabMap, layout: VocabLayout, shard: VocabShard
) -> Parts:
    """Everything that a migration touches; raises on what cannot be migrated, with nothing changed."""
    modules, _ = vocabulary_shard(model)
    if vocab_map.old_size != shard.vocab_size or (layout.vocab_size, layout.tp_size) != (
        vocab_map.new_size, shard.tp_size
    ):  # fmt: skip
        raise VocabularyError(
            f"the map is of {vocab_map.old_size} to {vocab_map.new_size} ids; the model has {shard.layout}, the layout "
            f"asked for is {layout}. The map's sizes and the number of ranks must be theirs."
        )
    owners = {id(p) for module in modules for p in module.parameters(recurse=False)}
    if any(module._parameters.get("weight") is None for module in modules):
        raise VocabularyError(
            "a module over the vocabulary has no Parameter called weight: it is computed from others (a "
            "parametrization, a quantised table), which a migration cannot move. Remove that, and add it after."
        )
    parameters = {name: p for name, p in model.named_parameters() if id(p) in owners}
    for module in model.modules():
        _refuse_module(module)
    for name, parameter in parameters.items():
        _refuse_parameter(name, parameter, shard)
    parts = Parts(modules, parameters, [_plain(optimizer) for optimizer in optimizers])
    if optimizers:
        _find_states(parts)
    sizes = {shard.vocab_size, shard.layout.padded_size, shard.shard_size}
    others = ((name, t) for named in (model.named_parameters, model.named_buffers) for name, t in named())
    parts.alike = [name for name, t in others if id(t) not in owners and sizes & set(t.shape)]
    every = [one for module in model.modules() for one in _settings(module, vocab_map, module in modules)]
    parts.settings = list({(id(holder), key): (holder, key, value) for holder, key, value in every}.values())
    for setting in parts.settings:
        _require_settable(*setting)
    for optimizer in parts.optimizers:
        verify_ownership(model, optimizer)
    return parts


def _find_states(parts: Parts) -> None:
    for name, parameter in parts.parameters.items():
        count = sum(p is parameter for o in parts.optimizers for group in o.param_groups for p in group["params"])
        if count > 1 or (count == 0 and parameter.requires_grad):
            raise TyingError(
                f"the optimizers given hold {name} {count} times, expected once: after the migration one would go on "
                "with the old Parameter. Pass every optimizer that holds a parameter of the vocabulary, each built "
                "after tie_weights."
            )
        for key, value in parts.state_of(name).items():
            what = f"the optimizer's {key} of {name}"
            if not isinstance(value, Tensor | bool | int | float | str | None):
                raise VocabularyError(
                    f"{what} is a {type(value).__name__}: whether rows are in it is unknown. Only tensors and single "
                    "values can be migrated."
                )
            if not isinstance(value, Tensor) or not moves(what, str(key), value.shape, parameter.shape):
                parts.other_states.append(f"{name}.{key}")
                continue
            if hasattr(value, "to_local"):
                raise UngatheredWeightError(f"the optimizer's {key} of {name} is a DTensor. " + _BY_CHECKPOINT)
            parts.row_states.append((name, key))


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):  # accelerate's wrapper
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__name__ in _NOT_BY_PARAMETER:
        raise TyingError(
            f"a {type(optimizer).__name__} cannot be migrated in place: it keeps its state elsewhere than by "
            "Parameter. " + _BY_CHECKPOINT
        )
    return optimizer


def _refuse_module(module: nn.Module) -> None:
    name = type(module).__name__
    if name in _WRAPPERS:
        raise VocabularyError(
            f"the model is wrapped by {name}, which knows its old parameters: migrate the inner model and wrap it "
            "anew. Where the wrapper has sharded the parameters: " + _BY_CHECKPOINT
        )
    if "adopted" in module.__dict__:
        raise VocabularyError(
            f"{name} is a Megatron layer, whose model, buffers and optimizer know its size. " + _BY_CHECKPOINT
        )


def _refuse_parameter(name: str, parameter: nn.Parameter, shard: VocabShard) -> None:
    for what, found in {
        "a DTensor (FSDP2)": hasattr(parameter, "to_local"),
        "partitioned by ZeRO-3": hasattr(parameter, "ds_id"),
        "part of a buffer of Megatron's data-parallel wrapper": hasattr(parameter, "main_grad"),
        "without rows (partitioned by ZeRO-3?)": len(parameter) == 0,
        "on the meta device": parameter.is_meta,
    }.items():
        if found:
            raise UngatheredWeightError(f"{name} is {what}: it cannot be replaced in place. " + _BY_CHECKPOINT)
    if len(parameter) != shard.shard_size:
        raise LayoutError(f"{name} has {len(parameter)} rows, its shard {shard.shard_size} ({shard.layout})")
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise VocabularyError(f"{name} has hooks, which a new Parameter would lose: remove them, and add them after.")


def _settings(module: nn.Module, vocab_map: VocabMap, over_vocabulary: bool) -> Iterator[tuple[Any, str, Any]]:
    """Sizes and ids that a module or its configuration repeats."""
    for key in _OWN_SIZES if over_vocabulary else SIZES:
        if module.__dict__.get(key) == vocab_map.old_size:
            yield module, key, vocab_map.new_size
    if over_vocabulary and (padding := module.__dict__.get("padding_idx")) is not None:
        yield module, "padding_idx", _moved("padding_idx", padding, vocab_map)
    for kind in ("config", "generation_config"):
        config = module.__dict__.get(kind)
        parameters = getattr(type(config), "__dataclass_params__", None)
        if config is None or (parameters is not None and parameters.frozen):
            continue
        sizes = [key for key in SIZES if getattr(config, key, None) == vocab_map.old_size]
        yield from ((config, key, vocab_map.new_size) for key in sizes)
        if sizes or kind == "generation_config":
            for key, value in list(vars(config).items()):
                if holds_ids(key) and value is not None:
                    yield config, key, _moved(key, value, vocab_map)


def _moved(key: str, value: Any, vocab_map: VocabMap) -> Any:
    def refuse(lost: int) -> int:
        raise VocabularyError(f"{key} is {lost}, an id that the map drops: set it to an id that stays, or to None")

    return moved_ids(value, vocab_map, refuse)


def _require_settable(holder: Any, key: str, value: Any) -> None:
    """Raises for an attribute that cannot be set to its new value; nothing is changed."""
    before = getattr(holder, key)
    try:
        setattr(holder, key, value)
        setattr(holder, key, before)
    except Exception as error:
        raise VocabularyError(
            f"{type(holder).__name__}.{key} is {before!r} and cannot be set to {value!r} ({error}): make it settable, "
            "or take the configuration off the model and put a corrected one in its place after."
        ) from error
