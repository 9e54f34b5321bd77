"""Worked numbers, small enough for a pencil, through the public functions on 1 to 4 ranks.

Vocabularies of 3 to 5 ids: on 4 ranks the last one has no row, or one. Each example checks itself on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.beam_models import Toy, table
from tests.multirank.loss_case import shard_of
from tests.multirank.shared_world import ALL_SIZES, Batch
from vocab_parallel import (
    RowOutputs,
    Streams,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    cross_entropy,
    greedy,
    linear_cross_entropy,
    sample,
    tie_weights,
    token_logprobs,
    top_p,
)
from vocab_parallel.decode import (
    Bias,
    Coverage,
    Dola,
    Eta,
    LengthPenalty,
    MinP,
    MirostatV2,
    Policy,
    Prior,
    RepetitionPenalty,
    Suppress,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Transform,
    Typical,
    View,
    beam_search,
    beam_step,
    contrastive_candidates,
    contrastive_select,
    diagnose,
    masked_sum,
    split_flat,
)

LN2, LN3, LN6 = math.log(2.0), math.log(3.0), math.log(6.0)
THREE = torch.tensor([[0.0, LN2, LN3]], dtype=torch.float64)  # e^z is 1, 2, 3
FIVE = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
SORTED = torch.tensor([[0.52, 0.25, 0.13, 0.06, 0.04]], dtype=torch.float64).log()

EXAMPLES: dict[str, Callable[[], Any]] = {}


def example(function: Callable[[], Any]) -> Callable[[], Any]:
    """Runs on every rank, checks itself, and returns what must be the same on all."""
    EXAMPLES[function.__name__] = function
    return function


def near(got: Any, expected: Any, within: float = 1e-9) -> list[float]:
    """Raises unless the numbers agree; here pytest explains no assertion."""
    found = got.detach().double().flatten().tolist() if isinstance(got, Tensor) else [float(one) for one in got]
    wanted = torch.as_tensor(expected, dtype=torch.float64).flatten().tolist()
    same = len(found) == len(wanted) and all(
        one == other or abs(one - other) <= within for one, other in zip(found, wanted, strict=True)
    )
    if not same:
        raise AssertionError(f"got {found}, expected {wanted}")
    return found


def equal(got: Any, expected: Any) -> Any:
    """Raises unless they are equal."""
    got = got.tolist() if isinstance(got, Tensor) else got
    if got != expected:
        raise AssertionError(f"got {got}, expected {expected}")
    return got


def drawn_from(transforms: tuple[Transform, ...], logits: Tensor, prompt: Any = ((),), **options: Any) -> list[float]:
    """The probabilities that a policy of these transforms draws from, of one row, by id."""
    vocab = logits.shape[1]
    shard, policy = shard_of(vocab), Policy(transforms)
    extras = {name: shard.slice(one, -1) for name, one in options.pop("extras", {}).items()}
    view = View.of([list(ids) for ids in prompt], extras=extras)
    state = policy.start(1, Streams.of([0]))
    step = policy.step(shard.slice(logits, -1), view, state, shard=shard, top_logprobs=vocab, **options)
    found = {v: math.exp(p) for v, p in zip(step.top.token_ids[0].tolist(), step.top.logprobs[0].tolist(), strict=True)}
    return [found.get(v, 0.0) for v in range(vocab)]


def support(transforms: tuple[Transform, ...], logits: Tensor, **options: Any) -> list[int]:
    return [v for v, p in enumerate(drawn_from(transforms, logits, **options)) if p > 0]


# Logits 0, ln 2, ln 3.


@example
def the_logits_0_ln_2_ln_3_have_probabilities_of_a_sixth_a_third_and_a_half():
    shard, rows = shard_of(3), THREE.expand(3, 3)
    mine, every = shard.slice(rows, -1), torch.arange(3)
    found = near(token_logprobs(mine, every, shard=shard).logprob.exp(), [1 / 6, 1 / 3, 1 / 2])
    for shift in (-LN3, 700.0):  # the stable form subtracts the largest; any shift keeps the distribution
        near(token_logprobs(mine + shift, every, shard=shard).logprob.exp(), [1 / 6, 1 / 3, 1 / 2])
    near(drawn_from((), THREE), [1 / 6, 1 / 3, 1 / 2], 1e-8)
    outputs = RowOutputs("lse", "entropy", "argmax", "margin")
    cross_entropy(mine[:1], torch.tensor([2]), shard=shard, outputs=outputs)
    near([outputs.lse, outputs.margin], [LN6, LN3 - LN2])
    near(outputs.entropy, [LN6 / 6 + LN3 / 3 + LN2 / 2])
    return found, equal(outputs.argmax, [2])


@example
def its_loss_for_the_third_class_is_ln_2_and_its_gradient_p_minus_the_target():
    shard = shard_of(3)
    mine = shard.slice(THREE, -1).requires_grad_()
    loss = cross_entropy(mine, torch.tensor([2]), shard=shard)
    near([loss.detach()], [0.693147], 5e-7)
    near([loss.detach()], [LN2])
    loss.backward()
    near(mine.grad[:, : shard.num_valid], [[1 / 6, 1 / 3, -1 / 2][shard.start : shard.stop]])
    hidden = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)  # as a projection: h = 1, e_v = z_v
    weight = shard.slice(THREE.T).requires_grad_()
    bias = shard.slice(torch.zeros(3, dtype=torch.float64)).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.tensor([2]), shard=shard, linear_bias=bias)
    near([loss.detach()], [LN2])
    loss.backward()
    near(hidden.grad, [[LN2 / 3 - LN3 / 2]])  # G E
    for gradient in (weight.grad[: shard.num_valid, 0], bias.grad[: shard.num_valid]):  # G' H, and G summed over rows
        near(gradient, [1 / 6, 1 / 3, -1 / 2][shard.start : shard.stop])
    return float(loss.detach())


@example
def greedy_takes_the_third_class_and_a_draw_any_by_its_probability():
    shard, count = shard_of(3), 6000
    equal(greedy(shard.slice(THREE, -1), shard=shard), [2])
    before = torch.get_rng_state()
    streams = Streams.of([3] * count, list(range(count)))
    drawn = sample(shard.slice(THREE, -1).expand(count, -1), shard=shard, streams=streams).token_ids
    equal(torch.equal(torch.get_rng_state(), before), True)  # a training that draws next draws the same
    counts = drawn.bincount(minlength=3).double()
    expected = torch.tensor([1000.0, 2000.0, 3000.0], dtype=torch.float64)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    equal(chi_square < 9.21, True)  # the 99th percentile of two degrees of freedom
    return counts.tolist()


@example
def two_tokens_of_a_half_and_a_quarter_have_an_eighth_together():
    shard = shard_of(3)
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]], dtype=torch.float64).log()
    logprobs = token_logprobs(shard.slice(rows, -1), torch.tensor([0, 1]), shard=shard).logprob
    found = near([masked_sum(logprobs, torch.ones(2)).sum.exp()], [1 / 8])
    whole = table({(): {0: 0.5}, (0,): {1: 0.25}}, 3)
    model = Toy(shard, lambda _, ids: whole(ids), [1])
    result = beam_search(model, [[0]], shard=shard, num_beams=9, max_new_tokens=2)  # every sequence
    at = result.token_ids[0].tolist().index([0, 1])
    return found, near([result.scores[0, at].exp()], [1 / 8])


@example
def smoothing_moves_the_target_distribution_and_the_gradient_by_its_convention():
    shard, target = shard_of(3), torch.tensor([2])
    found = []
    for over, q in (("all", [0.1, 0.1, 0.8]), ("others", [0.15, 0.15, 0.7])):
        mine = shard.slice(THREE, -1).requires_grad_()
        loss = cross_entropy(mine, target, shard=shard, label_smoothing=0.3, smoothing_over=over)
        found += near([loss.detach()], [q[0] * LN6 + q[1] * LN3 + q[2] * LN2])
        loss.backward()
        near(mine.grad[:, : shard.num_valid], [p - one for p, one in zip((1 / 6, 1 / 3, 1 / 2), q, strict=True)][
            shard.start : shard.stop
        ])  # fmt: skip
    return found


@example
def a_new_row_as_heavy_as_the_old_ones_halves_their_probabilities():
    shard = shard_of(4)
    grown = torch.cat([THREE, torch.tensor([[LN6]], dtype=torch.float64)], 1).expand(4, 4)
    found = token_logprobs(shard.slice(grown, -1), torch.arange(4), shard=shard).logprob.exp()
    return near(found, [1 / 12, 1 / 6, 1 / 4, 1 / 2])


@example
def a_tied_row_gets_the_gradient_of_its_lookup_and_of_its_score():
    shard = shard_of(3)
    embedding = VocabParallelEmbedding(1, shard=shard, dtype=torch.float64)
    head = VocabParallelLMHead(1, shard=shard, dtype=torch.float64)
    tie_weights(embedding, head)
    rows = torch.tensor([[1.0], [LN2], [LN3]], dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.copy_(shard.slice(rows))
    head.loss(embedding(torch.tensor([0])), torch.tensor([2])).backward()  # h = 1, the scores are the rows
    total = math.e + 2.0 + 3.0
    g = [math.e / total, 2.0 / total, 3.0 / total - 1.0]
    lookup = g[0] * 1.0 + g[1] * LN2 + g[2] * LN3
    near(head.weight.grad[: shard.num_valid, 0], [g[0] + lookup, g[1], g[2]][shard.start : shard.stop])


# One row through a whole policy: five tokens A to E, C forbidden, T = 2, k = 3, p = 0.8.


@example
def five_tokens_go_through_constraint_temperature_top_k_and_top_p():
    chain = (Suppress([2]), Temperature(2.0), TopK(3), TopP(0.8))
    off = -math.inf
    rows = [[3.0, 2.0, off, 0.0, -1.0], [1.5, 1.0, off, 0.0, -0.5], [1.5, 1.0, off, 0.0, off]]
    for at, scores in enumerate(rows, 1):  # each row of scores, by what it makes of the differences
        p = drawn_from(chain[:at], FIVE)
        near([math.log(one / p[0]) if one else off for one in p], [one - scores[0] for one in scores], 1e-8)
    after_k = drawn_from(chain[:3], FIVE)
    near(after_k, [0.547, 0.331, 0.0, 0.122, 0.0], 5e-4)
    near([after_k[0] + after_k[1]], [0.878], 5e-4)
    last = drawn_from(chain, FIVE, trace=True)
    near(last, [0.623, 0.377, 0.0, 0.0, 0.0], 1e-3)  # those figures come from the rounded ones: 0.547 / 0.878
    near(last[:2], [1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5))], 1e-8)
    shard, policy = shard_of(5), Policy(chain)
    step = policy.step(shard.slice(FIVE, -1), View.of([[]]), policy.start(1, Streams.of([0])), shard=shard, trace=True)
    found = (step.trace.removed.tolist(), step.trace.support.tolist(), step.trace.legal.tolist())
    equal(found, ([[1, 0, 1, 1]], [2], [4]))
    return last


@example
def the_smallest_set_that_reaches_0_8_of_0_52_0_25_0_13_0_06_0_04_has_three_tokens():
    shard = shard_of(5)
    nucleus = top_p(shard.slice(SORTED, -1), 0.8, shard=shard)
    near([sum(math.exp(z) for z in SORTED[0, :2].tolist())], [0.77])
    equal(support((TopP(0.8),), SORTED), [0, 1, 2])
    return equal(nucleus.size, [3]), near(nucleus.mass, [0.9], 1e-8)


# Temperature, and the other cuts.


@example
def a_temperature_divides_gaps_and_raises_the_entropy_by_the_variance_over_its_cube():
    shard, t, step = shard_of(5), 2.0, 1e-4
    p = drawn_from((Temperature(t),), FIVE)
    near([math.log(p[0] / p[at]) for at in range(5)], [0.0, 0.5, 1.0, 1.5, 2.0], 1e-8)
    entropies = [diagnose(shard.slice(FIVE, -1), shard=shard, temperature=one).entropy for one in (t - step, t + step)]
    mean = sum(p[at] * (3.0 - at) for at in range(5))
    variance = sum(p[at] * (3.0 - at - mean) ** 2 for at in range(5))
    return near((entropies[1] - entropies[0]) / (2 * step), [variance / t**3], 1e-5)


@example
def min_p_keeps_scores_above_the_best_plus_t_log_alpha():
    equal(support((MinP(0.3),), FIVE), [0, 1])  # 3 + log 0.3 = 1.796
    equal(support((Temperature(2.0), MinP(0.3)), FIVE), [0, 1, 2])  # 3 + 2 log 0.3 = 0.592
    return equal(support((Temperature(0.5), MinP(0.3)), FIVE), [0])  # 3 + 0.5 log 0.3 = 2.398


@example
def top_n_sigma_keeps_scores_above_the_best_less_n_deviations_at_any_temperature():
    for cut in ((TopNSigma(1.0),), (Temperature(5.0), TopNSigma(1.0)), (Temperature(0.1), TopNSigma(1.0))):
        equal(support(cut, FIVE), [0, 1])  # the variance of 3, 2, 1, 0, -1 is 2: 3 - 1.414
    equal(support((TopNSigma(1.0),), 7.0 * FIVE - 20.0), [0, 1])
    return equal(support((Bias({4: 3.5}), TopNSigma(1.0)), FIVE), [0, 1, 4])  # 3, 2, 1, 0, 2.5: 3 - 1.095 = 1.905


@example
def typical_keeps_first_what_surprises_as_much_as_the_row_does_on_average():
    # H = 1.2495 nats; -log p is 0.654, 1.386, 2.040, ...: 0.595, 0.137, 0.791 from it
    near(diagnose(shard_of(5).slice(SORTED, -1), shard=shard_of(5)).entropy, [1.2495], 1e-4)
    equal(support((Typical(0.2),), SORTED), [1])  # not the most likely token
    return equal(support((Typical(0.7),), SORTED), [0, 1]), equal(support((Typical(0.8),), SORTED), [0, 1, 2])


@example
def eta_lowers_its_floor_where_the_row_is_flat():
    # exp(-H) = 0.2867: min(0.09, 0.3 * 0.2867) = 0.0860, and min(0.5, 0.7071 * 0.2867) = 0.2027
    equal((support((Eta(0.09),), SORTED), support((Eta(0.5),), SORTED)), ([0, 1, 2], [0, 1]))
    level = torch.zeros(1, 5, dtype=torch.float64)  # exp(-H) = 0.2: min(0.5, 0.7071 * 0.2) = 0.1414 of 0.2 each
    return equal(support((Eta(0.5),), level), [0, 1, 2, 3, 4])


@example
def mirostat_moves_mu_by_the_gain_times_the_surprise_beyond_its_target():
    shard, policy = shard_of(4), Policy((MirostatV2(1.5, 0.2),))
    row = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    state, view = policy.start(1, Streams.of([5])), View.of([[]])
    mu, found = 3.0, []  # twice the target, in bits
    for _ in range(6):
        kept = [bits for bits in (1.0, 2.0, 3.0, 3.0) if bits <= mu + 1e-6]
        step = policy.step(shard.slice(row, -1), view, state, shard=shard, trace=True)
        equal(step.trace.support, [len(kept)])
        mass = sum(2.0**-bits for bits in kept)
        surprise = math.log2(mass * 2.0 ** (1.0, 2.0, 3.0, 3.0)[step.token_ids.item()])
        mu -= 0.2 * (surprise - 1.5)
        state, view = step.state, view.appended(step.token_ids)
        near(state.states[0]["mu"], [mu], 1e-8)
        found.append((step.token_ids.item(), state.states[0]["mu"].item()))
    return found


# Biases, penalties, priors, contrasts.


@example
def an_additive_bias_multiplies_a_mass_and_does_not_commute_with_a_temperature():
    near(drawn_from((Bias({1: LN2}),), THREE), [1 / 8, 1 / 2, 3 / 8], 1e-8)  # masses 1, 4, 3
    first = [2.0, math.sqrt(2.0), math.sqrt(3.0)]  # (z + ln 4) / 2
    last = [4.0, math.sqrt(2.0), math.sqrt(3.0)]  # z / 2 + ln 4
    bias, warm = Bias({0: 2 * LN2}), Temperature(2.0)
    for chain, masses in (((bias, warm), first), ((warm, bias), last)):
        near(drawn_from(chain, THREE), [one / sum(masses) for one in masses], 1e-8)
    return near(drawn_from((Bias({2: -math.inf}),), THREE), [1 / 3, 2 / 3, 0.0], 1e-8)


@example
def a_repetition_penalty_of_2_makes_2_to_1_and_minus_2_to_minus_4():
    row = torch.tensor([[2.0, -2.0, 1.0]], dtype=torch.float64)
    masses = [math.exp(z) for z in (1.0, -4.0, 1.0)]
    return near(drawn_from((RepetitionPenalty(2.0),), row, [(0, 1)]), [one / sum(masses) for one in masses], 1e-8)


@example
def taking_the_whole_prior_of_its_frequencies_away_leaves_a_level_row():
    near(drawn_from((Prior([1.0, 2.0, 3.0], 0.0, 0.5),), THREE), [
        one / (1 + math.sqrt(2.0) + math.sqrt(3.0)) for one in (1.0, math.sqrt(2.0), math.sqrt(3.0))
    ], 1e-8)  # fmt: skip
    return near(drawn_from((Prior([1.0, 2.0, 3.0], 0.0, 1.0),), THREE), [1 / 3] * 3, 1e-8)


@example
def contrastive_search_takes_the_second_token_where_the_first_repeats():
    shard = shard_of(3)
    row = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    candidates = contrastive_candidates(shard.slice(row, -1), 2, shard=shard)
    chosen, scores = contrastive_select(candidates, torch.tensor([[0.9, 0.1]]), 0.6)
    near(scores, [0.4 * math.log(0.5) - 0.54, 0.4 * math.log(0.3) - 0.06], 1e-7)
    return equal(chosen, [1])


@example
def dola_scores_a_token_by_what_the_last_layer_adds_to_an_earlier_one():
    mature, earlier = (torch.tensor([one], dtype=torch.float64).log() for one in ((0.5, 0.3, 0.2), (0.6, 0.1, 0.3)))
    ratios = [0.5 / 0.6, 0.3 / 0.1, 0.2 / 0.3]
    found = drawn_from((Dola(0.1),), mature, extras={"premature_logits": earlier})
    near(found, [one / sum(ratios) for one in ratios], 1e-8)
    return equal(support((Dola(0.5),), mature, extras={"premature_logits": earlier}), [0, 1])  # 0.2 is below 0.25


# Diagnostics and search.


@example
def a_row_tells_its_margin_entropy_effective_support_normalizer_and_energy():
    shard = shard_of(3)
    found = diagnose(shard.slice(THREE, -1), shard=shard)
    entropy = LN6 / 6 + LN3 / 3 + LN2 / 2
    near([found.margin, found.entropy, found.effective_support], [LN3 - LN2, entropy, math.exp(entropy)], 1e-8)
    near([found.lse, found.energy, found.confidence], [LN6, -LN6, 1 / 2], 1e-8)
    warm = diagnose(shard.slice(THREE, -1), shard=shard, temperature=2.0)
    near([warm.margin], [(LN3 - LN2) / 2], 1e-8)
    near([warm.energy], [-2.0 * math.log(1 + math.sqrt(2.0) + math.sqrt(3.0))], 1e-8)
    return equal((found.token_ids.item(), found.runner_up.item()), (2, 1))


@example
def two_beams_of_0_6_and_0_4_give_0_30_0_24_0_18_and_0_12():
    shard = shard_of(3)
    logits = torch.tensor([[[0.5, 0.3, 0.2], [0.6, 0.28, 0.12]]], dtype=torch.float64).log()
    sums = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log()
    step = beam_step(shard.slice(logits, -1), sums, shard=shard, candidates=4)
    near(step.scores.exp(), [0.30, 0.24, 0.18, 0.12])
    parents, tokens = split_flat(torch.tensor([[0, 3, 1, 2]]), 3)  # i = k V + v
    equal((step.parents.tolist(), step.token_ids.tolist()), (parents.tolist(), tokens.tolist()))
    first = beam_step(shard.slice(logits, -1), torch.tensor([[0.0, -math.inf]]), shard=shard, candidates=4)
    near(first.scores.exp(), [0.5, 0.3, 0.2, 0.0])
    return equal((first.parents.tolist(), first.token_ids.tolist()), ([[0, 0, 0, 0]], [[0, 1, 2, -1]]))


@example
def the_best_first_token_need_not_begin_the_best_sequence():
    shard = shard_of(3)
    whole = table({(): {0: 0.5, 1: 0.4}, (0,): {0: 0.4, 1: 0.3}, (1,): {0: 0.9, 1: 0.05}}, 3)
    found = []
    for beams in (1, 2):  # 0.5 * 0.4 against 0.4 * 0.9
        model = Toy(shard, lambda _, ids: whole(ids), [1])
        result = beam_search(model, [[0]], shard=shard, num_beams=beams, max_new_tokens=2, num_return=1)
        found.append((result.token_ids[0, 0].tolist(), round(result.scores[0, 0].exp().item(), 9)))
    return equal(found, [([0, 0], 0.2), ([1, 0], 0.36)])


@example
def a_search_divides_by_the_gnmt_length_and_adds_the_coverage_of_its_source():
    shard, end = shard_of(3), 2
    whole = table({(): {end: 0.25, 0: 0.7}, (0,): {end: 0.5, 0: 0.25}}, 3)
    options = {"num_beams": 2, "max_new_tokens": 2, "eos_ids": (end,), "length_penalty": LengthPenalty(1.0, "gnmt")}
    model = Toy(shard, lambda _, ids: whole(ids), [1])
    plain = beam_search(model, [[0]], shard=shard, **options)
    best = math.log(0.7 * 0.5) / (7 / 6)  # two tokens: (5 + 2) / 6
    near(plain.scores[:, :1], [[best]])
    model = Toy(shard, lambda _, ids: whole(ids), [1])
    model.attention = lambda _, ids: [0.5, 0.25]  # at both steps: 1 and 0.5
    covered = beam_search(model, [[0]], shard=shard, coverage=Coverage(0.2), **options)
    return near(covered.scores[:, :1], [[best + 0.2 * (math.log(1.0) + math.log(0.5))]], 1e-8)


def _run(rank: int, name: str) -> Any:
    return EXAMPLES[name]()


RUNS = Batch(_run, [(name,) for name in EXAMPLES])


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_worked_example_has_its_numbers_and_the_same_bits_on_every_rank(name, tp):
    results = RUNS(tp, name)
    assert all(one == results[0] for one in results)
