"""New rows and the statistics they come from: exact, whatever the blocks; and what cannot be is refused."""

from __future__ import annotations

import itertools
import math
import statistics as python_statistics
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from vocab_parallel.errors import ConfigError, NonFiniteError, VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import (
    CopyOf,
    MeanOfRows,
    MeanOfSources,
    Normal,
    OldRows,
    RowInit,
    Zeros,
    parse_init,
    without_sources,
)
from vocab_parallel.vocabulary.migration.normal_rows import normal_quantile, normal_rows
from vocab_parallel.vocabulary.migration.statistics import ColumnStatistics, Magnitudes, column_statistics

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def table(rows: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Columns of very different sizes and offsets, with exact zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rows, *shape, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.randint(-3, 4, shape, generator=generator).double() if shape else 1.0
    return (drawn * scale + (scale * 3 if shape else 0)).to(dtype)


def in_blocks(rows: Tensor, size: int) -> ColumnStatistics:
    def blocks():
        for at in range(0, len(rows), size):
            yield at, rows[at : at + size]

    return column_statistics("table", blocks, rows.shape[1:], spread=True)


def grown(count: int, old: int = 40, sources: dict[int, tuple[int, ...]] | None = None) -> VocabMap:
    pairs = [(token, token) for token in range(old)]
    return VocabMap.from_pairs(old, old + count, pairs, sources=sources or {})


def made(init: RowInit, vocab_map: VocabMap, old: Tensor) -> Tensor:
    """The new rows of a map as one process makes them."""
    new_ids = vocab_map.new_ids.tolist()
    needed = {token for new_id in new_ids for token in init.needs(new_id, vocab_map)}
    statistics = in_blocks(old, 7) if init.needs_statistics(vocab_map) else None
    fetched = {token: old[token] for token in needed}
    return init.rows(new_ids, vocab_map, OldRows(old.shape[1:], old.dtype, "cpu", fetched, statistics))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (6,), (3, 2)], ids=str)
def test_mean_and_deviation_have_the_same_bits_for_any_blocks_and_any_order(shape: tuple[int, ...], dtype: torch.dtype):
    rows = table(1003, *shape, dtype=dtype)
    whole = in_blocks(rows, 1003)
    order = torch.randperm(1003, generator=torch.Generator().manual_seed(1))
    for other in (in_blocks(rows, 1), in_blocks(rows, 64), in_blocks(rows[order], 100)):
        assert torch.equal(whole.mean, other.mean)
        assert torch.equal(whole.std, other.std)
    assert whole.mean.shape == whole.std.shape == shape


def test_the_mean_is_the_exact_one_rounded_once():
    rows = table(501, 4, dtype=torch.float32)
    exact = [sum((Fraction(x) for x in column), Fraction(0)) / 501 for column in rows.double().T.tolist()]
    got = in_blocks(rows, 50).mean.tolist()
    # what lies below 2**-72 of the largest entry is cut off: with 24-bit entries of one size nothing does
    assert got == [float(value) for value in exact]


def test_the_deviation_is_that_of_a_population_to_ten_digits():
    rows = table(400, 5, dtype=torch.float64)
    torch.testing.assert_close(in_blocks(rows, 33).std, rows.std(0, correction=0), rtol=1e-10, atol=0)
    assert in_blocks(torch.full((9, 2), 0.1), 4).std.tolist() == [0.0, 0.0]


def test_sums_of_parts_merge_to_those_of_the_whole():
    rows = table(90, 3)
    parts = [Magnitudes("table", (3,)) for _ in range(3)]
    cuts = [(0, 10), (10, 10), (10, 90)]  # one of them is empty
    for part, (start, stop) in zip(parts, cuts, strict=True):
        part.see(start, rows[start:stop])
    largest = torch.stack([part.largest for part in parts]).amax(0)
    sums = []
    for part, (start, stop) in zip(parts, cuts, strict=True):
        part.largest = largest
        one = ColumnStatistics(part, spread=True)
        one.add(rows[start:stop])
        sums.append(one.sums)
    one.merge(torch.stack(sums).sum(0), 90)
    assert torch.equal(one.mean, in_blocks(rows, 90).mean)
    assert torch.equal(one.std, in_blocks(rows, 90).std)


def test_the_largest_and_the_smallest_numbers_of_a_dtype_overflow_nothing():
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        rows = torch.tensor([[info.max, info.tiny], [info.max, -info.tiny], [info.max, 0.0]], dtype=dtype)
        got = in_blocks(rows, 2)
        assert got.mean.tolist() == [info.max, 0.0]
        assert math.isclose(got.std[1].item(), info.tiny * math.sqrt(2 / 3), rel_tol=1e-9) or dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_named(bad: float):
    rows = table(300, 3)
    rows[211, 1] = bad
    with pytest.raises(NonFiniteError, match=r"row 211 of table"):
        in_blocks(rows, 100)


def test_integer_sums_hold_as_many_rows_as_they_say():
    from vocab_parallel.vocabulary.migration import statistics

    assert statistics._MOST_ROWS * 2**statistics._BITS <= 2**62
    few = Magnitudes("table", (1,))
    few.see(0, torch.ones(1, 1))
    one = ColumnStatistics(few)
    one.count = statistics._MOST_ROWS
    with pytest.raises(OverflowError):
        one.add(torch.ones(1, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,)], ids=str)
def test_each_initialization_gives_what_it_says(shape: tuple[int, ...], dtype: torch.dtype):
    old = table(40, *shape, dtype=dtype)
    vocab_map = grown(4, sources={40: (3,), 41: (1, 2, 2), 43: (39, 0)})
    mean = old.double().mean(0)
    assert torch.equal(made(Zeros(), vocab_map, old), torch.zeros(4, *shape, dtype=dtype))
    torch.testing.assert_close(made(MeanOfRows(), vocab_map, old)[2], mean.to(dtype))
    sources = made(MeanOfSources(), vocab_map, old)
    assert torch.equal(sources[0], old[3])
    torch.testing.assert_close(sources[1], ((old[1].double() + 2 * old[2].double()) / 3).to(dtype))
    torch.testing.assert_close(sources[2], mean.to(dtype))
    assert without_sources(MeanOfSources(), vocab_map) == 1 and without_sources(Zeros(), vocab_map) == 0
    assert torch.equal(made(CopyOf({40: 5, 41: 5, 42: 0, 43: 39}), vocab_map, old), old[[5, 5, 0, 39]])
    assert all(made(init, vocab_map, old).shape == (4, *shape) for init in (Normal(), MeanOfSources()))


def test_normal_rows_have_the_statistics_of_the_table():
    old = table(500, 4, dtype=torch.float64)
    drawn = made(Normal(3), grown(4000, old=500), old)
    error = (drawn.mean(0) - old.mean(0)) / old.std(0)
    assert error.abs().max() < 4 / math.sqrt(4000)
    assert ((drawn.std(0) / old.std(0)) - 1).abs().max() < 4 / math.sqrt(2 * 4000)


def test_a_normal_row_depends_on_seed_id_and_column_alone():
    old = table(40, 5)
    together = made(Normal(1), grown(9), old)
    assert torch.equal(made(Normal(1), grown(4), old), together[:4])
    few = normal_rows([44, 41], 5, 1)
    assert torch.equal(few[1], normal_rows(range(40, 49), 5, 1)[1])
    assert torch.equal(few[:, :2], normal_rows([44, 41], 2, 1))
    assert not torch.equal(made(Normal(2), grown(9), old), together)
    assert len(set(normal_rows(range(100), 50, 2**64 - 1).flatten().tolist())) == 5000


def test_the_quantile_is_the_normal_one():
    ps = [2.0**-53, 1e-12, 1e-6, 0.01, 0.074, 0.076, 0.3, 0.5, 0.7, 0.9251, 0.99, 1 - 2.0**-53]
    wanted = [python_statistics.NormalDist().inv_cdf(p) for p in ps]
    got = normal_quantile(torch.tensor(ps, dtype=torch.float64)).tolist()
    for one, other in zip(got, wanted, strict=True):
        assert math.isclose(one, other, rel_tol=1e-13, abs_tol=1e-15)
    alone = [normal_quantile(torch.tensor([p], dtype=torch.float64)).item() for p in ps]
    assert alone == got, "a number's bits depend on its neighbours"


def test_a_copy_keeps_bits_that_no_arithmetic_keeps():
    old = torch.tensor([[-0.0, 1e-45]], dtype=torch.float32)
    got = made(CopyOf({1: 0}), grown(1, old=1), old)
    assert torch.equal(got.view(torch.int32), old.view(torch.int32))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ({40: 1}, r"new ids 41"),
        ({40: 1, 41: 2, 7: 3}, r"not new: 7"),
        ({40: 1, 41: 40}, r"outside \[0, 40\): 40"),
        ({40: 1, 41: -1}, r"outside \[0, 40\): -1"),
    ],
)
def test_rows_to_copy_that_do_not_fit_the_map_are_refused(ids: dict[int, int], words: str):
    with pytest.raises(VocabularyError, match=words):
        CopyOf(ids).check(grown(2))


def test_an_initialization_is_read_from_its_own_words():
    inits = [Zeros(), MeanOfRows(), MeanOfSources(), CopyOf({41: 3, 40: 7}), Normal(), Normal(2**64 - 1)]
    assert [parse_init(str(init)) for init in inits] == inits
    assert parse_init("normal") == Normal(0)


@pytest.mark.parametrize(
    "text", ["", "zero", "normal:-1", "normal:x", f"normal:{2**64}", "copy:", "copy:1", "copy:1=2=3", "copy:1=2,1=3",
             "copy:1=-2", "mean:3", "copy:" + "9" * 30 + "=1"],
)  # fmt: skip
def test_other_words_are_refused_with_the_ones_there_are(text: str):
    with pytest.raises(ConfigError, match=r"--init"):
        parse_init(text)


def test_statistics_are_asked_for_only_where_they_are_read():
    none_new, some = VocabMap.append(5, 0), grown(1, sources={40: (1,)})
    for init, vocab_map in itertools.product((MeanOfRows(), MeanOfSources(), Normal()), (none_new,)):
        assert not init.needs_statistics(vocab_map)
    assert not MeanOfSources().needs_statistics(some)
    assert MeanOfRows().needs_statistics(some) and Normal().needs_statistics(some)
    with pytest.raises(ValueError, match="statistics"):
        MeanOfRows().rows([40], some, OldRows((2,), torch.float32))
