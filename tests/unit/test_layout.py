"""`VocabLayout`, for every vocabulary, padding and number of ranks that hypothesis finds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vocab_parallel import LayoutError, TokenRangeError, VocabLayout, VocabParallelError

layouts = st.builds(
    VocabLayout, st.integers(1, 300_000), st.integers(1, 64), multiple_of=st.sampled_from([1, 2, 3, 4, 64, 128])
)
small = st.builds(VocabLayout, st.integers(1, 200), st.integers(1, 9), multiple_of=st.integers(1, 20))


@given(small)
def test_every_id_has_exactly_one_owner(layout):
    owned = [token for rank in range(layout.tp_size) for token in layout.range(rank)]
    assert owned == list(range(layout.vocab_size))
    for rank in range(layout.tp_size):
        assert all(layout.owner(token) == rank for token in layout.range(rank))


@given(layouts)
def test_storage_is_equal_real_ids_come_first_and_padding_is_small(layout):
    assert layout.padded_size == layout.shard_size * layout.tp_size
    assert layout.shard_size % layout.multiple_of == 0
    assert layout.vocab_size <= layout.padded_size < layout.vocab_size + layout.multiple_of * layout.tp_size
    sizes = [len(layout.range(rank)) for rank in range(layout.tp_size)]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == layout.vocab_size
    assert all(
        size == layout.shard_size for size in sizes[:-1] if size and sizes[sizes.index(size) + 1 :].count(0) == 0
    )
    assert max(sizes) <= layout.shard_size


@given(layouts)
def test_from_padded_gives_the_same_layout_back(layout):
    again = VocabLayout.from_padded(layout.vocab_size, layout.padded_size, layout.tp_size)
    assert again == layout
    assert hash(again) == hash(layout)
    assert [again.range(rank) for rank in range(layout.tp_size)] == [layout.range(r) for r in range(layout.tp_size)]


@given(layouts, st.integers(1, 64))
def test_from_padded_takes_any_padding_that_divides_and_refuses_the_others(layout, extra):
    padded = layout.padded_size + extra
    if padded % layout.tp_size == 0:
        assert VocabLayout.from_padded(layout.vocab_size, padded, layout.tp_size).padded_size == padded
    else:
        with pytest.raises(LayoutError, match=str(padded)):
            VocabLayout.from_padded(layout.vocab_size, padded, layout.tp_size)


@given(layouts, st.integers(1, 1000))
def test_ids_outside_the_vocabulary_have_no_owner_padding_included(layout, distance):
    for token in (-distance, layout.vocab_size, layout.padded_size, layout.vocab_size + distance):
        with pytest.raises(TokenRangeError, match=str(token)):
            layout.owner(token)


@pytest.mark.parametrize(
    ("vocab", "tp", "multiple_of", "ranges"),
    [
        (9, 4, 1, [(0, 3), (3, 6), (6, 9), (9, 9)]),
        (5, 4, 2, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (1, 3, 1, [(0, 1), (1, 1), (1, 1)]),
        (131_072, 2, 128, [(0, 65_536), (65_536, 131_072)]),
        (50_257, 2, 128, [(0, 25_216), (25_216, 50_257)]),
    ],
)
def test_known_layouts(vocab, tp, multiple_of, ranges):
    layout = VocabLayout(vocab, tp, multiple_of=multiple_of)
    assert [(layout.range(rank).start, layout.range(rank).stop) for rank in range(tp)] == ranges


@pytest.mark.parametrize("bad", [(0, 1, 1), (-1, 1, 1), (9, 0, 1), (9, 1, 0), (9.0, 1, 1), (9, 1, "1"), (True, 1, 1)])
def test_impossible_sizes_are_refused(bad):
    with pytest.raises(LayoutError):
        VocabLayout(bad[0], bad[1], multiple_of=bad[2])


def test_a_padded_size_below_the_vocabulary_is_refused():
    with pytest.raises(LayoutError, match="below"):
        VocabLayout.from_padded(9, 8, 2)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_group_is_refused(rank):
    with pytest.raises(LayoutError, match=str(rank)):
        VocabLayout(9, 4).range(rank)


def test_a_layout_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        VocabLayout(9, 4).vocab_size = 10


def test_errors_are_of_the_package_and_value_errors():
    assert issubclass(LayoutError, VocabParallelError)
    assert issubclass(LayoutError, ValueError)
