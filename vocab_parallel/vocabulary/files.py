"""Small files, read with limits and written whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vocab_parallel.errors import VocabularyError

MAX_FILE_BYTES = 2**28  # the largest tokenizer files of 2026 have 40 MB
MAX_IDS = 2**24
MAX_LISTS = 2**23  # lists and objects of one JSON file: merges of a tokenizer are half a million


def read_bytes(path: str | os.PathLike[str], limit: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        VocabularyError: the file is larger, or not a file (a pipe would be waited for).
        OSError: it is missing or cannot be read.
    """
    path = require_file(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        raise VocabularyError(f"{path} has more than {limit:,} bytes: no file of this kind is that large")
    return data


def require_file(path: str | os.PathLike[str]) -> Path:
    """The path of what is a regular file, or is not there; `VocabularyError` for anything else."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise VocabularyError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}; expected a file")
    return path


def parse_json(data: bytes, path: object, most: int = MAX_LISTS) -> Any:
    """Parses JSON; what is wrong with it, and where, is a `VocabularyError`.

    Args:
        most: lists and objects in it. What the parser will make is bounded by counts of characters, before it runs.
    """
    if too_many(data, most):
        raise VocabularyError(f"{path}: more than {most:,} lists and objects or {4 * most:,} values in one file")
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=each_once, parse_constant=no_constant)
    except RepeatedKey as error:
        raise VocabularyError(f"{path}: the key {shortened(str(error))} appears twice in one object") from error
    except UnicodeDecodeError as error:
        raise VocabularyError(f"{path}: not UTF-8 at byte {error.start}; expected JSON text") from error
    except json.JSONDecodeError as error:
        raise VocabularyError(
            f"{path}: not JSON at line {error.lineno} column {error.colno}: {error.msg}. Is the file complete?"
        ) from error
    except RecursionError as error:
        raise VocabularyError(f"{path}: JSON nested too deeply") from error
    except ValueError as error:  # a number of more than 4,300 digits
        raise VocabularyError(f"{path}: not JSON: {error}") from error


def too_many(data: bytes, most: int) -> bool:
    """Whether JSON text may hold more than so many lists and objects, or four times as many values."""
    return too_many_counted(data.count(b"[") + data.count(b"{"), data.count(b","), most)


def too_many_counted(openings: int, commas: int, most: int) -> bool:
    """The same, by the number of opening brackets and of commas."""
    return openings > most or commas > 4 * most


def no_constant(name: str) -> float:
    """Refuses NaN and Infinity."""
    raise ValueError(f"{name} is not a JSON number")


class RepeatedKey(Exception):
    """A key that appears twice; JSON readers disagree on which one counts."""


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; `RepeatedKey` if a key is twice in them."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        raise RepeatedKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return found


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file aside, flushes it to disk and renames it: nobody sees half of it under its name."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


class Packed:
    """What is kept of a long list or object of a JSON file, see `json_stream`.

    Attributes:
        kind: list or dict.
    """

    kind: type = list

    def __len__(self) -> int:
        raise NotImplementedError


class Reader:
    """Typed reads of one JSON object; each error names the file, the place and both sides.

    Args:
        value: what was parsed.
        path: the file, for messages.
        place: where in the file, such as ``model.vocab``; empty at the top.
    """

    def __init__(self, value: object, path: object, place: str = "") -> None:
        self.path = path
        self.place = place
        self.value: dict[str, Any] = self.require(value, dict, place)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value at `key`, of this type; `default` where it is absent or null, if one is given."""
        found = self.value.get(key)
        if found is None and default is not ...:
            return default
        return self.require(found, kind, f"{self.place}.{key}" if self.place else key)

    def inside(self, key: str) -> Reader:
        """A reader of the object at `key`."""
        place = f"{self.place}.{key}" if self.place else key
        return Reader(self.value.get(key), self.path, place)

    def require(self, value: object, kind: type | tuple[type, ...], place: str) -> Any:
        """Returns `value` if it is of this type; a bool is not an integer here."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if isinstance(value, Packed) and value.kind in kinds:
            return value
        if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
            return value
        wanted = " or ".join(NAMES.get(kind, kind.__name__) for kind in kinds)
        raise self.error(place, f"expected {wanted}, found {shortened(value)}")

    def error(self, place: str, what: str) -> VocabularyError:
        """The error for this place."""
        return VocabularyError(f"{self.path}: {place or 'top level'}: {what}")


NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}


def shortened(value: object, limit: int = 60) -> str:
    """`value` for a message; a long one is cut, a container is only named."""
    if isinstance(value, (dict, list, Packed)):
        kind = value.kind if isinstance(value, Packed) else type(value)
        return f"{NAMES[kind]} of {len(value)}"
    if value is None:
        return "nothing"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def text_bytes(text: str, path: object, place: str) -> bytes:
    """UTF-8 of `text`; half a surrogate pair has none and is a `VocabularyError`."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise VocabularyError(f"{path}: {place}: {shortened(text)} is not Unicode text (a lone surrogate)") from error
