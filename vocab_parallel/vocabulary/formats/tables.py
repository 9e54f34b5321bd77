"""The ordered tables of tiktoken, Tekken and SentencePiece files, and of plain bytes."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS, Reader, shortened, text_bytes
from vocab_parallel.vocabulary.identity import VocabIdentity

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
        self.entries: dict[int, tuple[str, bytes]] = {}

    def put(self, token_id: object, kind: str, token: bytes, place: str) -> None:
        """Adds the entry of an id; a second one for the same id is an error."""
        if type(token_id) is not int or not 0 <= token_id < MAX_IDS:
            what = f"expected an id in [0, {MAX_IDS:,}), found {shortened(token_id)}"
            raise VocabularyError(f"{self.path}: {place}: {what}")
        if token_id in self.entries:
            there = shortened(self.entries[token_id][1])
            raise VocabularyError(
                f"{self.path}: {place}: id {token_id} is {shortened(token)} here and {there} in an earlier entry"
            )
        self.entries[token_id] = (kind, token)

    def find(self, kind: str, token: bytes) -> int | None:
        """The lowest id with this kind and these bytes."""
        return min((token_id for token_id, entry in self.entries.items() if entry == (kind, token)), default=None)

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
        if not self.entries:
            raise VocabularyError(f"{self.path}: no tokens in this {self.source} file")
        last = max(self.entries)
        size = last + 1 if size is None else size
        if size > 4 * len(self.entries) + SPARE_IDS:
            what = f"{len(self.entries):,} tokens, but ids up to {size - 1:,} (the last, {last:,}, is "
            raise VocabularyError(f"{self.path}: {what}{shortened(self.entries[last][1])}); is an id damaged?")
        rows = [self.entries.get(token_id, ("unused", b"")) for token_id in range(size)]
        tokens, kinds = tuple(token for _, token in rows), tuple(kind for kind, _ in rows)
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
    for token, rank in tiktoken_ranks(data, path).items():
        table.put(rank, "normal", token, f"rank {rank}")
    for text, token_id in special_tokens.items():
        place = f"special token {shortened(text)}"
        table.put(token_id, "special", text_bytes(text, path, place), place)
    return table.identity({}, list(special_tokens.values()))


def tiktoken_ranks(data: bytes, path: object) -> dict[bytes, int]:
    """Rank by token bytes."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        found = TIKTOKEN_LINE.fullmatch(line)
        token = _base64(found[1]) if found else None
        if found is None or token is None:
            what = f"expected base64 and a rank, found {shortened(line)}"
            raise VocabularyError(f"{path}: line {number}: {what}. Is the file complete?")
        if ranks.setdefault(token, rank := int(found[2])) != rank:
            raise VocabularyError(f"{path}: line {number}: {shortened(token)} has ranks {ranks[token]} and {rank}")
    return ranks


def from_tekken(data: object, path: object) -> VocabIdentity:
    """Reads a Tekken file: special ids first, then the ranks that its vocabulary size leaves room for.

    Raises:
        VocabularyError: not such a file, or fewer ranks than its size needs.
    """
    size, count, ranks = tekken_ranks(data, path)
    reader = Reader(data, path)
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
        if rank not in table.entries:
            table.put(rank, "special", f"<SPECIAL_{rank}>".encode(), "special ids")
    for bytes_, rank in ranks.items():
        table.put(rank + count, "normal", bytes_, f"rank {rank}")
    found = {role: table.find("special", name) for role, name in TEKKEN_ROLES.items()}
    special_ids = {role: token_id for role, token_id in found.items() if token_id is not None}
    return table.identity(special_ids, size=size)


def tekken_ranks(data: object, path: object) -> tuple[int, int, dict[bytes, int]]:
    """The number of ids, how many of them are special, and the rank of each token that has an id."""
    reader = Reader(data, path)
    config = reader.inside("config")
    size, count = config.get("default_vocab_size", int), config.get("default_num_special_tokens", int)
    entries = reader.get("vocab", list)
    if not 0 <= count <= MAX_SPECIAL:
        raise config.error(config.place, f"default_num_special_tokens: {shortened(count)} outside [0, {MAX_SPECIAL}]")
    if not count <= size <= count + len(entries):
        what = f"default_vocab_size: {shortened(size)}, but {count} special ids and {len(entries)} entries of vocab"
        raise config.error(config.place, what)
    ranks: dict[bytes, int] = {}
    for place, entry in enumerate(entries):
        rank, text = (entry.get("rank"), entry.get("token_bytes")) if isinstance(entry, dict) else (None, None)
        if type(rank) is not int or not isinstance(text, str):
            raise reader.error(f"vocab[{place}]", f"expected rank and token_bytes, found {shortened(entry)}")
        if rank >= size - count:
            continue  # the file lists more ranks than the vocabulary uses
        found = _base64(text.encode("utf-8", "replace"))
        if found is None or rank < 0:
            what = f"expected base64 and a rank, found {shortened(text)}, {shortened(rank)}"
            raise reader.error(f"vocab[{place}]", what)
        if ranks.setdefault(found, rank) != rank:
            raise reader.error(f"vocab[{place}]", f"{shortened(found)} has ranks {ranks[found]} and {rank}")
    if len(ranks) != size - count or len(set(ranks.values())) != len(ranks):
        raise reader.error("vocab", f"expected each rank below {size - count:,} once, found {len(ranks):,} tokens")
    return size, count, ranks


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
