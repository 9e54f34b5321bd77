"""Failures of one step's policy: draws, temperatures, truncations, penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tests.failures.decoding import kept, log_of, probabilities, step_of
from tests.failures.lab import failure, whole_shard
from vocab_parallel import Streams, cross_entropy, greedy, sample, top_k, top_p
from vocab_parallel.decode import Bias, Policy, RepetitionPenalty, Temperature, TopK, TopP, Transform, vllm

FIVE = (0.52, 0.25, 0.13, 0.06, 0.04)


@dataclass(frozen=True, eq=False)
class Softmax(Transform):
    """A transform that ends in probabilities."""

    name: ClassVar[str] = "softmax"
    gives: ClassVar[str | None] = "probability"


@failure(
    35,
    "Scores given to a draw as its weights",
    "impossible",
    "`sample` and `Policy` take scores and normalise them; nothing takes weights, and a chain that ends in "
    "probabilities is refused when it is made.",
)
def test_a_draw_follows_the_softmax_of_the_scores():
    scores, count = torch.tensor([1.0, 2.0, 3.0]), 4000
    with pytest.raises(RuntimeError):
        torch.multinomial(scores - 2.0, 1)  # negative weights are loud
    weights = scores / scores.sum()  # positive ones are drawn by, and nothing is said
    streams = Streams.of([0] * count, list(range(count)))
    drawn = sample(scores.expand(count, 3), shard=whole_shard(3), streams=streams).token_ids
    shares = drawn.bincount(minlength=3) / count
    assert torch.allclose(shares, scores.softmax(0), atol=0.02)
    assert not torch.allclose(shares, weights, atol=0.05)
    with pytest.raises(ValueError, match="'sample' cannot follow 'softmax', which gives probability"):
        Policy((Softmax(),))


@failure(
    36,
    "A division by the temperature 0",
    "impossible",
    "Temperature 0 keeps the best id and divides by nothing; below 0 it is refused, and so is 0 in a loss.",
)
def test_temperature_zero_is_the_best_id_and_no_division():
    row, shard, streams = torch.tensor([[1.0, 3.0, 3.0, -2.0]]), whole_shard(4), Streams.of([0])
    assert (row / 0.0).softmax(1).isnan().any()
    best = greedy(row, shard=shard).tolist()
    assert best == [1]
    assert sample(row, shard=shard, streams=streams, temperature=0.0).token_ids.tolist() == best
    for policy in (Policy((Temperature(0.0),)), vllm(temperature=0.0)):
        assert probabilities(policy, row).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    with pytest.raises(ValueError, match=r"temperature must be a number in \[0"):
        sample(row, shard=shard, streams=streams, temperature=-1.0)
    with pytest.raises(ValueError, match="temperature"):
        cross_entropy(row, torch.tensor([1]), shard=shard, temperature=0.0)


@failure(
    37,
    "A temperature expected to change which ids top-k keeps",
    "shown",
    "`top_k` keeps the same ids at every temperature, before it or after it; a temperature moves mass, and with it "
    "what `top_p` keeps: the trace counts what each transform removes.",
)
def test_a_temperature_moves_the_nucleus_and_never_the_top_k():
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 2
    best = [sorted(ids) for ids in top_k(rows, 5, shard=whole_shard(40)).token_ids.tolist()]
    supports = []
    for t in (0.25, 1.0, 4.0):
        assert kept(Policy((Temperature(t), TopK(5))), rows) == best
        assert kept(Policy((TopK(5), Temperature(t))), rows) == best
        trace = step_of(Policy((Temperature(t), TopP(0.8))), rows, trace=True).trace
        assert torch.equal(trace.removed[:, 1], 40 - trace.support)
        supports.append(trace.support)
    assert (supports[0] < supports[1]).all() and (supports[1] < supports[2]).all()
    worst = rows.argmin(1).tolist()
    between = Policy((Temperature(4.0), Bias([{one: 99.0} for one in worst]), TopK(5)))
    assert all(one in ids for one, ids in zip(worst, kept(between, rows), strict=True)), "another transform can"


@failure(
    38,
    "The token that crosses p dropped",
    "shown",
    "`top_p` keeps the token that crosses p and returns the mass that it kept, which never falls short of p.",
)
def test_a_nucleus_holds_the_token_that_crosses_p():
    row = log_of(FIVE)
    short = row.exp().cumsum(1) <= 0.8
    assert row.exp()[short].sum().item() == pytest.approx(0.77)  # what a mask of the running sum leaves
    nucleus = top_p(row, 0.8, shard=whole_shard(5))
    assert (nucleus.size.tolist(), nucleus.mass.tolist()) == ([3], [pytest.approx(0.9)])
    assert kept(Policy((TopP(0.8),)), row) == [[0, 1, 2]]
    rows = torch.randn(200, 40, generator=torch.Generator().manual_seed(1)) * 3
    shares = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64).clamp(min=0.01)
    many = top_p(rows, shares, shard=whole_shard(40))
    least = rows.double().softmax(1).masked_fill(~many.kept, 2.0).amin(1)
    assert (many.mass > shares - 1e-6).all(), "falls short of p"
    assert (many.mass - least < shares + 1e-6).all(), "one token too many"


@failure(
    40,
    "A top-k by threshold, which keeps every tie",
    "impossible",
    "`top_k` keeps exactly k of the total order, score descending and then id ascending, so ties neither add ids nor "
    "depend on a sort.",
)
def test_exactly_k_ids_are_kept_whatever_ties():
    row, shard = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]]), whole_shard(5)
    threshold = row.topk(2, 1).values[:, -1:]
    assert (row >= threshold).sum() == 4
    assert top_k(row, 2, shard=shard).token_ids.tolist() == [[1, 0]]
    assert kept(Policy((TopK(2),)), row) == [[0, 1]]
    assert kept(vllm(top_k=2), row) == [[0, 1]]
    count = 500
    drawn = sample(
        row.expand(count, 5), shard=shard, streams=Streams.of([0] * count, list(range(count))), top_k=2
    ).token_ids
    assert set(drawn.tolist()) == {0, 1}
    level = torch.zeros(3, 5)
    assert top_k(level, 3, shard=shard).token_ids.tolist() == [[0, 1, 2]] * 3


@failure(
    41,
    "One division for scores of both signs as a repetition penalty",
    "shown",
    "`RepetitionPenalty` divides what is above 0 and multiplies what is below, so an id that has occurred never gains.",
)
def test_a_repeated_id_loses_whatever_the_sign_of_its_score():
    row, seen = torch.tensor([[2.0, -2.0, 1.0]]), [[0, 1]]
    before = row.double().softmax(1)[0]
    divided = row.clone()
    divided[:, :2] /= 2.0
    wrong = divided.double().softmax(1)[0]
    assert wrong[1] / wrong[2] > before[1] / before[2], "the repeated id has gained"
    after = probabilities(Policy((RepetitionPenalty(2.0),)), row, prompts=seen)[0]
    assert torch.allclose(after, torch.tensor([1.0, -4.0, 1.0]).double().softmax(0), atol=1e-9)
    assert (after[:2] / after[2] < before[:2] / before[2]).all()
    with pytest.raises(ValueError, match="repetition_penalty's penalty"):
        Policy((RepetitionPenalty(0.0),))
