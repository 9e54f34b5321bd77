"""Vocabularies for the app: Tekken (131,072 ids) and plain bytes (259 ids)."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from vocab_parallel.errors import ConfigError

TEKKEN_FILE = "tekken_240911.json"


def open_vocabulary(name: str) -> Vocabulary:
    """The vocabulary called ``tekken`` or ``bytes``.

    Raises:
        ConfigError: the package that carries the vocabulary is missing, or the name is unknown.
    """
    if name == "tekken":
        return Tekken(tekken_path())
    if name == "bytes":
        return ByteVocabulary()
    raise ConfigError(f"data.vocab: expected tekken or bytes, got {name!r}")


class Vocabulary(Protocol):
    """What training and generation need of a vocabulary."""

    size: int
    bos: int
    eos: int
    sha256: str

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        """Token ids of each text, without bos and eos."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special ids have no text and are left out."""

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The same as UTF-8, which may begin or end within a character."""


class Tekken:
    """Mistral's Tekken vocabulary: 1,000 special ids, then byte-pair ranks; id = rank + 1000.

    Args:
        path: the JSON file, which `mistral-common` carries.
    """

    bos = 1
    eos = 2

    def __init__(self, path: Path) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ConfigError("data.vocab=tekken needs tiktoken: pip install 'vocab-parallel[train]'") from error
        raw = path.read_bytes()
        table = json.loads(raw)
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.size = int(table["config"]["default_vocab_size"])
        self.num_special = int(table["config"]["default_num_special_tokens"])
        # The file lists more ranks than the vocabulary uses; the first size - num_special of them are real ids.
        entries = table["vocab"][: self.size - self.num_special]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in entries}
        pattern = table["config"]["pattern"]
        self._encoding = tiktoken.Encoding("tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        batch = self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        return [[rank + self.num_special for rank in ranks] for ranks in batch]

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return self._encoding.decode_bytes([token - self.num_special for token in ids if token >= self.num_special])


class ByteVocabulary:
    """256 bytes after pad, bos and eos: an odd, small V with no package behind it."""

    size = 259
    bos = 1
    eos = 2
    sha256 = hashlib.sha256(b"bytes: pad bos eos, then the 256 bytes in order").hexdigest()

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
        return [[byte + 3 for byte in text.encode("utf-8", "surrogatepass")] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(token - 3 for token in ids if token >= 3)


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
