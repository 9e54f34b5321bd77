"""Broken files out of a whole one: cut off, with other bytes, and with other values where the file is text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

EXTREMES: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**40, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320, 1e999, True,
    False, None, "", "x", "..", "../../outside", "/etc/passwd", "C:\\windows", "a\0b", "\ud800", "a" * 300, "a" * 5000,
    "\x1b[2J", [], {}, [[]], {"": {}}, [1, 2, 3], {"a": 1},
)  # fmt: skip
_NUMBER = re.compile(rb"(?<![\w.])-?\d+(?![\w.])")


def mutations(data: bytes, kind: str, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` broken contents with a name each: first all that is listed, then drawn ones."""
    draw = random.Random(seed)
    listed = [(f"cut to {length}", data[:length]) for length in _lengths(len(data))]
    listed += [("twice", data * 2), ("zeros", b"\0" * len(data)), ("reversed", data[::-1]), ("and more", data + b"\0x")]
    yield from listed[:count]
    changes: list[Callable[[bytes, random.Random], tuple[str, bytes]]] = [_bytes, _bytes, _cut, _moved]
    changes += {"json": [_json] * 6 + [_nested, _twice, _number], "lines": [_line] * 6 + [_number],
                "yaml": [_yaml] * 6 + [_number]}.get(kind, [_number])  # fmt: skip
    for _ in range(count - len(listed)):
        try:
            yield draw.choice(changes)(data, draw)
        except (ValueError, UnicodeEncodeError, yaml.YAMLError):  # what this value cannot be written as
            yield _bytes(data, draw)


def _lengths(size: int) -> list[int]:
    found = {0, 1, 2, 7, 8, 9, size // 4, size // 2, size - size // 4, size - 22, size - 8, size - 2, size - 1}
    return sorted(length for length in found if 0 <= length < size)


def _bytes(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """One to four other bytes."""
    made = bytearray(data)
    places = [draw.randrange(len(data)) for _ in range(draw.randint(1, 4))]
    for at in places:
        made[at] = draw.choice([made[at] ^ (1 << draw.randrange(8)), draw.randrange(256), 0, 255])
    return f"bytes {places}", bytes(made)


def _cut(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    start = draw.randrange(len(data))
    stop = min(len(data), start + draw.choice([1, 2, 8, 100]))
    return f"without {start}:{stop}", data[:start] + data[stop:]


def _moved(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    start, to = draw.randrange(len(data)), draw.randrange(len(data))
    part = data[start : start + draw.choice([1, 4, 8, 64])]
    return f"{start} copied to {to}", data[:to] + part + data[to:]


def _number(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """A number in digits, wherever it stands, becomes an extreme one."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return _bytes(data, draw)
    one = draw.choice(found)
    new = draw.choice(
        [b"-1", b"0", b"4294967296", b"1099511627776", b"9223372036854775807", b"9" * 30, b"9" * 5000, b"1e99"]
    )
    return f"{one.group()!r:.20} at {one.start()} is {new[:20]!r}", data[: one.start()] + new + data[one.end() :]


def _json(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    value = json.loads(data)
    words, value = _changed(value, draw)
    return words, json.dumps(value).encode()


def _yaml(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    words, value = _changed(yaml.safe_load(data), draw)
    return words, yaml.safe_dump(value, allow_unicode=draw.random() < 0.5).encode()


def _line(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    lines = data.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    try:
        words, value = _changed(json.loads(lines[at]), draw)
        lines[at] = json.dumps(value).encode() + b"\n"
    except ValueError:
        words = "moved"
        lines.insert(draw.randrange(len(lines)), lines.pop(at))
    return f"line {at}: {words}", b"".join(lines)


def _nested(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    depth, (left, right) = draw.choice([40, 1000, 100_000]), draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    found = list(_NUMBER.finditer(data))
    at = draw.choice(found).span() if found else (0, len(data))
    return f"{depth} deep at {at[0]}", data[: at[0]] + left * depth + b"1" + right * depth + data[at[1] :]


def _twice(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """A key stands twice, with another value."""
    keys = list(re.finditer(rb'"(\w+)":', data))
    if not keys:
        return _bytes(data, draw)
    one = draw.choice(keys)
    return f"{one.group(1)!r} twice", data[: one.start()] + one.group() + b" 7, " + data[one.start() :]


def _changed(value: Any, draw: random.Random) -> tuple[str, Any]:
    """The value with one entry somewhere in it replaced, removed, added or exchanged with another."""
    places = list(_places(value))
    if not places:
        return "replaced", draw.choice(EXTREMES)
    home, key = draw.choice(places)
    other_home, other_key = draw.choice(places)
    what = draw.randrange(6)
    if what == 0:
        del home[key]
        return f"without {key!r:.40}", value
    if what == 1:
        home[key], other_home[other_key] = other_home[other_key], home[key]
        if _holds_itself(value):
            raise ValueError("one lies in the other")
        return f"{key!r:.40} for {other_key!r:.40}", value
    if what == 2 and isinstance(home, dict):
        name = draw.choice([one for one in EXTREMES if isinstance(one, str)])
        home[name] = draw.choice(EXTREMES)
        return f"also {name!r:.40}", value
    new = draw.choice(EXTREMES)
    if what == 3 and isinstance(home[key], list):
        new = home[key] * draw.choice([2, 100])
    if what == 4 and isinstance(home[key], list):
        new = home[key][::-1]
    home[key] = new
    return f"{key!r:.40} is {new!r:.40}" if not isinstance(new, int) or abs(
        new
    ) < 2**70 else f"{key!r:.40} is huge", value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _holds_itself(value: Any, above: tuple[int, ...] = ()) -> bool:
    if id(value) in above:
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_holds_itself(one, (*above, id(value))) for one in parts)
