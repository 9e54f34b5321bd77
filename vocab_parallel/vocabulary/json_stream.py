"""JSON files of tokenizers read piece by piece, their long lists packed on the way: the text is never whole in memory.

A file with anything unusual in it is parsed whole, so that what is refused, and in which words, is `parse_json`'s.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from vocab_parallel.vocabulary.files import (
    MAX_FILE_BYTES,
    MAX_LISTS,
    RepeatedKey,
    each_once,
    no_constant,
    parse_json,
    read_bytes,
    require_file,
    too_many_counted,
)

_CHUNK = 2**16
_SPACE = re.compile(r"[ \t\n\r]*")
_AFTER = " \t\n\r,:]}"  # what follows a value inside a list or an object

Place = tuple[str, ...]  # the keys on the way to a value
# list or dict, and (index, value) or (key, value) of each entry -> what to keep
Packer = Callable[[type, Iterator[tuple[Any, Any]]], object]


def parse_packed(path: str | os.PathLike[str], packers: Mapping[Place, Packer]) -> Any:
    """What `parse_json(read_bytes(path), path)` gives; but at each place of `packers`, what the packer made of it.

    Args:
        packers: of lists and objects that are long. Each takes all entries, keys of an object that come twice too, and
            raises ValueError for one that it does not know: then nothing is packed.

    Memory:
        Two chunks of 64 KiB, the largest single value, and what the packers keep.

    Raises:
        VocabularyError: as `parse_json`.
        OSError: the file is missing or cannot be read.
    """
    path = require_file(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_FILE_BYTES:
                raise ValueError("too large")
            return _Parser(file, packers).document()
    except (ValueError, RecursionError, RepeatedKey):
        return parse_json(read_bytes(path), path)


class _Parser:
    """A document in chunks; whatever is unusual is a ValueError."""

    def __init__(self, file: IO[bytes], packers: Mapping[Place, Packer]) -> None:
        self._file, self._packers = file, packers
        self._inner = {place[:length] for place in packers for length in range(len(place))}
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        decoder: Any = json.JSONDecoder(object_pairs_hook=each_once, parse_constant=no_constant)
        self._scan: Callable[[str, int], tuple[Any, int]] = decoder.scan_once
        self._text, self._at = "", 0
        self._openings, self._commas = 0, 0

    def document(self) -> Any:
        """The value of the file, and nothing after it."""
        found = self._value(())
        while True:
            if self._text[self._at :].strip(" \t\n\r"):
                raise ValueError("more than one value")
            self._at = len(self._text)
            if not self._more():
                return found

    def _value(self, place: Place) -> Any:
        opening = self._next(step=0)
        if place in self._packers and opening in "[{":
            return self._packers[place](list if opening == "[" else dict, self._entries(None))
        if place in self._inner and opening == "{":
            return each_once(list(self._entries(place)))
        return self._whole()

    def _entries(self, place: Place | None) -> Iterator[tuple[Any, Any]]:
        """The entries of a list or an object that begins here; of an object at `place`, others inside it are packed."""
        named = self._next() == "{"
        end = "}" if named else "]"
        if self._next(step=0) == end:
            self._at += 1
            return
        number, sign = 0, ","
        while sign == ",":
            key: Any = number
            if named and (type(key := self._whole()) is not str or self._next() != ":"):
                raise ValueError("no key")
            yield key, self._whole() if place is None else self._value((*place, key))
            number += 1
            sign = self._next()
        if sign != end:
            raise ValueError(f"{sign!r} after a value")

    def _whole(self) -> Any:
        """The value that begins here, with all that is in it."""
        self._next(step=0)
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except (StopIteration, json.JSONDecodeError) as error:
                if not self._more():
                    raise ValueError("no value") from error
                continue
            # A number may go on in the next chunk.
            if (end < len(self._text) and self._text[end] in _AFTER) or not self._more():
                self._at = end
                return value

    def _next(self, step: int = 1) -> str:
        """The next character that is no space; `step` 0: without going past it."""
        while True:
            at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if at < len(self._text):
                self._at = at + step
                return self._text[at]
            self._at = at
            if not self._more():
                raise ValueError("the file ends within a value")

    def _more(self) -> bool:
        """Lets go of the text before here and reads on; False at the end of the file."""
        data = self._file.read(max(_CHUNK, len(self._text) - self._at))
        self._openings += data.count(b"[") + data.count(b"{")
        self._commas += data.count(b",")
        if too_many_counted(self._openings, self._commas, MAX_LISTS):
            raise ValueError("too many values")
        text = self._decoder.decode(data, final=not data)
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(data)


def begins_with_object(path: Path) -> bool:
    """Whether a file looks like a JSON object."""
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n").startswith(b"{")
