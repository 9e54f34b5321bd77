"""Masses: integers close to the exponential, the same wherever a column lies, and what is read off their sums."""

from __future__ import annotations

import math

import pytest
import torch

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.select.masses import fixed_exp, mass_bits, masses_of, measure, probabilities, value_spread
from vocab_parallel.select.scores import open_scores

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def scores_of(logits):
    return open_scores(logits, VocabShard(VocabLayout(logits.shape[1], 1, multiple_of=1)), "test")


def test_the_exponential_is_within_one_unit_and_a_billionth_of_the_true_one():
    x = torch.cat([torch.linspace(-45, 0, 50_001, dtype=torch.float64), torch.tensor([-torch.inf, -1e300])])
    for dtype, relative in ((torch.float32, 2e-10), (torch.float64, 1e-14)):
        got = fixed_exp(x, 44, dtype)
        assert torch.equal(got, got.round())
        assert bool(((got - x.exp() * 2.0**44).abs() <= 0.51 + relative * x.exp() * 2.0**44).all())


def test_powers_of_two_are_exact_ratios():
    x = -math.log(2.0) * torch.arange(40, dtype=torch.float64)
    assert fixed_exp(x, 45).tolist() == [2.0 ** (45 - k) for k in range(40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_column_has_the_same_mass_wherever_it_lies(dtype):
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3001, generator=draw, dtype=torch.float64).to(dtype) * 5
    largest = values.max()
    whole = masses_of(values, largest, 44)
    for start, stop, step in ((1, 8, 1), (5, 6, 1), (7, 3001, 1), (0, 3001, 3), (2990, 3001, 1)):
        assert torch.equal(masses_of(values[start:stop:step], largest, 44), whole[start:stop:step])
    assert torch.equal(masses_of(values[:3000].view(60, 50).t(), largest, 44), whole[:3000].view(60, 50).t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 256, 257, 33_000, 70_000])
def test_sums_of_blocks_are_the_sums_of_the_masses(columns, dtype):
    logits = torch.randn(3, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, ::2] = -torch.inf
    logits[1, -1] = 0.0
    scores = scores_of(logits)
    found = measure(scores, moments=True)
    gap = found.largest[:, None].double() - scores.values.double()
    mass = masses_of(scores.values, found.largest[:, None], found.bits)
    assert torch.equal(found.total, mass.sum(1)) and torch.equal(found.by_rank[0], mass.sum(1))
    assert torch.equal(found.blocks.long().sum(1), mass.sum(1))
    assert torch.equal(found.support, (logits > -torch.inf).sum(1))
    p = scores.values.double().softmax(1)
    near = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(probabilities(scores, found), p, **near)
    torch.testing.assert_close(found.lse, scores.values.double().logsumexp(1), **near)
    torch.testing.assert_close(found.entropy, -torch.special.xlogy(p, p).sum(1), **near)
    gap = torch.where(p > 0, gap, 0.0)
    variance = (p * gap * gap).sum(1) - (p * gap).sum(1) ** 2
    torch.testing.assert_close(found.variance, variance, rtol=1e-7, atol=1e-8)


def test_the_masses_of_any_vocabulary_add_up_within_62_bits():
    for vocab in (1, 2, 255, 131_072, 131_073, 2**24, 2**30):
        bits = mass_bits(vocab)
        assert vocab * 2**bits <= 2**62 and (bits == 45 or vocab * 2 ** (bits + 2) > 2**62)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-37, 1.0, 1e30])
def test_the_spread_of_values_is_their_population_deviation(scale, dtype):
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(2), dtype=torch.float64).mul(scale).to(dtype)
    logits[0, 3:] = -torch.inf
    logits[1, 1:] = -torch.inf
    logits[2] = logits[2, 0]
    expected = [row[row > -torch.inf].double().std(correction=0) for row in logits]
    torch.testing.assert_close(
        value_spread(scores_of(logits)) / scale, torch.stack(expected) / scale, rtol=1e-6, atol=1e-12
    )


def test_what_the_caller_holds_is_not_written():
    for dtype in (torch.float32, torch.float64):
        logits = torch.randn(2, 700, dtype=dtype)
        before = logits.clone()
        scores = scores_of(logits)
        measure(scores, moments=True)
        probabilities(scores, measure(scores))
        assert torch.equal(logits, before)
