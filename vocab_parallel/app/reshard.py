"""``reshard``: a checkpoint rewritten along the shards of another number of ranks."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from vocab_parallel.checkpoint import latest_checkpoint, open_checkpoint
from vocab_parallel.checkpoint.resharding import reshard_checkpoint
from vocab_parallel.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``reshard``."""
    parser.add_argument("source", type=Path, help="a checkpoint, or a run folder (its latest checkpoint)")
    parser.add_argument("target", type=Path, help="the new checkpoint's folder; must not exist")
    parser.add_argument("--tp", type=int, required=True, help="ranks that share the vocabulary")
    parser.add_argument("--multiple-of", type=int, default=128, help="each shard's rows are a multiple of this")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel reshard``."""
    source = args.source
    if (source / "checkpoints").is_dir():
        latest = latest_checkpoint(source / "checkpoints")
        if latest is None:
            raise ConfigError(f"{source}/checkpoints holds no whole checkpoint")
        source = latest
    begin = time.perf_counter()
    made = reshard_checkpoint(source, args.target, args.tp, multiple_of=args.multiple_of)
    before, after = open_checkpoint(source).state["layout"], open_checkpoint(made).state["layout"]
    print(f"{source}: {_words(before)}\n{made}: {_words(after)}\n{time.perf_counter() - begin:.1f} s")
    return 0


def _words(layout: dict[str, int]) -> str:
    return f"V={layout['vocab_size']} padded to {layout['padded_size']} over {layout['tp_size']} ranks"
