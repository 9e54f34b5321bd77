"""Every case of the file is a test or waits for a named part, never both, never neither."""

from __future__ import annotations

from collections import Counter

from tests.cases import MAX_TP, WAITING, load_cases, waiting_ids
from tests.multirank import test_cases

PARTS: set[str] = set()


def ids_of_tests() -> set[str]:
    """The ids that pytest gets as parameters."""
    (marker,) = (
        mark for mark in test_cases.test_case_has_the_value_of_the_file.pytestmark if mark.name == "parametrize"
    )
    return {parameter.values[0] for parameter in marker.args[1]}


def test_every_case_is_tested_or_waits_exactly_once():
    listed = Counter(ids_of_tests()) + Counter(waiting_ids())
    assert {case_id for case_id, count in listed.items() if count > 1} == set(), "tested and waiting, or waiting twice"
    assert set(load_cases()) - set(listed) == set(), "neither tested nor waiting"
    assert set(listed) - set(load_cases()) == set(), "not in the file"


def test_a_case_waits_for_a_part_that_is_known_with_the_operation_it_lacks():
    assert set(WAITING) == PARTS
    assert all(missing for ids in WAITING.values() for missing in ids.values())


def test_every_runner_has_a_case():
    assert set(test_cases.RUNNERS) == {load_cases()[case_id].op for case_id in ids_of_tests()}


def test_each_tested_case_runs_at_every_tp_size_and_dtype_it_can():
    runs = Counter((case_id, tp) for case_id, tp, _ in test_cases.runs())
    for case_id in ids_of_tests():
        case = load_cases()[case_id]
        dtypes = len(case.tested_dtypes) if test_cases.RUNNERS[case.op].every_dtype else 1
        assert {tp for found, tp in runs if found == case_id} == {tp for tp in case.tp_sizes if tp <= MAX_TP}
        assert {count for (found, _), count in runs.items() if found == case_id} == {dtypes}


def test_reasons_not_to_compare_a_value_are_about_values_that_exist():
    for case_id, keys in test_cases.NOT_COMPARED.items():
        assert set(keys) <= set(load_cases()[case_id].expect)
