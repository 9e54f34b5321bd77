"""A checkpoint of ours to one of Megatron-core's (`torch_dist`), without Megatron."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from vocab_parallel.checkpoint.exchange.megatron_files import (
    COMMON,
    CONFIG,
    CONFIG_TEXT,
    FOLDER,
    OBJECTS,
    ORIGIN,
    VOCABULARY,
    carried,
    is_table,
    owner_of,
)
from vocab_parallel.checkpoint.exchange.targets import open_ours, publish, require_free
from vocab_parallel.checkpoint.files import StoredCheckpoint, check_file, damaged
from vocab_parallel.checkpoint.placing import STATE, open_aside
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import BlockWriter, write_file
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest.strict_json import parse


@dataclass(frozen=True)
class _Origin:
    """What `from_megatron` noted of where a checkpoint is from."""

    padded_size: int
    keys: Mapping[str, str]
    objects: Mapping[str, tuple[int, int]]


def to_megatron(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    padded_size: int | None = None,
    rename: Mapping[str, str] | None = None,
    verify: bool = True,
) -> Path:
    """Makes a distributed checkpoint that Megatron-core's `dist_checkpointing.load` reads, at any TP size.

    One that `from_megatron` made becomes what it was, optimizer and objects too. Of another one the weights are
    written, and an iteration; Megatron's own objects (extra states) are not in it, so load it with a `strict` that
    allows for that. Padding rows are zero.

    Args:
        checkpoint: Ours.
        target: A folder that is not there, such as ``save/iter_0000042``.
        padded_size: Rows of the tables there; None: those that they had in Megatron, else the real ones. Megatron
            loads tables of another size than its own, but its own padding then stays zero.
        rename: Names of parameters here to names there, where they differ.
        verify: Whether to compare the checkpoint's files with their hashes first.

    Returns:
        `target`.

    Memory:
        One block of 4 MiB, and the objects' bytes.

    Raises:
        CheckpointLayoutError: `checkpoint` is damaged; a table's name there is none of Megatron's; a name that is not
            there; `padded_size` is below the real rows; `target` exists.
    """
    final = Path(target)
    require_free(final, Path(checkpoint))
    stored = open_ours(checkpoint, verify=verify)
    found = stored.state["extra"].get(ORIGIN)
    origin: _Origin | None = found and parse(_Origin, found, f"{stored.path / STATE}: extra.{ORIGIN}")
    rows = int(stored.state["layout"]["vocab_size"])
    padded = padded_size if padded_size is not None else max(rows, origin.padded_size if origin else rows)
    if padded < rows:
        raise CheckpointLayoutError(f"padded_size {padded} is below the {rows} real rows of {stored.path}")
    part: dict[str, Any] = {}
    for ours, theirs in _their_keys(stored, origin.keys if origin else {}, rename or {}).items():
        part[theirs] = _padded(stored, ours, padded) if _is_rows(stored, ours, rows) else carried(stored, ours)
    part |= _objects(stored, origin.objects if origin else {})
    aside = open_aside(final)
    try:
        _save(part, BlockWriter(aside))
        write_file(aside / COMMON, _given(stored, COMMON) if origin else _common(stored.step))
        write_file(aside / CONFIG, CONFIG_TEXT.encode())
        publish(aside, final)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


def _their_keys(stored: StoredCheckpoint, origin: Mapping[str, str], rename: Mapping[str, str]) -> dict[str, str]:
    """Keys here to keys there: as they were, with other names of parameters where `rename` has them."""
    names: dict[str, str] = {}
    for key in stored.tensors:
        ours, had = owner_of(key), origin.get(f"model.{owner_of(key)}", owner_of(key))
        if key in origin or key.startswith("model."):
            names[key] = origin.get(key, ours)
            if ours in rename:
                names[key] = names[key].removesuffix(had) + rename[ours]
    if unknown := sorted(name for name in rename if f"model.{name}" not in names):
        raise CheckpointLayoutError(
            f"{stored.path} has no parameter {unknown[0]} to rename; it has "
            f"{', '.join(sorted(owner_of(key) for key in names if key.startswith('model.'))[:6])} ..."
        )
    wrong = [name for name in stored.state["tables"] if not is_table(names.get(f"model.{name}", ""))]
    if wrong:
        raise CheckpointLayoutError(
            f"{stored.path} has the tables {', '.join(wrong)}; Megatron's are named {', '.join(VOCABULARY)}. Say which "
            f"is which: python -m vocab_parallel convert ... --to megatron --rename {wrong[0]}={VOCABULARY[0]}, or "
            f"to_megatron(..., rename={{{wrong[0]!r}: {VOCABULARY[0]!r}}})"
        )
    back = {theirs: ours for ours, theirs in names.items()}
    if twice := next((theirs for ours, theirs in names.items() if back[theirs] != ours), None):
        raise CheckpointLayoutError(f"{stored.path}: two tensors would be named {twice}: give them two names")
    return names


def _is_rows(stored: StoredCheckpoint, key: str, rows: int) -> bool:
    size = stored.tensors[key][1]
    return owner_of(key) in stored.state["tables"] and len(size) > 0 and size[0] == rows


def _padded(stored: StoredCheckpoint, key: str, padded: int) -> Rows:
    """The rows of a table, then zeros."""
    dtype, size = stored.tensors[key]

    def make(start: int, stop: int) -> Tensor:
        real = stored.read(key, min(start, size[0]), min(stop, size[0]))
        return torch.cat([real, real.new_zeros(stop - start - len(real), *size[1:])])

    return Rows.made((padded, *size[1:]), dtype, 0, padded, make)


def _objects(stored: StoredCheckpoint, index: Mapping[str, tuple[int, int]]) -> dict[str, io.BytesIO]:
    if not index:
        return {}
    content = _given(stored, OBJECTS).read_bytes()
    if any(start < 0 or length < 0 or start + length > len(content) for start, length in index.values()):
        raise CheckpointLayoutError(
            f"{stored.path / FOLDER / OBJECTS} ends before the objects that {STATE} lists in it"
        )
    return {key: io.BytesIO(content[start : start + length]) for key, (start, length) in index.items()}


def _given(stored: StoredCheckpoint, name: str) -> Path:
    """A file that came with the checkpoint; its size is looked at, whatever else is verified."""
    if wrong := check_file(stored.path, f"{FOLDER}/{name}", stored.state["files"], content=False):
        raise CheckpointLayoutError(damaged(stored.path, [wrong]))
    return stored.path / FOLDER / name


def _common(step: int) -> bytes:
    made = io.BytesIO()
    torch.save({"iteration": step, "checkpoint_version": 3.0}, made)
    return made.getvalue()


class _Planner(DefaultSavePlanner):
    """Writes bytes as they are."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


def _save(part: dict[str, Any], writer: BlockWriter) -> None:
    """What `torch.distributed.checkpoint.save` does on one rank."""
    planner = _Planner(flatten_state_dict=False)
    writer.set_up_storage_writer(True)
    planner.set_up_planner(part, writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
