"""What a model must be for its embedding and head to be sharded, found before anything is changed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from vocab_parallel.errors import ConfigError, LayoutMismatchError, TyingError, UngatheredWeightError
from vocab_parallel.loss.options import Scores
from vocab_parallel.shard import VocabShard


@dataclass
class Parts:
    """What `apply` replaces.

    Attributes:
        embedding_name, head_name: Their qualified names in the model.
        tied: Whether the head's weight is the embedding's.
        scores: What the model does to its head's output, from its config.
    """

    embedding: nn.Embedding
    head: nn.Linear
    embedding_name: str
    head_name: str
    tied: bool
    scores: Scores


def find_parts(model: Any, shard: VocabShard, data_parallel: bool) -> Parts:
    """The embedding and the head of a causal language model.

    Raises:
        ConfigError, TyingError, LayoutMismatchError, UngatheredWeightError: With the reason why it cannot be converted.
    """
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"apply takes a transformers PreTrainedModel, got {type(model).__name__}. Of a wrapper (DDP, DeepSpeed, an "
            "adapter model) pass the model inside, before it is wrapped."
        )
    _check_model(model)
    if data_parallel:
        _check_group(shard)
    embedding, head = _module(model, "get_input_embeddings"), _module(model, "get_output_embeddings")
    names = {id(module): name for name, module in model.named_modules()}
    for what, module in (("input embedding", embedding), ("head", head)):
        if id(module) not in names:
            raise ConfigError(f"the {what} of {type(model).__name__} is none of its modules")
        _check_module(what, names[id(module)], module)
    parts = Parts(
        embedding, head, names[id(embedding)], names[id(head)], embedding.weight is head.weight,
        scores_of(model.config.get_text_config()),
    )  # fmt: skip
    _check_rows(model, parts, shard)
    _check_tie(model, parts)
    return parts


def scores_of(config: Any) -> Scores:
    """What comes after the head, from the config: `final_logit_softcapping`, `logit_scale`, `logits_scaling`, ...

    Raises:
        ConfigError: Both a softcap and a scale, in an order that the config does not tell; or a scale that is no
            positive number.
    """
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= _number(config, name)
    scale /= _number(config, "logits_scaling")
    if softcap is not None and scale != 1.0:
        raise ConfigError(
            f"the config has a softcap ({softcap}) and a scale ({scale}) of the logits, and does not tell which comes "
            "first: such a model is not supported."
        )
    return Scores(float(softcap) if softcap is not None else None, 1.0 / scale)


def _number(config: Any, name: str) -> float:
    value = getattr(config, name, None)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ConfigError(f"config.{name} must be a positive number, got {value!r}")
    return float(value)


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if getattr(model, "_vocab_parallel", None) is not None:
        raise ConfigError(f"this {name} is converted already: unapply it first")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name} is an encoder-decoder model; only causal language models are supported")
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise ConfigError(f"{name} is spread over devices (device_map): load it on one device a rank")
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta:
        raise ConfigError(
            f"{len(meta)} parameters of the {name} are on the meta device ({meta[0]}, ...): there is nothing to shard "
            "and nothing to compare yet. Load or initialise the model first (from_pretrained, or to_empty and "
            "load_state_dict), then apply."
        )
    loss = model.loss_function
    if getattr(loss, "__name__", "") != "ForCausalLMLoss":
        raise ConfigError(
            f"{name} computes its loss with {getattr(loss, '__name__', loss)!r}, not with ForCausalLMLoss, so the "
            "fused loss would not be the same. Only causal language models with the standard loss are supported."
        )


def _check_group(shard: VocabShard) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if shard.tp_size != world:
        raise ConfigError(
            f"data_parallel=True shards the vocabulary over all {world} data-parallel ranks, but the shard's group has "
            f"{shard.tp_size}: rows that other ranks hold too would need their gradients averaged. Give the shard the "
            "world's group."
        )


def _module(model: Any, getter: str) -> Any:
    try:
        module = getattr(model, getter)()
    except (NotImplementedError, AttributeError) as error:
        raise ConfigError(f"{type(model).__name__} is of an unknown architecture: {getter} fails ({error})") from error
    if module is None:
        raise ConfigError(f"{type(model).__name__} has no {getter[4:].replace('_', ' ')}: not a causal language model")
    return module


def _check_module(what: str, name: str, module: Any) -> None:
    if hasattr(module, "base_layer") or hasattr(module, "original_module") or hasattr(module, "modules_to_save"):
        raise ConfigError(
            f"the {what} {name} carries an adapter ({type(module).__name__}): its low-rank part would not be sharded. "
            "Merge it (merge_and_unload), or leave this module out of target_modules and modules_to_save."
        )
    weight = getattr(module, "weight", None)
    quantised = (isinstance(weight, Tensor) and not weight.is_floating_point()) or hasattr(weight, "quant_state")
    right = type(module) is nn.Linear if what == "head" else isinstance(module, nn.Embedding)
    if quantised or (not right and isinstance(module, nn.Linear | nn.Embedding)) or hasattr(weight, "qdata"):
        raise ConfigError(
            f"the {what} {name} is quantised or of a special kind ({type(module).__name__}, weight "
            f"{getattr(weight, 'dtype', None)}): its rows cannot be cut out and trained. Keep the embedding and the "
            "head in floating point (llm_int8_skip_modules, modules_to_not_convert)."
        )
    if not right or not isinstance(weight, nn.Parameter):
        raise ConfigError(
            f"the {what} {name} is a {type(module).__name__}, expected an "
            f"{'nn.Linear' if what == 'head' else 'nn.Embedding'}: an unknown architecture."
        )
    if hasattr(weight, "ds_id") and weight.numel() == 0:
        raise UngatheredWeightError(
            f"{name}.weight is partitioned by ZeRO-3 (no rows here). Apply under "
            "deepspeed.zero.GatheredParameters([...]), or before the model is partitioned."
        )
    if hasattr(weight, "device_mesh"):
        raise ConfigError(f"{name}.weight is a DTensor: leave it out of the tensor-parallel plan, or out of FSDP")
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if what != "head" and getattr(module, option, None):
            raise ConfigError(f"the {what} {name} has {option}={getattr(module, option)!r}, which is not supported")


def _check_rows(model: Any, parts: Parts, shard: VocabShard) -> None:
    rows, columns = len(parts.embedding.weight), len(parts.head.weight)
    declared = model.config.get_text_config().vocab_size
    if rows != columns:
        raise LayoutMismatchError(
            f"{parts.embedding_name}.weight has {rows} rows and {parts.head_name}.weight {columns}: likely only one of "
            "the two was resized. Use model.resize_token_embeddings, which resizes both."
        )
    if rows != declared:
        raise LayoutMismatchError(
            f"the model's tables have {rows} rows, but config.vocab_size is {declared}: the tokenizer was resized "
            "without the config. Use model.resize_token_embeddings, which sets both."
        )
    if rows != shard.vocab_size:
        raise LayoutMismatchError(
            f"the model's tables have {rows} rows, but the shard is of a vocabulary of {shard.vocab_size}. The model's "
            "own loss runs over all its rows, those past the tokenizer's ids included: "
            f"VocabShard(VocabLayout({rows}, tp_size), group)."
        )


def _check_tie(model: Any, parts: Parts) -> None:
    pair = f"{parts.embedding_name}.weight and {parts.head_name}.weight"
    if not parts.tied and parts.embedding.weight.data_ptr() == parts.head.weight.data_ptr():
        raise TyingError(
            f"{pair} are two Parameters on one storage: optimizers see two, and sharding would part them. Tie them "
            "(model.tie_weights()), or clone one of them."
        )
    if not parts.tied and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        raise TyingError(
            f"config.tie_word_embeddings is set, but {pair} are two Parameters: the tie is broken (values copied, "
            "loaded with assign=True, to_empty). Call model.tie_weights(), or set config.tie_word_embeddings=False."
        )
    for name, module in model.named_modules():
        if module is parts.embedding or module is parts.head:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter is parts.embedding.weight or parameter is parts.head.weight:
                raise TyingError(
                    f"{name}.{key} is the same Parameter as one of {pair}: a third use of the table is not supported."
                )


def digest(tensors: Any) -> Tensor:
    """Sums that differ where the tensors do, as int64 `[n]`; those of DTensors, which differ by design, left out."""
    sums = [tensor.detach().sum(dtype=torch.float64).cpu() for tensor in tensors if not hasattr(tensor, "device_mesh")]
    return torch.stack(sums).view(torch.int64) if sums else torch.zeros(0, dtype=torch.int64)
