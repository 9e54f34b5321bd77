"""JSON files from elsewhere into frozen dataclasses: bounded before they are parsed, every key and type checked."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.files import parse_json, read_bytes, shortened, too_many

MAX_BYTES = 2**27  # of a file; a model with 50,000 expert tensors and their optimizer's states has 30 MB
MAX_ENTRIES = 2**20  # of a list or a mapping
MAX_TEXT = 2**16  # characters of one text
MAX_DEPTH = 32  # of free values


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointLayoutError: No such file, or not one JSON object of a possible size; naming `what` was expected.
    """
    try:
        found = parse_json(read_bytes(path, MAX_BYTES), path, MAX_ENTRIES)
    except OSError as error:
        raise CheckpointLayoutError(f"cannot read {path}, expected {what}: {error.strerror or error}") from error
    except VocabularyError as error:
        raise CheckpointLayoutError(f"{error}; expected {what}") from error
    if not isinstance(found, dict):
        raise CheckpointLayoutError(f"{path} is not {what}: expected a JSON object, got {shortened(found)}")
    return found


def parse(kind: Any, value: object, where: str) -> Any:
    """`value` of a JSON file as `kind`: a dataclass, NamedTuple, Mapping, tuple, number, text, or one of several.

    Raises:
        CheckpointLayoutError: Naming `where`, what was found and what was expected.
    """
    if kind is Any:
        return plain(value, where)
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return _one_of(kind, value, where)
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where)
    if origin is not None and issubclass(origin, Mapping):
        wanted = typing.get_args(kind)[1]
        found = _sized(dict, value, where, "an object")
        return {_key(key, where): parse(wanted, one, f"{where}.{key}") for key, one in found.items()}
    if origin is tuple or (isinstance(kind, type) and issubclass(kind, tuple)):
        return _tuple(kind, value, where)
    return _scalar(kind, value, where)


def plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy of any JSON value, bounded; tuples become lists.

    Raises:
        CheckpointLayoutError: JSON cannot hold it, such as NaN.
    """
    if depth > MAX_DEPTH:
        raise CheckpointLayoutError(f"{where}: more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        found = _sized(Mapping, value, where, "an object")
        return {_key(key, where): plain(one, f"{where}.{key}", depth + 1) for key, one in found.items()}
    if isinstance(value, (list, tuple)):
        many = _sized((list, tuple), value, where, "a list")
        return [plain(one, f"{where}[{at}]", depth + 1) for at, one in enumerate(many)]
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        _finite(value, where)
    elif value is not None and not isinstance(value, (bool, int)):
        raise CheckpointLayoutError(f"{where}: expected what JSON can hold, got {shortened(value)}")
    return value


def dump(value: Any) -> Any:
    """The reverse of `parse`: what JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: dump(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [dump(one) for one in value]
    return value


def to_text(value: Any, what: str) -> str:
    """The text of a file that `read_json` reads, a line for each key and each list of scalars: a shape is on one line.

    Raises:
        CheckpointLayoutError: It would be larger than what is read.
        ValueError: NaN or infinity.
    """
    text = _lines(value, "") + "\n"
    if len(text) > MAX_BYTES or too_many(text.encode(), MAX_ENTRIES):
        raise CheckpointLayoutError(
            f"{what} would have {len(text):,} bytes and {text.count('['):,} lists, and could not be read: at most "
            f"{MAX_BYTES:,} and {MAX_ENTRIES:,}. Are its notes, or the policy's tables, that large?"
        )
    return text


def _lines(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key)}: {_lines(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return "[\n" + ",\n".join(inner + _lines(one, inner) for one in value) + f"\n{indent}]"
    return json.dumps(value, allow_nan=False)


def nearest(key: str, known: typing.Iterable[str]) -> str:
    """A hint for an unknown key."""
    known = list(known)
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _dataclass(kind: Any, value: object, where: str) -> Any:
    found = _sized(dict, value, where, "an object")
    hints = _hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    names = [field.name for field in fields]
    prefix = f"{where}." if where else ""
    for key in found:
        if key not in names:
            known = _key(key, where)[:100]
            raise CheckpointLayoutError(f"unknown key {prefix}{known}; {nearest(known, names)}")
    for field in fields:
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if field.name not in found and not optional:
            raise CheckpointLayoutError(f"{prefix}{field.name} is missing: expected {_name(hints[field.name])}")
    return kind(**{name: parse(hints[name], found[name], prefix + name) for name in names if name in found})


def _tuple(kind: Any, value: object, where: str) -> Any:
    found = _sized(list, value, where, "a list")
    kinds = list(_hints(kind).values()) if isinstance(kind, type) else list(typing.get_args(kind))
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(parse(kinds[0], one, f"{where}[{at}]") for at, one in enumerate(found))
    if len(kinds) != len(found):
        raise CheckpointLayoutError(f"{where}: expected a list of {len(kinds)} values, got {len(found)}")
    made = [parse(one, part, f"{where}[{at}]") for at, (one, part) in enumerate(zip(kinds, found, strict=True))]
    return kind(*made) if typing.get_origin(kind) is None else tuple(made)


def _one_of(kind: Any, value: object, where: str) -> Any:
    kinds = [one for one in typing.get_args(kind) if one is not type(None)]
    if value is None:
        return None
    if len(kinds) == 1:
        return parse(kinds[0], value, where)
    for one in kinds:
        try:
            return parse(one, value, where)
        except CheckpointLayoutError:
            continue
    raise CheckpointLayoutError(f"{where}: expected {_name(kind)}, got {shortened(value)}")


def _scalar(kind: Any, value: object, where: str) -> Any:
    if kind is str:
        return _text(value, where)
    good = isinstance(value, bool) if kind is bool else isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not good:
        raise CheckpointLayoutError(f"{where}: expected {_name(kind)}, got {shortened(value)}")
    if kind is int and not -(2**63) <= value < 2**64:  # type: ignore[operator]
        raise CheckpointLayoutError(f"{where}: expected a number of at most 64 bits, got {shortened(value)}")
    if kind is float:
        _finite(value, where)
        return float(value)  # type: ignore[arg-type]
    return value


def _finite(value: Any, where: str) -> None:
    try:
        good = math.isfinite(value)
    except OverflowError:
        good = False
    if not good:
        raise CheckpointLayoutError(f"{where}: expected a finite number, got {shortened(value)}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CheckpointLayoutError(f"{where}: expected text, got {shortened(value)}")
    if len(value) > MAX_TEXT:
        raise CheckpointLayoutError(f"{where}: expected at most {MAX_TEXT:,} characters, got {len(value):,}")
    return value


def _key(value: object, where: str) -> str:
    """A key ends up in messages and tables, so it must not move a terminal's cursor."""
    text = _text(value, where)
    if not text.isprintable():
        raise CheckpointLayoutError(f"{where or 'the top'}: the key {shortened(text)} cannot be printed")
    return text


def _sized(kind: Any, value: Any, where: str, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointLayoutError(f"{where or 'the top'}: expected {wanted}, got {shortened(value)}")
    if len(value) > MAX_ENTRIES:
        raise CheckpointLayoutError(f"{where}: expected at most {MAX_ENTRIES:,} entries, got {len(value):,}")
    return value


def _name(kind: Any) -> str:
    """A type in words."""
    if kind is type(None):
        return "null"
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(_name(one) for one in typing.get_args(kind))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "any JSON"}
    origin = typing.get_origin(kind)
    if kind in names:
        return names[kind]
    return "a list" if origin is tuple or (isinstance(kind, type) and issubclass(kind, tuple)) else "an object"
