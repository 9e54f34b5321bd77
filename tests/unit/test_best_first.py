"""Best-first search on toy trees: what it finds, in which order it looks, and when it may say that it is the best."""

from __future__ import annotations

import math

import pytest
import torch

from tests.beam_models import Toy, random_tree, table
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.search.best_first import best_first_search
from vocab_parallel.decode.search.hypotheses import LengthPenalty
from vocab_parallel.decode.search.searching import Stepped
from vocab_parallel.reference import beam as oracle

WIDE = {"queue_size": 10_000, "max_expansions": 10_000}


def search(whole, vocab, **options):
    shard = VocabShard(VocabLayout(vocab, 1, multiple_of=1))
    asked = []

    def model(prefix, parents, state):
        asked.append(tuple(prefix[0, 1:].tolist()))
        return Toy(shard, lambda _, ids: whole(ids), [1])(prefix, parents, state)

    result = best_first_search(model, [0], shard=shard, **{"branching": vocab, **options})
    assert result.expansions == len(asked)
    return result, asked


def agree(result, expected):
    assert [one.token_ids for one in result.hypotheses] == [ids for ids, _ in expected]
    for one, (_, score) in zip(result.hypotheses, expected, strict=True):
        assert one.score == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("eos", [(), (1,), (0, 3)])
@pytest.mark.parametrize(("alpha", "kind"), [(0.0, "power"), (1.0, "power"), (-0.7, "power"), (0.8, "gnmt")])
@pytest.mark.parametrize("normalize", [False, True])
def test_with_room_for_all_it_finds_the_optimum_and_proves_it(alpha, kind, eos, normalize):
    for seed in range(2):
        whole = random_tree(4, seed)
        result, _ = search(
            whole, 4, max_new_tokens=4, eos_ids=eos, length_penalty=LengthPenalty(alpha, kind), num_return=4,
            normalize_priority=normalize, **WIDE,
        )  # fmt: skip
        agree(result, oracle.best(oracle.hypotheses(whole, 4, eos), 4, alpha, kind))
        assert result.proven and result.dropped == -math.inf


def test_it_looks_at_less_than_the_whole_tree():
    whole = random_tree(5, 3)
    result, asked = search(whole, 5, max_new_tokens=5, eos_ids=(0,), **WIDE)
    agree(result, oracle.best(oracle.hypotheses(whole, 5, (0,)), 1))
    assert result.proven and len(asked) < sum(4**depth for depth in range(5)) / 3


def test_the_most_probable_prefix_is_continued_first_whatever_its_length():
    rows = {(): {0: 0.6, 1: 0.4}, (0,): {0: 0.5, 1: 0.5}, (1,): {0: 0.9, 1: 0.1}, (1, 0): {0: 0.5, 1: 0.5}}
    _, asked = search(table(rows, 2), 2, max_new_tokens=3, **WIDE)
    assert asked[:4] == [(), (0,), (1,), (1, 0)]  # 1, 0.6, 0.4, 0.36; the others have 0.3


def test_a_heuristic_changes_the_order():
    rows = {(): {0: 0.6, 1: 0.4}}
    options = {"max_new_tokens": 3, **WIDE}
    _, asked = search(table(rows, 2), 2, heuristic=lambda ids, total: -5.0 if ids[:1] == (0,) else 0.0, **options)
    assert asked[1] == (1,)


def best_rest(whole, max_length, eos):
    """The best log-probability of the rest, of each prefix: the perfect heuristic."""

    def rest(ids, total):
        return max(
            score for _, score in oracle.hypotheses(lambda more: whole((*ids, *more)), max_length - len(ids), eos)
        )

    return rest


def test_an_admissible_heuristic_proves_with_fewer_expansions():
    whole = random_tree(4, 5, spread=0.7)
    options = {"max_new_tokens": 5, "eos_ids": (0,), **WIDE}
    plain, asked = search(whole, 4, **options)
    guided, fewer = search(whole, 4, heuristic=best_rest(whole, 5, (0,)), admissible=True, **options)
    assert plain.proven and guided.proven and plain.hypotheses == guided.hypotheses
    assert len(fewer) == len(guided.hypotheses[0].token_ids), "a perfect heuristic leads straight to the goal"
    assert len(fewer) < len(asked)


def test_a_heuristic_that_is_not_admissible_leads_astray_and_proves_nothing_unless_the_search_goes_on():
    rows = {(): {0: 0.6, 1: 0.4}, (0,): {0: 0.9, 1: 0.1}}
    wrong = {"heuristic": lambda ids, total: -100.0 if ids[:1] == (0,) else 0.0, "max_new_tokens": 2}
    result, _ = search(table(rows, 2), 2, queue_size=10, max_expansions=2, **wrong)
    assert result.hypotheses[0].token_ids[0] == 1 and not result.proven
    result, _ = search(table(rows, 2), 2, queue_size=10, max_expansions=10, **wrong)
    assert result.hypotheses[0].token_ids == (0, 0) and result.proven


@pytest.mark.parametrize("seed", range(6))
def test_what_a_small_queue_or_branching_lost_is_never_called_proven_wrongly(seed):
    whole = random_tree(4, 60 + seed, spread=0.7)
    best = oracle.best(oracle.hypotheses(whole, 4, (0,)), 1)[0]
    for size, branching in ((1, 4), (2, 4), (3, 2), (100, 1), (100, 2), (100, 3)):
        result, _ = search(
            whole, 4, max_new_tokens=4, eos_ids=(0,), queue_size=size, branching=branching, max_expansions=1000
        )
        if result.hypotheses:
            missed = result.hypotheses[0].score < best[1] - 1e-9
            assert not (missed and result.proven)
            assert not missed or result.dropped >= best[1] - 1e-9, "what was lost bounds the optimum"


def test_some_lossy_search_misses_the_optimum_and_says_so():
    rows = {(): {0: 0.6, 1: 0.4}, (0,): {0: 0.5, 1: 0.5}, (1,): {0: 0.99, 1: 0.01}}
    result, _ = search(table(rows, 2), 2, max_new_tokens=2, queue_size=1, max_expansions=9)
    assert result.hypotheses[0].token_ids == (0, 0) and not result.proven
    assert result.dropped == pytest.approx(math.log(0.4))


def test_a_search_that_runs_out_of_expansions_is_not_proven():
    result, _ = search(random_tree(4, 7), 4, max_new_tokens=6, queue_size=100, max_expansions=3)
    assert result.expansions == 3 and not result.proven


def test_ends_and_lengths_are_told_apart():
    rows = {(): {0: 0.5, 1: 0.5}}
    result, _ = search(table(rows, 2), 2, max_new_tokens=2, eos_ids=(1,), num_return=3, **WIDE)
    assert {one.token_ids: one.ended for one in result.hypotheses} == {(1,): True, (0, 0): False, (0, 1): True}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queue_size": 0}, "queue_size must be an integer of at least 1, got 0"),
        ({"branching": 0}, "branching"),
        ({"max_expansions": True}, "max_expansions"),
        ({"num_return": -1}, "got -1"),
        ({"eos_ids": (4,)}, "4, outside"),
        ({"heuristic": lambda ids, total: math.nan}, "NaN"),
    ],
)
def test_bad_options_are_errors_that_name_the_value(options, words):
    with pytest.raises(ValueError, match=words):
        search(random_tree(4, 0), 4, **{"max_new_tokens": 2, **WIDE, **options})


def test_the_models_state_is_each_prefixs_own():
    """The state that a prefix's expansion returned comes back with each of its children, whenever that is."""
    shard = VocabShard(VocabLayout(3, 1, multiple_of=1))
    whole = random_tree(3, 9)

    def model(prefix, parents, state):
        ids = tuple(prefix[0, 1:].tolist())
        assert (ids[:-1] if ids else ()) == (() if state is None else tuple(state[0].tolist()))
        return Stepped(torch.tensor([whole(ids)]), prefix[:, 1:].clone())

    result = best_first_search(
        model, [0], shard=shard, queue_size=100, branching=3, max_new_tokens=4, max_expansions=100, num_return=2
    )
    assert result.proven
