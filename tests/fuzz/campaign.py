"""Draws cases, runs them, and turns what is wrong into a small test."""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.fuzz.case import FuzzCase, smallest
from tests.fuzz.kinds.every import KINDS, SHARES, make
from tests.fuzz.world import LIMIT, Outcome, World

SHRINKING = 60.0  # seconds that a finding is made smaller for
SHRINKING_LIMIT = 4.0  # seconds that a smaller case may take


@dataclass
class Finding:
    """A case that is not as the oracle has it: as it was drawn, and as small as it got."""

    kind: str
    seed: int
    trouble: str  # "mismatch", or as in `Outcome`
    details: str
    case: FuzzCase
    small: FuzzCase


@dataclass
class Report:
    """What a campaign has done."""

    master: int
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    sizes: collections.Counter[int] = field(default_factory=collections.Counter)  # by number of ranks
    findings: list[Finding] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def total(self) -> int:
        return self.counts.total()

    def line(self) -> str:
        seconds = time.monotonic() - self.began
        found = len(self.findings)
        return f"{self.total:,} cases, {self.total / max(seconds, 1e-9):.1f} a second, {found} found"

    def table(self) -> str:
        """Counts per kind and per number of ranks."""
        lines = [f"{name:14} {self.counts[name]:8,}" for name in KINDS if self.counts[name]]
        ranks = ", ".join(f"{count:,} on {size}" for size, count in sorted(self.sizes.items()))
        seconds = time.monotonic() - self.began
        return "\n".join([*lines, f"{'all':14} {self.total:8,}  in {seconds:,.0f} s; ranks: {ranks}"])


def drawn(master: int, kinds: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Kinds and seeds without end, each kind by its share."""
    shares = [kind for kind in kinds for _ in range(SHARES[kind])]
    choices = random.Random(master)
    while True:
        choices.shuffle(shares)
        yield from ((kind, choices.getrandbits(32)) for kind in list(shares))


def campaign(
    report: Report,
    kinds: Sequence[str],
    *,
    cases: int | None = None,
    seconds: float | None = None,
    say: Callable[[str], None] = print,
    most: int = 20,
) -> None:
    """Runs cases until there are so many, or so long, or the user stops it, or `most` are found. Fills `report`."""
    names: dict[int, tuple[str, int]] = {}  # of the cases by id

    def each() -> Iterator[FuzzCase]:
        for number, (kind, seed) in enumerate(drawn(report.master, kinds)):
            late = seconds is not None and time.monotonic() - report.began > seconds
            if late or (cases is not None and number >= cases) or len(report.findings) >= most:
                return
            case = make(kind, seed)
            names[id(case)] = kind, seed
            yield case

    said = time.monotonic()
    with World() as world:
        for outcome in world.run(each()):
            kind, seed = names.pop(id(outcome.case))
            trouble, details = judge(outcome)
            report.counts[kind] += 1
            report.sizes[outcome.case.tp] += 1
            if trouble:
                say(f"found {kind}:{seed} ({trouble}); making it smaller ...")
                finding = Finding(kind, seed, trouble, details, outcome.case, shrunk(outcome.case, trouble))
                report.findings.append(finding)
                say(words(finding))
            if time.monotonic() - said > 10:
                said = time.monotonic()
                say(report.line())


def judge(outcome: Outcome) -> tuple[str, str]:
    """What is wrong with an outcome, in a word and in many; empty if nothing is."""
    if outcome.trouble:
        return outcome.trouble, outcome.details
    try:
        outcome.case.check(outcome.results)
    except AssertionError as error:
        return "mismatch", str(error) or traceback.format_exc()
    except Exception:
        return "the oracle failed", traceback.format_exc()
    return "", ""


def shrunk(case: FuzzCase, trouble: str, seconds: float = SHRINKING) -> FuzzCase:
    """A smaller case with the same trouble."""
    until = time.monotonic() + seconds
    with World(SHRINKING_LIMIT) as world:

        def fails(one: FuzzCase) -> bool:
            if time.monotonic() > until:
                return False
            return judge(next(iter(world.run([one]))))[0] == trouble

        return smallest(case, fails)


def check_case(case: FuzzCase, limit: float = LIMIT) -> None:
    """Runs one case on ranks of its own and compares it with the oracle: for tests of what was found.

    Raises:
        AssertionError: With what is wrong.
    """
    with World(limit) as world:
        trouble, details = judge(next(iter(world.run([case]))))
    assert not trouble, f"{trouble}: {details}\n{case!r}"


def words(finding: Finding) -> str:
    """A finding for a reader: what is wrong, the drawn case, the small one as a test, the command that repeats it."""
    details = (
        finding.details if len(finding.details) < 4000 else f"{finding.details[:3000]}\n...\n{finding.details[-900:]}"
    )
    again = f"scripts/fuzz --case {finding.kind}:{finding.seed}"
    return "\n".join(
        [
            f"==== {finding.trouble}: {finding.kind}:{finding.seed}",
            details.rstrip(),
            f"---- drawn: {finding.case!r}",
            "---- as a test:",
            as_test(finding),
            f"---- again: {again}",
            "====",
        ]
    )


def as_test(finding: Finding) -> str:
    """The small case as a test that can be pasted into a file."""
    text = repr(finding.small)
    imports = {f"from {type(one).__module__} import {type(one).__name__}" for one in dataclass_values(finding.small)}
    lines = ["from tests.fuzz.campaign import check_case", *sorted(imports)]
    if re.search(r"\btorch\.", text):
        lines.insert(0, "import torch\n")
    if re.search(r"\b(inf|nan)\b", text):
        lines.insert(0, "from math import inf, nan\n")
    return "\n".join(
        [*lines, "", "", f"def test_found_by_fuzzing_{finding.kind}_{finding.seed}():", f"    check_case({text})"]
    )


def dataclass_values(value: object) -> Iterator[object]:
    """The value and the dataclasses in its fields, if it has any."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value
        for one in dataclasses.fields(value):
            yield from dataclass_values(getattr(value, one.name))
