"""What lies beside the tensors of a Hugging Face directory: configuration, tokenizer, ordered vocabulary."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from vocab_parallel.checkpoint.exchange.hugging_face_names import CONFIG, ModelConfig
from vocab_parallel.checkpoint.files import StoredCheckpoint
from vocab_parallel.checkpoint.metadata import leads_out
from vocab_parallel.checkpoint.migration.assets import is_tokenizer_file
from vocab_parallel.checkpoint.writing import ASSETS, VOCABULARY, dtype_name
from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.formats import find_file, read_vocabulary
from vocab_parallel.vocabulary.identity import VocabIdentity

_MADE_NEW = (".safetensors", ".safetensors.index.json", VOCABULARY)
_BESIDE = (CONFIG, "generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE")


def assets_of(source: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Files of a directory to carry along, by their names in a checkpoint; and a note of those that are not."""
    found: dict[str, Path | bytes] = {}
    left = []
    for path in sorted(source.iterdir()):
        if path.is_file() and _goes_along(path.name) and _is_of(source, path):
            found[f"{ASSETS}/{path.name}"] = path
        elif not path.name.startswith(".") and not path.name.endswith(_MADE_NEW):
            left.append(path.name)
    return found, [f"not carried along: {', '.join(left[:8])}"] if left else []


def identity_of(source: Path, real: int, notes: list[str]) -> VocabIdentity | None:
    """The ordered table of the directory's tokenizer, for so many rows; without one, a note says why."""
    try:
        find_file(source)
    except VocabularyError:
        notes.append("no tokenizer: no load can tell whether one given later is the right one")
        return None
    try:
        return read_vocabulary(source, size=real)
    except VocabularyError as error:
        notes.append(f"no ordered table from its tokenizer: {error}")
        return None


def files_beside(
    stored: StoredCheckpoint, config: str | os.PathLike[str] | None, vocab_size: int, dtype: torch.dtype | None,
    notes: list[str],
) -> dict[str, Path | bytes]:  # fmt: skip
    """The files beside the tensors, by name, with a corrected configuration."""
    listed = [name.removeprefix(f"{ASSETS}/") for name in stored.state["files"] if name.startswith(f"{ASSETS}/")]
    found: dict[str, Path | bytes] = {name: stored.path / ASSETS / name for name in listed if _goes_along(name)}
    if VOCABULARY in stored.state["files"] and not any(is_tokenizer_file(name) for name in found):
        found[VOCABULARY] = stored.path / VOCABULARY
    path = found.get(CONFIG)
    if config is not None:
        path = Path(config) / CONFIG if Path(config).is_dir() else Path(config)
    if not isinstance(path, Path):
        notes.append(f"the checkpoint came without {CONFIG}: only tensors are written; --config gives one")
        return found
    weights = [name for name in stored.state["tables"] if len(stored.tensors[f"model.{name}"][1]) > 1]
    shared = any(first in weights for first in stored.state["ties"].values())
    tied = False if len(weights) > 1 else True if shared else None  # None: it has no head to tie
    said = ModelConfig.read(path)
    said.require_plain(dtype)
    values, changes = said.corrected(
        vocab_size=vocab_size, tied=tied, dtype=None if dtype is None else dtype_name(dtype)
    )
    as_written = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()  # as Transformers writes them
    found[CONFIG] = as_written if changes else path
    notes.extend(f"{CONFIG}: {change}" for change in changes)
    return found


def _is_of(folder: Path, path: Path) -> bool:
    """Whether a file, or what it links to, lies in its folder, or in the cache of the Hub, which is made of links."""
    cache = folder.resolve().parent.parent / "blobs"
    return not leads_out(folder, path.name) or path.resolve().is_relative_to(cache)


def _goes_along(name: str) -> bool:
    """Whether a file beside a model's tensors is carried along; a name with a path never is."""
    return Path(name).name == name and (name in _BESIDE or is_tokenizer_file(name))
