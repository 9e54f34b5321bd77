"""Putting a release bundle together, out of sight until it is whole."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.files import StoredCheckpoint, check_file, damaged, open_checkpoint
from vocab_parallel.checkpoint.migration.assets import TOKENIZER_FILES
from vocab_parallel.checkpoint.placing import STATE, sync
from vocab_parallel.checkpoint.release.bundle import (
    ACCEPTANCE,
    BUNDLE,
    CHECKPOINT,
    MIGRATION,
    POLICY,
    TOKENIZER,
    Bundle,
    BundleRecord,
    FileRecord,
    bundle_id,
    is_plain,
    read_bundle,
)
from vocab_parallel.checkpoint.release.checks import read_tokenizer, require_table
from vocab_parallel.checkpoint.writing import ASSETS, MANIFEST, VOCABULARY, described, json_bytes, write_file
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest, PolicyContract
from vocab_parallel.vocabulary.manifest.strict_json import dump, to_text

Folder = str | os.PathLike[str]


class Assembly:
    """A bundle in the making, in a hidden folder beside its future name."""

    def __init__(self, releases: Path) -> None:
        self.path = releases / ".bundle.partial"
        self.files: dict[str, FileRecord] = {}

    def add(self, name: str, content: Path | bytes, *, link: bool = False) -> FileRecord:
        """Puts a file in: a hard link if asked for and possible, else a copy."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if link and isinstance(content, Path) and _linked(content, target):
            written = described(target)
        else:
            written = write_file(target, content)
        self.files[name] = FileRecord(written["bytes"], written["sha256"])
        return self.files[name]

    def finish(
        self, earlier: list[str], ties: Mapping[str, str], conformance: Mapping[str, Any]
    ) -> tuple[Bundle, bool]:
        """Lists the files, makes all read-only, syncs, and gives the folder its name.

        Returns:
            The bundle, and whether it is new: one of the same content stays as it is.
        """
        made = bundle_id(self.files)
        previous = next((one for one in reversed(earlier) if one != made), None)
        record = BundleRecord(made, previous, dict(sorted(self.files.items())), ties, conformance)
        final = self.path.parent / record.id
        if final.exists():
            return read_bundle(final), False
        write_file(self.path / BUNDLE, to_text(dump(record), BUNDLE).encode())
        for folder, _, names in os.walk(self.path, topdown=False):
            for name in names:
                os.chmod(Path(folder, name), 0o444)
            sync(Path(folder))
            os.chmod(folder, 0o555)
        os.replace(self.path, final)
        sync(final.parent)
        return read_bundle(final), True


@contextmanager
def assembling(releases: Path) -> Iterator[Assembly]:
    """An `Assembly`; what is not finished at the end goes away."""
    assembly = Assembly(releases)
    remove(assembly.path)
    assembly.path.mkdir()
    try:
        yield assembly
    finally:
        remove(assembly.path)


def gather(
    assembly: Assembly,
    source: Path,
    tokenizer: Folder | None,
    policy: Mapping[str, Any] | None,
    acceptance: Mapping[str, Any] | None,
    migration: Mapping[str, Any] | None,
    copy: bool,
) -> Manifest:
    """Puts all parts into the bundle in the making."""
    stored = open_checkpoint(source)
    if not (source / MANIFEST).is_file():
        raise CheckpointLayoutError(
            f"{source} has no {MANIFEST}: nothing says what its rows mean. Save it with "
            "save_checkpoint(..., manifest=Manifest.of(model, identity=...))"
        )
    manifest = Manifest.read(source)
    files = stored.state["files"]
    if wrong := [found for name in files if (found := check_file(source, name, files, content=False))]:
        raise CheckpointLayoutError(damaged(source, wrong))  # before a name from elsewhere becomes a path
    for name in (*files, STATE):
        assembly.add(f"{CHECKPOINT}/{name}", source / name, link=not copy)
    identity = _tokenizer(assembly, stored, manifest, tokenizer)
    assembly.add(VOCABULARY, json_bytes(identity.to_json()))
    if policy is None:
        policy = None if manifest.policy is None else manifest.policy.policy_dict()
    else:
        stops = () if manifest.policy is None else manifest.policy.stop_ids
        manifest = dataclasses.replace(manifest, policy=_contract(policy, stops))
    assembly.add(POLICY, _json(policy, "policy"))
    assembly.add(MANIFEST, manifest.to_text().encode())
    assembly.add(ACCEPTANCE, _json(dict(acceptance or {}), "acceptance"))
    report = _json(dict(migration), "migration") if migration is not None else _report_beside(stored)
    if report is not None:
        assembly.add(MIGRATION, report)
    return manifest


def _report_beside(stored: StoredCheckpoint) -> Path | None:
    """What ``migrate`` wrote of this checkpoint, beside it or into its run's folder."""
    if "migrated_from" not in stored.state["extra"]:
        return None
    path = Path(os.path.abspath(stored.path))
    places = [path.parent / f"{path.name}.{MIGRATION}", path.parent.parent / MIGRATION]
    return next((place for place in places if place.is_file()), None)


def _tokenizer(assembly: Assembly, stored: StoredCheckpoint, manifest: Manifest, given: Folder | None) -> VocabIdentity:
    """Adds the tokenizer's files; returns the ordered table, which must be the checkpoint's."""
    carried = stored.path / ASSETS
    path = Path(given) if given is not None else carried
    files = [path] if path.is_file() else _tokenizer_files(path)
    if given is None:  # what lies beside and is not listed was put there by somebody
        files = [file for file in files if f"{ASSETS}/{file.name}" in stored.state["files"]]
    table = stored.path / VOCABULARY if VOCABULARY in stored.state["files"] else None
    if given is not None and not files:
        raise CheckpointLayoutError(f"{path} holds no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}")
    sha256, size = manifest.vocabulary.ordered_table_sha256, manifest.vocabulary.size
    if not files and table is None and sha256 is not None:
        raise CheckpointLayoutError(
            f"{stored.path} carries neither a tokenizer nor {VOCABULARY}: give the tokenizer of the ordered table "
            f"sha256 {sha256[:16]}…, --tokenizer PATH on the command line"
        )
    if sha256 is None:
        raise CheckpointLayoutError(
            f"{stored.path} does not say which ordered table its rows are of (it names no sha256), so nothing ties a "
            "tokenizer to them. Load it and save it with save_checkpoint(..., identity=identity, "
            "manifest=Manifest.of(model, identity=identity)), identity = read_vocabulary(<its tokenizer>)"
        )
    for file in files:
        assembly.add(f"{TOKENIZER}/{file.name}", file)
    try:
        places = [str(path)] if files else []
        identities = [read_tokenizer(path, files)] if files else []
        if table is not None:  # the last: it has the roles, which a tokenizer's file alone may not tell
            places, identities = [*places, str(table)], [*identities, VocabIdentity.read(table)]
        return [require_table(sha256, size, *pair) for pair in zip(identities, places, strict=True)][-1]
    except OSError as error:
        raise CheckpointLayoutError(f"cannot read the tokenizer {path}: {error}") from error


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({path for name in TOKENIZER_FILES for path in folder.glob(name) if path.is_file()})


def _contract(policy: Mapping[str, Any], stop_ids: tuple[int, ...]) -> PolicyContract:
    try:
        return PolicyContract.of(policy, stop_ids)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointLayoutError(f"policy is not what Policy.to_dict() gives: {error}") from error


def _json(value: Any, what: str) -> bytes:
    try:
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointLayoutError(f"{what} must be plain JSON values: {error}") from error


def remove(folder: Path) -> None:
    """Deletes a folder, a read-only one too."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for inner, _, _ in os.walk(folder):
        os.chmod(inner, 0o755)
    shutil.rmtree(folder)


def _linked(source: Path, target: Path) -> bool:
    """Makes a hard link, if the file system allows it and the file is ours to make read-only in the end."""
    if not is_plain(source):
        return False  # a link to a file: its content is wanted
    try:
        if os.geteuid() not in (0, source.stat().st_uid):
            return False
        os.link(source, target)
    except OSError:
        return False
    return True
