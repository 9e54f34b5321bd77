"""A checkpoint's manifest against the files beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.files import StoredCheckpoint, check_file, open_checkpoint, read_state
from vocab_parallel.checkpoint.writing import MANIFEST, VOCABULARY
from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest, TensorSpec
from vocab_parallel.vocabulary.manifest.fields import CheckpointContract


def disagreements(folder: str | os.PathLike[str]) -> list[str]:
    """Everything in which a checkpoint's manifest and its files disagree, and every file that is not as it was saved.

    Reads every file once, for its hash; of tensors only names, dtypes and shapes. In one process.

    Returns:
        A line each, with both sides; empty: nothing.

    Raises:
        CheckpointLayoutError: It is no whole checkpoint, or was saved without a manifest.
    """
    path = Path(folder)
    files = read_state(path)["files"]
    if MANIFEST not in files:
        Manifest.read(path / MANIFEST)
    lines = [found for name in files if (found := check_file(path, name, files))]
    # What is beside the listed files was put there by somebody.
    lines += [f"{name} is not among the files that were saved" for name in (MANIFEST, VOCABULARY)
              if name not in files and (path / name).exists()]  # fmt: skip
    try:
        stored, manifest = open_checkpoint(path), Manifest.read(path / MANIFEST)
    except CheckpointLayoutError as error:
        return [*lines, str(error)]
    lines += _vocabulary(path, manifest)
    if manifest.checkpoint is None:
        return [*lines, f"{MANIFEST} says nothing of the checkpoint: its group `checkpoint` is null"]
    return [*lines, *_state(stored, manifest, manifest.checkpoint), *_tensors(stored, manifest.checkpoint)]


def _state(stored: StoredCheckpoint, manifest: Manifest, said: CheckpointContract) -> Iterator[str]:
    state = stored.state
    pairs: list[tuple[str, Any, Any]] = [("checkpoint.step", said.step, state["step"])]
    pairs += [(f"checkpoint.{name}", getattr(said, name), state["layout"].get(name))
              for name in ("padded_size", "tp_size")]  # fmt: skip
    pairs.append(("vocabulary.size", manifest.vocabulary.size, state["layout"].get("vocab_size")))
    ties = {alias: first for alias, first in state["ties"].items() if first in state["tables"]}  # no shared trunk
    pairs.append(("tying.aliases", dict(manifest.tying.aliases), ties))
    sha256 = state["extra"].get("vocabulary_sha256")
    if None not in (sha256, manifest.vocabulary.ordered_table_sha256):
        pairs.append(("vocabulary.ordered_table_sha256", manifest.vocabulary.ordered_table_sha256, sha256))
    for name, mine, its in pairs:
        if mine != its:
            yield f"{name} is {mine} in {MANIFEST}, {its} in state.json"
    head = manifest.head
    for table in (key for key in (head.embedding_key, head.head_key, head.bias_key) if key in state["tables"]):
        _, size = stored.tensors.get(f"model.{table}", (None, ()))
        if tuple(size[:1]) != (manifest.vocabulary.size,):
            yield f"model.{table} has shape {list(size)} in the files, vocabulary.size is {manifest.vocabulary.size}"


def _tensors(stored: StoredCheckpoint, said: CheckpointContract) -> Iterator[str]:
    held = {key: TensorSpec(str(dtype).removeprefix("torch."), tuple(size))
            for key, (dtype, size) in stored.tensors.items()}  # fmt: skip
    for key, spec in said.tensors.items():
        if key not in held:
            yield f"{key} is in {MANIFEST}, the files have no such tensor"
        elif held[key] != spec:
            mine, its = (f"{one.dtype} {list(one.shape)}" for one in (spec, held[key]))
            yield f"{key} is {mine} in {MANIFEST}, {its} in the files"
    for key in held:
        if key not in said.tensors:
            yield f"{key} is in the files, {MANIFEST} does not name it"


def _vocabulary(path: Path, manifest: Manifest) -> Iterator[str]:
    if not (path / VOCABULARY).is_file():
        return
    said = manifest.vocabulary
    try:
        identity = VocabIdentity.read(path / VOCABULARY)
    except (VocabularyError, OSError) as error:
        yield str(error)
        return
    pairs = [
        ("ordered_table_sha256", said.ordered_table_sha256, identity.sha256),
        ("special_ids", said.special_ids, dict(identity.special_ids)),
        ("added", said.added, identity.added),
    ]
    for name, mine, its in pairs:
        if mine is not None and mine != its:  # None: not recorded
            yield f"vocabulary.{name} is {mine} in {MANIFEST}, {its} in {VOCABULARY}"
    if identity.size > said.size:
        yield f"{VOCABULARY} has {identity.size} tokens, vocabulary.size is {said.size}"
