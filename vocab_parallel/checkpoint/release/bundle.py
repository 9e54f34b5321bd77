"""A release bundle: checkpoint, tokenizer, ordered table, policy and manifest as one folder that never changes.

The folder's name is its content's hash. `bundle.json` is written last and lists every file; all is made read-only, and
the folder gets its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vocab_parallel.checkpoint.metadata import inside
from vocab_parallel.checkpoint.placing import STATE
from vocab_parallel.checkpoint.writing import MANIFEST, VOCABULARY, described
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest.strict_json import parse, read_json

VERSION = 1
BUNDLE, CHECKPOINT, TOKENIZER = "bundle.json", "checkpoint", "tokenizer"
POLICY, ACCEPTANCE = "policy.json", "acceptance.json"
MIGRATION = "migration.json"  # of a migrated checkpoint: where its rows are from, and that they were kept
PARTS = (CHECKPOINT, TOKENIZER, VOCABULARY, POLICY, MANIFEST, ACCEPTANCE, MIGRATION)
_NEEDED = (f"{CHECKPOINT}/{STATE}", VOCABULARY, POLICY, MANIFEST, ACCEPTANCE)
_ID = re.compile(r"[0-9a-f]{16}")
_WHAT = f"the list of a release bundle (version {VERSION})"


class FileRecord(NamedTuple):
    """Size and sha256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class BundleRecord:
    """What `bundle.json` holds.

    Attributes:
        id: `bundle_id` of the files.
        previous: The bundle that was in use when this one was made.
        files: Every other file by its name in the folder.
        ties: Further name of a weight to its first.
        conformance: `conformance.conformance_record`.
    """

    id: str
    previous: str | None
    files: Mapping[str, FileRecord]
    ties: Mapping[str, str]
    conformance: Mapping[str, Any]
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise CheckpointLayoutError(f"version is {self.version}, this code reads {VERSION}")
        for one in (self.id, self.previous):
            if one is not None and not is_id(one):
                raise CheckpointLayoutError(f"{one[:40]!r} is no id of a bundle: expected 16 hexadecimal digits")
        for name, record in self.files.items():
            good = inside(Path(), name) and name.split("/")[0] in PARTS and "\\" not in name and name.isprintable()
            if not good or name != Path(name).as_posix():
                raise CheckpointLayoutError(f"files names {name[:100]!r}, which is no file of a bundle")
            if record.bytes < 0 or not re.fullmatch(r"[0-9a-f]{64}", record.sha256):
                raise CheckpointLayoutError(f"files.{name}: expected a size and a sha256, got {tuple(record)!r:.100}")
        missing = [name for name in _NEEDED if name not in self.files]
        if missing:
            raise CheckpointLayoutError(f"files lists no {', '.join(missing)}")


@dataclass(frozen=True)
class Bundle:
    """A bundle on the disk. All paths lie in one folder, so whoever loads from them never mixes two bundles.

    Attributes:
        path: The folder itself, not the link `current`, which may move on.
        note: What was done, in words, where something was.
    """

    path: Path
    record: BundleRecord
    note: str = field(default="", compare=False)

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of the hash of its files."""
        return self.record.id

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's folder."""
        return self.path / CHECKPOINT

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer's files; None of a vocabulary that has none."""
        has = any(name.startswith(f"{TOKENIZER}/") for name in self.record.files)
        return self.path / TOKENIZER if has else None

    @property
    def vocabulary(self) -> Path:
        """The ordered table."""
        return self.path / VOCABULARY

    @property
    def manifest(self) -> Path:
        """The manifest, with the policy of this bundle."""
        return self.path / MANIFEST

    @property
    def policy(self) -> dict[str, Any] | None:
        """What `Policy.from_dict` takes."""
        return read_optional(self.path / POLICY, "a policy")

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(record.bytes for record in self.record.files.values())


def read_bundle(path: Path) -> Bundle:
    """The bundle in a folder, from its list alone: sizes and hashes are not looked at.

    Raises:
        CheckpointLayoutError: No list, a damaged or impossible one, or one whose id is not that of its files.
    """
    file = path / BUNDLE
    if not is_plain(file):
        raise CheckpointLayoutError(f"{path} is not a release bundle: it has no {BUNDLE}")
    try:
        data = read_json(file, _WHAT)
    except CheckpointLayoutError as error:
        raise CheckpointLayoutError(damaged(path, [str(error)])) from error
    try:
        record: BundleRecord = parse(BundleRecord, data, "")
    except CheckpointLayoutError as error:
        raise CheckpointLayoutError(f"{file}: {error}") from error
    found = bundle_id(record.files)
    if not record.id == found == path.name:
        raise CheckpointLayoutError(
            f"{path} is not whole: {BUNDLE} calls itself {record.id}, its list of files has the id {found}, the folder "
            f"is named {path.name}. A bundle is never edited: promote the changed parts as a new one, "
            f"python -m vocab_parallel release promote {path.parent} <checkpoint>"
        )
    return Bundle(path, record)


def require_there(bundle: Bundle) -> Bundle:
    """The cheap check of a loader: every file is there with its size.

    Raises:
        CheckpointLayoutError: Naming the files that are not.
    """
    wrong = [found for name in bundle.record.files if (found := _size_fault(bundle, name))]
    if wrong:
        raise CheckpointLayoutError(damaged(bundle.path, wrong))
    return bundle


def bundle_id(files: Mapping[str, FileRecord]) -> str:
    """The same for the same files, wherever and whenever they were bundled."""
    lines = "".join(f"{record.sha256} {record.bytes} {name}\n" for name, record in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def is_id(name: str) -> bool:
    """Whether a name is that of a bundle."""
    return _ID.fullmatch(name) is not None


def file_faults(bundle: Bundle) -> list[str]:
    """In words: each file that is missing, changed, or not of the bundle. Reads all of them, block by block."""
    files = bundle.record.files
    wrong = [f"{name} is not in its list" for name in sorted({*_walk(bundle.path)} - {*files, BUNDLE})]
    others: list[Bundle] | None = None
    for name, want in files.items():
        fault, found = _size_fault(bundle, name), None
        if is_plain(bundle.path / name):
            found = FileRecord(**described(bundle.path / name))
        if fault is None and found is not None and found != want:
            fault = f"{name} has sha256 {found.sha256[:16]}…, was promoted with {want.sha256[:16]}…"
        if fault is not None:
            others = bundles_in(bundle.path.parent) if others is None else others
            owner = next((one.id for one in others if found is not None and one.record.files.get(name) == found), None)
            wrong.append(fault if owner is None else f"{fault} (it is that of bundle {owner})")
    return wrong


def bundles_in(releases: Path) -> list[Bundle]:
    """The bundles of a folder whose lists can be read, by id."""
    found = []
    for path in sorted(releases.iterdir()) if releases.is_dir() else []:
        if is_id(path.name) and not path.is_symlink():
            with contextlib.suppress(CheckpointLayoutError):
                found.append(read_bundle(path))
    return found


def damaged(path: Path, wrong: list[str]) -> str:
    """The words for a bundle that is not as it was promoted."""
    more = f"; and {len(wrong) - 6} more" if len(wrong) > 6 else ""
    return (
        f"the bundle {path} is not whole: {'; '.join(wrong[:6])}{more}. Parts are never exchanged one by one. Use "
        f"another bundle: python -m vocab_parallel release rollback {path.parent}; to make this one again: "
        f"chmod -R u+w {path} && rm -r {path}, then promote its checkpoint"
    )


def read_optional(path: Path, what: str) -> dict[str, Any] | None:
    """A JSON file with an object or null."""
    with path.open("rb") as file:
        if file.read(16).strip() == b"null":
            return None
    return read_json(path, what)


def is_plain(path: Path) -> bool:
    """Whether it is a file of its own: no link, no folder, no pipe that a reader would wait for."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _size_fault(bundle: Bundle, name: str) -> str | None:
    path, want = bundle.path / name, bundle.record.files[name]
    if any((bundle.path / parent).is_symlink() for parent in Path(name).parents):
        return f"{name} lies in a linked folder"
    if not is_plain(path):
        return f"{name} is not a plain file" if os.path.lexists(path) else f"{name} is missing"
    size = path.stat().st_size
    return None if size == want.bytes else f"{name} has {size:,} bytes, was promoted with {want.bytes:,}"


def _walk(folder: Path) -> Iterator[str]:
    """Every name in a folder that is no folder itself; links are not followed."""
    for inner, folders, names in os.walk(folder):
        for name in (*names, *(one for one in folders if Path(inner, one).is_symlink())):
            yield Path(inner, name).relative_to(folder).as_posix()
