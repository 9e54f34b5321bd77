"""What lies beside the tensors of a migrated checkpoint: its ordered table, its tokenizer, ids in configurations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.files import StoredCheckpoint
from vocab_parallel.checkpoint.metadata import inside
from vocab_parallel.checkpoint.writing import ASSETS, MANIFEST
from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.files import parse_json, read_bytes
from vocab_parallel.vocabulary.formats.reading import open_vocabulary_file
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.settings import SIZES, holds_ids, moved_ids

VOCABULARY = "vocabulary.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "vocab.bpe", "merges.txt", "encoder.json", "spiece.model", "sentencepiece*.model",
    "*.spm", "*.tiktoken", "tekken.json", "chat_template.*",
)  # fmt: skip
_NAMES = {"tokenizer.json": "tokenizer.json", "tekken": "tekken.json", "sentencepiece": "tokenizer.model",
          "tiktoken": "tokenizer.tiktoken"}  # fmt: skip
_WITH_IDS = ("config.json", "generation_config.json")
_MAY_HOLD_IDS = ("_ids", "_to_id", "_token_map", "sequence_bias")  # ends of names of settings that stay as they are


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


def known_vocabulary(
    path: Path,
    old_sha256: str | None,
    own: Callable[[], VocabIdentity | None],
    vocab_map: VocabMap,
    identity: VocabIdentity | None,
) -> KnownVocabulary:
    """Compares the map with the vocabulary of what is migrated and with the new one.

    Args:
        path: What is migrated.
        old_sha256: Of its ordered table.
        own: Gives that table.
        identity: The new one.

    Raises:
        CheckpointLayoutError: The map begins at another vocabulary.
        VocabularyError: It ends at another one than `identity`.
    """
    from_sha256 = old_sha256 or vocab_map.old_sha256
    if None not in (old_sha256, vocab_map.old_sha256) and old_sha256 != vocab_map.old_sha256:
        raise CheckpointLayoutError(
            f"{path} has the vocabulary sha256 {str(old_sha256)[:16]}…, the map is from sha256 "
            f"{str(vocab_map.old_sha256)[:16]}…: its ids are other tokens. Make the map from the vocabulary that it "
            f"has: python -m vocab_parallel migrate {path} <target> --old-vocab <its tokenizer> --new-vocab <the new "
            "one>"
        )
    notes: list[str] = []
    if vocab_map.old_sha256 is None and old_sha256 is not None:
        words = f"the checkpoint's, sha256 {old_sha256[:16]}…"
        notes.append(f"the map names no vocabulary: its old ids are taken for {words}")
    if identity is None and vocab_map.new_sha256 is None and _only_appends(vocab_map) and (table := own()) is not None:
        identity = table.resized(vocab_map.new_size)  # with unused ids for what is appended
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


def stored_identity(stored: StoredCheckpoint) -> VocabIdentity | None:
    """A checkpoint's own ordered table, if it has one."""
    path = stored.path / VOCABULARY
    return VocabIdentity.read(path) if path.is_file() else None


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
    if not known and (table := stored_identity(stored)) is not None:
        return table.sha256
    return next(iter(known.values()), None)


def vocabulary_bytes(identity: VocabIdentity) -> bytes:
    """What `VocabIdentity.write` writes."""
    return identity.to_text()


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
        if is_tokenizer_file(Path(file).name) and not keeps_ids:
            dropped.append(file)
        elif file in _WITH_IDS:
            assets[name], changes = _corrected(stored.path / name, vocab_map, identity)
            notes.extend(f"{file}: {change}" for change in changes)
        else:
            assets[name] = stored.path / name
    new = {f"{ASSETS}/{name}": path for name, path in _tokenizer_files(tokenizer)}
    if dropped:
        after = "the new tokenizer's are carried instead" if new else "the new tokenizer's must be put beside it"
        notes.append(f"files of the old tokenizer are left out ({', '.join(dropped)}): {after}")
    return {**assets, **new}, notes


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of a model's directory belongs to its tokenizer."""
    return any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)


def _tokenizer_files(tokenizer: str | os.PathLike[str] | None) -> Iterator[tuple[str, Path]]:
    """The files to carry along, each with the name that libraries look for; an ordered table is none."""
    if tokenizer is None:
        return
    path = Path(tokenizer)
    if path.is_dir():
        yield from ((one.name, one) for one in sorted(path.iterdir()) if one.is_file() and is_tokenizer_file(one.name))
    elif is_tokenizer_file(path.name):
        yield path.name, path
    elif (form := open_vocabulary_file(path)[0]) in _NAMES:
        yield _NAMES[form], path


def _only_appends(vocab_map: VocabMap) -> bool:
    old, new = vocab_map.pairs()
    return len(old) == vocab_map.old_size and bool((old == new).all())


def _corrected(path: Path, vocab_map: VocabMap, identity: VocabIdentity | None) -> tuple[bytes, list[str]]:
    """A configuration with the new size and ids, and what a user should know of it."""
    roles = {} if identity is None else dict(identity.special_ids)
    notes: list[str] = []
    try:
        value = _walk(parse_json(read_bytes(path), path), vocab_map, roles, notes, nested=False)
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), notes
    except RecursionError as error:
        raise VocabularyError(f"{path}: JSON nested too deeply") from error


def _walk(value: Any, vocab_map: VocabMap, roles: dict[str, int], notes: list[str], *, nested: bool = True) -> Any:
    if not isinstance(value, dict) or (nested and value.get("vocab_size", vocab_map.old_size) != vocab_map.old_size):
        return value  # a section for another vocabulary, such as codes of sounds
    result = {}
    for key, entry in value.items():
        new, role = entry, roles.get(key.partition("_token")[0])
        if isinstance(entry, dict) and not key.endswith(_MAY_HOLD_IDS):
            result[key] = _walk(entry, vocab_map, roles, notes)
            continue
        if key in SIZES and entry == vocab_map.old_size:
            new = vocab_map.new_size
        elif holds_ids(key):
            new = _moved(entry, vocab_map, role)
        elif key.endswith(_MAY_HOLD_IDS) and entry:
            notes.append(f"{key} stays as it is: if ids of tokens are in it, correct them")
        if new != entry:
            notes.append(f"{key} {json.dumps(entry)} is now {json.dumps(new)}")
        if key.endswith("_token_id") and None not in (role, new) and role not in (new if type(new) is list else [new]):
            notes.append(f"{key} {json.dumps(new)} is where the old token is; the new tokenizer's is {role}")
        result[key] = new
    return result


def _moved(value: Any, vocab_map: VocabMap, role: int | None) -> Any:
    """Ids of lost tokens go by their role in the new vocabulary, else they are left out."""
    return moved_ids(value, vocab_map, lambda _: role)
