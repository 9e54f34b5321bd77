"""`scripts/fuzz`: draws cases, runs them on ranks, compares them with the oracle, until stopped.

scripts/fuzz                                   until Ctrl-C
scripts/fuzz --cases 20000 --seed 7            so many, of this seed
scripts/fuzz --kinds losses,policies --seconds 60
scripts/fuzz --case losses:123456              one case again, as a finding names it
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys

from tests.fuzz.campaign import Report, campaign, check_case
from tests.fuzz.kinds.every import KINDS, make


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 if something was found."""
    given = parser().parse_args(arguments)
    if given.case:
        return again(given.case)
    kinds = given.kinds.split(",") if given.kinds else list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        print(f"error: no kind {unknown[0]!r}; there are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    report = Report(given.seed if given.seed is not None else secrets.randbits(31))
    print(f"seed {report.master}, kinds {', '.join(kinds)}; Ctrl-C ends it with a summary", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # ends with the summary too
    try:
        campaign(report, kinds, cases=given.cases, seconds=given.seconds, say=say)
    except KeyboardInterrupt:
        say("stopped")
    say(report.table())
    say(f"seed {report.master}: {report.line()}")
    for finding in report.findings:
        say(f"found {finding.kind}:{finding.seed} ({finding.trouble}), small: {finding.small!r}")
    return 1 if report.findings else 0


def again(name: str) -> int:
    """Runs one case by its kind and seed."""
    kind, _, seed = name.partition(":")
    if kind not in KINDS or not seed.isdigit():
        print(f"error: --case takes KIND:SEED, such as losses:123, got {name!r}", file=sys.stderr)
        return 2
    case = make(kind, int(seed))
    say(repr(case))
    try:
        check_case(case)
    except AssertionError as error:
        say(str(error))
        return 1
    say("as the oracle has it")
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/fuzz", description="Differential fuzzing against the oracle.")
    made.add_argument("--cases", type=int, help="how many; by default until stopped")
    made.add_argument("--seed", type=int, help="master seed; by default a new one, which is printed")
    made.add_argument("--kinds", help="names with commas between; by default all: " + ", ".join(KINDS))
    made.add_argument("--seconds", type=float, help="how long; by default until stopped")
    made.add_argument("--case", help="KIND:SEED: runs this one again")
    return made


if __name__ == "__main__":
    sys.exit(main())
