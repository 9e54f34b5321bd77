"""The ladder: rungs of checks, climbed one after the other, each of them whatever came of those below."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from vocab_parallel.app.comparing import attempt
from vocab_parallel.app.job import Job
from vocab_parallel.app.verify.setting import Setting


@dataclass(frozen=True)
class Check:
    """One comparison, which every rank makes.

    Attributes:
        name: what is compared, in a few words.
        run: gives this rank's largest error, and enters the same collectives on every rank. NaN counts as infinite; an
            exception fails the check with its words.
        tolerance: the largest error that passes; 0 for what must be equal.
        unit: of the error, such as "nats", "of the largest entry", "ids", "bits".
        module: where to look if it fails; None: the rung's.
    """

    name: str
    run: Callable[[], float]
    tolerance: float
    unit: str
    module: str | None = None


@dataclass(frozen=True)
class Rung:
    """One claim of the ladder, and the checks that would show it wrong.

    Attributes:
        name: as the ladder calls it.
        invariant: what must hold, in one sentence.
        module: where to look if it does not.
        checks: makes them; the same ones in the same order on every rank.
    """

    name: str
    invariant: str
    module: str
    checks: Callable[[Setting], Sequence[Check]]


@dataclass(frozen=True)
class Result:
    """What came of one check, the same on every rank.

    Attributes:
        rung: the rung's name.
        check: the check's name.
        error: the largest of all ranks.
        module: where to look if it failed.
        words: what a rank raised, with its number; empty if none did.
        seconds: that it took.
    """

    rung: str
    check: str
    error: float
    tolerance: float
    unit: str
    passed: bool
    module: str
    words: str
    seconds: float


def climb(setting: Setting, rungs: Sequence[Rung], *, stop: bool = False) -> list[Result]:
    """Runs every check of every rung, and prints them on the first rank as they go.

    Args:
        stop: end after the first rung that failed.

    Returns:
        What came of each, the same on every rank.

    Collectives:
        Those of the checks, and an object gather after each.
    """
    job, results = setting.job, list[Result]()
    for number, rung in enumerate(rungs, 1):
        job.say(f"{number} {rung.name}: {rung.invariant}")
        found = _climb_one(setting, rung)
        results += found
        failed = sorted({result.module for result in found if not result.passed})
        if failed:
            job.say(f"  look in {', '.join(failed)}")
            if stop:
                break
    return results


def failed_rungs(results: Sequence[Result]) -> list[str]:
    """The names of rungs of which a check failed, in order."""
    return list(dict.fromkeys(result.rung for result in results if not result.passed))


def line(result: Result) -> str:
    """One check in one line."""
    head = f"  {'pass' if result.passed else 'FAIL'}  {result.check:<66}"
    return f"{head}  {result.error:9.2e}  limit {result.tolerance:.6g} {result.unit}{_after(result.words)}"


def _climb_one(setting: Setting, rung: Rung) -> list[Result]:
    checks: list[Check] = []

    def prepare() -> float:
        checks.extend(rung.checks(setting))
        return 0.0 if checks else inf  # a rung that compares nothing has not been climbed

    ready = _measure(setting.job, rung, Check("preparation", prepare, 0.0, "errors"))
    if not ready.passed:
        setting.job.say(line(ready))
        return [ready]
    results = []
    for check in checks:
        results.append(_measure(setting.job, rung, check))
        setting.job.say(line(results[-1]))
    return results


def _measure(job: Job, rung: Rung, check: Check) -> Result:
    """Runs one check. A failure of any rank is a failure on all, with that rank's words."""
    began = time.perf_counter()
    error, words = attempt(check.run)
    found = job.gather((error, words))
    largest = max(one for one, _ in found)
    said = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
    return Result(
        rung.name, check.name, largest, check.tolerance, check.unit, largest <= check.tolerance,
        check.module or rung.module, said[0] if said else "", time.perf_counter() - began,
    )  # fmt: skip


def _after(words: str) -> str:
    return f"  {words}" if words else ""
