"""The command ``verify``: opens what a configuration or a run describes, climbs the ladder, writes its reports."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from vocab_parallel.agreement import capture
from vocab_parallel.app import config as configs
from vocab_parallel.app import runlog
from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts import host_class
from vocab_parallel.app.job import Job, join
from vocab_parallel.app.verify import report
from vocab_parallel.app.verify.ladder import Result, Rung, climb, failed_rungs, line
from vocab_parallel.app.verify.setting import DTYPES, Setting
from vocab_parallel.app.vocabulary import open_vocabulary
from vocab_parallel.checkpoint.together import agree
from vocab_parallel.errors import ConfigError, TyingError
from vocab_parallel.shard import RankGroup

_TYING = "vocab_parallel/tying.py"


def verify(
    config: Config,
    rungs: Sequence[Rung],
    *,
    folder: Path | None = None,
    out: Path | None = None,
    dtype: str = "float32",
    stop: bool = False,
) -> list[Result]:
    """Climbs `rungs` with what `config` describes, on this job's ranks.

    Args:
        folder: a run folder, whose newest checkpoint's weights are verified; None: fresh ones.
        out: where ``verify.json`` and ``verify.html`` go; None: ``<runs>/verify-<name>-<time>``.
        dtype: a name of `DTYPES`, of the head's checks.
        stop: end after the first rung that failed.

    Returns:
        What came of each check, the same on every rank.

    Raises:
        ConfigError, CheckpointLayoutError: the model cannot be opened, or the reports cannot be written.
    """
    vocabulary = open_vocabulary(config.data.vocab)
    host_class(config.host)  # says that its package is missing before the ranks wait for each other
    with join(config.parallel) as job:
        began = time.perf_counter()
        try:
            setting = Setting.open(job, config, vocabulary, folder=folder, dtype=DTYPES[dtype])
        except TyingError as error:  # a host proves its tie when it is made, on every rank alike
            about = {"name": config.name, "host": config.host, "ranks": job.world}
            results = [Result("vocabulary migration", "the run's model is tied", inf, 0.0, "faults", False, _TYING,
                              str(error), time.perf_counter() - began)]  # fmt: skip
            job.say(f"vocabulary migration\n{line(results[0])}\n  look in {_TYING}")
            place = _make_folder(job, config, out)
        else:
            about = report.describe(setting)
            job.say(report.opening(setting))
            place = _make_folder(job, config, out)
            results = climb(setting, rungs, stop=stop)
        seconds = time.perf_counter() - began
        ladder = report.Ladder(about, tuple(rungs), tuple(results), config.to_yaml(), seconds)
        _first_does(job, "write the reports", lambda: ladder.write(place))
        job.say(f"report: {place / report.HTML}, {place / report.JSON}")
        failed = failed_rungs(results)
        names = f"; failed: {', '.join(failed)}" if failed else ""
        passed = len({result.rung for result in results}) - len(failed)
        job.say(f"{passed} of {len(rungs)} rungs passed in {seconds:.1f} s{names}")
        return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``verify``."""
    parser.add_argument("source", help="a YAML config (fresh weights), or a run folder (its newest checkpoint's)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example parallel.tp=2")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of the head's checks; float32")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for verify.json and verify.html")
    parser.add_argument("--stop", action="store_true", help="end after the first rung that failed")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel verify``."""
    from vocab_parallel.app.verify.rungs import RUNGS

    config = configs.load(args.source, args.overrides)
    folder = Path(args.source) if Path(args.source).is_dir() else None
    results = verify(config, RUNGS, folder=folder, out=args.out, dtype=args.dtype, stop=args.stop)
    return 1 if failed_rungs(results) else 0


def _make_folder(job: Job, config: Config, out: Path | None) -> Path:
    """Where the first rank's reports go; made before the climb, which would be in vain without."""
    place = [out] if out else []

    def make() -> None:
        if not place:
            place.append(runlog.new_folder(dataclasses.replace(config, name=f"verify-{config.name}")))
        place[0].mkdir(parents=True, exist_ok=True)

    _first_does(job, "make the folder of the reports", make)
    return place[0] if place else Path()


def _first_does(job: Job, what: str, work: Callable[[], None]) -> None:
    """The first rank writes; an error of it is one of all."""
    fault = capture(work) if job.first else None
    if isinstance(fault, OSError):
        fault = ConfigError(f"could not {what}: {fault}. Give --out a folder that the first rank can write")
    agree(RankGroup(job.group), what, fault)
