"""Whether a migrated checkpoint kept what it must: read from its files, compared with those that it was made from."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial

import torch

from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.migration.migrating import tables_of
from vocab_parallel.checkpoint.migration.report import Table
from vocab_parallel.checkpoint.migration.rows import READ_BYTES, bits
from vocab_parallel.checkpoint.trimming import give_back
from vocab_parallel.checkpoint.writing import MANIFEST
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.conformance import (
    Check,
    ConformanceReport,
    NewMass,
    compare_records,
)
from vocab_parallel.vocabulary.migration.records import (
    RowReader,
    TableBlocks,
    fixed_hidden,
    record_blocks,
    record_table,
)


def check_migration(
    source: str | os.PathLike[str], target: str | os.PathLike[str], vocab_map: VocabMap
) -> ConformanceReport:
    """Compares a migrated checkpoint with the one it was made from.

    Kept rows of every table and row-shaped state have the same bits; new rows of moments are zero; kept ids have the
    same raw logits on fixed hidden rows; what has no vocabulary stayed; a tied weight has one key, each optimizer
    state one owner; each table's files cover its real rows once, and the manifest names these shards.

    Memory:
        Blocks of 1 MiB, and for one table at a time about 50 bytes a token.

    Raises:
        CheckpointLayoutError: One of the two cannot be read.
    """
    old, new = open_checkpoint(source), open_checkpoint(target)
    give_back()
    tables = tables_of(old, vocab_map.old_size)
    head, bias = _head_of(old, tables)
    checks: list[Check] = []
    masses: dict[str, NewMass] = {}
    for table in tables:
        for key in table.keys:
            report = _compare(old, new, key, vocab_map, is_head=key == head, bias=bias, zero=key in table.states)
            checks.extend(report.checks)
            masses.update(report.masses)
    moved = {key for table in tables for key in table.keys}
    checks += [_stayed(old, new, moved), _aliases(old, new), _owners(old, new), _steps(old, new)]
    checks += [_ranges(new, moved, vocab_map.new_size)]
    return ConformanceReport(tuple(checks), masses)


def _compare(
    old: StoredCheckpoint,
    new: StoredCheckpoint,
    key: str,
    vocab_map: VocabMap,
    *,
    is_head: bool,
    bias: str | None,
    zero: bool,
) -> ConformanceReport:
    """One key; of a head with its logits."""
    if key not in new.tensors or new.tensors[key][1][:1] != (vocab_map.new_size,):
        shape = list(new.tensors[key][1]) if key in new.tensors else "missing"
        check = Check(f"rows of {key}", False, f"{shape} in {new.path}, expected {vocab_map.new_size} rows")
        return ConformanceReport((check,))
    hidden = fixed_hidden(old.tensors[key][1][1]) if is_head else None
    bias_of = (lambda one: _reader(one, bias)) if bias else (lambda one: None)
    after = record_table(key, _reader(new, key), 0, vocab_map.new_size, hidden=hidden, bias=bias_of(new))
    give_back()
    dtype, (size, *row_shape) = old.tensors[key]
    read = partial(record_blocks, _reader(old, key), 0, size, row_shape, hidden=hidden, bias=bias_of(old))
    before = TableBlocks(str(dtype).removeprefix("torch."), tuple(row_shape), size, read)
    return compare_records({key: before}, {key: after}, vocab_map, zero=[key] if zero else [])


def _reader(stored: StoredCheckpoint, key: str) -> RowReader:
    return lambda start, stop: stored.read(key, start, stop)


def _head_of(old: StoredCheckpoint, tables: Sequence[Table]) -> tuple[str | None, str | None]:
    """The keys of the output head's weight and of its bias, as the manifest names them, else by their shapes."""
    wide = [table.weight for table in tables if len(old.tensors[table.weight][1]) == 2]
    narrow = [table.weight for table in tables if len(old.tensors[table.weight][1]) == 1]
    head, bias = next(reversed(wide), None), next(iter(narrow), None)
    if (old.path / MANIFEST).is_file():
        said = Manifest.read(old.path).head
        named = said.head_key and f"model.{old.state['ties'].get(said.head_key, said.head_key)}"
        head = named if named in wide else head if named else None
        bias = f"model.{said.bias_key}" if f"model.{said.bias_key}" in narrow else bias
    return head, bias


def _stayed(old: StoredCheckpoint, new: StoredCheckpoint, moved: set[str]) -> Check:
    """Tensors without a vocabulary have the same bits."""
    keys = [key for key in old.tensors if key not in moved]
    wrong = [key for key in keys if old.tensors[key] != new.tensors.get(key) or not _same(old, new, key)]
    extra = sorted(set(new.tensors) - set(old.tensors))
    if wrong or extra:
        return Check("other tensors", False, f"changed or lost: {wrong[:4]}; not there before: {extra[:4]}")
    return Check("other tensors", True, f"{len(keys)} without a vocabulary have the same bits")


def _same(old: StoredCheckpoint, new: StoredCheckpoint, key: str) -> bool:
    dtype, size = old.tensors[key]
    if not size or math.prod(size) == 0:
        return torch.equal(bits(old.read(key)), bits(new.read(key)))
    step = max(1, READ_BYTES // max(1, math.prod(size[1:]) * dtype.itemsize))
    blocks = ((at, min(at + step, size[0])) for at in range(0, size[0], step))
    return all(torch.equal(bits(old.read(key, a, b)), bits(new.read(key, a, b))) for a, b in blocks)


def _aliases(old: StoredCheckpoint, new: StoredCheckpoint) -> Check:
    """A tied weight has one key."""
    ties = old.state["ties"]
    if new.state["ties"] != ties:
        return Check("aliases", False, f"{ties} became {new.state['ties']}")
    twice = [alias for alias in ties if any(alias in _owner(key) for key in new.tensors)]
    lost = [first for first in ties.values() if f"model.{first}" not in new.tensors]
    if twice or lost:
        return Check("aliases", False, f"with a key of their own: {twice}; without their weight: {lost}")
    each = ", ".join(f"{alias} is {first}" for alias, first in ties.items())
    return Check("aliases", True, f"one key each: {each}" if ties else "no weight is tied")


def _owners(old: StoredCheckpoint, new: StoredCheckpoint) -> Check:
    """Every value of the optimizer belongs to one parameter, and none was lost."""
    states = [key for key in (*new.tensors, *new.state["scalars"]) if key.startswith("optimizer.")]
    alone = [key for key in states if not any(f"model.{name}" in new.tensors for name in _owner(key))]
    before = {key for key in (*old.tensors, *old.state["scalars"]) if key.startswith("optimizer.")}
    lost = sorted(before - set(states))
    if alone or lost:
        return Check("optimizer ownership", False, f"of no parameter: {alone[:4]}; lost: {lost[:4]}")
    owners = {name for key in states for name in _owner(key) if f"model.{name}" in new.tensors}
    return Check("optimizer ownership", True, f"{len(states)} values of {len(owners)} parameters, each of one")


def _owner(key: str) -> list[str]:
    """The names of parameters that a key can belong to: `model.<name>` or `optimizer.<name>.<state>`."""
    kind, _, rest = key.partition(".")
    return [rest] if kind == "model" else [rest.rpartition(".")[0]]


def _steps(old: StoredCheckpoint, new: StoredCheckpoint) -> Check:
    same = old.step == new.step and old.state["scalars"] == new.state["scalars"]
    return Check("steps", same, f"step {old.step} became {new.step}; {len(old.state['scalars'])} scalars")


def _ranges(new: StoredCheckpoint, moved: set[str], size: int) -> Check:
    """The blocks of each table cover its real rows once, and the manifest tells the shards so."""
    for key in sorted(moved & set(new.tensors)):
        at = 0
        for piece in new.pieces[key]:
            if piece.offsets[0] != at:
                return Check("shard ranges", False, f"{key}: a block begins at row {piece.offsets[0]}, expected {at}")
            at += piece.sizes[0]
        if at != size:
            return Check("shard ranges", False, f"{key}: its blocks have {at} rows, expected {size}")
    rows, ranks = (new.state["layout"].get(name) for name in ("vocab_size", "tp_size"))
    text = f"[0, {size}) once, for {ranks} ranks"
    if (new.path / MANIFEST).is_file():
        try:
            checkpoint = Manifest.read(new.path).checkpoint
        except CheckpointLayoutError as error:
            return Check("shard ranges", False, str(error))
        if checkpoint is not None:
            text = ", ".join(f"[{start}, {stop})" for start, stop in checkpoint.shard_ranges)
    return Check("shard ranges", rows == size, f"{text}; {rows} real rows")
