"""Settings as frozen dataclasses: ``key=value`` words, conversion, and errors that name the key.

`from_words` is for a command with one flat list of settings; `config` has the sections of a run.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import dacite
import yaml

from vocab_parallel.errors import ConfigError, VocabularyError
from vocab_parallel.vocabulary.files import read_bytes

_LARGEST_YAML, _MOST_VALUES = 2**20, 2**18
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
            raise ConfigError(f"{key}: expected {type_name(known[key])}, got {value!r:.200}")
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
        raise ConfigError(f"{error.field_path}: expected {wanted}, got {given!r:.200}") from error
    except (dacite.DaciteError, OverflowError) as error:
        raise ConfigError(str(error)[:500]) from error


def read_yaml(path: Path) -> Any:
    """What a YAML file holds: plain values, bounded.

    Raises:
        ConfigError: It cannot be read, is larger than any configuration, or not YAML.
    """
    try:
        text = read_bytes(path, _LARGEST_YAML).decode("utf-8-sig")
    except VocabularyError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: not UTF-8 at byte {error.start}") from error
    return parse_yaml(text, f"{path} is not valid YAML")


def parse_yaml(text: str, wrong: str) -> Any:
    """The values of a YAML text; `wrong` begins the error of one that is none."""
    try:
        return yaml.load(text, Loader=Loader)
    except RecursionError as error:
        raise ConfigError(f"{wrong}: nested too deeply") from error
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, OverflowError) as error:  # as of a 13th month
        raise ConfigError(f"{wrong}: {str(error)[:500]}") from error


class Loader(yaml.SafeLoader):
    """SafeLoader that also reads 1e-3 as a number (YAML 1.2; PyYAML alone reads a string), and is bounded.

    An alias stands for the whole value that it names: a page of them can stand for more values than memory holds.
    """

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _count_values(node, {})
        return node

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > 80:
            raise yaml.constructor.ConstructorError(None, None, "a number of more than 80 digits", node.start_mark)
        return int(super().construct_yaml_int(node))


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _count_values(node: Any, counted: dict[int, int]) -> int:
    """How many values a node stands for, aliases written out; a key that stands twice is refused too."""
    if id(node) in counted:
        if not counted[id(node)]:
            raise yaml.YAMLError("a value that holds itself")
        return counted[id(node)]
    counted[id(node)] = 0
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in parts if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) < len(keys):
            twice = Counter(keys).most_common(1)[0][0]
            raise yaml.YAMLError(f"the key {twice[:80]!r} stands twice in one mapping")
        parts = [one for pair in parts for one in pair]
    counted[id(node)] = 1 + sum(_count_values(one, counted) for one in parts)
    if counted[id(node)] > _MOST_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {_MOST_VALUES:,} values")
    return counted[id(node)]


def assign(data: dict[str, Any], text: str) -> None:
    """Sets ``dotted.key=value`` in nested mappings."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {text!r}: expected dotted.key=value, for example train.steps=10")
    parsed = parse_yaml(value, f"override {text!r}: the value is not valid YAML")
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
        raise ConfigError(f"{key}: expected {wanted}, got {value!r:.200}")


def choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `choices`, naming the nearest."""
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{key}: expected one of {', '.join(choices)}, got {value!r:.200}{hint}")
