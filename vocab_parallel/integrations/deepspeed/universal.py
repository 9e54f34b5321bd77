"""Checkpoints by real rows: the layout noted beside each, and universal ones for another TP size or padding."""

from __future__ import annotations

import json
import math
import re
import shutil
import types
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.checkpoint.exchange.opaque import load_plain
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed.notes import LAYOUT_FILE, VOCAB_SIZE, named_tag, read_note
from vocab_parallel.integrations.deepspeed.trust import require_known
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters

UNIVERSAL_INFO = "universal_checkpoint_info"  # the attribute of a model that DeepSpeed saves for its conversion
_OURS = "vocab_parallel"


def universal_info(model: nn.Module) -> dict[str, Any]:
    """What `ds_to_universal` reads: which parameters are sharded over the vocabulary, which replicated, and how."""
    from deepspeed.checkpoint import constants

    vocabulary = vocab_parameters(model)
    replicated, row_parallel = [], []
    for name, parameter in model.named_parameters():
        if name in vocabulary or not parameter.requires_grad:
            continue
        if not getattr(parameter, "tensor_model_parallel", False):
            replicated.append(_pattern(name))
        elif getattr(parameter, "partition_dim", 0) == 1:
            row_parallel.append(_pattern(name))
    first = next(iter(vocabulary.values()))[1]
    stripped = [
        name
        for name, (parameter, shard) in vocabulary.items()
        if len(_shape(parameter)) == 2 and shard.vocab_size == first.vocab_size and parameter.requires_grad
    ]
    return {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        constants.ORIGINAL_VOCAB_SIZE: first.vocab_size,
        constants.VOCABULARY_PARAMETER_PATTERNS: [_pattern(name) for name in stripped],
        constants.TP_REPLICATED_PARAMETER_PATTERNS: replicated,
        constants.PARAMETER_WITH_ROW_PARALLELISM_PATTERNS: row_parallel,
        _OURS: layout_of(model),
    }


def layout_of(model: nn.Module) -> dict[str, Any]:
    """The vocabulary's parameters and their other names, as plain data."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {
        "parameters": {
            name: {
                VOCAB_SIZE: shard.vocab_size,
                "padded_size": shard.layout.padded_size,
                "tp_size": shard.tp_size,
                "row": list(_shape(parameter)[1:]),
                "trained": parameter.requires_grad,
            }
            for name, (parameter, shard) in vocab_parameters(model).items()
        },
        "aliases": {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name},
    }


def to_universal(source: str | Path, target: str | Path, *, workers: int = 1, trusted: bool = False) -> None:
    """Converts a checkpoint of ZeRO 1, 2 or 3 to a universal one: DeepSpeed's `ds_to_universal`, then real rows only.

    The vocabulary's weights, master weights and moments have `vocab_size` rows in it, whatever the TP size and padding
    were, and a tied weight is there once. An engine of `initialize` with `"checkpoint": {"load_universal": true}`
    loads it at another TP size, padding and number of data-parallel ranks.

    Args:
        source: The folder of one tag, such as `checkpoints/global_step100`.
        target: A new folder beside it, such as `checkpoints/global_step100_universal`.
        workers: Processes that DeepSpeed uses.
        trusted: Your word that the files may be unpickled, whatever classes they name: DeepSpeed's conversion does.
            Without it they may name DeepSpeed's own.

    Collectives:
        None: run it in one process.

    Raises:
        CheckpointLayoutError: It was not saved by an engine of `initialize`, a vocabulary parameter was frozen, or a
            file names another class.
    """
    from deepspeed.checkpoint import ds_to_universal

    source, target = Path(source), Path(target)
    layout = _saved_layout(source)
    frozen = [name for name, entry in layout["parameters"].items() if not entry["trained"]]
    if frozen:
        raise CheckpointLayoutError(
            f"{source} holds frozen vocabulary parameters ({', '.join(frozen)}): DeepSpeed's conversion keeps one "
            "rank's rows of them. Export it with vocab_parallel.integrations.deepspeed.export instead."
        )
    if not trusted:
        require_known(source)
    ds_to_universal.main(
        Namespace(
            input_folder=str(source), output_folder=str(target), num_extract_workers=workers,
            num_merge_workers=workers, keep_temp_folder=False, strict=True, inject_missing_state=False,
        )
    )  # fmt: skip
    for name, entry in layout["parameters"].items():
        for path in sorted((target / "zero" / name).glob("*.pt")):
            if path.stem != "step":
                _keep_real_rows(path, name, entry)
    for alias in layout["aliases"]:
        shutil.rmtree(target / "zero" / alias, ignore_errors=True)
    note = {**layout, "universal": True}
    (target / LAYOUT_FILE).write_text(json.dumps(note, indent=1), encoding="utf-8")


def read_by_shard(engine: Any) -> None:
    """Has the engine's optimizer read a vocabulary parameter of a universal checkpoint by its real rows.

    DeepSpeed would cut the file into equal parts, or take it whole where its shape happens to be the shard's.
    """
    shards = {id(parameter): entry for entry in vocab_parameters(engine.module).values() for parameter in entry[:1]}
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_partitioned_groups_flat"):  # stage 3
        original = optimizer.load_hp_checkpoint_state

        def load_partition(folder: str, key: str, param: Any = None) -> Tensor:
            if id(param) not in shards:
                return original(folder, key, param=param)  # type: ignore[no-any-return]
            rows = _local_rows(Path(folder) / f"{key}.pt", *shards[id(param)]).flatten()
            ranks = param.ds_zero_partition_world_size
            share = math.ceil(len(rows) / ranks)
            padded = torch.cat([rows, rows.new_zeros(share * ranks - len(rows))])
            return padded.narrow(0, param.ds_zero_partition_rank * share, share)

        optimizer.load_hp_checkpoint_state = load_partition
        return
    for parameter, shard in shards.values():
        if hasattr(parameter, "load_hp_checkpoint_state"):
            method = types.MethodType(_fragment_loader(shard), parameter)
            vars(parameter)["load_hp_checkpoint_state"] = method


def _fragment_loader(shard: VocabShard) -> Any:
    """DeepSpeed's `load_hp_checkpoint_state` of a Parameter, from a file of real rows."""

    def load(self: Any, folder: str, tp_rank: int, tp_world_size: int, **_: Any) -> Any:
        mapping, step = self._hp_mapping, None
        mapping.optim_fragment = {}
        address = mapping.lp_fragment_address
        for path in sorted(Path(folder).glob("*.pt")):
            if path.stem == "step":
                step = load_plain(path, mapped=False)
                continue
            fragment = _local_rows(path, self, shard).flatten().narrow(0, address.start, address.numel)
            if path.stem == "fp32":
                mapping.get_hp_fragment().data.copy_(fragment)
            else:
                mapping.optim_fragment[path.stem] = fragment.clone()
        return step

    return load


def write_layout(model: nn.Module, folder: Path) -> None:
    """Notes the layout in a checkpoint's folder, on the world's first rank."""
    if dist.get_rank() == 0:
        (folder / LAYOUT_FILE).write_text(json.dumps(layout_of(model), indent=1), encoding="utf-8")


def check_layout(engine: Any, load_dir: str, tag: str | None) -> None:
    """Raises unless the checkpoint has this engine's vocabulary, and unless universal its shards too."""
    universal = bool(engine.load_universal_checkpoint())
    if tag is None:
        latest = Path(load_dir) / ("latest_universal" if universal else "latest")
        if not latest.is_file():
            return  # DeepSpeed says so
        tag = named_tag(latest)
    path = Path(load_dir) / str(tag) / LAYOUT_FILE
    if not path.is_file():
        return  # not saved by an engine of `initialize`; the files' shapes are compared when they are read
    saved, mine = read_note(path), layout_of(engine.module)
    compared = [VOCAB_SIZE, "row"] if universal else [VOCAB_SIZE, "row", "padded_size", "tp_size"]
    for name in sorted(set(saved["parameters"]) | set(mine["parameters"])):
        theirs, ours = saved["parameters"].get(name), mine["parameters"].get(name)
        if theirs is None or ours is None or any(theirs[key] != ours[key] for key in compared):
            raise CheckpointLayoutError(
                f"{path.parent} holds {name} as {_words(theirs)}, the model as {_words(ours)}."
                + (
                    ""
                    if universal or theirs is None or ours is None or theirs[VOCAB_SIZE] != ours[VOCAB_SIZE]
                    else " Convert it with vocab_parallel.integrations.deepspeed.to_universal and load it with "
                    '"checkpoint": {"load_universal": true}.'
                )
            )


def _saved_layout(source: Path) -> dict[str, Any]:
    path = source / LAYOUT_FILE
    if not path.is_file():
        raise CheckpointLayoutError(
            f"{source} has no {LAYOUT_FILE}: it was not saved by an engine of "
            "vocab_parallel.integrations.deepspeed.initialize, so its real rows cannot be told from padding."
        )
    return read_note(path)


def _keep_real_rows(path: Path, name: str, entry: dict[str, Any]) -> None:
    from deepspeed.checkpoint import constants

    stored = load_plain(path, mapped=False)
    stored = stored if isinstance(stored, dict) else {constants.PARAM: stored, constants.CAT_DIM: 0}
    rows = _in_rows(path, stored.get(constants.PARAM), entry["row"])
    if len(rows) not in (entry[VOCAB_SIZE], entry["padded_size"]):
        raise CheckpointLayoutError(
            f"{name} in {path} has {len(rows)} rows, expected the {entry[VOCAB_SIZE]} real ones or all "
            f"{entry['padded_size']}: its shards were not all found."
        )
    real = rows[: entry[VOCAB_SIZE]].clone()
    torch.save(stored | {constants.PARAM: real, constants.VOCAB_TENSOR: True, VOCAB_SIZE: len(real)}, path)


def _local_rows(path: Path, parameter: nn.Parameter, shard: VocabShard) -> Tensor:
    """This rank's rows, padding zero, from a file of the whole table."""
    from deepspeed.checkpoint import constants

    stored = load_plain(path, mapped=False)
    table = _in_rows(path, stored.get(constants.PARAM) if isinstance(stored, dict) else stored, _shape(parameter)[1:])
    if len(table) != shard.vocab_size:
        raise CheckpointLayoutError(
            f"{path} holds {len(table)} rows, the model's vocabulary has {shard.vocab_size} ({shard}). A conversion by "
            "ds_to_universal alone keeps padding: use vocab_parallel.integrations.deepspeed.to_universal."
        )
    return shard.slice(table)


def _in_rows(path: Path, value: Any, row: Sequence[int]) -> Tensor:
    """A file's tensor in rows; one of a few numbers, repeated, is refused as anything else."""
    numel = math.prod(row)
    if isinstance(value, Tensor) and value.is_contiguous() and numel and value.numel() % numel == 0:
        return value.reshape(-1, *row)
    raise CheckpointLayoutError(f"{path} holds no tensor in rows of {list(row)}: it is damaged, or of another model")


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole local parameter, where ZeRO-3 has partitioned it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _pattern(name: str) -> str:
    return rf"^{re.escape(name)}$"


def _words(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "no vocabulary parameter"
    return f"V={entry[VOCAB_SIZE]} padded to {entry['padded_size']} over {entry['tp_size']} ranks, rows {entry['row']}"
