"""Reads broken files of each kind in a process that may take little memory and little time.

``python -m tests.untrusted.fuzz 2000`` breaks each kind of file in 2,000 ways; `KIND` after the number takes one alone.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.untrusted.kinds import KINDS
from tests.untrusted.mutating import mutations
from vocab_parallel.errors import VocabParallelError

SPARE = 2**30  # address space beside what the process has; what a whole file takes is a thousandth of it
SECONDS = 5.0  # of one reading
SEED = 20


def read_broken(rank: int, counts: dict[str, int], folder: str, seed: int = SEED) -> dict[str, dict[str, Any]]:
    """Reads so many broken files of each kind.

    Returns:
        For each kind how many were refused, loaded as the whole one, and loaded as another; what else there was, in
        words; the seconds, and the growth of the largest resident memory in bytes.
    """
    limit_memory(SPARE)
    return {kind: one_kind(kind, count, Path(folder), seed) for kind, count in counts.items()}


def limit_memory(spare: int) -> None:
    """Lets this process take so much more address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def one_kind(name: str, count: int, folder: Path, seed: int) -> dict[str, Any]:
    kind, begun, before = KINDS[name], time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    place = Path(tempfile.mkdtemp(dir=folder)) / "inner"
    place.mkdir()
    file = kind.make(place)
    data = file.read_bytes()
    whole = _clean(kind.read(file), place)
    around = _listing(place.parent)
    counted = {"refused": 0, "equal": 0, "other": 0}
    faults = []
    for words, broken in mutations(data, kind.form, count, seed):
        file.write_bytes(broken)
        start = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _clean(kind.read(file), place)
            counted["equal" if same(found, whole) else "other"] += 1
        except VocabParallelError as error:
            counted["refused"] += 1
            if not any(part in str(error) for part in (file.name, file.parent.name, str(place))):
                faults.append(f"{words}: names no file: {error!s:.300}")
        except BaseException as error:
            faults.append(f"{words}: {type(error).__name__}: {error!s:.300}")
        if (seconds := time.process_time() - start) > SECONDS:
            faults.append(f"{words}: took {seconds:.1f} s")
        if (now := _listing(place.parent)) != around:
            faults.append(f"{words}: files are there or gone: {sorted(now ^ around)[:4]}")
            around = now
    shutil.rmtree(place.parent)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {**counted, "faults": faults, "seconds": time.process_time() - begun, "grown": grown}


def same(one: Any, other: Any) -> bool:
    """Equality of what readers return, tensors by their bits."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        raw = [value.reshape(-1).contiguous().view(torch.uint8) for value in (one, other)]
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(*raw)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(type(one) is type(other) and one == other)


def _clean(found: Any, place: Path) -> Any:
    """Without what a reader wrote."""
    shutil.rmtree(place.parent / "ours", ignore_errors=True)
    return found


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def main(words: list[str]) -> int:
    """Prints a line for each kind; the number of kinds with faults."""
    count, chosen = int(words[0]), words[1:] or list(KINDS)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        limit_memory(SPARE)
        for name in chosen:
            found = one_kind(name, count, Path(folder), SEED)
            numbers = f"{found['refused']:>6} {found['equal']:>6} {found['other']:>6} {found['seconds']:>7.1f} s"
            print(f"{name:<30} {numbers} {found['grown'] / 2**20:>7.0f} MiB  {len(found['faults'])} faults", flush=True)
            for line in found["faults"][: int(os.environ.get("SHOWN", "6"))]:
                print("    ", line.encode("utf-8", "backslashreplace").decode())
            bad += bool(found["faults"])
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
