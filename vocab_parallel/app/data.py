"""The corpus: real text to a memory-mapped file of token ids, and batches that depend on (seed, step) alone."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vocab_parallel.app.config import DataConfig
from vocab_parallel.app.vocabulary import Vocabulary
from vocab_parallel.errors import ConfigError

Ids = npt.NDArray[np.int64]
FORMAT = 1  # of the cache; a change here makes old caches unused
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def open_corpus(
    config: DataConfig, vocabulary: Vocabulary, *, seed: int, builds: bool = True, say: Callable[[str], None] = print
) -> Corpus:
    """Opens the tokenised corpus, building it first if this process is the one that builds.

    The builder tokenises once into a folder keyed by a hash of the vocabulary, the settings and every file's name, size
    and time. The others wait for that folder to appear, by looking, so that a long tokenising never meets a
    collective's timeout.

    Args:
        config: where the text is.
        vocabulary: what to tokenise with.
        seed: of the split into training and validation documents.
        builds: whether this process tokenises (one on each machine does).
        say: takes a line on progress.

    Raises:
        ConfigError: no text found, unreadable JSON lines, or too little text to split.
    """
    files = find_files(config)
    folder = _cache_root(config) / _key(config, vocabulary, files)
    if not (folder / "meta.json").is_file():
        if builds:
            _build(folder, config, vocabulary, files, say)
        while not (folder / "meta.json").is_file():
            time.sleep(0.05)
    return Corpus.open(folder, vocabulary.size, config.validation_fraction, seed)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Token ids of some documents, read as one sequence out of the memory-mapped file."""

    tokens: npt.NDArray[np.int32]
    starts: Ids  # of each run of neighbouring documents in `tokens`
    ends: Ids  # running total of the runs' lengths

    @property
    def length(self) -> int:
        """Tokens in all."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def take(self, position: int, count: int) -> Ids:
        """`count` ids from `position` of the joined sequence, int64 ``[count]``."""
        pieces: list[npt.NDArray[np.int32]] = []
        run = int(np.searchsorted(self.ends, position, side="right"))
        while count > 0:
            before = int(self.ends[run - 1]) if run else 0
            start = int(self.starts[run]) + position - before
            size = min(count, int(self.ends[run]) - position)
            pieces.append(self.tokens[start : start + size])
            position, count, run = position + size, count - size, run + 1
        return np.concatenate(pieces).astype(np.int64)

    def windows(self, positions: Ids, context: int) -> tuple[Ids, Ids]:
        """Inputs and next-token targets, both int64 ``[len(positions), context]``."""
        rows = np.stack([self.take(int(position), context + 1) for position in positions])
        return rows[:, :-1], rows[:, 1:]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A tokenised corpus split by document."""

    train: Stream
    validation: Stream
    unigram_entropy: float  # nats a token, of all ids of the corpus
    validation_entropy: float  # nats a token, of the ids of the validation documents alone
    documents: int
    text_bytes: int
    folder: Path

    @staticmethod
    def open(folder: Path, vocab_size: int, validation_fraction: float, seed: int) -> Corpus:
        """Maps the cache `folder`; the split depends on the documents, the fraction and the seed alone."""
        tokens = np.load(folder / "tokens.npy", mmap_mode="r", allow_pickle=False)
        offsets = np.load(folder / "offsets.npy", allow_pickle=False)
        counts = np.load(folder / "counts.npy", allow_pickle=False)
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        is_validation = _split(np.diff(offsets), validation_fraction, seed)
        validation = _stream(tokens, offsets, is_validation)
        seen = np.concatenate([tokens[a:b] for a, b in _runs(offsets, is_validation)])
        return Corpus(
            train=_stream(tokens, offsets, ~is_validation),
            validation=validation,
            unigram_entropy=entropy(counts),
            validation_entropy=entropy(np.bincount(seen, minlength=vocab_size)),
            documents=len(offsets) - 1,
            text_bytes=int(meta["text_bytes"]),
            folder=folder,
        )

    def train_batch(self, seed: int, step: int, batch: int, context: int) -> tuple[Ids, Ids]:
        """Inputs and targets of one step, each int64 ``[batch, context]``; the same for the same (seed, step)."""
        self._long_enough(self.train, "training", context)
        generator = np.random.default_rng([seed, step])
        positions = generator.integers(0, self.train.length - context, size=batch)
        return self.train.windows(positions, context)

    def validation_batches(self, sequences: int, batch: int, context: int) -> Iterator[tuple[Ids, Ids]]:
        """`sequences` windows spread evenly over the validation documents, `batch` at a time; always the same."""
        self._long_enough(self.validation, "validation", context)
        positions = np.linspace(0, self.validation.length - context - 1, sequences).astype(np.int64)
        for start in range(0, sequences, batch):
            yield self.validation.windows(positions[start : start + batch], context)

    @staticmethod
    def _long_enough(stream: Stream, name: str, context: int) -> None:
        if stream.length <= context + 1:
            raise ConfigError(
                f"the {name} documents hold {stream.length} tokens, but model.context={context} needs more than "
                f"{context + 1}; add text under data.paths or change data.validation_fraction"
            )


def entropy(counts: npt.NDArray[np.integer]) -> float:
    """Entropy in nats of a table of counts."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def find_files(config: DataConfig) -> list[Path]:
    """The corpus's files, sorted, each once.

    Raises:
        ConfigError: an entry of ``data.paths`` matches nothing.
    """
    if not config.paths:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts))
        if not files:
            raise ConfigError(f"no *.py files in Python's library folder {root}; name text files in data.paths")
        return files
    found: set[Path] = set()
    for entry in config.paths:
        path = Path(entry).expanduser()
        if path.is_dir():
            matches = [file for file in path.rglob("*") if file.is_file()]
        else:
            matches = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
        if not matches:
            raise ConfigError(f"data.paths: {entry!r} matches no file")
        found.update(matches)
    return sorted(found)


def documents(files: list[Path], max_bytes: int | None) -> Iterator[str]:
    """The texts: each JSON line's ``text``, each other file whole (bytes that are not UTF-8 are replaced)."""
    left = max_bytes
    for file in files:
        for text in _texts(file):
            if left is not None and left <= 0:
                return
            piece = text if left is None else text[:left]
            if left is not None:
                left -= len(piece.encode("utf-8", "surrogatepass"))
            if piece:
                yield piece


def _texts(file: Path) -> Iterator[str]:
    if file.suffix not in (".jsonl", ".ndjson"):
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}:{number}: expected a JSON object with a text key ({error!r})") from error
            if not isinstance(text, str):
                raise ConfigError(f"{file}:{number}: text must be a string, got {type(text).__name__}")
            yield text


def _build(
    folder: Path, config: DataConfig, vocabulary: Vocabulary, files: list[Path], say: Callable[[str], None]
) -> None:
    started = time.perf_counter()
    texts = list(documents(files, config.max_bytes))
    if len(texts) == 1:
        texts = _cut(texts[0])  # one document cannot be split by document
    if len(texts) < 2:
        raise ConfigError(f"the corpus has {len(texts)} documents, at least 2 are needed; see data.paths")
    text_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    encoded = vocabulary.encode_batch(texts, threads=os.cpu_count() or 1)
    rows = [np.array([vocabulary.bos, *ids, vocabulary.eos], dtype=np.int32) for ids in encoded]
    tokens = np.concatenate(rows)
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        np.save(aside / "tokens.npy", tokens)
        np.save(aside / "offsets.npy", offsets)
        np.save(aside / "counts.npy", np.bincount(tokens, minlength=vocabulary.size))
        os.chmod(aside, 0o755)  # mkdtemp makes it private
        (aside / "meta.json").write_text(json.dumps({"text_bytes": text_bytes}), encoding="utf-8")
        try:
            os.rename(aside, folder)
        except OSError:  # another machine has built the same corpus meanwhile; theirs is equal
            if not (folder / "meta.json").is_file():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    seconds = time.perf_counter() - started
    say(f"tokenised {len(texts)} documents, {text_bytes / 1e6:.1f} MB, {len(tokens):,} tokens in {seconds:.1f} s")


def _cut(text: str, pieces: int = 20) -> list[str]:
    """One long text in about `pieces` parts, cut at line ends."""
    size = max(1, len(text) // pieces)
    parts: list[str] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        end = len(text) if end < 0 else end + 1
        parts.append(text[start:end])
        start = end
    return parts


def _split(lengths: Ids, fraction: float, seed: int) -> npt.NDArray[np.bool_]:
    """Marks validation documents: in a seeded order, until they hold `fraction` of the tokens; never all of them."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    before = np.cumsum(lengths[order]) - lengths[order]
    mask = np.zeros(len(lengths), dtype=np.bool_)
    mask[order[before < fraction * lengths.sum()]] = True
    mask[order[-1]] = False
    return mask


def _runs(offsets: Ids, chosen: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of each run of neighbouring chosen documents."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]])))
    return [(int(offsets[a]), int(offsets[b])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _stream(tokens: npt.NDArray[np.int32], offsets: Ids, chosen: npt.NDArray[np.bool_]) -> Stream:
    runs = np.array(_runs(offsets, chosen), dtype=np.int64).reshape(-1, 2)
    return Stream(tokens, runs[:, 0], np.cumsum(runs[:, 1] - runs[:, 0]))


def _cache_root(config: DataConfig) -> Path:
    if config.cache is not None:
        return Path(config.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "vocab_parallel" / "corpora"


def _key(config: DataConfig, vocabulary: Vocabulary, files: list[Path]) -> str:
    encoded = f"{vocabulary.encoding_sha256} {vocabulary.bos} {vocabulary.eos}"
    digest = hashlib.sha256(f"{FORMAT} {encoded} {config.max_bytes}\n".encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.absolute()}\t{stat.st_size}\t{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:24]
