"""Length penalties, coverage, the finished set and the bound for stopping."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from vocab_parallel.decode.search.hypotheses import Coverage, Finished, LengthPenalty, can_improve, check_early_stopping
from vocab_parallel.reference import beam as oracle
from vocab_parallel.select.logarithm import exact_log

INF = math.inf


def finished(scores, tag=0):
    scores = torch.tensor(scores, dtype=torch.float64)
    ids = torch.arange(scores.numel()).view(*scores.shape, 1) + tag
    return Finished(scores, scores * 2, ids[..., 0] + 1, ids, ids + 50, ids[..., 0] % 2 == 0)


@pytest.mark.parametrize("kind", ["power", "gnmt"])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0, -0.5])
def test_length_penalty_is_the_papers(kind, alpha):
    for length in (1, 2, 7, 100):
        assert LengthPenalty(alpha, kind).of(length) == pytest.approx(oracle.length_penalty(length, alpha, kind))


def test_length_penalties_by_hand():
    assert LengthPenalty().of(17) == 1.0
    assert LengthPenalty(1.0).of(4) == 4.0
    assert LengthPenalty(1.0, "gnmt").of(1) == 1.0
    assert LengthPenalty(2.0, "gnmt").of(7) == 4.0
    assert LengthPenalty(-1.0).of(4) == 0.25


@pytest.mark.parametrize("alpha", [math.nan, INF, True, "1", None])
def test_a_penalty_that_is_no_finite_number_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be a finite number"):
        LengthPenalty(alpha)


def test_an_unknown_kind_and_a_negative_beta_are_refused():
    with pytest.raises(ValueError, match="'wu'"):
        LengthPenalty(1.0, "wu")
    with pytest.raises(ValueError, match=r"at least 0, got -0\.1"):
        Coverage(-0.1)


def test_coverage_is_the_papers_and_never_above_zero():
    attention = torch.rand(4, 5, 6, generator=torch.Generator().manual_seed(0)) * 0.5  # beams, steps, source
    got = Coverage(0.7).of(attention.double().sum(1))
    for beam in range(4):
        assert got[beam].item() == pytest.approx(oracle.coverage(attention[beam].tolist(), 0.7), abs=1e-12)
    assert (got < 0).all()
    assert Coverage(0.7).of(torch.full((2, 3), 5.0)).tolist() == [0.0, 0.0]


def test_coverage_leaves_out_positions_that_are_no_source_and_survives_none_attended():
    attended = torch.tensor([[0.5, 0.0], [0.0, 1.0]])
    got = Coverage(1.0).of(attended, torch.tensor([[True, False], [True, True]]))
    assert got[0].item() == pytest.approx(math.log(0.5))
    assert got[1].item() == pytest.approx(math.log(1e-10))


def test_coverage_of_a_beam_does_not_depend_on_its_place():
    attended = torch.rand(9, 33, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = Coverage(1.0).of(attended)
    for row in range(9):
        assert torch.equal(Coverage(1.0).of(attended[row : row + 1])[0], whole[row])


def test_the_finished_set_keeps_the_best_and_of_equal_ones_the_earlier():
    held = Finished.empty(2, 2, 1).add(finished([[-3.0, -1.0, -2.0], [-INF, -5.0, -INF]]))
    assert held.scores.tolist() == [[-1.0, -2.0], [-5.0, -INF]]
    assert held.token_ids[..., 0].tolist() == [[1, 2], [4, -1]]
    assert held.full.tolist() == [True, False]
    held = held.add(finished([[-2.0, -1.5], [-5.0, -4.0]], tag=100))
    assert held.scores.tolist() == [[-1.0, -1.5], [-4.0, -5.0]]
    assert held.token_ids[..., 0].tolist() == [[1, 101], [103, 4]]  # -2 and -5 were there before
    assert held.parents[..., 0].tolist() == [[51, 151], [153, 54]]
    assert held.lengths.tolist() == [[2, 102], [104, 5]]
    assert held.sums.tolist() == [[-2.0, -3.0], [-8.0, -10.0]]
    assert held.ended.tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("kind", ["power", "gnmt"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0, -0.5, -2.0])
def test_never_stops_exactly_when_no_continuation_can_win(alpha, kind):
    """Every continuation of a live sum by log-probabilities of 0 or less, at every length, against the bound."""
    penalty, max_length = LengthPenalty(alpha, kind), 6
    for length, total, worst in itertools.product((1, 3, 5), (-0.1, -1.0, -4.0), (-0.05, -0.3, -1.0, -2.5)):
        bound = can_improve(
            finished([[0.0, worst]]), torch.tensor([total], dtype=torch.float64), length, max_length, penalty, "never"
        ).item()
        lengths = range(length, max_length + 1)  # the present one stands for one that is a little longer
        possible = any((total - more) / penalty.of(at) > worst for at in lengths for more in (0.0, 0.5, 2.0))
        assert bound == possible, (length, total, worst)


def test_transformers_default_gives_up_what_a_longer_hypothesis_could_win():
    held, live = finished([[-0.3, -0.5]]), torch.tensor([-2.0], dtype=torch.float64)
    at = (2, 10, LengthPenalty(1.0))  # -2 / 2 now, -2 / 10 at best
    assert can_improve(held, live, *at, "never").tolist() == [True]
    assert can_improve(held, live, *at, False).tolist() == [False]


def test_early_stopping_waits_for_the_set_to_be_full_and_no_longer():
    live, rest = torch.tensor([-0.1, -0.1, -INF], dtype=torch.float64), (3, 10, LengthPenalty())
    held = finished([[-1.0, -2.0], [-1.0, -INF], [-1.0, -INF]])
    assert can_improve(held, live, *rest, True).tolist() == [False, True, False]
    assert can_improve(held, live, *rest, False).tolist() == [True, True, False]


def test_early_stopping_is_one_of_three():
    for value in (True, False, "never"):
        check_early_stopping(value)
    for value in (1, None, "always"):
        with pytest.raises(ValueError, match="early_stopping"):
            check_early_stopping(value)


def test_the_logarithm_is_right_to_the_last_bits_and_the_same_wherever_it_stands():
    x = torch.exp(torch.randn(10_001, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 30)
    got = exact_log(x)
    error = (got - x.log()).abs() / x.log().abs().clamp(min=1.0)
    assert error.max() < 4e-16
    assert torch.equal(torch.cat([exact_log(part) for part in x.split(7)]), got)
    assert exact_log(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)).nan_to_num(9.0).tolist() == [0.0, 9.0, 9.0]
