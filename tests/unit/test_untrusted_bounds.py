"""A small file that asks for much: refused before the memory or the time is taken that it asks for."""

from __future__ import annotations

import json
import pickle
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.untrusted.fuzz import SPARE, limit_memory
from tests.untrusted.harm import END, growing, text
from tests.untrusted.kinds import EDGES, KINDS, Kind, policy_of
from vocab_parallel.checkpoint.files import StoredTensors

GROWN, SECONDS = 2**27, 4.0  # bytes, and seconds of a processor, of one file; each would take gigabytes, or for ever


def _json(**change: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **change}).encode()


def _deep(**change: Any) -> Callable[[bytes], bytes]:
    """As `_json`, in a section: `a__b=1`."""

    def made(data: bytes) -> bytes:
        value = json.loads(data)
        for path, new in change.items():
            home, *keys = value, *path.split("__")
            for key in keys[:-1]:
                home = home[key]
            home[keys[-1]] = new
        return json.dumps(value).encode()

    return made


def _metadata(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def made(data: bytes) -> bytes:
        found = pickle.loads(data)
        change(found)
        return pickle.dumps(found)

    return made


def _transform(**given: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(policy_of([given])).encode()


def _fsm(**machine: Any) -> Callable[[bytes], bytes]:
    return _transform(name="fsm", machine=machine)


def _laughs(depth: int, width: int) -> str:
    lines = [f"a0: &a0 [{','.join('x' * width)}]"]
    lines += [f"a{at}: &a{at} [{','.join([f'*a{at - 1}'] * width)}]" for at in range(1, depth)]
    return "\n".join(lines)


def _text(words: str | bytes) -> Callable[[bytes], bytes]:
    return lambda data: words if isinstance(words, bytes) else words.encode()


def _huge_chunk(metadata: Any) -> None:
    entry = next(iter(metadata.state_dict_metadata.values()))
    entry.size = torch.Size([2**40, 6])
    entry.chunks[0].sizes = torch.Size([2**40, 6])


_TWICE = [b"q" + bytes([n]) + b"h" + bytes([n]) for n in range(60)]
_NESTED = b"\x80\x02}((K\x01t" + b"".join(one + b"\x86" for one in _TWICE) + b"K\x01u."
_LISTS = b"\x80\x02]" + b"".join(b"q" + bytes([n]) + b"](" + (b"h" + bytes([n])) * 2 + b"e" for n in range(60))
_SIZES = b"\x80\x02(" + b"K\x01" * 2**13 + b"tq\x01]" + b"(" + b"ctorch\nSize\nh\x01\x85R" * 20_000 + b"e."
_PATH = b"cpathlib\nPosixPath\n"
_PATHS = (
    b"\x80\x02"
    + _PATH
    + text("a" * 9)
    + b"\x85R"
    + b"".join(one + _PATH + one[2:] + one[2:] + b"\x86R" for one in _TWICE)
)
_PLACE = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
_PLACES = b"\x80\x02}(K\x01q\0K\x01" + b"".join(
    _PLACE + b")\x81}(" + text("fqn") + text("a") + text("offset") + bytes([104, n, 104, n]) + b"\x86ubq"
    + bytes([n + 1]) + b"K\x01" for n in range(60)) + b"u."  # fmt: skip
_DIGITS = (
    b"\x80\x02}(\x8b" + struct.pack("<i", 2**22) + b"\x01" * 2**22 + b"q\x01K\x01" + b"h\x01K\x01" * 10_000 + b"u."
)


def _read_block(path: Path) -> Any:
    """With every block of the list beside it said to be the whole file."""
    file = path.parent / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length, info.relative_path = 0, path.stat().st_size, path.name
    file.write_bytes(pickle.dumps(metadata))
    stored = StoredTensors(path.parent)
    return [stored.read(key) for key in stored.tensors]


ALL = KINDS | {"a block": Kind(KINDS["a .distcp"].make, _read_block)}
Case = tuple[str, Callable[[bytes], bytes]]
CASES: dict[str, Case] = {
    "a memo of 2**31 entries": (".metadata", _text(b"\x80\x02Nr\xff\xff\xff\x7f.")),
    "bytes of 64 GiB": (".metadata", _text(b"\x80\x04\x96" + struct.pack("<Q", 2**36) + END)),
    "a frame of 64 GiB": (".metadata", _text(b"\x80\x04\x95" + struct.pack("<Q", 2**36) + b"N.")),
    "a key that is hashed for ever": (".metadata", _text(_NESTED)),
    "a size that is copied": (".metadata", _text(_SIZES)),
    "a path that doubles": (".metadata", _text(_PATHS + END)),
    "a place in a place in a place as a key": (".metadata", _text(_PLACES)),
    "a number of a million digits as a key": (".metadata", _text(_DIGITS)),
    "a value that is printed for ever": (".metadata", _text(_LISTS + b"}b.")),
    "a block of 2**40 rows": (".metadata", _metadata(_huge_chunk)),
    **{f"{name} in a block": ("a block", _text(data)) for name, data in growing().items()},
    **{f"{name} of DeepSpeed": ("DeepSpeed's model states", _text(data)) for name, data in growing().items()},
    "a packed archive of Megatron": ("Megatron's common.pt", _text(growing()["a packed archive"])),
    "a packed translator": ("a translator", _text(growing()["a packed archive"])),
    "2**40 ranks": ("state.json", _json(layout={"vocab_size": 9, "padded_size": 2**40, "tp_size": 2**40})),
    "millions of lists": ("state.json", _text(b'{"format": 2, "a": [' + b"[]," * 2**23 + b"[]]}")),
    "lists in lists in lists": ("state.json", _text(b"[" * 10**6)),
    "millions of lists in a manifest": ("manifest.json", _text(b'{"a": [' + b"[]," * 2**21 + b"[]]}")),
    "a header of 2**62 bytes": ("safetensors", lambda data: struct.pack("<Q", 2**62) + data[8:]),
    "a header of a million lists": (
        "safetensors", _text(struct.pack("<Q", 10**6) + b'{"a":' + b"[" * 5 * 10**5 + b"]" * 5 * 10**5)),
    "runs of 2**39 ids": ("a mapping file", _json(pairs=[[0, 0, 2**39]])),
    "a vocabulary of 2**39 ids": ("a mapping file", _json(old_size=2**39, new_size=2**39, pairs="identity")),
    "an id of 2**40": ("tokenizer.json", lambda data: data.replace(b'"f": 8', b'"f": 1099511627776')),
    "an id far from the others": ("tokenizer.json", lambda data: data.replace(b'"f": 8', b'"f": 8388608')),
    "an added token of 2**40": ("tokenizer.json", lambda data: data.replace(b'"id": 2', b'"id": 1099511627776')),
    "a rank of 2**40": ("a tiktoken table", _text("YQ== 0\nYg== 1099511627776\n")),
    "a rank of 11 digits": ("a tiktoken table", _text("YQ== 0\nYg== 99999999999\n")),
    "2**40 ids of Tekken": ("tekken.json", _deep(config__default_vocab_size=2**40)),
    "2**40 special ids": ("tekken.json", _deep(config__default_num_special_tokens=2**40)),
    "a kind 2**40 times": ("vocabulary.json", _json(kinds=[["normal", 2**40]])),
    "2**40 states": ("a machine in JSON", _fsm(**{**EDGES, "states": 2**40})),
    "a state of 2**40": ("a machine in JSON", _fsm(edges=[[0, 1, 2, 2**40]], states=2**41, accepting=[0], start=0)),
    "a million times": ("a machine in JSON", _fsm(regex="1{1,1000000}")),
    "thousands of thousands": ("a machine in JSON", _fsm(regex="((1{4096}){4096}){4096}")),
    "many ids, many times": ("a machine in JSON", _fsm(regex=f"[{' '.join(map(str, range(1, 9000, 2)))}]{{4096}}")),
    "sets of thousands of states": ("a machine in JSON", _fsm(regex="(1?){4096}")),
    "a set for each of 2**30 texts": ("a machine in JSON", _fsm(regex="(1|2)*1(1|2){30}")),
    "parentheses": ("a machine in JSON", _fsm(regex="(" * 50_000)),
    "a text of a million ids": ("a machine in JSON", _fsm(regex="1 " * 10**6)),
    "aliases of aliases": ("a policy in YAML", _text(_laughs(9, 10))),
    "aliases for a setting": ("config.yaml", _text(_laughs(9, 10) + "\nname: *a8")),
    "thousands of keys": ("config.yaml", _text("{" + ",".join(f"{n:x}: " for n in range(25_000)) + "}")),
    "an alias of itself": ("config.yaml", _text("name: &a [*a]")),
    "a key in a key": ("config.yaml", _text("? " * 5000 + "a")),
    "brackets": ("config.yaml", _text("name: " + "[" * 50_000)),
    "a number of a million digits": ("config.yaml", _text("name: x\ntrain: {steps: 0x" + "f" * 10**6 + "}")),
    "a number in base 60": ("config.yaml", _text("train: {steps: 1" + ":59" * 200_000 + "}")),
    "10 MB of YAML": ("config.yaml", _text("# " + "x" * 10**7)),
    "2**39 rows of DeepSpeed": ("vocab_parallel.json", _deep(parameters={"e.weight": {
        "vocab_size": 2**39, "padded_size": 2**39, "tp_size": 1, "row": [4], "trained": True}})),
    "2**19 ranks of DeepSpeed": ("vocab_parallel.json", _deep(parameters={"e.weight": {
        "vocab_size": 9, "padded_size": 10, "tp_size": 2**19, "row": [4], "trained": True}})),
}  # fmt: skip
# What is large and harmless: numbers whose meaning is bounded by the vocabulary or the request, a long list of ids.
LARGE: dict[str, Case] = {
    "the best 2**62": ("a policy in JSON", _transform(name="top_k", k=2**62)),
    "n-grams of 2**62": ("a policy in JSON", _transform(name="no_repeat_ngram", n=2**62)),
    "40,000 ids": ("a machine in JSON", _fsm(regex=f"[{' '.join(str(at % 8) for at in range(40_000))}]")),
    "the last 2**62": ("a policy in JSON", _transform(name="recent_penalties", last_n=2**62, repeat=1.1)),
}


def _read_all(rank: int, cases: list[tuple[str, bytes]], folder: str) -> list[tuple[str, str, float, int]]:
    """Class and text of each file's error, seconds, and growth of the resident memory."""
    limit_memory(SPARE)
    found = []
    for at, (name, content) in enumerate(cases):
        place = Path(folder) / str(at) / "inner"
        place.mkdir(parents=True)
        file = ALL[name].make(place)
        file.write_bytes(content)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            ALL[name].read(file)
            error = ("", "")
        except BaseException as raised:
            error = (type(raised).__name__, str(raised)[:5000])
        seconds = time.process_time() - start
        found.append((*error, seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, float, int]]:
    place = tmp_path_factory.mktemp("whole")
    contents, both = [], {**CASES, **LARGE}
    for at, (kind, change) in enumerate(both.values()):
        (place / str(at)).mkdir()
        contents.append((kind, change(ALL[kind].make(place / str(at)).read_bytes())))
    (results,) = run_ranks(_read_all, 1, contents, str(tmp_path_factory.mktemp("broken")), timeout=100.0)
    return dict(zip(both, results, strict=True))


@pytest.mark.parametrize("what", list(CASES))
def test_it_is_refused_at_once(what: str, found: dict[str, tuple[str, str, float, int]]) -> None:
    error, words, seconds, grown = found[what]
    assert error in ("CheckpointLayoutError", "VocabularyError", "ConfigError"), f"{error}: {words}"
    assert grown < GROWN, f"{grown:,} bytes"
    assert seconds < SECONDS, f"{seconds:.1f} s: {words}"
    assert len(words) < 3000, words


@pytest.mark.parametrize("what", list(LARGE))
def test_what_is_large_and_harmless_is_read(what: str, found: dict[str, tuple[str, str, float, int]]) -> None:
    error, words, _, grown = found[what]
    assert not error and grown < GROWN, f"{error}: {words}"
