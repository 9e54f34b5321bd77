"""Megatron-core's distributed checkpoints (`torch_dist`) to ours, without Megatron."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vocab_parallel.checkpoint.exchange.megatron_files import (
    COMMON,
    FOLDER,
    HEAD,
    OBJECTS,
    ORIGIN,
    VOCABULARY,
    carried,
    find_distributed,
    is_table,
    iteration_of,
    optimizer_step,
    our_keys,
    owner_of,
    place_of,
    read_objects,
)
from vocab_parallel.checkpoint.exchange.megatron_writing import to_megatron
from vocab_parallel.checkpoint.exchange.opaque import load_plain
from vocab_parallel.checkpoint.exchange.targets import require_free, write_ours
from vocab_parallel.checkpoint.files import StoredTensors
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout

__all__ = ["from_megatron", "to_megatron"]


def from_megatron(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    vocab_size: int | None,
    tp_size: int = 1,
    tied: bool | None = None,
    rename: Mapping[str, str] | None = None,
    optimizer: bool = True,
    multiple_of: int = 128,
) -> Path:
    """Makes a checkpoint of ours from one of Megatron-core's `dist_checkpointing`.

    Embedding, head and head bias keep their real rows, with optimizer state that is stored by parameter (`exp_avg`,
    `exp_avg_sq`, momentum; `fp32_param` and `param` are master weights). All else keeps its name; objects (common.pt,
    extra states, random states) go along as bytes that are not unpickled.

    Args:
        source: The folder with metadata.json, or a save folder with latest_checkpointed_iteration.txt.
        target: The checkpoint to write, such as ``run/step-00000042``.
        vocab_size: Real rows; Megatron stores the padded table and not its real size.
        tp_size: Files are cut along the shards of so many ranks.
        tied: Whether you expect one weight for both uses; None takes what is there (no `output_layer.weight`: tied).
        rename: Names of parameters there to names here, where they differ.
        optimizer: Whether to convert the optimizer's state too.
        multiple_of: As of `VocabLayout`.

    Returns:
        `target`.

    Memory:
        Two blocks of 4 MiB, and the objects' bytes.

    Raises:
        CheckpointLayoutError: No distributed checkpoint or a damaged one; `vocab_size` is missing or above the table's
            rows; not tied as expected; optimizer state that is not by parameter; `target` exists.
    """
    source, target = Path(source), Path(target)
    require_free(target, source)
    stored = StoredTensors(find_distributed(source))
    common = load_plain(stored.path / COMMON)
    names = our_keys(stored, rename or {}, optimizer)
    tables, ties = _tables(stored, names, rename or {}, tied)
    padded = _padded_rows(stored, names, tables, vocab_size, target)
    assert vocab_size is not None
    layout = VocabLayout(vocab_size, tp_size, multiple_of=multiple_of)
    parts = _parts(stored, names, tables, layout)
    parts[0].update(_steps(names, optimizer_step(common)))
    objects, index = read_objects(stored, optimizer)
    write_ours(
        target, parts, layout, step=iteration_of(common, stored.path), tables=tables, ties=ties,
        extra={ORIGIN: {"padded_size": padded, "keys": names, "objects": index}},
        assets={f"{FOLDER}/{COMMON}": stored.path / COMMON, f"{FOLDER}/{OBJECTS}": objects}, host=ORIGIN,
    )  # fmt: skip
    return target


def _parts(
    stored: StoredTensors, names: Mapping[str, str], tables: list[str], layout: VocabLayout
) -> list[dict[str, Tensor]]:
    """What the files of each rank hold: its rows of the tables and their states; the first all else."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(layout.tp_size)]
    for ours, theirs in names.items():
        dtype, size = stored.tensors[theirs]
        if owner_of(ours) not in tables:
            parts[0][ours] = carried(stored, theirs)
            continue
        for rank, part in enumerate(parts):
            mine, rows = layout.range(rank), (layout.vocab_size, *size[1:])
            part[ours] = Rows.made(rows, dtype, mine.start, len(mine), partial(stored.read, theirs))
    return parts


def _tables(
    stored: StoredTensors, names: Mapping[str, str], rename: Mapping[str, str], tied: bool | None
) -> tuple[list[str], dict[str, str]]:
    """Our names of the parameters over the vocabulary, and of the tie."""
    found = {theirs: ours for ours, theirs in names.items() if ours.startswith("model.") and is_table(theirs)}
    found = {name: found[name] for name in sorted(found, key=place_of)}
    embedding = next((name for name in found if name.endswith(VOCABULARY[0])), None)
    head = next((name for name in found if name.endswith(HEAD)), None)
    if embedding is None and head is None:
        raise CheckpointLayoutError(
            f"{stored.path} has no {VOCABULARY[0]} and no {HEAD}: it is no language model of Megatron-core. It holds "
            f"{', '.join(sorted(stored.tensors)[:6])} ..."
        )
    if tied is not None and tied != (head is None):
        here = f"has no {HEAD}: it is tied to {embedding}" if head is None else f"has {head} beside {embedding}: untied"
        raise CheckpointLayoutError(
            f"{stored.path} {here}; you asked for {'tied' if tied else 'untied'}. Convert it as it is (tied=None), and "
            'load it with load_checkpoint(..., tie="untie") into an untied model'
        )
    tables = [ours.removeprefix("model.") for ours in found.values()]
    if head is not None or embedding is None:
        return tables, {}
    alias = embedding.removesuffix(VOCABULARY[0]) + HEAD
    return tables, {rename.get(alias, alias): found[embedding].removeprefix("model.")}


def _padded_rows(
    stored: StoredTensors, names: Mapping[str, str], tables: list[str], vocab_size: int | None, target: Path
) -> int:
    shapes = {theirs: stored.tensors[theirs][1] for ours, theirs in names.items() if owner_of(ours) in tables}
    sizes = {name: shape[0] if shape else 0 for name, shape in shapes.items()}
    padded = next(iter(sizes.values()))
    if len(set(sizes.values())) > 1:
        raise CheckpointLayoutError(f"{stored.path} has tables of different sizes: {sizes}")
    if vocab_size is None or not 1 <= vocab_size <= padded:
        raise CheckpointLayoutError(
            f"{stored.path} has {padded} rows with padding ({next(iter(sizes))}), "
            + ("and does not say how many are real" if vocab_size is None else f"not the {vocab_size} asked for")
            + f": python -m vocab_parallel convert {stored.path} {target} --vocab-size <ids of the tokenizer>"
        )
    return padded


def _steps(names: Mapping[str, str], step: float | None) -> dict[str, Tensor]:
    """The optimizer's count of steps for each parameter that has state, as torch's optimizers keep it."""
    owners = {owner_of(key) for key in names if key.startswith("optimizer.")}
    return {} if step is None else {f"optimizer.{name}.step": torch.tensor(step) for name in sorted(owners)}
