"""Which token each id is: the ordered table of a vocabulary, its hash, special ids and the order of added tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS, Reader, parse_json, read_bytes, shortened, text_bytes, write_whole

KINDS = ("normal", "special", "byte", "unused")
ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")  # the ones that Transformers knows
FORMAT = "vocab_parallel vocabulary"
VERSION = 1
_HEADER = b"vocab_parallel ordered vocabulary 1\n"


@dataclass(frozen=True)
class VocabIdentity:
    """The ordered table of a vocabulary. Two tables of equal size with two ids swapped are two identities.

    Tokens are canonical bytes: what the token adds to decoded text, so that one vocabulary has one table whatever
    file it is read from. A special token's bytes are its name; a byte piece (``<0x41>``) is the one byte it stands
    for, of kind "byte"; an id without a token is ``b""`` of kind "unused". Two ids with the same kind and bytes are
    legal, see `duplicates`.

    Args:
        tokens: canonical bytes of each id, in order.
        kinds: "normal", "special", "byte" or "unused", by id.
        special_ids: role ("bos", "eos", "pad", "unk", ...) to id.
        added: ids of the tokens added after training, in the order of their file.
        source: the format that the table was read from; no part of the identity.

    Raises:
        VocabularyError: lengths, kinds or ids that do not fit.
    """

    tokens: tuple[bytes, ...] = field(repr=False)
    kinds: tuple[str, ...] = field(repr=False)
    special_ids: Mapping[str, int] = field(default_factory=dict)
    added: tuple[int, ...] = ()
    source: str = field(default="table", compare=False)

    def __post_init__(self) -> None:
        for name in ("tokens", "kinds", "added"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "special_ids", dict(self.special_ids))
        if not 0 < len(self.tokens) <= MAX_IDS:
            raise VocabularyError(f"{self.source}: {len(self.tokens):,} ids; a vocabulary has 1 to {MAX_IDS:,}")
        if len(self.kinds) != len(self.tokens):
            raise VocabularyError(f"{self.source}: {len(self.tokens)} tokens, but kinds of {len(self.kinds)}")
        if unknown := set(self.kinds).difference(KINDS):
            raise VocabularyError(f"{self.source}: unknown kinds {sorted(unknown)}; known are {', '.join(KINDS)}")
        # Whatever a file names an id that stands for nothing: it is no token.
        cleared = (b"" if kind == "unused" else token for kind, token in zip(self.kinds, self.tokens, strict=True))
        object.__setattr__(self, "tokens", tuple(cleared))
        for role, token_id in self.special_ids.items():
            _require_id(token_id, self.size, f"{self.source}: special id {role}")
        for token_id in self.added:
            _require_id(token_id, self.size, f"{self.source}: added token")
        if len(set(self.added)) != len(self.added):
            raise VocabularyError(f"{self.source}: an id appears twice among the added tokens")

    @classmethod
    def of_tokens(
        cls, tokens: Sequence[str | bytes], *, special_ids: Mapping[str, int] | None = None, added: Sequence[int] = ()
    ) -> VocabIdentity:
        """The identity of tokens listed by id; text stands for its UTF-8, and ids with a role are special."""
        special_ids = special_ids or {}
        special = set(special_ids.values())
        table = tuple(
            text_bytes(token, "table", f"tokens[{place}]") if isinstance(token, str) else bytes(token)
            for place, token in enumerate(tokens)
        )
        kinds = tuple("special" if token_id in special else "normal" for token_id in range(len(table)))
        return cls(table, kinds, special_ids, tuple(added), "table")

    @property
    def size(self) -> int:
        """Number of ids, unused ones included."""
        return len(self.tokens)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the ordered table, the same for every file format that it can be read from.

        Hashed are: the line ``vocab_parallel ordered vocabulary 1`` with its newline, the number of ids as 8 bytes,
        then for each id its kind as one byte (0 normal, 1 special, 2 byte, 3 unused), the length of its bytes as 4
        bytes, and its bytes. Integers are unsigned and little-endian. Special ids and the order of added tokens are
        compared on their own: a tokenizer may give another token a role without changing what a row means.
        """
        codes = {kind: bytes([code]) for code, kind in enumerate(KINDS)}
        digest = hashlib.sha256(_HEADER + self.size.to_bytes(8, "little"))
        digest.update(
            b"".join(
                codes[kind] + len(token).to_bytes(4, "little") + token
                for kind, token in zip(self.kinds, self.tokens, strict=True)
            )
        )
        return digest.hexdigest()

    def named(self, token_id: int) -> str:
        """The token in words, such as ``' the'`` or ``special '<s>'``."""
        if not 0 <= token_id < self.size:
            return "no such id"
        kind, token = self.kinds[token_id], self.tokens[token_id]
        if kind == "unused":
            return "unused"
        try:
            text = shortened(token.decode("utf-8"))
        except UnicodeDecodeError:
            text = shortened(token)
        return text if kind == "normal" else f"{kind} {text}"

    def duplicates(self) -> list[tuple[int, ...]]:
        """Ids that share kind and bytes, each group in order; unused ids are not counted."""
        found: dict[tuple[str, bytes], list[int]] = {}
        for token_id, key in enumerate(zip(self.kinds, self.tokens, strict=True)):
            found.setdefault(key, []).append(token_id)
        return [tuple(ids) for (kind, _), ids in found.items() if len(ids) > 1 and kind != "unused"]

    def resized(self, size: int) -> VocabIdentity:
        """The same table with unused ids up to `size`, for a model with more rows than its tokenizer has tokens.

        Raises:
            VocabularyError: `size` is below this size, or beyond any vocabulary.
        """
        if not self.size <= size <= MAX_IDS:
            raise VocabularyError(f"cannot resize {self.size:,} ids to {size:,}: expected {self.size:,} to {MAX_IDS:,}")
        extra = size - self.size
        return replace(self, tokens=(*self.tokens, *[b""] * extra), kinds=(*self.kinds, *["unused"] * extra))

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads back; tokens that are no UTF-8 text are base64."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "size": self.size,
            "sha256": self.sha256,
            "source": self.source,
            "special_ids": dict(self.special_ids),
            "added": list(self.added),
            "kinds": [[kind, sum(1 for _ in run)] for kind, run in groupby(self.kinds)],
            "tokens": [_to_text(token) for token in self.tokens],
        }

    @classmethod
    def from_json(cls, data: object, path: object = "vocabulary.json") -> VocabIdentity:
        """The identity that `to_json` described, its hash checked.

        Raises:
            VocabularyError: not such a description, or its hash is another.
        """
        reader = Reader(data, path)
        if reader.get("format", str) != FORMAT or reader.get("version", int) != VERSION:
            found = f"{shortened(reader.value['format'])} version {shortened(reader.value.get('version'))}"
            raise VocabularyError(f"{path}: expected {FORMAT!r} version {VERSION}, found {found}")
        entries = reader.get("tokens", list)
        if (size := reader.get("size", int)) != len(entries):
            raise reader.error("size", f"{shortened(size)}, but tokens has {len(entries)} entries")
        tokens = tuple(_from_text(entry, reader, f"tokens[{place}]") for place, entry in enumerate(entries))
        special = reader.inside("special_ids").value
        special_ids = {role: reader.require(special[role], int, f"special_ids.{role}") for role in special}
        added = tuple(reader.require(token_id, int, "added") for token_id in reader.get("added", list))
        kinds, source = _kinds(reader, size), reader.get("source", str)
        try:
            result = cls(tokens, kinds, special_ids, added, source)
        except VocabularyError as error:
            raise VocabularyError(f"{path}: {error}") from error
        if (stated := reader.get("sha256", str)) != result.sha256:
            raise VocabularyError(
                f"{path}: its table hashes to {result.sha256}, but the file says {shortened(stated)}: it was edited "
                "or damaged; take it again from the tokenizer it was made of"
            )
        return result

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the identity as ``vocabulary.json``; the same identity gives the same bytes."""
        text = json.dumps(self.to_json(), ensure_ascii=False, indent=None, separators=(",", ":"))
        write_whole(path, text.encode("utf-8") + b"\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> VocabIdentity:
        """Reads what `write` wrote; `read_vocabulary` reads any format."""
        return cls.from_json(parse_json(read_bytes(path), path), path)


def first_difference(
    a: VocabIdentity, b: VocabIdentity, names: tuple[str, str] = ("the first", "the second")
) -> str | None:
    """In words, the first id whose token differs between two tables, or their sizes; None if the tables are equal."""
    if a.sha256 == b.sha256:
        return None
    for token_id in range(min(a.size, b.size)):
        if (a.kinds[token_id], a.tokens[token_id]) != (b.kinds[token_id], b.tokens[token_id]):
            return f"id {token_id} is {a.named(token_id)} in {names[0]} and {b.named(token_id)} in {names[1]}"
    larger, (name, other) = (a, names) if a.size > b.size else (b, names[::-1])
    smaller = min(a.size, b.size)
    return f"{name} has {larger.size:,} ids and {other} {smaller:,}: id {smaller} is {larger.named(smaller)}"


def audit(
    identity: VocabIdentity,
    *,
    embedding_rows: int | None = None,
    head_rows: int | None = None,
    config_vocab_size: int | None = None,
    emitted_max: int | None = None,
) -> list[str]:
    """Each disagreement between a vocabulary and the model beside it, in words; empty if there is none.

    Args:
        identity: the ordered table.
        embedding_rows: real rows of the input embedding.
        head_rows: real rows of the output head.
        config_vocab_size: what the model's configuration says.
        emitted_max: the largest id that the tokenizer was seen to emit.
    """
    lines = []
    rows = {"embedding rows": embedding_rows, "head rows": head_rows, "config vocab_size": config_vocab_size}
    for name, count in rows.items():
        if count is None or count == identity.size:
            continue
        what = f"rows {identity.size} to {count - 1} belong to no token"
        if count < identity.size:
            what = f"ids {count} to {identity.size - 1} have no row (the first is {identity.named(count)})"
        lines.append(f"{name} {count:,}, but the vocabulary has {identity.size:,} ids: {what}")
    if embedding_rows is not None and head_rows is not None and embedding_rows != head_rows:
        lines.append(f"embedding rows {embedding_rows:,}, but head rows {head_rows:,}: they cannot be tied")
    limit = min([identity.size, *[count for count in rows.values() if count is not None]])
    if emitted_max is not None and emitted_max >= limit:
        lines.append(f"the tokenizer emits id {emitted_max}, beyond the {limit:,} ids that all parts have")
    for role, token_id in identity.special_ids.items():
        if token_id >= limit:
            lines.append(f"special id {role} = {token_id} is beyond the {limit:,} ids that all parts have")
        if identity.kinds[token_id] == "unused":
            lines.append(f"special id {role} = {token_id} is an unused id")
    groups = identity.duplicates()
    for ids in groups[:10]:
        lines.append(f"ids {', '.join(map(str, ids))} are all {identity.named(ids[0])}")
    if len(groups) > 10:
        lines.append(f"and {len(groups) - 10} more groups of ids that are the same token")
    return lines


def _require_id(token_id: object, size: int, what: str) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
        raise VocabularyError(f"{what} is {shortened(token_id)}; expected an id in [0, {size})")


def _to_text(token: bytes) -> str | dict[str, str]:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(token).decode()}


def _from_text(entry: object, reader: Reader, place: str) -> bytes:
    if isinstance(entry, str):
        return text_bytes(entry, reader.path, place)
    coded = Reader(entry, reader.path, place).get("base64", str)
    try:
        return base64.b64decode(coded, validate=True)
    except ValueError as error:
        raise reader.error(place, f"not base64: {error}") from error


def _kinds(reader: Reader, size: int) -> tuple[str, ...]:
    kinds: list[str] = []
    for place, run in enumerate(reader.get("kinds", list)):
        pair = reader.require(run, list, f"kinds[{place}]")
        good = len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int
        # The count is bounded before anything of that size is made.
        if not good or not 0 < pair[1] <= size - len(kinds):
            raise reader.error(f"kinds[{place}]", f"expected [kind, count] that add up to {size}, found {run!r:.60}")
        kinds.extend([pair[0]] * pair[1])
    return tuple(kinds)
