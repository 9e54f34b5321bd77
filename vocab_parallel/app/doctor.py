"""What this installation and this set of ranks can do: environment, layout, and every operation against the oracle."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from vocab_parallel.app import config as configs
from vocab_parallel.app import runlog
from vocab_parallel.app.comparing import attempt
from vocab_parallel.app.config import Config
from vocab_parallel.app.job import Job, join
from vocab_parallel.app.selftests import SelfTests
from vocab_parallel.app.vocabulary import open_vocabulary
from vocab_parallel.errors import ConfigError
from vocab_parallel.layout import VocabLayout


def examine(config: Config) -> bool:
    """Prints the three parts on the first rank.

    Returns:
        Whether every self-test passed on every rank; the same on all ranks.
    """
    with join(config.parallel) as job:
        job.say(f"environment\n{_indent(runlog.environment())}")
        job.say(f"layout of {config.name}\n{_indent(layout_table(_layout(config, job)))}")
        job.say(
            f"self-tests against the oracle, {job.world} ranks, {job.device}, float32, largest error over all ranks"
        )
        passed = [_run(job, name, test, limit) for name, test, limit in SelfTests(job).all()]
        job.say(f"{sum(passed)} of {len(passed)} passed")
        return all(passed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``doctor``."""
    parser.add_argument("source", nargs="?", help="a YAML config or run folder, for the layout; default: Tekken's size")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example parallel.tp=2")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel doctor``."""
    if args.source is None or "=" in args.source:
        overrides = [word for word in (args.source, *args.overrides) if word is not None]
        config = configs.from_overrides(overrides)
    else:
        config = configs.load(args.source, args.overrides)
    return 0 if examine(config) else 1


def layout_table(layout: VocabLayout) -> str:
    """A layout as aligned text: one line a rank."""
    lines = [str(layout), f"{'rank':>4}  {'first id':>10}  {'end':>10}  {'real ids':>10}  {'padding':>8}"]
    for rank in range(layout.tp_size):
        ids = layout.range(rank)
        padding = layout.shard_size - len(ids)
        lines.append(f"{rank:>4}  {ids.start:>10,}  {ids.stop:>10,}  {len(ids):>10,}  {padding:>8,}")
    return "\n".join(lines)


def _layout(config: Config, job: Job) -> VocabLayout:
    try:
        size = open_vocabulary(config.data.vocab).size
    except ConfigError as error:
        job.say(f"vocabulary: {error}")
        size = 131_072
    return VocabLayout(size, job.tp, multiple_of=config.parallel.multiple_of)


def _run(job: Job, name: str, test: Callable[[], float], limit: float) -> bool:
    """Runs one self-test and prints its line. A failure of any rank is a failure on all."""
    error, words = attempt(test)
    largest = max(job.gather(error))
    passed = bool(largest <= limit)
    job.say(f"  {'pass' if passed else 'FAIL'}  {name:<52}  {largest:9.2e}  limit {limit:.0e}")
    if words:
        print(f"rank {job.rank}: {name}:  {words}", flush=True)
    return passed


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
