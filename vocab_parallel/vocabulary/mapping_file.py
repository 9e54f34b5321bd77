"""The mapping file: a `VocabMap` as JSON that a person can write and a program can check.

    {"version": 1, "old_size": 100, "new_size": 102, "old_sha256": null, "new_sha256": null,
     "pairs": [[0, 0, 90], [91, 90, 9]], "dropped": [[90, 1]], "sources": {"99": [3, 4]}}

``pairs`` is ``"identity"`` (every id that both sizes have stays), a list of ``[old, new]``, or a list of runs
``[old_start, new_start, count]``. Old ids that no pair names must be listed as ``[start, count]`` under ``dropped``,
or the reader must be told `allow_drop`. ``dropped``, ``sources`` and both hashes may be left out.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS, Reader, parse_json, read_bytes, shortened, write_whole
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.matching import ALLOW_DROP

VERSION = 1
KEYS = ("version", "old_size", "new_size", "old_sha256", "new_sha256", "pairs", "dropped", "sources")


def write_map(mapping: VocabMap, path: str | os.PathLike[str]) -> None:
    """Writes `mapping` in the compact form; the same map gives the same bytes."""
    before, after = mapping.pairs()
    lost = mapping.dropped_ids
    starts, counts = _runs(before, after)
    runs = torch.stack([before[starts], after[starts], counts], 1).tolist()
    starts, counts = _runs(lost, lost)
    dropped = torch.stack([lost[starts], counts], 1).tolist()
    data = {
        "version": VERSION,
        "old_size": mapping.old_size,
        "new_size": mapping.new_size,
        "old_sha256": mapping.old_sha256,
        "new_sha256": mapping.new_sha256,
        "pairs": "identity" if mapping.is_identity else runs,
        "dropped": dropped,
        "sources": {str(new_id): list(parts) for new_id, parts in mapping.sources.items()},
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in data.items())
    write_whole(path, f"{{\n{lines}\n}}\n".encode())


def read_map(path: str | os.PathLike[str], *, allow_drop: bool = False) -> VocabMap:
    """Reads a mapping file.

    Args:
        path: the file.
        allow_drop: old ids that the file neither maps nor lists as dropped are lost; without it, an error.

    Raises:
        VocabularyError: not a mapping file, or a map that is no partial bijection; names the file and the place.
    """
    reader = Reader(parse_json(read_bytes(path), path), path)
    if unknown := [key for key in reader.value if key not in KEYS]:
        raise reader.error("", f"unknown key {shortened(unknown[0])}; known are {', '.join(KEYS)}")
    if (version := reader.get("version", int)) != VERSION:
        raise reader.error("version", f"expected {VERSION}, found {shortened(version)}")
    old_size, new_size = _size(reader, "old_size"), _size(reader, "new_size")
    hashes = {name: _hash(reader, name) for name in ("old_sha256", "new_sha256")}
    table = _pairs(reader, old_size, new_size)
    sources = _sources(reader)
    try:
        found = VocabMap.from_pairs(old_size, new_size, table, sources=sources, allow_drop=True, **hashes)
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}") from error
    _check_dropped(reader, found, allow_drop)
    return found


def _pairs(reader: Reader, old_size: int, new_size: int) -> Tensor:
    value = reader.get("pairs", (list, str))
    if isinstance(value, str):
        if value != "identity":
            raise reader.error("pairs", f"expected 'identity' or a list, found {shortened(value)}")
        return torch.arange(min(old_size, new_size)).unsqueeze(1).expand(-1, 2)
    table = _integers(reader, "pairs", value, (2, 3))
    if table.shape[1] == 2:
        return table
    first, target, count = table.unbind(1)
    wrong = (count < 1) | (count > MAX_IDS) | (first < 0) | (target < 0) | (first > MAX_IDS) | (target > MAX_IDS)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        raise reader.error(f"pairs[{place}]", f"expected [old_start, new_start, count], found {value[place]!r:.60}")
    if int(count.sum()) > min(old_size, new_size):
        most = min(old_size, new_size)
        raise reader.error("pairs", f"the runs have {int(count.sum()):,} ids, more than the {most:,} that can be kept")
    begins = torch.cumsum(count, 0) - count
    step = torch.arange(int(count.sum())) - torch.repeat_interleave(begins, count)
    return torch.stack([torch.repeat_interleave(first, count) + step, torch.repeat_interleave(target, count) + step], 1)


def _check_dropped(reader: Reader, mapping: VocabMap, allow_drop: bool) -> None:
    value = reader.get("dropped", list, [])
    table = _integers(reader, "dropped", value, (2,))
    first, count = table.unbind(1)
    size = mapping.old_size
    wrong = (first < 0) | (count < 1) | (first >= size) | (count > size) | (first + count > size)
    if wrong.any():
        place = int(wrong.nonzero()[0])
        what = f"expected [start, count] within [0, {size}), found {value[place]!r:.60}"
        raise reader.error(f"dropped[{place}]", what)
    edges = torch.zeros(size + 1, dtype=torch.int64)
    edges.index_add_(0, first, torch.ones_like(first))
    edges.index_add_(0, first + count, -torch.ones_like(first))
    listed = torch.cumsum(edges, 0)[:-1] > 0
    lost = mapping.old_to_new < 0
    if (both := (listed & ~lost).nonzero().flatten()).numel():
        raise reader.error("dropped", f"old id {int(both[0])} is listed, but pairs keeps it")
    if not allow_drop and (forgotten := (lost & ~listed).nonzero().flatten()).numel():
        some = ", ".join(map(str, forgotten[:5].tolist()))
        raise reader.error(
            "pairs",
            f"{forgotten.numel():,} of {size:,} old ids are neither mapped nor listed under dropped, the first are "
            f"{some}; list them as [start, count] under dropped, or {ALLOW_DROP}",
        )


def _integers(reader: Reader, place: str, rows: list[Any], widths: tuple[int, ...]) -> Tensor:
    """Rows of integers, all of one of these widths, as int64 [n, width]."""
    width = len(rows[0]) if rows and isinstance(rows[0], list) else widths[0]
    for number, row in enumerate(rows):
        good = isinstance(row, list) and len(row) == width and width in widths
        if not good or not all(type(entry) is int and -(2**40) < entry < 2**40 for entry in row):
            wanted = " or ".join(map(str, widths))
            raise reader.error(f"{place}[{number}]", f"expected {wanted} integers, found {shortened(row)}")
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)


def _sources(reader: Reader) -> dict[int, tuple[int, ...]]:
    sources = {}
    for key, parts in reader.get("sources", dict, {}).items():
        good = re.fullmatch("[0-9]{1,9}", key) and isinstance(parts, list)
        if not good or not all(type(part) is int and 0 <= part < MAX_IDS for part in parts):
            raise reader.error(
                f"sources.{key:.20}", f"expected a new id and a list of old ids, found {shortened(parts)}"
            )
        sources[int(key)] = tuple(parts)
    return sources


def _size(reader: Reader, name: str) -> int:
    size: int = reader.get(name, int)
    if not 0 < size <= MAX_IDS:
        raise reader.error(name, f"expected 1 to {MAX_IDS:,} ids, found {shortened(size)}")
    return size


def _hash(reader: Reader, name: str) -> str | None:
    value: str | None = reader.get(name, str, None)
    if value is not None and not re.fullmatch("[0-9a-f]{64}", value):
        raise reader.error(name, f"expected 64 hexadecimal digits, found {shortened(value)}")
    return value


def _runs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Where both sequences go up by one together: the place and the length of each such run, int64."""
    if not first.numel():
        return first, first
    breaks = (torch.diff(first) != 1) | (torch.diff(second) != 1)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), breaks.nonzero().flatten() + 1])
    return starts, torch.diff(torch.cat([starts, torch.tensor([first.numel()])]))
