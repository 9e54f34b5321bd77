"""Tables that are read piece by piece are what they are when they are read whole, and behave as tuples do."""

from __future__ import annotations

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary import VocabIdentity, read_vocabulary
from vocab_parallel.vocabulary.files import parse_json
from vocab_parallel.vocabulary.json_stream import parse_packed
from vocab_parallel.vocabulary.packed import PackedBytes, PackedLists, PackedNames, TableEntries


def test_packed_sequences_are_equal_to_tuples_and_survive_a_copy() -> None:
    tokens, kinds = (b"", b"a", b"\xff\x00", b"", b"bc"), ("b", "a", "a", "b", "b")
    packed, names = PackedBytes(tokens), PackedNames.of(("a", "b"), kinds)
    for one, other in ((packed, tokens), (names, kinds)):
        assert one == other and other == one and one != other[:-1] and hash(one) == hash(other) and one != list(other)
        assert [one[at] for at in range(-5, 5)] == [other[at] for at in range(-5, 5)] and one[1:-1] == other[1:-1]
        assert one[::-2] == other[::-2] and list(reversed(one)) == list(reversed(other))
        assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
        with pytest.raises(IndexError):
            one[5]
    assert list(names.places("b")) == [0, 3, 4] and names.count("a") == 2 and names.count("c") == 0
    assert packed.padded(2) == (*tokens, b"", b"") and names.padded("a", 1) == (*kinds, "a")


def test_packed_lists_are_a_mapping() -> None:
    plain = {3: (1, 2), 9: (), 2**20: (7,)}
    packed = PackedLists(plain.items())
    assert packed == plain and dict(packed.items()) == plain and packed.get(4) is None and len(packed) == 3
    assert pickle.loads(pickle.dumps(packed)) == plain
    with pytest.raises(ValueError, match="key 3 after 9"):
        PackedLists([(9, (1,)), (3, (1,))])


def test_ids_in_any_order_find_their_entries() -> None:
    chance = random.Random(0)
    for most in (50, 200_000, 2**24):
        ids = chance.sample(range(most), 40)
        entries = TableEntries()
        for token_id in ids:
            entries.add(token_id, str(token_id).encode())
        assert all(entries.content(entries.place(token_id)) == str(token_id).encode() for token_id in ids)
        assert [entries.place(token_id) for token_id in (*set(range(50)).difference(ids), -1)].count(-1) > 0


def keep(kind: type, entries: Any) -> Any:
    """A packer that packs nothing."""
    pairs = list(entries)
    if kind is dict and len(dict(pairs)) < len(pairs):
        raise ValueError("twice")
    return [value for _, value in pairs] if kind is list else dict(pairs)


@pytest.mark.parametrize("chunk", [1, 2, 7, 2**16])
def test_what_is_read_in_chunks_is_what_is_read_whole(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vocab_parallel.vocabulary.json_stream._CHUNK", chunk)
    long = {
        "model": {"vocab": {"é": 1, 'a\\"],}': -20, "x": 1.5e-3}, "merges": [["a", "b"], "🙂 c", []], "other": [{}]},
        "vocab": [{"rank": 1}, 12, None, True, "\\u00e9"],
        "tokens": {},
        "n": 12345678901234567890,
    }
    texts = [json.dumps(long, indent=indent, ensure_ascii=plain) for indent in (None, 1) for plain in (True, False)]
    texts += ["[1, 2]", "7", '{"vocab": []}', " {} ", "\ufeff{}", '{"vocab": 3, "model": []}']
    broken = [
        '{"vocab": [1,]}',
        '{"vocab": [1 2]}',
        '{"vocab": {"a": 1, "a": 2}}',
        '{"a": 1} x',
        '{"vocab": [NaN]}',
        "{",
        '{"vocab": [1',
        '{"model": {"vocab": {"a" 1}}}',
        '{"model": {}, "model": {}}',
        "",
        '{"vocab": ["\\ud8',
    ]
    places = {place: keep for place in (("vocab",), ("tokens",), ("model", "vocab"), ("model", "merges"))}
    path = tmp_path / "some.json"
    for text in [*texts, *broken]:
        path.write_text(text, encoding="utf-8")
        try:
            whole: Any = parse_json(path.read_bytes(), path)
        except VocabularyError as error:
            with pytest.raises(VocabularyError) as caught:
                parse_packed(path, places)
            assert str(caught.value) == str(error) and text not in texts
        else:
            assert parse_packed(path, places) == whole and text not in broken


def test_a_good_file_is_not_parsed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = VocabIdentity.of_tokens([f"word {at}" for at in range(5000)] + [b"\xff"])
    table.write(tmp_path / "vocabulary.json")
    words = {"model": {"type": "BPE", "vocab": {f"w{at}": at for at in range(5000)}, "merges": [["w", "1"]] * 5000}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words, indent=2))
    monkeypatch.setattr("vocab_parallel.vocabulary.json_stream.parse_json", None)
    assert VocabIdentity.read(tmp_path / "vocabulary.json") == table
    assert read_vocabulary(tmp_path / "tokenizer.json").size == 5000
