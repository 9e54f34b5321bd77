"""Pickles and files of `torch.save` from elsewhere, looked through before anything in them is made or called.

A pickle is a program for a small machine. Even one that may call nothing but torch's own functions can have them make
more memory than any machine has, and a zip archive can hold a thousand times its own size. Here every instruction is
looked at first: what is left makes objects in proportion to the file.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING
from torch._weights_only_unpickler import _get_allowed_globals

_LARGEST_PICKLE = 2**28  # of the structure beside the tensors
_LARGEST_TUPLE = 2**14  # entries of a tuple, those of tuples in it counted each time: what its hash looks at
_MOST_HASHED = 2**24  # entries of all tuples that are keys
_COUNTED = (str, bytes, list, dict, set)

_Load = Callable[[Any], None]
_OPCODES = (
    pickle.PROTO, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8, pickle.BINSTRING, pickle.SHORT_BINSTRING,
    pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.EMPTY_TUPLE,
    pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT,
    pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
    pickle.BINPERSID,
)  # fmt: skip


def require_archive(path: Path) -> None:
    """Raises unless weights-only loading will make no more of a file of `torch.save` than it holds.

    Raises:
        Exception: As `check_archive`; `OSError` of what is no file.
    """
    if unknown := names_in(path):
        raise UnsafeFile(f"it names {min(unknown)[:80]}")


def names_in(path: Path) -> set[str]:
    """`check_archive` of a file by its path."""
    if path.exists() and not path.is_file():
        raise OSError("it is no regular file")  # a pipe would be waited for
    with path.open("rb") as file:
        return check_archive(file, os.fstat(file.fileno()).st_size)


def check_archive(file: IO[bytes], size: int) -> set[str]:
    """Looks through a file of `torch.save`, of `size` bytes, without making anything of it.

    Returns:
        The names of classes and functions in it that weights-only loading does not know.

    Raises:
        UnsafeFile: Records that are compressed, lie over each other or stand twice, so that more would be made than
            the file holds; a storage that is no record; a call that makes memory out of a number.
        Exception: It is damaged: zipfile and pickle raise nearly anything.
    """
    records = _records(file, size)
    dry = _Dry(records.pop("data.pkl"), records)
    dry.load()
    known: dict[str, Any] = _get_allowed_globals()
    return dry.names - known.keys()


class UnsafeFile(Exception):
    """What no file of `torch.save` has, and a file that was made to do harm could."""


def _after(opcode: bytes) -> _Load:
    """An instruction that makes a tuple, which is then measured."""
    load: _Load = pickle._Unpickler.dispatch[opcode[0]]

    def measured(self: Any) -> None:
        load(self)
        self.measure(self.stack[-1])

    return measured


def _before(opcode: bytes, check: _Load) -> _Load:
    """An instruction before which something is checked."""
    load: _Load = pickle._Unpickler.dispatch[opcode[0]]

    def checked(self: Any) -> None:
        check(self)
        load(self)

    return checked


class PlainUnpickler(pickle._Unpickler):
    """An unpickler that makes objects in proportion to the pickle; what a subclass lets it name decides on the rest.

    In Python, as the one in C fills a table as long as the largest number that a pickle gives one of its objects.
    """

    stack: list[Any]
    counted: ClassVar[tuple[type, ...]] = (tuple,)  # what a hash looks into

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        super().__init__(self._file)
        self._sizes: dict[int, int] = {}  # of tuples with tuples in them, which are kept so that no other has their id
        self._kept: list[tuple[Any, ...]] = []
        self._hashed = self._given = 0
        self._most_given = 4 * len(data) + 2**16

    def load(self) -> Any:
        """As Python's, without its frames, which take a fifth of its time."""
        self.metastack: list[list[Any]] = []
        file, self.stack, self.proto = self._file, [], 0
        self.append = self.stack.append
        self.read, self.readline, self.readinto = file.read, file.readline, file.readinto
        read, dispatch = file.read, self.dispatch
        try:
            while key := read(1):
                dispatch[key[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        except KeyError as error:
            what = str(error)[:80]
            raise UnsafeFile(f"an instruction or a name, {what}, that such a pickle has no use for") from error
        raise EOFError("it ends within its structure")

    def hand_over(self, given: Any) -> int:
        """Counts what a call is given: it may be given the same thing again and again, and copies it each time."""
        count = sum(len(one) if isinstance(one, _COUNTED) else self._size(one) for one in given)
        self._given += count
        if self._given > self._most_given:
            raise UnsafeFile("calls that copy one value again and again")
        return count

    dispatch: ClassVar[dict[int, _Load]] = {
        **{opcode[0]: pickle._Unpickler.dispatch[opcode[0]] for opcode in _OPCODES},
        pickle.FRAME[0]: lambda self: self.read(8),
        **{one[0]: _after(one) for one in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)},
        **{one[0]: _before(one, lambda self: self.hand_over(self.stack[-1])) for one in (pickle.REDUCE, pickle.NEWOBJ)},
        pickle.SETITEM[0]: _before(pickle.SETITEM, lambda self: self.count(self.stack[-2:-1])),
        pickle.SETITEMS[0]: _before(pickle.SETITEMS, lambda self: self.count(self.stack[::2])),
        pickle.ADDITEMS[0]: _before(pickle.ADDITEMS, lambda self: self.count(self.stack)),
        pickle.BUILD[0]: _before(pickle.BUILD, lambda self: self.require_buildable(self.stack[-2])),
    }

    def require_buildable(self, made: Any) -> None:
        """Raises unless the pickle has made it, and it has attributes: classes and constants are not its own."""
        if not dataclasses.is_dataclass(made) or isinstance(made, (type, enum.Enum)):
            name = getattr(made, "__qualname__", type(made).__qualname__)
            raise UnsafeFile(f"it changes the classes or constants that it names: {name!s:.80}")

    def measure(self, made: tuple[Any, ...]) -> None:
        """Counts the entries of a tuple."""
        size = len(made)
        if inner := [one for one in made if isinstance(one, self.counted)]:
            self._sizes[id(made)] = size = size + sum(map(self._size, inner))
            self._kept.append(made)
        if size > _LARGEST_TUPLE:
            raise UnsafeFile(f"a tuple of more than {_LARGEST_TUPLE:,} entries")

    def count(self, keys: list[Any]) -> None:
        """Counts the entries of keys."""
        self._hashed += sum(self._size(one) for one in keys if type(one) is not str)
        if self._hashed > _MOST_HASHED:
            raise UnsafeFile("keys that take for ever to compare")

    def _size(self, one: Any) -> int:
        """Of a tuple its entries, with those of tuples in it; 0 of anything else."""
        return self._sizes.get(id(one), len(one)) if isinstance(one, tuple) else 0


class _Named:
    """Stands for a class or a function that a pickle names."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """Stands for what a call would have made, of what was counted; whatever is put into it is forgotten."""

    def __init__(self, name: str, size: int = 0) -> None:
        self.name, self.size = name, size

    def forget(self, *_: Any) -> None:
        """Takes the place of an object's own methods."""

    __setitem__ = append = extend = add = forget


class _Dry(PlainUnpickler):
    """Goes through a pickle and makes nothing but lists, dictionaries and texts."""

    counted = (tuple, _Made)

    def __init__(self, data: bytes, records: Mapping[str, Any]) -> None:
        super().__init__(data)
        self.records, self.names = records, set[str]()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in NAME_MAPPING:  # the names of Python 2, which protocol 2 writes
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        self.names.add(f"{module}.{name}")
        return _Named(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        _, kind, key, _, count = pid
        record = self.records[f"data/{key}"]
        name = kind.name.rpartition(".")[2]
        storage: Any = torch.serialization.StorageType
        itemsize = 1 if name == "UntypedStorage" else storage(name).dtype.itemsize
        if count * itemsize != record:
            raise UnsafeFile(f"a storage of {count} numbers whose record has {record} bytes")
        return _Made("storage")

    def load_reduce(self) -> None:
        given, what = self.stack.pop(), self.stack[-1]
        if not isinstance(what, _Named) or not _may_call(what.name, given):
            raise UnsafeFile(f"a call of {getattr(what, 'name', type(what))!s:.80} that makes memory out of a number")
        self.stack[-1] = _Made(what.name, self.hand_over(given))

    def _size(self, one: Any) -> int:
        return one.size if isinstance(one, _Made) else super()._size(one)

    def load_build(self) -> None:
        self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, _Made) or made.name.startswith(("torch._utils.", "torch._tensor.", "storage")):
            raise UnsafeFile(f"it sets what a {getattr(made, 'name', type(made).__name__)!s:.80} is made of")

    dispatch: ClassVar[dict[int, _Load]] = {
        **PlainUnpickler.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.BUILD[0]: load_build,
    }


_REBUILT = {
    f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "parameter",
                                                 "parameter_with_state")
}  # fmt: skip
_COPIES = {"collections.OrderedDict", "collections.Counter", "torch.Size", "builtins.set"}
_FINE = _REBUILT | {
    "torch.device", "torch.serialization._get_layout", "builtins.complex", "torch.nn.parameter.Parameter",
}  # fmt: skip


def _may_call(name: str, given: Any) -> bool:
    """Whether a call makes no more than it is given; what weights-only loading does not know, it never calls."""
    if not isinstance(given, tuple):
        return False
    if name in _FINE or name not in _get_allowed_globals():
        return True
    if name in _COPIES:  # of what a call has made, the size is not known here
        return not any(isinstance(one, _Made) for one in given)
    if name == "_codecs.encode":
        return len(given) == 2 and isinstance(given[0], str) and given[1] in ("latin1", "latin-1")
    if name == "builtins.bytearray":
        is_text = not given or isinstance(given[0], str) or getattr(given[0], "name", "") == "_codecs.encode"
        return is_text and given[1:] in ((), ("latin-1",))
    return name == "torch._tensor._rebuild_from_type_v2" and getattr(given[0], "name", "") in _REBUILT


def _records(file: IO[bytes], size: int) -> dict[str, Any]:
    """The sizes of an archive's records by name, and the content of its pickle."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        total = sum(info.file_size for info in entries)
        if any(info.compress_type or info.compress_size != info.file_size for info in entries) or total > size:
            raise UnsafeFile(f"records of {total:,} bytes in {size:,}, or compressed ones")
        names = {info.filename.casefold() for info in entries}
        folders = {info.filename.partition("/")[0] for info in entries}
        begins = min((info.header_offset for info in entries), default=0)
        if len(names) != len(entries) or len(folders) != 1 or begins or archive.comment:
            raise UnsafeFile("records of one name twice, of several archives, or something before or after them")
        found: dict[str, Any] = {info.filename.partition("/")[2]: info.file_size for info in entries}
        if found.get("data.pkl", 0) > _LARGEST_PICKLE:
            raise UnsafeFile(f"a structure of {found['data.pkl']:,} bytes beside its tensors")
        with archive.open(f"{folders.pop()}/data.pkl") as record:
            vars(record)["_expected_crc"] = None  # torch.save may be told not to compute it
            found["data.pkl"] = record.read()
    return found
