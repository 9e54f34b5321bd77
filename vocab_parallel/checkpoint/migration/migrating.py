"""A checkpoint under another vocabulary: every row-addressed tensor moves by one map, block by block."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.migration.assets import (
    VOCABULARY,
    KnownVocabulary,
    carried_assets,
    known_vocabulary,
    stored_identity,
    vocabulary_bytes,
    vocabulary_sha256,
)
from vocab_parallel.checkpoint.migration.report import MigrationReport, Table
from vocab_parallel.checkpoint.migration.rows import NewRows, moved_rows
from vocab_parallel.checkpoint.placing import is_whole
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.states import SHARDS
from vocab_parallel.checkpoint.trimming import give_back
from vocab_parallel.checkpoint.writing import MANIFEST, make_state, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.manifest import vocabulary_of
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import RowInit, without_sources
from vocab_parallel.vocabulary.migration.moving import moves
from vocab_parallel.vocabulary.row_states import is_master_weight


def migrate_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    vocab_map: VocabMap,
    *,
    init: RowInit,
    tp_size: int | None = None,
    multiple_of: int = 128,
    identity: VocabIdentity | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    verify: bool = True,
    dry_run: bool = False,
) -> MigrationReport:
    """Writes a checkpoint with the rows of another vocabulary, by one process, never with a whole table in memory.

    Every table over the vocabulary moves by the map, tied or not, with biases, master weights and every row-shaped
    optimizer state. Rows of kept ids keep their bits. New rows of a weight begin as `init` says, those of a master
    weight too, and then the weight's are the master's, rounded; those of moments are zero. Step counts, column
    factors, scalars and all tensors without a vocabulary stay.

    Args:
        source: A checkpoint.
        target: The folder to write; must not be there.
        vocab_map: From the checkpoint's ids to the new ones.
        init: How new rows begin.
        tp_size: Files are cut along the shards of so many ranks; None: as many as in `source`. Any number loads.
        multiple_of: As of `VocabLayout`.
        identity: The new ordered table, kept as vocabulary.json; None: the checkpoint's table extended by unused ids,
            if the map only appends, else none.
        tokenizer: File or folder of the new tokenizer, carried along in place of the old one's files.
        verify: Whether to compare the files of `source` with their hashes first.
        dry_run: Only report: nothing is written.

    Memory:
        Three blocks (of 4 MiB at most, less for small tables), whatever the model; the map, and the ordered table.

    Raises:
        CheckpointLayoutError: `source` is damaged, or of another vocabulary than the map; `target` exists; nothing
            would move.
        VocabularyError: `init` or `identity` does not fit the map.
        NonFiniteError: New rows would be made from a row with NaN or an infinity.
    """
    source, target = Path(source), Path(target)
    stored = open_checkpoint(source)
    if target.exists():
        raise CheckpointLayoutError(f"{target} exists: name a new folder, a migration replaces nothing")
    saved = stored.state["layout"]
    require_rows(source, saved.get("vocab_size"), vocab_map)
    own = partial(stored_identity, stored)
    known = known_vocabulary(source, vocabulary_sha256(stored), own, vocab_map, identity)
    require_change(source, target, vocab_map, known)
    init.check(vocab_map)
    layout = VocabLayout(
        vocab_map.new_size, int(saved.get("tp_size", 1)) if tp_size is None else tp_size, multiple_of=multiple_of
    )
    _require_ranks(stored, layout.tp_size)
    tables = tables_of(stored, vocab_map.old_size)
    _require_floating(stored, tables, vocab_map)
    assets, notes = carried_assets(stored, vocab_map, known.identity, tokenizer)
    vocab_map = dataclasses.replace(vocab_map, old_sha256=known.old_sha256, new_sha256=known.sha256)
    report = MigrationReport(
        source, target, vocab_map, str(init), layout, tables,
        bytes=_bytes(stored, tables, vocab_map),
        without_sources=without_sources(init, vocab_map),
        notes=(*known.notes, *notes, *_notes(stored, tables)),
    )  # fmt: skip
    if dry_run:
        return report
    if verify:
        stored.verify()
    give_back()
    _write(stored, target, known, _parts(stored, tables, vocab_map, init, layout), report, assets)
    return report


def _write(
    stored: StoredCheckpoint, target: Path, known: KnownVocabulary, parts: list[dict[str, Tensor]],
    report: MigrationReport, assets: dict[str, Path | bytes],
) -> None:  # fmt: skip
    layout, tensors = report.layout, {key: part[key] for part in parts for key in part}
    state = make_state(
        stored.step,
        tensors,
        layout={"vocab_size": layout.vocab_size, "padded_size": layout.padded_size, "tp_size": layout.tp_size},
        tables=stored.state["tables"],
        ties=stored.state["ties"],
        scalars=stored.state["scalars"],
        extra={**known.extra(stored), "migrated_from": report.origin()},
    )
    if known.identity is not None:
        assets = {**assets, VOCABULARY: vocabulary_bytes(known.identity)}
    write_checkpoint(target, parts, state=state, manifest=_manifest(stored, tensors, layout, known), assets=assets)


def require_change(path: Path, target: Path, vocab_map: VocabMap, known: KnownVocabulary) -> None:
    """Raises for a map that moves nothing, unless it gives the ids other tokens."""
    renamed = None not in (known.old_sha256, known.sha256) and known.old_sha256 != known.sha256
    if vocab_map.is_identity and not renamed:
        layouts = (
            ". Padding and the number of ranks are no part of its rows: `load_checkpoint` takes any, and `python -m "
            f"vocab_parallel reshard {path} {target} --tp N` writes the files of N ranks"
        )
        raise CheckpointLayoutError(
            f"every id of {path} stays and none is new: there is nothing to migrate"
            + (layouts if is_whole(path) else "")
        )


def _require_floating(stored: StoredCheckpoint, tables: tuple[Table, ...], vocab_map: VocabMap) -> None:
    for table in tables if len(vocab_map.new_ids) else ():
        key = table.master or table.weight
        dtype = stored.tensors[key][0]
        if not dtype.is_floating_point:
            raise CheckpointLayoutError(
                f"{stored.path}: {key} is {dtype}, a quantised table: new rows are made for floating tensors. Migrate "
                "the checkpoint that it was quantised from"
            )


def _require_ranks(stored: StoredCheckpoint, tp_size: int) -> None:
    own = [key for key in stored.tensors if key.endswith(SHARDS)]
    saved = stored.state["layout"].get("tp_size")
    if own and tp_size != saved:
        raise CheckpointLayoutError(
            f"{stored.path} has values for each of its {saved} ranks ({', '.join(own[:3])}), which {tp_size} ranks "
            "cannot have: migrate it as it is, without --tp; any number of ranks loads it"
        )


def require_rows(path: Path, rows: object, vocab_map: VocabMap) -> None:
    """Raises unless the map is from as many ids as the tables of `path` have rows."""
    if rows != vocab_map.old_size:
        raise CheckpointLayoutError(
            f"the map is from {vocab_map.old_size:,} old ids, {path} has {rows} rows: it is a map from another "
            f"vocabulary. Make it from the checkpoint's own: python -m vocab_parallel migrate {path} <target> "
            "--old-vocab <the tokenizer that it was trained with> --new-vocab <the new one>"
        )


def tables_of(stored: StoredCheckpoint, rows: int) -> tuple[Table, ...]:
    """The tables of a checkpoint, each with the keys that move with it."""
    names = stored.state["tables"]
    if not names:
        raise CheckpointLayoutError(f"{stored.path} lists no table over the vocabulary: there is nothing to migrate")
    found = []
    for name in names:
        weight = f"model.{name}"
        shape = list(stored.tensors[weight][1]) if weight in stored.tensors else None
        if shape is None or not shape or shape[0] != rows:
            raise CheckpointLayoutError(
                f"{stored.path}: the table {name} of {rows} rows is {shape or 'missing'}: the checkpoint contradicts "
                "itself, use another one"
            )
        states = [key for key in stored.tensors if _moves(stored, name, key, shape)]
        master = next((key for key in states if is_master_weight(key)), None)
        found.append(Table(name, weight, master, tuple(sorted(key for key in states if key != master))))
    return tuple(found)


def _moves(stored: StoredCheckpoint, table: str, key: str, table_shape: Sequence[int]) -> bool:
    """Whether a key is a state of the table that moves with its rows; raises if that cannot be known."""
    prefix = f"optimizer.{table}."
    state, size = key.removeprefix(prefix), stored.tensors[key][1]
    if not key.startswith(prefix) or "." in state:
        return False
    by_rank = state.endswith(SHARDS)  # one value for each rank: it stays
    what = f"{stored.path}: {key}"
    return moves(what, state.removesuffix(SHARDS), size[by_rank:], table_shape) and not by_rank


def _parts(
    stored: StoredCheckpoint, tables: tuple[Table, ...], vocab_map: VocabMap, init: RowInit, layout: VocabLayout
) -> list[dict[str, Tensor]]:
    """What the files of each rank will hold; made when it is written."""
    parts = [dict[str, Tensor]() for _ in range(layout.tp_size)]
    for table in tables:
        fill = NewRows(stored, table.master or table.weight, vocab_map, init)
        for key in table.keys:
            new = fill if key in (table.weight, table.master) else None
            for rank, part in enumerate(parts):
                own = layout.range(rank)
                part[key] = moved_rows(stored, key, vocab_map, own.start, len(own), new)
    moved = {key for table in tables for key in table.keys}
    for rank, part in enumerate(parts):
        part.update(_stayed(stored, moved, rank, layout.tp_size))
    return parts


def _stayed(stored: StoredCheckpoint, moved: set[str], rank: int, tp_size: int) -> Iterator[tuple[str, Tensor]]:
    """Each tensor that does not move: an even share of its rows, read when they are written."""
    for key, (dtype, size) in stored.tensors.items():
        if key in moved:
            continue
        if math.prod(size) == 0 or not size:
            yield key, stored.read(key)  # written once, though each rank has it
            continue
        share = -(-size[0] // tp_size)
        first = min(size[0], rank * share)
        count = min(size[0] - first, share)
        yield key, Rows.made(size, dtype, first, count, partial(stored.read, key))


def _manifest(
    stored: StoredCheckpoint, tensors: Mapping[str, Tensor], layout: VocabLayout, known: KnownVocabulary
) -> Manifest | None:
    """The source's manifest for the new rows; None if the source has none."""
    if not (stored.path / MANIFEST).is_file():
        return None
    specs = {key: (value.dtype, tuple(value.shape)) for key, value in tensors.items()}
    vocabulary = vocabulary_of(layout.vocab_size, known.identity, known.sha256)
    return Manifest.read(stored.path).moved(specs, layout, step=stored.step, vocabulary=vocabulary)


def _bytes(stored: StoredCheckpoint, tables: tuple[Table, ...], vocab_map: VocabMap) -> int:
    moved = {key for table in tables for key in table.keys}
    total = 0
    for key, (dtype, size) in stored.tensors.items():
        shape = (vocab_map.new_size, *size[1:]) if key in moved else size
        total += math.prod(shape) * dtype.itemsize
    return total


def _notes(stored: StoredCheckpoint, tables: tuple[Table, ...]) -> Iterator[str]:
    """What has as many rows as the vocabulary and does not move."""
    moved = {key for table in tables for key in table.keys}
    rows = stored.tensors[tables[0].weight][1][0]
    for key, (_, size) in stored.tensors.items():
        if key.startswith("model.") and key not in moved and rows in size:
            what = "rows" if size[0] == rows else "columns"
            yield f"{key} has {rows:,} {what} too, but is listed as no table of the vocabulary: it stays as it is"
