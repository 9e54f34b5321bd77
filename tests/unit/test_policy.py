"""A policy on one process: order, types, files, fallbacks, state, trace; and equal to the oracle on random chains."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from tests.unit.policies import VOCAB, Keep, alone, chain_of, every_transform, logits_of, request_lists
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.policy_file import TRANSFORMS
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.transforms.constraints import Fsm
from vocab_parallel.decode.transforms.controllers import MirostatV2
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.machine import StateMachine
from vocab_parallel.decode.transforms.penalties import RecentPenalties
from vocab_parallel.decode.transforms.processors import Bias, RepetitionPenalty, Suppress
from vocab_parallel.decode.transforms.transform import PROBABILITY, Transform, View, row_values
from vocab_parallel.decode.transforms.warpers import Temperature, TopK, TopP
from vocab_parallel.errors import (
    ConfigError,
    EmptySupportError,
    LayoutMismatchError,
    NonFiniteError,
    TokenRangeError,
)
from vocab_parallel.reference.policy import run_policy
from vocab_parallel.select.logprobs import top_logprobs
from vocab_parallel.select.streams import Streams


def step_of(policy, logits, prefixes=None, **options):
    """One step of new requests, streams by row number."""
    rows = len(logits)
    view = View.of(prefixes or [[]] * rows)
    state = policy.start(rows, Streams.of(list(range(rows))))
    return policy.step(logits, view, state, shard=alone(logits.shape[1]), **options)


@dataclasses.dataclass(frozen=True, eq=False)
class ToProbability(Transform):
    name = "to_probability"
    gives = PROBABILITY


# order and types


def test_the_worked_row_keeps_two_tokens_with_their_renormalised_probabilities():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]])
    policy = Policy((Suppress([2]), Temperature(2.0), TopK(3), TopP(0.8)))
    step = step_of(policy, logits, top_logprobs=3)
    assert step.top.token_ids.tolist() == [[0, 1, -1]]
    assert step.top.logprobs[0, :2].exp().tolist() == pytest.approx([0.6225, 0.3775], abs=1e-4)


def test_every_edge_has_the_type_of_its_scores():
    policy = Policy((Suppress([1]), Temperature(0.7), Normalize(), TopP(0.9)))
    assert [tuple(edge) for edge in policy.edges()] == [
        ("suppress", "raw", "processed"),
        ("temperature", "processed", "processed"),
        ("normalize", "processed", "logprob"),
        ("top_p", "logprob", "processed"),
    ]


def test_an_impossible_order_names_both_transforms():
    with pytest.raises(ValueError, match=r"'top_p' cannot follow 'to_probability', which gives probability"):
        Policy((ToProbability(), TopP(0.9)))
    with pytest.raises(ValueError, match=r"selector 'sample' cannot follow 'to_probability'"):
        Policy((ToProbability(),))


def test_the_order_of_two_transforms_changes_what_is_left():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    first = Policy((Temperature(4.0), TopP(0.8)))
    last = Policy((TopP(0.8), Temperature(4.0)))
    assert step_of(first, logits, trace=True).trace.support.tolist() == [3]
    assert step_of(last, logits, trace=True).trace.support.tolist() == [2]


# files


@pytest.mark.parametrize("transform", every_transform(), ids=lambda one: one.name)
def test_a_transform_comes_back_from_json_as_it_was(transform):
    policy = Policy((transform,), name="one")
    again = Policy.from_dict(json.loads(policy.to_json()))
    assert again.transforms == (transform,)
    assert (again.name, again.digest) == ("one", policy.digest)


def test_every_transform_of_the_package_is_tested_in_a_file():
    assert {one.name for one in TRANSFORMS} == {one.name for one in every_transform()}
    assert len({one.name for one in TRANSFORMS}) == len(TRANSFORMS)


def test_a_policy_comes_back_whole():
    policy = Policy(
        (Suppress([1]), TopP(0.9)), selector="greedy", fallback={"token": 2}, vocab_size=9, name="mine",
        special_ids={"eos": 2},
    )  # fmt: skip
    again = Policy.from_dict(json.loads(policy.to_json()))
    assert again.to_dict() == policy.to_dict()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"transforms": [{"name": "top_pp", "p": 0.9}]}, "did you mean top_p?"),
        ({"transforms": [{"name": "temperature", "temprature": 0.9}]}, "did you mean temperature?"),
        ({"transform": []}, "did you mean transforms?"),
        ({"transforms": [], "version": 2}, "version 2"),
        ({"transforms": [{"p": 0.9}]}, r"transforms\[0\]"),
        ({"transforms": [{"name": "suppress"}]}, "token_ids"),
        ({"transforms": "top_p"}, "expected a list"),
        ([], "mapping"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(data, words):
    with pytest.raises(ConfigError, match=words):
        Policy.from_dict(data)


def test_a_file_may_hold_transforms_of_the_user_and_names_alone():
    policy = Policy.from_dict({"transforms": [{"name": "keep", "ids": [1]}, "normalize"]}, more=(Keep,))
    assert isinstance(policy.transforms[0], Keep)
    assert isinstance(policy.transforms[1], Normalize)


def test_the_digest_is_of_what_decides():
    policy = Policy((TopP(0.9),), name="a")
    assert policy.digest == Policy((TopP(0.9),), name="b", vocab_size=9).digest
    assert policy.digest != Policy((TopP(0.8),), name="a").digest
    assert policy.digest != Policy((TopP(0.9),), selector="greedy", name="a").digest
    assert policy.digest != Policy((TopP(0.9),), fallback={"undo": True}, name="a").digest


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Policy((TopP(0.0),)), ValueError, "top_p's p"),
        (lambda: Policy((TopP((0.5, 1.5)),)), ValueError, "row 1"),
        (lambda: Policy((TopK(0),)), ValueError, "top_k's k"),
        (lambda: Policy((Temperature(-1.0),)), ValueError, "-1.0"),
        (lambda: Policy((Temperature(math.nan),)), ValueError, "nan"),
        (lambda: Policy((Suppress([9]),), vocab_size=9), TokenRangeError, "9"),
        (lambda: Policy((Suppress([-1]),)), TokenRangeError, "-1"),
        (lambda: Policy(fallback={"token": 9}, vocab_size=9), TokenRangeError, "9"),
        (lambda: Policy(special_ids={"eos": 9}, vocab_size=9), TokenRangeError, "eos"),
        (lambda: Policy(fallback="restore"), ValueError, "restore"),
        (lambda: Policy(fallback={"undo": False}), ValueError, "undo"),
        (lambda: Policy(selector="argmax"), ValueError, "argmax"),
        (lambda: Policy((0.9,)), ValueError, "0.9"),
        (lambda: Policy(vocab_size="9"), ValueError, "vocab_size"),
        (lambda: Policy(special_ids={"fallback": 9}, fallback={"token": 1}, vocab_size=9), TokenRangeError, "9"),
        (lambda: Policy((Bias(table=torch.zeros(3)),), vocab_size=9), LayoutMismatchError, "table"),
    ],
)
def test_a_bad_policy_is_refused_when_it_is_made(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_table_waits_for_the_vocabulary():
    policy = Policy((Bias(table=torch.zeros(3)),))
    with pytest.raises(LayoutMismatchError, match="table"):
        policy.for_vocabulary(9)
    with pytest.raises(LayoutMismatchError, match="table"):
        step_of(policy, torch.zeros(1, 9))
    assert step_of(policy, torch.zeros(1, 3)).token_ids.shape == (1,)


def test_a_policy_for_another_vocabulary_is_refused():
    with pytest.raises(LayoutMismatchError, match="vocabulary of 9, the shard's is 5"):
        step_of(Policy(vocab_size=9), torch.zeros(1, 5))


# rows without a token


def test_an_empty_row_names_row_step_and_transform():
    policy = Policy((Suppress([0]), Keep((0, 3)), TopP(0.9)), name="tight")
    logits = torch.zeros(3, 4)
    logits[1, 3] = -torch.inf
    with pytest.raises(EmptySupportError, match=r"row 1, step 0: no token is left after 'keep' \(transform 2 of pol"):
        step_of(policy, logits)


def test_an_empty_row_is_named_by_its_number_in_the_batch_although_others_are_inactive():
    policy = Policy((Suppress([0, 1, 2, 3]), TopP(0.9)))
    state = policy.start(4, Streams.of([0] * 4))
    view = View.of([[1, 1], [1], [1, 2, 3], [1]], [1, 1, 1, 1])
    active = torch.tensor([False, False, True, True])
    with pytest.raises(EmptySupportError, match="row 2, step 2"):
        policy.step(torch.zeros(4, 4), view, state, shard=alone(4), active=active)


def test_a_model_that_gives_no_token_is_told_from_a_transform_that_leaves_none():
    with pytest.raises(EmptySupportError, match=r"row 0, step 0: .*before any transform"):
        step_of(Policy((TopP(0.9),)), torch.full((1, 4), -torch.inf))
    with pytest.raises(EmptySupportError, match="before any transform"):
        step_of(Policy(selector="greedy"), torch.full((1, 4), -torch.inf))


def test_the_declared_token_is_chosen_where_the_constraints_allow_it():
    policy = Policy((Suppress([0]), Keep((0, 3)), TopP(0.9)), fallback={"token": 2})
    logits = torch.zeros(2, 4)
    logits[1, 3] = -torch.inf
    step = step_of(policy, logits, trace=True)
    assert step.token_ids.tolist() == [3, 2]
    assert step.logprobs.tolist() == [0.0, 0.0]
    assert step.trace.reason(0) is None
    assert step.trace.reason(1) == "keep left no token: token 2 was chosen"
    assert step.state.streams.draws.tolist() == [1, 1], "a fallback draws like any other row"


@pytest.mark.parametrize(
    "transforms",
    [
        (Keep((0,)), Suppress([0, 2])),
        (Suppress(range(4)), Suppress([0])),
        (Suppress([2]), Keep(())),
        (Suppress([2]), TopK(1), Keep(())),
    ],
)
def test_the_declared_token_is_refused_where_a_constraint_forbids_it(transforms):
    policy = Policy(transforms, fallback={"token": 2})
    with pytest.raises(EmptySupportError, match=r"row 0, step 0: .*fallback's token 2 is not legal"):
        step_of(policy, torch.zeros(1, 4))


def test_undo_restores_what_a_filter_removed_and_the_rest_of_the_chain_goes_on():
    policy = Policy((Suppress([0]), Keep((0,)), TopK(1)), fallback={"undo": True})
    step = step_of(policy, torch.tensor([[5.0, 1.0, 2.0, 0.0]]), trace=True)
    assert step.token_ids.tolist() == [2], "not 0, which a hard constraint forbids"
    assert step.trace.reason(0) == "keep left no token: it was undone"
    assert step.trace.removed.tolist() == [[1, 0, 2]]


def test_undo_restores_candidates_and_all_that_was_undone_is_named():
    policy = Policy((TopK(2), Keep((3,)), Keep((0,)), Keep((1,))), fallback={"undo": True})
    trace = step_of(policy, torch.tensor([[5.0, 1.0, 2.0, 0.0]]), trace=True).trace
    assert trace.reason(0) == "keep, keep left no token: it was undone"
    assert trace.removed.tolist() == [[2, 0, 1, 0]]
    assert trace.emptied.tolist() == [[False, True, False, True]]


def test_undo_never_undoes_a_hard_constraint():
    policy = Policy((Keep((0,)), Suppress([0])), fallback={"undo": True})
    with pytest.raises(EmptySupportError, match=r"after 'suppress'.*never undone"):
        step_of(policy, torch.zeros(1, 4))
    forbidding = Policy((Keep((0,)), Bias({0: -math.inf})), fallback={"undo": True})
    with pytest.raises(EmptySupportError, match="after 'bias'"):
        step_of(forbidding, torch.zeros(1, 4))


def test_a_fallback_changes_nothing_where_a_token_is_left():
    logits = logits_of(0, 20)
    plain = step_of(Policy((TopP(0.9),)), logits)
    for fallback in ({"token": 2}, {"undo": True}):
        other = step_of(Policy((TopP(0.9),), fallback=fallback), logits, trace=True)
        assert torch.equal(other.token_ids, plain.token_ids)
        assert [other.trace.reason(row) for row in range(20)] == [None] * 20


# requests


def test_rows_with_temperature_zero_are_greedy_beside_rows_that_draw():
    logits = logits_of(1, 200)
    policy = Policy((Temperature([0.0, 1.0] * 100),))
    step = step_of(policy, logits)
    assert torch.equal(step.token_ids[::2], logits[::2].argmax(1))
    assert not torch.equal(step.token_ids[1::2], logits[1::2].argmax(1))
    assert (step.logprobs[::2] == 0).all()


def test_the_greedy_selector_draws_nothing_and_reports_the_whole_distribution():
    logits = logits_of(2, 5)
    policy = Policy((RepetitionPenalty(1.5),), selector="greedy")
    state = policy.start(5)
    step = policy.step(logits, View.of([[]] * 5), state, shard=alone())
    assert torch.equal(step.token_ids, logits.argmax(1))
    expected = logits.double().log_softmax(1).amax(1)
    assert torch.allclose(step.logprobs, expected, atol=1e-9)
    assert torch.equal(step.state.streams.draws, state.streams.draws)


def test_a_sampling_policy_needs_streams():
    with pytest.raises(ValueError, match=r"policy\.start\(rows, Streams\.of"):
        Policy().start(2)


def test_an_inactive_row_draws_nothing_and_keeps_its_state_and_may_hold_nan():
    policy = Policy((MirostatV2(2.0, 0.3),))
    logits = logits_of(3, 3)
    state = policy.start(3, Streams.of([1, 2, 3]))
    with_nan = logits.clone()
    with_nan[1] = torch.nan
    active = torch.tensor([True, False, True])
    view = View.of([[1], [2], [3]])
    step = policy.step(with_nan, view, state, shard=alone(), active=active, trace=True, top_logprobs=2)
    whole = policy.step(logits, view, state, shard=alone())
    assert step.token_ids.tolist() == [whole.token_ids[0], -1, whole.token_ids[2]]
    assert step.logprobs[1] == 0
    assert step.state.streams.draws.tolist() == [1, 0, 1]
    assert step.state.states[0]["mu"][1] == 4.0
    assert step.state.states[0]["mu"][0] == whole.state.states[0]["mu"][0] != 4.0
    assert step.trace.draw.tolist() == [0, -1, 0]
    assert step.trace.entropy[1].isnan()
    assert [row["row"] for row in step.trace.to_dicts()] == [0, 2]
    assert step.top.token_ids[1].tolist() == [-1, -1]


def test_a_step_without_active_rows_changes_nothing():
    policy = Policy((TopP(0.9),))
    state = policy.start(2, Streams.of([1, 2]))
    active = torch.zeros(2, dtype=torch.bool)
    for trace in (False, True):
        step = policy.step(
            logits_of(0, 2), View.of([[1], [1]]), state, shard=alone(), active=active, trace=trace, top_logprobs=2
        )
        assert step.token_ids.tolist() == [-1, -1]
        assert step.state.state_dict() == state.state_dict()


def test_per_row_parameters_follow_their_requests_when_the_batch_changes():
    logits = logits_of(4, 4)
    policy = Policy((Temperature((0.0, 1.0, 0.5, 2.0)), MirostatV2((1.0, 2.0, 3.0, 4.0), 0.2)))
    state = policy.start(4, Streams.of([1, 2, 3, 4]))
    view = View.of([[1], [2], [3], [4]])
    whole = policy.step(logits, view, state, shard=alone())
    index = torch.tensor([3, 0, 2])
    part = policy.step(logits[index], view.rows(index), state.rows(index), shard=alone())
    assert torch.equal(part.token_ids, whole.token_ids[index])
    assert part.state.rows([1]).state_dict() == whole.state.rows([0]).state_dict()


def test_a_request_draws_the_same_alone_and_in_any_batch():
    logits = logits_of(5, 30)
    policy = Policy((Temperature(0.9), TopP(0.95), MirostatV2()))
    state = policy.start(30, Streams.of([7] * 30, list(range(30))))
    view = View.of([[row % 9] for row in range(30)])
    whole = policy.step(logits, view, state, shard=alone())
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    shuffled = policy.step(logits[order], view.rows(order), state.rows(order), shard=alone())
    assert torch.equal(shuffled.token_ids, whole.token_ids[order])
    for row in range(30):
        one = torch.tensor([row])
        step = policy.step(logits[one], view.rows(one), state.rows(one), shard=alone())
        assert step.token_ids.item() == whole.token_ids[row]
        assert step.state.state_dict() == whole.state.rows(one).state_dict()


def generate(policy, state, view, steps, seed=6):
    ids = []
    for at in range(steps):
        step = policy.step(logits_of(seed + at, len(state)), view, state, shard=alone())
        state, view = step.state, view.appended(step.token_ids)
        ids.append(step.token_ids.tolist())
    return ids, state, view


def test_a_saved_state_goes_on_with_the_same_tokens():
    machine = StateMachine.from_regex("(1 [0-8] . | 2 3+ 4 | [5-8] .){1,6}")
    policy = Policy((Fsm(machine), RepetitionPenalty(1.2), Temperature(1.3), MirostatV2(1.5, 0.4)))
    state = policy.start(6, Streams.of(list(range(6))))
    view = View.of([[row] for row in range(6)])
    _, middle, seen = generate(policy, state, view, 3)
    saved = json.dumps(middle.state_dict())
    ids, after, _ = generate(policy, middle, seen, 3, seed=20)
    restored = PolicyState.from_state_dict(json.loads(saved))
    again, after_again, _ = generate(policy, restored, seen, 3, seed=20)
    assert again == ids
    assert after_again.state_dict() == after.state_dict()


def test_copies_of_a_request_draw_alike_unless_they_are_forked():
    policy = Policy()
    state = policy.start(1, Streams.of([5])).rows([0] * 50)
    forked = policy.start(1, Streams.of([5])).rows(torch.zeros(50, dtype=torch.int64), children=torch.arange(50))
    logits, view = torch.zeros(50, VOCAB), View.of([[]] * 50)
    assert len(set(policy.step(logits, view, state, shard=alone()).token_ids.tolist())) == 1
    drawn = policy.step(logits, view, forked, shard=alone()).token_ids
    assert len(set(drawn.tolist())) > 3
    assert drawn[0] == policy.step(logits, view, state, shard=alone()).token_ids[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"version": 9}, "version 9"), ({"states": None}, "states"), ({"origin": [0, 0]}, "2 requests")],
)
def test_a_broken_saved_state_is_refused(change, words):
    saved = {**Policy().start(1, Streams.of([1])).state_dict(), **change}
    saved = {key: value for key, value in saved.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        PolicyState.from_state_dict(saved)


def test_a_step_changes_nothing_that_it_was_given():
    policy = Policy((Bias({1: 2.0}), Temperature(0.5), TopP(0.9), MirostatV2()), fallback={"undo": True})
    logits, view = logits_of(7, 3), View.of([[1], [2], [3]])
    state = policy.start(3, Streams.of([1, 2, 3]))
    before = logits.clone(), view.prefix.clone(), json.dumps(state.state_dict())
    policy.step(logits, view, state, shard=alone(), trace=True, active=torch.tensor([True, False, True]))
    assert torch.equal(logits, before[0])
    assert torch.equal(view.prefix, before[1])
    assert json.dumps(state.state_dict()) == before[2]


# bad input


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rows": 3}, ValueError, "state is of 3 requests, the logits of 2 rows"),
        ({"prefixes": [[1]]}, ValueError, "view is of 1 requests"),
        ({"prefixes": [[1], [9]]}, TokenRangeError, "id 9"),
        ({"prefixes": torch.ones(2, 1)}, ValueError, r"prefix must be int64 \[T, L\], got torch.float32"),
        ({"logits": torch.zeros(2, 8)}, LayoutMismatchError, "8 columns"),
        ({"logits": torch.zeros(9)}, LayoutMismatchError, r"\[T, 9\]"),
        ({"logits": torch.tensor([[0.0] * 9, [math.nan] * 9])}, NonFiniteError, "row 1"),
        ({"logits": torch.tensor([[0.0] * 9, [math.inf] * 9])}, NonFiniteError, "row 1"),
        ({"active": torch.ones(3, dtype=torch.bool)}, ValueError, "active"),
        ({"active": torch.ones(2)}, ValueError, "active"),
        ({"top_logprobs": 10}, ValueError, "10"),
        ({"logprobs": "cooked"}, ValueError, "cooked"),
        ({"policy": Policy((TopP(0.5),))}, ValueError, "the state is of policy"),
    ],
)
def test_bad_input_is_named(change, error, words):
    policy = Policy((TopP(0.9),))
    rows = change.pop("rows", 2)
    state = policy.start(rows, Streams.of([1] * rows))
    view = View.of(change.pop("prefixes", [[1], [2]]))
    logits = change.pop("logits", torch.zeros(2, 9))
    with pytest.raises(error, match=words):
        change.pop("policy", policy).step(logits, view, state, shard=alone(9), **change)


def test_streams_and_parameters_of_another_batch_are_refused_at_the_start():
    with pytest.raises(ValueError, match="streams of 2 rows for 3 rows"):
        Policy().start(3, Streams.of([1, 2]))
    with pytest.raises(ValueError, match="2 values for 3 rows"):
        Policy((Temperature((0.5, 0.7)),)).start(3, Streams.of([1, 2, 3]))


# log-probabilities and trace


def test_log_probabilities_are_of_the_distribution_that_was_asked_for():
    logits = logits_of(8, 6)
    policy = Policy((Suppress([0]), Temperature(0.5)))
    raw = step_of(policy, logits, top_logprobs=4, logprobs="raw")
    processed = step_of(policy, logits, top_logprobs=4)
    assert torch.equal(raw.token_ids, processed.token_ids)
    changed = logits.double()
    changed[:, 0] = -torch.inf
    for step, scores in ((raw, logits.double()), (processed, changed / 0.5)):
        expected = scores.log_softmax(1)
        values, ids = expected.sort(dim=1, descending=True, stable=True)
        assert torch.equal(step.top.token_ids, ids[:, :4])
        assert torch.allclose(step.top.logprobs, values[:, :4], atol=1e-9)
        assert torch.allclose(step.logprobs, expected.gather(1, step.token_ids[:, None])[:, 0], atol=1e-9)


def test_top_logprobs_of_logits_ends_with_the_support():
    logits = torch.tensor([[[1.0, -torch.inf, 2.0]], [[0.0, 0.0, 0.0]]]).bfloat16()
    top = top_logprobs(logits, 3, shard=alone(3))
    assert top.token_ids.tolist() == [[[2, 0, -1]], [[0, 1, 2]]]
    assert top.logprobs[0, 0].exp().tolist() == pytest.approx([0.7311, 0.2689, 0.0], abs=1e-4)
    for bad in (0, 4, True):
        with pytest.raises(ValueError, match="n must be"):
            top_logprobs(logits, bad, shard=alone(3))


def test_a_trace_says_what_happened():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0]] * 2)
    policy = Policy((Suppress([2]), Temperature(2.0), TopK(3), TopP(0.8)), special_ids={"eos": 2, "pad": 4})
    step = step_of(policy, logits, trace=True, removed_ids=True)
    trace, row = step.trace, step.trace.to_dicts()[0]
    kept = torch.tensor([1.5, 1.0], dtype=torch.float64)
    assert trace.transforms == ("suppress", "temperature", "top_k", "top_p")
    assert trace.removed[0].tolist() == [1, 0, 1, 1]
    assert (trace.support[0], trace.legal[0]) == (2, 4)
    assert trace.margin[0] == 0.5
    assert trace.entropy[0].item() == pytest.approx(torch.special.entr(kept.softmax(0)).sum().item(), abs=1e-9)
    chosen = int(step.token_ids[0])
    assert trace.raw_score[0] == logits[0, chosen]
    assert trace.score[0] == logits[0, chosen] / 2
    assert trace.logprob[0] == step.logprobs[0]
    assert row["removed"] == [["suppress", 1], ["temperature", 0], ["top_k", 1], ["top_p", 1]]
    assert row["removed_special"] == {"eos": ["suppress"], "pad": ["top_k"]}
    assert row["fallback"] is None
    assert row["draw"] == 0
    json.dumps(trace.to_dicts())


def test_normalized_scores_are_log_probabilities_of_what_is_left():
    logits = logits_of(4, 5) + 1000.0
    step = step_of(Policy((Suppress([1]), TopK(3), Normalize())), logits, trace=True)
    assert torch.allclose(step.trace.score, step.logprobs, atol=1e-6)
    assert (step.trace.score < 0).all()


def test_the_margin_of_a_single_token_is_infinite_and_no_number_in_json():
    trace = step_of(Policy((TopK(1),)), logits_of(0, 1), trace=True).trace
    assert trace.margin.tolist() == [math.inf]
    assert trace.to_dicts()[0]["margin"] is None
    assert "Infinity" not in json.dumps(trace.to_dicts())


def test_a_trace_changes_no_token():
    logits = logits_of(9, 50)
    policy = Policy((Suppress([1]), Temperature(0.8), TopK(4), TopP(0.9)))
    plain, traced = step_of(policy, logits), step_of(policy, logits, trace=True)
    assert torch.equal(plain.token_ids, traced.token_ids)
    assert torch.equal(plain.logprobs, traced.logprobs)
    assert plain.trace is None


# views, parameters, penalties


def test_a_view_tells_generated_ids_from_the_prompt_wherever_the_padding_is():
    left = View.of(torch.tensor([[-1, 4, 5, 6], [1, 2, 3, 4]]), [1, 2])
    right = View.of([[4, 5, 6], [1, 2, 3, 4]], [1, 2])
    assert left.generated().tolist() == [[-1, -1, 5, 6], [-1, -1, 3, 4]]
    assert right.generated().tolist() == [[-1, 5, 6, -1], [-1, -1, 3, 4]]
    assert left.step.tolist() == right.step.tolist() == [2, 2]
    longer = left.appended(torch.tensor([7, -1]))
    assert longer.generated().tolist() == [[-1, -1, 5, 6, 7], [-1, -1, 3, 4, -1]]
    assert longer.step.tolist() == [3, 2]
    assert longer.rows(torch.tensor([1])).prefix.tolist() == [[1, 2, 3, 4, -1]]


@pytest.mark.parametrize(
    ("length", "words"), [([1], r"\[2\]"), ([1, 3], r"row 1 must be in \[0, 2\].*got 3"), ([-1, 0], "row 0.*got -1")]
)
def test_a_prompt_length_that_cannot_be_is_refused(length, words):
    with pytest.raises(ValueError, match=words):
        View.of([[1, 2], [3, 4]], length)


def test_rows_are_taken_by_number_or_by_a_flag_for_each():
    view, state = View.of([[1], [2], [3]]), Policy().start(3, Streams.of([1, 2, 3]))
    for index in ([0, 2], torch.tensor([0, 2]), torch.tensor([True, False, True])):
        assert view.rows(index).prefix.tolist() == [[1], [3]]
        assert state.rows(index).streams.seeds.tolist() == [1, 3]
    assert (len(view.rows([]).prefix), len(state.rows([]))) == (0, 0)


def test_a_view_takes_rows_of_extras_by_their_dimension():
    extras = {"similarity": torch.arange(6.0).reshape(3, 2), "layers": torch.arange(12.0).reshape(2, 3, 2)}
    view = View.of([[1], [2], [3]], extras=extras).rows(torch.tensor([2, 0]))
    assert view.extras["similarity"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert view.extras["layers"].shape == (2, 2, 2)
    assert view.extras["layers"][0].tolist() == [[4.0, 5.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "True"),
        (math.nan, "nan"),
        ("1", "'1'"),
        (-0.5, "-0.5"),
        ([1.0, math.nan], "row 1"),
        ([1.0] * 3, "3 values"),
    ],
)
def test_a_bad_parameter_names_row_and_value(value, words):
    with pytest.raises(ValueError, match=words):
        row_values(value, 2, "alpha", low=0.0)


def test_whole_numbers_are_required_where_they_are_meant():
    assert row_values((3, 4), 2, "k", dtype=torch.int64).tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"an integer.*2\.5"):
        row_values(2.5, 1, "k", dtype=torch.int64)


def test_recent_penalties_look_at_the_last_ids_only():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0]])
    shown = step_of(Policy((RecentPenalties(3, 2.0, 0.5, 0.25),)), logits, [[0, 3, 1, 1, 2]], top_logprobs=4)
    # last three: 1, 1, 2. id 1: -2 * 2 - (2 * 0.5 + 0.25), id 2: 1 / 2 - 0.75
    expected = torch.tensor([[2.0, -5.25, -0.25, 0.0]]).double().log_softmax(1)
    assert shown.top.token_ids.tolist() == [[0, 3, 2, 1]]
    assert torch.allclose(shown.top.logprobs, expected.sort(descending=True).values, atol=1e-9)


# the oracle


@pytest.mark.parametrize("seed", range(40))
def test_random_chains_equal_the_oracle(seed):
    draw = torch.Generator().manual_seed(seed)
    rows = 5
    policy = chain_of(seed, rows)
    logits = logits_of(seed, rows, torch.bfloat16 if seed % 3 == 0 else torch.float32, masked=seed % 2 == 0)
    prompts, generated = request_lists(draw, rows)
    view = View.of([[*p, *g] for p, g in zip(prompts, generated, strict=True)], [len(p) for p in prompts])
    state = policy.start(rows, Streams.of([seed] * rows, list(range(rows))))
    step = policy.step(logits, view, state, shard=alone())
    expected = run_policy(policy.to_dict(), logits, prompts, generated, state.streams.bits())
    assert torch.equal(step.token_ids, expected.token_ids), policy.to_json()
    assert torch.allclose(step.logprobs, expected.logprobs, atol=1e-5)


def test_random_chains_hold_all_transforms_but_those_with_tests_of_their_own():
    """These need a machine, or the caller's data."""
    names = {one.name for seed in range(30) for one in chain_of(seed, 2, longest=22).transforms}
    assert {one.name for one in TRANSFORMS} - names == {"fsm", "contrastive", "dola"}
