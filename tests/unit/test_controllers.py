"""Dynamic temperature and Mirostat on one rank: their rules, and state that belongs to requests."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.unit.warping import kept, random_rows, scores_of, warp
from vocab_parallel.decode.transforms.controllers import MirostatV2
from vocab_parallel.decode.transforms.transform import Choice
from vocab_parallel.decode.transforms.truncation import entropy_temperature
from vocab_parallel.reference import warpers as oracle
from vocab_parallel.select.masses import measure, probabilities


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
