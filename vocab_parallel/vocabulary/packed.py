"""Long lists of small things in a few bytes each: a table of tokens in Python objects takes some 100 bytes a token."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, overload

import torch

from vocab_parallel.errors import VocabularyError

_FEW = 2**12  # entries that are unpacked at a time


class PackedBytes(Sequence[bytes]):
    """An immutable sequence of bytes, equal to a tuple of the same; it takes 4 bytes an entry beside the bytes.

    Args:
        entries: what it holds.

    Raises:
        VocabularyError: more than 4 GiB together.
    """

    __slots__ = ("_blob", "_ends")

    def __init__(self, entries: Iterable[bytes] = ()) -> None:
        blob, ends = bytearray(), array("I")
        for entry in entries:
            blob += entry
            _push(ends, len(blob))
        self._blob, self._ends = bytes(blob), ends

    def padded(self, count: int) -> PackedBytes:
        """The same, and `count` times ``b""`` after it."""
        made = PackedBytes()
        made._blob, made._ends = self._blob, self._ends + array("I", [len(self._blob)]) * count
        return made

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[bytes]:
        start, blob = 0, self._blob
        for end in self._ends:
            yield blob[start:end]
            start = end

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, place: int | slice) -> bytes | tuple[bytes, ...]:
        if isinstance(place, slice):
            return tuple(self[at] for at in range(*place.indices(len(self))))
        end = self._ends[place]
        at = place % len(self._ends)
        return self._blob[self._ends[at - 1] if at else 0 : end]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedBytes):
            return self._ends == other._ends and self._blob == other._blob
        return isinstance(other, (tuple, PackedBytes)) and _equal(self, other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self):,} entries of bytes>"


class PackedNames(Sequence[str]):
    """An immutable sequence of a few names, a byte each, equal to a tuple of the same.

    Args:
        names: all that there are; fewer than 256.
        codes: for each entry, the place of its name in `names`.
    """

    __slots__ = ("codes", "names")

    def __init__(self, names: tuple[str, ...], codes: bytes) -> None:
        self.names, self.codes = names, codes

    @classmethod
    def of(cls, names: tuple[str, ...], entries: Iterable[str]) -> PackedNames:
        """Packs `entries`, all of them in `names`."""
        code = {name: at for at, name in enumerate(names)}
        return cls(names, bytes(code[entry] for entry in entries))

    def padded(self, name: str, count: int) -> PackedNames:
        """The same, and `count` times `name` after it."""
        return PackedNames(self.names, self.codes + bytes([self.names.index(name)]) * count)

    def places(self, name: str) -> Iterator[int]:
        """Where `name` is, ascending."""
        code, at = self.names.index(name), -1
        while (at := self.codes.find(code, at + 1)) >= 0:
            yield at

    def count(self, value: Any) -> int:
        """How many entries are `value`."""
        return self.codes.count(self.names.index(value)) if value in self.names else 0

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[str]:
        return map(self.names.__getitem__, self.codes)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
        if isinstance(place, slice):
            return tuple(map(self.names.__getitem__, self.codes[place]))
        return self.names[self.codes[place]]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedNames) and other.names == self.names:
            return self.codes == other.codes
        return isinstance(other, (tuple, PackedNames)) and _equal(self, other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self):,} names>"


class PackedLists(Mapping[int, tuple[int, ...]]):
    """An immutable mapping of an integer to a few integers, in ascending order of its keys.

    Args:
        entries: pairs of a key and its integers, each key once, all of them in [0, 2^31).
    """

    __slots__ = ("_ends", "_keys", "_values")

    def __init__(self, entries: Iterable[tuple[int, Sequence[int]]] = ()) -> None:
        keys, ends, values = array("i"), array("I"), array("i")
        for key, value in entries:
            if keys and key <= keys[-1]:
                raise ValueError(f"key {key} after {keys[-1]}")
            keys.append(key)
            values.extend(value)
            _push(ends, len(values))
        self._keys, self._ends, self._values = keys, ends, values

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __getitem__(self, key: int) -> tuple[int, ...]:
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            raise KeyError(key)
        return tuple(self._values[self._ends[at - 1] if at else 0 : self._ends[at]])

    def __repr__(self) -> str:
        return f"<lists of {len(self):,} keys>"


class TableEntries:
    """Bytes by id, as they are read from a file: each id once, in any order.

    Ids far beyond the number of entries are kept apart, so that none sizes memory by itself.
    """

    spare = 2**16

    def __init__(self) -> None:
        self.ids = array("i")
        self._ends, self._blob = array("I"), bytearray()
        self._places, self._far = array("i"), dict[int, int]()

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, token_id: int, content: bytes) -> None:
        """Adds an entry; the id has none yet and is not negative."""
        place = len(self.ids)
        self.ids.append(token_id)
        self._blob += content
        _push(self._ends, len(self._blob))
        if token_id < len(self._places):
            self._places[token_id] = place
        elif token_id < 4 * place + self.spare:
            self._places.extend(array("i", [-1]) * (token_id + 1 - len(self._places)))
            self._places[token_id] = place
        else:
            self._far[token_id] = place

    def place(self, token_id: int) -> int:
        """The number of the entry of an id; -1 if it has none."""
        found = self._places[token_id] if 0 <= token_id < len(self._places) else -1
        return self._far.get(token_id, -1) if found < 0 and self._far else found

    def content(self, place: int) -> bytes:
        """The bytes of an entry, by its number."""
        return bytes(self._blob[self._ends[place - 1] if place else 0 : self._ends[place]])

    def contents(self) -> Iterator[bytes]:
        """The bytes of each entry, in the order of the file."""
        return map(self.content, range(len(self.ids)))


def all_differ(hashes: array[int]) -> bool:
    """Whether no two of these 64-bit hashes (of type "q") are equal."""
    if len(hashes) < 2:
        return True
    ordered = torch.frombuffer(hashes, dtype=torch.int64).sort().values
    return not bool((ordered[1:] == ordered[:-1]).any())


def batches(entries: Iterable[Any], size: int = _FEW) -> Iterator[list[Any]]:
    """The entries, some at a time."""
    rest = iter(entries)
    while batch := list(islice(rest, size)):
        yield batch


def _push(ends: array[int], end: int) -> None:
    try:
        ends.append(end)
    except OverflowError as error:
        raise VocabularyError("a table of more than 4 GiB") from error


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))
