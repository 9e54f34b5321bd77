"""The command line: ``python -m vocab_parallel <command>``, under torchrun or alone."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from vocab_parallel.errors import CheckpointLayoutError, ConfigError, LayoutError, VocabularyError

# One line a command: its module under `app` (with add_arguments and main) and what it does.
COMMANDS = {
    "train": "pretrain a small language model, checked step by step against a single-rank oracle",
    "generate": "continue a prompt from a run folder",
    "doctor": "print environment and layout, and test every operation on the ranks it runs on",
    "verify": "climb the evaluation ladder with your own head, vocabulary, ranks and host, and report it",
    "plan": "predict time, memory and bytes of each schedule of the loss, with advice",
    "bench": "time the loss beside other libraries, or selection beside gathering, with bytes and collectives",
    "report": "rebuild a run folder's report.html",
    "manifest": "show, compare or verify what checkpoints and runs say they are",
    "migrate": "give a checkpoint, a run or a Hugging Face model another vocabulary",
    "convert": "checkpoints from and to Hugging Face directories and Megatron-core, from DeepSpeed",
    "reshard": "rewrite a checkpoint along the shards of another number of ranks",
    "release": "promote, roll back and verify releases: model, tokenizer and policy as one",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit status: 0 done, 1 a check failed, 2 the command line or the configuration cannot work.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m vocab_parallel", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, summary in COMMANDS.items():
        # Only the chosen command's module is imported: help must not wait for torch.
        command = commands.add_parser(name, help=summary, description=summary)
        if name in arguments:
            importlib.import_module(f"vocab_parallel.app.{name}").add_arguments(command)
    args, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]  # argparse leaves out overrides that follow an option
    try:
        status: int = importlib.import_module(f"vocab_parallel.app.{args.command}").main(args)
    except (ConfigError, CheckpointLayoutError, LayoutError, VocabularyError) as error:
        rank = os.environ.get("RANK")
        where = f" (rank {rank})" if rank is not None else ""
        print(f"{type(error).__name__}{where}: {error}", file=sys.stderr, flush=True)
        return 2
    return status
