"""Warpers and controllers on one rank: their formulas by hand, their limits, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.unit.warping import kept, log_of, random_rows, scores_of, warp
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.transform import LOGPROB, PROCESSED
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.select.masses import measure, probabilities

OFF = [
    Temperature(1.0), TopK(10**6), TopP(1.0), MinP(0.0), Typical(1.0), Epsilon(0.0), Eta(0.0), TopNSigma(math.inf),
    DynamicTemperature(1.0, 1.0), MirostatV2(1e5),
]  # fmt: skip
CUTS = [TopK(2), TopP(0.6), MinP(0.3), Typical(0.6), Epsilon(0.1), Eta(0.3), TopNSigma(0.5), MirostatV2(0.7)]


def by_name(transform):
    return f"{transform.name}"


def q(scores):
    """The probabilities of the support of the only row, by id."""
    (ids,) = kept(scores)
    by_column = probabilities(scores, measure(scores))[0]
    return {one: round(value, 3) for one, value in zip(ids, by_column[by_column > 0].tolist(), strict=True)}


def test_one_row_through_a_chain_has_the_worked_probabilities():
    forbidden = scores_of([[3.0, 2.0, -math.inf, 0.0, -1.0]])
    after_k = warp(forbidden, Temperature(2.0), TopK(3))
    assert q(after_k) == {0: 0.547, 1: 0.331, 3: 0.122}
    assert q(warp(after_k, TopP(0.8))) == {0: 0.622, 1: 0.378}


def test_the_order_of_temperature_and_top_p_decides():
    row = scores_of([[3.0, 2.0, 1.0, 0.0, -1.0]])
    assert kept(warp(row, TopP(0.8), Temperature(4.0))) == [[0, 1]]
    assert kept(warp(row, Temperature(4.0), TopP(0.8))) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("transform", "probabilities", "ids"),
    [
        (TopP(0.8), (0.52, 0.25, 0.13, 0.06, 0.04), [0, 1, 2]),  # .77 is short, the one that crosses stays
        (TopP(0.75), (0.25, 0.125, 0.125, 0.5), [0, 3]),  # exactly .75: reached
        (TopK(3), (0.1, 0.3, 0.3, 0.3), [1, 2, 3]),
        (TopK(2), (0.1, 0.3, 0.3, 0.3), [1, 2]),  # of equal ones the smallest ids, exactly k
        (MinP(0.25), (0.5, 0.25, 0.125, 0.0625, 0.0625), [0, 1, 2]),  # .125 is a quarter of .5: reached
        (Epsilon(0.125), (0.5, 0.25, 0.125, 0.0625, 0.0625), [0, 1, 2]),
        (Epsilon(0.9), (0.1, 0.3, 0.3, 0.3), [1, 2, 3]),  # none reaches: those as likely as the best
        # H = 1.386 nats = log 4: min(.25, .5 / 4) = .125
        (Eta(0.25), (0.25, 0.25, 0.25, 0.25), [0, 1, 2, 3]),
        # H = 1.238: exp(-H) = .290, min(.04, .2 * .290) = .04
        (Eta(0.04), (0.5, 0.3, 0.1, 0.05, 0.05), [0, 1, 2, 3, 4]),
        # H = 1.498: exp(-H) = .2236, min(.16, .4 * .2236) = .089
        (Eta(0.16), (0.5, 0.1, 0.1, 0.1, 0.1, 0.1), [0, 1, 2, 3, 4, 5]),
        # H = 1.498: min(.36, .6 * .2236) = .134, above the .1 of the others
        (Eta(0.36), (0.5, 0.1, 0.1, 0.1, 0.1, 0.1), [0]),
        # H = 1.748, surprises .916 and 2.303: the best is .832 away, the others .555
        (Typical(0.5), (0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1), [1, 2, 3, 4, 5]),
        # H = .940: deviations .429, .264, 1.363 and in this order .3 (id 1), then .6
        (Typical(0.2), (0.6, 0.3, 0.1), [1]),
        (Typical(0.9), (0.6, 0.3, 0.1), [0, 1]),
        (MirostatV2(1.0), (0.5, 0.25, 0.125, 0.125), [0, 1]),  # mu = 2 bits: a quarter is reached
        (MirostatV2(0.4), (0.5, 0.25, 0.125, 0.125), [0]),  # mu = .8 bits, less than the best surprises: it alone
        (MirostatV2(0.4), (0.25, 0.25, 0.25, 0.25), [0]),  # of equal ones the smallest id
    ],
)
def test_support_by_hand(transform, probabilities, ids):
    assert kept(warp(scores_of(log_of(*probabilities)), transform)) == [ids]


def test_top_n_sigma_by_hand():
    # mean 0, squares 16 + 4 + 4 + 4 + 4 + 16: variance 8, and -inf is no score
    row = [[4.0, 2.0, 2.0, -2.0, -2.0, -4.0, -math.inf]]
    for n, ids in [(0.0, [0]), (0.7, [0]), (0.71, [0, 1, 2]), (2.13, [0, 1, 2, 3, 4]), (3.0, [0, 1, 2, 3, 4, 5])]:
        assert kept(warp(scores_of(row), TopNSigma(n))) == [ids], n
    assert kept(warp(scores_of([[1.0, -1.0]]), TopNSigma(2.0))) == [[0, 1]]  # exactly 2 sigma below: reached


def test_top_n_sigma_ignores_scale_and_offset_but_not_a_bias_of_one_token():
    rows = random_rows()
    for n in (0.3, 1.0, 1.7):
        plain = kept(warp(scores_of(rows), TopNSigma(n)))
        for a, c in [(0.125, 0.0), (3.7, -11.0), (1000.0, 5.0)]:
            assert kept(warp(scores_of(a * rows + c), TopNSigma(n))) == plain
        assert kept(warp(scores_of(rows), Temperature(0.3), TopNSigma(n))) == plain
    biased = rows.clone()
    biased[:, 7] += 30.0
    assert kept(warp(scores_of(biased), TopNSigma(1.0))) == [[7]] * len(rows)


def test_entropy_grows_with_temperature_by_the_variance_over_its_cube():
    rows, step = random_rows(), 1e-4
    for t in (0.3, 1.0, 2.5):

        def statistics(temperature):
            return measure(warp(scores_of(rows), Temperature(temperature)), moments=True)

        slope = (statistics(t + step).entropy - statistics(t - step).entropy) / (2 * step)
        variance = statistics(t).variance * t**2  # of z under p_T, from that of z / T
        assert (slope > 0).all()
        assert torch.allclose(slope, variance / t**3, rtol=1e-5)
    level = measure(warp(scores_of(torch.zeros(2, 9)), Temperature(3.0)), moments=True)
    assert torch.allclose(level.entropy, torch.full((2,), math.log(9), dtype=torch.float64))


def test_the_coldest_rows_are_greedy_and_tiny_temperatures_stay_finite():
    rows = torch.tensor([[2.875, 2.953125, 11.0625, -2.453125]], dtype=torch.float16).expand(4, -1)
    warped = warp(scores_of(rows), Temperature([0.0, 1e-30, 1e-12, 1e-5]))
    assert kept(warped)[:2] == [[2], [2]]
    assert warped.values[2:].isfinite().all()
    distribution = probabilities(warped, measure(warped))
    assert distribution.tolist() == [[0.0, 0.0, 1.0, 0.0]] * 4


@pytest.mark.parametrize("transform", OFF, ids=by_name)
def test_off_is_off(transform):
    rows = random_rows().to(torch.float32)
    rows[:, 5] = -torch.inf
    assert torch.equal(warp(scores_of(rows), transform).values, rows)


@pytest.mark.parametrize("transform", CUTS, ids=by_name)
def test_a_cut_only_removes_and_never_empties_a_row(transform):
    rows = random_rows(rows=50, vocab=23, seed=3).to(torch.float32)
    warped = warp(scores_of(rows), transform)
    support = kept(warped)
    assert all(0 < len(ids) < 23 for ids in support)
    ids = warped.token_ids.expand_as(warped.values).clamp(max=22)
    alive = warped.values > -torch.inf
    assert torch.equal(warped.values[alive], rows.gather(1, ids)[alive])


@pytest.mark.parametrize("transform", [*CUTS, *OFF], ids=by_name)
def test_a_row_of_one_token_keeps_it(transform):
    rows = torch.full((2, 7), -torch.inf)
    rows[0, 6], rows[1, 0] = -50.0, 3.0
    assert kept(warp(scores_of(rows), transform)) == [[6], [0]]


def test_what_is_known_of_the_largest_value_stays_right_after_a_cut_that_may_drop_it():
    typical = warp(scores_of(log_of(0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)), MinP(0.1), Typical(0.5))
    assert kept(typical) == [[1, 2, 3, 4, 5]]
    assert measure(typical).largest.tolist() == [math.log(0.1)]
    assert q(typical) == dict.fromkeys(range(1, 6), 0.2)


def test_p_of_one_keeps_what_has_no_mass_to_speak_of():
    assert kept(warp(scores_of([[0.0, -100.0, -300.0]]), Typical(1.0), TopP(1.0))) == [[0, 1, 2]]


def test_a_floor_far_below_the_unit_of_masses_still_decides():
    rows = scores_of([[0.0, -68.0, -70.0]])  # log 1e-30 = -69.08
    assert kept(warp(rows, Epsilon(1e-30))) == [[0, 1]]
    assert kept(warp(rows, MirostatV2(69.08 / 2 / math.log(2)))) == [[0, 1]]


@pytest.mark.parametrize(
    ("factor", "reached"), [(1.0 - 2.0**-22, True), (1.0 + 2.0**-22, True), (1.0 - 2.0**-18, False)]
)
def test_a_threshold_is_reached_within_one_part_in_2_to_the_20(factor, reached):
    row = log_of(0.5, 0.25, 0.125, 0.125)
    row[0, 1] += math.log(factor)
    for floor in (MinP(0.5), Epsilon(0.25), MirostatV2(1.0)):
        assert kept(warp(scores_of(row), floor)) == [[0, 1] if reached else [0]], floor
    assert kept(warp(scores_of(row), TopP(0.75))) == [[0, 1] if reached else [0, 1, 2]]


def test_values_of_a_batch_are_those_of_its_requests_alone():
    rows = random_rows(rows=4).to(torch.float32)
    each = [
        Temperature([0.5, 0.0, 2.0, 1.0]), TopK([1, 40, 3, 99]), TopP([0.1, 0.5, 1.0, 0.9]), MinP([0.0, 0.1, 1.0, 0.5]),
        Typical([0.2, 1.0, 0.5, 0.9]), Epsilon([0.0, 0.1, 0.01, 1.0]), Eta([0.1, 0.0, 0.5, 0.01]),
        TopNSigma([0.0, 1.0, math.inf, 2.0]), DynamicTemperature([0.0, 0.5, 1.0, 0.2], [1.0, 2.0, 1.0, 0.3], 2.0),
        MirostatV2([0.0, 1.0, 2.0, 3.0]),
    ]  # fmt: skip
    for transform in each:
        together = warp(scores_of(rows), transform)
        for row in range(4):
            alone = warp(scores_of(rows[row : row + 1]), transform.for_rows([row]))
            assert kept(alone) == kept(together)[row : row + 1], transform
            of_row = together.values[row]
            assert torch.equal(of_row[of_row > -torch.inf], alone.values[alone.values > -torch.inf]), transform


@pytest.mark.parametrize(
    "transform",
    [*OFF, *CUTS, Temperature([0.5, 1.0]), TopK((3, 4)), DynamicTemperature(0.5, torch.tensor([1.0, 2.0]), 2)],
    ids=by_name,
)
def test_a_policy_file_holds_it(transform):
    again = type(transform).from_dict(json.loads(json.dumps(transform.to_dict())))
    assert again == transform
    assert again.to_dict()["name"] == transform.name


def test_what_is_left_of_log_probabilities_is_no_log_probability():
    for transform in [*OFF, *CUTS]:
        assert LOGPROB in transform.accepts and transform.gives == PROCESSED


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (Temperature(-1.0), ["temperature", "-1.0"]),
        (Temperature(True), ["True"]),
        (Temperature("1.0"), ["'1.0'"]),
        (TopK([3, 1.5]), ["row 1", "1.5"]),
        (DynamicTemperature([0.0, 0.0], [1.0, 2.0, 3.0]), ["3 values", "2 rows"]),
        (DynamicTemperature(2.0, 1.0), ["low", "2.0", "1.0"]),
        (MirostatV2(math.inf), ["tau", "inf"]),
    ],
)
def test_a_bad_parameter_is_named_before_any_row_is_seen(transform, words):
    for rows in (None, 2):
        with pytest.raises(ValueError) as raised:
            transform.check(9, rows)
        assert all(word in str(raised.value) for word in words), raised.value


def test_a_row_without_a_token_is_an_error_that_names_it():
    rows = torch.zeros(3, 5)
    rows[1] = -torch.inf
    for transform in [Typical(0.5), Epsilon(0.1), Eta(0.1), MirostatV2(1.0), DynamicTemperature(0.5, 1.0)]:
        with pytest.raises(NonFiniteError, match="row 1"):
            warp(scores_of(rows), transform)
