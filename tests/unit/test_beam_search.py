"""Beam search on toy models whose whole trees are small enough to list."""

from __future__ import annotations

import math
from itertools import chain, pairwise

import pytest
import torch

from tests.beam_models import Toy, random_tree, table
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.search.beam import split_flat
from vocab_parallel.decode.search.beam_search import beam_search
from vocab_parallel.decode.search.hypotheses import Coverage, LengthPenalty
from vocab_parallel.decode.search.reordering import reorder
from vocab_parallel.decode.search.searching import Stepped
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.transforms.constraints import Fsm, StateMachine
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.processors import RepetitionPenalty
from vocab_parallel.decode.transforms.transform import LOGPROB, Choice, Transform
from vocab_parallel.decode.transforms.warpers import Typical
from vocab_parallel.errors import EmptySupportError, NonFiniteError, TokenRangeError
from vocab_parallel.reference import beam as oracle
from vocab_parallel.select.streams import Streams

NOTHING = ()


def one_rank(vocab, late=None):
    return VocabShard(VocabLayout(vocab, 1, multiple_of=1), deferred_errors=late)


def search(whole, vocab, late=None, **options):
    """The hypotheses of one request as `(ids, score)`, and all of the result."""
    model = Toy(one_rank(vocab, late), lambda _, ids: whole(ids), [1])
    result = beam_search(model, [[0]], shard=model.shard, **options)
    return listed(result, 0), result


def listed(result, request):
    found = []
    for ids, length, score in zip(
        result.token_ids[request].tolist(),
        result.lengths[request].tolist(),
        result.scores[request].tolist(),
        strict=True,
    ):
        assert ids[length:] == [-1] * (len(ids) - length)
        if score > -math.inf:
            found.append((tuple(ids[:length]), score))
    return found


def agree(got, expected, digits=1e-9):
    assert [ids for ids, _ in got] == [ids for ids, _ in expected]
    for (_, one), (_, other) in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=digits)


@pytest.mark.parametrize("eos", [(), (1,), (0, 3)])
@pytest.mark.parametrize(("alpha", "kind"), [(0.0, "power"), (1.0, "power"), (-0.7, "power"), (0.8, "gnmt")])
def test_a_beam_as_wide_as_the_tree_finds_its_optimum(alpha, kind, eos):
    for seed in range(3):
        whole = random_tree(4, seed)
        got, _ = search(
            whole,
            4,
            num_beams=64,
            max_new_tokens=4,
            eos_ids=eos,
            length_penalty=LengthPenalty(alpha, kind),
            num_return=5,
        )
        agree(got, oracle.best(oracle.hypotheses(whole, 4, eos), 5, alpha, kind))


@pytest.mark.parametrize("eos", [(), (1,), (0, 3)])
@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_a_narrow_beam_keeps_what_the_oracles_keeps(beams, alpha, eos):
    for seed in range(4):
        whole = random_tree(6, 10 + seed)
        got, _ = search(whole, 6, num_beams=beams, max_new_tokens=5, eos_ids=eos, length_penalty=alpha)
        agree(got, oracle.beam_search(whole, beams, 5, eos, alpha))


def test_a_narrow_beam_misses_the_optimum_that_a_wide_one_finds():
    """Finite beams are approximate: the best first token leads nowhere."""
    whole = table({(): {0: 0.6, 1: 0.4}, (0,): {0: 0.5, 1: 0.5}, (1,): {0: 0.99, 1: 0.01}}, 2)
    narrow, _ = search(whole, 2, num_beams=1, max_new_tokens=2)
    wide, _ = search(whole, 2, num_beams=2, max_new_tokens=2)
    assert narrow[0][0] == (0, 0) and wide[0][0] == (1, 0)


def test_stopping_at_the_first_end_would_be_wrong():
    """Token 2 ends. The first end has a score of log 0.4; the best, one step later, of log 0.57."""
    whole = table({(): {0: 0.6, 2: 0.4}, (0,): {0: 0.05, 2: 0.95}, (0, 0): {2: 1.0}}, 3)
    got, result = search(whole, 3, num_beams=1, max_new_tokens=3, eos_ids=(2,))
    assert got == [((0, 2), pytest.approx(math.log(0.57)))]
    got, result = search(whole, 3, num_beams=2, max_new_tokens=3, eos_ids=(2,), early_stopping="never", num_return=2)
    assert [ids for ids, _ in got] == [(0, 2), (2,)]
    assert result.ended.all() and result.steps == 2, "0.03 is left: no third step can help"


def test_a_search_goes_on_while_a_longer_hypothesis_can_win_and_transformers_default_does_not():
    """With alpha 2 the length counts more than the probability; the bound at the present length does not see that."""
    rows = {(0,) * n: {0: 0.5, 1: 0.5} for n in range(1, 8)} | {(): {0: 0.001, 1: 0.999}}
    options = {"num_beams": 1, "max_new_tokens": 8, "eos_ids": (1,), "length_penalty": 3.0}
    whole = table(rows | {(): {0: 0.6, 1: 0.4}, (0,): {0: 0.1, 1: 0.9}}, 2)
    best = oracle.best(oracle.hypotheses(whole, 8, (1,)), 1, 3.0)
    patient, result = search(whole, 2, **(options | {"num_beams": 2}), early_stopping="never")
    assert patient[0] == (best[0][0], pytest.approx(best[0][1])) and result.steps == 8
    hasty, result = search(whole, 2, **(options | {"num_beams": 2}), early_stopping=True)
    assert result.steps < 8 and hasty[0][1] < patient[0][1]


def test_the_first_step_has_one_beam_so_no_sequence_comes_twice():
    model = Toy(one_rank(5), lambda _, ids: random_tree(5, 3)(ids), [1])
    result = beam_search(model, [[0]], shard=model.shard, num_beams=4, max_new_tokens=4)
    assert model.rows == [1, 4, 4, 4]
    assert len(set(map(tuple, result.token_ids[0].tolist()))) == 4


def test_more_beams_than_the_first_step_has_tokens_are_filled_later():
    whole = random_tree(2, 5)
    got, _ = search(whole, 2, num_beams=8, max_new_tokens=3)
    agree(got, oracle.best(oracle.hypotheses(whole, 3), 8))


def test_parents_and_trace_tell_every_hypothesis_again():
    whole = random_tree(5, 8)
    _, result = search(whole, 5, num_beams=3, max_new_tokens=4, eos_ids=(2,), trace=True, early_stopping=True)
    assert result.parents[0, :, 0].tolist() == [0, 0, 0]
    for at, length in enumerate(result.lengths[0].tolist()):
        total, beams = 0.0, [(0.0, ())]
        for step in range(length):
            (one,) = result.trace[step]
            parent, token = result.parents[0, at, step].item(), result.token_ids[0, at, step].item()
            found = [
                (score, logprob)
                for score, p, v, logprob in zip(*(x[0].tolist() for x in one), strict=True)
                if (p, v) == (parent, token)
            ]
            assert len(found) == 1 and beams[parent][1] == tuple(result.token_ids[0, at, :step].tolist())
            total += found[0][1]
            assert found[0][0] == pytest.approx(total, abs=1e-12)
            lines = zip(*(x[0].tolist() for x in one), strict=True)
            beams = [(s, (*beams[p][1], v)) for s, p, v, _ in lines if v not in (2, -1)][:3]
        assert result.sums[0, at].item() == pytest.approx(total, abs=1e-12)


def test_requests_do_not_notice_each_other():
    trees = [random_tree(6, 20 + b) for b in range(3)]
    shard, options = one_rank(6), {"num_beams": 3, "max_new_tokens": 6, "eos_ids": (4,), "length_penalty": 0.5}
    prompts = [[0], [1, 2, 3], [5, 5]]
    model = Toy(shard, lambda b, ids: trees[b](ids), [1, 3, 2])
    together = beam_search(model, prompts, shard=shard, **options)
    for b in range(3):
        alone = beam_search(
            Toy(shard, lambda _, ids, b=b: trees[b](ids), [len(prompts[b])]), [prompts[b]], shard=shard, **options
        )
        longest = alone.token_ids.shape[2]
        assert torch.equal(together.token_ids[b, :, :longest], alone.token_ids[0])
        assert torch.equal(together.scores[b], alone.scores[0]), "the same bits"
    assert not torch.equal(together.token_ids[0], together.token_ids[1])


@pytest.mark.parametrize("penalty", [0.0, 0.8, 50.0])
def test_diverse_groups_are_the_oracles(penalty):
    for seed in range(3):
        whole = random_tree(6, 30 + seed)
        _, result = search(whole, 6, num_beams=6, groups=3, diversity_penalty=penalty, max_new_tokens=4, trace=True)
        expected = sorted(chain(*oracle.diverse_beam_search(whole, 3, 2, 4, penalty)), key=lambda one: -one[1])
        agree(listed(result, 0), expected)
        if penalty == 50.0:
            first = [step.token_ids[0, :2].tolist() for step in result.trace[0]]
            assert len(set(chain(*first))) == 6, "groups must take other tokens at the first step"


def test_groups_without_a_penalty_are_copies():
    _, result = search(random_tree(6, 33), 6, num_beams=4, groups=2, max_new_tokens=3)
    assert result.token_ids[0, 0].tolist() == result.token_ids[0, 1].tolist()


def test_coverage_reranks_by_the_attention_of_the_hypothesis_own_tokens():
    whole = random_tree(3, 41)

    def attention(_, ids):
        return torch.rand(
            4, generator=torch.Generator().manual_seed(sum((one + 1) * 7**at for at, one in enumerate(ids)))
        ).tolist()

    model = Toy(one_rank(3), lambda _, ids: whole(ids), [1])
    model.attention = attention
    result = beam_search(
        model, [[0]], shard=model.shard, num_beams=27, max_new_tokens=3, eos_ids=(1,), num_return=5,
        coverage=Coverage(3.0), length_penalty=LengthPenalty(0.5, "gnmt"),
    )  # fmt: skip
    scored = []
    for ids, total in oracle.hypotheses(whole, 3, (1,)):
        rows = [attention(0, ids[:n]) for n in range(len(ids))]
        score = total / oracle.length_penalty(len(ids), 0.5, "gnmt") + oracle.coverage(rows, 3.0)
        scored.append((ids, score))
    plain = oracle.best(oracle.hypotheses(whole, 3, (1,)), 5, 0.5, "gnmt")
    expected = sorted(scored, key=lambda one: -one[1])[:5]
    assert [ids for ids, _ in expected] != [ids for ids, _ in plain], "the case must rerank"
    agree(listed(result, 0), expected, 1e-6)


class Alternate(Transform):
    """No token twice in a row; its state is the last token of the beam, which must follow the beam."""

    name = "alternate"
    hard = True

    def start(self, rows):
        return {"last": torch.full((rows,), -1)}

    def apply(self, scores, view, state):
        last = torch.where(view.step > 0, view.prefix[:, -1], -1)
        assert torch.equal(state["last"], last), "the state of the transform does not follow the beams"
        return scores.keep(~scores.listed(state["last"][:, None]), keeps_peak=False)

    def after(self, state, choice):
        return {"last": torch.where(choice.active, choice.token_ids, state["last"])}

    def to_dict(self):
        return {"name": self.name}

    def __post_init__(self):
        pass


def test_constraints_have_a_state_for_each_beam_and_the_scores_are_normalised_over_what_is_left():
    whole = random_tree(4, 50)

    def constrained(ids):
        return [-math.inf if ids and v == ids[-1] else z for v, z in enumerate(whole(ids))]

    got, _ = search(whole, 4, num_beams=3, max_new_tokens=4, transforms=[Alternate()])
    agree(got, oracle.beam_search(constrained, 3, 4))
    assert all(one != other for ids, _ in got for one, other in pairwise(ids))


def test_per_row_parameters_and_machines_follow_each_request():
    """Two requests of one tree, with another penalty and another start state each, are what each is alone."""
    whole = random_tree(9, 53)
    cycle = StateMachine.from_table({s: {v: (s + 1) % 3 for v in (s, s + 3, s + 6)} for s in range(3)}, accepting=[0])
    shard, options = one_rank(9), {"num_beams": 3, "max_new_tokens": 5}

    def run(prompts, penalty, start):
        transforms = [RepetitionPenalty(penalty, scope="generated"), Fsm(cycle, start_state=start)]
        model = Toy(shard, lambda _, ids: whole(ids), [1] * len(prompts))
        return beam_search(model, prompts, shard=shard, transforms=transforms, **options)

    together = run([[0], [0]], [1.0, 6.0], [0, 2])
    for b, (penalty, start) in enumerate(((1.0, 0), (6.0, 2))):
        alone = run([[0]], penalty, start)
        assert torch.equal(together.scores[b], alone.scores[0])
        assert torch.equal(together.token_ids[b], alone.token_ids[0])
        assert torch.equal(together.token_ids[b] % 3, (start + torch.arange(5)).expand(3, 5) % 3)
    assert not torch.equal(run([[0]], 1.0, 2).scores, alone.scores), "the penalty must matter"


class OnlyWhile(Alternate):
    """All tokens are forbidden after the given number of them."""

    def __init__(self, steps, only=None):
        self.steps, self.only = steps, only

    def start(self, rows):
        return {}

    def apply(self, scores, view, state):
        dead = view.step >= self.steps
        if self.only is not None:
            dead = dead & (view.prefix[:, -1] == self.only)
        return scores.keep(~dead[:, None].expand_as(scores.values), keeps_peak=False)

    def after(self, state, choice):
        return state


def test_a_dead_end_is_an_error_only_where_nothing_has_ended_and_no_beam_is_left():
    whole = random_tree(4, 51)
    with pytest.raises(EmptySupportError, match="request 0"):
        search(whole, 4, num_beams=2, max_new_tokens=4, transforms=[OnlyWhile(2)])
    got, _ = search(whole, 4, num_beams=4, max_new_tokens=3, transforms=[OnlyWhile(1, only=2)])
    assert got and all(ids[0] != 2 for ids, _ in got)
    for late in (False, True):  # transforms that cannot do with an empty row
        rest = [OnlyWhile(1, only=2), Normalize(), Typical(0.999999)]
        past, _ = search(whole, 4, late=late, num_beams=4, max_new_tokens=3, transforms=rest)
        agree(past, got, 1e-6)
    got, result = search(
        table({(): {0: 0.5, 1: 0.5}}, 2), 2, num_beams=2, max_new_tokens=4, eos_ids=(1,), transforms=[OnlyWhile(1)]
    )
    assert [ids for ids, _ in got] == [(1,)] and result.steps == 2


class Raised(Alternate):
    """Adds 1 to each log-probability: a score that is no longer normalised."""

    accepts = frozenset({LOGPROB})

    def start(self, rows):
        return {}

    def apply(self, scores, view, state):
        return scores.with_values(scores.values + 1)

    def after(self, state, choice):
        return state


def test_log_probabilities_are_added_up_as_the_transforms_leave_them():
    whole = random_tree(4, 52)
    plain, _ = search(whole, 4, num_beams=3, max_new_tokens=3)
    options = {"num_beams": 3, "max_new_tokens": 3, "transforms": [Normalize(), Raised()]}
    raised, _ = search(whole, 4, renormalize=False, **options)
    agree(raised, [(ids, score + 3) for ids, score in plain])
    again, _ = search(whole, 4, **options)
    agree(again, plain)
    with pytest.raises(ValueError, match="which gives raw scores"):
        search(whole, 4, num_beams=3, max_new_tokens=3, transforms=[Raised()])
    with pytest.raises(ValueError, match="must make log-probabilities"):
        search(whole, 4, num_beams=3, max_new_tokens=3, renormalize=False)


def test_flat_indices_are_divided_as_integers():
    parents, tokens = split_flat(torch.tensor([0, 151_935, 151_936, 30_387_199, 2**40]), 151_936)
    assert parents.tolist() == [0, 0, 1, 199, 2**40 // 151_936]
    assert tokens.tolist() == [0, 151_935, 0, 151_935, 2**40 % 151_936]


class Cache:
    """What Transformers' caches do."""

    def __init__(self, rows):
        self.rows = rows

    def reorder_cache(self, index):
        self.rows = self.rows.index_select(0, index)


def test_every_kind_of_state_follows_the_parents():
    rows = torch.arange(4) * 10
    streams = Streams.of([1, 2, 3, 4])
    choice = Choice(rows, rows.double(), rows > 5)
    state = {"tensor": rows, "deep": [(rows, rows.view(4, 1)), None, 3, "text"], "choice": choice, "scalar": rows[1]}
    cache = Cache(rows)
    moved = reorder({**state, "streams": streams, "cache": cache}, torch.tensor([[1, 1], [0, 1]]))
    expected = [10, 10, 20, 30]
    assert moved["tensor"].tolist() == expected and moved["deep"][0][0].tolist() == expected
    assert moved["deep"][0][1].tolist() == [[v] for v in expected] and moved["deep"][1:] == [None, 3, "text"]
    assert isinstance(moved["choice"], Choice) and moved["choice"].active.tolist() == [True, True, True, True]
    assert moved["scalar"].item() == 10 and moved["cache"] is cache and cache.rows.tolist() == expected
    assert rows.tolist() == [0, 10, 20, 30], "the caller's state was changed"
    policy = reorder(PolicyState(streams, ({"mu": rows},), torch.arange(4), "digest"), torch.tensor([1, 1, 2, 3]))
    assert policy.states[0]["mu"].tolist() == expected and policy.origin.tolist() == [1, 1, 2, 3]
    for moved_streams in (moved["streams"], policy.streams):
        drawn = moved_streams.bits()
        assert drawn[0] == streams.bits()[1], "the first child goes on with its parent's stream"
        assert len(set(drawn.tolist())) == 4, "beams of one parent draw different numbers"


def test_state_grows_from_requests_to_beams_and_errors_name_the_place():
    rows = torch.arange(2)
    assert reorder((rows,), torch.tensor([[0, 0, 0], [0, 0, 0]]), beams=1)[0].tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"state\['a'\]\[1\] has 2 rows"):
        reorder({"a": [torch.arange(4), rows]}, torch.tensor([[0, 1], [0, 1]]))
    with pytest.raises(ValueError, match=r"parent 2 of request 1 is outside \[0, 2\)"):
        reorder(rows, torch.tensor([[0, 1], [2, 0]]))
    with pytest.raises(TypeError, match=r"state\['b'\] is a object"):
        reorder({"b": object()}, torch.tensor([0]))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_beams": 0}, ValueError, "num_beams must be an integer of at least 1, got 0"),
        ({"num_beams": 2.0}, ValueError, "got 2.0"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"eos_ids": [5]}, TokenRangeError, "5, outside"),
        ({"groups": 2, "num_beams": 3}, ValueError, "divide"),
        ({"diversity_penalty": -1.0}, ValueError, "at least 0, got -1.0"),
        ({"length_penalty": math.nan}, ValueError, "alpha"),
        ({"length_penalty": 5000.0}, ValueError, "5000 is too far from 0 for 2 tokens"),
        ({"length_penalty": -5000.0}, ValueError, "alpha -5000"),
        ({"early_stopping": "maybe"}, ValueError, "maybe"),
        ({"num_return": 3}, ValueError, "num_return 3 is above num_beams 2"),
        ({"prompts": [[0, 7]]}, TokenRangeError, "prompt 0 holds id 7 at position 1"),
        ({"prompts": []}, ValueError, "B of at least 1"),
        ({"prompts": [[0, 1.5]]}, ValueError, "got 1.5"),
        ({"coverage": Coverage(1.0)}, ValueError, "attention"),
    ],
)
def test_bad_options_are_errors_that_name_the_value(options, error, words):
    shard = one_rank(5)
    given = {"prompts": [[0]], "num_beams": 2, "max_new_tokens": 2, **options}
    with pytest.raises(error, match=words):
        beam_search(Toy(shard, lambda _, ids: [0.0] * 5, [1]), given.pop("prompts"), shard=shard, **given)


def test_a_model_that_gives_nan_or_other_rows_is_an_error():
    shard = one_rank(5)
    with pytest.raises(NonFiniteError, match="row 0"):
        search(lambda ids: [0.0, math.nan, 0.0, 0.0, 0.0], 5, num_beams=2, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"expected \[1, 5\]"):
        beam_search(lambda *_: Stepped(torch.zeros(2, 5)), [[0]], shard=shard, num_beams=2, max_new_tokens=2)
