"""Vocabularies for the app: Tekken (131,072 ids), plain bytes (259 ids), or the user's own tokenizer.json."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from vocab_parallel.errors import ConfigError, VocabularyError
from vocab_parallel.vocabulary.files import read_bytes
from vocab_parallel.vocabulary.formats import find_file, read_vocabulary, tell
from vocab_parallel.vocabulary.formats.encoders import tiktoken_encoding
from vocab_parallel.vocabulary.formats.reading import open_vocabulary_file
from vocab_parallel.vocabulary.formats.tables import byte_identity, tekken_ranks
from vocab_parallel.vocabulary.formats.tokenizer_json import from_tokenizer_json, read_beside
from vocab_parallel.vocabulary.identity import VocabIdentity

TEKKEN_FILE = "tekken_240911.json"


def open_vocabulary(name: str) -> Vocabulary:
    """The vocabulary called ``tekken`` or ``bytes``, or the one of a tokenizer file.

    Args:
        name: one of the two names; or the path of a ``tokenizer.json``, of the folder that holds it, or of a Tekken
            file.

    Raises:
        ConfigError: the package that carries or runs the vocabulary is missing, there is no such name or path, the
            file is broken, or it names no token that begins or ends a text.
    """
    if name == "bytes":
        return ByteVocabulary()
    if name != "tekken" and not Path(name).exists():
        raise ConfigError(
            "data.vocab: expected tekken, bytes, or the path of a tokenizer.json or of its folder; "
            f"{name!r} is none of these"
        )
    try:
        path, folder = find_file(tekken_path() if name == "tekken" else name)
        form, table = tell(read_bytes(path), path)
        if form == "tekken":
            return Tekken(path, table)
        if form == "tokenizer.json":
            return TokenizerFile(path, table, folder or path.parent)
    except (VocabularyError, OSError) as error:
        raise ConfigError(f"data.vocab: {error}") from error
    raise _not_trained(path, form)


def require_trainable(name: str) -> None:
    """Raises `ConfigError` for what `open_vocabulary` cannot open, without the memory of a library that encodes."""
    if name == "bytes":
        return
    try:
        path, folder = find_file(tekken_path() if name == "tekken" else name)
        form, table = open_vocabulary_file(path)
        if form == "tokenizer.json":
            folder = folder or path.parent
            _bos_and_eos(from_tokenizer_json(table, path, read_beside(folder)), folder)
    except (VocabularyError, OSError) as error:
        raise ConfigError(f"data.vocab: {error}") from error
    if form not in ("tekken", "tokenizer.json"):
        raise _not_trained(path, form)


class Vocabulary(Protocol):
    """What training and generation need of a vocabulary.

    Attributes:
        identity: The ordered table, read when it is first asked for.
    """

    size: int
    bos: int
    eos: int

    @property
    def identity(self) -> VocabIdentity: ...

    @property
    def sha256(self) -> str:
        """The hash of the ordered table."""
        return self.identity.sha256

    @property
    def encoding_sha256(self) -> str:
        """A hash of all that decides how a text becomes ids: one table may be cut and merged in many ways."""
        return self.sha256

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Token ids of each text, without bos and eos."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special ids have no text and are left out."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The same as UTF-8, which may begin or end within a character."""


class Tekken(Vocabulary):
    """Mistral's Tekken vocabulary: 1,000 special ids, then byte-pair ranks; id = rank + 1000.

    Args:
        path: the JSON file, which `mistral-common` carries.
        table: its content.

    Raises:
        VocabularyError: no such table, or tiktoken is missing or refuses it.
    """

    bos = 1
    eos = 2

    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self.size, self.num_special, ranks = tekken_ranks(table, path)
        self._pattern = table["config"].get("pattern")
        self._encoding = tiktoken_encoding(ranks, path, self._pattern)
        self.path = path

    @cached_property
    def identity(self) -> VocabIdentity:
        return read_vocabulary(self.path)

    @property
    def encoding_sha256(self) -> str:
        return hashlib.sha256(f"{self.sha256} {self._pattern}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        batch = self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        return [[rank + self.num_special for rank in ranks] for ranks in batch]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        ranks = [token - self.num_special for token in ids if token >= self.num_special]
        text: bytes = self._encoding.decode_bytes(ranks)
        return text


class ByteVocabulary(Vocabulary):
    """256 bytes after pad, bos and eos: an odd, small V with no package behind it."""

    size = 259
    bos = 1
    eos = 2

    @cached_property
    def identity(self) -> VocabIdentity:
        return byte_identity()

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        return [[byte + 3 for byte in text.encode("utf-8", "surrogatepass")] for text in texts]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(token - 3 for token in ids if token >= 3)


class TokenizerFile(Vocabulary):
    """A Hugging Face ``tokenizer.json``, run by the `tokenizers` package.

    Args:
        path: the file.
        table: its content.
        folder: where ``tokenizer_config.json`` or ``special_tokens_map.json`` name the bos and eos tokens; a
            tokenizer with only one of the two uses it for both.

    Raises:
        ConfigError: the package is missing, it refuses the file, or there is neither bos nor eos.
        VocabularyError: the ordered table cannot be read.
    """

    def __init__(self, path: Path, table: dict[str, Any], folder: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(f"data.vocab={path} needs the package tokenizers: pip install tokenizers") from error
        self._identity = from_tokenizer_json(table, path, read_beside(folder))
        self.size = self.identity.size
        self.bos, self.eos = _bos_and_eos(self.identity, folder)
        model = table["model"]
        self._words = model.get("type") in ("WordPiece", "WordLevel")
        self._inside = str(model.get("continuing_subword_prefix") or "").encode()
        self._end = str(model.get("end_of_word_suffix") or "").encode()
        text = json.dumps({**table, "truncation": None, "padding": None})
        self._encoding_sha256 = hashlib.sha256(text.encode()).hexdigest()
        try:
            self._tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"data.vocab: the tokenizers package refuses {path}: {error}") from error

    @property
    def identity(self) -> VocabIdentity:
        return self._identity

    @property
    def encoding_sha256(self) -> str:
        return self._encoding_sha256

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        try:
            return [found.ids for found in self._tokenizer.encode_batch_fast(clean, add_special_tokens=False)]
        except Exception as error:  # the library raises plain Exception, of text that a model without <unk> lacks
            raise ConfigError(f"data.vocab: the tokenizer cannot encode the text: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        kinds, tokens = self.identity.kinds, self.identity.tokens
        return b"".join(self._spelled(tokens[token]) for token in ids if kinds[token] != "special")

    def _spelled(self, token: bytes) -> bytes:
        """The token within a text: words of a table of words have a space before them."""
        if self._inside and token.startswith(self._inside):
            return token.removeprefix(self._inside)
        if self._words:
            return b" " + token
        return token.removesuffix(self._end) + b" " if self._end and token.endswith(self._end) else token


def _bos_and_eos(identity: VocabIdentity, folder: Path) -> tuple[int, int]:
    """The ids that begin and end a text; a tokenizer with one of them uses it for both."""
    roles = identity.special_ids
    if "bos" not in roles and "eos" not in roles:
        raise ConfigError(
            f"data.vocab: the tokenizer in {folder} has neither a bos nor an eos token, and a text needs one to begin "
            f'and end with; name one in {folder / "tokenizer_config.json"}, such as {{"eos_token": "<|endoftext|>"}}'
        )
    bos = roles.get("bos", roles.get("eos", -1))
    return bos, roles.get("eos", bos)


def _not_trained(path: Path, form: str) -> ConfigError:
    return ConfigError(f"data.vocab: {path} is a {form}; training reads a tokenizer.json or a Tekken file")


def tekken_path() -> Path:
    """Where the installed `mistral-common` keeps the Tekken file; the package itself is not imported.

    Raises:
        ConfigError: the package or its file is missing.
    """
    spec = importlib.util.find_spec("mistral_common")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in folders:
        path = Path(folder) / "data" / TEKKEN_FILE
        if path.is_file():
            return path
    found = f"its folders {folders} hold no data/{TEKKEN_FILE}" if folders else "it is not installed"
    raise ConfigError(
        f"data.vocab=tekken reads {TEKKEN_FILE} from the package mistral-common, but {found}; "
        "pip install --no-deps mistral-common==1.13.1, or use data.vocab=bytes"
    )
