"""Processors and contrasts in one process: values worked out by hand, files, rows, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.multirank.processor_cases import PROCESSORS, SCOPES, processor, requests
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.transforms.constraints import Fsm
from vocab_parallel.decode.transforms.contrast import (
    Candidates,
    Contrastive,
    Dola,
    contrastive_candidates,
    contrastive_select,
)
from vocab_parallel.decode.transforms.history import aligned
from vocab_parallel.decode.transforms.processors import (
    BadWords,
    Bias,
    Force,
    FrequencyPenalty,
    MinLength,
    NoRepeatNgram,
    PresencePenalty,
    Prior,
    RepetitionPenalty,
    Suppress,
)
from vocab_parallel.decode.transforms.sequence import masked_sum
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.reference import processors as oracle
from vocab_parallel.select.logarithm import exact_log
from vocab_parallel.select.scores import open_scores, top_candidates

INF = math.inf


def after(transform, z, view):
    """The scores `[T, V]` after a transform, in one process."""
    shard = VocabShard(VocabLayout(z.shape[1], 1, multiple_of=1))
    transform.check(z.shape[1], len(z))
    return transform.apply(open_scores(z, shard, transform.name), view, transform.start(len(z))).values


def test_openai_penalties_have_the_values_of_their_definition():
    z = torch.tensor([[1.0, 2.0, -1.0, 0.5], [1.0, 2.0, -1.0, 0.5]])
    view = View.of([[3, 0, 0, 2, 0], [1, 1]], [1, 2])  # generated: 0, 0, 2, 0; and nothing
    assert after(FrequencyPenalty(0.25), z, view).tolist() == [[0.25, 2.0, -1.25, 0.5], [1.0, 2.0, -1.0, 0.5]]
    assert after(PresencePenalty(0.25), z, view).tolist() == [[0.75, 2.0, -1.25, 0.5], [1.0, 2.0, -1.0, 0.5]]
    both = after(PresencePenalty([0.5, 0.0]), after(FrequencyPenalty([0.25, 9.0]), z, view), view)
    assert both.tolist() == [[-0.25, 2.0, -1.75, 0.5], [1.0, 2.0, -1.0, 0.5]]
    assert after(FrequencyPenalty(0.25, "prompt"), z, view)[1].tolist() == [1.0, 1.5, -1.0, 0.5]


def test_a_repetition_penalty_lowers_both_signs_and_leaves_what_has_not_occurred():
    z = torch.tensor([[3.0, -3.0, 0.0, -INF, 2.0]])
    view = View.of([[0, 1, 2, 3, 0]])
    assert after(RepetitionPenalty(2), z, view).tolist() == [[1.5, -6.0, 0.0, -INF, 2.0]]
    assert after(RepetitionPenalty(1), z, view).tolist() == z.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_penalties_of_generated_ids_do_not_look_at_the_prompt(seed):
    drawn = requests(seed, 13)
    empty = drawn._replace(prompts=[[] for _ in drawn.prompts])
    for transform in (RepetitionPenalty(1.7, "generated"), FrequencyPenalty(0.3), PresencePenalty(0.3)):
        assert torch.equal(after(transform, drawn.z, drawn.view), after(transform, drawn.z, empty.view))


def test_bias_and_temperature_do_not_commute():
    z = torch.tensor([[0.0, 1.0]])
    biased = after(Bias({0: 2.0}), z, View.of([[]]))
    assert (biased / 2).tolist() != after(Bias({0: 2.0}), z / 2, View.of([[]])).tolist()
    assert (biased / 2).tolist() == after(Bias({0: 1.0}), z / 2, View.of([[]])).tolist()


def test_a_bias_multiplies_the_unnormalised_probability():
    z = torch.tensor([[0.3, -0.7, 1.1]], dtype=torch.float64)
    p = after(Bias({1: math.log(3.0)}), z, View.of([[]])).softmax(1)
    expected = z.softmax(1) * torch.tensor([1.0, 3.0, 1.0])
    assert torch.allclose(p, expected / expected.sum(1, keepdim=True), atol=1e-15)


def test_biases_of_one_id_are_added_in_the_order_they_are_given_in():
    sequences = [([1, 0], 1.0), ([0], 0.5), ([1, 2], 4.0), ([2, 1, 0], 0.25)]
    layers = Bias(sequences=sequences)._packed(torch.device("cpu")).layers
    assert [len(layer) for layer in layers] == [2, 1, 1], "an id once in each, or a GPU adds in any order"
    z = torch.full((1, 3), 2.0**24)
    sequences = [([0], 1.0), ([1, 0], -1.0), ([0], 2.0), ([2], -INF)]  # float32 rounds 2**24 + 1 away
    assert after(Bias({0: 2.0**24}, sequences), z, View.of([[1]])).tolist() == [[2.0**25, 2.0**24, -INF]]


def test_prior_takes_away_the_log_frequency():
    z = torch.zeros(2, 4, dtype=torch.float64)
    prior = Prior([3, 1, 0, 0], smoothing=1, strength=[1.0, 0.5])
    expected = -torch.tensor([4 / 8, 2 / 8, 1 / 8, 1 / 8], dtype=torch.float64).log()
    got = after(prior, z, View.of([[], []]))
    assert torch.allclose(got, torch.stack([expected, expected / 2]), atol=1e-15)
    with pytest.raises(ValueError, match=r"token id 2 is 0.0.*smoothing"):
        Prior([3, 1, 0, 0], smoothing=0).check(4, 1)
    with pytest.raises(ValueError, match="4 ids"):
        Prior([3, 1, 2], smoothing=1).check(4, 1)


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_equals_the_oracle_on_many_drawn_requests(name):
    for seed in range(100, 160):
        vocab = (5, 9, 30)[seed % 3]
        drawn, transform = requests(seed, vocab), processor(name, seed, vocab)
        fields = transform.to_dict()
        expected = oracle.process(fields.pop("name"), drawn.z, drawn.prompts, drawn.generated, **fields)
        before = drawn.z.clone()
        assert torch.equal(after(transform, drawn.z, drawn.view), expected), (seed, fields)
        assert torch.equal(drawn.z, before), "the scores were modified"


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_comes_back_from_its_file(name):
    for seed in range(6):
        transform = processor(name, seed, 9)
        again = type(transform).from_dict(json.loads(json.dumps(transform.to_dict())))
        assert again == transform
        drawn = requests(seed, 9)
        assert torch.equal(after(again, drawn.z, drawn.view), after(transform, drawn.z, drawn.view))


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_rows_scores_do_not_depend_on_the_other_rows(name):
    for seed in range(1, 6):
        drawn, transform = requests(seed, 13), processor(name, seed, 13)
        whole = after(transform, drawn.z, drawn.view)
        index = [4, 0, 3]
        part = after(transform.for_rows(index), drawn.z[index], drawn.view.rows(torch.tensor(index)))
        assert torch.equal(part, whole[index])


def test_hard_processors_say_so():
    hard = {Suppress, Force, MinLength, BadWords, NoRepeatNgram, Fsm}
    assert {one for one in (*PROCESSORS.values(), Fsm, Contrastive, Dola) if one.hard} == hard
    assert (
        Bias({1: -INF}).is_hard() and Bias(table=[0.0, -INF]).is_hard() and Bias(sequences=[([1, 2], -INF)]).is_hard()
    )
    assert Bias([{}, {1: -INF}]).is_hard() and not Bias({1: 3.0}, table=[0.0, 1.0]).is_hard()


def test_ids_for_each_row_are_told_from_ids_for_all():
    assert Suppress([1, 2]).row_count() is None and Suppress([[1], [], [2, 3]]).row_count() == 3
    assert BadWords([[1], [2, 3]]).row_count() is None and BadWords([[[1], [2, 3]], []]).row_count() == 2
    assert Suppress(torch.tensor([[1, 2], [3, 4]])).for_rows([1]).token_ids == ((3, 4),)
    assert MinLength(3, 7).eos_ids == (7,)
    RepetitionPenalty(torch.tensor([1.0, 2.0])).for_rows([1]).check(5, 1)
    assert RepetitionPenalty(torch.tensor(2.0)).row_count() is None
    assert Bias([{1: 2.0}, {}]).row_count() == 2 and Bias({1: 2.0}).row_count() is None


def test_padding_may_stand_anywhere_in_the_prefix():
    ids = torch.tensor([[-1, 5, -1, 6, 7, -1], [1, 2, 3, 4, 5, 6], [-1, -1, -1, -1, -1, -1]])
    assert aligned(ids).tolist() == [[-1, -1, -1, 5, 6, 7], [1, 2, 3, 4, 5, 6], [-1] * 6]


def test_the_words_of_an_out_of_range_id_name_it_and_the_field():
    for transform in (
        Suppress([0, 5]), Force([5], 0), MinLength(1, [5]), BadWords([[1], [0, 5]]), Bias({5: 1.0}),
        Bias(sequences=[([5, 1], 1.0)]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{transform.name}.*token id 5 .*\[0, 5\).*padding"):
            transform.check(5, None)
        transform.check(6, None)


@pytest.mark.parametrize("scope", ["", "All", None])
def test_an_unknown_scope_is_refused(scope):
    for transform in (RepetitionPenalty(2, scope), BadWords([[1]], scope), NoRepeatNgram(2, scope)):
        with pytest.raises(ValueError, match=f"scope must be one of .*{SCOPES[1]}"):
            transform.check(5, 1)


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (RepetitionPenalty(0), "penalty"),
        (RepetitionPenalty([1, -2]), "row 1.*-2"),
        (RepetitionPenalty(float("nan")), "nan"),
        (RepetitionPenalty(1e-60), "1e-60"),  # 0 as a float32: 0 / 0 is no score
        (Bias({1: 1e300}), "token id 1,.*1e.300"),
        (Bias(table=torch.full((9,), -1e300, dtype=torch.float64)), "token id 0,.*-1e.300"),
        (Force([1], 0, score=INF), "score.*inf"),
        (FrequencyPenalty([1, INF]), "row 1.*inf"),
        (PresencePenalty("1"), "'1'"),
        (NoRepeatNgram(-1), "-1"),
        (NoRepeatNgram(2.5), "2.5"),
        (MinLength([3, 2.0], 1), "row 1.*2.0"),
        (MinLength(True, 1), "True"),
        (Force([1], [0, 1, 2]), "3 values for 2 rows"),
        (Suppress([1], [-1]), "-1"),
        (Bias([3.0, 2.0]), "map token ids"),
        (Contrastive(2, [0.5, 1.5]), "row 1.*1.5"),
        (Contrastive(0), r"k.*\[1, 9\].*0"),
        (Contrastive(2, confidence="odds"), "odds"),
        (Dola([0.1, 1.5]), "row 1.*1.5"),
    ],
)
def test_bad_parameters_name_row_and_value(transform, words):
    with pytest.raises(ValueError, match=words):
        transform.check(9, 2)


def test_contrastive_search_by_hand():
    z = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    shard = VocabShard(VocabLayout(3, 1))
    candidates = contrastive_candidates(torch.cat([z, torch.zeros(1, 125)], 1), 2, shard=shard)
    assert isinstance(candidates, Candidates) and candidates.token_ids.tolist() == [[0, 1]]
    assert torch.allclose(candidates.probabilities, torch.tensor([[0.5, 0.3]], dtype=torch.float64), atol=1e-12)
    similarity = torch.tensor([[0.9, 0.1]])
    ids, scores = contrastive_select(candidates, similarity, 0.6, confidence="probability")
    assert ids.tolist() == [1]  # the likelier one repeats what came before
    assert torch.allclose(scores, torch.tensor([[0.4 * 0.5 - 0.54, 0.4 * 0.3 - 0.06]], dtype=torch.float64), atol=1e-7)
    assert contrastive_select(candidates, similarity, 0.0)[0].tolist() == [0], "no penalty is greedy"
    assert contrastive_select(candidates, torch.zeros(1, 2), 1.0)[0].tolist() == [0], "equal scores: the smallest id"
    with pytest.raises(ValueError, match=r"row 0.*nan"):
        contrastive_select(candidates, torch.tensor([[0.0, torch.nan]]), 0.5)
    with pytest.raises(ValueError, match=r"\[1, 3\].*\[1, 2\]"):
        contrastive_select(candidates, torch.zeros(1, 3), 0.5)


def test_contrastive_search_never_takes_an_id_without_probability():
    z = torch.tensor([[-INF, 1.0, -INF]])
    candidates = contrastive_candidates(z, 3, shard=VocabShard(VocabLayout(3, 1, multiple_of=1)))
    for confidence in ("logprob", "probability"):
        ids, _ = contrastive_select(candidates, torch.tensor([[-1.0, 1.0, -1.0]]), 1.0, confidence=confidence)
        assert ids.tolist() == [1]


def test_the_logarithm_of_the_divergence_is_exact_to_two_units():
    x = torch.cat([torch.logspace(-300, 300, 4001, dtype=torch.float64), 1 + torch.linspace(-0.5, 1, 4001).double()])
    expected = torch.tensor([math.log(one) for one in x.tolist()], dtype=torch.float64)
    assert bool(((exact_log(x) - expected).abs() <= 2 * torch.finfo(torch.float64).eps * expected.abs()).all())
    assert exact_log(torch.ones(1, dtype=torch.float64)).item() == 0.0


def test_a_masked_sum_leaves_out_what_is_masked_also_where_it_is_infinite():
    logprobs = torch.tensor([[-1.0, -INF, -0.5], [-INF, -2.0, -3.0]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    total, tokens = masked_sum(logprobs, mask)
    assert total.tolist() == [-1.5, -INF] and tokens.tolist() == [2, 2]
    total[0].backward()
    assert logprobs.grad.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert masked_sum(logprobs.detach(), mask.bool(), 0)[1].tolist() == [2, 1, 1]
    with pytest.raises(ValueError, match=r"\[2, 3\].*\[3\]"):
        masked_sum(logprobs, mask[0])


def test_candidates_that_every_rank_holds_get_the_same_scores():
    drawn = requests(3, 13)
    shard = VocabShard(VocabLayout(13, 1, multiple_of=1))
    best = top_candidates(open_scores(drawn.z, shard, "t"), 4)
    for name in PROCESSORS:
        transform = processor(name, 3, 13)
        whole = after(transform, drawn.z, drawn.view)
        assert torch.equal(transform.apply(best, drawn.view, {}).values, whole.gather(1, best.token_ids)), name
