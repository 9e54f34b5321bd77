"""What lies where in a distributed checkpoint of Megatron-core."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from vocab_parallel.checkpoint.files import StoredTensors
from vocab_parallel.checkpoint.placing import METADATA
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import ASSETS
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.files import parse_json

COMMON, CONFIG, OBJECTS = "common.pt", "metadata.json", "objects.bin"
ORIGIN = "megatron"  # in the state's extra: what `to_megatron` needs to give back what there was
FOLDER = f"{ASSETS}/{ORIGIN}"
BACKEND = "torch_dist"
CONFIG_TEXT = json.dumps(
    {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
)
HEAD = "output_layer.weight"
VOCABULARY = ("embedding.word_embeddings.weight", HEAD, "output_layer.bias")
TRACKER = "latest_checkpointed_iteration.txt"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_BY_PARAMETER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MASTERS = ("fp32_param", "param")  # as Float16OptimizerWithFloat16Params and DistributedOptimizer name it
_LARGEST_OBJECTS, _LARGEST_TEXT, _DEEPEST = 2**30, 2**20, 16


def find_distributed(source: Path) -> Path:
    """The folder of a `torch_dist` checkpoint: `source`, or the newest in it by its tracker file.

    Raises:
        CheckpointLayoutError: There is none, or it has another format, named with what to do.
    """
    folder = source
    if not (source / CONFIG).is_file() and (source / TRACKER).is_file():
        words = _text(source / TRACKER).strip()
        if words != "release" and not re.fullmatch(r"\d{1,12}", words):
            raise CheckpointLayoutError(f"{source / TRACKER} says {words[:40]!r}, expected an iteration or 'release'")
        folder = source / ("release" if words == "release" else f"iter_{int(words):07d}")
    if not (folder / CONFIG).is_file():
        legacy = any(folder.glob("mp_rank_*/model_optim_rng.pt"))
        raise CheckpointLayoutError(
            f"{folder} has no {CONFIG}, so it is no distributed checkpoint of Megatron-core"
            + (": it is one of the legacy format, one file a rank. Load it in Megatron with --load and save it again "
               f"with --ckpt-format {BACKEND}, then convert that" if legacy else "")
        )  # fmt: skip
    try:
        backend = parse_json(_text(folder / CONFIG).encode(), folder / CONFIG)["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointLayoutError(f"{folder / CONFIG} does not name a sharded_backend: it is damaged") from error
    if backend != BACKEND:
        raise CheckpointLayoutError(
            f"{folder} has the format {str(backend)[:40]!r}, expected {BACKEND!r}. Load it in Megatron and save it "
            f"again with --ckpt-format {BACKEND}"
        )
    for name in (METADATA, COMMON):
        if not (folder / name).is_file():
            raise CheckpointLayoutError(f"{folder} has no {name}: its save did not finish, use an older checkpoint")
    return folder


def our_keys(stored: StoredTensors, rename: Mapping[str, str], optimizer: bool) -> dict[str, str]:
    """Keys of ours to theirs.

    Raises:
        CheckpointLayoutError: Optimizer state that is not of one parameter in its own shape; one name for two tensors;
            a parameter to rename that is not there.
    """
    weights = {key for key in stored.tensors if not _OPTIMIZER.match(key)}
    heads = {f"{key.removesuffix(VOCABULARY[0])}{HEAD}" for key in weights if key.endswith(VOCABULARY[0])}
    if unknown := sorted(set(rename) - weights - heads):
        raise CheckpointLayoutError(
            f"{stored.path} has no parameter {unknown[0]} to rename; it has {', '.join(sorted(weights)[:6])} ..."
        )
    names = [(f"model.{rename.get(key, key)}", key) for key in stored.tensors if key in weights]
    for key in stored.tensors if optimizer else ():
        if key in weights:
            continue
        found = _BY_PARAMETER.fullmatch(key)
        if found is None or found[2] not in weights or stored.tensors[key][1] != stored.tensors[found[2]][1]:
            raise CheckpointLayoutError(
                f"{stored.path} holds optimizer state that is not one parameter's in its own shape: {key} of shape "
                f"{list(stored.tensors[key][1])}. DistributedOptimizer names parameters only in the format "
                "'fully_reshardable' (--dist-ckpt-optim-fully-reshardable, "
                "metadata={'distrib_optim_sharding_type': 'fully_reshardable'}): load it in Megatron and save it "
                "again with that, or convert the weights alone: python -m vocab_parallel convert ... --weights-only, "
                "or from_megatron(..., optimizer=False)"
            )
        state = "master_weight" if found[1] in _MASTERS else found[1]
        names.append((f"optimizer.{rename.get(found[2], found[2])}.{state}", key))
    made = dict(names)
    if len(made) < len(names):
        twice = next(ours for ours, theirs in names if made[ours] != theirs)
        raise CheckpointLayoutError(f"{stored.path}: two tensors would be named {twice}: give them two names")
    return made


def is_table(name: str) -> bool:
    """Whether a name of Megatron's is of a parameter over the vocabulary; models in wrappers have a prefix."""
    return place_of(name) < len(VOCABULARY)


def place_of(name: str) -> int:
    """The order of embedding, head, bias; past it other parameters."""
    found = (at for at, table in enumerate(VOCABULARY) if name == table or name.endswith(f".{table}"))
    return next(found, len(VOCABULARY))


def owner_of(key: str) -> str:
    """The parameter that a key of ours is of."""
    kind, _, name = key.partition(".")
    return name if kind == "model" else name.rpartition(".")[0]


def carried(stored: StoredTensors, key: str) -> Tensor:
    """A stored tensor as it is, read block by block when it is written."""
    dtype, size = stored.tensors[key]
    if not size or not size.numel():
        return stored.read(key)
    return Rows.made(size, dtype, 0, size[0], partial(stored.read, key))


def read_objects(stored: StoredTensors, optimizer: bool) -> tuple[bytes, dict[str, list[int]]]:
    """The checkpoint's objects as they lie in its files, one after another, and where each is: offset and length."""
    entries, content = stored.metadata.state_dict_metadata, bytearray()
    index: dict[str, list[int]] = {}
    for at, info in stored.metadata.storage_data.items():
        if not isinstance(entries.get(at.fqn), BytesStorageMetadata):
            continue
        if _OPTIMIZER.match(at.fqn) and not optimizer:
            continue
        if len(content) + info.length > _LARGEST_OBJECTS:
            raise CheckpointLayoutError(f"{stored.path} has over {_LARGEST_OBJECTS} bytes of objects: {at.fqn}")
        with (stored.path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            index[at.fqn] = [len(content), info.length]
            content += file.read(info.length)
    return bytes(content), index


def iteration_of(common: Any, folder: Path) -> int:
    """The training iteration, of the common state or of the folder's name; else 0."""
    found = common.get("iteration") if isinstance(common, dict) else None
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**62:
        return found
    named = re.fullmatch(r"iter_(\d{1,12})", folder.name)
    return int(named[1]) if named else 0


def optimizer_step(common: Any) -> float | None:
    """Steps that the optimizer has done, where the common state says it, for all parameters the same."""
    steps = set(_steps(common.get("optimizer"))) if isinstance(common, dict) else set()
    return steps.pop() if len(steps) == 1 else None


def _steps(value: Any, depth: int = 0) -> Iterator[float]:
    for key, one in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if key in ("common_step", "step") and (number := _number(one)) is not None:
            yield number
        elif isinstance(one, dict | list) and depth < _DEEPEST:  # a pickle can hold itself
            yield from _steps(one, depth + 1)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, int | float) and 0 <= value < 2**62 else None


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_LARGEST_TEXT).decode("utf-8", "replace")
