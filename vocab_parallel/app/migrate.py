"""``migrate``: a checkpoint, a run or a Hugging Face model under another vocabulary, checked after the work."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from vocab_parallel.app.migrating import Source, Vocabularies, find_source, make_map
from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.migration.assets import known_vocabulary
from vocab_parallel.checkpoint.migration.checks import check_migration
from vocab_parallel.checkpoint.migration.migrating import migrate_checkpoint, require_change, require_rows
from vocab_parallel.checkpoint.migration.report import MigrationReport, Table
from vocab_parallel.checkpoint.placing import open_aside
from vocab_parallel.checkpoint.writing import MANIFEST, json_bytes, write_file
from vocab_parallel.errors import CheckpointLayoutError, ConfigError, NonFiniteError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.files import write_whole
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.manifest import vocabulary_of
from vocab_parallel.vocabulary.migration.conformance import ConformanceReport
from vocab_parallel.vocabulary.migration.initialization import RowInit, parse_init, without_sources

REPORT = "migration.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``migrate``."""
    parser.add_argument(
        "source", help="a checkpoint, a run folder (its latest checkpoint), or a Hugging Face directory"
    )
    parser.add_argument("target", help="what to write, of the same kind; must not be there")
    parser.add_argument("--old-vocab", metavar="PATH", help="tokenizer of the source; default: its own, if it has one")
    parser.add_argument("--new-vocab", metavar="PATH", help="the new tokenizer: a file, its folder, bytes or tekken")
    parser.add_argument("--map", metavar="FILE", help="a mapping file (JSON) instead of two tokenizers")
    parser.add_argument("--append", metavar="N", type=int, help="only add N rows after the old ones")
    parser.add_argument("--init", default="sources", metavar="HOW", help="how new rows begin: sources (mean of the old "
                        "sub-tokens), mean (of all rows), zeros, normal[:seed], copy:NEW=OLD,...")  # fmt: skip
    parser.add_argument("--allow-drop", action="store_true", help="let tokens go that the new vocabulary lacks")
    parser.add_argument("--save-map", metavar="FILE", help="write the mapping file too")
    parser.add_argument("--dry-run", action="store_true", help="say what would move, be new and be dropped; no more")
    parser.add_argument("--tp", type=int, metavar="N", help="cut the files along N shards (default: as the source)")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel migrate``."""
    init = parse_init(args.init)
    if args.tp is not None and args.tp < 1:
        raise ConfigError(f"--tp {args.tp}: expected at least 1")
    started = time.perf_counter()
    try:
        source, target = find_source(Path(args.source)), Path(args.target)
        if target.exists():
            raise CheckpointLayoutError(f"{target} exists: name a new folder, a migration replaces nothing")
        found = make_map(args, source, init)
        if source.kind == "run":
            _require_trainable(source, found)
        if args.save_map is not None:
            found.map.write(args.save_map)
        work = {"checkpoint": _migrate_checkpoint, "run": _migrate_run, "hugging face": _migrate_hugging_face}
        report, checked = work[source.kind](args, source, found, init)
    except (NonFiniteError, OSError) as error:
        raise CheckpointLayoutError(f"{args.source}: {error}") from error
    _say(f"{source.kind} {source.path}" + (f", {source.checkpoint.name}" if source.kind == "run" else ""))  # type: ignore[union-attr]
    _say(*report.lines(found.old, found.new), *found.notes)
    if checked is None:
        _say(f"dry run: {target} was not written")
        return 0
    _say(*checked.lines(), f"wrote {target} in {time.perf_counter() - started:.1f} s")
    if not checked.passed:
        _say(f"FAILED: do not use {target}; {source.path} is unchanged")
    elif source.kind == "run":
        _say(f"go on with: python -m vocab_parallel train {target}")
    return 0 if checked.passed else 1


Done = tuple[MigrationReport, ConformanceReport | None]


def _migrate_checkpoint(args: argparse.Namespace, source: Source, found: Vocabularies, init: RowInit) -> Done:
    """The report goes beside the checkpoint, whose own files are all hashed."""
    target = Path(args.target)
    assert source.checkpoint is not None
    report, checked = _migrate(args, source.checkpoint, target, found, init)
    if checked is not None:
        write_whole(target.parent / f"{target.name}.{REPORT}", _as_json(report, checked))
    return report, checked


def _migrate_run(args: argparse.Namespace, source: Source, found: Vocabularies, init: RowInit) -> Done:
    """A run folder that `train` resumes: settings with the new vocabulary, and the measurements until here."""
    from vocab_parallel.app import config as configs
    from vocab_parallel.app.runlog import read_metrics

    target = Path(args.target)
    assert source.checkpoint is not None and found.new_name is not None
    aside = target if args.dry_run else open_aside(target)
    try:
        checkpoint = aside / "checkpoints" / source.checkpoint.name
        config = configs.load(source.path)
        report, checked = _migrate(args, source.checkpoint, checkpoint, found, init, config.parallel.multiple_of)
        if checked is None:
            return report, None
        step = open_checkpoint(checkpoint).step
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, vocab=_lasting(found.new_name)))
        rows = [row for row in read_metrics(source.path) if row["step"] <= step]
        write_file(aside / "config.yaml", config.to_yaml().encode())
        write_file(aside / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        _write_run_manifest(source.path, aside, checkpoint, report, found)
        report = dataclasses.replace(report, target=target)
        write_file(aside / REPORT, _as_json(report, checked))
        os.replace(aside, target)
    except BaseException:
        if not args.dry_run:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return report, checked


def _migrate_hugging_face(args: argparse.Namespace, source: Source, found: Vocabularies, init: RowInit) -> Done:
    """By way of two checkpoints beside the target, which go afterwards."""
    from vocab_parallel.checkpoint.exchange.hugging_face import from_hugging_face, to_hugging_face

    target = Path(args.target)
    plan = _plan_hugging_face(args, source, found, init)  # refuses before anything large is read
    if args.dry_run:
        return plan, None
    aside = open_aside(target)
    try:
        read = from_hugging_face(source.path, aside / "old", vocab_size=source.rows, tp_size=args.tp or 1)
        report, checked = _migrate(args, aside / "old", aside / "new", found, init)
        assert checked is not None
        written = to_hugging_face(aside / "new", aside / "model", verify=False)  # the checks have read all of it
        notes = tuple(dict.fromkeys((*read.notes, *report.notes, *written.notes)))
        report = dataclasses.replace(report, source=source.path, target=target, notes=notes)
        write_file(aside / "model" / REPORT, _as_json(report, checked))
        os.replace(aside / "model", target)
        return report, checked
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _plan_hugging_face(args: argparse.Namespace, source: Source, found: Vocabularies, init: RowInit) -> MigrationReport:
    """What a migration would do, from the headers of the files."""
    from vocab_parallel.checkpoint.exchange.hugging_face_assets import identity_of
    from vocab_parallel.checkpoint.exchange.hugging_face_names import find_tables
    from vocab_parallel.checkpoint.exchange.safetensors_files import open_safetensors

    target, vocab_map = Path(args.target), found.map
    require_rows(source.path, source.rows, vocab_map)
    own = identity_of(source.path, source.rows, notes := list[str]())
    known = known_vocabulary(source.path, own.sha256 if own else None, lambda: own, vocab_map, found.new)
    require_change(source.path, target, vocab_map, known)
    init.check(vocab_map)
    files = open_safetensors(source.path)
    named = find_tables(source.path, files, source.rows, None).names
    size = 0
    for name, place in files.places.items():
        shape = (vocab_map.new_size, *place.shape[1:]) if name in named else place.shape
        size += math.prod(shape) * place.dtype.itemsize
    return MigrationReport(
        source.path, target, vocab_map, str(init), VocabLayout(vocab_map.new_size, args.tp or 1),
        tables=tuple(Table(name, f"model.{name}", None, ()) for name in named),
        bytes=size,
        without_sources=without_sources(init, vocab_map),
        notes=(*notes, *known.notes),
    )  # fmt: skip


def _migrate(
    args: argparse.Namespace, old: Path, new: Path, found: Vocabularies, init: RowInit, multiple_of: int = 128
) -> Done:
    named = found.new_name if found.new_name is not None and Path(found.new_name).exists() else None
    report = migrate_checkpoint(
        old, new, found.map, init=init, tp_size=args.tp, multiple_of=multiple_of, identity=found.new, tokenizer=named,
        dry_run=args.dry_run,
    )  # fmt: skip
    return report, None if args.dry_run else check_migration(old, new, found.map)


def _require_trainable(source: Source, found: Vocabularies) -> None:
    """A run goes on with a tokenizer, so its rows must be that tokenizer's."""
    from vocab_parallel.app.vocabulary import require_trainable

    if found.new_name is None:
        raise ConfigError(
            f"{source.path} is a run: to go on it needs the new tokenizer, --new-vocab PATH (also with --map). To only "
            f"change its rows, name the checkpoint: python -m vocab_parallel migrate {source.checkpoint} ..."
        )
    require_trainable(found.new_name)


def _write_run_manifest(run: Path, aside: Path, checkpoint: Path, report: MigrationReport, found: Vocabularies) -> None:
    if not (run / MANIFEST).is_file():
        return
    tensors = open_checkpoint(checkpoint).tensors
    specs = {key: value for key, value in tensors.items() if key.startswith("model.")}
    moved = Manifest.read(run).moved(
        specs, report.layout, vocabulary=vocabulary_of(report.layout.vocab_size, found.new, None)
    )
    notes = {**moved.notes, "vocabulary": found.new_name}
    dataclasses.replace(moved, notes=notes).write(aside / MANIFEST)


def _lasting(name: str) -> str:
    """A vocabulary's name as a configuration keeps it: a path from wherever the next job starts."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _as_json(report: MigrationReport, checked: ConformanceReport) -> bytes:
    return json_bytes({"migration": report.origin(), "conformance": checked.to_json()})


def _say(*lines: str | Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)
