"""The ordered table: its hash, what differs between two, and what disagrees with the model beside it."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary import VocabIdentity, audit, first_difference

TABLE = VocabIdentity(
    (b"<s>", b" the", b"\xe4", b"", b"cat"),
    ("special", "normal", "byte", "unused", "normal"),
    {"bos": 0},
    (4, 0),
    "tokenizer.json",
)
TABLE_OF_ONE = VocabIdentity((b"a", b""), ("normal", "unused"))


def test_equal_sizes_with_swapped_ids_are_different_vocabularies() -> None:
    swapped = VocabIdentity.of_tokens(["<s>", "dog", "cat"], special_ids={"bos": 0})
    straight = VocabIdentity.of_tokens(["<s>", "cat", "dog"], special_ids={"bos": 0})
    assert swapped.size == straight.size and swapped.sha256 != straight.sha256
    assert first_difference(straight, swapped, ("the checkpoint", "the tokenizer")) == (
        "id 1 is 'cat' in the checkpoint and 'dog' in the tokenizer"
    )


def test_a_longer_table_is_told_by_its_first_further_id() -> None:
    longer = VocabIdentity.of_tokens(["a", "b", "c"])
    shorter = VocabIdentity.of_tokens(["a", "b"])
    assert first_difference(shorter, longer) == "the second has 3 ids and the first 2: id 2 is 'c'"
    assert first_difference(longer, shorter) == "the first has 3 ids and the second 2: id 2 is 'c'"
    assert first_difference(longer, VocabIdentity.of_tokens([b"a", b"b", b"c"], added=[2])) is None


def test_the_hash_is_the_documented_one() -> None:
    codes = {"normal": 0, "special": 1, "byte": 2, "unused": 3}
    data = b"vocab_parallel ordered vocabulary 1\n" + struct.pack("<Q", 5)
    for kind, token in zip(TABLE.kinds, TABLE.tokens, strict=True):
        data += struct.pack("<BI", codes[kind], len(token)) + token
    assert TABLE.sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        VocabIdentity.of_tokens(["ab", "c"]),
        VocabIdentity((b"a", b"bc"), ("normal", "special")),
        VocabIdentity((b"a", b"bc"), ("byte", "normal")),
        VocabIdentity.of_tokens(["a", "bc", ""]),
    ],
    ids=["border between tokens", "special", "byte", "one more id"],
)
def test_kinds_and_borders_are_part_of_the_hash(other: VocabIdentity) -> None:
    assert other.sha256 != VocabIdentity.of_tokens(["a", "bc"]).sha256


def test_roles_added_order_and_source_are_not_part_of_the_hash() -> None:
    other = VocabIdentity(TABLE.tokens, TABLE.kinds, {"eos": 0}, (0, 4), "sentencepiece")
    assert other.sha256 == TABLE.sha256 and other != TABLE
    assert VocabIdentity(TABLE.tokens, TABLE.kinds, {"bos": 0}, (4, 0), "table") == TABLE


def test_the_name_that_a_file_gives_an_unused_id_is_no_token() -> None:
    table = VocabIdentity((b"a", b"<unused0>"), ("normal", "unused"))
    assert table.tokens == (b"a", b"") and table.sha256 == TABLE_OF_ONE.sha256


def test_duplicates_are_legal_and_reported() -> None:
    table = VocabIdentity((b"a", b"b", b"a", b"", b"", b"a"), ("normal",) * 3 + ("unused",) * 2 + ("special",))
    assert table.duplicates() == [(0, 2)]
    assert audit(table) == ["ids 0, 2 are all 'a'"]


def test_the_audit_names_each_disagreement() -> None:
    table = VocabIdentity.of_tokens(["<s>", "a", "b", "</s>"], special_ids={"bos": 0, "eos": 3})
    assert audit(table, embedding_rows=4, head_rows=4, config_vocab_size=4, emitted_max=3) == []
    assert audit(table, embedding_rows=3, head_rows=6, config_vocab_size=5, emitted_max=4) == [
        "embedding rows 3, but the vocabulary has 4 ids: ids 3 to 3 have no row (the first is special '</s>')",
        "head rows 6, but the vocabulary has 4 ids: rows 4 to 5 belong to no token",
        "config vocab_size 5, but the vocabulary has 4 ids: rows 4 to 4 belong to no token",
        "embedding rows 3, but head rows 6: they cannot be tied",
        "the tokenizer emits id 4, beyond the 3 ids that all parts have",
        "special id eos = 3 is beyond the 3 ids that all parts have",
    ]
    hole = VocabIdentity((b"a", b""), ("normal", "unused"), {"pad": 1})
    assert audit(hole) == ["special id pad = 1 is an unused id"]


def test_the_file_reads_back_and_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "vocabulary.json")
    back = VocabIdentity.read(tmp_path / "vocabulary.json")
    assert back == TABLE and back.source == "tokenizer.json" and back.sha256 == TABLE.sha256
    back.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "vocabulary.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "vocabulary.json"]


def test_an_interrupted_write_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "vocabulary.json"
    TABLE.write(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        VocabIdentity.of_tokens(["x"]).write(path)
    assert path.read_bytes() == before and [found.name for found in tmp_path.iterdir()] == ["vocabulary.json"]


def changed(**changes: Any) -> dict[str, Any]:
    return {**TABLE.to_json(), **changes}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "top level: expected an object, found a list of 0"),
        (changed(format="other"), "expected 'vocab_parallel vocabulary' version 1, found 'other' version 1"),
        (changed(version=2), "version 1, found 'vocab_parallel vocabulary' version 2"),
        (changed(version=True), "version: expected an integer, found True"),
        (changed(tokens=["<s>", "a"]), "size: 5, but tokens has 2 entries"),
        (changed(tokens=["<s>", " the", 7, "", "cat"]), r"tokens\[2\]: expected an object, found 7"),
        (changed(tokens=["<s>", " the", {"base64": "?"}, "", "cat"]), r"tokens\[2\]: not base64"),
        (changed(tokens=["<s>", " the", "\ud800", "", "cat"]), r"tokens\[2\]: .* \(a lone surrogate\)"),
        (changed(kinds=[["normal", True]]), r"kinds\[0\]: expected \[kind, count\]"),
        (changed(tokens=["<s>", " the", "dog", "", "cat"]), "hashes to .* but the file says .*edited or damaged"),
        (changed(kinds=[["normal", 10**12]]), r"kinds\[0\]: expected \[kind, count\] that add up to 5"),
        (changed(kinds=[["normal", 4]]), "5 tokens, but kinds of 4"),
        (changed(kinds=[["funny", 5]]), r"unknown kinds \['funny'\]; known are normal, special, byte, unused"),
        (changed(special_ids={"bos": 5}), r"special id bos is 5; expected an id in \[0, 5\)"),
        (changed(special_ids={"bos": 0.0}), r"special_ids.bos: expected an integer, found 0.0"),
        (changed(added=[-1]), r"added token is -1; expected an id in \[0, 5\)"),
        (changed(added=[1, 1]), "an id appears twice among the added tokens"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(data: object, message: str) -> None:
    with pytest.raises(VocabularyError, match=message) as caught:
        VocabIdentity.from_json(data, "some/vocabulary.json")
    assert "some/vocabulary.json" in str(caught.value)


def test_a_description_survives_json() -> None:
    assert VocabIdentity.from_json(json.loads(json.dumps(TABLE.to_json()))) == TABLE


def test_resizing_adds_unused_ids_and_never_removes_any() -> None:
    larger = TABLE.resized(8)
    assert larger.size == 8 and larger.kinds[5:] == ("unused",) * 3 and larger.tokens[:5] == TABLE.tokens
    assert larger.special_ids == TABLE.special_ids and TABLE.resized(5) == TABLE
    with pytest.raises(VocabularyError, match="cannot resize 5 ids to 4: expected 5 to 16,777,216"):
        TABLE.resized(4)


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(VocabularyError, match="table: 0 ids; a vocabulary has 1 to 16,777,216"):
        VocabIdentity.of_tokens([])
    with pytest.raises(VocabularyError, match=r"table: tokens\[1\]: .* is not Unicode text"):
        VocabIdentity.of_tokens(["a", "\ud800"])
