"""The ordered tables of tiktoken, Tekken and SentencePiece files, and of plain bytes."""

from __future__ import annotations

import base64
import binascii
import io
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS, Packed, Reader, shortened, text_bytes
from vocab_parallel.vocabulary.identity import KINDS, VocabIdentity
from vocab_parallel.vocabulary.packed import PackedBytes, PackedNames, TableEntries, all_differ

TIKTOKEN_LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,12})\r?")
BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
MAX_SPECIAL = 2**16
SPARE_IDS = 2**16  # ids without an entry, beyond three for each that has one: more is a broken file
# Tekken files before version 7 do not list these; mistral-common names them so.
TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
TEKKEN_ROLES = {"unk": b"<unk>", "bos": b"<s>", "eos": b"</s>", "pad": b"<pad>"}


class Table:
    """Entries by id, in any order; ids that no entry names are unused.

    Args:
        path: the file, for messages.
        source: the format, see `VocabIdentity`.
    """

    def __init__(self, path: object, source: str) -> None:
        self.path = path
        self.source = source
        self.entries = TableEntries()
        self.kinds = bytearray()  # of the entries

    def put(self, token_id: object, kind: str, token: bytes, place: str) -> None:
        """Adds the entry of an id; a second one for the same id is an error."""
        if type(token_id) is not int or not 0 <= token_id < MAX_IDS:
            what = f"expected an id in [0, {MAX_IDS:,}), found {shortened(token_id)}"
            raise VocabularyError(f"{self.path}: {place}: {what}")
        if (there_place := self.entries.place(token_id)) >= 0:
            there = shortened(self.entries.content(there_place))
            raise VocabularyError(
                f"{self.path}: {place}: id {token_id} is {shortened(token)} here and {there} in an earlier entry"
            )
        self.entries.add(token_id, token)
        self.kinds.append(KINDS.index(kind))

    def find(self, kind: str, token: bytes) -> int | None:
        """The lowest id with this kind and these bytes."""
        code, ids = KINDS.index(kind), self.entries.ids
        return min(
            (ids[at] for at, one in enumerate(self.kinds) if one == code and self.entries.content(at) == token),
            default=None,
        )

    def identity(
        self, special_ids: Mapping[str, int], added: Sequence[int] = (), size: int | None = None
    ) -> VocabIdentity:
        """The table as an identity.

        Args:
            special_ids: role to id.
            added: ids of added tokens in the order of the file.
            size: number of ids, where the file states it; otherwise the largest id and one.

        Raises:
            VocabularyError: no entries, or ids so far apart that the file must be broken.
        """
        if not len(self.entries):
            raise VocabularyError(f"{self.path}: no tokens in this {self.source} file")
        last = max(self.entries.ids)
        size = last + 1 if size is None else size
        if size > 4 * len(self.entries) + SPARE_IDS:
            there = shortened(self.entries.content(self.entries.place(last)))
            what = f"{len(self.entries):,} tokens, but ids up to {size - 1:,} (the last, {last:,}, is {there})"
            raise VocabularyError(f"{self.path}: {what}; is an id damaged?")
        places = array("i", map(self.entries.place, range(size)))
        tokens = PackedBytes(self.entries.content(at) if at >= 0 else b"" for at in places)
        kinds = PackedNames(KINDS, bytes(self.kinds[at] if at >= 0 else KINDS.index("unused") for at in places))
        try:
            return VocabIdentity(tokens, kinds, special_ids, tuple(added), self.source)
        except VocabularyError as error:
            raise VocabularyError(f"{self.path}: {error}") from error


def byte_identity() -> VocabIdentity:
    """The app's plain bytes: pad, bos and eos, then the 256 bytes in order."""
    tokens = (b"<pad>", b"<s>", b"</s>", *[bytes([byte]) for byte in range(256)])
    kinds = (*["special"] * 3, *["normal"] * 256)
    return VocabIdentity(tokens, kinds, {"pad": 0, "bos": 1, "eos": 2}, (), "bytes")


def from_tiktoken(data: bytes, path: object, special_tokens: Mapping[str, int]) -> VocabIdentity:
    """Reads lines of base64 and rank; the special tokens are not in the file, the caller gives text and id.

    Raises:
        VocabularyError: a line of another form, or an id twice.
    """
    table = Table(path, "tiktoken")
    try:
        different = all_differ(array("q", (hash(token) for _, token, _ in _tiktoken_lines(data, path))))
    except VocabularyError:
        different = False  # which of the errors is the first, `tiktoken_ranks` says
    lines = ((token, rank) for _, token, rank in _tiktoken_lines(data, path))
    for token, rank in lines if different else tiktoken_ranks(data, path).items():
        table.put(rank, "normal", token, f"rank {rank}")
    for text, token_id in special_tokens.items():
        place = f"special token {shortened(text)}"
        table.put(token_id, "special", text_bytes(text, path, place), place)
    return table.identity({}, list(special_tokens.values()))


def tiktoken_ranks(data: bytes, path: object) -> dict[bytes, int]:
    """Rank by token bytes."""
    ranks: dict[bytes, int] = {}
    for number, token, rank in _tiktoken_lines(data, path):
        if ranks.setdefault(token, rank) != rank:
            raise VocabularyError(f"{path}: line {number}: {shortened(token)} has ranks {ranks[token]} and {rank}")
    return ranks


def _tiktoken_lines(data: bytes, path: object) -> Iterator[tuple[int, bytes, int]]:
    """The number, the token and the rank of each line that is not empty."""
    for number, line in enumerate(io.BytesIO(data), 1):
        line = line.removesuffix(b"\n")
        if not line.strip():
            continue
        found = TIKTOKEN_LINE.fullmatch(line)
        token = _base64(found[1]) if found else None
        if found is None or token is None:
            what = f"expected base64 and a rank, found {shortened(line)}"
            raise VocabularyError(f"{path}: line {number}: {what}. Is the file complete?")
        yield number, token, int(found[2])


def from_tekken(data: object, path: object) -> VocabIdentity:
    """Reads a Tekken file: special ids first, then the ranks that its vocabulary size leaves room for.

    Raises:
        VocabularyError: not such a file, or fewer ranks than its size needs.
    """
    reader = Reader(data, path)
    size, count = _tekken_sizes(reader)
    ranks = _tekken_ranks(reader, size - count)
    table = Table(path, "tekken")
    listed = reader.get("special_tokens", list, None)
    if listed is None:
        listed = [{"rank": rank, "token_str": text} for rank, text in enumerate(TEKKEN_SPECIAL[:count])]
    for place, entry in enumerate(listed):
        token = Reader(entry, path, f"special_tokens[{place}]")
        rank, text = token.get("rank", int), token.get("token_str", str)
        if not 0 <= rank < count:
            raise token.error(token.place, f"rank {shortened(rank)} is outside the {count} special ids")
        table.put(rank, "special", text_bytes(text, path, token.place), token.place)
    for rank in range(count):
        if table.entries.place(rank) < 0:
            table.put(rank, "special", f"<SPECIAL_{rank}>".encode(), "special ids")
    for rank, bytes_ in ranks:
        table.put(rank + count, "normal", bytes_, f"rank {rank}")
    found = {role: table.find("special", name) for role, name in TEKKEN_ROLES.items()}
    special_ids = {role: token_id for role, token_id in found.items() if token_id is not None}
    return table.identity(special_ids, size=size)


class PackedRanks(Packed):
    """The list "vocab" of a Tekken file: tokens by rank."""

    def __init__(self, entries: TableEntries) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def first(self, count: int, reader: Reader) -> Iterator[tuple[int, bytes]]:
        """The ranks below `count`, each with its token, in the order of the file."""
        ids = self._entries.ids
        if (found := sum(rank < count for rank in ids)) != count:
            raise _ranks_missing(reader, count, found)
        return ((rank, self._entries.content(at)) for at, rank in enumerate(ids) if rank < count)


def pack_ranks(kind: type, entries: Iterator[tuple[Any, Any]]) -> PackedRanks:
    """Packs the tokens of a Tekken file, see `json_stream`; each rank and each token once."""
    found, hashes = TableEntries(), array("q")
    for _, entry in entries:
        rank, text = (entry.get("rank"), entry.get("token_bytes")) if isinstance(entry, dict) else (None, None)
        token = _base64(text.encode()) if isinstance(text, str) else None
        if token is None or type(rank) is not int or not 0 <= rank < MAX_IDS or found.place(rank) >= 0:
            raise ValueError("unusual")
        found.add(rank, token)
        hashes.append(hash(token))
    if kind is list and all_differ(hashes):
        return PackedRanks(found)
    raise ValueError("unusual")


def tekken_ranks(data: object, path: object) -> tuple[int, int, dict[bytes, int]]:
    """The number of ids, how many of them are special, and the rank of each token that has an id."""
    reader = Reader(data, path)
    size, count = _tekken_sizes(reader)
    return size, count, {token: rank for rank, token in _tekken_ranks(reader, size - count)}


def _tekken_sizes(reader: Reader) -> tuple[int, int]:
    """The number of ids, and how many of them are special."""
    config = reader.inside("config")
    size, count = config.get("default_vocab_size", int), config.get("default_num_special_tokens", int)
    entries = len(reader.get("vocab", list))
    if not 0 <= count <= MAX_SPECIAL:
        raise config.error(config.place, f"default_num_special_tokens: {shortened(count)} outside [0, {MAX_SPECIAL}]")
    if not count <= size <= count + entries:
        what = f"default_vocab_size: {shortened(size)}, but {count} special ids and {entries} entries of vocab"
        raise config.error(config.place, what)
    return size, count


def _tekken_ranks(reader: Reader, room: int) -> Iterator[tuple[int, bytes]]:
    """The ranks below `room`, each with its token."""
    ranks: dict[bytes, int] = {}
    if isinstance(vocab := reader.get("vocab", list), PackedRanks):
        return vocab.first(room, reader)
    for place, entry in enumerate(vocab):
        rank, text = (entry.get("rank"), entry.get("token_bytes")) if isinstance(entry, dict) else (None, None)
        if type(rank) is not int or not isinstance(text, str):
            raise reader.error(f"vocab[{place}]", f"expected rank and token_bytes, found {shortened(entry)}")
        if rank >= room:
            continue  # the file lists more ranks than the vocabulary uses
        found = _base64(text.encode("utf-8", "replace"))
        if found is None or rank < 0:
            what = f"expected base64 and a rank, found {shortened(text)}, {shortened(rank)}"
            raise reader.error(f"vocab[{place}]", what)
        if ranks.setdefault(found, rank) != rank:
            raise reader.error(f"vocab[{place}]", f"{shortened(found)} has ranks {ranks[found]} and {rank}")
    if len(ranks) != room or len(set(ranks.values())) != len(ranks):
        raise _ranks_missing(reader, room, len(ranks))
    return ((rank, token) for token, rank in ranks.items())


def _ranks_missing(reader: Reader, room: int, found: int) -> VocabularyError:
    return reader.error("vocab", f"expected each rank below {room:,} once, found {found:,} tokens")


def from_sentencepiece(data: bytes, path: object) -> VocabIdentity:
    """Reads a SentencePiece model: control and unknown pieces are special, ``<0x41>`` is a byte, the mark is a space.

    Raises:
        VocabularyError: not such a file, or the package is missing.
    """
    model = sentencepiece_model(data, path)
    table = Table(path, "sentencepiece")
    for token_id in range(model.get_piece_size()):
        place = f"piece {token_id}"
        try:
            piece = model.id_to_piece(token_id)
        except UnicodeDecodeError as error:
            raise VocabularyError(f"{path}: {place}: not UTF-8: {shortened(error.object)}") from error
        if model.is_control(token_id) or model.is_unknown(token_id):
            table.put(token_id, "special", text_bytes(piece, path, place), place)
        elif model.is_byte(token_id):
            if not (found := BYTE_PIECE.fullmatch(piece)):
                raise VocabularyError(f"{path}: {place}: expected a byte such as <0x41>, found {shortened(piece)}")
            table.put(token_id, "byte", bytes.fromhex(found[1]), place)
        else:
            kind = "unused" if model.is_unused(token_id) else "normal"
            table.put(token_id, kind, text_bytes(piece.replace("▁", " "), path, place), place)
    roles = {"bos": model.bos_id(), "eos": model.eos_id(), "pad": model.pad_id(), "unk": model.unk_id()}
    return table.identity({role: token_id for role, token_id in roles.items() if token_id >= 0})


def sentencepiece_model(data: bytes, path: object) -> Any:
    """The model by its own library."""
    try:
        import sentencepiece
    except ImportError as error:
        raise VocabularyError(f"{path} is a SentencePiece model, read by: pip install sentencepiece") from error
    model = sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        what = shortened(str(error), 200)
        raise VocabularyError(f"{path}: not a whole SentencePiece model: {what}") from error
    return model


def _base64(text: bytes) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
