"""``manifest``: what a checkpoint or a run says it is, where two differ, and whether the files agree."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint import latest_checkpoint
from vocab_parallel.checkpoint.manifest_check import disagreements
from vocab_parallel.errors import ConfigError
from vocab_parallel.vocabulary.manifest import NAME, Manifest, TensorSpec
from vocab_parallel.vocabulary.manifest.comparison import MUST, compare, printable, show
from vocab_parallel.vocabulary.manifest.rules import COMPARE, LOAD

_SHOWN = 12  # tensors, unless all are wanted
_TITLES = {
    "must match": "must match: the numbers mean different things",
    "may tune": "may tune: another setting of the same thing",
    "informational": "informational",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``manifest``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="show|compare|verify")
    where = "a manifest.json, a checkpoint, or a folder of checkpoints or of a run (its latest checkpoint's)"
    action = actions.add_parser("show", help="print a manifest as a table")
    action.add_argument("path", help=where)
    action.add_argument("--all", action="store_true", help="every tensor")
    action.add_argument("--json", action="store_true", help="print the JSON instead")
    action = actions.add_parser("compare", help="print every difference; status 1 if one is of what must match")
    action.add_argument("path", help=where)
    action.add_argument("other", help=where)
    action.add_argument("--all", action="store_true", help="every tensor")
    action.add_argument(
        "--for", dest="purpose", choices=(LOAD, COMPARE), help="what the two are wanted for; without it both"
    )
    action = actions.add_parser("verify", help="check a checkpoint's manifest and files; status 1 if they disagree")
    action.add_argument("path", help=where)


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel manifest``."""
    if args.action == "show":
        manifest = Manifest.read(find(args.path))
        print(manifest.to_text() if args.json else table(manifest, everything=args.all), end="")
        return 0
    if args.action == "compare":
        return _compare(args.path, args.other, args.purpose, everything=args.all)
    return _verify(args.path)


def find(path: str | Path) -> Path:
    """The manifest that a path means.

    Raises:
        ConfigError: There is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise ConfigError(f"{path} is not there: expected a {NAME}, a checkpoint folder or a run folder")
    for folder in (latest_checkpoint(path / "checkpoints"), path, latest_checkpoint(path)):
        if folder is not None and (folder / NAME).is_file():
            return folder / NAME
    raise ConfigError(f"{path} holds no {NAME}: expected a checkpoint folder or a run folder that `train` wrote")


def table(manifest: Manifest, *, everything: bool = False) -> str:
    """A manifest as aligned plain text, a heading for each group."""
    lines: list[str] = []
    for group, value in vars(manifest).items():
        if group == "version":
            continue
        head = f"{group} (version {manifest.version})" if group == "head" else group
        if value is None:
            lines.append(f"{head}: not recorded")
            continue
        rows = list(_rows(value if isinstance(value, Mapping) else vars(value), everything))
        lines.append(f"{head}{'' if rows else ': none'}")
        width = max((len(name) for name, _ in rows), default=0)
        lines += [f"  {name:<{width}}  {text}" for name, text in rows]
    return "\n".join(lines) + "\n"


def _rows(group: Mapping[str, Any], everything: bool) -> Iterator[tuple[str, str]]:
    for name, value in group.items():
        tensors = isinstance(value, Mapping) and any(isinstance(one, TensorSpec) for one in value.values())
        if name == "transforms" and value:
            for at, one in enumerate(value):
                yield f"transforms[{at}]", show(one)
        elif tensors:
            yield name, f"{len(value)}"
            shown = list(value.items())[: None if everything else _SHOWN]
            yield from ((f"  {key}", show(spec)) for key, spec in shown)
            if len(shown) < len(value):
                yield "  ...", f"{len(value) - len(shown)} more: --all"
        elif name == "ordered_table_sha256":
            yield name, value or "none"
        elif name == "shard_ranges":
            yield name, " ".join(f"[{start}, {stop})" for start, stop in value) or "none"
        elif isinstance(value, Mapping) and value:
            yield name, ", ".join(f"{key}={show(one)}" for key, one in value.items())
        else:
            yield name, show(value)


def _compare(path: str, other: str, purpose: str | None, *, everything: bool) -> int:
    places = [find(path), find(other)]
    a, b = (Manifest.read(place) for place in places)
    print(f"a: {places[0]}\nb: {places[1]}")
    found = compare(a, b, purpose)
    for kind, title in _TITLES.items():
        rows = [one for one in found if one.kind == kind]
        first = [at for at, one in enumerate(rows) if one.field.startswith("checkpoint.tensors.")]
        left = set() if everything else set(first[_SHOWN:])
        if rows:
            print(f"\n{title}")
        for at, one in enumerate(rows):
            if at not in left:
                print(f"  {one.field}: {show(one.a)} | {show(one.b)}\n    {one.why}")
        if left:
            print(f"  and {len(left)} more of checkpoint.tensors: --all")
    if not found:
        print("\nno difference")
    return 1 if any(one.kind == MUST for one in found) else 0


def _verify(path: str) -> int:
    place = find(path)
    if not (place.parent / "state.json").is_file():
        raise ConfigError(f"{place} lies beside no checkpoint: expected a checkpoint folder, or a run folder with one")
    found = disagreements(place.parent)
    for line in found:
        print(printable(line))
    words = f"{len(found)} disagreement{'s' if len(found) > 1 else ''}" if found else "the manifest and all files agree"
    print(f"{place.parent}: {words}", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0
