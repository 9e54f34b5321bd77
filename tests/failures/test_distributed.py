"""Failures that one rank cannot have, or must not have alone: each on 1 to 4 ranks, the last of four without a row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.beam_models import random_tree
from tests.failures.decoding import step_of
from tests.failures.lab import failure, refusal, the_same_on_all, whole_shard
from tests.multirank.loss_case import shard_of
from tests.multirank.sharded import TP
from tests.multirank.shared_world import Batch
from vocab_parallel import (
    Streams,
    cross_entropy,
    greedy,
    linear_cross_entropy,
    reference,
    sample,
    token_logprobs,
    top_k,
    top_p,
)
from vocab_parallel.decode import MirostatV2, Policy, Suppress, Temperature, TopP, View

VOCAB, WIDTH = 9, 4
TARGET = torch.tensor([0, 3, 8, 5, 2, 7])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS = normal(len(TARGET), VOCAB) * 2


# What the ranks do, by the number of the failure.


def ids_of_every_selection(shard):
    mine, rows = shard.slice(LOGITS, -1), len(LOGITS)
    streams = Streams.of([0] * rows, list(range(rows)))
    return {
        "place in the shard": mine[:, : shard.num_valid].argmax(1).tolist() if shard.num_valid else [],
        "greedy": greedy(mine, shard=shard).tolist(),
        "top_k": top_k(mine, 1, shard=shard).token_ids[:, 0].tolist(),
        "sample": sample(mine, shard=shard, streams=streams, top_p=1e-6).token_ids.tolist(),
        "top_p": top_p(mine, 1e-6, shard=shard).last_id.tolist(),
        "policy": step_of(Policy((TopP(1e-6),)), LOGITS, shard=shard).token_ids.tolist(),
    }


def rows_without_a_token(shard):
    every = Suppress(list(range(VOCAB)))
    return [
        refusal(step_of, Policy((Temperature(2.0), every), fallback=fallback), LOGITS, shard=shard)
        for fallback in ("error", {"token": 2}, {"undo": True})
    ]


def texts(shard, names, policy, steps=8):
    """The ids of each request, whatever the others are; and the policy's last state."""
    trees = {name: random_tree(VOCAB, seed, spread=1.0) for name, seed in {"a": 1, "b": 2, "c": 3}.items()}
    state, view = policy.start(len(names), Streams.of([7] * len(names), names)), View.of([[]] * len(names))
    for _ in range(steps):
        rows = view.generated().tolist()
        logits = torch.tensor([trees[name](tuple(ids)) for name, ids in zip(names, rows, strict=True)])
        step = policy.step(shard.slice(logits, -1), view, state, shard=shard)
        state, view = step.state, view.appended(step.token_ids)
    return dict(zip(names, view.prefix.tolist(), strict=True)), state


def the_same_request_anywhere(shard):
    policy, swapped = Policy((Temperature(1.5), TopP(0.9))), Policy((TopP(0.9), Temperature(1.5)))
    together, state = texts(shard, ["a", "b", "c"], policy)
    view = View.of([[]] * 3)
    other = refusal(swapped.step, shard.slice(LOGITS[:3], -1), view, state, shard=shard)
    return together, texts(shard, ["c", "b"], policy)[0], texts(shard, ["b"], policy)[0], other


def mean_in_chunks(shard):
    hidden, weight = normal(7, WIDTH, seed=1), shard.slice(normal(VOCAB, WIDTH, seed=2))
    sizes = (1, 2, 3, 7, None)
    values = [linear_cross_entropy(hidden, weight, CHUNKED, shard=shard, chunk_size=size) for size in sizes]
    own = torch.arange(shard.rank, 7, shard.size)
    rows = linear_cross_entropy(hidden[own], weight, CHUNKED[own], shard=shard, sequence_parallel=True, chunk_size=2)
    return [float(one) for one in [*values, rows]]


CHUNKED = torch.tensor([4, 8, 5, -100, -100, 0, -100])


def normalized_alone(shard):
    mine = shard.slice(LOGITS, -1)
    every = torch.stack(
        [token_logprobs(mine, torch.full_like(TARGET, v), shard=shard).logprob.exp() for v in range(VOCAB)], 1
    )
    return every, mine[:, : shard.num_valid].softmax(1), cross_entropy(mine, TARGET, shard=shard, reduction="none")


def target_subtracted_everywhere(shard):
    mine = shard.slice(LOGITS, -1).requires_grad_()
    cross_entropy(mine, TARGET, shard=shard, reduction="sum").backward()
    wrong = shard.slice(LOGITS.softmax(1), -1)[:, : shard.num_valid].clone()
    if shard.num_valid:
        at = (TARGET - shard.start).clamp(0, shard.num_valid - 1)
        wrong[torch.arange(len(TARGET)), at] -= 1.0
    return mine.grad[:, : shard.num_valid], wrong


def a_rank_without_valid_rows(shard):
    hidden, weight = normal(2, WIDTH, seed=shard.rank), shard.slice(normal(VOCAB, WIDTH, seed=9)).requires_grad_()
    target = torch.tensor([-100, -100]) if shard.rank == 0 else torch.tensor([shard.rank, -100])
    shard.traffic.reset()
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, target, shard=shard, sequence_parallel=True)
    loss.backward()
    calls, alone = dict(shard.traffic.calls), ("", "")
    if shard.size > 1:
        mine = torch.where(TARGET > 4, -100, TARGET) if shard.rank == 0 else TARGET
        alone = refusal(cross_entropy, shard.slice(LOGITS, -1), mine, shard=shard)
    return calls, float(loss.detach()), float(hidden.grad.abs().sum()), alone


def nuclei(shard):
    mine = shard.slice(LOGITS, -1)
    local = mine[:, : shard.num_valid].softmax(1)
    ordered, at = local.sort(1, descending=True)
    wrong = torch.zeros_like(local, dtype=torch.bool).scatter(1, at, ordered.cumsum(1) - ordered < 0.6)
    return top_p(mine, 0.6, shard=shard).kept[:, : shard.num_valid], wrong


def controllers(shard):
    policy = Policy((MirostatV2(1.2, 1.0),))
    together, state = texts(shard, ["a", "b"], policy)
    alone, its = texts(shard, ["b"], policy)
    shared, mixed = texts(shard, ["a", "b"], _Shared((MirostatV2(1.2, 1.0),)))
    mus = [one.states[0]["mu"].tolist() for one in (state, its, mixed)]
    return together["b"], alone["b"], shared["b"], mus


class _Shared(Policy):
    """A policy whose controller is one for all requests: the mistake."""

    def step(self, logits, view, state, **options):
        step = super().step(logits, view, state, **options)
        mu = step.state.states[0]["mu"]
        mixed = dataclasses.replace(step.state, states=({"mu": mu.mean().expand_as(mu).clone()},))
        return step._replace(state=mixed)


JOBS = {
    39: ids_of_every_selection,
    42: rows_without_a_token,
    49: the_same_request_anywhere,
    51: mean_in_chunks,
    57: normalized_alone,
    58: target_subtracted_everywhere,
    59: a_rank_without_valid_rows,
    60: nuclei,
    61: controllers,
}


def _run(rank, number):
    return JOBS[number](shard_of(VOCAB))


RUNS = Batch(_run, [(number,) for number in JOBS])


# What they find.


@TP
@failure(
    39,
    "A place in a sorted row, or in a shard, returned as the token's id",
    "impossible",
    "Whatever leaves a selection is a global id, on every rank the same; places in a sort or a shard never leave it.",
)
def test_every_selection_gives_global_ids(tp):
    ranks, best = RUNS(tp, 39), LOGITS.argmax(1).tolist()
    places = [rank.pop("place in the shard") for rank in ranks]
    assert tp == 1 or all(one != best for one in places), "no place differs from its id"
    assert best != [0] * len(best), "the place of the best in its sorted row"
    assert all(ids == best for ids in the_same_on_all(ranks).values())


@TP
@failure(
    42,
    "A row in which every token is forbidden",
    "refused",
    "`EmptySupportError` on every rank, with row, step and transform; a fallback answers only where the hard "
    "transforms allow its token, and none undoes them.",
)
def test_a_row_without_a_token_is_an_error_on_every_rank(tp):
    assert torch.full((1, VOCAB), -torch.inf).softmax(1).isnan().all()
    plain, token, undo = the_same_on_all(RUNS(tp, 42))
    assert [kind for kind, _ in (plain, token, undo)] == ["EmptySupportError"] * 3
    assert "row 0, step 0: no token is left after 'suppress' (transform 2" in plain[1]
    assert "the fallback's token 2 is not legal there either" in token[1]
    assert "a hard constraint is never undone" in undo[1]


@TP
@failure(
    49,
    "A seed taken for all that a replay needs",
    "refused",
    "A stream belongs to a request, so batch, order and ranks change no token; a state goes on only under the policy "
    "it is of, whose order is part of it.",
)
def test_a_request_replays_in_any_batch_and_under_its_own_policy_only(tp):
    together, fewer, alone, other = the_same_on_all(RUNS(tp, 49))
    assert together["b"] == fewer["b"] == alone["b"] and together["c"] == fewer["c"]
    assert together["a"] != together["b"], "requests of one seed draw alike"
    assert (together, fewer) == RUNS(1, 49)[0][:2], "another number of ranks, other tokens"
    assert other[0] == "ValueError" and "the state is of policy" in other[1]
    rows = LOGITS.softmax(1)
    whole, part = (torch.multinomial(some, 1, generator=torch.Generator().manual_seed(7)) for some in (rows, rows[1:]))
    assert not torch.equal(whole[1:], part), "one seeded generator: a row that leaves changes the others' tokens"


@TP
@failure(
    51,
    "Means of chunks, averaged",
    "impossible",
    "The loss adds up all chunks and ranks and divides once by the number of valid rows; there is no mean of a chunk.",
)
def test_the_mean_is_over_valid_rows_whatever_the_chunks(tp):
    hidden, weight = normal(7, WIDTH, seed=1), normal(VOCAB, WIDTH, seed=2)
    rows = reference.linear_cross_entropy(hidden, weight, CHUNKED, reduction="none")
    valid, right = CHUNKED >= 0, float(reference.linear_cross_entropy(hidden, weight, CHUNKED))
    parts = [float(part[on].mean()) for part, on in zip(rows.split(2), valid.split(2), strict=True) if on.any()]
    assert abs(sum(parts) / len(parts) - right) > 0.01
    for value in the_same_on_all(RUNS(tp, 51)):
        assert value == pytest.approx(right, abs=1e-12)


@TP
@failure(
    57,
    "Each shard of the vocabulary normalised by itself",
    "shown",
    "Losses and log-probabilities divide by the sum over all shards, from one exchange; nothing normalises a shard.",
)
def test_probabilities_are_normalised_over_all_shards(tp):
    ranks, right = RUNS(tp, 57), LOGITS.softmax(1)
    shares = torch.cat([local for _, local, _ in ranks], 1)
    filled = sum(local.shape[1] > 0 for _, local, _ in ranks)
    assert torch.allclose(shares.sum(1), torch.full((len(LOGITS),), float(filled), dtype=torch.float64))
    assert tp == 1 or not torch.allclose(shares, right, atol=0.01)
    for every, _, losses in ranks:
        assert torch.allclose(every, right, atol=1e-12)
        assert torch.allclose(losses, -right.log().gather(1, TARGET[:, None])[:, 0], atol=1e-12)


@TP
@failure(
    58,
    "The target subtracted on every rank of the vocabulary",
    "shown",
    "Only the rank that owns the target's row subtracts it, so the gradients of a row add up to 0 over all shards.",
)
def test_the_target_is_subtracted_once(tp):
    ranks = RUNS(tp, 58)
    right = LOGITS.softmax(1) - torch.nn.functional.one_hot(TARGET, VOCAB)
    gradient, wrong = (torch.cat([rank[at] for rank in ranks], 1) for at in (0, 1))
    assert torch.allclose(gradient, right, atol=1e-12)
    owners = sum(rank[0].shape[1] > 0 for rank in ranks)
    assert torch.allclose(wrong.sum(1), torch.full((len(TARGET),), 1.0 - owners, dtype=torch.float64))


@TP
@failure(
    59,
    "A collective skipped by a rank all of whose rows are ignored",
    "impossible",
    "Which collectives there are follows from shapes and options alone; rows that one rank alone ignores, where all "
    "must have the same, are an error on every rank.",
)
def test_a_rank_without_valid_rows_takes_part_in_every_collective(tp):
    ranks = RUNS(tp, 59)
    calls = the_same_on_all([rank[0] for rank in ranks])
    assert (sum(calls.values()) > 0) == (tp > 1)
    weight, others = normal(VOCAB, WIDTH, seed=9), range(1, tp)
    hidden = torch.cat([normal(2, WIDTH, seed=rank)[:1] for rank in others] or [torch.empty(0, WIDTH)])
    right = float(reference.linear_cross_entropy(hidden.double(), weight, torch.tensor(others).long()))
    assert [rank[1] for rank in ranks] == [pytest.approx(right, abs=1e-12)] * tp
    assert ranks[0][2] == 0.0 and all(rank[2] > 0 for rank in ranks[1:])
    kind, words = the_same_on_all([rank[3] for rank in ranks])
    assert tp == 1 or (kind == "LayoutMismatchError" and "rank" in words)


@TP
@failure(
    60,
    "A nucleus of each shard taken for the nucleus of the row",
    "shown",
    "`top_p` ranks and adds up the probabilities of all shards, without gathering them; each rank gets its part of the "
    "one nucleus, which may be none.",
)
def test_the_nucleus_is_one_over_all_shards(tp):
    ranks, right = RUNS(tp, 60), reference.nucleus(LOGITS, torch.full((len(LOGITS),), 0.6, dtype=torch.float64))
    kept, wrong = (torch.cat([rank[at] for rank in ranks], 1) for at in (0, 1))
    assert torch.equal(kept, right)
    assert torch.equal(wrong, right) == (tp == 1), "nuclei of shards, side by side"
    assert tp == 1 or any(not bool(part.any(1).all()) for part, _ in ranks), "every rank keeps some in every row"


@TP
@failure(
    61,
    "One adaptive controller for all requests",
    "impossible",
    "A controller keeps nothing: what it adapts is a row of `PolicyState` for each request, which goes in and comes "
    "out of a step.",
)
def test_a_controllers_state_is_the_requests_own(tp):
    together, alone, shared, (mus, its, mixed) = the_same_on_all(RUNS(tp, 61))
    assert together == alone and mus[1] == its[0] and mus[0] != mus[1]
    assert mixed[1] != its[0] and shared != alone, "with one controller, another request decides"
    with pytest.raises(dataclasses.FrozenInstanceError):
        MirostatV2(1.2).tau = 5.0
    policy = Policy((MirostatV2(1.2),))
    with pytest.raises(ValueError, match="the state is of 1 requests, the logits of 2 rows"):
        policy.step(LOGITS[:2], View.of([[], []]), policy.start(1, Streams.of([0])), shard=whole_shard(VOCAB))
