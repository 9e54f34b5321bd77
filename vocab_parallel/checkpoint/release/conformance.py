"""What a released checkpoint computes: raw logits on fixed hidden rows, and hashes of its rows."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

from torch import Tensor

from vocab_parallel.checkpoint.files import StoredCheckpoint
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.migration.records import (
    HIDDEN_ROWS,
    RowReader,
    TableRecord,
    fixed_hidden,
    record_table,
)


def conformance_record(stored: StoredCheckpoint, manifest: Manifest) -> dict[str, Any]:
    """The record of a checkpoint: JSON, the same bits on every machine, as `conformance.exact_scores` is.

    Returns:
        ``rows_sha256``: of the row hashes of each table, by key; ``head``: the key of the weight that gives logits, or
        null; ``logits_sha256``: of its float64 logits ``[vocab_size, hidden_rows]``, bias added, before any cap or
        scale; ``best``: id and logit of the largest of each hidden row; ``probes``: logits of some ids.

    Memory:
        One block, and 40 bytes a row of the vocabulary.

    Raises:
        CheckpointLayoutError: A table with NaN or an infinity, naming the id.
    """
    head, bias = _head(stored, manifest)
    keys = [f"model.{name}" for name in stored.state["tables"]]
    made: dict[str, Any] = {
        "hidden_rows": HIDDEN_ROWS, "head": head, "bias": bias, "rows_sha256": {}, "logits_sha256": None, "best": [],
        "probes": {},
    }  # fmt: skip
    for key in keys:
        size, *rest = stored.tensors[key][1]
        hidden = fixed_hidden(rest[0]) if key == head else None
        with_bias = _reader(stored, bias) if key == head and bias is not None else None
        found = record_table(key, _reader(stored, key), 0, size, hidden=hidden, bias=with_bias)
        made["rows_sha256"][key] = _sha256(found.hashes)
        if found.logits is not None:
            made |= _scored(found, {0, size - 1, *(manifest.vocabulary.special_ids or {}).values()})
    return made


def record_differences(saved: Any, now: dict[str, Any]) -> list[str]:
    """In words: where the record of a bundle is not what its checkpoint gives now."""
    saved = saved if isinstance(saved, dict) else {}
    return [
        f"conformance: {key} was {saved.get(key)!s:.60} when promoted, is {now.get(key)!s:.60}"
        for key in [*now, *(key for key in saved if key not in now)]
        if saved.get(key) != now.get(key)
    ]


def _scored(found: TableRecord, probes: set[int]) -> dict[str, Any]:
    assert found.logits is not None
    values, ids = found.logits.max(0)
    return {
        "logits_sha256": _sha256(found.logits),
        "best": [[token_id, value] for token_id, value in zip(ids.tolist(), values.tolist(), strict=True)],
        "probes": {str(token_id): found.logits[token_id].tolist() for token_id in sorted(probes)},
    }


def _reader(stored: StoredCheckpoint, key: str) -> RowReader:
    """Rows of a table; what is not finite is refused."""

    def read(start: int, stop: int) -> Tensor:
        rows = stored.read(key, start, stop)
        bad = ~rows.double().isfinite().flatten(1).all(1) if rows.dim() > 1 else ~rows.double().isfinite()
        if bool(bad.any()):
            token_id = start + int(bad.nonzero()[0, 0])
            raise CheckpointLayoutError(f"row {token_id} of {key} holds NaN or an infinity: release another checkpoint")
        return rows

    return read


def _head(stored: StoredCheckpoint, manifest: Manifest) -> tuple[str | None, str | None]:
    """Keys of the weight that gives logits and of its bias, by the names that the files have."""
    ties = stored.state["ties"]
    names = (manifest.head.head_key, manifest.head.bias_key)
    head, bias = (None if name is None else f"model.{ties.get(name, name)}" for name in names)
    for key, dims in ((head, 2), (bias, 1)):
        if key is None:
            continue
        shape = list(stored.tensors[key][1]) if key in stored.tensors else []
        is_table = key.removeprefix("model.") in stored.state["tables"]
        if not is_table or len(shape) != dims or shape[0] != manifest.vocabulary.size:
            raise CheckpointLayoutError(
                f"the manifest's head needs {key} as a table of {manifest.vocabulary.size} rows; the checkpoint has "
                f"{f'it with shape {shape}' if shape else 'none'}, its tables are {stored.state['tables']}"
            )
    return head, bias


def _sha256(values: Tensor) -> str:
    values = values.contiguous()  # not by way of numpy, which this package does without
    return hashlib.sha256(ctypes.string_at(values.data_ptr(), values.nbytes)).hexdigest()
