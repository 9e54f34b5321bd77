"""Releases: promote a checkpoint with all that gives its ids and numbers a meaning, and go back in one action.

A folder of releases holds one folder for each bundle, the link `current` to the one in use, and `history.jsonl`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.release.bundle import (
    BUNDLE,
    CHECKPOINT,
    PARTS,
    Bundle,
    bundles_in,
    damaged,
    is_id,
    read_bundle,
    require_there,
)
from vocab_parallel.checkpoint.release.checks import PolicyCheck, bundle_faults, part_faults
from vocab_parallel.checkpoint.release.conformance import conformance_record
from vocab_parallel.checkpoint.release.history import CURRENT, History, current_id, locked
from vocab_parallel.checkpoint.release.writing import Folder, assembling, gather
from vocab_parallel.checkpoint.writing import described
from vocab_parallel.errors import CheckpointLayoutError, VocabParallelError
from vocab_parallel.vocabulary.manifest import Manifest, compare
from vocab_parallel.vocabulary.manifest.comparison import MUST, show


def promote(
    releases: Folder,
    checkpoint: Folder,
    *,
    tokenizer: Folder | None = None,
    policy: Mapping[str, Any] | None = None,
    acceptance: Mapping[str, Any] | None = None,
    migration: Mapping[str, Any] | None = None,
    check_policy: PolicyCheck | None = None,
    copy: bool = False,
) -> Bundle:
    """Makes a bundle of a checkpoint and puts it into use; nothing is visible before every gate has passed.

    The gates: files as they were saved; the tokenizer's ordered table is the checkpoint's; manifest, files, ties and
    optimizer owners agree; shards cover the ids; the policy's ids are tokens of this vocabulary; finite rows; of a
    migrated checkpoint a report that rows and moments were kept. In one process.

    Args:
        releases: Made if it is not there.
        checkpoint: A checkpoint with a manifest that names its ordered table; or a bundle of `releases`, to put that
            one into use again.
        tokenizer: A file or folder; None: the one the checkpoint carries along, or its `vocabulary.json` alone.
        policy: `Policy.to_dict()`; None: that of the checkpoint's manifest, if it has one.
        acceptance: Evaluation corpus and split, thresholds, results: any JSON.
        migration: Of a migrated checkpoint the report; None: the one that ``migrate`` wrote beside it.
        check_policy: Called with the policy and the vocabulary's size; raises what is wrong with it.
        copy: Copy the checkpoint's files. Else they are hard links where the file system allows it, and so become
            read-only under their old names too.

    Returns:
        The bundle; its `note` says if it was there already. Equal content has an equal id.

    Memory:
        One block of a file, and 40 bytes a row of the vocabulary.

    Raises:
        CheckpointLayoutError: A gate refuses, naming both sides; or another process is at work there.
    """
    releases, source = Path(releases), Path(checkpoint)
    releases.mkdir(parents=True, exist_ok=True)
    with locked(releases) as history:
        if source.parent.resolve() == releases.resolve() and is_id(source.name):
            if (tokenizer, policy, acceptance, migration) != (None,) * 4:
                raise CheckpointLayoutError(
                    f"{source} is a bundle, which never changes: to put it into use again give nothing else; for "
                    "another bundle promote the checkpoint that it was made of"
                )
            return _use(history, read_bundle(releases / source.name), check_policy, False)
        with assembling(releases) as assembly:
            manifest = gather(assembly, source, tokenizer, policy, acceptance, migration, copy)
            try:
                wrong = part_faults(assembly.path, check_policy)
                stored = open_checkpoint(assembly.path / CHECKPOINT)
                record = {} if wrong else conformance_record(stored, manifest)
            except VocabParallelError as error:
                wrong = [str(error)]
            if wrong:
                words = "; ".join(wrong).replace(f"{assembly.path}{os.sep}", "")
                raise CheckpointLayoutError(f"{source} is not promoted: {words}")
            made, is_new = assembly.finish(history.stack, stored.state["ties"], record)
        return _use(history, made, check_policy, is_new)


def rollback(
    releases: Folder, *, to: str | None = None, only: str | None = None, check_policy: PolicyCheck | None = None
) -> Bundle:
    """Puts the bundle that was in use before back into use, whole, by one rename; it is verified first.

    Args:
        to: An earlier one of the history; None: the last before the one in use.
        only: A part; always refused, with what differs.

    Raises:
        CheckpointLayoutError: There is none to go back to, it is not whole, or a part was asked for.
    """
    releases = _existing(releases)
    with locked(releases) as history:
        target = _target(history, to)
        if only is not None:
            raise CheckpointLayoutError(_refusal(releases, only, history.current, target))
        bundle = read_bundle(releases / target)
        _require_whole(bundle, check_policy, history)
        history.move("rollback", target)
        return dataclasses.replace(bundle, note=f"rolled back from {history.current}")


def verify(path: Folder, *, check_policy: PolicyCheck | None = None) -> list[str]:
    """Reads a bundle again, every byte, and repeats gates and conformance tests.

    Args:
        path: A bundle; or a folder of releases, of which the one in use is verified and the one before it looked at.

    Returns:
        What is wrong, in words; empty: nothing.

    Raises:
        CheckpointLayoutError: It is neither.
    """
    path = Path(os.path.abspath(path))
    if path.name == CURRENT and path.is_symlink():
        path = path.parent
    if (path / BUNDLE).exists():
        return _faults(read_bundle(path), check_policy, History(path.parent))
    history = History(_existing(path))
    if history.current is None:
        return [f"{path / CURRENT} is missing: no bundle is in use"]
    try:
        wrong = _faults(read_bundle(path / history.current), check_policy, history)
    except CheckpointLayoutError as error:
        return [f"{path / CURRENT}: {error}"]
    for before in history.stack[-2:-1]:
        try:
            require_there(read_bundle(path / before))
        except CheckpointLayoutError as error:
            wrong.append(f"no rollback is possible: {error}")
    return wrong


def open_current(releases: Folder) -> Bundle:
    """The bundle in use, for a loader: all paths in it are of this one, whatever is promoted meanwhile.

    A cheap check: the list of files, its id, and that each file is there with its size. `verify` reads them.

    Raises:
        CheckpointLayoutError: None is in use, or it is not whole.
    """
    releases = _existing(releases)
    found = current_id(releases)
    if found is None:
        raise CheckpointLayoutError(
            f"no bundle is in use in {releases}: python -m vocab_parallel release promote {releases} <checkpoint>"
        )
    return require_there(read_bundle(releases / found))


def list_bundles(releases: Folder) -> tuple[list[Bundle], History]:
    """The bundles of a folder, and its history."""
    releases = _existing(releases)
    return bundles_in(releases), History(releases)


def _use(history: History, bundle: Bundle, check_policy: PolicyCheck | None, is_new: bool) -> Bundle:
    """Puts a bundle into use, if it is not already; one that was there is verified first."""
    if not is_new:
        _require_whole(bundle, check_policy, history)
        if bundle.id == history.current:
            return dataclasses.replace(bundle, note="already in use: the same content")
    history.move("promote", bundle.id, described(bundle.path / BUNDLE)["sha256"])
    return dataclasses.replace(bundle, note="promoted" if is_new else "promoted again: the same content")


def _require_whole(bundle: Bundle, check_policy: PolicyCheck | None, history: History) -> None:
    wrong = _faults(bundle, check_policy, history)
    if wrong:
        raise CheckpointLayoutError(damaged(bundle.path, wrong))


def _faults(bundle: Bundle, check_policy: PolicyCheck | None, history: History) -> list[str]:
    wrong = bundle_faults(bundle, check_policy)
    known, found = history.digest(bundle.id), described(bundle.path / BUNDLE)["sha256"]
    if known not in (None, found):
        wrong.append(f"{BUNDLE} has sha256 {found[:16]}…, was promoted with {str(known)[:16]}…")
    return wrong


def _target(history: History, to: str | None) -> str:
    """The id to go back to."""
    earlier = history.stack[:-1]
    if not earlier:
        raise CheckpointLayoutError(
            f"nothing to roll back to in {history.releases}: no bundle was in use before {history.current or 'any'}"
        )
    if to is None:
        return earlier[-1]
    if to == history.current:
        raise CheckpointLayoutError(f"bundle {to} is in use already")
    if to not in earlier:
        raise CheckpointLayoutError(
            f"bundle {to[:40]} was not in use before {history.current}; earlier ones: {', '.join(earlier[::-1])}. To "
            f"go forward: python -m vocab_parallel release promote {history.releases} {history.releases}/{to[:40]}"
        )
    return to


def _refusal(releases: Path, only: str, current: str | None, target: str) -> str:
    """Why a part does not go back alone."""
    assert current is not None
    now, before = read_bundle(releases / current), read_bundle(releases / target)
    changed = {name for name, record in before.record.files.items() ^ now.record.files.items()}
    parts = [part for part in PARTS if any(name.split("/")[0] == part for name in changed)]
    found = compare(Manifest.read(before.manifest), Manifest.read(now.manifest))
    words = [f"{one.field} was {show(one.a)}, is {show(one.b)} ({one.why})" for one in found if one.kind == MUST]
    return (
        f"{only} alone is not rolled back: bundles {target} and {current} differ in {', '.join(parts) or 'nothing'}"
        f"{''.join(f'; {one}' for one in words[:3])}. An old part beside new ones is a release that nobody has tested: "
        "its ids may mean other tokens, and no row goes back with it. Go back to the whole bundle: "
        f"python -m vocab_parallel release rollback {releases}"
    )


def _existing(releases: Folder) -> Path:
    path = Path(releases)
    if not path.is_dir():
        raise CheckpointLayoutError(f"{path} is no folder of releases: there is none of that name")
    return path
