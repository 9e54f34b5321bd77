"""The ordered table of a Hugging Face ``tokenizer.json``, and the roles in the files beside it."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS, Packed, Reader, parse_json, read_bytes, shortened, text_bytes
from vocab_parallel.vocabulary.formats.tables import BYTE_PIECE, Table
from vocab_parallel.vocabulary.identity import ROLES, VocabIdentity
from vocab_parallel.vocabulary.packed import TableEntries, all_differ

SOURCE = "tokenizer.json"
ROLE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_LISTS = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")


class Beside(NamedTuple):
    """What the files beside a tokenizer.json say.

    Attributes:
        roles: Role ("bos", "eos", ...) to the content of its token.
        listed: Contents of further tokens, which Transformers adds if the tokenizer lacks them.
    """

    roles: Mapping[str, str]
    listed: tuple[str, ...] = ()


def from_tokenizer_json(data: object, path: object, beside: Beside | None = None) -> VocabIdentity:
    """Reads the parsed file: the model's vocabulary and the added tokens, which may lie inside it or past it.

    Byte-level tokens become their bytes, a word-boundary mark becomes a space, ``<0x41>`` of a model with byte
    fallback becomes a byte piece. WordPiece's ``##`` and a ``</w>`` suffix stay: they are part of what a row means.

    Args:
        data: the parsed file.
        path: its name, for messages.
        beside: what the files beside it say.

    Raises:
        VocabularyError: not such a file.
    """
    reader = Reader(data, path)
    table = Table(path, SOURCE)
    decode = _Decoder(reader)
    words = _model_words(reader.inside("model"))
    added, beside = _added_tokens(reader), beside or Beside({})
    named = {content for content, _ in added.values()}.union(beside.roles.values(), beside.listed)
    ids = _given_ids(reader, words, added, named)
    unknown = _unknown(reader.inside("model"), words)
    for token_id, content in words.items():
        if token_id in added:
            continue
        place = f"model.vocab {shortened(content)}"
        if token_id == unknown:
            table.put(token_id, "special", text_bytes(content, path, place), place)
        else:
            table.put(token_id, *decode(content, place), place)
    for token_id, (content, special) in added.items():
        place = f"added_tokens {shortened(content)}"
        if special or token_id == unknown:
            table.put(token_id, "special", text_bytes(content, path, place), place)
        else:
            table.put(token_id, "normal", decode.added(content, place), place)
    return table.identity(_role_ids(beside, ids, unknown, path), list(added))


def read_beside(folder: Path) -> Beside:
    """What ``tokenizer_config.json``, and after it ``special_tokens_map.json``, say of tokens."""
    roles: dict[str, str] = {}
    listed: list[str] = []
    for path in (folder / name for name in ROLE_FILES if (folder / name).is_file()):
        reader = Reader(parse_json(read_bytes(path), path), path)
        for key, value in reader.value.items():
            role, content = key.removesuffix("_token"), _content(value)
            if role in ROLES and value is not None:
                reader.require(content, str, key)
            if role != key and isinstance(content, str):  # add_bos_token is a switch, num_image_token a count
                roles.setdefault(role, content)
            elif key in _LISTS and isinstance(value, (dict, list)):
                entries = map(_content, value.values() if isinstance(value, dict) else value)
                listed.extend(content for content in entries if isinstance(content, str))
    return Beside(roles, tuple(listed))


class _Decoder:
    """What a token adds to decoded text, by the file's own decoder; as (kind, bytes)."""

    def __init__(self, reader: Reader) -> None:
        self.path = reader.path
        steps = [step for part in ("normalizer", "pre_tokenizer", "decoder") for step in _steps(reader.value.get(part))]
        names = {step.get("type") for step in steps if isinstance(step.get("type"), str)}
        model = reader.inside("model").value
        self.byte_level = "ByteLevel" in names
        self.byte_fallback = model.get("byte_fallback") is True or "ByteFallback" in names
        self.mark = next(filter(None, map(_mark, steps)), None)
        self.alphabet = byte_alphabet()

    def __call__(self, token: str, place: str) -> tuple[str, bytes]:
        if self.byte_fallback and (found := BYTE_PIECE.fullmatch(token)):
            return "byte", bytes.fromhex(found[1])
        if self.byte_level:
            try:
                return "normal", bytes([self.alphabet[letter] for letter in token])
            except KeyError:  # a token of the model that is outside the byte alphabet stands for its own text
                pass
        return "normal", self.added(token, place)

    def added(self, token: str, place: str) -> bytes:
        """The bytes of an added token that is not special: its text, word-boundary marks as spaces."""
        return text_bytes(token.replace(self.mark, " ") if self.mark else token, self.path, place)


def byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in byte-level tables: itself if printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _steps(part: object) -> Iterator[dict[str, Any]]:
    """Every step of a normalizer, pre-tokenizer or decoder, those inside sequences included."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
            for key in ("normalizers", "pretokenizers", "decoders"):
                waiting.extend(step[key] if isinstance(step.get(key), list) else [])


def _mark(step: dict[str, Any]) -> str | None:
    """The word-boundary mark that a step writes for spaces, or reads back to spaces."""
    if step.get("type") == "Metaspace":
        mark = step.get("replacement", "▁")
    elif step.get("type") == "Replace" and isinstance(step.get("pattern"), dict):
        pair = step["pattern"].get("String"), step.get("content")
        mark = pair[1] if pair[0] == " " else pair[0] if pair[1] == " " else None
    else:
        return None
    return mark if isinstance(mark, str) and len(mark) == 1 and not mark.isspace() else None


class PackedWords(Packed, Mapping[int, str]):
    """The "vocab" of a model: content by id, in the order of the file."""

    def __init__(self, kind: type, entries: TableEntries) -> None:
        self.kind, self._entries = kind, entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries.ids)

    def __getitem__(self, token_id: int) -> str:
        if (place := self._entries.place(token_id)) < 0:
            raise KeyError(token_id)
        return self._entries.content(place).decode()

    def items(self) -> Any:
        """Each id with its content."""
        return zip(self._entries.ids, map(bytes.decode, self._entries.contents()), strict=True)


def pack_words(kind: type, entries: Iterator[tuple[Any, Any]]) -> PackedWords:
    """Packs the "vocab" of a model, see `json_stream`; each id, and each content of an object, once."""
    found, hashes = TableEntries(), array("q")
    for key, value in entries:
        token_id, content = value, key
        if kind is list:
            token_id, content = key, value[0] if isinstance(value, list) and value else None
        else:
            hashes.append(hash(content))
        good = type(token_id) is int and 0 <= token_id < MAX_IDS and isinstance(content, str)
        if not good or found.place(token_id) >= 0:
            raise ValueError("unusual")
        found.add(token_id, content.encode())
    if not all_differ(hashes):
        raise ValueError("unusual")
    return PackedWords(kind, found)


class PackedMerges(Packed):
    """The "merges" of a model: only their number."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


def pack_merges(kind: type, entries: Iterator[tuple[Any, Any]]) -> PackedMerges:
    """Counts the "merges" of a model, see `json_stream`: they say nothing of the table."""
    if kind is not list:
        raise ValueError("no list")
    return PackedMerges(sum(1 for _ in entries))


def _model_words(model: Reader) -> Mapping[int, str]:
    """Content by id."""
    vocab: Any = model.get("vocab", (dict, list))
    if isinstance(vocab, PackedWords):
        return vocab
    words: dict[int, str] = {}
    if isinstance(vocab, list):  # Unigram: [piece, score], by id
        for token_id, pair in enumerate(vocab):
            if not isinstance(pair, list) or not pair or not isinstance(pair[0], str):
                raise model.error(f"model.vocab[{token_id}]", f"expected [piece, score], found {shortened(pair)}")
            words[token_id] = pair[0]
        return words
    for content, token_id in vocab.items():
        if type(token_id) is not int:
            raise model.error(f"model.vocab {shortened(content)}", f"expected an id, found {shortened(token_id)}")
        if words.setdefault(token_id, content) is not content:
            both = f"{shortened(words[token_id])} and {shortened(content)}"
            raise model.error("model.vocab", f"id {shortened(token_id)} is both {both}")
    return words


def _added_tokens(reader: Reader) -> dict[int, tuple[str, bool]]:
    added: dict[int, tuple[str, bool]] = {}
    for place, entry in enumerate(reader.get("added_tokens", list, [])):
        token = Reader(entry, reader.path, f"added_tokens[{place}]")
        token_id = token.get("id", int)
        if token_id in added:
            both = f"{shortened(added[token_id][0])} and {shortened(token.get('content', str))}"
            raise reader.error(token.place, f"id {shortened(token_id)} is both {both}")
        added[token_id] = token.get("content", str), token.get("special", bool, False)
    return added


def _given_ids(
    reader: Reader, words: Mapping[int, str], added: Mapping[int, tuple[str, bool]], named: Container[str]
) -> dict[str, int]:
    """Id by content of what is `named`, as the tokenizers library gives them when it loads the file.

    It does not take an added token's id from the file, but gives it that of an equal token of the model, else the next
    free one. Where these differ a text gets other rows than the file says (huggingface/transformers#48446).
    """
    known, last = {content: token_id for token_id, content in words.items() if content in named}, -1
    for token_id, (content, _) in added.items():
        if content and content not in known:  # it leaves an empty one out
            last = known[content] = max(last + 1, len(words))
        here = shortened(content)
        if known.get(content, token_id) != token_id:
            raise reader.error(
                "added_tokens", f"{here} has id {token_id}, but the tokenizers library gives it id {known[content]} "
                "when it loads the file: texts would get other rows. Fill the ids between, or take the file that "
                "Tokenizer.from_file(...).save(...) writes, if the model was trained with those ids"
            )  # fmt: skip
        if words.get(token_id, content) != content:
            what = f"id {token_id} is {here} here and {shortened(words[token_id])} in model.vocab"
            raise reader.error("added_tokens", f"{what}; save the tokenizer again")
    return known


def _unknown(model: Reader, words: Mapping[int, str]) -> int | None:
    """The id of the model's own unknown token."""
    vocab = model.value.get("vocab")
    if (vocab.kind if isinstance(vocab, Packed) else type(vocab)) is list:
        number = model.get("unk_id", int, None)
        return None if number is None or number not in words else number
    content = model.get("unk_token", str, None)
    return None if content is None else next((key for key, word in words.items() if word == content), None)


def _content(entry: object) -> object:
    return entry.get("content") if isinstance(entry, dict) else entry


def _role_ids(beside: Beside, ids: Mapping[str, int], unknown: int | None, path: object) -> dict[str, int]:
    needed = {content: f"{role} token" for role, content in beside.roles.items() if role in ROLES}
    for content, what in [*needed.items(), *((content, "added token") for content in beside.listed)]:
        if content not in ids:
            raise VocabularyError(
                f"{path}: the {what} {shortened(content)} of the files beside it is no token here; Transformers "
                "would add it while loading: load the tokenizer there once and save_pretrained() it again"
            )
    found = {role: ids[content] for role, content in beside.roles.items() if content in ids}
    return found if unknown is None else {"unk": unknown, **found}
