"""What lies beside the tensors of a migrated checkpoint: its ordered table, its tokenizer, ids in configurations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.files import StoredCheckpoint
from vocab_parallel.checkpoint.metadata import inside
from vocab_parallel.checkpoint.writing import ASSETS, MANIFEST
from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.files import parse_json, read_bytes
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap

VOCABULARY = "vocabulary.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model", "*.tiktoken", "tekken.json",
    "chat_template.*",
)  # fmt: skip
_WITH_IDS = ("config.json", "generation_config.json")
_ID_ENDS = ("_token_id", "_token_ids", "_token_index", "suppress_tokens")


@dataclass(frozen=True)
class KnownVocabulary:
    """What is known of the two vocabularies.

    Attributes:
        identity: The new one.
        sha256: Hash of its ordered table.
        old_sha256: Of the old one's.
        notes: What a user should know of it.
    """

    identity: VocabIdentity | None
    sha256: str | None
    old_sha256: str | None
    notes: tuple[str, ...]

    def extra(self, stored: StoredCheckpoint) -> dict[str, Any]:
        """The free values of the old checkpoint, for the new one."""
        kept = {key: value for key, value in stored.state["extra"].items() if not key.startswith("vocabulary")}
        return kept if self.sha256 is None else {**kept, "vocabulary_sha256": self.sha256}


def known_vocabulary(stored: StoredCheckpoint, vocab_map: VocabMap, identity: VocabIdentity | None) -> KnownVocabulary:
    """Compares the map with the checkpoint's vocabulary and with the new one.

    Raises:
        CheckpointLayoutError: The map begins at another vocabulary than the checkpoint's.
        VocabularyError: It ends at another one than `identity`.
    """
    old = vocabulary_sha256(stored)
    from_sha256 = old or vocab_map.old_sha256
    if old is not None and vocab_map.old_sha256 is not None and old != vocab_map.old_sha256:
        raise CheckpointLayoutError(
            f"{stored.path} has the vocabulary sha256 {old[:16]}…, the map is from sha256 "
            f"{vocab_map.old_sha256[:16]}…: its ids are other tokens. Make the map from the checkpoint's own "
            f"vocabulary: python -m vocab_parallel migrate {stored.path} <target> --old-vocab <its tokenizer> "
            "--new-vocab <the new one>"
        )
    notes: list[str] = []
    if vocab_map.old_sha256 is None and old is not None:
        notes.append(f"the map names no vocabulary: its old ids are taken for the checkpoint's, sha256 {old[:16]}…")
    if identity is None and vocab_map.new_sha256 is None and _only_appends(vocab_map):
        identity = _stored_identity(stored, vocab_map)
    if identity is not None:
        if identity.size != vocab_map.new_size or vocab_map.new_sha256 not in (None, identity.sha256):
            raise VocabularyError(
                f"the map ends at {vocab_map.new_size:,} ids (sha256 {vocab_map.new_sha256}), the new vocabulary "
                f"({identity.source}) has {identity.size:,} (sha256 {identity.sha256}): they are not of one vocabulary"
            )
        return KnownVocabulary(identity, identity.sha256, from_sha256, tuple(notes))
    if vocab_map.new_sha256 is None:
        notes.append("the new vocabulary is not known: no load can tell whether a tokenizer is the right one")
    return KnownVocabulary(None, vocab_map.new_sha256, from_sha256, tuple(notes))


def vocabulary_sha256(stored: StoredCheckpoint) -> str | None:
    """The hash of a checkpoint's ordered table; None if it has none.

    Raises:
        CheckpointLayoutError: Its own files disagree.
    """
    found = {}
    if (stored.path / MANIFEST).is_file():
        found[MANIFEST] = Manifest.read(stored.path).vocabulary.ordered_table_sha256
    said = stored.state["extra"].get("vocabulary_sha256")
    found["state.json"] = said if isinstance(said, str) else None
    known = {name: sha256 for name, sha256 in found.items() if sha256 is not None}
    if len(set(known.values())) > 1:
        each = " and ".join(f"{name} sha256 {sha256[:16]}…" for name, sha256 in known.items())
        raise CheckpointLayoutError(f"{stored.path} says two vocabularies: {each}. Use another checkpoint")
    if not known and (stored.path / VOCABULARY).is_file():
        return VocabIdentity.read(stored.path / VOCABULARY).sha256
    return next(iter(known.values()), None)


def vocabulary_bytes(identity: VocabIdentity) -> bytes:
    """What `VocabIdentity.write` writes."""
    return json.dumps(identity.to_json(), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def carried_assets(
    stored: StoredCheckpoint,
    vocab_map: VocabMap,
    identity: VocabIdentity | None,
    tokenizer: str | os.PathLike[str] | None,
) -> tuple[dict[str, Path | bytes], list[str]]:
    """The files beside the new tensors, by name, and what a user should know of them.

    Files of the old tokenizer are left out: beside the new rows they would give every id another token's name. They
    stay where the map only appends rows without tokens. Ids and sizes in configurations are corrected.

    Raises:
        CheckpointLayoutError: A name leads out of the checkpoint's folder.
        VocabularyError: A configuration is no JSON.
    """
    keeps_ids = tokenizer is None and vocab_map.new_sha256 is None and _only_appends(vocab_map)
    assets: dict[str, Path | bytes] = {}
    notes: list[str] = []
    dropped: list[str] = []
    for name in sorted(stored.state["files"]):
        if not name.startswith(f"{ASSETS}/"):
            continue
        if not inside(stored.path, name):
            raise CheckpointLayoutError(f"{stored.path}: {name} is no name of a file in it: the checkpoint is damaged")
        file = name.removeprefix(f"{ASSETS}/")
        if is_tokenizer_file(file) and not keeps_ids:
            dropped.append(file)
        elif file in _WITH_IDS:
            assets[name], changes = _corrected(stored.path / name, vocab_map, identity)
            notes.extend(f"{file}: {change}" for change in changes)
        else:
            assets[name] = stored.path / name
    new = {f"{ASSETS}/{path.name}": path for path in _tokenizer_files(tokenizer)}
    if dropped:
        after = "the new tokenizer's are carried instead" if new else "the new tokenizer's must be put beside it"
        notes.append(f"files of the old tokenizer are left out ({', '.join(dropped)}): {after}")
    return {**assets, **new}, notes


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of a model's directory belongs to its tokenizer."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def _tokenizer_files(tokenizer: str | os.PathLike[str] | None) -> Iterator[Path]:
    if tokenizer is None:
        return
    path = Path(tokenizer)
    if path.is_dir():
        yield from sorted(one for one in path.iterdir() if one.is_file() and is_tokenizer_file(one.name))
    else:
        yield path


def _only_appends(vocab_map: VocabMap) -> bool:
    old, new = vocab_map.pairs()
    return len(old) == vocab_map.old_size and bool((old == new).all())


def _stored_identity(stored: StoredCheckpoint, vocab_map: VocabMap) -> VocabIdentity | None:
    """The checkpoint's own table, with unused ids for what is appended."""
    if not (stored.path / VOCABULARY).is_file():
        return None
    return VocabIdentity.read(stored.path / VOCABULARY).resized(vocab_map.new_size)


def _corrected(path: Path, vocab_map: VocabMap, identity: VocabIdentity | None) -> tuple[bytes, list[str]]:
    """A configuration with the new size and ids."""
    changes: list[str] = []
    moved = {} if identity is None else dict(identity.special_ids)
    value = _walk(parse_json(read_bytes(path), path), vocab_map, moved, changes)
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), changes


def _walk(value: Any, vocab_map: VocabMap, roles: dict[str, int], changes: list[str]) -> Any:
    if not isinstance(value, dict):
        return value
    result = {}
    for key, entry in value.items():
        new = entry
        if isinstance(entry, dict):
            new = _walk(entry, vocab_map, roles, changes)
        elif key == "vocab_size" and entry == vocab_map.old_size:
            new = vocab_map.new_size
        elif key.endswith(_ID_ENDS):
            new = _moved_ids(entry, vocab_map, roles.get(key.partition("_token")[0]))
        if new != entry and not isinstance(entry, dict):
            changes.append(f"{key} {json.dumps(entry)} is now {json.dumps(new)}")
        result[key] = new
    return result


def _moved_ids(value: Any, vocab_map: VocabMap, role: int | None) -> Any:
    """Ids where their tokens are now; a lost one goes by its role in the new vocabulary, else it is left out."""
    if isinstance(value, list):
        moved = [_moved_ids(one, vocab_map, role) for one in value]
        return [one for at, one in enumerate(moved) if one is not None and one not in moved[:at]]
    if type(value) is not int or not 0 <= value < vocab_map.old_size:
        return value
    new = int(vocab_map.old_to_new[value])
    return new if new >= 0 else role
