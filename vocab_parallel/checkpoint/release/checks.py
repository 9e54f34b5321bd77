"""Whether the parts of a release belong together: the gates before a promotion, and what `verify` runs again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.manifest_check import disagreements
from vocab_parallel.checkpoint.placing import STATE
from vocab_parallel.checkpoint.release.bundle import (
    BUNDLE,
    CHECKPOINT,
    MIGRATION,
    POLICY,
    TOKENIZER,
    Bundle,
    file_faults,
    read_optional,
)
from vocab_parallel.checkpoint.release.conformance import conformance_record, record_differences
from vocab_parallel.checkpoint.writing import MANIFEST, VOCABULARY
from vocab_parallel.errors import CheckpointLayoutError, VocabParallelError
from vocab_parallel.vocabulary.auditing import first_difference
from vocab_parallel.vocabulary.formats import read_vocabulary
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest, PolicyContract, compare
from vocab_parallel.vocabulary.manifest.strict_json import read_json
from vocab_parallel.vocabulary.row_states import is_row_state

# Given a policy as JSON and the vocabulary's size; raises what is wrong with it.
PolicyCheck = Callable[[Mapping[str, Any], int], None]


def bundle_faults(bundle: Bundle, check_policy: PolicyCheck | None = None) -> list[str]:
    """Everything that is wrong with a bundle, in words; empty: nothing.

    Reads every file for its hash and, if all are as promoted, runs the gates and the conformance tests again.
    """
    wrong = file_faults(bundle)
    if wrong:
        return wrong
    try:
        wrong = part_faults(bundle.path, check_policy)
        stored, manifest = open_checkpoint(bundle.checkpoint), Manifest.read(bundle.manifest)
        if dict(bundle.record.ties) != stored.state["ties"]:
            wrong.append(f"{BUNDLE} lists the ties {dict(bundle.record.ties)}, the checkpoint {stored.state['ties']}")
        return wrong + record_differences(bundle.record.conformance, conformance_record(stored, manifest))
    except (VocabParallelError, OSError) as error:
        return [*wrong, str(error)]


def part_faults(folder: Path, check_policy: PolicyCheck | None = None) -> list[str]:
    """Each disagreement between the parts in a folder, in words.

    Raises:
        VocabParallelError, OSError: A part cannot be read at all.
    """
    stored, manifest = open_checkpoint(folder / CHECKPOINT), Manifest.read(folder / MANIFEST)
    identity, policy = VocabIdentity.read(folder / VOCABULARY), read_optional(folder / POLICY, "a policy")
    wrong = disagreements(folder / CHECKPOINT)
    wrong += _manifests(manifest, Manifest.read(folder / CHECKPOINT))
    wrong += _vocabulary(folder, manifest, identity)
    wrong += policy_faults(policy, manifest, identity, check_policy)
    wrong += _ties(stored, manifest)
    wrong += _rows(stored, manifest)
    wrong += _migration(stored, folder / MIGRATION)
    return wrong


def policy_faults(
    policy: Mapping[str, Any] | None, manifest: Manifest, identity: VocabIdentity, check_policy: PolicyCheck | None
) -> list[str]:
    """What a policy says that is not so in this vocabulary."""
    said = None if manifest.policy is None else manifest.policy.policy_dict()
    if policy is None or said is None:
        mine, its = ("a policy" if one is not None else "none" for one in (policy, said))
        return [] if policy == said else [f"{POLICY} holds {mine}, {MANIFEST} says {its}"]
    wrong, size = [], manifest.vocabulary.size
    try:
        if PolicyContract.of(policy).policy_dict() != said:
            wrong.append(f"{POLICY} and the policy in {MANIFEST} are two policies")
        if check_policy is not None:
            check_policy(policy, size)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        return [*wrong, f"{POLICY}: {str(error)[:1000]}"]
    for role, token_id in (policy.get("special_ids") or {}).items():
        if not 0 <= token_id < size:
            wrong.append(f"{POLICY}: special id {role} is {token_id}, the vocabulary has {size} ids")
        elif role in identity.special_ids and identity.special_ids[role] != token_id:
            wrong.append(
                f"{POLICY}: special id {role} is {token_id} ({identity.named(token_id)}), in the vocabulary it is "
                f"{identity.special_ids[role]} ({identity.named(identity.special_ids[role])})"
            )
    stops = manifest.policy.stop_ids if manifest.policy is not None else ()
    for token_id in {*stops, *(policy.get("special_ids") or {}).values()}:
        if token_id < size and identity.named(token_id) in ("unused", "no such id"):
            wrong.append(f"{POLICY}: it names id {token_id}, which stands for no token")
    return wrong


def require_table(sha256: str, size: int, identity: VocabIdentity, where: str) -> VocabIdentity:
    """The identity, with unused ids up to `size` if that is what the hash is of.

    Raises:
        CheckpointLayoutError: The table is another one than that of the hash; names both and the first id.
    """
    for one in (identity, identity.resized(size) if identity.size < size else identity):
        if one.sha256 == sha256:
            return one
    raise CheckpointLayoutError(
        f"{where} has the ordered table sha256 {identity.sha256[:16]}… of {identity.size:,} ids, the checkpoint was "
        f"made with sha256 {sha256[:16]}… of {size:,}: its rows belong to other tokens. Move them: "
        "python -m vocab_parallel migrate <checkpoint> <target> --old-vocab <its tokenizer> --new-vocab <this one>"
    )


def read_tokenizer(path: Path, files: Sequence[Path] | None = None) -> VocabIdentity:
    """The ordered table of a tokenizer's file, or of a folder with some: one alone may have any name."""
    files = sorted(path.iterdir()) if files is None else files
    return read_vocabulary(files[0] if len(files) == 1 else path)


def _manifests(mine: Manifest, saved: Manifest) -> Iterator[str]:
    """The bundle's manifest is the checkpoint's but for the policy."""
    for one in compare(saved, mine):
        if one.field.partition(".")[0] != "policy":
            yield f"{one.field} is {one.a!r:.60} in {CHECKPOINT}/{MANIFEST}, {one.b!r:.60} in {MANIFEST}"


def _vocabulary(folder: Path, manifest: Manifest, identity: VocabIdentity) -> list[str]:
    said, wrong = manifest.vocabulary, []
    sha256 = said.ordered_table_sha256 or "none at all"
    try:
        identity = require_table(sha256, said.size, identity, VOCABULARY)
        if (folder / TOKENIZER).is_dir():
            found = read_tokenizer(folder / TOKENIZER)
            try:
                found = require_table(sha256, said.size, found, TOKENIZER)
            except CheckpointLayoutError as error:
                at = first_difference(identity, found, (VOCABULARY, TOKENIZER))
                wrong.append(f"{error} ({at})" if at else str(error))
            wrong += [
                f"special id {role} is {identity.special_ids[role]} in {VOCABULARY}, {token_id} in {TOKENIZER}"
                for role, token_id in found.special_ids.items()
                if identity.special_ids.get(role, token_id) != token_id
            ]
    except VocabParallelError as error:
        wrong.append(str(error))
    for role, token_id in (said.special_ids or {}).items():
        if identity.special_ids.get(role, token_id) != token_id:
            wrong.append(f"special id {role} is {token_id} in {MANIFEST}, {identity.special_ids[role]} in {VOCABULARY}")
    if said.added and identity.added and tuple(said.added) != identity.added:
        wrong.append(f"the added tokens are {said.added!s:.60} in {MANIFEST}, {identity.added!s:.60} in {VOCABULARY}")
    return wrong


def _ties(stored: StoredCheckpoint, manifest: Manifest) -> Iterator[str]:
    """A tied weight has one key, and its optimizer's state one owner."""
    ties, keys = stored.state["ties"], {*stored.tensors, *stored.state["scalars"]}
    tied = any(first in stored.state["tables"] for first in ties.values())
    if manifest.tying.tied != tied:
        words = ("not tied", "tied")
        yield f"{MANIFEST} says the head is {words[manifest.tying.tied]}, {STATE} that it is {words[tied]}"
    for alias, first in ties.items():
        if f"model.{first}" not in keys:
            yield f"{alias} is tied to {first}, which the checkpoint does not hold"
        if f"model.{alias}" in keys:
            yield f"{alias} is tied to {first} and has a key of its own: two tensors would be loaded for one Parameter"
        twice = sorted(key for key in keys if key.startswith(f"optimizer.{alias}."))
        if twice:
            yield f"{alias} is tied to {first} and has an optimizer state of its own: {', '.join(twice[:3])}"


def _rows(stored: StoredCheckpoint, manifest: Manifest) -> Iterator[str]:
    """The shards cover the ids, and the files every row of each table and of its states, once."""
    if manifest.checkpoint is not None and not manifest.checkpoint.shard_ranges:
        yield f"{MANIFEST} names no shard ranges"
    for name in stored.state["tables"]:
        shape = stored.tensors.get(f"model.{name}", (None, ()))[1]
        for key, (_, held) in stored.tensors.items():
            owned = key == f"model.{name}" or (
                key.startswith(f"optimizer.{name}.") and is_row_state(key, held, shape)
            )  # fmt: skip
            if owned and (fault := coverage(stored, key)):
                yield f"{key}: {fault}"


def _migration(stored: StoredCheckpoint, path: Path) -> Iterator[str]:
    """Rows and moments that were moved to this vocabulary were kept, and a report says so."""
    origin = stored.state["extra"].get("migrated_from")
    if not path.is_file():
        if origin is not None:
            yield (
                f"the checkpoint was migrated ({origin}) and has no {MIGRATION}: nothing says that rows and moments "
                "were kept. `python -m vocab_parallel migrate` writes it beside the checkpoint; or give migration="
            )
        return
    report = read_json(path, "the report of a migration")
    if report.get("migration") != origin:
        yield f"{MIGRATION} is of the migration {report.get('migration')}, the checkpoint was made by {origin}"
    conformance = report.get("conformance")
    if not isinstance(conformance, dict) or conformance.get("passed") is not True:
        yield f"{MIGRATION} says that the migration did not keep what it must: go back to the checkpoint from before it"


def coverage(stored: StoredCheckpoint, key: str) -> str | None:
    """What is wrong with the blocks that hold a table, in words; None if they hold each row once."""
    size = stored.tensors[key][1]
    pieces, at = stored.pieces[key], 0
    if all(piece.sizes[1:] == tuple(size[1:]) for piece in pieces):
        for piece in pieces:
            if piece.offsets[0] != at and piece.sizes[0]:
                return f"its blocks go from row {at} to row {piece.offsets[0]}: expected contiguous ranges"
            at += piece.sizes[0]
        return None if at == size[0] else f"its blocks end at row {at}, expected {size[0]}"
    held = sum(math.prod(piece.sizes) for piece in pieces)
    return None if held == math.prod(size) else f"its blocks hold {held} numbers, expected {math.prod(size)}"
