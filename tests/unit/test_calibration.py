"""Calibration in one process: sums that add up, the policy artifact, the search."""

from __future__ import annotations

import json
import math

import pytest
import torch

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.diagnostics.calibration import fit_temperature, reliability
from vocab_parallel.decode.diagnostics.diagnostics import diagnose
from vocab_parallel.decode.diagnostics.reliability import UNIT, Reliability, exact_sum
from vocab_parallel.reference import diagnostics as oracle

SHARD = VocabShard(VocabLayout(4, 1, multiple_of=1))


def curve(confidence, correct, nll=None, bins=4):
    confidence = torch.tensor(confidence, dtype=torch.float64)
    nll = torch.zeros_like(confidence) if nll is None else torch.tensor(nll, dtype=torch.float64)
    return Reliability.of(confidence, torch.tensor(correct), nll, torch.ones(len(confidence), dtype=torch.bool), bins)


def test_a_confidence_on_an_edge_is_in_the_bin_below_it():
    found = curve([0.25, 0.250001, 0.5, 1.0, 1e-9], [True, True, False, True, False])
    assert found.counts == (2, 2, 0, 1) and found.hits == (1, 1, 0, 1)


def test_errors_of_calibration_are_the_weighted_and_the_largest_gap():
    found = curve([0.75, 0.75, 0.25, 1.0], [True, False, False, True])
    assert found.accuracy[0] == 0.0 and found.accuracy[2] == 0.5 and math.isnan(found.accuracy[1])
    assert found.confidence[:1] + found.confidence[2:] == [0.25, 0.75, 1.0]
    assert found.ece == (0.25 + 2 * 0.25 + 0.0) / 4 and found.mce == 0.25


def test_an_impossible_target_makes_the_likelihood_infinite_and_no_number_nan():
    found = curve([0.5, 0.5], [True, False], [0.75, math.inf])
    assert found.nll == math.inf and found.impossible == 1 and found.nll_sum == 0.75 * UNIT
    assert found.to_dict()["nll"] is None and json.loads(json.dumps(found.to_dict()))["impossible"] == 1


def test_no_rows_are_not_calibrated():
    empty = Reliability.none(3)
    assert empty.rows == 0 and math.isnan(empty.ece) and math.isnan(empty.mce) and math.isnan(empty.nll)
    assert empty + curve([0.5], [True], bins=3) == curve([0.5], [True], bins=3)
    with pytest.raises(ValueError, match="3 and 4 bins"):
        empty + Reliability.none(4)


def test_sums_of_huge_rows_do_not_overflow():
    assert exact_sum(torch.tensor([1e30, 1e30, 2.0**-32], dtype=torch.float64)) == 2 * int(1e30 * UNIT) + 1


def test_ties_of_the_first_place_count_as_right_only_for_the_smallest_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    for target, hits in ((1, 1), (2, 0)):
        assert sum(reliability(logits, torch.tensor([target]), shard=SHARD).hits) == hits


def overconfident(rows=300):
    draw = torch.Generator().manual_seed(5)
    z = 3 * torch.randn(rows, 4, generator=draw)
    return z, torch.multinomial((z / 2.5).double().softmax(1), 1, generator=draw)[:, 0]


def test_the_fitted_temperature_is_a_transform_of_a_policy_and_json():
    logits, target = overconfident()
    fit = fit_temperature((logits, target), shard=SHARD, task="four ids, drawn")
    assert fit.to_policy() == {"name": "temperature", "temperature": fit.temperature}
    about = json.loads(json.dumps(fit.to_dict()))
    assert about["task"] == "four ids, drawn" and about["after"]["ece"] < about["before"]["ece"]
    assert about["transform"]["temperature"] == pytest.approx(oracle.best_temperature(logits, target, 0.05, 20), 1e-6)


@pytest.mark.parametrize("scale", [1e-3, 0.03, 0.5, 4.0, 15.0])
def test_the_search_finds_the_minimum_wherever_it_starts(scale):
    logits, target = overconfident()
    logits = logits * scale
    fit = fit_temperature((logits, target), shard=SHARD, bounds=(1e-4, 1e3))
    assert fit.converged and not fit.at_bound and fit.evaluations <= 20
    best = oracle.best_temperature(logits, target, 1e-4, 1e3)
    assert fit.temperature == pytest.approx(best, rel=2e-6)
    for other in (0.99, 1.01):
        assert oracle.calibration(logits, target, 5, other * best)["nll"] > fit.after.nll


def test_a_search_that_may_not_go_on_says_so():
    fit = fit_temperature(overconfident(), shard=SHARD, max_evaluations=1)
    assert not fit.converged and fit.temperature == 1.0 and fit.after == fit.before


def test_a_minimum_beyond_the_bounds_is_the_bound_and_says_so():
    fit = fit_temperature(overconfident(), shard=SHARD, bounds=(0.5, 1.5))
    assert fit.at_bound and fit.temperature == 1.5


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_what_is_no_temperature_is_refused_with_its_value(temperature):
    with pytest.raises(ValueError, match="temperature"):
        reliability(torch.zeros(1, 4), torch.tensor([0]), shard=SHARD, temperature=temperature)


def test_a_temperature_divides_the_margin_and_a_constant_does_not_change_it():
    z = torch.tensor([[4.0, 1.0, -2.0, 0.0]])
    assert diagnose(z, shard=SHARD).margin.item() == 3.0 == diagnose(z + 8.0, shard=SHARD).margin.item()
    assert diagnose(z, shard=SHARD, temperature=2.0).margin.item() == 1.5


def test_one_id_left_is_no_uncertainty_and_has_no_runner_up():
    found = diagnose(torch.tensor([[-math.inf, 3.0, -math.inf, -math.inf]]), shard=SHARD)
    assert found.runner_up.item() == -1 and found.margin.item() == math.inf and found.support.item() == 1
    assert found.entropy.item() == 0.0 and found.effective_support.item() == 1.0 and found.confidence.item() == 1.0
    assert found.lse.item() == 3.0 and found.energy.item() == -3.0


def test_no_rows_have_no_diagnostics():
    found = diagnose(torch.zeros(2, 0, 4), shard=SHARD)
    assert all(each.shape == (2, 0) for each in found)
