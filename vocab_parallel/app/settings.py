"""Settings as frozen dataclasses: ``key=value`` words, conversion, and errors that name the key.

`from_words` is for a command with one flat list of settings; `config` has the sections of a run.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import dacite
import yaml

from vocab_parallel.errors import ConfigError

Settings = TypeVar("Settings")


def from_words(kind: type[Settings], words: Sequence[str]) -> Settings:
    """Builds the settings `kind`, a dataclass without sections, from ``key=value`` words.

    Raises:
        ConfigError: unknown key, wrong type or impossible value.
    """
    data: dict[str, Any] = {}
    for word in words:
        assign(data, word)
    known = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ConfigError(f"unknown key {key}; {hint}")
        if isinstance(value, bool):  # an int to Python
            raise ConfigError(f"{key}: expected {type_name(known[key])}, got {value!r}")
    return build(kind, data)


def build(kind: type[Settings], data: Mapping[str, Any]) -> Settings:
    """The dataclass of nested mappings; a wrong type is a `ConfigError` that names the key."""
    try:
        return dacite.from_dict(kind, data, dacite.Config(strict=True, type_hooks={float: _as_float}))
    except dacite.WrongTypeError as error:
        given: Any = data  # the error's own value may be one that dacite was making of it
        for key in str(error.field_path).split("."):
            given = given.get(key, error.value) if isinstance(given, Mapping) else error.value
        wanted = type_name(_wanted(kind, str(error.field_path)) or error.field_type)
        raise ConfigError(f"{error.field_path}: expected {wanted}, got {given!r}") from error
    except dacite.DaciteError as error:
        raise ConfigError(str(error)) from error


class Loader(yaml.SafeLoader):
    """SafeLoader that also reads 1e-3 as a number (YAML 1.2; PyYAML alone reads a string)."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def assign(data: dict[str, Any], text: str) -> None:
    """Sets ``dotted.key=value`` in nested mappings."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: expected dotted.key=value, for example train.steps=10")
    try:
        parsed = yaml.load(value, Loader=Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {text!r}: the value is not valid YAML: {error}") from error
    *sections, last = key.split(".")
    target = data
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise ConfigError(f"override {text!r}: {section} is not a section of the configuration")
    target[last] = parsed


def _wanted(kind: type, path: str) -> Any:
    """The type of a flat setting; None of one in a section."""
    return typing.get_type_hints(kind).get(path)


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) else value


def type_name(kind: Any) -> str:
    """A type in words, for an error."""
    if kind is type(None):
        return "null"
    parts = typing.get_args(kind)
    if parts and typing.get_origin(kind) is not list:
        return " or ".join(type_name(part) for part in parts)
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if parts:
        return f"a list, each {type_name(parts[0])}"
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def require(good: bool, key: str, wanted: str, value: object) -> None:
    """Raises unless `good`, naming what was wanted."""
    if not good:
        raise ConfigError(f"{key}: expected {wanted}, got {value!r}")


def choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `choices`, naming the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}: expected one of {', '.join(choices)}, got {value!r}{hint}")
