"""The joint step and searches over shards: the oracle's candidates, the same bits at every TP size, one exchange."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from tests.batch import assert_all_raise, attempt
from tests.beam_models import Toy, random_tree
from tests.multirank.counting import collectives
from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import ALL_SIZES, Batch
from tests.tolerances import require_equal
from vocab_parallel.decode.search.beam import beam_step, beam_step_scores
from vocab_parallel.decode.search.beam_search import beam_search
from vocab_parallel.decode.search.best_first import best_first_search
from vocab_parallel.decode.search.hypotheses import Coverage
from vocab_parallel.decode.search.normalizer import class_sums, merge_sums
from vocab_parallel.decode.transforms.constraints import Fsm, StateMachine
from vocab_parallel.decode.transforms.processors import RepetitionPenalty
from vocab_parallel.reference import beam as oracle
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.filters import keep_top_k, temper
from vocab_parallel.select.scores import Scores

NAN, INF = float("nan"), float("inf")
REQUESTS, BEAMS = 3, 4


def inputs(kind, vocab, dtype):
    """Logits [B, K, V] and beam scores [B, K]."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(REQUESTS, BEAMS, vocab, generator=draw, dtype=torch.float64) * 3
    sums = -torch.rand(REQUESTS, BEAMS, generator=draw, dtype=torch.float64) * 4
    if kind == "ties":  # few values, equal sums, and beams that are copies or permutations of each other
        logits, sums = (logits / 3).round(), torch.full_like(sums, -2.0)
        logits[:, 1] = logits[:, 0]
        logits[:, 2] = logits[:, 0].flip(-1)
    elif kind == "first step":
        sums[:, 1:], sums[:, 0] = -INF, 0.0
    elif kind == "masks":
        logits = torch.where(torch.rand(logits.shape, generator=draw) < 0.7, -INF, logits)
        logits[:, 0, 0] = 1.0
        logits[1, 2] = -INF  # an active beam in a dead end
        sums[2, 1:3] = -INF
        sums[0] = -INF  # a request that is over
    elif kind == "offset":
        logits += torch.tensor([3000.0, -3000.0, 0.0, 1e5], dtype=torch.float64)[:, None]
    elif kind == "wide":  # some columns far below the largest, beyond what counts
        logits *= 15
    elif kind == "extreme":
        limits = torch.finfo(torch.float32)
        values = torch.tensor([limits.min, limits.max / 2, limits.tiny, -limits.tiny, 0.0, 1.0], dtype=torch.float64)
        logits = values[torch.randint(0, 6, logits.shape, generator=draw)]
        logits[..., 0] = 2.0
    else:
        assert kind == "normal", kind
    return logits.to(dtype), sums


def _step(rank, kind, vocab, multiple_of, dtype, candidates):
    shard = shard_of(vocab, multiple_of)
    logits, sums = inputs(kind, vocab, dtype)
    mine = shard.slice(logits, -1, fill=NAN)
    before = mine.clone(), sums.clone()
    step = beam_step(mine, sums, shard=shard, candidates=candidates)
    assert torch.equal(mine.nan_to_num(), before[0].nan_to_num()) and torch.equal(sums, before[1]), "arguments modified"
    return step


KINDS = ["normal", "ties", "first step", "masks", "offset", "wide", "extreme"]
FORMS = [  # vocab, multiple_of, dtype, candidates
    (9, 1, torch.float32, None), (9, 1, torch.float32, 11), (9, 1, torch.float64, 11), (9, 1, torch.bfloat16, None),
    (13, 4, torch.float32, None), (13, 4, torch.float64, None), (300, 1, torch.float32, None),
]  # fmt: skip


@pytest.mark.parametrize(("vocab", "multiple_of", "dtype", "candidates"), FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_the_oracles_with_the_same_bits_at_every_tp_size(kind, vocab, multiple_of, dtype, candidates):
    logits, sums = inputs(kind, vocab, dtype)
    every = [one for tp in ALL_SIZES for one in RUNS(tp, _step, kind, vocab, multiple_of, dtype, candidates)]
    n = candidates or 2 * BEAMS
    for name in ("scores", "parents", "token_ids", "logprobs"):
        require_equal(f"{name} of {n}", [getattr(one, name) for one in every])
    step = every[0]
    assert step.scores.dtype == torch.float64 and step.parents.dtype == step.token_ids.dtype == torch.int64
    assert (step.logprobs <= 0).all(), "rounding must not take away the bound that ends searches"
    for b, expected in enumerate(oracle.beam_step(logits, sums, n)):
        fill = n - len(expected)
        assert step.parents[b].tolist() == [k for _, k, _ in expected] + [0] * fill
        assert step.token_ids[b].tolist() == [v for *_, v in expected] + [-1] * fill
        scores = torch.tensor([score for score, *_ in expected] + [-INF] * fill, dtype=torch.float64)
        within = 2e-11 if dtype == torch.float64 else 2e-10
        torch.testing.assert_close(step.scores[b], scores, rtol=1e-12, atol=within)
        there = torch.arange(n) < len(expected)
        total = sums[b, step.parents[b]] + step.logprobs[b]
        assert torch.equal(torch.where(there, total, -INF), step.scores[b])


def test_the_kinds_have_what_they_are_named_for():
    step = RUNS(1, _step, "ties", 9, 1, torch.float32, 11)[0]
    tied = step.scores[:, 1:] == step.scores[:, :-1]
    assert (tied & (step.parents[:, 1:] == step.parents[:, :-1])).any(), "no ties within a parent"
    assert (tied & (step.parents[:, 1:] != step.parents[:, :-1])).any(), "no ties between parents"
    masked = RUNS(1, _step, "masks", 9, 1, torch.float32, 11)[0]
    assert (masked.token_ids[0] == -1).all(), "no request without active beams"
    assert (masked.scores == -INF).any(1).all(), "no request with fewer candidates than asked for"


def _no_requests(rank):
    shard = shard_of(9)
    return beam_step(torch.zeros(0, BEAMS, shard.shard_size), torch.zeros(0, BEAMS), shard=shard)


@pytest.mark.parametrize("tp", [1, 4])
def test_no_requests_have_no_candidates(tp):
    for step in RUNS(tp, _no_requests):
        assert all(each.shape == (0, 2 * BEAMS) for each in step)


def _case_b02(rank):
    shard = shard_of(6)
    logits = torch.tensor([[[0.0, 2.0, 1.0, -1.0, 0.5, -2.0], [3.0, 0.0, 0.0, 1.0, -1.0, 2.5]]])
    return beam_step(shard.slice(logits.double(), -1), torch.tensor([[-1.0, -1.5]]), shard=shard)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_one_step_of_two_beams_by_hand(tp):
    for step in RUNS(tp, _case_b02):
        assert step.parents.tolist() == [[0, 1, 0, 1]] and step.token_ids.tolist() == [[1, 0, 2, 5]]
        expected = [[-1.5846972262824712, -2.120445144999875, -2.5846972262824712, -2.620445144999875]]
        torch.testing.assert_close(step.scores, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def _sums(rank, kind):
    shard = shard_of(40_000)
    row = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    row = {"flat": row * 0, "steep": row * 30, "normal": row}[kind] + 77.7
    mine = shard.slice(row, -1)[:, : shard.num_valid]
    merged = merge_sums(Channel(shard, "sums").gather(class_sums(mine, 40_000)), 40_000)
    return torch.stack([merged.base + merged.log_total, row.logsumexp(1)])


@pytest.mark.parametrize("kind", ["flat", "steep", "normal"])
def test_the_normalizer_of_a_large_row_is_right_and_the_same_bits_at_every_tp_size(kind):
    every = [one for tp in ALL_SIZES for one in RUNS(tp, _sums, kind)]
    require_equal("normalizer", every)
    assert (every[0][0] - every[0][1]).abs().max() < 3e-12


def _traffic(rank, dtype, n):
    """Calls and bytes of a step whose size the group has come to know."""
    shard = shard_of(2000)
    logits = torch.randn(2, 3, 2000, generator=torch.Generator().manual_seed(2)).to(dtype)
    mine, sums = shard.slice(logits, -1), torch.full((2, 3), -1.0, dtype=torch.float64)
    for _ in range(9):
        beam_step(mine, sums, shard=shard, candidates=n)
    with collectives() as (calls, sent):
        beam_step(mine, sums, shard=shard, candidates=n)
    return dict(calls), dict(sent)


TRAFFIC = [(torch.float32, 6), (torch.float64, 6), (torch.bfloat16, 100)]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("dtype", "n"), TRAFFIC)
def test_a_step_is_one_exchange_of_its_documented_bytes(tp, dtype, n):
    rows, header = 6, 64
    payload = rows * (104 + (16 if dtype == torch.float64 else 8) * n)
    for calls, sent in RUNS(tp, _traffic, dtype, n):
        assert calls == {"all_gather": 1}
        assert sent == {"all_gather": (header + payload) * (tp - 1)}


def _processed(rank, kind):
    """Steps of scores that transforms have been at: still the columns, or candidates that every rank holds."""
    shard = shard_of(9)
    logits, sums = inputs("normal", 9, torch.float32)
    scores = Scores.of(shard.slice(logits, -1, fill=NAN), shard, Channel(shard, "processed", kind="candidates"))
    if kind == "tempered":
        return beam_step_scores(temper(scores, torch.full((REQUESTS * BEAMS,), 0.5, dtype=torch.float64)), sums, 6)
    if kind == "normalized":
        return beam_step_scores(scores.with_values(scores.values * 0.25), sums, 6, normalized=True)
    scores = keep_top_k(scores, torch.full((REQUESTS * BEAMS,), 2))
    assert scores.replicated
    with collectives() as (calls, _):
        step = beam_step_scores(scores, sums, 20)
    assert not calls, "candidates that every rank holds need no exchange"
    return step


PROCESSED = ["tempered", "normalized", "top-k"]


@pytest.mark.parametrize("kind", PROCESSED)
def test_processed_scores_are_searched_alike(kind):
    logits, sums = inputs("normal", 9, torch.float32)
    if kind == "tempered":
        expected = oracle.beam_step(logits / 0.5, sums, 6)
    elif kind == "top-k":
        least = logits.topk(2, -1).values[..., -1:]
        expected = oracle.beam_step(torch.where(logits >= least, logits, -INF), sums, 20)
        assert {len(one) for one in expected} == {2 * BEAMS}
    else:
        whole = (sums[..., None] + logits.double() * 0.25).flatten(1)
        values, at = whole.sort(dim=1, descending=True, stable=True)
        expected = [
            [(value, i // 9, i % 9) for value, i in zip(values[b, :6].tolist(), at[b, :6].tolist(), strict=True)]
            for b in range(REQUESTS)
        ]
    every = [one for tp in ALL_SIZES for one in RUNS(tp, _processed, kind)]
    for name in ("scores", "parents", "token_ids", "logprobs"):
        require_equal(name, [getattr(one, name) for one in every])
    for b, found in enumerate(expected):
        assert every[0].parents[b, : len(found)].tolist() == [k for _, k, _ in found]
        assert every[0].token_ids[b, : len(found)].tolist() == [v for *_, v in found]
        got = every[0].scores[b, : len(found)].tolist()
        assert got == [pytest.approx(score, abs=2e-10) for score, *_ in found]


def _bad_step(rank, what):
    shard = shard_of(9)
    logits, sums = inputs("normal", 9, torch.float32)
    options = {}
    if what == "nan":
        logits[1, 2, 8] = NAN
    elif what == "inf":
        logits[1, 2, 8] = INF
    elif what == "dead end":
        logits[2] = -INF
    elif what == "score":
        sums[1, 3] = NAN
    elif what == "copies":
        sums[1, 1:3] = 0.0
    elif what == "other scores":
        sums[0, 0] = -float(rank)
    elif what == "candidates":
        options["candidates"] = 0 if rank == shard.size - 1 else 8
    elif what == "shapes":
        sums = sums[:, :3] if rank == 0 else sums
    elif what == "flat":
        logits, sums = logits.flatten(0, 1), sums.flatten()
    elif what == "no beams":
        logits, sums = logits[:, :0], sums[:, :0]
    elif what == "no tensor":
        sums = None
    elif what == "whole":
        logits = torch.cat([logits, logits], -1)
        return attempt(lambda: beam_step(logits, sums, shard=shard))
    return attempt(lambda: beam_step(shard.slice(logits, -1), sums, shard=shard, **options))


BAD_STEPS = {
    "nan": ("NonFiniteError", ["row 6"]),
    "inf": ("NonFiniteError", ["row 6", "+inf"]),
    "dead end": ("EmptySupportError", ["request 2"]),
    "score": ("ValueError", ["request 1", "beam 3", "nan"]),
    "copies": ("ValueError", ["request 1", "beam 2"]),
    "other scores": ("LayoutMismatchError", ["rank 0", "beam_step"]),
    "candidates": ("ValueError", ["0"]),
    "shapes": ("LayoutMismatchError", ["[3, 3]"]),
    "flat": ("LayoutMismatchError", ["[B, K, shard_size]"]),
    "no beams": ("LayoutMismatchError", ["K at least 1", "[3, 0]"]),
    "no tensor": ("LayoutMismatchError", ["NoneType"]),
    "whole": ("LayoutMismatchError", ["18"]),
}


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("what", BAD_STEPS)
def test_bad_input_is_the_same_error_on_every_rank_and_names_it(tp, what):
    kind, words = BAD_STEPS[what]
    if what == "other scores" and tp == 1:
        assert RUNS(tp, _bad_step, what)[0].kind is None, "one rank has nobody to disagree with"
        return
    assert_all_raise(what, RUNS(tp, _bad_step, what), [kind], words)


VOCAB, END = 9, 4
CYCLE = {state: {token: (state + 1) % 3 for token in (state, state + 3, state + 6)} for state in range(3)}
TREES = [random_tree(VOCAB, 70), random_tree(VOCAB, 71, steps=1)]


def _searched(rank, kind):
    shard = shard_of(VOCAB)
    model = Toy(shard, lambda b, ids: TREES[b](ids), [2, 1])
    model.dtype = torch.float32
    options = {"num_beams": 4, "max_new_tokens": 5, "eos_ids": (END,), "length_penalty": 0.6}
    if kind == "diverse":
        options |= {"groups": 2, "diversity_penalty": 0.7}
    elif kind == "constrained":
        cycle = StateMachine.from_table(CYCLE, accepting=[1])
        options |= {"transforms": [RepetitionPenalty([1.5, 1.2]), Fsm(cycle, eos_ids=(END,))]}
    elif kind == "best first":
        model = Toy(shard, lambda _, ids: TREES[0](ids), [2])
        result = best_first_search(
            model, [1, 2], shard=shard, queue_size=50, branching=4, max_new_tokens=4, max_expansions=100,
            eos_ids=(END,), num_return=3,
        )  # fmt: skip
        lines = [(*one.token_ids, one.score, one.logprob) for one in result.hypotheses]
        return torch.tensor([sum(line) for line in lines], dtype=torch.float64), str(lines), result[1:]
    before = shard.traffic.total_calls
    result = beam_search(model, [[1, 2], [3]], shard=shard, **options)
    if kind != "constrained" and shard.size > 1:  # a header, the steps, and what the group had no room for at first
        assert shard.traffic.total_calls - before - result.steps in (1, 2)
        groups = options.get("groups", 1)
        assert shard.payload_sizes["candidates"][-1] == 2 * 4 * (104 + 8 * (groups + 1) * 4 // groups)
    return result.scores, result.token_ids.tolist(), (result.parents.tolist(), result.steps)


SEARCHES = ["plain", "diverse", "constrained", "best first"]


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_is_the_same_on_every_rank_and_at_every_tp_size(kind):
    every = [one for tp in ALL_SIZES for one in RUNS(tp, _searched, kind)]
    require_equal("scores", [one[0] for one in every])
    assert all(one[1:] == every[0][1:] for one in every)


def test_a_search_over_shards_finds_what_the_oracles_finds():
    scores, ids, _ = RUNS(4, _searched, "plain")[3]
    for b, whole in enumerate(TREES):
        expected = oracle.beam_search(whole, 4, 5, (END,), 0.6)
        assert [tuple(v for v in line if v >= 0) for line in ids[b]] == [found for found, _ in expected]
        assert scores[b].tolist() == [pytest.approx(score, abs=1e-6) for _, score in expected]


def _bad_search(rank, what):
    shard = shard_of(VOCAB)
    shard.deferred_errors = what == "nan, read late"
    prompts, options = [[0]], {"num_beams": 2, "max_new_tokens": 3, "eos_ids": (END,)}
    last = rank == shard.size - 1
    if what == "prompts" and last:
        prompts = [[1]]
    if what == "range":
        prompts = [[0], [VOCAB]] if last else [[0], [1]]
    if what == "beams" and last:
        options["num_beams"] = 3
    if what == "penalty" and last:
        options["length_penalty"] = math.inf
    if "attention" in what or what == "source":
        options |= {"coverage": Coverage(1.0), "source": torch.tensor([[True, what != "source" or last]])}
    logits = [0.0] * (VOCAB - 1) + [NAN if "nan" in what else 0.0]
    model = Toy(shard, lambda *_: logits, [1])
    model.attention = lambda *_: [0.5, 0.1 * (1 + rank if what == "another attention" else 1)]
    if what == "no attention" and last:
        model.attention = None
    return attempt(lambda: beam_search(model, prompts, shard=shard, **options))


BAD_SEARCHES = {
    "prompts": ("LayoutMismatchError", ["rank 0"]),
    "range": ("TokenRangeError", ["prompt 1", "9"]),
    "beams": ("LayoutMismatchError", ["3 beams"]),
    "penalty": ("ValueError", ["inf"]),
    "nan": ("NonFiniteError", ["row 0"]),
    "nan, read late": ("NonFiniteError", ["row 0"]),
    "no attention": ("ValueError", ["attention"]),
    "another attention": ("LayoutMismatchError", ["beam_search step"]),
    "source": ("LayoutMismatchError", ["rank 0"]),
}


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("what", BAD_SEARCHES)
def test_a_search_that_cannot_be_is_the_same_error_on_every_rank(tp, what):
    kind, words = BAD_SEARCHES[what]
    assert_all_raise(what, RUNS(tp, _bad_search, what), [kind], words)


def _run(rank, function, *case):
    return function(rank, *case)


# all in one world for each number of ranks: starting them costs more than what they do
RUNS = Batch(
    _run,
    [
        *((_step, kind, *form) for kind, form in product(KINDS, FORMS)),
        (_no_requests,),
        (_case_b02,),
        *((_sums, kind) for kind in ("flat", "steep", "normal")),
        *((_traffic, *case) for case in TRAFFIC),
        *((_processed, kind) for kind in PROCESSED),
        *((_bad_step, what) for what in BAD_STEPS),
        *((_searched, kind) for kind in SEARCHES),
        *((_bad_search, what) for what in BAD_SEARCHES),
    ],
)
