"""The partial bijection between two vocabularies: how it is found, checked, combined, written and told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary import VocabIdentity, VocabMap, compose


def vocab(*tokens: str, roles: dict[str, int] | None = None, special: tuple[int, ...] = ()) -> VocabIdentity:
    roles = roles or {}
    names = {**roles, **{f"extra{token_id}": token_id for token_id in special if token_id not in roles.values()}}
    found = VocabIdentity.of_tokens(tokens, special_ids=names)
    kinds = tuple("unused" if token == "" else kind for token, kind in zip(tokens, found.kinds, strict=True))
    return VocabIdentity(found.tokens, kinds, roles)


def moved(old: VocabIdentity, new: VocabIdentity) -> list[int]:
    found: list[int] = VocabMap.from_vocabs(old, new, allow_drop=True).old_to_new.tolist()
    return found


def test_tokens_map_to_the_same_token_wherever_it_is() -> None:
    old, new = vocab("<s>", "a", "b", "c", roles={"bos": 0}), vocab("c", "<s>", "new", "a", "b", roles={"bos": 1})
    mapping = VocabMap.from_vocabs(old, new)
    assert mapping.old_to_new.tolist() == [1, 3, 4, 0] and mapping.new_to_old.tolist() == [3, 0, -1, 1, 2]
    assert mapping.old_to_new.dtype == mapping.new_to_old.dtype == torch.int64
    assert (mapping.old_size, mapping.new_size, mapping.kept) == (4, 5, 4)
    assert mapping.new_ids.tolist() == [2] and mapping.dropped_ids.tolist() == []
    assert (mapping.old_sha256, mapping.new_sha256) == (old.sha256, new.sha256) and not mapping.is_identity
    assert VocabMap.from_vocabs(old, old).is_identity


def test_a_special_token_that_only_one_side_names_goes_by_its_role() -> None:
    assert moved(vocab("<s>", "a", roles={"bos": 0}), vocab("a", "<bos>", roles={"bos": 1})) == [1, 0]


def test_a_special_token_that_both_sides_name_keeps_its_name_though_roles_change() -> None:
    # A chat version of a model makes another token its eos; the rows of both tokens mean what they meant.
    old = vocab("<|endoftext|>", "<|im_end|>", "a", roles={"eos": 0}, special=(1,))
    new = vocab("<|endoftext|>", "<|im_end|>", "a", roles={"eos": 1}, special=(0,))
    assert moved(old, new) == [0, 1, 2]
    lines = VocabMap.from_vocabs(old, new).describe(old, new)
    assert lines[-1] == (
        "the eos token was special '<|endoftext|>' (old id 0) and is special '<|im_end|>' (new id 1): not the same row"
    )


def test_one_token_with_two_roles_moves_once() -> None:
    old = vocab("<|end|>", "a", roles={"bos": 0, "eos": 0})
    new = vocab("<s>", "</s>", "a", roles={"bos": 0, "eos": 1})
    assert moved(old, new) == [0, 2]


def test_a_token_special_on_one_side_only_goes_by_its_text() -> None:
    old, new = vocab("<tool>", "a", special=(0,)), vocab("a", "<tool>")
    assert moved(old, new) == [1, 0] and moved(new, old) == [1, 0]
    # Where each kind has its own counterpart, kinds are kept apart.
    both, other = vocab("<tool>", "<tool>", special=(0,)), vocab("<tool>", "<tool>", special=(1,))
    assert moved(both, other) == [1, 0]


def test_of_equal_tokens_that_change_their_kind_the_first_is_kept() -> None:
    assert moved(vocab("<t>", "a", "<t>", special=(0, 2)), vocab("a", "<t>")) == [1, 0, -1]


def test_a_byte_piece_is_not_the_letter() -> None:
    old = VocabIdentity((b"A", b"A"), ("byte", "normal"))
    new = VocabIdentity((b"A", b"A"), ("normal", "byte"))
    assert moved(old, new) == [1, 0]
    assert moved(old, VocabIdentity.of_tokens(["A"])) == [-1, 0]


def test_equal_tokens_map_in_order_of_occurrence() -> None:
    assert moved(vocab("a", "x", "a", "a"), vocab("x", "a", "a")) == [1, 0, 2, -1]
    assert moved(vocab("a", "x"), vocab("x", "a", "a")) == [1, 0]


def test_unused_ids_stay_or_vanish_without_leave() -> None:
    old, new = vocab("a", "", "", ""), vocab("a", "b", "", "c", "")
    mapping = VocabMap.from_vocabs(old, new)  # nothing is lost with ids 1 and 3: no token had them
    assert mapping.old_to_new.tolist() == [0, -1, 2, -1] and mapping.new_ids.tolist() == [1, 3, 4]


def test_lost_tokens_are_refused_by_name_until_asked_for() -> None:
    old, new = vocab("<s>", "a", "b", special=(0,)), vocab("a")
    with pytest.raises(VocabularyError) as caught:
        VocabMap.from_vocabs(old, new)
    assert str(caught.value) == (
        "2 of 3 old tokens are not in the new vocabulary of 1 ids, the first are 0 (special '<s>'), 2 ('b'); "
        "pass allow_drop=True (--allow-drop on the command line) if they are to be lost"
    )
    assert VocabMap.from_vocabs(old, new, allow_drop=True).dropped_ids.tolist() == [0, 2]


def test_sources_are_the_old_sub_tokens_of_new_tokens_only() -> None:
    old, new = vocab("a", "b", "c"), vocab("c", "ab", "a", "", "b", "cab")
    asked: list[bytes] = []

    def encode(token: bytes) -> list[int]:
        asked.append(token)
        return ["abc".index(chr(byte)) for byte in token if token != b"cab"]

    mapping = VocabMap.from_vocabs(old, new, encode=encode)
    assert asked == [b"ab", b"cab"] and mapping.sources == {1: (0, 1)}
    with pytest.raises(VocabularyError, match=r"encodes 'ab' as ids \(9,\), but the old vocabulary has 3 ids"):
        VocabMap.from_vocabs(old, new, encode=lambda token: [9])


def test_appending_and_permuting() -> None:
    grown = VocabMap.append(3, 2, sources={4: (0, 2)})
    assert grown.old_to_new.tolist() == [0, 1, 2] and grown.new_to_old.tolist() == [0, 1, 2, -1, -1]
    assert grown.sources == {4: (0, 2)} and grown.new_ids.tolist() == [3, 4]
    assert VocabMap.append(3, 0).is_identity
    turned = VocabMap.permutation([2, 0, 1], old_sha256="0" * 64)
    assert turned.new_to_old.tolist() == [1, 2, 0] and turned.kept == 3 and turned.old_sha256 == "0" * 64
    assert VocabMap.permutation(torch.tensor([2, 0, 1], dtype=torch.int32)).old_to_new.tolist() == [2, 0, 1]
    assert VocabMap.from_pairs(2, 2, torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)).new_to_old.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VocabMap.from_pairs(3, 3, [(0, 0), (1, 0), (2, 1)]), "new id 0 takes more than one old row"),
        (lambda: VocabMap.from_pairs(3, 3, [(0, 0), (0, 1), (2, 2)]), "old id 0 moves to more than one new id"),
        (lambda: VocabMap.from_pairs(3, 3, [(0, 3), (1, 1)]), r"new ids outside \[0, 3\): 3"),
        (lambda: VocabMap.from_pairs(3, 3, [(-1, 0)]), r"old ids outside \[0, 3\): -1"),
        (lambda: VocabMap.from_pairs(3, 3, [(0, 0)]), "2 of 3 old rows have no new id, the first are 1, 2; pass allow"),
        (lambda: VocabMap.from_pairs(3, 3, [(0.5, 0)]), "expected integers"),
        (lambda: VocabMap.from_pairs(3, 3, [(0, 0, 1)]), r"expected integers \[n, 2\], got torch.int64 \[1, 3\]"),
        (lambda: VocabMap.from_pairs(3, 3, [(0, 0), (1,)]), "expected \\[old id, new id\\] each"),
        (lambda: VocabMap.from_pairs(3, 3, [(2**70, 0)]), "pairs: expected"),
        (lambda: VocabMap.from_pairs(0, 3, []), "old_size is 0; expected 1 to"),
        (lambda: VocabMap.from_pairs(3, 2**40, []), "new_size is 1099511627776; expected 1 to 16,777,216"),
        (lambda: VocabMap.from_pairs(2, 2, {0: 0, 1: 1}, sources={1: (0,)}), "sources: new id 1 takes an old row"),
        (lambda: VocabMap.append(2, 1, sources={2: (5,)}), r"sources of new id 2: expected old ids in \[0, 2\)"),
        (lambda: VocabMap.append(2, 1, sources={2: ()}), "sources of new id 2"),
        (lambda: VocabMap.append(2, -1), "count is -1; expected 0 or more new ids"),
        (lambda: VocabMap.append(2**40, 1), "old_size is 1099511627776"),
        (lambda: VocabMap.permutation([0, 0]), "new id 0 takes more than one old row"),
        (lambda: VocabMap.permutation(torch.tensor([0.0, 1.0])), "a permutation is a list of ids"),
        (lambda: VocabMap(torch.tensor([0, 1]), torch.tensor([1, 0])), "old_to_new and new_to_old disagree: new id 0"),
        (lambda: VocabMap(torch.tensor([0, 0]), torch.tensor([0, -1])), "disagree"),
        (lambda: VocabMap(torch.tensor([0]), torch.tensor([0], dtype=torch.int32)), "new_to_old must be int64"),
        (lambda: VocabMap(torch.tensor([0, -5]), torch.tensor([0])), r"old_to_new\[1\] is -5; expected an id, or -1"),
        (lambda: VocabMap(torch.empty(1, dtype=torch.int64, device="meta"), torch.tensor([0])), "on the CPU, got"),
    ],
)
def test_what_is_no_partial_bijection_is_refused(make: Callable[[], VocabMap], message: str) -> None:
    with pytest.raises(VocabularyError, match=message):
        make()


@st.composite
def maps(draw: st.DrawFn, old_size: int | None = None) -> VocabMap:
    old_size = old_size or draw(st.integers(1, 12))
    new_size = draw(st.integers(1, 12))
    kept = draw(st.integers(0, min(old_size, new_size)))
    old = draw(st.permutations(range(old_size)))[:kept]
    new = draw(st.permutations(range(new_size)))
    fresh = sorted(new[kept:])
    chosen = draw(st.lists(st.sampled_from(fresh), unique=True)) if fresh else []
    parts = st.lists(st.integers(0, old_size - 1), min_size=1, max_size=3).map(tuple)
    sources = {new_id: draw(parts) for new_id in chosen}
    return VocabMap.from_pairs(
        old_size, new_size, zip(old, new, strict=False), sources=sources, allow_drop=True,
        old_sha256=draw(st.sampled_from([None, "ab" * 32])), new_sha256=draw(st.sampled_from([None, "cd" * 32])),
    )  # fmt: skip


def applied(mapping: VocabMap, rows: list[int | None]) -> list[int | None]:
    return [rows[old] if old >= 0 else None for old in mapping.new_to_old.tolist()]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_composing_equals_one_map_after_the_other(data: st.DataObject) -> None:
    first = data.draw(maps())
    second = data.draw(maps(old_size=first.new_size))
    second = VocabMap(second.old_to_new, second.new_to_old, second.sources, first.new_sha256, second.new_sha256)
    both = compose(first, second)
    rows: list[int | None] = list(range(100, 100 + first.old_size))
    assert applied(both, rows) == applied(second, applied(first, rows))
    assert (both.old_sha256, both.new_sha256) == (first.old_sha256, second.new_sha256)


def test_composing_follows_sub_tokens_back_to_the_first_vocabulary() -> None:
    first = VocabMap.append(2, 2, sources={2: (0, 1)})  # id 3 begins without sub-tokens
    second = VocabMap.from_pairs(
        4, 5, [(0, 1), (1, 0), (2, 4)], sources={2: (2, 0), 3: (3,)}, allow_drop=True
    )  # fmt: skip
    assert compose(first, second).sources == {2: (0, 1, 0), 4: (0, 1)}


def test_maps_of_different_vocabularies_do_not_compose() -> None:
    with pytest.raises(VocabularyError, match=r"ends at 3 ids .* begins at 2 .* not of one vocabulary"):
        compose(VocabMap.append(2, 1), VocabMap.append(2, 1))
    with pytest.raises(VocabularyError, match="not of one vocabulary"):
        compose(VocabMap.append(2, 1, new_sha256="a" * 64), VocabMap.append(3, 1, old_sha256="b" * 64))


@settings(max_examples=60, deadline=None)
@given(mapping=maps())
def test_the_file_reads_back_to_the_same_map(mapping: VocabMap, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "map.json"
    mapping.write(path)
    assert VocabMap.read(path) == mapping


def test_a_file_of_a_permuted_and_grown_vocabulary_is_a_few_lines(tmp_path: Path) -> None:
    old = torch.arange(50_000)
    new = torch.cat([old[:100], old[1_100:], old[100:1_100]])
    VocabMap.from_pairs(50_000, 50_064, torch.stack([new, old], 1), sources={50_001: (7, 8)}).write(tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text()) == {
        "version": 1, "old_size": 50_000, "new_size": 50_064, "old_sha256": None, "new_sha256": None,
        "pairs": [[0, 0, 100], [100, 49_000, 1_000], [1_100, 100, 48_900]], "dropped": [],
        "sources": {"50001": [7, 8]},
    }  # fmt: skip


def file(tmp_path: Path, **changes: Any) -> Path:
    data = {"version": 1, "old_size": 3, "new_size": 4, "pairs": "identity", **changes}
    path = tmp_path / "map.json"
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "absent"}))
    return path


def test_the_three_forms_of_pairs_are_one_map(tmp_path: Path) -> None:
    wanted = VocabMap.append(3, 1)
    for pairs in ("identity", [[0, 0], [2, 2], [1, 1]], [[0, 0, 2], [2, 2, 1]]):
        assert VocabMap.read(file(tmp_path, pairs=pairs)) == wanted
    shrunk = VocabMap.read(file(tmp_path, new_size=1, dropped=[[1, 2]]))
    assert shrunk.old_to_new.tolist() == [0, -1, -1]


def test_a_file_that_forgets_ids_is_refused_unless_asked(tmp_path: Path) -> None:
    path = file(tmp_path, pairs=[[0, 0]], dropped=[[2, 1]])
    with pytest.raises(VocabularyError, match=r"1 of 3 old ids are neither mapped nor listed under dropped.* 1; list"):
        VocabMap.read(path)
    assert VocabMap.read(path, allow_drop=True).dropped_ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version: expected 1, found 2"),
        ({"version": "absent"}, "version: expected an integer, found nothing"),
        ({"old_size": "3"}, "old_size: expected an integer, found '3'"),
        ({"old_size": -3}, "old_size: expected 1 to 16,777,216 ids, found -3"),
        ({"old_size": 10**12}, "old_size: expected 1 to 16,777,216 ids, found 1000000000000"),
        ({"old_size": 10**400}, "old_size: expected 1 to 16,777,216 ids, found a huge integer"),
        ({"pairs": "all"}, "pairs: expected 'identity' or a list, found 'all'"),
        ({"pairs": [[0, 0], [1]]}, r"pairs\[1\]: expected 2 or 3 integers, found a list of 1"),
        ({"pairs": [[0, 0], [1, 1, 1]]}, r"pairs\[1\]: expected 2 or 3 integers, found a list of 3"),
        ({"pairs": [[0, 0.0]]}, r"pairs\[0\]: expected"),
        ({"pairs": [[0, True]]}, r"pairs\[0\]: expected"),
        ({"pairs": [[0, 10**30]]}, r"pairs\[0\]: expected"),
        ({"pairs": [[0, 0, 10**11]]}, r"pairs\[0\]: expected \[old_start, new_start, count\]"),
        ({"pairs": [[0, 0, 3], [0, 0, 3]]}, "the runs have 6 ids, more than the 3 that can be kept"),
        ({"pairs": [[0, 0, -1]]}, r"pairs\[0\]: expected \[old_start"),
        ({"pairs": [[2, 3, 2]]}, r"old ids outside \[0, 3\): 3"),
        ({"pairs": [[0, 1], [1, 1], [2, 2]]}, "new id 1 takes more than one old row"),
        ({"dropped": [[0, 1]]}, "dropped: old id 0 is listed, but pairs keeps it"),
        ({"dropped": [[0, 10**11]]}, r"dropped\[0\]: expected \[start, count\] within \[0, 3\)"),
        ({"dropped": {}}, "dropped: expected a list, found an object of 0"),
        ({"sources": {"x": [0]}}, "sources.x: expected a new id and a list of old ids"),
        ({"sources": {"3": [-1]}}, "sources.3: expected a new id"),
        ({"sources": {"3": [3]}}, r"sources of new id 3: expected old ids in \[0, 3\)"),
        ({"sources": {"9": [0]}}, "sources: new id 9"),
        ({"old_sha256": "ABC"}, "old_sha256: expected 64 hexadecimal digits, found 'ABC'"),
        ({"pair": []}, "unknown key 'pair'; known are version"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = file(tmp_path, **changes)
    with pytest.raises(VocabularyError, match=message) as caught:
        VocabMap.read(path)
    assert str(path) in str(caught.value)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(["version", "old_size", "new_size", "old_sha256", "pairs", "dropped", "sources", "other"]),
    value=VALUES,
)
def test_any_other_value_in_a_file_is_a_vocabulary_error(
    key: str, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({"version": 1, "old_size": 3, "new_size": 4, "pairs": "identity", key: value}))
    try:
        VocabMap.read(path)
    except VocabularyError as error:
        assert str(path) in str(error)


def test_the_dry_run_says_what_stays_moves_begins_and_is_lost() -> None:
    old = vocab("<s>", "a", "b", "c", "d", roles={"bos": 0})
    new = vocab("<s>", "b", "a", "e", "c", "f", roles={"bos": 0})
    mapping = VocabMap.from_vocabs(old, new, encode=lambda token: [1, 2] if token == b"e" else [], allow_drop=True)
    assert mapping.describe(old, new, limit=2) == [
        "5 old ids to 6 new ids",
        "1 stay at their id",
        "3 move to another id: 1 to 2 ('a'), 2 to 1 ('b'), ...",
        "2 are new: 3 ('e') from 1 ('a') + 2 ('b'), 5 ('f')",
        "1 of the new ids have source sub-tokens",
        "1 are dropped: 4 ('d')",
    ]
    assert mapping.describe(limit=1)[2:] == [
        "3 move to another id: 1 to 2, ...",
        "2 are new: 3 from 1 + 2, ...",
        "1 of the new ids have source sub-tokens",
        "1 are dropped: 4",
    ]
    with pytest.raises(VocabularyError, match="the map's old vocabulary has 5 ids, the one given 6"):
        mapping.describe(new, new)


def test_maps_are_equal_by_content() -> None:
    assert VocabMap.append(3, 1) == VocabMap.from_pairs(3, 4, [(2, 2), (0, 0), (1, 1)])
    others: list[object] = [VocabMap.append(3, 2), VocabMap.append(3, 1, sources={3: (0,)}), 4]
    assert all(VocabMap.append(3, 1) != other for other in others)


def test_tensors_given_are_left_as_they_were() -> None:
    pairs: Tensor = torch.tensor([[0, 1], [1, 0]])
    VocabMap.from_pairs(2, 2, pairs)
    assert pairs.tolist() == [[0, 1], [1, 0]]


def test_tokens_whose_hashes_are_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    old = VocabIdentity.of_tokens(["a", "b", "a", "c", "d", "b"])
    new = VocabIdentity.of_tokens(["d", "b", "b", "a", "e", "a", "b"])
    expected = VocabMap.from_vocabs(old, new, allow_drop=True).old_to_new.tolist()
    assert expected == [3, 1, 5, -1, 0, 2]
    for bits in (0, 1, 2):  # of the first hashes; with a salt before the token they are good ones
        weak = lambda token, bits=bits: hash(token) if token[1:2] else hash(token) & ((1 << bits) - 1)  # noqa: E731
        monkeypatch.setattr("vocab_parallel.vocabulary.pairing.token_hash", weak)
        assert VocabMap.from_vocabs(old, new, allow_drop=True).old_to_new.tolist() == expected
