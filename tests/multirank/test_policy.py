"""Policies over shards: the same bits as on one process at every TP size, and one error on every rank."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from tests.batch import assert_all_raise, attempt
from tests.multirank.counting import collectives
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import Batch
from tests.tolerances import bits
from tests.unit.policies import VOCAB, Keep, alone, chain_of, every_transform, logits_of, request_lists
from vocab_parallel import VocabShard
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.transforms.constraints import Fsm
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.machine import StateMachine
from vocab_parallel.decode.transforms.processors import Bias, RepetitionPenalty, Suppress
from vocab_parallel.decode.transforms.transform import Transform, View
from vocab_parallel.decode.transforms.warpers import Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from vocab_parallel.reference.policy import run_policy
from vocab_parallel.select.logprobs import top_logprobs
from vocab_parallel.select.scores import top_candidates
from vocab_parallel.select.streams import Streams

ROWS = 6


def whole_step(shard, seed):
    """One traced step of a random chain, with everything that it can return."""
    draw = torch.Generator().manual_seed(seed)
    policy = chain_of(seed, ROWS)
    dtype = (torch.bfloat16, torch.float32, torch.float64, torch.float16)[seed % 4]
    logits = logits_of(seed, ROWS, dtype, masked=seed % 3 == 0)
    prompts, generated = request_lists(draw, ROWS)
    view = View.of([[*p, *g] for p, g in zip(prompts, generated, strict=True)], [len(p) for p in prompts])
    state = policy.start(ROWS, Streams.of([seed] * ROWS, list(range(ROWS))))
    before = logits.clone()
    mine = shard.slice(logits, -1, fill=math.nan)
    step = policy.step(
        mine, view, state, shard=shard, trace=True, removed_ids=True, top_logprobs=3,
        logprobs="raw" if seed % 5 == 0 else "processed",
    )  # fmt: skip
    assert torch.equal(logits, before)
    expected = run_policy(policy.to_dict(), logits, prompts, generated, state.streams.bits())
    return bits_of(step), expected.token_ids, policy.to_json()


def bits_of(step):
    """All numbers of a step, for comparing bits."""
    found = {"ids": step.token_ids, "logprobs": step.logprobs, "state": json.dumps(step.state.state_dict())}
    if step.top is not None:
        found |= {"top ids": step.top.token_ids, "top logprobs": step.top.logprobs}
    if step.trace is not None:
        values = dataclasses.asdict(step.trace)
        found |= {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return found


def assert_same_bits(found, expected, words=""):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            mine = found[name]
            mine, value = (one.clone(memory_format=torch.contiguous_format) for one in (mine, value))
            same = (mine.dtype, mine.shape) == (value.dtype, value.shape) and torch.equal(bits(mine), bits(value))
            assert same, f"{name}: {mine} is not {value}\n{words}"
        else:
            assert found[name] == value, f"{name}\n{words}"


@dataclasses.dataclass(frozen=True)
class Edge:
    """Requests and vocabulary at an edge of what there is: nobody, one token, one row."""

    rows: int
    vocab: int


EDGE_POLICIES = (
    Policy(),
    Policy((Bias({0: 1.0}), RepetitionPenalty(1.2), Temperature(0.7), TopP(0.9), MirostatV2(), Normalize())),
    Policy((MinP(0.1), Typical(0.9), Eta(0.02), TopNSigma(2.0), DynamicTemperature(0.5, 1.5)), fallback={"token": 0}),
    Policy((TopK(4), Keep((0,)), Temperature(0.0)), fallback={"undo": True}, selector="greedy"),
)


def at_edge(shard, edge):
    """Steps of policies with all that they can return."""
    steps = []
    for policy in EDGE_POLICIES:
        state = policy.start(edge.rows, Streams.of([3] * edge.rows))
        logits = logits_of(edge.vocab, edge.rows, torch.float16, vocab=edge.vocab)
        if edge.vocab == 1:
            logits.fill_(-0.0)
        step = policy.step(
            shard.slice(logits, -1, fill=math.nan), View.of([[0]] * edge.rows), state, shard=shard, trace=True,
            top_logprobs=1,
        )  # fmt: skip
        steps.append(bits_of(step))
    return steps


def _edge(rank, edge):
    return at_edge(shard_of(edge.vocab), edge)


EDGES = [Edge(0, 9), Edge(0, 1), Edge(1, 1), Edge(3, 2)]


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("edge", EDGES, ids=str)
def test_a_step_of_no_rows_or_of_one_token_is_that_of_one_process(tp, edge):
    expected = at_edge(alone(edge.vocab), edge)
    for found in TOGETHER(tp, _edge, edge):
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)


def _chain(rank, seed):
    return whole_step(shard_of(VOCAB), seed)


CHAINS = range(24)


@TP
@pytest.mark.parametrize("seed", CHAINS)
def test_a_random_chain_is_the_oracles_and_the_same_bits_as_on_one_process(tp, seed):
    expected, _, _ = whole_step(alone(), seed)
    for found, oracle, words in TOGETHER(tp, _chain, seed):
        assert torch.equal(found["ids"], oracle), words
        assert_same_bits(found, expected, words)


# several steps: constraints, controllers, greedy rows, rows that end, a state that is saved


def long_policy():
    machine = StateMachine.from_regex("(1 [1-8] | 2 3+ 4 | [5-8] [1-8])+")
    return Policy(
        (
            Fsm(machine, eos_ids=(0,)),
            RepetitionPenalty((1.2, 1.0, 1.5, 0.9, 1.1, 1.3)),
            Temperature((0.0, 1.0, 0.7, 1.5, 1.0, 0.0)),
            TopP((1.0, 0.9, 0.8, 0.95, 0.3, 0.9)),
            MirostatV2(1.5, 0.4),
        ),
        special_ids={"eos": 0},
    )


def several_steps(shard, order, restore=False):
    """Ids of six steps by request, whatever their order in the batch; and the final states."""
    policy = long_policy()
    order = torch.tensor(order)
    state = policy.start(ROWS, Streams.of([11] * ROWS, list(range(ROWS)))).rows(order)
    view = View.of([[row, 1] for row in order.tolist()])
    active, ids, results = torch.ones(ROWS, dtype=torch.bool), [], []
    for at in range(6):
        logits = logits_of(50 + at, ROWS)[order]
        step = policy.step(shard.slice(logits, -1), view, state, shard=shard, active=active, trace=True)
        state, view = step.state, view.appended(step.token_ids)
        active = active & (step.token_ids != 0)
        if restore and at == 2:
            state = PolicyState.from_state_dict(json.loads(json.dumps(state.state_dict())))
        ids.append(step.token_ids[order.argsort()].tolist())
        results.append(bits_of(step))
    return ids, results, state.rows(order.argsort()).state_dict()


STRAIGHT, MIXED = (0, 1, 2, 3, 4, 5), (3, 5, 0, 4, 2, 1)


def _several(rank, order, restore):
    return several_steps(shard_of(VOCAB), order, restore)


SEVERAL = [(STRAIGHT, False), (STRAIGHT, True), (MIXED, False)]


@TP
@pytest.mark.parametrize(("order", "restore"), SEVERAL)
def test_steps_with_constraints_controllers_and_ended_rows_are_those_of_one_process(tp, order, restore):
    ids, results, state = several_steps(alone(), order)
    assert any(-1 in row for row in ids), "the case must have rows that end"
    for found_ids, found, found_state in TOGETHER(tp, _several, order, restore):
        assert found_ids == ids
        for one, expected in zip(found, results, strict=True):
            assert_same_bits(one, expected)
        assert found_state == state


def test_the_order_of_the_batch_changes_no_request():
    (straight, _, state), (mixed, _, mixed_state) = (several_steps(alone(), order) for order in (STRAIGHT, MIXED))
    assert straight == mixed
    assert {**state, "origin": None} == {**mixed_state, "origin": None}


# fallbacks


@dataclasses.dataclass(frozen=True, eq=False)
class Three(Transform):
    """Three candidates that every rank holds, as many as some ranks have columns; and then none of them."""

    name = "three"

    def apply(self, scores, view, state):
        best = top_candidates(scores, 3)
        return best.keep(torch.zeros_like(best.values, dtype=torch.bool), keeps_peak=False)


FALLBACKS = {
    "token": Policy((Suppress([0]), Keep((0, 8)), TopP(0.9)), fallback={"token": 2}),
    "token after candidates": Policy((TopK(2), Suppress([0, 1]), TopP(0.9)), fallback={"token": 7}),
    "undo": Policy((Suppress([0]), Keep((0, 8)), TopK(2)), fallback={"undo": True}),
    "undo after candidates": Policy((TopK(2), Keep((8,)), TopP(0.9)), fallback={"undo": True}),
}


def fallen_back(shard, name):
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0]] * 3)
    logits[1, 8] = -torch.inf
    policy = FALLBACKS[name]
    state = policy.start(3, Streams.of([1, 2, 3]))
    step = policy.step(shard.slice(logits, -1), View.of([[1]] * 3), state, shard=shard, trace=True)
    return bits_of(step), [step.trace.reason(row) for row in range(3)]


def _fallen_back(rank, name):
    return fallen_back(shard_of(VOCAB), name)


@TP
@pytest.mark.parametrize("name", FALLBACKS)
def test_a_fallback_answers_on_ranks_as_on_one_process(tp, name):
    expected, reasons = fallen_back(alone(), name)
    assert any(reasons)
    for found, found_reasons in TOGETHER(tp, _fallen_back, name):
        assert_same_bits(found, expected)
        assert found_reasons == reasons


# errors


def good_call(shard, **change):
    """The arguments of a call; `change` is what is wrong."""
    policy = change.pop("policy", None) or Policy((Suppress([1]), TopP(0.9)), name="mine")
    rows = change.pop("rows", 3)
    whole = torch.zeros(3, VOCAB)
    for row, column, value in change.pop("logits", []):
        whole[row, column] = value
    start = change.pop("start", policy)
    view = View.of(change.pop("prefix", [[1], [2], [3]]), extras=change.pop("extras", None))
    state = start.start(rows, Streams.of(change.pop("seeds", list(range(rows)))))
    mine = shard.slice(whole, -1)
    return lambda: policy.step(mine, view, state, shard=shard, **change)


CONTRASTIVE = next(one for one in every_transform() if one.name == "contrastive")
BAD = {
    "NaN": ({"logits": [(1, 4, math.nan)]}, ["NonFiniteError"], ["row 1"]),
    "inf": ({"logits": [(2, 8, math.inf)]}, ["NonFiniteError"], ["row 2"]),
    "empty": ({"logits": [(1, slice(None), -math.inf)]}, ["EmptySupportError"], ["row 1", "step 0"]),
    "emptied": ({"policy": Policy((Suppress(range(9)), TopP(0.5)))}, ["EmptySupportError"], ["row 0", "'suppress'"]),
    "illegal fallback": (
        {"policy": Policy((Suppress(range(VOCAB)),), fallback={"token": 3})}, ["EmptySupportError"], ["token 3"],
    ),
    "emptied candidates": (
        {"policy": Policy((Three(),), fallback={"undo": True})}, ["EmptySupportError"], ["row 0", "'three'"],
    ),
    "another batch": ({"rows": 2}, ["ValueError"], ["2 requests", "3 rows"]),
    "another policy's state": ({"start": Policy((TopP(0.5),))}, ["ValueError"], ["'mine'"]),
    "prefix": ({"prefix": [[1], [2], [9]]}, ["TokenRangeError"], ["9"]),
    "banned padding id": ({"policy": Policy((Suppress([9]),))}, ["TokenRangeError"], ["9"]),
    "active": ({"active": torch.ones(4, dtype=torch.bool)}, ["ValueError"], ["active"]),
    "n": ({"top_logprobs": 10}, ["ValueError"], ["10"]),
    "no similarity": ({"policy": Policy((CONTRASTIVE,))}, ["ValueError"], ["contrastive"]),
}  # fmt: skip
# what only one rank passes differently
ODD = {
    "seeds": ({"seeds": [0, 1, 5]}, ["LayoutMismatchError"], []),
    "ids": ({"prefix": [[1], [2], [4]]}, ["LayoutMismatchError"], []),
    "length": ({"prefix": [[1], [2], [4, 4]]}, ["LayoutMismatchError"], ["disagree"]),
    "policy": ({"policy": Policy((Suppress([1]), TopK(2)), name="other")}, ["LayoutMismatchError"], ["other"]),
    "trace": ({"trace": True}, ["LayoutMismatchError"], ["disagree"]),
    "rows that go on": ({"active": torch.tensor([True, False, True])}, ["LayoutMismatchError"], []),
    "special ids": (
        {"policy": Policy((Suppress([1]), TopP(0.9)), name="mine", special_ids={"eos": 2})}, ["LayoutMismatchError"],
        ["eos"],
    ),
    "no tensor": ({"extras": {"a": 1}}, ["ValueError"], ["'a'"]),
    "extras": ({"extras": {"a": torch.zeros(3)}}, ["LayoutMismatchError"], ["disagree"]),
    "NaN": ({"logits": [(1, slice(None), math.nan)]}, ["NonFiniteError"], ["row 1"]),
    "NaN and another policy": (
        {"logits": [(1, slice(None), math.nan)], "policy": Policy((TopK(5), TopP(0.9)))}, ["NonFiniteError"], ["row 1"],
    ),
    "active": ({"active": torch.ones(3)}, ["ValueError"], ["active"]),
}  # fmt: skip


def _bad(rank, name, odd):
    shard = shard_of(VOCAB)
    change = ODD[name][0] if odd else BAD[name][0]
    given = dict(change) if not odd or rank == 0 else {}
    if name == "special ids":
        given |= {"trace": True, "removed_ids": True}
    result = attempt(good_call(shard, **given))
    return result, good_call(shard)().token_ids.tolist()


REFUSED = Batch(_bad, [(name, False) for name in BAD] + [(name, True) for name in ODD])


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("name", "odd"), REFUSED.cases)
def test_bad_input_is_one_error_on_every_rank_and_the_ranks_go_on(tp, name, odd):
    results = REFUSED(tp, name, odd)
    _, kinds, words = ODD[name] if odd else BAD[name]
    assert_all_raise(name, [result for result, _ in results], kinds, words)
    assert all(ids == good_call(alone())().token_ids.tolist() for _, ids in results)


# errors that the host reads late, as on CUDA


def _late(rank, name):
    """What each of three calls raised: the bad one, and what reads its flags; and the ids of good ones around it."""
    world = shard_of(VOCAB)
    shard = VocabShard(world.layout, world.group, deferred_errors=True)
    good = [good_call(shard)().token_ids.tolist() for _ in range(3)]
    change = dict(LATE[name][0] if rank == 0 or not LATE[name][3] else {})
    first = attempt(lambda: good_call(shard, **change)())
    second = attempt(shard.raise_deferred)
    good.append(good_call(shard)().token_ids.tolist())
    shard.raise_deferred()
    return first, second, good


LATE = {
    "NaN": (*BAD["NaN"], False),
    "empty": (*BAD["empty"], False),
    "emptied": (*BAD["emptied"], False),
    "illegal fallback": (*BAD["illegal fallback"], False),
    "a bad argument on one rank": (*ODD["active"], True),
}
DEFERRED = Batch(_late, [(name,) for name in LATE])


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", LATE)
def test_an_error_that_is_read_late_is_the_same_on_every_rank(tp, name):
    _, kinds, words, one_rank = LATE[name]
    results = DEFERRED(tp, name)
    raised = [second if first.kind is None else first for first, second, _ in results]
    assert {one.kind for one in raised} == set(kinds)
    if not one_rank:
        assert_all_raise(name, raised, kinds, words)
    expected = good_call(alone())().token_ids.tolist()
    assert all(ids == expected for *_, good in results for ids in good)


# traffic

COSTS = {  # calls, bytes a row and rank
    "greedy": (Policy(selector="greedy"), {}, 2, 8 + 8),
    "sample": (Policy(), {}, 3, 8 + 8 + 8),
    "bias": (Policy((Bias({1: 1.0}),)), {}, 3, 8 + 8 + 8),
    "temperature": (Policy((Temperature((0.0, 0.7) * 16),)), {}, 3, 8 + 8 + 8),
    "top_k": (Policy((TopK(5), TopP(0.9), Temperature(0.7))), {}, 1, 5 * 8),
    "raw": (Policy((TopK(5),)), {"logprobs": "raw", "top_logprobs": 4}, 5, 5 * 8 + 8 + 8 + 8 + 4 * 8),
    "trace": (Policy((Suppress([1]), Temperature(0.7))), {"trace": True}, 8, 24 + 32 + 16 + 16 + 8 * (2 + 2)),
    "fallback": (Policy((Bias({1: 1.0}),), fallback={"undo": True}), {}, 4, 8 + 8 + 8 + 8),
}


def _traffic(rank, name):
    policy, options, _, _ = COSTS[name]
    shard, rows = shard_of(1000), 32
    mine = shard.slice(torch.randn(rows, 1000, generator=torch.Generator().manual_seed(0)), -1)
    state, view = policy.start(rows, Streams.of([0] * rows)), View.of([[1]] * rows)
    for _ in range(9):  # until exchanges have settled on their size
        shard.traffic.reset()
        with collectives() as (issued, sent):
            policy.step(mine, view, state, shard=shard, **options)
    assert dict(sent) == dict(shard.traffic.bytes) and dict(issued) == dict(shard.traffic.calls)
    return issued["all_gather"], issued.total(), (sent["all_gather"] / (shard.tp_size - 1) - 64) / rows


TRAFFIC = Batch(_traffic, [(name,) for name in COSTS])


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", COSTS)
def test_a_step_sends_what_it_says(tp, name):
    _, _, calls, size = COSTS[name]
    for found in TRAFFIC(tp, name):
        assert found == (calls, calls, size)


# log-probabilities


def _top(rank, dtype, n):
    shard = shard_of(VOCAB)
    return top_logprobs(shard.slice(logits_of(3, 20, dtype, masked=True), -1, fill=9.0), n, shard=shard)


TOP = [(torch.bfloat16, 3), (torch.float32, 9), (torch.float64, 5)]


@TP
@pytest.mark.parametrize(("dtype", "n"), TOP)
def test_top_log_probabilities_are_those_of_whole_rows(tp, dtype, n):
    logits = logits_of(3, 20, dtype, masked=True)
    expected = logits.double().log_softmax(1)
    values, ids = expected.sort(dim=1, descending=True, stable=True)
    ids = torch.where(values > -torch.inf, ids, -1)
    mine = top_logprobs(logits, n, shard=alone())
    for found in TOGETHER(tp, _top, dtype, n):
        assert torch.equal(found.token_ids, ids[:, :n])
        assert torch.equal(found.logprobs, mine.logprobs)
        finite = values[:, :n] > -torch.inf
        assert torch.allclose(found.logprobs[finite], values[:, :n][finite], atol=1e-9)


# what ends well, in one world for each number of ranks


def _call(rank, fn, *case):
    return fn(rank, *case)


TOGETHER = Batch(
    _call,
    [
        *((_edge, edge) for edge in EDGES),
        *((_chain, seed) for seed in CHAINS),
        *((_several, *case) for case in SEVERAL),
        *((_fallen_back, name) for name in FALLBACKS),
        *((_top, *case) for case in TOP),
    ],
)
