"""``convert``: checkpoints of this package to and from Hugging Face directories and Megatron-core, from DeepSpeed."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from vocab_parallel.checkpoint import latest_checkpoint
from vocab_parallel.checkpoint.exchange.hugging_face import Exchanged, from_hugging_face, to_hugging_face
from vocab_parallel.checkpoint.exchange.megatron import from_megatron, to_megatron
from vocab_parallel.checkpoint.exchange.megatron_files import CONFIG, TRACKER
from vocab_parallel.checkpoint.exchange.safetensors_files import INDEX, NAME
from vocab_parallel.checkpoint.exchange.targets import open_ours, publish, require_free
from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.placing import METADATA, STATE
from vocab_parallel.errors import ConfigError
from vocab_parallel.integrations.deepspeed.exchange import from_deepspeed

OURS, HUGGING_FACE, MEGATRON, DEEPSPEED = "ours", "hf", "megatron", "deepspeed"
_WORDS = {
    OURS: "a checkpoint of vocab_parallel", HUGGING_FACE: "a Hugging Face directory",
    MEGATRON: "a distributed checkpoint of Megatron-core", DEEPSPEED: "a checkpoint of DeepSpeed",
}  # fmt: skip
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Which way an option has a meaning: (from, to); None: any.
_MEANT_FOR: dict[str, tuple[tuple[str | None, str | None], ...]] = {
    "tp": ((None, OURS),), "multiple_of": ((None, OURS),),
    "vocab_size": ((HUGGING_FACE, None), (MEGATRON, None), (DEEPSPEED, None)), "tables": ((HUGGING_FACE, None),),
    "dtype": ((HUGGING_FACE, None), (None, HUGGING_FACE)),
    "tied": ((None, HUGGING_FACE),), "config": ((None, HUGGING_FACE),), "max_shard": ((None, HUGGING_FACE),),
    "rename": ((MEGATRON, None), (None, MEGATRON)), "padded_size": ((None, MEGATRON),),
    "weights_only": ((MEGATRON, OURS),),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``convert``."""
    add = parser.add_argument
    add("source", help="a checkpoint, a run folder (its latest), a Hugging Face directory, or a folder that "
                       "Megatron-core or DeepSpeed saved; told by what is in it")  # fmt: skip
    add("target", help="the folder to write")
    add("--to", choices=(OURS, HUGGING_FACE, MEGATRON), help="format to write; by default hf of ours, else ours")
    add("--tp", type=int, metavar="N", help="cut the files along N ranks' shards; any number of ranks loads them")
    add("--multiple-of", type=int, metavar="M", help="pad each rank's rows to a multiple of M (128)")
    add("--vocab-size", type=int, metavar="V", help="real rows; the rest of the tables is padding and left out")
    add("--dtype", choices=_DTYPES, help="convert floating-point tensors")
    add("--tables", metavar="NAMES", help="tensors over the vocabulary, the embedding first, with commas between them")
    add("--tied", choices=("one", "both"), help="write a tied weight under its first name (default), or under both")
    add("--config", metavar="PATH", help="a config.json to write along, with corrected sizes")
    add("--max-shard", metavar="SIZE", help="bytes in one safetensors file, such as 5GB (the default)")
    add("--rename", action="append", metavar="NAME=NAME", help="a parameter's name in the source and in the target")
    add("--padded-size", type=int, metavar="P", help="rows of the tables in Megatron")
    add("--weights-only", action="store_true", default=None, help="leave the optimizer's state in Megatron")
    add("--overwrite", action="store_true", help="replace a target that is there")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel convert``."""
    began = time.monotonic()
    try:
        kind, source = tell(Path(args.source))
        wanted = args.to or (HUGGING_FACE if kind == OURS else OURS)
        _check(args, kind, wanted)
        print(f"found    {source}: {_WORDS[kind]}", flush=True)
        with _target(Path(args.target), source, args.overwrite) as target:
            written = _convert(args, kind, source, wanted, target)
    except OSError as error:
        raise ConfigError(str(error)) from error
    print(f"wrote    {args.target}: {_WORDS[wanted]}, {written / 1e6:,.1f} MB in {time.monotonic() - began:.1f} s")
    return 0


class Source(NamedTuple):
    """What a folder is, and the folder inside it that counts."""

    kind: str
    path: Path


def tell(path: Path) -> Source:
    """Which format a folder has, by what is in it.

    Raises:
        ConfigError: None that is known.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not there, or is no folder")
    if (path / STATE).is_file():
        return Source(OURS, path)
    for folder in (path / "checkpoints", path):
        if (latest := latest_checkpoint(folder)) is not None:
            return Source(OURS, latest)
        if steps := sorted(folder.glob("step-*/latest")):  # of a run with host=deepspeed
            return Source(DEEPSPEED, steps[-1].parent)
    if _holds(path, TRACKER) or (_holds(path, METADATA) and _holds(path, CONFIG)):
        return Source(MEGATRON, path)
    if not _holds(path, NAME, INDEX) and (_holds(path, "latest") or any(path.glob("*mp_rank_*_model_states.pt"))):
        return Source(DEEPSPEED, path)
    if _holds(path, NAME, INDEX, "config.json"):
        return Source(HUGGING_FACE, path)
    held = ", ".join(sorted(one.name for one in path.iterdir())[:6]) or "nothing"
    raise ConfigError(
        f"{path} is no format that is known here. Expected {STATE} (or a run folder), {NAME} or {INDEX}, {CONFIG} with "
        f"{METADATA}, or a DeepSpeed tag; it holds {held}"
    )


def _convert(args: argparse.Namespace, kind: str, source: Path, wanted: str, target: Path) -> int:
    """By way of a checkpoint of ours; returns the bytes written."""
    if kind == OURS:
        _show(open_ours(source, verify=False))
        return _export(args, source, wanted, target)
    if wanted == OURS:
        _import(args, kind, source, target, optimizer=not args.weights_only)
        stored = open_checkpoint(target)
        _show(stored)
        return sum(int(file["bytes"]) for file in stored.state["files"].values())
    between = target.parent / f".{target.name}.ours"
    try:
        shutil.rmtree(between, ignore_errors=True)
        _import(args, kind, source, between, optimizer=False)
        _show(open_ours(between, verify=False))
        return _export(args, between, wanted, target)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _import(args: argparse.Namespace, kind: str, source: Path, target: Path, *, optimizer: bool) -> None:
    tp_size, multiple_of = args.tp or 1, args.multiple_of or 128
    if kind == HUGGING_FACE:
        tables = [name.strip() for name in args.tables.split(",")] if args.tables else None
        done = from_hugging_face(
            source, target, tp_size=tp_size, multiple_of=multiple_of, vocab_size=args.vocab_size, dtype=_dtype(args),
            tables=tables,
        )  # fmt: skip
        _notes(done)
    elif kind == MEGATRON:
        from_megatron(
            source, target, vocab_size=args.vocab_size, tp_size=tp_size, rename=_renamed(args), multiple_of=multiple_of,
            optimizer=optimizer,
        )  # fmt: skip
        stored = open_checkpoint(target).state
        real, padded = stored["layout"]["vocab_size"], stored["extra"].get("megatron", {}).get("padded_size", 0)
        if padded > real:
            print(f"note     {padded - real:,} rows past vocab_size {real:,} are padding and are left out")
    else:
        from_deepspeed(source, target, tp_size=tp_size, vocab_size=args.vocab_size, multiple_of=multiple_of)


def _export(args: argparse.Namespace, source: Path, wanted: str, target: Path) -> int:
    if wanted == MEGATRON:
        to_megatron(source, target, padded_size=args.padded_size, rename=_renamed(args))
        stored = open_checkpoint(source)
        left = sum(not key.startswith("model.") for key in stored.tensors)
        if left and "megatron" not in stored.state["extra"]:
            print(f"note     {left:,} tensors of an optimizer that was not Megatron's are left out")
        return sum(one.stat().st_size for one in target.iterdir() if one.is_file())
    done = to_hugging_face(
        source, target, dtype=_dtype(args), tied=args.tied, config=args.config, max_shard_bytes=_size(args.max_shard)
    )
    _notes(done)
    return done.bytes


@contextmanager
def _target(final: Path, source: Path, overwrite: bool) -> Iterator[Path]:
    """The folder to write: beside one that is to be replaced, until it is whole."""
    require_free(final, source, overwrite=overwrite)
    if not final.exists():
        yield final
        return
    aside = final.parent / f".{final.name}.converted"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
        publish(aside, final)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check(args: argparse.Namespace, kind: str, wanted: str) -> None:
    """Refuses what would do nothing."""
    if kind == wanted == OURS:
        raise ConfigError(
            f"{args.source} is a checkpoint of this package already. For another number of ranks: "
            f"python -m vocab_parallel reshard {args.source} {args.target} --tp N"
        )
    if kind == wanted == MEGATRON:
        raise ConfigError(f"{args.source} is a distributed checkpoint of Megatron-core already")
    for name, ways in _MEANT_FOR.items():
        if getattr(args, name) is None:
            continue
        if not any(begin in (None, kind) and end in (None, wanted) for begin, end in ways):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} has no meaning from {_WORDS[kind]} to {_WORDS[wanted]}")
    for name in ("tp", "multiple_of", "vocab_size", "padded_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected at least 1")


def _show(stored: StoredCheckpoint) -> None:
    """What was found, a line for each table."""
    state = stored.state
    model = [key for key in stored.tensors if key.startswith("model.")]
    rest = len(stored.tensors) - len(model)
    total = sum(math.prod(size) * dtype.itemsize for dtype, size in stored.tensors.values())
    states = f" and {rest:,} of the optimizer" if rest else ""
    print(f"tensors  {len(model):,} of the model{states}, {total / 1e6:,.1f} MB, step {stored.step}")
    for name in state["tables"]:
        dtype, size = stored.tensors[f"model.{name}"]
        aliases = [alias for alias, first in state["ties"].items() if first == name]
        tied = f", tied: {', '.join(aliases)}" if aliases else ""
        print(f"table    {name} {list(size)} {str(dtype).removeprefix('torch.')}{tied}")
    layout = state["layout"]
    print(f"rows     {layout['vocab_size']:,} real ones, files cut for TP {layout.get('tp_size', 1)}")
    sha256 = state["extra"].get("vocabulary_sha256")
    if sha256:
        print(f"ids      ordered table sha256 {str(sha256)[:16]}…")


def _notes(done: Exchanged) -> None:
    for note in done.notes:
        print(f"note     {note}")


def _dtype(args: argparse.Namespace) -> torch.dtype | None:
    return None if args.dtype is None else getattr(torch, args.dtype)


def _renamed(args: argparse.Namespace) -> dict[str, str] | None:
    made: dict[str, str] = {}
    for word in args.rename or ():
        there, equals, here = word.partition("=")
        if not (there and equals and here) or "=" in here or there in made:
            raise ConfigError(f"--rename {word}: expected NAME=NAME, in the source and in the target, each name once")
        made[there] = here
    return made or None


def _size(text: str | None) -> int:
    if text is None:
        return 5 * 10**9
    found = re.fullmatch(r"(\d{1,15})\s*([KMGT]?B?)", text.strip(), re.IGNORECASE)
    unit = found[2].upper() if found else "?"
    unit = unit if unit in _UNITS else f"{unit}B"
    if found is None or unit not in _UNITS or int(found[1]) < 1:
        raise ConfigError(f"--max-shard {text}: expected a number of bytes, such as 5GB or 200MB")
    return int(found[1]) * _UNITS[unit]


def _holds(path: Path, *names: str) -> bool:
    return any((path / name).is_file() for name in names)
