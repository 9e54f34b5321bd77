"""Vocabularies and corpora: real ids, splits by document, batches that need no memory of earlier ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from vocab_parallel.app import vocabulary as vocabularies
from vocab_parallel.app.config import DataConfig
from vocab_parallel.app.data import Corpus, entropy, find_files, open_corpus
from vocab_parallel.app.vocabulary import ByteVocabulary, open_vocabulary
from vocab_parallel.errors import ConfigError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.txt").write_text(chr(97 + number) * (50 + number))
    return folder


def corpus(texts: Path, tmp_path: Path, **changes: object) -> Corpus:
    config = DataConfig(**{"vocab": "bytes", "paths": [str(texts)], "validation_fraction": 0.2,
                           "cache": str(tmp_path / "cache"), **changes})  # type: ignore[arg-type]  # fmt: skip
    return open_corpus(config, ByteVocabulary(), seed=0, say=lambda line: None)


def test_tekken_has_the_known_size_and_reads_back_what_it_wrote() -> None:
    tekken = open_vocabulary("tekken")
    assert (tekken.size, tekken.bos, tekken.eos) == (131_072, 1, 2)
    text = "def f(x):\n    return 'é' + x  # 日本\n"
    [ids] = tekken.encode_batch([text])
    assert min(ids) >= 1000 and max(ids) < tekken.size and len(ids) < len(text)
    assert tekken.decode([tekken.bos, *ids, tekken.eos]) == text
    # Known ids: rank 0 is the byte 0, ranks 0 to 255 are the bytes in order.
    assert tekken.encode_batch(["\x00"]) == [[1000]] and tekken.decode([1000 + ord("A")]) == "A"


def test_bytes_read_back_what_they_wrote() -> None:
    [ids] = ByteVocabulary().encode_batch(["aé"])
    assert ids == [100, 198, 172] and ByteVocabulary().decode([1, *ids, 2]) == "aé"


def test_a_missing_vocabulary_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabularies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mistral-common, but it is not installed; pip install"):
        open_vocabulary("tekken")


def test_the_split_is_by_document_and_complete(texts: Path, tmp_path: Path) -> None:
    found = corpus(texts, tmp_path)
    train = found.train.take(0, found.train.length)
    validation = found.validation.take(0, found.validation.length)
    letters = [set(part[part > 2]) for part in (train, validation)]
    assert letters[0] and letters[1] and not letters[0] & letters[1] and len(letters[0] | letters[1]) == 12
    assert 0.2 <= len(validation) / (len(train) + len(validation)) < 0.35
    for part in (train, validation):
        assert (part == 1).sum() == (part == 2).sum() == len(set(part[part > 2]))  # bos and eos around each document


def test_entropy_is_that_of_all_ids(texts: Path, tmp_path: Path) -> None:
    found = corpus(texts, tmp_path)
    counts = [12, 12, *(50 + number for number in range(12))]
    total = sum(counts)
    assert found.unigram_entropy == pytest.approx(-sum(c / total * math.log(c / total) for c in counts))
    assert entropy(np.array([5, 0, 5])) == pytest.approx(math.log(2))


def test_a_batch_depends_on_seed_and_step_alone(texts: Path, tmp_path: Path) -> None:
    first, second = corpus(texts, tmp_path), corpus(texts, tmp_path)
    for _ in range(3):
        first.train_batch(0, 1, 4, 16)  # earlier reads change nothing
    a, b = first.train_batch(0, 7, 4, 16), second.train_batch(0, 7, 4, 16)
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(a[0], first.train_batch(0, 8, 4, 16)[0])
    assert not np.array_equal(a[0], first.train_batch(1, 7, 4, 16)[0])
    assert a[0].shape == a[1].shape == (4, 16) and np.array_equal(a[0][:, 1:], a[1][:, :-1])


def test_windows_cross_documents_in_order(texts: Path, tmp_path: Path) -> None:
    stream = corpus(texts, tmp_path).train
    whole = stream.take(0, stream.length)
    for position in (0, 1, 51, 52, stream.length - 60):
        assert np.array_equal(stream.take(position, 60), whole[position : position + 60])


def test_validation_covers_the_documents_evenly_and_in_batches(texts: Path, tmp_path: Path) -> None:
    found = corpus(texts, tmp_path)
    batches = list(found.validation_batches(5, 2, 16))
    assert [len(input) for input, _ in batches] == [2, 2, 1]
    whole = found.validation.take(0, found.validation.length)
    assert np.array_equal(batches[0][0][0], whole[:16]) and np.array_equal(batches[-1][1][-1], whole[-16:])


def test_json_lines_are_documents_and_max_bytes_cuts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": letter * 30}) + "\n" for letter in "abcd") + "\n")
    assert corpus(path, tmp_path).documents == 4
    cut = corpus(path, tmp_path, max_bytes=70)
    assert cut.documents == 3 and cut.text_bytes == 70


@pytest.mark.parametrize("line", ['{"words": "a"}', "nonsense", '{"text": 3}', "[1]"])
def test_a_bad_json_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: "):
        corpus(path, tmp_path)


def test_the_cache_is_used_again_and_a_changed_file_makes_a_new_one(texts: Path, tmp_path: Path) -> None:
    first = corpus(texts, tmp_path)
    assert corpus(texts, tmp_path).folder == first.folder
    stamp = (first.folder / "tokens.npy").stat().st_mtime_ns
    assert corpus(texts, tmp_path).train.length == first.train.length
    assert (first.folder / "tokens.npy").stat().st_mtime_ns == stamp
    (texts / "00.txt").write_text("changed")
    assert corpus(texts, tmp_path).folder != first.folder
    assert not list((tmp_path / "cache").glob(".building*"))


def test_one_long_text_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("a line of text\n" * 200)
    assert corpus(path, tmp_path).documents > 10


def test_what_cannot_be_a_corpus_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"matches no file"):
        find_files(DataConfig(paths=[str(tmp_path / "*.absent")]))
    (tmp_path / "tiny.txt").write_text("a")
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        corpus(tmp_path / "tiny.txt", tmp_path)
    with pytest.raises(ConfigError, match=r"model\.context=5000"):
        corpus(texts, tmp_path).train_batch(0, 1, 1, 5000)


def test_the_default_corpus_is_the_standard_library() -> None:
    files = find_files(DataConfig())
    names = {path.name for path in files}
    assert {"argparse.py", "dataclasses.py"} <= names and files == sorted(files)
    assert not any("site-packages" in path.parts for path in files)


def test_two_machines_that_build_one_corpus_at_a_time_get_the_same(texts: Path, tmp_path: Path) -> None:
    other: list[Corpus] = []

    class Overtaken(ByteVocabulary):
        """Tokenises while another machine builds the whole corpus."""

        def encode_batch(self, lines: Sequence[str], threads: int = 1) -> list[list[int]]:
            other.append(corpus(texts, tmp_path))
            return super().encode_batch(lines, threads)

    config = DataConfig(vocab="bytes", paths=[str(texts)], validation_fraction=0.2, cache=str(tmp_path / "cache"))
    found = open_corpus(config, Overtaken(), seed=0, say=lambda line: None)
    assert len(other) == 1 and found.folder == other[0].folder
    assert found.train.take(0, found.train.length).tolist() == other[0].train.take(0, found.train.length).tolist()
    assert [path.name for path in found.folder.parent.iterdir()] == [found.folder.name]  # nothing is left aside
