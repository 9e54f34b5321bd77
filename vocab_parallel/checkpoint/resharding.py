"""A checkpoint rewritten along the shards of another number of ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from torch import Tensor

from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.placing import METADATA, STATE
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.states import SHARDS
from vocab_parallel.checkpoint.writing import MANIFEST, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.manifest import Manifest


def reshard_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], tp_size: int, *, multiple_of: int = 128
) -> Path:
    """Writes `source` again with a file for each of `tp_size` ranks, which holds that rank's rows.

    Loading never needs it, as `load_checkpoint` takes any number of ranks. It is for storage that each rank reads one
    file of, and makes the layout that the checkpoint records that of the job to come.

    Args:
        target: The new checkpoint's folder; must not exist.
        multiple_of: Of the target's layout, as in `VocabLayout`.

    Returns:
        `target`.

    Memory:
        One block of `rows.BLOCK_BYTES`, twice.

    Raises:
        CheckpointLayoutError: The source is damaged; the target exists; or the source has values for each of its ranks
            (``@shards``), which have no meaning at another number.
        LayoutError: No such layout.
    """
    final = Path(target)
    if final.exists():
        raise CheckpointLayoutError(f"{final} exists: expected a new folder. Remove it, or give another name")
    stored = open_checkpoint(source)
    stored.verify()
    layout = VocabLayout(stored.state["layout"]["vocab_size"], tp_size, multiple_of=multiple_of)
    shape = {"vocab_size": layout.vocab_size, "padded_size": layout.padded_size, "tp_size": layout.tp_size}
    own = [key for key in stored.tensors if key.endswith(SHARDS)]
    if own and shape != stored.state["layout"]:
        raise CheckpointLayoutError(
            f"{stored.path} has values for each of its {stored.state['layout']['tp_size']} ranks "
            f"({', '.join(own[:3])}), which other shards do not have. Load it at the number of ranks that you want: "
            "load_checkpoint means them, with a warning; then save"
        )
    parts: list[dict[str, Tensor]] = [_part(stored, layout, rank) for rank in range(tp_size)]
    anew = {METADATA, MANIFEST, STATE, *(piece.file for pieces in stored.pieces.values() for piece in pieces)}
    files = {name: stored.path / name for name in stored.state["files"] if name not in anew}
    manifest = Manifest.read(stored.path) if MANIFEST in stored.state["files"] else None
    if manifest is not None:
        manifest = manifest.moved(stored.tensors, layout, step=stored.step)
    state = {**stored.state, "layout": shape}
    return write_checkpoint(final, parts, state=state, manifest=manifest, assets=files)


def _part(stored: StoredCheckpoint, layout: VocabLayout, rank: int) -> dict[str, Tensor]:
    """One rank's rows of the tables; of other tensors an even share of the rows, what has none on the first rank."""
    part: dict[str, Tensor] = {}
    for key, (dtype, size) in stored.tensors.items():
        if not size or key.endswith(SHARDS):
            if rank == 0:
                part[key] = stored.read(key)
            continue
        rows = layout.range(rank) if _is_table(stored, key, size[0]) else _share(size[0], rank, layout.tp_size)
        part[key] = Rows.made(size, dtype, rows.start, len(rows), partial(stored.read, key))
    return part


def _is_table(stored: StoredCheckpoint, key: str, rows: int) -> bool:
    """Whether a tensor is over the vocabulary: a table, or a state of its rows."""
    owners = tuple(f"{prefix}.{name}." for prefix in ("model", "optimizer") for name in stored.state["tables"])
    return f"{key}.".startswith(owners) and rows == stored.state["layout"]["vocab_size"]


def _share(rows: int, rank: int, tp_size: int) -> range:
    each = -(-rows // tp_size)
    return range(min(rows, rank * each), min(rows, (rank + 1) * each))
