"""Broken files of every kind: each is read as what it is, or refused in one kind of error that names it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.untrusted.fuzz import SPARE, limit_memory, read_broken
from tests.untrusted.kinds import KINDS

COUNT = 120  # of each kind; `python -m tests.untrusted.fuzz` takes any number


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("broken"))
    (result,) = run_ranks(read_broken, 1, dict.fromkeys(KINDS, COUNT), folder, timeout=100.0)
    return result  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_broken_file_is_refused_by_name_or_read_and_takes_no_memory(
    kind: str, found: dict[str, dict[str, Any]]
) -> None:
    seen = found[kind]
    assert not seen["faults"], "\n".join(seen["faults"])
    assert seen["refused"] > COUNT // 10 and seen["refused"] + seen["equal"] + seen["other"] == COUNT
    assert seen["grown"] < SPARE // 8, f"{seen['grown']:,} bytes"


def _takes_too_much(rank: int) -> str:
    limit_memory(SPARE)
    try:
        return str(len(bytearray(2 * SPARE)))
    except MemoryError:
        return "refused"


def test_the_limit_on_memory_is_one() -> None:
    assert run_ranks(_takes_too_much, 1) == ["refused"]
