"""What a model on this rank tells about its head, its ties and its tensors; nothing is gathered."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.loss import kernels
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters
from vocab_parallel.vocabulary.manifest.fields import HeadContract, RuntimeContract, TensorSpec, TyingContract

HOST_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron-core", "transformers": "transformers", "fsdp": "torch"}

Module = VocabParallelEmbedding | VocabParallelLMHead
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of single modules, in names of parameters, not in keys


def unwrap(model: nn.Module) -> nn.Module:
    """The model in wrappers that put "module." or "_orig_mod." before its names (DDP, engines, torch.compile)."""
    while True:
        children = [name for name, _ in model.named_children()]
        if children not in (["module"], ["_orig_mod"]):
            return model
        model = getattr(model, children[0])


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers of modules add to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def shard_of(model: nn.Module) -> VocabShard:
    """The shard of the model's vocabulary; of a model with two (encoder, decoder) the one that its head is over.

    Raises:
        CheckpointLayoutError: It has no module over the vocabulary.
    """
    modules = [module for module in model.modules() if isinstance(module, Module)]
    if modules:
        return next((one for one in modules if isinstance(one, VocabParallelLMHead)), modules[0]).shard
    raise CheckpointLayoutError(
        f"{type(model).__name__} has no vocabulary-sharded embedding or head, so there is nothing for a manifest to "
        "say. Build it from VocabParallelEmbedding and VocabParallelLMHead, or call integrations.<host>.apply first."
    )


def head_of(model: nn.Module) -> HeadContract:
    """The model's head; of a stage without one, its embedding's side of it."""
    shard = shard_of(model)
    embedding, head = _first(model, VocabParallelEmbedding, shard), _first(model, VocabParallelLMHead, shard)
    tied = next((names for names in uses(model).values() if len(names) > 1), [])
    name, module = embedding or head or ("", None)
    assert isinstance(module, Module)
    width = module.embedding_dim if isinstance(module, VocabParallelEmbedding) else module.in_features
    projection, bias = None, None
    if head is not None:
        lm_head = head[1]
        assert isinstance(lm_head, VocabParallelLMHead)
        width, bias = lm_head.in_features, lm_head.bias
        projection = None if lm_head.projection is None else " ".join(str(lm_head.projection).split())
    dtype = next(p.dtype for p, _ in vocab_parameters(model).values())
    return HeadContract(
        width=width,
        output_width=shard.vocab_size,
        embedding_key=(tied[0] if tied else name) if embedding else None,
        head_key=head and head[0],
        bias_key=None if bias is None or head is None else f"{head[0].removesuffix('weight')}bias",
        bias=bias is not None,
        parameter_dtype=dtype_name(dtype),
        accumulation_dtype="float64" if dtype == torch.float64 else "float32",
        projection=projection,
        **_scores(model),
    )


def tying_of(model: nn.Module) -> TyingContract:
    """Which uses share one Parameter; of a pipeline stage also whether it shares one with another stage."""
    ties = ties_of(model)
    if not ties:
        return TyingContract(bool(getattr(model, "share_embeddings_and_output_weights", False)))
    return TyingContract(True, next(iter(ties.values())), ties)


def ties_of(model: nn.Module) -> dict[str, str]:
    """Each further name of a tied weight, with its first name, the one that a checkpoint has."""
    return {alias: names[0] for names in uses(model).values() for alias in names[1:]}


def uses(model: nn.Module) -> dict[int, list[str]]:
    """The names of each weight over the vocabulary, by its id: that of `named_parameters` first."""
    first = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    found: dict[int, list[str]] = {}
    for name, weight in _weights(model):
        names = found.setdefault(id(weight), [first[id(weight)]] if id(weight) in first else [])
        if name not in names:
            names.append(name)
    return found


def tensors_of(model: nn.Module) -> dict[str, TensorSpec]:
    """Every parameter and persistent buffer by its key in a checkpoint, with dtype and whole shape."""
    tables = vocab_parameters(model)
    found = {}
    for name, parameter in model.named_parameters():
        shape = _shape(parameter)
        if name in tables:
            shape = (tables[name][1].vocab_size, *shape[1:])
        elif getattr(parameter, "tensor_model_parallel", False):  # Megatron's mark of a part
            at = int(getattr(parameter, "partition_dim", 0))
            shape = (*shape[:at], shape[at] * shard_of(model).tp_size, *shape[at + 1 :])
        found[f"model.{plain_name(name)}"] = TensorSpec(dtype_name(parameter.dtype), shape)
    for name, buffer in persistent_buffers(model):
        found[f"model.{name}"] = TensorSpec(dtype_name(buffer.dtype), _shape(buffer))
    return found


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that a state dict holds, each once, by their names without wrappers."""
    temporary = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in temporary:
            yield plain_name(name), buffer


def runtime_of(host: str | None, weight: Tensor | None = None) -> RuntimeContract:
    """This process: versions, and the device and kernels of a weight."""
    package = HOST_PACKAGES.get(host or "")
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    versions["vocab_parallel"] = _version("vocab-parallel") or "not installed"
    return RuntimeContract(
        versions,
        host,
        None if package is None else _version(package),
        None if weight is None else weight.device.type,
        None if weight is None else ("triton" if kernels.available(weight) else "torch"),
    )


def head_of_tables(
    tensors: Mapping[str, TensorSpec], tables: Collection[str], ties: Mapping[str, str], vocab_size: int
) -> HeadContract:
    """The head of a checkpoint without a model: its tables by shape, the embedding before the head."""
    shapes = {name: tensors[f"model.{name}"] for name in tables}
    wide = [name for name, spec in shapes.items() if len(spec.shape) == 2]
    bias = next((name for name, spec in shapes.items() if len(spec.shape) == 1), None)
    if not wide:
        raise CheckpointLayoutError(f"none of the tables {list(tables)} has the shape [vocab_size, width]")
    return HeadContract(
        width=shapes[wide[0]].shape[1],
        output_width=vocab_size,
        embedding_key=wide[0],
        head_key=[*wide, *ties][-1] if len(wide) == 1 else wide[-1],
        bias_key=bias,
        bias=bias is not None,
        parameter_dtype=shapes[wide[0]].dtype,
        accumulation_dtype="float64" if shapes[wide[0]].dtype == "float64" else "float32",
    )


def scores_of(get: Callable[[str], Any]) -> dict[str, Any]:
    """Softcap and scale of the logits, as the configurations of Transformers name them.

    Gemma 2 has a softcap; Cohere, Falcon-H1 and Granite a scale.

    Args:
        get: A field of the configuration by its name; None: it has none.
    """
    found: dict[str, Any] = {}
    for name, power in (("logit_scale", 1), ("lm_head_multiplier", 1), ("logits_scaling", -1)):
        if (value := _positive(get, name)) is not None:
            found["scale"] = found.get("scale", 1.0) * value**power
    softcap = _positive(get, "final_logit_softcapping")
    return found if softcap is None else {**found, "softcap": softcap}


def _positive(get: Callable[[str], Any], name: str) -> float | None:
    value = get(name)
    if value is None:
        return None
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value < 1e30:
        raise CheckpointLayoutError(f"the model's configuration: {name}: expected a positive number, got {value!r:.40}")
    return float(value)


def dtype_name(dtype: torch.dtype | str) -> str:
    """ "float32" of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _first(model: nn.Module, kind: type[Module], shard: VocabShard) -> tuple[str, Module] | None:
    return next(
        (
            (_weight_name(name), module)
            for name, module in model.named_modules()
            if isinstance(module, kind) and module.shard.layout == shard.layout
        ),
        None,
    )


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, Module):
            # Megatron's tied head has no weight of its own: the model hands it the embedding's.
            weight = module._parameters.get("weight")
            if weight is None:
                weight = getattr(getattr(module, "tied_to", None), "weight", None)
            if weight is not None:
                yield _weight_name(name), weight


def _weight_name(module: str) -> str:
    return plain_name(f"{module}.weight") if module else "weight"


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The whole shape, of a DTensor and of a ZeRO-3 partition too."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _scores(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # a part, if it sees or hears too
    return scores_of(lambda name: getattr(text, name, None))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
