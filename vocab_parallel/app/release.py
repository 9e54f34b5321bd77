"""``release``: promotes a checkpoint as one immutable bundle, rolls back to the one before, verifies, lists."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vocab_parallel.app.config import load
from vocab_parallel.app.decoding import Search, load_policy
from vocab_parallel.app.vocabulary import tekken_path
from vocab_parallel.checkpoint import latest_checkpoint, open_checkpoint
from vocab_parallel.checkpoint.migration.assets import is_tokenizer_file
from vocab_parallel.checkpoint.release import list_bundles, promote, rollback, verify
from vocab_parallel.checkpoint.release.bundle import Bundle, is_id
from vocab_parallel.decode.policy import Policy
from vocab_parallel.errors import CheckpointLayoutError, ConfigError, VocabularyError
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.strict_json import read_json

_SHOWN = 20  # faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``release``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="promote|rollback|verify|list")
    action = actions.add_parser("promote", help="bundle a checkpoint with all that belongs to it, and put it into use")
    action.add_argument("releases", help="the folder of releases; made if it is not there")
    action.add_argument("checkpoint", help="a checkpoint, a run folder (its latest), or a bundle to use again")
    action.add_argument("--tokenizer", help="its file or folder; default: that of the checkpoint, or of its run")
    action.add_argument("--policy", help="a policy file (YAML or JSON) or a preset; default: that of the manifest")
    action.add_argument("--acceptance", help="a JSON file: evaluation corpus and split, thresholds, results")
    action.add_argument("--migration", help="the report of a migrated checkpoint; default: found beside it")
    action.add_argument("--copy", action="store_true", help="copy the checkpoint's files, no hard links")
    action = actions.add_parser("rollback", help="put the bundle before back into use, whole")
    action.add_argument("releases", help="the folder of releases")
    action.add_argument("--to", metavar="ID", help="an earlier bundle; default: the last before the one in use")
    action.add_argument("--only", metavar="PART", help="refused: says what else differs")
    action = actions.add_parser("verify", help="hash, check and test a bundle again; status 1 if anything is wrong")
    action.add_argument("path", help="a folder of releases (the bundle in use), or a bundle")
    action = actions.add_parser("list", help="the bundles and their history")
    action.add_argument("releases", help="the folder of releases")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel release``."""
    try:
        return {"promote": _promote, "rollback": _rollback, "verify": _verify, "list": _list}[args.action](args)
    except VocabularyError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{error.filename or 'release'}: {error.strerror or error}") from error


def check_policy(policy: Mapping[str, Any], vocab_size: int) -> None:
    """Raises what is wrong with a serialised policy in a vocabulary of this size."""
    Policy.from_dict(policy).for_vocabulary(vocab_size)


def _promote(args: argparse.Namespace) -> int:
    checkpoint = _checkpoint(Path(args.checkpoint))
    bundle = promote(
        args.releases,
        checkpoint,
        tokenizer=args.tokenizer or _tokenizer_of_run(checkpoint),
        policy=None if args.policy is None else _policy(args.policy, checkpoint),
        acceptance=None if args.acceptance is None else read_json(Path(args.acceptance), "acceptance criteria"),
        migration=None if args.migration is None else read_json(Path(args.migration), "the report of a migration"),
        check_policy=check_policy,
        copy=args.copy,
    )
    print(_described(bundle))
    print(f"{bundle.note}; in use: {args.releases}/current -> {bundle.id}")
    return 0


def _rollback(args: argparse.Namespace) -> int:
    bundle = rollback(args.releases, to=args.to, only=args.only, check_policy=check_policy)
    print(_described(bundle))
    print(f"{bundle.note}; in use: {args.releases}/current -> {bundle.id}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    wrong = verify(args.path, check_policy=check_policy)
    for line in wrong[:_SHOWN]:
        print(line)
    if wrong:
        print(f"{args.path}: {len(wrong)} fault{'s' if len(wrong) > 1 else ''}", file=sys.stderr)
        return 1
    print(f"{args.path}: every file, gate and conformance test is as promoted")
    return 0


def _list(args: argparse.Namespace) -> int:
    bundles, history = list_bundles(args.releases)
    print(f"  {'bundle':<16}  {'step':>8}  {'ids':>9}  {'table':<8}  {'tied':<4}  {'MB':>10}  policy")
    whole = {bundle.id: bundle for bundle in bundles}
    first = {event.id: at for at, event in reversed([*enumerate(history.events)])}  # bundles in the order they came
    names = sorted(path.name for path in Path(args.releases).iterdir() if is_id(path.name))
    for name in sorted(names, key=lambda name: first.get(name, len(history.events))):
        line = _line(whole[name]) if name in whole else "not whole: `release verify` says why"
        print(f"{'*' if name == history.current else ' '} {name}  {line}")
    print("\nhistory")
    for event in history.events:
        print(f"  {event.time}  {event.action:<8}  {event.id or 'none'}")
    earlier = history.stack[:-1]
    print(f"rollback goes to {earlier[-1]}" if earlier else "no bundle to roll back to")
    return 0


def _line(bundle: Bundle) -> str:
    """A bundle in the table."""
    try:
        manifest = Manifest.read(bundle.manifest)
    except CheckpointLayoutError:
        return "not whole: `release verify` says why"
    step = manifest.checkpoint.step if manifest.checkpoint is not None else None
    return (
        f"{'?' if step is None else step:>8}  {manifest.vocabulary.size:>9,}  "
        f"{str(manifest.vocabulary.ordered_table_sha256)[:8]:<8}  {'yes' if manifest.tying.tied else 'no':<4}  "
        f"{bundle.bytes / 1e6:>10,.1f}  {'none' if manifest.policy is None else manifest.policy.name}"
    )


def _described(bundle: Bundle) -> str:
    """A bundle in lines."""
    manifest, record = Manifest.read(bundle.manifest), bundle.record.conformance
    best = ", ".join(f"{token_id} ({value:.4f})" for token_id, value in record.get("best", ())) or "no head"
    files = [] if bundle.tokenizer is None else sorted(path.name for path in bundle.tokenizer.iterdir())
    rows = {
        "bundle": f"{bundle.id}  {len(bundle.record.files)} files, {bundle.bytes:,} bytes",
        "made after": bundle.record.previous or "none",
        "vocabulary": f"{manifest.vocabulary.size:,} ids, table sha256 {manifest.vocabulary.ordered_table_sha256}",
        "tokenizer": ", ".join(files) or "none",
        "tie": ", ".join(f"{alias} is {first}" for alias, first in bundle.record.ties.items()) or "none",
        "policy": "none" if manifest.policy is None else f"{manifest.policy.name}, {manifest.policy.selector}",
        "best ids": f"{best} on the fixed hidden rows",
    }
    return "\n".join(f"{name:<10}  {value}" for name, value in rows.items())


def _checkpoint(path: Path) -> Path:
    """A checkpoint, or the latest of a run."""
    path = path.resolve() if path.is_symlink() else path  # `current` among them
    if is_id(path.name) or (path / "state.json").is_file():
        return path
    latest = latest_checkpoint(path / "checkpoints")
    if latest is None:
        raise ConfigError(
            f"{path} is neither a checkpoint nor a run folder with one. From another format: "
            f"python -m vocab_parallel convert {path} <checkpoint>"
        )
    return latest


def _tokenizer_of_run(checkpoint: Path) -> Path | None:
    """Where the run of a checkpoint has its tokenizer; None: in the checkpoint, or plain bytes, which have none."""
    run = checkpoint.parent.parent
    if checkpoint.parent.name != "checkpoints" or not (run / "config.yaml").is_file():
        return None
    if any(is_tokenizer_file(path.name) for path in checkpoint.glob("assets/*")):
        return None
    try:
        name = load(run).data.vocab
        return None if name == "bytes" else tekken_path() if name == "tekken" else Path(name)
    except ConfigError as error:
        raise ConfigError(f"{run / 'config.yaml'}: {error}. Say where its tokenizer is: --tokenizer PATH") from error


def _policy(source: str, checkpoint: Path) -> dict[str, Any]:
    """What a policy file or a preset says, for the checkpoint's vocabulary."""
    decoding = load_policy(source, int(open_checkpoint(checkpoint).state["layout"]["vocab_size"]))
    if decoding.search != Search():
        raise ConfigError(f"{source}: the section `search` is no part of a policy; put it into --acceptance")
    found: dict[str, Any] = json.loads(json.dumps(decoding.policy.to_dict()))
    return found
