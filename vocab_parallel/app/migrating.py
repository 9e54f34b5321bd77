"""What `migrate` works on: the checkpoint in a folder, a run or a Hugging Face directory, and the two vocabularies."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vocab_parallel.app.vocabulary import open_vocabulary, tekken_path
from vocab_parallel.checkpoint import latest_checkpoint
from vocab_parallel.checkpoint.exchange.hugging_face_names import CONFIG, ModelConfig
from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.migration.assets import VOCABULARY, vocabulary_sha256
from vocab_parallel.checkpoint.placing import is_whole
from vocab_parallel.checkpoint.trimming import give_back
from vocab_parallel.checkpoint.writing import ASSETS
from vocab_parallel.errors import CheckpointLayoutError, ConfigError, VocabularyError
from vocab_parallel.vocabulary.formats import byte_identity, find_file, read_vocabulary
from vocab_parallel.vocabulary.formats.encoders import old_encoder
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import MeanOfSources, RowInit

NAMES = ("bytes", "tekken")
Encode = Callable[[bytes], Sequence[int]]


@dataclass(frozen=True)
class Source:
    """Where the old rows are.

    Attributes:
        kind: "checkpoint", "run" or "hugging face".
        path: As given.
        checkpoint: The checkpoint's folder; None of a Hugging Face directory.
        rows: Of its tables.
        sha256: Of its ordered table, if it says so.
        tokenizer: Its own tokenizer or table: a name, a file or a folder, if there is one.
    """

    kind: str
    path: Path
    checkpoint: Path | None
    rows: int
    sha256: str | None
    tokenizer: str | None


@dataclass(frozen=True)
class Vocabularies:
    """The map, and what is known of its two ends.

    Attributes:
        new_name: The new tokenizer as given, for what is written.
        notes: What a user should know of them.
    """

    map: VocabMap
    old: VocabIdentity | None
    new: VocabIdentity | None
    new_name: str | None
    notes: tuple[str, ...] = ()


def find_source(path: Path) -> Source:
    """Tells what a folder is by what is in it.

    Raises:
        ConfigError: Nothing that can be migrated.
    """
    if is_whole(path):
        return _of_checkpoint("checkpoint", path, path, None)
    if (path / "config.yaml").is_file() and (path / "checkpoints").is_dir():
        latest = latest_checkpoint(path / "checkpoints")
        if latest is None:
            raise ConfigError(_no_checkpoint(path))
        from vocab_parallel.app.config import load

        return _of_checkpoint("run", path, latest, load(path).data.vocab)
    if (path / CONFIG).is_file() and any(path.glob("*.safetensors*")):
        rows = ModelConfig.read(path / CONFIG).vocab_size
        if rows is None:
            raise ConfigError(f"{path / CONFIG} has no vocab_size: it does not say which rows are of tokens")
        return Source("hugging face", path, None, rows, None, _own_tokenizer(path))
    raise ConfigError(
        f"{path} is none of: a checkpoint (a folder step-*), a run folder with checkpoints, a Hugging Face directory "
        "with config.json and safetensors. Other formats become a checkpoint by: python -m vocab_parallel convert "
        f"{path} <checkpoint>"
    )


def make_map(args: argparse.Namespace, source: Source, init: RowInit) -> Vocabularies:
    """The map that the command line asks for.

    Raises:
        ConfigError: The options do not say which map.
        VocabularyError: A vocabulary or mapping file cannot be read, or rows would be lost without --allow-drop.
    """
    asked = [name for name in ("map", "append", "new_vocab") if getattr(args, name) is not None]
    if ("append" in asked and len(asked) > 1) or not asked or (args.old_vocab is not None and asked != ["new_vocab"]):
        raise ConfigError(
            "say which ids move where: --new-vocab PATH (with --old-vocab PATH, if the source carries no vocabulary), "
            "or --map FILE (with --new-vocab PATH, to carry the new tokenizer along), or --append N"
        )
    new, notes = None if args.new_vocab is None else read_named(args.new_vocab), tuple[str, ...]()
    if args.append is not None:
        made, old = VocabMap.append(source.rows, args.append, old_sha256=source.sha256), _own_identity(source)
    elif args.map is not None:
        made, old = VocabMap.read(args.map, allow_drop=args.allow_drop), _own_identity(source)
    else:
        assert new is not None
        if (name := args.old_vocab or source.tokenizer) is None:
            raise ConfigError(f"{source.path} carries no vocabulary of its own: give it by --old-vocab PATH")
        plain = read_named(name)
        if plain.size > source.rows:
            raise ConfigError(
                f"{name} has {plain.size:,} old ids, {source.path} has {source.rows} rows. Either it is another "
                f"model's tokenizer: give the right one by --old-vocab; or {plain.size - source.rows:,} of its tokens "
                f"have no row: give them one first, python -m vocab_parallel migrate {source.path} <longer> --append "
                f"{plain.size - source.rows}"
            )
        old = _with_rows(plain, source.rows)
        give_back()
        encode, notes = _encoder(name) if isinstance(init, MeanOfSources) else (None, ())
        made = VocabMap.from_vocabs(old, new, encode=encode, allow_drop=args.allow_drop)
        del encode  # with its library's table
        if source.sha256 == plain.sha256:
            made = dataclasses.replace(made, old_sha256=plain.sha256)  # without the unused ids of further rows
    give_back()
    return Vocabularies(made, old if old and old.size == made.old_size else None, new, args.new_vocab, notes)


def read_named(name: str) -> VocabIdentity:
    """The ordered table of a vocabulary of the app or of a file; `VocabularyError` if there is none."""
    if name in NAMES:
        return byte_identity() if name == "bytes" else read_vocabulary(tekken_path())
    if not Path(name).exists():
        raise VocabularyError(f"{name}: no such file or folder; expected a tokenizer, or one of {', '.join(NAMES)}")
    return read_vocabulary(name)


def _encoder(name: str) -> tuple[Encode | None, tuple[str, ...]]:
    """The old tokenizer's encoding; without one, a note."""
    if name == "bytes":
        vocabulary = open_vocabulary(name)
        first = vocabulary.encode_batch(["\0"])[0][0]
        return (lambda token: [first + byte for byte in token]), ()
    try:
        return old_encoder(tekken_path() if name == "tekken" else name), ()
    except VocabularyError as error:
        return None, (f"no sub-tokens of the new tokens are known ({error})",)


def _of_checkpoint(kind: str, path: Path, checkpoint: Path, tokenizer: str | None) -> Source:
    stored = open_checkpoint(checkpoint)
    rows = stored.state["layout"].get("vocab_size")
    if type(rows) is not int or rows < 1:
        raise CheckpointLayoutError(f"{checkpoint}: layout.vocab_size is {rows!r}, expected a number of rows")
    own = tokenizer or _own_tokenizer(checkpoint / ASSETS) or _own_tokenizer(checkpoint)
    return Source(kind, path, checkpoint, rows, vocabulary_sha256(stored), own)


def _own_tokenizer(folder: Path) -> str | None:
    if not folder.is_dir():
        return None
    try:
        find_file(folder)
        return str(folder)
    except VocabularyError:
        return None


def _own_identity(source: Source) -> VocabIdentity | None:
    """The source's own ordered table, for the texts of its tokens."""
    table = None if source.checkpoint is None else source.checkpoint / VOCABULARY
    name = str(table) if table is not None and table.is_file() else source.tokenizer
    return None if name is None else _with_rows(read_named(name), source.rows)


def _with_rows(identity: VocabIdentity, rows: int) -> VocabIdentity:
    """With unused ids, where a model has more rows than its tokenizer has tokens."""
    return identity if identity.size >= rows else identity.resized(rows)


def _no_checkpoint(run: Path) -> str:
    if any((run / "checkpoints").glob("step-*/host.json")):
        return (
            f"{run}/checkpoints holds files of its host's own format, which only that host reads: convert them first: "
            f"python -m vocab_parallel convert {run}/checkpoints/<step> <checkpoint>"
        )
    return f"{run}/checkpoints holds no whole checkpoint: there is nothing to migrate"
