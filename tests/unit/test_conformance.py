"""The conformance report sees what it must: a bit, a swapped row, a moment that is not zero."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.conformance import (
    Check,
    ConformanceReport,
    compare_records,
    new_mass,
)
from vocab_parallel.vocabulary.migration.records import (
    TableRecord,
    exact_scores,
    fixed_hidden,
    record_table,
    row_hashes,
)

MAP = VocabMap.from_pairs(6, 7, {0: 0, 1: 2, 2: 1, 3: 5, 5: 4}, allow_drop=True)  # 4 is dropped; 3 and 6 are new
WIDTH = 5


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def migrated(old: Tensor, new_rows: float) -> Tensor:
    new = torch.full((7, *old.shape[1:]), new_rows, dtype=old.dtype)
    kept = MAP.new_to_old >= 0
    new[kept] = old[MAP.new_to_old[kept]]
    return new


def record(name: str, rows: Tensor, head: bool = False, bias: Tensor | None = None) -> TableRecord:
    return record_table(
        name, lambda a, b: rows[a:b], 0, len(rows), hidden=fixed_hidden(WIDTH) if head else None,
        bias=None if bias is None else lambda a, b: bias[a:b],
    )  # fmt: skip


def records(weight: Tensor, moment: Tensor) -> dict[str, TableRecord]:
    return {"head.weight": record("head.weight", weight, True), "head.exp_avg": record("head.exp_avg", moment)}


def report(weight: Tensor | None = None, moment: Tensor | None = None) -> ConformanceReport:
    before = records(table(), table())
    after = records(
        migrated(table(), 0.5) if weight is None else weight, migrated(table(), 0.0) if moment is None else moment
    )
    return compare_records(before, after, MAP, zero=["head.exp_avg"])


def failed(found: ConformanceReport) -> list[str]:
    return [check.name for check in found.checks if not check.passed]


def test_a_migration_that_kept_everything_passes():
    found = report()
    assert found.passed and len(found.checks) == 4
    found.require()
    assert json.loads(json.dumps(found.to_json()))["passed"] is True
    assert all(line.startswith(("ok ", "info")) for line in found.lines())


def test_one_bit_of_a_kept_row_is_found_with_its_ids():
    weight = migrated(table(), 0.5)
    weight.view(torch.int32)[5, 1] ^= 1
    found = report(weight)
    assert failed(found) == ["rows of head.weight", "raw logits of head.weight"]
    assert "old id 3, new id 5" in found.checks[0].detail
    with pytest.raises(VocabularyError, match=r"rows of head\.weight: 1 of 5 kept rows"):
        found.require()


def test_two_kept_rows_that_are_swapped_are_found():
    moment = migrated(table(), 0.0)
    assert failed(report(moment=moment[[0, 2, 1, 3, 4, 5, 6]])) == ["rows of head.exp_avg"]


def test_a_sign_of_zero_is_a_bit_of_a_row_but_no_difference_of_logits():
    before, after = table(), migrated(table(), 0.5)
    before[0, 0], after[0, 0] = 0.0, -0.0
    found = compare_records({"w": record("w", before, True)}, {"w": record("w", after, True)}, MAP)
    assert failed(found) == ["rows of w"]


def test_a_new_moment_that_is_not_zero_is_found():
    moment = migrated(table(), 0.0)
    moment[6, 4] = 1e-40
    found = report(moment=moment)
    assert failed(found) == ["new rows of head.exp_avg"]
    assert "the first is id 6" in str([check.detail for check in found.checks])


def test_another_dtype_width_or_number_of_rows_is_found():
    for weight in (migrated(table(), 0.5).double(), migrated(table(), 0.5)[:, :4], migrated(table(), 0.5)[:6]):
        after = {"w": record("w", weight)}
        assert failed(compare_records({"w": record("w", table())}, after, MAP)) == ["rows of w"]


def test_a_table_that_is_lost_or_new_is_found():
    one, two = {"w": record("w", table())}, {"v": record("v", migrated(table(), 0.0))}
    found = compare_records(one, two, MAP)
    assert failed(found) == ["tables"]
    assert "lost: ['w']" in found.checks[0].detail and "['v']" in found.checks[0].detail


def test_checks_of_the_caller_count():
    assert not compare_records({}, {}, MAP, more=[Check("alias", False, "two")]).passed


def test_the_mass_of_new_rows_is_their_part_of_the_softmax():
    logits = torch.log(torch.tensor([[1.0, 1, 1, 2, 1, 1, 1], [1, 1, 1, 0.5, 1, 1, 0.5]], dtype=torch.float64)).T
    mass = new_mass(logits, MAP)
    assert math.isclose(mass.largest, 3 / 8) and math.isclose(mass.mean, (3 / 8 + 1 / 6) / 2)
    assert mass.uniform == 2 / 7


def test_a_bias_is_part_of_the_logits():
    bias = torch.arange(6.0)
    with_bias, without = record("w", table(), True, bias).logits, record("w", table(), True).logits
    assert torch.equal(with_bias, without + bias.double()[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str)
def test_hashes_and_scores_of_a_row_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype):
    rows = torch.randn(50, 37, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype)
    assert torch.equal(torch.cat([row_hashes(rows[at : at + 1]) for at in range(50)]), row_hashes(rows))
    hidden = fixed_hidden(37)
    each = torch.cat([exact_scores(rows[at : at + 1], hidden) for at in range(50)])
    assert torch.equal(each, exact_scores(rows, hidden))
    torch.testing.assert_close(each, rows.double() @ hidden.T)


def test_hashes_tell_rows_apart_that_differ_in_a_bit_or_an_order():
    rows = torch.zeros(5, 4)
    rows[1, 0] = rows[2, 1] = 1.0
    rows[3, 0] = -0.0
    rows.view(torch.int32)[4, 0] = 0x7FC00001
    assert len(set(row_hashes(rows).tolist())) == 5
    generator = torch.Generator().manual_seed(2)
    many = torch.randint(0, 3, (20_000, 8), generator=generator).unique(dim=0)
    assert len(set(row_hashes(many.to(torch.bfloat16)).tolist())) == len(many)


def test_rows_without_a_second_dimension_have_hashes_too():
    assert len(set(row_hashes(torch.arange(9.0)).tolist())) == 9
    assert record("bias", torch.arange(6.0)).row_shape == ()


def test_no_rows_are_recorded_as_none():
    def read(start: int, stop: int) -> Tensor:
        raise AssertionError("read of nothing")

    empty = record_table("w", read, 3, 3, hidden=fixed_hidden(4))
    assert len(empty.hashes) == 0 and empty.logits is not None and empty.logits.shape == (0, 4)
