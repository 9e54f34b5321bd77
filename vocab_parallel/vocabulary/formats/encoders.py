"""Encodes token bytes with an old tokenizer: the sub-tokens that a new token was written with before."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import read_bytes, shortened
from vocab_parallel.vocabulary.formats.reading import find_file, open_vocabulary_file, read_vocabulary
from vocab_parallel.vocabulary.formats.tables import sentencepiece_model, tekken_ranks, tiktoken_ranks
from vocab_parallel.vocabulary.identity import VocabIdentity

# Appended to a SentencePiece model it overrides two fields: no space is added before the text, none is squeezed.
_VERBATIM = b"\x1a\x04\x18\x00\x20\x00"


def old_encoder(path: str | os.PathLike[str]) -> Callable[[bytes], list[int]]:
    """An encoder of bytes to the ids of the tokenizer in `path`, by its own library; for `VocabMap.from_vocabs`.

    The bytes are taken as they stand within a text: nothing is put before or after them. Bytes that are no UTF-8 go by
    the tokens of single bytes, where there are any. What the tokenizer cannot write has no ids: the unknown token's row
    says nothing of a token that it stands for.

    Args:
        path: a file or folder that `read_vocabulary` reads.

    Raises:
        VocabularyError: a broken file, or the library that encodes with it is missing (the message names it).
    """
    path, _ = find_file(path)
    identity = read_vocabulary(path)
    single, unknown, source = _single_bytes(identity), identity.special_ids.get("unk"), identity.source
    del identity  # before the library makes its own table
    form, parsed = open_vocabulary_file(path)
    if form == "tokenizer.json":
        encode = _hugging_face(parsed, path)
    elif form == "sentencepiece":
        encode = sentencepiece_model(parsed + _VERBATIM, path).encode_as_ids
    elif form == "tiktoken":
        encode = _ranks_encoder(tiktoken_ranks(parsed, path), path)
    elif form == "tekken":
        _, first, ranks = tekken_ranks(parsed, path)
        of_rank = _ranks_encoder(ranks, path, parsed["config"].get("pattern"))
        encode = lambda text: [rank + first for rank in of_rank(text)]  # noqa: E731
    elif source == "bytes":
        return lambda token: [single[byte] for byte in token if byte in single]
    else:
        raise VocabularyError(
            f"{path} is an ordered table of {source}: it says which token each id is, not how text is cut; "
            "give the tokenizer's own file"
        )

    def encode_bytes(token: bytes) -> list[int]:
        ids: list[int] = []
        for part in _parts(token):
            if isinstance(part, str):
                ids.extend(token_id for token_id in encode(part) if token_id != unknown)
            elif part in single:
                ids.append(single[part])
        return ids

    return encode_bytes


def _single_bytes(identity: VocabIdentity) -> dict[int, int]:
    """The id of each single byte; a byte piece before a token that happens to have one byte."""
    found: dict[int, int] = {}
    for kind in ("byte", "normal"):
        for token_id, token in enumerate(identity.tokens):
            if len(token) == 1 and identity.kinds[token_id] == kind:
                found.setdefault(token[0], token_id)
    return found


def _parts(token: bytes) -> list[str | int]:
    """The text in `token`, and the bytes between that are no text."""
    parts: list[str | int] = []
    while token:
        try:
            parts.append(token.decode("utf-8"))
            break
        except UnicodeDecodeError as error:
            if error.start:
                parts.append(token[: error.start].decode("utf-8"))
            parts.append(token[error.start])
            token = token[error.start + 1 :]
    return parts


def _hugging_face(parsed: dict[str, Any], path: Path) -> Callable[[str], Sequence[int]]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise VocabularyError(f"{path}: encoding with it needs: pip install tokenizers") from error
    steps = {part: parsed.get(part) for part in ("normalizer", "pre_tokenizer")}
    del parsed
    verbatim = {part: _without_prefix(step) for part, step in steps.items()}
    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(path).removeprefix(codecs.BOM_UTF8))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if verbatim != steps:  # the library makes a step from the text of a tokenizer only
            empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
            made = Tokenizer.from_str(json.dumps({**empty, **verbatim}))
            tokenizer.normalizer, tokenizer.pre_tokenizer = made.normalizer, made.pre_tokenizer
    except Exception as error:  # the library raises plain Exception
        raise VocabularyError(f"{path}: the tokenizers library refuses it: {shortened(str(error), 200)}") from error

    def encode(text: str) -> Sequence[int]:
        try:
            ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # a model of words or pieces without an unknown token refuses what it cannot write
            return []
        return ids

    return encode


def _without_prefix(step: Any) -> Any:
    """The same normalizer or pre-tokenizer, without the space that it would put before a text."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Prepend":
        return None
    changed = dict(step)
    for key in ("normalizers", "pretokenizers"):
        if isinstance(step.get(key), list):
            changed[key] = [kept for kept in map(_without_prefix, step[key]) if kept is not None]
    if "add_prefix_space" in step:
        changed["add_prefix_space"] = False
    if step.get("type") == "Metaspace":
        changed["prepend_scheme"] = "never"
    return changed


def _ranks_encoder(ranks: dict[bytes, int], path: object, pattern: Any = None) -> Callable[[str], list[int]]:
    encoding = tiktoken_encoding(ranks, path, pattern)
    ranks.clear()  # the library has its own table, and keeps this one for what is not asked here
    encode: Callable[[str], list[int]] = encoding.encode_ordinary
    return encode


def tiktoken_encoding(ranks: dict[bytes, int], path: object, pattern: Any = None) -> Any:
    """The byte-pair encoding of a table by its own library.

    Args:
        pattern: how the file cuts text before byte pairs are merged; None: not at all.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise VocabularyError(f"{path}: encoding with it needs: pip install tiktoken") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise VocabularyError(f"{path}: the byte {missing[0]:#04x} has no rank, so text cannot be encoded with it")
    try:
        cut = r"(?s:.)+" if pattern is None else pattern
        return tiktoken.Encoding("table", pat_str=cut, mergeable_ranks=ranks, special_tokens={})
    except (ValueError, TypeError) as error:
        raise VocabularyError(f"{path}: tiktoken refuses it: {shortened(str(error), 200)}") from error
