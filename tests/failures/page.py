"""docs/failures.md, written from the marks on the tests of this folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.failures.lab import ANSWERS, COUNT, Failure

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "failures.md"
SECTIONS = (
    ("Hidden states and the projection", range(1, 7)),
    ("Kinds of scores", range(7, 15)),
    ("Into the training loss", range(15, 21)),
    ("Which row is decoded", range(21, 25)),
    ("Vocabulary and tying", range(25, 33)),
    ("Where the head ends", range(33, 35)),
    ("Policies and search", range(35, 51)),
    ("Further contracts", range(51, COUNT + 1)),
)


class Row(NamedTuple):
    """A failure and the test that shows it."""

    failure: Failure
    test: str
    path: Path


def files() -> list[Path]:
    """The files of this folder that hold tests."""
    return sorted(Path(__file__).parent.glob("test_*.py"))


def rows() -> list[Row]:
    """All marked tests, by number."""
    found = []
    for path in files():
        module = importlib.import_module(f"tests.failures.{path.stem}")
        tests: dict[str, Callable[..., Any]] = vars(module)
        found += [Row(test.failure, name, path) for name, test in tests.items() if hasattr(test, "failure")]
    return sorted(found, key=lambda row: row.failure.number)


def render(rows: list[Row]) -> str:
    """The page."""
    counts = {answer: sum(row.failure.answer == answer for row in rows) for answer in ANSWERS}
    lines = [
        "# Failures",
        "",
        f"What can go wrong between a hidden state and a token: {len(rows)} known mistakes, and what becomes of each.",
        "Each has a test that makes the mistake and shows the answer. `python -m tests.failures` writes this page from",
        "the tests' marks; a test compares the two.",
        "",
        "| answer | meaning | failures |",
        "|---|---|---|",
        *(f"| {answer} | {meaning} | {counts[answer]} |" for answer, meaning in ANSWERS.items()),
    ]
    for title, numbers in SECTIONS:
        lines += ["", f"## {title}", "", "| | failure | answer | what happens | test |", "|---|---|---|---|---|"]
        lines += [_line(row) for row in rows if row.failure.number in numbers]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    one = row.failure
    link = f"[`{row.test}`](../{row.path.relative_to(ROOT).as_posix()})"
    return f"| {one.number} | {one.title} | {one.answer} | {one.how} | {link} |"
