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

from vocab_parallel.errors import CheckpointLayoutError

MAX_BYTES = 32 * 2**20  # of a file
MAX_ENTRIES = 2**20  # of a list or a mapping
MAX_TEXT = 2**16  # characters of one text
MAX_DEPTH = 32  # of free values


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointLayoutError: No such file, or not one JSON object of a possible size; naming `what` was expected.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointLayoutError(f"{path} has {size:,} bytes; {what} has at most {MAX_BYTES:,}")
        with path.open("rb") as file:
            raw = file.read(size + 1)
    except OSError as error:
        raise CheckpointLayoutError(f"cannot read {path}, expected {what}: {error.strerror or error}") from error
    # What the parser will make is bounded by these counts, whatever they mean.
    if len(raw) > MAX_BYTES or raw.count(b"[") + raw.count(b"{") > MAX_ENTRIES or raw.count(b",") > 4 * MAX_ENTRIES:
        raise CheckpointLayoutError(f"{path} is not {what}: more than {MAX_ENTRIES:,} lists and mappings in it")
    try:
        found = json.loads(raw, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # broken JSON and broken UTF-8 among them
        raise CheckpointLayoutError(f"{path} is not {what}: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise CheckpointLayoutError(f"{path} is not {what}: expected a JSON object, got {_show(found)}")
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
        return {_text(key, where): parse(wanted, one, f"{where}.{key}") for key, one in found.items()}
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
        return {_text(key, where): plain(one, f"{where}.{key}", depth + 1) for key, one in found.items()}
    if isinstance(value, (list, tuple)):
        many = _sized((list, tuple), value, where, "a list")
        return [plain(one, f"{where}[{at}]", depth + 1) for at, one in enumerate(many)]
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        _finite(value, where)
    elif value is not None and not isinstance(value, (bool, int)):
        raise CheckpointLayoutError(f"{where}: expected what JSON can hold, got {_show(value)}")
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


def to_text(value: Any, indent: str = "") -> str:
    """JSON text, a line for each key and each list of scalars: a shape belongs on one line.

    Raises:
        ValueError: NaN or infinity.
    """
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key)}: {to_text(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return "[\n" + ",\n".join(inner + to_text(one, inner) for one in value) + f"\n{indent}]"
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
            raise CheckpointLayoutError(f"unknown key {prefix}{key[:100]}; {nearest(key, names)}")
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
    raise CheckpointLayoutError(f"{where}: expected {_name(kind)}, got {_show(value)}")


def _scalar(kind: Any, value: object, where: str) -> Any:
    if kind is str:
        return _text(value, where)
    good = isinstance(value, bool) if kind is bool else isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not good:
        raise CheckpointLayoutError(f"{where}: expected {_name(kind)}, got {_show(value)}")
    if kind is int and not -(2**63) <= value < 2**64:  # type: ignore[operator]
        raise CheckpointLayoutError(f"{where}: expected a number of at most 64 bits, got {_show(value)}")
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
        raise CheckpointLayoutError(f"{where}: expected a finite number, got {_show(value)}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise CheckpointLayoutError(f"{where}: expected text, got {_show(value)}")
    if len(value) > MAX_TEXT:
        raise CheckpointLayoutError(f"{where}: expected at most {MAX_TEXT:,} characters, got {len(value):,}")
    return value


def _sized(kind: Any, value: Any, where: str, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointLayoutError(f"{where or 'the top'}: expected {wanted}, got {_show(value)}")
    if len(value) > MAX_ENTRIES:
        raise CheckpointLayoutError(f"{where}: expected at most {MAX_ENTRIES:,} entries, got {len(value):,}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key in found if sum(key == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice[:100]!r} stands twice in one object")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


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


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer too long for Python to print
        text = "a very long number"
    return text if len(text) <= 60 else f"{text[:60]}…"
