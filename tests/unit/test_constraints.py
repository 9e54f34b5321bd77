"""Machines over token ids: what they accept, what is legal on the way, and the state that the caller gets back."""

from __future__ import annotations

import json
import random
import re
from itertools import product

import pytest
import torch

from tests.multirank.processor_cases import ROWS, machine
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.transforms import machine_regex
from vocab_parallel.decode.transforms.constraints import Fsm, StateMachine, advance
from vocab_parallel.decode.transforms.transform import Choice, View
from vocab_parallel.reference import processors as oracle
from vocab_parallel.select.scores import open_scores

V = 4
EVERY = [ids for length in range(6) for ids in product(range(V), repeat=length)]


def text_of(ids):
    return "".join("abcd"[one] for one in ids)


def run(built, ids):
    """The state after the ids, or None where one is illegal."""
    state = torch.tensor([built.start])
    for one in ids:
        state = built.next_states(state, torch.tensor([one]))
        if int(state) < 0:
            return None
    return int(state)


def every_state(built):
    """The states after EVERY, -1 where an id was illegal on the way: all sequences of a length at once."""
    level = torch.tensor([built.start])
    found = [level]
    for _ in range(5):
        level = built.next_states(level.repeat_interleave(V), torch.arange(V).repeat(len(level)))
        found.append(level)
    return torch.cat(found)


def accepted(built):
    states = every_state(built)
    ends = (states >= 0) & built.accepting[states.clamp(min=0)]
    return {ids for ids, end in zip(EVERY, ends.tolist(), strict=True) if end}


def legal_ids(built, state, vocab=V):
    return built.legal(torch.tensor([state]), torch.arange(vocab))[0].nonzero()[:, 0].tolist()


PATTERNS = {  # over ids 0 to 3, and the same in letters for Python's own engine
    "": "",
    "1": "b",
    "1 2|3": "bc|d",
    "0* 1": "a*b",
    "(0|1 2)+ 3?": "(a|bc)+d?",
    ". 1 .": ".b.",
    "[0 2-3]{2}": "[acd]{2}",
    "[^1]* 1{1,2}": "[^b]*b{1,2}",
    "(0 1){0,2} 2{2,}": "(ab){0,2}c{2,}",
    "((0|1)(2|3))* (0|)": "(([ab])([cd]))*(a|)",
    "(0*)*1+": "(a*)*b+",
    "0{0} 1{0,1}": "a{0}b{0,1}",
    "(.|0 0)* 3": "(.|aa)*d",
    "[ 1 - 3 ] | [^0-2]{ 1 , }": "[bcd]|[^abc]{1,}",
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_accepts_what_pythons_engine_accepts(pattern):
    letters = re.compile(PATTERNS[pattern])
    assert accepted(StateMachine.from_regex(pattern)) == {ids for ids in EVERY if letters.fullmatch(text_of(ids))}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_legal_id_leads_where_the_expression_cannot_end(pattern):
    built = StateMachine.from_regex(pattern)
    beginnings = {ids[:length] for ids in accepted(built) for length in range(len(ids) + 1)}
    for ids, state in zip(EVERY, every_state(built).tolist(), strict=True):
        if len(ids) < 3:
            assert (state >= 0) == (ids in beginnings), ids


def drawn_pattern(draw, depth):
    """An expression and its letters."""
    kind = draw.choice(["id", "class", "sequence", "or", "times"] if depth else ["id", "class"])
    if kind == "id":
        one = draw.randrange(V)
        return str(one), "abcd"[one]
    if kind == "class":
        some, negative = sorted(draw.sample(range(V), 2)), draw.random() < 0.5
        sign = "^" if negative else ""
        return f"[{sign}{some[0]} {some[1]}]", f"[{sign}{'abcd'[some[0]]}{'abcd'[some[1]]}]"
    parts = [drawn_pattern(draw, depth - 1) for _ in range(1 if kind == "times" else 2)]
    if kind == "times":
        sign = draw.choice(["*", "+", "?", "{2}", "{1,}", "{0,2}"])
        return f"({parts[0][0]}){sign}", f"(?:{parts[0][1]}){sign}"
    between = "|" if kind == "or" else " "
    return f"({between.join(one for one, _ in parts)})", f"(?:{between.strip().join(one for _, one in parts)})"


def test_drawn_expressions_accept_what_pythons_engine_accepts():
    draw = random.Random(4)
    for _ in range(60):
        pattern, text = drawn_pattern(draw, 3)
        letters = re.compile(text)
        expected = {ids for ids in EVERY if letters.fullmatch(text_of(ids))}
        assert accepted(StateMachine.from_regex(pattern)) == expected, pattern


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("1 (2", r"\) before 'the end', place 4"),
        ("1)", r"unexpected '\)', place 1"),
        ("*", "expected an id"),
        ("1 a", "unknown sign 'a', place 2"),
        ("1**", "two repetitions"),
        ("1{3,1}", "low <= high"),
        ("[3-1]", "'3-1' is no range"),
        ("[]", "no ids"),
        ("1|[^0-2147483647]", "no ids in '\\[\\^0-2147"),
        ("5-7", "unknown sign '-7'"),
    ],
)
def test_a_wrong_expression_is_refused_with_its_place(pattern, words):
    with pytest.raises(ValueError, match=words):
        StateMachine.from_regex(pattern)


@pytest.mark.parametrize("pattern", ["(1{9}){9}", "(0|1)* 0 (0|1){4}"])  # many parts; many sets of few parts
def test_a_regular_expression_that_explodes_is_refused(monkeypatch, pattern):
    monkeypatch.setattr(machine_regex, "_STATE_LIMIT", 30)
    with pytest.raises(ValueError, match="more than 30 states"):
        StateMachine.from_regex(pattern)


def test_a_range_of_many_ids_is_one_edge():
    built = StateMachine.from_regex("[^7]* 7 .*")
    assert len(built.edges) == 3 + 3 + 1 + 1  # below 7, 7, and above; twice; then any
    assert legal_ids(built, built.start, 100) == list(range(100))


def test_a_tree_of_sequences_accepts_them_alone():
    sequences = [(0, 1), (0, 1, 2), (3,), (0, 2)]
    built = StateMachine.from_sequences(sequences)
    assert accepted(built) == set(sequences)
    assert legal_ids(built, built.start) == [0, 3]
    assert legal_ids(built, run(built, (0,))) == [1, 2] and legal_ids(built, run(built, (3,))) == []


def test_a_table_is_followed_and_its_mistakes_are_named():
    built = StateMachine.from_table({0: {1: 1, 3: 0}, 1: {2: 0}}, accepting=[1])
    assert (3, 3, 1) in accepted(built) and (1, 2) not in accepted(built) and run(built, (2,)) is None
    assert legal_ids(built, 0) == [1, 3] and legal_ids(built, 1) == [2]
    with pytest.raises(ValueError, match=r"state.*-1"):
        StateMachine.from_table({0: {1: -1}})
    with pytest.raises(ValueError, match="-4"):
        StateMachine.from_table({0: {-4: 0}})
    with pytest.raises(ValueError, match="state 0 has two edges for id 3"):
        StateMachine.of_edges([(0, 1, 4, 0), (0, 3, 5, 1)], 2, [1], 0)
    with pytest.raises(ValueError, match="accepting state 7"):
        StateMachine.of_edges([], 1, [7], 0)
    with pytest.raises(ValueError, match="no sequences"):
        StateMachine.from_sequences([])
    for wrong in (1.0, True, "1"):
        with pytest.raises(ValueError, match=f"must be integers, got {wrong!r}"):
            StateMachine.from_sequences([[0, wrong]])


def test_a_forced_prefix_leaves_one_legal_id_and_then_all():
    built = StateMachine.forced([2, 0])
    assert [legal_ids(built, run(built, ids)) for ids in [(), (2,), (2, 0), (2, 0, 3)]] == [
        [2],
        [0],
        [*range(V)],
        [*range(V)],
    ]


def test_machines_of_several_requests_lie_side_by_side():
    machines = [StateMachine.from_sequences([(1,)]), StateMachine.from_regex("[2-3]+"), StateMachine.forced([0])]
    built, starts = StateMachine.union(machines)
    for one, start in zip(machines, starts, strict=True):
        assert legal_ids(built, start) == legal_ids(one, one.start)
    fsm = Fsm(built, starts)
    assert fsm.for_rows([2, 0]).start(2)["state"].tolist() == [starts[2], starts[0]]


@pytest.mark.parametrize("seed", range(20))
def test_legal_ids_and_next_states_are_the_oracles(seed):
    fsm = machine(seed, 30)
    fields, built = fsm.to_dict(), fsm.machine
    legal = built.legal(torch.arange(built.num_states), torch.arange(30))
    for state in range(built.num_states):
        expected = list(map(oracle.fsm_legal(fields["machine"], state), range(30)))
        assert legal[state].tolist() == expected
        after = built.next_states(torch.full((30,), state), torch.arange(30)).tolist()
        for token in range(30):
            found = oracle.fsm_next(fields["machine"], state, token) if expected[token] else -1
            assert after[token] == found


def choice(token_ids, active=None):
    ids = torch.tensor(token_ids)
    return Choice(ids, torch.zeros(len(ids)), torch.ones_like(ids, dtype=torch.bool) if active is None else active)


def test_the_state_follows_the_emitted_ids_and_the_old_one_stays():
    fsm = Fsm(StateMachine.from_regex("0 (1|2 3)*"), eos_ids=[9])
    first = fsm.start(3)
    states, z = first, torch.zeros(3, 10)
    shard = VocabShard(VocabLayout(10, 1, multiple_of=1))
    seen = []
    for ids in ([0, 0, 0], [1, 2, 9], [1, 3, 9]):
        kept = fsm.apply(open_scores(z, shard, "fsm"), View.of([[]] * 3), states).values > -torch.inf
        seen.append([row.nonzero()[:, 0].tolist() for row in kept])
        states = fsm.after(states, choice(ids))
    assert seen == [[[0]] * 3, [[1, 2, 9]] * 3, [[1, 2, 9], [3], [1, 2, 9]]], (
        "the end is legal in accepting states only"
    )
    assert first["state"].tolist() == [0, 0, 0], "a state that was given is not changed"


def test_rows_that_are_not_active_keep_their_state():
    fsm = Fsm(StateMachine.from_sequences([[1, 2]]))
    active = torch.tensor([True, False])
    assert fsm.after(fsm.start(2), choice([1, -1], active))["state"].tolist() == [1, 0]


def test_beams_carry_their_states_with_their_parents():
    fsm = Fsm(StateMachine.from_sequences([[0, 1], [2, 3]]))
    states = fsm.after(fsm.start(2), choice([0, 2]))["state"]
    parents = torch.tensor([1, 1])
    assert legal_ids(fsm.machine, int(states[parents][0])) == [3]


def test_an_illegal_id_is_named_with_its_row_and_state():
    built = StateMachine.from_sequences([[1, 2], [1, 5]])
    assert advance(built, torch.tensor([0, 1]), torch.tensor([1, 5])).tolist()[0] == 1
    with pytest.raises(ValueError, match="row 1: token id 3 is illegal in state 1, which has edges for 2, 5"):
        advance(built, torch.tensor([0, 1]), torch.tensor([1, 3]))
    for eos_ids in ([9], [1]):
        with pytest.raises(ValueError, match=f"row 0: token id {eos_ids[0]} is illegal in state 0"):
            Fsm(built, eos_ids=eos_ids).after({"state": torch.tensor([0])}, choice(eos_ids))


def test_an_end_is_no_other_id():
    fsm = Fsm(StateMachine.from_regex(". 1*"), eos_ids=[9])
    z, shard = torch.zeros(1, 10), VocabShard(VocabLayout(10, 1, multiple_of=1))
    states = fsm.start(1)
    for legal in ([0, 1, 2, 3, 4, 5, 6, 7, 8], [1, 9]):
        kept = fsm.apply(open_scores(z, shard, "fsm"), View.of([[]]), states).values[0] > -torch.inf
        assert kept.nonzero()[:, 0].tolist() == legal
        states = fsm.after(states, choice([1]))


def test_a_machine_comes_back_from_its_file_and_from_short_forms():
    for seed in range(3):
        fsm = machine(seed, 9)
        again = Fsm.from_dict(json.loads(json.dumps(fsm.to_dict())))
        assert again == fsm and torch.equal(again.start(ROWS)["state"], fsm.start(ROWS)["state"])
    assert Fsm({"regex": "1 2"}) == Fsm(StateMachine.from_regex("1 2"))
    assert Fsm({"sequences": [[1, 2]]}) == Fsm(StateMachine.from_sequences([[1, 2]]))
    assert Fsm({"forced": [1]}) == Fsm(StateMachine.forced([1]))
    with pytest.raises(ValueError, match=r"a machine is \{regex: pattern\}.* got regx"):
        Fsm({"regx": "1 2"})
    with pytest.raises(ValueError, match="must be text, got 12: put it in quotes"):
        Fsm({"regex": 12})


def test_ids_of_a_machine_outside_the_vocabulary_are_named():
    with pytest.raises(ValueError, match=r"state 0.*token id 12 .*\[0, 10\).*padding"):
        Fsm(StateMachine.from_regex("[3-12]")).check(10, None)
    with pytest.raises(ValueError, match="eos_ids has token id 10"):
        Fsm(StateMachine.from_regex(".*"), eos_ids=[10]).check(10, None)
    Fsm(StateMachine.from_regex("[^3]* 3"), eos_ids=[9]).check(10, None)


def test_a_machine_of_many_sequences_stays_small_and_fast():
    draw = random.Random(1)
    sequences = [[draw.randrange(50_000) for _ in range(3)] for _ in range(5_000)]
    built = StateMachine.from_sequences(sequences)
    assert built.edges.numel() < 4 * 15_001
    assert built.legal(torch.tensor([built.start]), torch.arange(50_000)).sum() == len({one[0] for one in sequences})
