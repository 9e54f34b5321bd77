"""Hugging Face directories to checkpoints of this package and back: real rows, one tied key, a block at a time."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.checkpoint.exchange.hugging_face_assets import VOCABULARY, assets_of, files_beside, identity_of
from vocab_parallel.checkpoint.exchange.hugging_face_names import CONFIG, ModelConfig, find_tables
from vocab_parallel.checkpoint.exchange.hugging_face_ties import names_and_ties
from vocab_parallel.checkpoint.exchange.safetensors_files import SafetensorsFiles, open_safetensors, row_blocks
from vocab_parallel.checkpoint.exchange.safetensors_writing import ToWrite, write_safetensors
from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.migration.assets import vocabulary_bytes
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import make_state, open_aside, write_checkpoint, write_file
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.manifest import Manifest


@dataclass(frozen=True)
class Exchanged:
    """What an exchange has written.

    Attributes:
        tables: Names of the parameters over the vocabulary.
        vocab_size: Their rows, all of them real.
        ties: Further name to the name that the weight is stored by.
        tensors, bytes: That were written.
        notes: What a user should know, such as rows that were left out.
    """

    path: Path
    tables: tuple[str, ...]
    vocab_size: int
    ties: Mapping[str, str]
    tensors: int
    bytes: int
    notes: tuple[str, ...]


def from_hugging_face(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp_size: int = 1,
    multiple_of: int = 128,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    step: int = 0,
    tables: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Exchanged:
    """A directory that `save_pretrained` wrote, as a checkpoint of this package.

    The tables keep their real rows only. A weight that the configuration ties is one key and a tie, whether the files
    hold it once or twice. Configuration and tokenizer are carried along in ``assets``, the ordered vocabulary as
    vocabulary.json. It loads at any TP size and padding.

    Args:
        source: With model.safetensors, or model.safetensors.index.json and its files; and config.json.
        target: The checkpoint's folder.
        tp_size: Ranks whose shards the files are cut along.
        multiple_of: As of `VocabLayout`.
        vocab_size: Real rows; None: as config.json says.
        dtype: Of floating-point tensors; None: as they are.
        step: Of the checkpoint.
        tables: Names of the tensors over the vocabulary, the embedding before the head, where their names do not tell.
        overwrite: Whether a target that is there is replaced.

    Memory:
        Three blocks of 4 MiB (or one row, where that is more); and the ordered table of the vocabulary.

    Raises:
        CheckpointLayoutError: A damaged or missing file, tables that cannot be told, ties that do not hold; or the
            target exists.
    """
    source, target = Path(source), Path(target)
    _require_new(target, overwrite)
    files, config = open_safetensors(source), ModelConfig.read(source / CONFIG)
    real = vocab_size if vocab_size is not None else config.vocab_size
    if real is None or real < 1:
        raise CheckpointLayoutError(f"{source / CONFIG} has no vocab_size: give the real rows' number by --vocab-size")
    found = find_tables(source, files, real, tables)
    if found.rows < real:
        raise CheckpointLayoutError(f"{source}: {found.names[0]} has {found.rows:,} rows, below vocab_size {real:,}")
    stored_as, ties = names_and_ties(source, files, config, found, real)
    names = {held: name for name, held in stored_as.items()}
    over = tuple(names[held] for held in found.names if held in names)
    layout = VocabLayout(real, tp_size, multiple_of=multiple_of)
    parts = _parts(files, stored_as, over, layout, dtype)
    tensors = {key: part[key] for part in parts for key in part}
    assets, notes = assets_of(source)
    if found.rows > real:
        notes.insert(0, f"{found.rows - real:,} rows past vocab_size {real:,} are padding and are left out")
    identity = identity_of(source, real, notes)
    extra: dict[str, Any] = {"hugging_face": {"folder": source.name, "rows": found.rows}}
    if identity is not None:
        assets[VOCABULARY] = vocabulary_bytes(identity)
        extra["vocabulary_sha256"] = identity.sha256
    head: dict[str, Any] = {} if len(over) > 1 or ties else {"head_key": None}  # a model without one
    manifest = Manifest.of_tensors(
        {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()},
        tables=over, ties=ties, layout=layout, identity=identity, step=step, **config.scores(), **head,
    )  # fmt: skip
    sizes = {"vocab_size": real, "padded_size": layout.padded_size, "tp_size": tp_size}
    state = make_state(step, tensors, layout=sizes, tables=over, ties=ties, extra=extra)
    write_checkpoint(target, parts, state=state, manifest=manifest, assets=assets)
    total = sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors.values())
    return Exchanged(target, over, real, ties, len(tensors), total, tuple(notes))


def to_hugging_face(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    tied: str | None = None,
    config: str | os.PathLike[str] | None = None,
    verify: bool = True,
    overwrite: bool = False,
) -> Exchanged:
    """A checkpoint of this package as a directory that `from_pretrained` reads: the real rows of whole tables.

    config.json gets the tables' rows as vocab_size (in a text_config too), and whether they are tied.

    Args:
        checkpoint: The checkpoint's folder. Optimizer state stays there.
        target: The directory to write.
        dtype: Of floating-point tensors; None: as they are.
        max_shard_bytes: Of tensors in one file; more go to several files and an index.
        tied: A tied weight under its first name only ("one", as Transformers does; None too), or under each ("both").
        config: A config.json, or a directory with one, in place of the one that came with the checkpoint.
        verify: Whether to compare the checkpoint's files with their hashes first.
        overwrite: Whether a target that is there is replaced.

    Memory:
        Three blocks of 4 MiB, or one row, where that is more.

    Raises:
        CheckpointLayoutError: The checkpoint is damaged or holds no model; `tied` for one that is not; a target that is
            there.
    """
    target = Path(target)
    _require_new(target, overwrite)
    stored = open_checkpoint(checkpoint)
    ties: dict[str, str] = stored.state["ties"]
    if tied not in (None, "one", "both") or (tied is not None and not ties):
        why = "expected one or both" if ties else "its embedding and head are two weights, or it has one of them only"
        raise CheckpointLayoutError(f"{stored.path}: tied={tied}: {why}")
    if verify:
        stored.verify()
    tensors = {
        key.removeprefix("model."): _to_write(stored, key, dtype) for key in stored.tensors if key.startswith("model.")
    }
    if not tensors:
        raise CheckpointLayoutError(f"{stored.path} holds no tensor of a model")
    if tied == "both":
        tensors |= {alias: tensors[name] for alias, name in ties.items()}
    notes: list[str] = []
    vocab_size = int(stored.state["layout"]["vocab_size"])
    beside = files_beside(stored, config, vocab_size, dtype, notes)
    left = sum(not key.startswith("model.") for key in stored.tensors)
    if left:
        notes.append(f"{left:,} tensors of the optimizer have no place in such a directory and are left out")
    aside = open_aside(target)
    try:
        write_safetensors(aside, tensors, max_shard_bytes=max_shard_bytes)
        for name, content in beside.items():
            write_file(aside / name, content)
        publish(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    total = sum(tensor.nbytes for tensor in tensors.values())
    return Exchanged(target, tuple(stored.state["tables"]), vocab_size, ties, len(tensors), total, tuple(notes))


def publish(aside: Path, target: Path) -> None:
    """Gives a whole folder its name; one of that name goes only after."""
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    os.replace(aside, target)
    shutil.rmtree(old, ignore_errors=True)


def _require_new(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise CheckpointLayoutError(f"{target} exists: give another name, or --overwrite to replace it")


def _parts(
    files: SafetensorsFiles, stored_as: Mapping[str, str], tables: Sequence[str], layout: VocabLayout,
    dtype: torch.dtype | None,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """What the files of each rank hold: its rows of the tables, and other tensors where there is least yet."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(layout.tp_size)]
    held = [0] * layout.tp_size
    for name, stored in stored_as.items():
        place, key = files.places[stored], f"model.{name}"
        kind = _converted(place.dtype, dtype)
        read = partial(_read, files, stored, kind)
        if name in tables:
            size = (layout.vocab_size, *place.shape[1:])
            for rank, part in enumerate(parts):
                own = layout.range(rank)
                part[key] = Rows.made(size, kind, own.start, len(own), read)
            continue
        least = held.index(min(held))
        held[least] += math.prod(place.shape) * kind.itemsize
        if math.prod(place.shape) and place.shape:
            parts[least][key] = Rows.made(place.shape, kind, 0, place.shape[0], read)
        else:
            parts[least][key] = read(0, None)
    return parts


def _read(files: SafetensorsFiles, name: str, dtype: torch.dtype, start: int, stop: int | None) -> Tensor:
    return files.read(name, start, stop).to(dtype)


def _to_write(stored: StoredCheckpoint, key: str, dtype: torch.dtype | None) -> ToWrite:
    own, shape = stored.tensors[key]
    read: Callable[[int, int], Tensor] = partial(stored.read, key)
    return ToWrite(_converted(own, dtype), tuple(shape), partial(row_blocks, tuple(shape), own, read))


def _converted(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own
