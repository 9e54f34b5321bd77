"""Checkpoints of ours at both ends of an exchange, and where it writes: never over what it reads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.placing import STATE, put_in_place
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.manifest import Manifest

# A folder with one of these is a checkpoint, and may be replaced by one.
_KNOWN = (STATE, "config.json", "model.safetensors", "model.safetensors.index.json", "metadata.json")


def require_free(target: Path, source: Path, *, overwrite: bool = False) -> None:
    """Checks that a name may be written, before anything is.

    Raises:
        CheckpointLayoutError: Something is there; with `overwrite`: something that is no checkpoint, or `source`.
    """
    if not target.exists() and not target.is_symlink():
        return
    if not overwrite:
        raise CheckpointLayoutError(f"{target} exists: give another name, or --overwrite to replace it")
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise CheckpointLayoutError(f"{target} holds {source}, which is read: give another name, nothing is replaced")
    if target.is_symlink() or not target.is_dir():
        raise CheckpointLayoutError(f"{target} is no folder: give another name, or remove it by hand")
    if any(target.iterdir()) and not any((target / name).is_file() for name in _KNOWN):
        held = ", ".join(sorted(one.name for one in target.iterdir())[:6])
        raise CheckpointLayoutError(f"{target} is no checkpoint (it holds {held}): give another name, or remove it")


def open_ours(checkpoint: str | os.PathLike[str], *, verify: bool = True) -> StoredCheckpoint:
    """A checkpoint to give away.

    Raises:
        CheckpointLayoutError: It is not whole, its tables or ties are not what its state says, or (with `verify`) its
            files are not those that were saved.
    """
    stored = open_checkpoint(checkpoint)
    rows, where = stored.state["layout"]["vocab_size"], f"{stored.path / STATE} is damaged"
    for name in stored.state["tables"]:
        shape = list(stored.tensors[f"model.{name}"][1]) if f"model.{name}" in stored.tensors else "none"
        if shape[:1] != [rows]:
            raise CheckpointLayoutError(f"{where}: the table {name} is to have {rows:,} rows, there is {shape}")
    for alias, name in stored.state["ties"].items():
        if f"model.{name}" not in stored.tensors or f"model.{alias}" in stored.tensors:
            why = "which is a tensor of its own" if f"model.{alias}" in stored.tensors else "which is not there"
            raise CheckpointLayoutError(f"{where}: it ties {alias} to {name}, {why}")
    if verify:
        stored.verify()
    return stored


def write_ours(
    target: Path,
    parts: Sequence[Mapping[str, Tensor]],
    layout: VocabLayout,
    *,
    step: int,
    tables: Sequence[str],
    ties: Mapping[str, str],
    extra: Mapping[str, Any],
    scalars: Mapping[str, float] | None = None,
    assets: Mapping[str, Path | bytes] | None = None,
    **described: Any,
) -> dict[str, Tensor]:
    """Writes a checkpoint of ours with the manifest that its tensors give.

    Args:
        parts, assets: As of `write_checkpoint`.
        step, tables, ties, extra, scalars: As of `make_state`.
        described: What a manifest's `of_tensors` takes besides: identity, host, fields of the head.

    Returns:
        All tensors by key.
    """
    tensors = {key: value for part in parts for key, value in part.items()}
    sizes = {"vocab_size": layout.vocab_size, "padded_size": layout.padded_size, "tp_size": layout.tp_size}
    state = make_state(step, tensors, layout=sizes, tables=tables, ties=ties, scalars=scalars, extra=extra)
    shapes = {key: (value.dtype, value.shape) for key, value in tensors.items()}
    manifest = Manifest.of_tensors(shapes, tables=tables, ties=ties, layout=layout, step=step, **described)
    write_checkpoint(target, parts, state=state, manifest=manifest, assets=assets)
    return tensors


def publish(aside: Path, target: Path) -> None:
    """Gives a whole folder its name; one of that name goes only after."""
    put_in_place(aside, target, state=next(name for name in _KNOWN if (aside / name).is_file()))
