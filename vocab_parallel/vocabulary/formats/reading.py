"""Reads the ordered vocabulary of any tokenizer file; the format is told by the content, not by the name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import Packed, parse_json, read_bytes, require_file, shortened
from vocab_parallel.vocabulary.formats.tables import (
    TIKTOKEN_LINE,
    from_sentencepiece,
    from_tekken,
    from_tiktoken,
    pack_ranks,
)
from vocab_parallel.vocabulary.formats.tokenizer_json import from_tokenizer_json, pack_merges, pack_words, read_beside
from vocab_parallel.vocabulary.identity import FORMAT, VocabIdentity, pack_texts
from vocab_parallel.vocabulary.json_stream import begins_with_object, parse_packed

# A tokenizer is what emits the ids; a table beside it may be of before its last change, and encodes nothing.
IN_FOLDER = ("tokenizer.json", "tekken.json", "tokenizer.model", "vocabulary.json")
PACKERS = {
    ("vocab",): pack_ranks, ("model", "vocab"): pack_words, ("model", "merges"): pack_merges, ("tokens",): pack_texts,
}  # fmt: skip
KNOWN = "a tokenizer.json, a tiktoken or Tekken table, a SentencePiece model, or a vocabulary.json of this package"


def read_vocabulary(
    path: str | os.PathLike[str],
    *,
    special_tokens: Mapping[str, int] | None = None,
    special_ids: Mapping[str, int] | None = None,
    size: int | None = None,
) -> VocabIdentity:
    """The ordered vocabulary of a file, or of a Hugging Face directory.

    Args:
        path: a ``tokenizer.json`` (BPE, WordPiece, WordLevel, Unigram), a ``.tiktoken`` table, a Tekken JSON, a
            SentencePiece ``.model``, a ``vocabulary.json``; or a folder with one of them, where
            ``tokenizer_config.json`` and ``special_tokens_map.json`` give the roles.
        special_tokens: text to id, for a ``.tiktoken`` table, which does not list them.
        special_ids: role ("bos", "eos", ...) to id, in place of those of the file.
        size: rows of the model, if it has more than the tokenizer has tokens; the rest is unused.

    Returns:
        The identity; equal vocabularies have equal `sha256` whatever the file.

    Raises:
        VocabularyError: a format not known here, or a broken file; names the file and the place.
        OSError: the file is missing or cannot be read.
    """
    path, folder = find_file(path)
    form, parsed = open_vocabulary_file(path)
    if special_tokens and form != "tiktoken":
        raise VocabularyError(f"{path}: special_tokens are for .tiktoken tables; this is {form}, which lists its own")
    if form == "tiktoken":
        found = from_tiktoken(parsed, path, special_tokens or {})
    elif form == "sentencepiece":
        found = from_sentencepiece(parsed, path)
    elif form == "tekken":
        found = from_tekken(parsed, path)
    elif form == "table":
        found = VocabIdentity.from_json(parsed, path)
    else:
        found = from_tokenizer_json(parsed, path, None if folder is None else read_beside(folder))
    try:
        found = found if special_ids is None else replace(found, special_ids=special_ids)
        return found if size is None else found.resized(size)
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}") from error


def find_file(path: str | os.PathLike[str]) -> tuple[Path, Path | None]:
    """The vocabulary's file: `path` itself, or the one in the folder `path`, and that folder."""
    path = Path(path)
    if not path.is_dir():
        return path, None
    for name in IN_FOLDER:
        if (path / name).is_file():
            return path / name, path
    raise VocabularyError(
        f"{path} holds no {', '.join(IN_FOLDER)}; a slow tokenizer's vocab files become a tokenizer.json by "
        "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )


def open_vocabulary_file(path: Path) -> tuple[str, Any]:
    """The format, as `tell` says, and the content: bytes, or the JSON with its long lists packed.

    Raises:
        VocabularyError: no format that is known here, or broken JSON.
        OSError: the file is missing or cannot be read.
    """
    if begins_with_object(path := require_file(path)):
        parsed = parse_packed(path, PACKERS)
        return _tell_json(parsed, path), parsed
    data = read_bytes(path)
    return tell(data, path)[0], data


def tell(data: bytes, path: object) -> tuple[str, Any]:
    """The format: tokenizer.json, tekken, table, tiktoken or sentencepiece; and the JSON, if it is one.

    Raises:
        VocabularyError: none of these.
    """
    start = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
    if start.startswith(b"{"):
        parsed = parse_json(data, path)
        return _tell_json(parsed, path), parsed
    line = start.split(b"\n", 1)[0]
    if TIKTOKEN_LINE.fullmatch(line):
        return "tiktoken", None
    if data.startswith(b"\n"):  # the first field of the model's message: its pieces
        return "sentencepiece", None
    raise VocabularyError(f"{path}: begins with {shortened(data[:40])}, which is no vocabulary; expected {KNOWN}")


def _tell_json(parsed: dict[str, Any], path: object) -> str:
    if parsed.get("format") == FORMAT:
        return "table"
    if isinstance(parsed.get("model"), dict):
        return "tokenizer.json"
    vocab = parsed.get("vocab")
    if (vocab.kind if isinstance(vocab, Packed) else type(vocab)) is list and isinstance(parsed.get("config"), dict):
        return "tekken"
    keys = ", ".join(shortened(key, 20) for key in list(parsed)[:5]) or "none"
    raise VocabularyError(f"{path}: JSON with the keys {keys}: no vocabulary; expected {KNOWN}")
