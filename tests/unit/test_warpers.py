"""Warpers and controllers on one rank: their formulas by hand, their limits, and state that belongs to requests."""

from __future__ import annotations

import json
import math

import pytest
import torch

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.transform import LOGPROB, PROCESSED, Choice, View
from vocab_parallel.decode.transforms.truncation import entropy_temperature
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.reference import warpers as oracle
from vocab_parallel.select.masses import measure, probabilities
from vocab_parallel.select.scores import open_scores

OFF = [
    Temperature(1.0), TopK(10**6), TopP(1.0), MinP(0.0), Typical(1.0), Epsilon(0.0), Eta(0.0), TopNSigma(math.inf),
    DynamicTemperature(1.0, 1.0), MirostatV2(1e5),
]  # fmt: skip
CUTS = [TopK(2), TopP(0.6), MinP(0.3), Typical(0.6), Epsilon(0.1), Eta(0.3), TopNSigma(0.5), MirostatV2(0.7)]


def by_name(transform):
    return f"{transform.name}"


def scores_of(logits):
    logits = torch.as_tensor(logits)
    if logits.dtype == torch.int64:
        logits = logits.double()
    return open_scores(logits, VocabShard(VocabLayout(logits.shape[-1], 1, multiple_of=1)), "test")


def log_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def warp(scores, *transforms, state=None):
    view = View.of([[]] * scores.rows)
    for transform in transforms:
        transform.check(scores.vocab_size, scores.rows)
        scores = transform.apply(scores, view, transform.start(scores.rows) if state is None else state)
    return scores


def kept(scores):
    """The ids of the support, row by row."""
    ids = scores.token_ids.expand_as(scores.values)
    return [row[value > -torch.inf].tolist() for row, value in zip(ids, scores.values, strict=True)]


def q(scores):
    """The probabilities of the support of the only row, by id."""
    (ids,) = kept(scores)
    by_column = probabilities(scores, measure(scores))[0]
    return {one: round(value, 3) for one, value in zip(ids, by_column[by_column > 0].tolist(), strict=True)}


def random_rows(rows=6, vocab=40, seed=0, scale=2.0):
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
        (Temperature(math.nan), ["nan"]),
        (Temperature(math.inf), ["inf"]),
        (Temperature(True), ["True"]),
        (Temperature("1.0"), ["'1.0'"]),
        (TopK(0), ["top_k's k", "0"]),
        (TopK(1.5), ["1.5"]),
        (TopP(0.0), ["top_p's p", "0.0"]),
        (Typical([0.5, 0.0]), ["row 1", "0.0"]),
        (Epsilon([0.5, 1.5]), ["row 1", "1.5"]),
        (TopNSigma([-1.0, 1.0]), ["row 0", "-1.0"]),
        (DynamicTemperature([0.0, 0.0], [1.0, 2.0, 3.0]), ["3 values", "2 rows"]),
        (DynamicTemperature(2.0, 1.0), ["low", "2.0", "1.0"]),
        (MirostatV2(math.inf), ["tau", "inf"]),
        (MirostatV2(1.0, -0.1), ["eta", "-0.1"]),
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


def test_dynamic_temperature_runs_from_low_to_high_with_the_entropy():
    bounds = [torch.tensor([value] * 3, dtype=torch.float64) for value in (0.5, 2.0)]
    rows = scores_of(torch.stack([torch.zeros(8), torch.arange(8.0), 90.0 * torch.arange(8.0)]))
    flat, middle, sharp = entropy_temperature(rows, *bounds, torch.ones(3, dtype=torch.float64)).tolist()
    assert flat == 2.0 and sharp == 0.5
    entropy = float(oracle.entropy(torch.arange(8.0)[None]))
    assert middle == pytest.approx(0.5 + 1.5 * entropy / math.log(8), rel=1e-7)
    assert middle == torch.tensor(middle, dtype=torch.float32).item(), "not rounded to float32"
    steeper = entropy_temperature(rows, *bounds, torch.full((3,), 2.0, dtype=torch.float64)).tolist()
    assert steeper[1] == pytest.approx(0.5 + 1.5 * (entropy / math.log(8)) ** 2, rel=1e-7)


def test_dynamic_temperature_counts_only_what_is_left():
    wide = torch.zeros(1, 100)
    wide[0, 4:] = -torch.inf
    one = torch.ones(1, dtype=torch.float64)
    assert entropy_temperature(scores_of(wide), 0 * one, 3 * one, one).tolist() == [3.0]
    wide[0, 1:] = -torch.inf
    assert entropy_temperature(scores_of(wide), 0 * one, 3 * one, one).tolist() == [1.0]


def mirostat_run(transform, rows, steps, state=None, active=None, first=0):
    """Draws with the inverse of the cumulative distribution; returns surprises in bits `[steps, T]` and the state."""
    state, observed = transform.start(len(rows)) if state is None else state, []
    for step in range(first, first + steps):
        scores = warp(scores_of(rows), transform, state=state)
        distribution = probabilities(scores, measure(scores))
        uniform = torch.rand(len(rows), 1, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        token = (distribution.cumsum(1) <= uniform).sum(1).clamp(max=rows.shape[1] - 1)
        logprobs = distribution.gather(1, token[:, None])[:, 0].log()
        on = torch.ones(len(rows), dtype=torch.bool) if active is None else active(step)
        state = transform.after(state, Choice(torch.where(on, token, -1), torch.where(on, logprobs, 0.0), on))
        observed.append(-logprobs / math.log(2))
    return torch.stack(observed), state


@pytest.mark.parametrize("tau", [1.0, 2.5, 4.0])
def test_mirostat_drives_the_surprise_to_its_target(tau):
    zipf = -1.1 * torch.arange(1, 129, dtype=torch.float64).log()
    surprise, _ = mirostat_run(MirostatV2(tau, 0.2), zipf.expand(40, -1), 120)
    assert surprise[40:].mean().item() == pytest.approx(tau, abs=0.12)


def test_mirostat_follows_the_oracle_step_by_step():
    rows, transform = random_rows(rows=5, vocab=30, seed=4), MirostatV2(1.5, 0.3)
    state, mu = transform.start(5), torch.full((5,), 3.0, dtype=torch.float64)
    for step in range(20):
        scores, support = warp(scores_of(rows), transform, state=state), oracle.mirostat_v2(rows, mu)
        assert torch.equal(scores.values > -torch.inf, support)
        token = torch.tensor([ids[step % len(ids)] for ids in kept(scores)])
        logprobs = measure(scores).logprob(scores.values.gather(1, token[:, None])[:, 0])
        state = transform.after(state, Choice(token, logprobs, torch.ones(5, dtype=torch.bool)))
        mu = oracle.mirostat_v2_step(rows, support, token, mu, 1.5, 0.3)
        assert torch.allclose(state["mu"], mu, atol=1e-8, rtol=0)
        mu = state["mu"]


def test_mirostats_state_belongs_to_the_request():
    rows, transform = random_rows(rows=4, seed=5), MirostatV2([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4])
    assert transform.start(4)["mu"].tolist() == [2.0, 4.0, 6.0, 8.0]
    paused = torch.tensor([True, True, False, True])
    _, state = mirostat_run(transform, rows, 6, active=lambda step: paused)
    assert state["mu"][2] == 6.0 and len(state["mu"].unique()) == 4
    _, again = mirostat_run(transform, rows, 6)
    assert torch.equal(again["mu"][paused], state["mu"][paused])
    assert transform.start(4)["mu"].tolist() == [2.0, 4.0, 6.0, 8.0], "a new batch begins anew"


def test_mirostat_goes_on_exactly_from_a_saved_state():
    rows, transform = random_rows(rows=3, seed=6), MirostatV2(2.0, 0.3)
    observed, last = mirostat_run(transform, rows, 10)
    _, middle = mirostat_run(transform, rows, 4)
    before = middle["mu"].clone()
    saved = {"mu": torch.tensor(json.loads(json.dumps(middle["mu"].tolist())), dtype=torch.float64)}
    rest, end = mirostat_run(transform, rows, 6, state=saved, first=4)
    assert torch.equal(rest, observed[4:]) and torch.equal(end["mu"], last["mu"])
    mirostat_run(transform, rows, 2, state=middle)
    assert torch.equal(middle["mu"], before), "a state that was given was changed"
