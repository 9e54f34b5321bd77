"""Which token each id is: the ordered table of a vocabulary, its hash, special ids and the order of added tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS, Packed, Reader, shortened, text_bytes, write_whole
from vocab_parallel.vocabulary.json_stream import parse_packed
from vocab_parallel.vocabulary.packed import PackedBytes, PackedNames, batches

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
        tokens: canonical bytes of each id, in order; kept packed (4 bytes an id and its bytes), as `kinds` are (1).
        kinds: "normal", "special", "byte" or "unused", by id.
        special_ids: role ("bos", "eos", "pad", "unk", ...) to id.
        added: ids of the tokens added after training, in the order of their file.
        source: the format that the table was read from; no part of the identity.

    Raises:
        VocabularyError: lengths, kinds or ids that do not fit.
    """

    tokens: Sequence[bytes] = field(repr=False)
    kinds: Sequence[str] = field(repr=False)
    special_ids: Mapping[str, int] = field(default_factory=dict)
    added: tuple[int, ...] = ()
    source: str = field(default="table", compare=False)

    def __post_init__(self) -> None:
        tokens = self.tokens if isinstance(self.tokens, PackedBytes) else PackedBytes(self.tokens)
        kinds = self.kinds if isinstance(self.kinds, PackedNames) else tuple(self.kinds)
        object.__setattr__(self, "added", tuple(self.added))
        object.__setattr__(self, "special_ids", dict(self.special_ids))
        if not 0 < len(tokens) <= MAX_IDS:
            raise VocabularyError(f"{self.source}: {len(tokens):,} ids; a vocabulary has 1 to {MAX_IDS:,}")
        if len(kinds) != len(tokens):
            raise VocabularyError(f"{self.source}: {len(tokens)} tokens, but kinds of {len(kinds)}")
        if unknown := set(kinds).difference(KINDS):
            raise VocabularyError(f"{self.source}: unknown kinds {sorted(unknown)}; known are {', '.join(KINDS)}")
        kinds = kinds if isinstance(kinds, PackedNames) else PackedNames.of(KINDS, kinds)
        # Whatever a file names an id that stands for nothing: it is no token.
        if any(tokens[token_id] for token_id in kinds.places("unused")):
            tokens = PackedBytes(b"" if kind == "unused" else token for kind, token in zip(kinds, tokens, strict=True))
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "kinds", kinds)
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
    def kind_codes(self) -> bytes:
        """For each id, the place of its kind in `KINDS`."""
        assert isinstance(self.kinds, PackedNames)
        return self.kinds.codes

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
        digest = hashlib.sha256(_HEADER + self.size.to_bytes(8, "little"))
        codes = {kind: bytes([code]) for code, kind in enumerate(KINDS)}
        for batch in batches(zip(self.kinds, self.tokens, strict=True)):
            digest.update(b"".join(codes[kind] + len(token).to_bytes(4, "little") + token for kind, token in batch))
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
        tokens, kinds, extra = self.tokens, self.kinds, size - self.size
        assert isinstance(tokens, PackedBytes) and isinstance(kinds, PackedNames)
        return replace(self, tokens=tokens.padded(extra), kinds=kinds.padded("unused", extra))

    def to_json(self) -> dict[str, Any]:
        """JSON values that `from_json` reads back; tokens that are no UTF-8 text are base64."""
        return {**self._described(), "tokens": [_to_text(token) for token in self.tokens]}

    def to_text(self) -> bytes:
        """The text of ``vocabulary.json``: that of `to_json` in one line; the same identity gives the same bytes."""
        parts = [_compact(self._described())[:-1], b',"tokens":[']
        for number, batch in enumerate(batches(self.tokens)):
            parts.append((b"," if number else b"") + _compact([_to_text(token) for token in batch])[1:-1])
        return b"".join([*parts, b"]}\n"])

    def _described(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "size": self.size,
            "sha256": self.sha256,
            "source": self.source,
            "special_ids": dict(self.special_ids),
            "added": list(self.added),
            "kinds": [[kind, sum(1 for _ in run)] for kind, run in groupby(self.kinds)],
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
        entries: Any = reader.get("tokens", list)
        if (size := reader.get("size", int)) != len(entries):
            raise reader.error("size", f"{shortened(size)}, but tokens has {len(entries)} entries")
        packed = isinstance(entries, PackedTexts)
        tokens = (
            entries.tokens
            if packed
            else tuple(_from_text(entry, reader, f"tokens[{place}]") for place, entry in enumerate(entries))
        )
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
        """Writes the identity as ``vocabulary.json``."""
        write_whole(path, self.to_text())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> VocabIdentity:
        """Reads what `write` wrote; `read_vocabulary` reads any format."""
        return cls.from_json(parse_packed(path, {("tokens",): pack_texts}), path)


class PackedTexts(Packed):
    """The list "tokens" of a ``vocabulary.json``."""

    def __init__(self, tokens: PackedBytes) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)


def pack_texts(kind: type, entries: Iterator[tuple[Any, Any]]) -> PackedTexts:
    """Packs the tokens of a ``vocabulary.json``, see `json_stream`."""
    if kind is not list:
        raise ValueError("no list")
    return PackedTexts(PackedBytes(_known_text(entry) for _, entry in entries))


def _require_id(token_id: object, size: int, what: str) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
        raise VocabularyError(f"{what} is {shortened(token_id)}; expected an id in [0, {size})")


def _to_text(token: bytes) -> str | dict[str, str]:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(token).decode()}


def _known_text(entry: object) -> bytes:
    if isinstance(entry, str):
        return entry.encode()
    if isinstance(entry, dict) and isinstance(coded := entry.get("base64"), str):
        return base64.b64decode(coded, validate=True)
    raise ValueError("no token")


def _compact(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _from_text(entry: object, reader: Reader, place: str) -> bytes:
    if isinstance(entry, str):
        return text_bytes(entry, reader.path, place)
    coded = Reader(entry, reader.path, place).get("base64", str)
    try:
        return base64.b64decode(coded, validate=True)
    except ValueError as error:
        raise reader.error(place, f"not base64: {error}") from error


def _kinds(reader: Reader, size: int) -> Sequence[str]:
    runs: list[tuple[str, int]] = []
    left = size
    for place, run in enumerate(reader.get("kinds", list)):
        pair = reader.require(run, list, f"kinds[{place}]")
        good = len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int
        # The count is bounded before anything of that size is made.
        if not good or not 0 < pair[1] <= left:
            raise reader.error(f"kinds[{place}]", f"expected [kind, count] that add up to {size}, found {run!r:.60}")
        runs.append((pair[0], pair[1]))
        left -= pair[1]
    if any(kind not in KINDS for kind, _ in runs):
        return tuple(kind for kind, count in runs for _ in range(count))  # an error of the identity
    return PackedNames(KINDS, b"".join(bytes([KINDS.index(kind)]) * count for kind, count in runs))
