"""Hugging Face directories to checkpoints of this package and back: real rows, one tied key, a block at a time."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.checkpoint.exchange.casting import cast, converted
from vocab_parallel.checkpoint.exchange.hugging_face_assets import assets_of, files_beside, identity_of
from vocab_parallel.checkpoint.exchange.hugging_face_names import CONFIG, ModelConfig, find_tables
from vocab_parallel.checkpoint.exchange.hugging_face_ties import names_and_ties
from vocab_parallel.checkpoint.exchange.safetensors_files import SafetensorsFiles, open_safetensors, row_blocks
from vocab_parallel.checkpoint.exchange.safetensors_writing import ToWrite, write_safetensors
from vocab_parallel.checkpoint.exchange.targets import open_ours, publish, require_free, write_ours
from vocab_parallel.checkpoint.files import StoredCheckpoint
from vocab_parallel.checkpoint.migration.assets import vocabulary_bytes
from vocab_parallel.checkpoint.placing import open_aside
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.trimming import give_back
from vocab_parallel.checkpoint.writing import VOCABULARY, write_file
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout


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

    Tables keep their real rows; a tied weight is one key and a tie, whether the files hold it once or twice.
    Configuration and tokenizer go along in ``assets``, the ordered vocabulary as vocabulary.json.

    Args:
        source: With config.json, and model.safetensors or several such files and their index.
        target: The checkpoint's folder.
        tp_size: Ranks whose shards the files are cut along.
        multiple_of: As of `VocabLayout`.
        vocab_size: Real rows; None: as config.json says.
        dtype: Of floating-point tensors; None: as they are.
        step: Of the checkpoint.
        tables: Names of the tensors over the vocabulary, the embedding before the head; None: told by their names.
        overwrite: Whether a target that is there is replaced.

    Memory:
        Three blocks of 4 MiB (or one row, where that is more); and the ordered table of the vocabulary.

    Raises:
        CheckpointLayoutError: A damaged or missing file, tables that cannot be told, ties that do not hold, numbers
            that `dtype` cannot; or the target exists.
    """
    source, target = Path(source), Path(target)
    require_free(target, source, overwrite=overwrite)
    model = _read_model(source, vocab_size, tables)
    model.config.require_plain(dtype)
    real, over, ties = model.vocab_size, model.tables, model.ties
    layout = VocabLayout(real, tp_size, multiple_of=multiple_of)
    parts = _parts(model, layout, dtype)
    assets, notes = assets_of(source)
    notes[:0] = model.notes
    identity = identity_of(source, real, notes)
    extra: dict[str, Any] = {"hugging_face": {"folder": source.name, "rows": model.rows, "copies": model.copies}}
    if identity is not None:
        assets[VOCABULARY] = vocabulary_bytes(identity)
        extra["vocabulary_sha256"] = identity.sha256
    give_back()
    tied = [alias for alias in ties if alias not in model.copies]
    head: dict[str, Any] = {"head_key": tied[0] if tied else None} if tied or len(over) == 1 else {}
    tensors = write_ours(
        target, parts, layout, step=step, tables=over, ties=ties, extra=extra, assets=assets, identity=identity,
        **model.config.scores(), **head,
    )  # fmt: skip
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
        tied: A tied weight under its first name only ("one", as Transformers does), or under each ("both"). None: under
            its first, but copies for an encoder or a layer that came with a directory stay.
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
    require_free(target, Path(checkpoint), overwrite=overwrite)
    stored = open_ours(checkpoint, verify=verify)
    tensors = _model_tensors(stored, dtype, tied)
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
    ties = stored.state["ties"]
    return Exchanged(target, tuple(stored.state["tables"]), vocab_size, ties, len(tensors), total, tuple(notes))


class _Model(NamedTuple):
    """What a directory holds: the names in the model with those in the files, and what is over the vocabulary.

    Attributes:
        rows: Of the longest table, padding included.
        copies: Tied names that are no head's, which the files hold too.
    """

    files: SafetensorsFiles
    config: ModelConfig
    stored_as: dict[str, str]
    tables: tuple[str, ...]
    ties: dict[str, str]
    vocab_size: int
    rows: int
    copies: list[str]
    notes: list[str]


def _read_model(source: Path, vocab_size: int | None, tables: Sequence[str] | None) -> _Model:
    files, config = open_safetensors(source), ModelConfig.read(source / CONFIG)
    real = vocab_size if vocab_size is not None else config.vocab_size
    if real is None or real < 1:
        raise CheckpointLayoutError(f"{source / CONFIG} has no vocab_size: give the real rows' number by --vocab-size")
    found = find_tables(source, files, real, tables)
    stored_as, ties = names_and_ties(source, files, config, found, real)
    names = {held: name for name, held in stored_as.items()}
    over = tuple(names[held] for held in found.names if held in names)
    notes = []
    if found.rows > real:
        notes.append(f"{found.rows - real:,} rows past vocab_size {real:,} are padding and are left out")
    for name, place in files.places.items():
        if name not in found.names and found.rows in place.shape[1:]:
            notes.append(f"{name} {list(place.shape)} is no table, and stays as it is where rows are left out or moved")
    return _Model(files, config, stored_as, over, ties, real, found.rows, [*found.copies], notes)


def _parts(model: _Model, layout: VocabLayout, dtype: torch.dtype | None) -> list[dict[str, Tensor]]:
    """What the files of each rank hold: its rows of the tables, and other tensors where there is least yet."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(layout.tp_size)]
    held = [0] * layout.tp_size
    for name, stored in model.stored_as.items():
        place, key = model.files.places[stored], f"model.{name}"
        kind = converted(name, place.dtype, dtype)
        read = partial(_read, model.files, stored, kind)
        if name in model.tables:
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
    return cast(name, files.read(name, start, stop), dtype)


def _model_tensors(stored: StoredCheckpoint, dtype: torch.dtype | None, tied: str | None) -> dict[str, ToWrite]:
    """The model's tensors by their names, and the aliases of tied ones if `tied` is "both"."""
    ties: dict[str, str] = stored.state["ties"]
    if tied not in (None, "one", "both") or (tied is not None and not ties):
        why = "expected one or both" if ties else "its embedding and head are two weights, or it has one of them only"
        raise CheckpointLayoutError(f"{stored.path}: tied={tied}: {why}")
    tensors = {}
    for key in (key for key in stored.tensors if key.startswith("model.")):
        name, (own, shape) = key.removeprefix("model."), stored.tensors[key]
        kind = converted(name, own, dtype)
        read: Callable[[int, int], Tensor] = partial(_read_stored, stored, key, kind)
        tensors[name] = ToWrite(kind, tuple(shape), partial(row_blocks, tuple(shape), own, read))
    if not tensors:
        raise CheckpointLayoutError(f"{stored.path} holds no tensor of a model")
    origin = stored.state["extra"].get("hugging_face")
    copies = origin.get("copies") if isinstance(origin, dict) and tied is None else None
    twice = ties if tied == "both" else copies if isinstance(copies, list) else ()
    return tensors | {alias: tensors[name] for alias, name in ties.items() if alias in twice}


def _read_stored(stored: StoredCheckpoint, key: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
    return cast(key, stored.read(key, start, stop), dtype)
