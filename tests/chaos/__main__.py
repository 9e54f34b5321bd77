"""Kills a training in many ways and looks whether it ends as if nothing had been: the command of ``scripts/chaos``."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.chaos.migration import migration
from tests.chaos.scenarios import Reference, Result, agent, disturbed, undisturbed

# Kills by scenario on 2 and on 4 ranks, of a run of all of them; of "hang" and the disks, what is done instead.
SHARES = {
    "step": (6, 4), "collective": (6, 4), "save": (6, 5), "async save": (5, 4), "damage": (3, 3), "agent": (3, 2),
    "migration": (6, 4), "hang": (1, 1), "disk": (2, 2), "async disk": (2, 1),
}  # fmt: skip
OTHERS: dict[str, Callable[[random.Random, Path, Reference, int], Result]] = {"agent": agent, "migration": migration}
COLUMNS = "{:<11} {:>5} {:>5} {:>6} {:>8} {:>7}  {}"


def main(words: list[str] | None = None) -> int:
    """Runs the chosen scenarios. Returns 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--kills", type=int, help="in all (default: about 60 over all scenarios)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--scenario", choices=SHARES, action="append", help="only this one; may come several times")
    parser.add_argument("--ranks", type=int, choices=(2, 4), help="only so many ranks")
    args = parser.parse_args(words)
    jobs = {(name, ranks): share for ranks, at in ((2, 0), (4, 1)) for name, shares in SHARES.items()
            if name in (args.scenario or SHARES) and args.ranks in (None, ranks) and (share := shares[at])}  # fmt: skip
    total = sum(jobs.values())
    place, began = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    references: dict[int, Reference] = {}
    done: list[Result] = []
    print(COLUMNS.format("scenario", "ranks", "kills", "others", "restarts", "seconds", "outcome"), flush=True)
    for (name, ranks), share in jobs.items():
        count = share if args.kills is None else max(1, round(share * args.kills / total))
        if ranks not in references:
            references[ranks] = undisturbed(place / f"undisturbed-{ranks}", ranks)
        own = place / f"{name.replace(' ', '-')}-{ranks}"
        result = _run(name, random.Random(f"{args.seed}/{name}/{ranks}"), own, references[ranks], count)
        done.append(result)
        outcome = "the same bits" if not result.faults else f"FAILED: {'; '.join(result.faults)}"
        numbers = result.kills, result.other, result.restarts, f"{result.seconds:.0f}"
        print(COLUMNS.format(name, ranks, *numbers, outcome), flush=True)
        if result.faults:
            print(f"  again: scripts/chaos --scenario '{name}' --ranks {ranks} --kills {count} --seed {args.seed}; "
                  f"logs and folders: {own}", flush=True)  # fmt: skip
    failed = sum(bool(one.faults) for one in done)
    kills, other, restarts = (sum(getattr(one, key) for one in done) for key in ("kills", "other", "restarts"))
    print(f"{kills} kills and {other} other strikes, {restarts} restarts, {len(done) - failed} of {len(done)} as if "
          f"nothing had been, {time.monotonic() - began:.0f} s, seed {args.seed}")  # fmt: skip
    if not failed:
        shutil.rmtree(place)
    return int(failed > 0)


def _run(name: str, drawn: random.Random, place: Path, reference: Reference, count: int) -> Result:
    try:
        if name in OTHERS:
            return OTHERS[name](drawn, place, reference, count)
        return disturbed(name, drawn, place, reference, count)
    except Exception:  # a scenario that fails in itself must not end the others
        return Result(faults=[traceback.format_exc()])


if __name__ == "__main__":
    sys.exit(main())
