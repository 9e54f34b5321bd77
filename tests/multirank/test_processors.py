"""Processors, constraints and contrasts over shards: the oracle's scores bit for bit, of columns and of candidates."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.batch import assert_all_raise, attempt
from tests.multirank.processor_cases import PROCESSORS, ROWS, joined, machine, placed, processor, requests
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import ALL_SIZES, Batch
from tests.tolerances import bits
from tests.unit.policies import every_transform
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.transforms.constraints import Fsm, StateMachine
from vocab_parallel.decode.transforms.contrast import Contrastive, Dola, contrastive_candidates, contrastive_select
from vocab_parallel.decode.transforms.processors import (
    BadWords,
    Bias,
    Force,
    FrequencyPenalty,
    MinLength,
    Prior,
    Suppress,
)
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.decode.transforms.warpers import Temperature, TopK, TopP
from vocab_parallel.reference import processors as oracle
from vocab_parallel.reference.policy import final_scores
from vocab_parallel.select.filters import keep_top_k
from vocab_parallel.select.scores import open_scores, top_candidates
from vocab_parallel.select.streams import Streams

LAYOUTS = [(9, 1), (13, 4), (2, 4), (67, 1)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SEEDS = range(12)


def case_of(seed):
    """Vocabulary, padding and dtype of a seed: every pair of them among twelve."""
    return (*LAYOUTS[seed % 4], DTYPES[seed % 3])


def _process(rank, name, seed):
    """Each rank's columns after the processor: of all columns, and of each row's best five only."""
    vocab, multiple_of, dtype = case_of(seed)
    shard, drawn = shard_of(vocab, multiple_of), requests(seed, vocab, dtype)
    mine = shard.slice(drawn.z, -1, fill=torch.nan)
    before, view = mine.clone(), drawn.view
    transform, state = processor(name, seed, vocab), {}
    found = []
    for k in (None, 5):
        scores = open_scores(mine, shard, name)
        with scores.channel.guard():
            transform.check(vocab, ROWS)
        scores = scores if k is None else top_candidates(scores, min(k, vocab))
        shard.traffic.reset()
        found.append((placed(scores), placed(transform.apply(scores, view, state))))
        assert shard.traffic.total_calls == 0, "a processor needs no collective"
    assert torch.equal(bits(mine), bits(before)), "the logits were modified"
    return found


@TP
@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_gives_the_oracles_scores_bit_for_bit(tp, name):
    for seed in SEEDS:
        vocab, _, dtype = case_of(seed)
        drawn = requests(seed, vocab, dtype)
        fields = processor(name, seed, vocab).to_dict()
        fields.pop("name")
        for parts in zip(*RESULTS(tp, "process", name, seed), strict=True):  # of columns, then of candidates
            before, after = ([part[at] for part in parts] for at in (0, 1))
            z = joined(before).nan_to_num(-torch.inf, torch.inf, -torch.inf)
            expected = oracle.process(name, z, drawn.prompts, drawn.generated, **fields)
            whole = joined(after).nan_to_num(-torch.inf, torch.inf, -torch.inf)
            assert torch.equal(whole, expected), f"seed {seed}\n{fields}\n{whole}\n{expected}"


def _constrain(rank, seed):
    """Each rank's columns in the states of a drawn machine."""
    vocab, multiple_of, dtype = case_of(seed)
    shard, drawn = shard_of(vocab, multiple_of), requests(seed, vocab, dtype)
    transform = machine(seed, vocab)
    scores = open_scores(shard.slice(drawn.z, -1, fill=torch.nan), shard, "fsm")
    states = transform.start(ROWS)
    dense = placed(transform.apply(scores, drawn.view, states))
    candidates = top_candidates(scores, min(5, vocab))
    return dense, placed(candidates), placed(transform.apply(candidates, drawn.view, states)), states["state"]


@TP
def test_a_machine_allows_exactly_the_ids_of_each_rows_state(tp):
    for seed in SEEDS:
        vocab, _, dtype = case_of(seed)
        drawn, transform = requests(seed, vocab, dtype), machine(seed, vocab)
        fields = transform.to_dict()
        z = drawn.z if dtype == torch.float64 else drawn.z.float()
        expected = oracle.fsm(z, fields["start_state"], fields["machine"], fields["eos_ids"])
        dense, before, after, states = zip(*RESULTS(tp, "constrain", seed), strict=True)
        assert torch.equal(joined(list(dense)), expected), seed
        for one, other in zip(before, after, strict=True):
            assert torch.equal(other[~one.isnan()], expected[~one.isnan()])
        assert all(state.tolist() == list(fields["start_state"]) for state in states)


def layers_of(seed, vocab, count):
    generator = torch.Generator().manual_seed(seed + 100)
    return torch.randn(ROWS, count, vocab, generator=generator, dtype=torch.float64) * 2


def _contrast(rank, seed, count):
    vocab, multiple_of, dtype = case_of(seed)
    shard, drawn = shard_of(vocab, multiple_of), requests(seed, vocab, dtype)
    layers = layers_of(seed, vocab, count)
    premature = shard.slice(layers.movedim(1, 0) if count > 1 else layers[:, 0], -1, fill=torch.nan).to(dtype)
    view = View.of([[]] * ROWS, extras={"premature_logits": premature})
    mine = shard.slice(drawn.z, -1, fill=torch.nan)
    dola = Dola([0.1, 0.5, 1.0, 1e-6, 0.1, 0.9])
    contrasted = placed(dola.apply(open_scores(mine, shard, "dola"), view, {}))
    k = min(3, vocab)
    candidates = contrastive_candidates(mine, k, shard=shard)
    real = candidates.token_ids.clamp(max=vocab - 1)
    similarity = layers[:, 0].tanh().gather(1, real)
    chosen = [
        contrastive_select(candidates, similarity, [0.0, 0.3, 0.6, 1.0, 0.5, 0.5], confidence=one)
        for one in ("logprob", "probability")
    ]
    order = torch.arange(k).flip(0)  # the caller's order is its own
    extras = {"candidate_ids": candidates.token_ids[:, order], "similarity": similarity[:, order]}
    view = View.of([[]] * ROWS, extras=extras)
    transform = Contrastive(k, [0.0, 0.3, 0.6, 1.0, 0.5, 0.5])
    ranked = transform.apply(open_scores(mine, shard, "contrastive"), view, {})
    best = keep_top_k(ranked, torch.ones(ROWS, dtype=torch.int64))
    return contrasted, chosen, candidates, best.token_ids[:, 0]


CONTRASTS = [(seed, (1, 3)[seed // 4 % 2]) for seed in SEEDS]
EVERY_CONTRAST = pytest.mark.parametrize(("seed", "count"), CONTRASTS)


@EVERY_CONTRAST
def test_dola_contrasts_with_the_layer_that_diverges_most_and_keeps_the_plausible_ids(seed, count):
    vocab, _, dtype = case_of(seed)
    z = requests(seed, vocab, dtype).z.double()
    layers = layers_of(seed, vocab, count).to(dtype).double()
    expected = oracle.dola(z, layers, [0.1, 0.5, 1.0, 1e-6, 0.1, 0.9])
    bits_at = []
    for tp in (1, 2, 3, 4):
        whole = joined([result[0] for result in RESULTS(tp, "contrast", seed, count)])
        assert torch.equal(whole > -torch.inf, expected > -torch.inf), f"tp {tp}"
        finite = expected > -torch.inf
        tolerance = 1e-9 if dtype == torch.float64 else 2e-6
        assert torch.allclose(whole.double()[finite], expected[finite], rtol=tolerance, atol=tolerance)
        bits_at.append(bits(whole))
    assert all(torch.equal(bits_at[0], one) for one in bits_at), "other bits at another number of ranks"


@EVERY_CONTRAST
def test_contrastive_search_takes_the_oracles_candidates_and_choice(seed, count):
    vocab, _, dtype = case_of(seed)
    z, k = requests(seed, vocab, dtype).z, min(3, vocab)
    alpha = [0.0, 0.3, 0.6, 1.0, 0.5, 0.5]
    similarity = layers_of(seed, vocab, count)[:, 0].tanh()
    everything = [result for tp in (1, 2, 3, 4) for result in RESULTS(tp, "contrast", seed, count)]
    for at, confidence in enumerate(("logprob", "probability")):
        scores = oracle.contrastive(z, similarity, k, alpha, confidence)
        for _, chosen, candidates, by_policy in everything:
            ids, ranked = chosen[at]
            assert torch.equal(ids, scores.argmax(1)), confidence
            real = candidates.token_ids.clamp(max=vocab - 1)
            assert torch.allclose(ranked, scores.gather(1, real), rtol=1e-8, atol=1e-8)
            if confidence == "logprob":
                assert torch.equal(by_policy, ids)
    first = everything[0]
    for other in everything[1:]:
        for one, two in zip((*first[1], first[2]), (*other[1], other[2]), strict=True):
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, two, strict=True)), "other bits"


REGEX = "0 (1 2{1,2}|[3-5] .)*"  # the end is an id too, but no `.`
EOS = 8


def _generate(rank, batch):
    """Requests of a batch, sampled under a constraint, penalties and bans until they end; their state is saved once."""
    shard = shard_of(9)
    chain = (
        Fsm(StateMachine.from_regex(REGEX), eos_ids=[EOS]),
        MinLength([6, 3, 4], EOS),
        BadWords([[3, 3], [4, 4, 4]]),
        FrequencyPenalty([0.0, 0.5, 1.0]),
        Temperature(1.5),
    )
    policy = Policy(chain).for_vocabulary(9)
    whole = torch.randn(40, 3, 9, generator=torch.Generator().manual_seed(5))
    index = torch.tensor(batch)
    state = policy.start(3, Streams.of([7, 7, 9], [0, 1, 2])).rows(index)
    view = View.of([[1, 2], [3], []], [2, 1, 0]).rows(index)
    active = torch.ones(len(batch), dtype=torch.bool)
    for at, logits in enumerate(whole):
        if not active.any():
            break
        if at == 3:
            state = PolicyState.from_state_dict(json.loads(json.dumps(state.state_dict())))
        mine = shard.slice(logits[index], -1, fill=torch.nan)
        step = policy.step(mine, view, state, shard=shard, active=active)
        view, state, active = view.appended(step.token_ids), step.state, active & (step.token_ids != EOS)
    return {request: row[row >= 0].tolist() for request, row in zip(batch, view.generated(), strict=True)}


def test_a_constrained_policy_gives_the_same_legal_tokens_on_any_number_of_ranks_and_in_any_batch():
    results = [result for tp in (1, 2, 3, 4) for result in RESULTS(tp, "generate", (0, 1, 2))]
    assert all(result == results[0] for result in results)
    for tp in (1, 2, 3, 4):
        for result in RESULTS(tp, "generate", (2, 0)):
            assert result == {request: results[0][request] for request in (2, 0)}
    for request, ids in results[0].items():
        assert ids[-1] == EOS and len(ids) > (6, 3, 4)[request], "it ends, not before its least length"
        text = "".join(map(str, ids[:-1]))
        assert re.fullmatch("0(12{1,2}|[3-5].)*", text) and "33" not in text and "444" not in text, text
    assert max(map(len, results[0].values())) > 8


BAD = {
    "an id past the vocabulary": (Suppress([4, 9]), ["TokenRangeError"], ["9", "[0, 9)", "padding", "place 1"]),
    "a negative id": (Suppress([-3]), ["TokenRangeError"], ["-3"]),
    "an id that is no integer": (Suppress([1.0]), ["TokenRangeError"], ["1.0"]),
    "of a row": (Suppress([[1], [12], []]), ["TokenRangeError"], ["12", "row 1"]),
    "a bias": (Bias({3: 1.0, 9: 2.0}), ["TokenRangeError"], ["9", "bias"]),
    "a bias of a row": (Bias([{}, {1: float("inf")}, {}]), ["ValueError"], ["row 1", "inf"]),
    "a bias of NaN": (Bias({1: float("nan")}), ["ValueError"], ["nan"]),
    "a forced id": (Force([10], 0), ["TokenRangeError"], ["10"]),
    "nothing forced": (Force([], 0), ["ValueError"], ["empty"]),
    "a bad word": (BadWords([[1, 2], [3, 9]]), ["TokenRangeError"], ["9"]),
    "an empty bad word": (BadWords([[1, 2], []]), ["ValueError"], ["()"]),
    "another number of rows": (MinLength([1, 2], 3), ["ValueError"], ["2", "3 rows"]),
    "a machine's id": (Fsm(StateMachine.from_sequences([[1, 11]])), ["TokenRangeError"], ["11", "state 1"]),
    "a machine's state": (Fsm(StateMachine.from_sequences([[1]]), [0, 5, 0]), ["ValueError"], ["row 1", "5"]),
    "no premature logits": (Dola(0.1), ["ValueError"], ["premature_logits"]),
    "a plausible part of 0": (Dola([0.1, 0.0, 1.0]), ["ValueError"], ["row 1"]),
    "no similarity": (Contrastive(2), ["ValueError"], ["candidate_ids"]),
}


def _refuse(rank, what):
    """Only the last rank has the bad processor: every rank must raise its error."""
    shard = shard_of(9)
    transform = BAD[what][0]

    def call():
        scores = open_scores(torch.zeros(3, shard.shard_size), shard, "refused")
        with scores.channel.guard():
            if rank == shard.size - 1:
                transform.check(9, 3)
                transform.apply(scores, View.of([[1], [2], [3]]), transform.start(3))
        scores.channel.open()

    return attempt(call)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("what", BAD)
def test_bad_parameters_of_one_rank_are_the_same_error_on_every_rank(tp, what):
    _, classes, words = BAD[what]
    assert_all_raise(what, RESULTS(tp, "refuse", what), classes, words)


BAD_VALUES = ["nan", "inf", "-inf"]


def _bad_layers(rank, value):
    shard = shard_of(9)
    layers = torch.zeros(3, 2, 9)
    layers[2, 1, slice(None) if value == "-inf" else 8] = float(value)
    view = View.of([[], []], extras={"premature_logits": shard.slice(layers, -1)})
    return attempt(lambda: Dola().apply(open_scores(torch.zeros(2, shard.shard_size), shard, "dola"), view, {}))


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("value", BAD_VALUES)
def test_a_premature_layer_without_a_distribution_is_an_error_on_every_rank(tp, value):
    assert_all_raise(value, RESULTS(tp, "bad_layers", value), ["NonFiniteError"], ["row 1", "layer 2"])


CHAINS = {  # what a filter leaves are candidates on every rank, or not: it depends on the row and on the ranks
    "force after top_p": (TopP(0.6), Force([8], 0, score=0.0)),
    "force after top_k": (TopK([1, 2, 3, 1]), Force([8], 0, score=0.0)),
    "dola": (Dola(0.3),),
    "dola after top_p": (TopP(0.8), Dola(0.01)),
    "dola after top_k": (TopK(4), Dola(0.01)),
    "contrastive": (Contrastive(3, 0.7),),
    "contrastive after top_k": (TopK(4), Contrastive(3, 0.7)),
}
ACTIVE = torch.tensor([True, False, True, True])
CHAIN_VOCAB = (66, 22)  # top-p leaves 64 candidates; over 4 ranks 22 22 22 0


def chained():
    """Logits `[4, 66]`, three layers, and the similarities of the best three ids."""
    generator = torch.Generator().manual_seed(11)
    z = 2 * torch.randn(4, 66, generator=generator)
    z[:, 8] = -20.0
    ids = z.topk(3).indices
    similarity = torch.rand(4, 3, generator=generator)
    extras = {"premature_logits": 2 * torch.randn(3, 4, 66, generator=generator)}
    return z, extras | {"candidate_ids": ids, "similarity": similarity}


def _chain(rank, name):
    """The choice of four requests of which one is not active. Other ranks than the first have other similarities."""
    shard, (z, extras) = shard_of(*CHAIN_VOCAB), chained()
    extras["premature_logits"] = shard.slice(extras["premature_logits"], -1, fill=torch.nan)
    extras["similarity"] = extras["similarity"] * (-1) ** rank
    policy = Policy(CHAINS[name], selector="greedy")
    view = View.of([[]] * 4, extras=extras)
    step = policy.step(shard.slice(z, -1, fill=torch.nan), view, policy.start(4), shard=shard, active=ACTIVE)
    return step.token_ids, step.logprobs


@TP
@pytest.mark.parametrize("name", CHAINS)
def test_contrasts_and_forced_ids_are_the_oracles_whatever_filter_comes_before_them(tp, name):
    z, extras = chained()
    scores = z
    for fields in (one.to_dict() for one in CHAINS[name]):
        if fields["name"] == "contrastive":
            whole = torch.zeros_like(z).scatter(1, extras["candidate_ids"], extras["similarity"])
            scores = oracle.contrastive(scores, whole, fields["k"], fields["alpha"])
        else:
            scores = final_scores({"transforms": [fields]}, scores, [[]] * 4, [[]] * 4, extras=extras)
    ids = torch.where(ACTIVE, scores.argmax(1), -1)
    best = scores.double().log_softmax(1).amax(1)
    for token_ids, logprobs in RESULTS(tp, "chain", name):
        assert token_ids.tolist() == ids.tolist()
        assert torch.allclose(logprobs, torch.where(ACTIVE, best, 0.0), atol=1e-6)
        assert torch.equal(bits(logprobs), bits(RESULTS(1, "chain", name)[0][1]))


def _unusable(rank):
    shard = shard_of(9)
    scores = open_scores(torch.zeros(2, shard.shard_size), shard, "unusable")
    extras = {"candidate_ids": torch.tensor([[0, 1], [0, 3]]), "similarity": torch.zeros(2, 2)}
    return attempt(lambda: Contrastive(2).apply(scores, View.of([[], []], extras=extras), {}))


def test_a_candidate_without_a_similarity_is_an_error_on_every_rank():
    assert_all_raise("another candidate", RESULTS(2, "unusable"), ["ValueError"], ["row 1", "candidate 1"])


def everything():
    return [Prior([1.0] * 9, 0.5, [0.5, 1.0]), *(one for one in every_transform() if one.name != "prior")]


def _no_rows(rank):
    """Every transform on no request at all."""
    shard, chosen = shard_of(9), []
    extras = {"premature_logits": torch.zeros(2, 0, shard.shard_size)}
    extras |= {"candidate_ids": torch.zeros(0, 4, dtype=torch.int64), "similarity": torch.zeros(0, 4)}
    for transform in everything():
        policy = Policy((transform,), selector="greedy")
        logits, state = torch.zeros(0, shard.shard_size), policy.start(2).rows([])
        step = policy.step(logits, View.of([], extras=extras), state, shard=shard)
        chosen.append(list(step.token_ids.shape))
    return chosen


@pytest.mark.parametrize("tp", [1, 3])
def test_every_transform_takes_a_batch_of_no_requests(tp):
    for chosen in RESULTS(tp, "no_rows"):
        assert chosen == [[0]] * len(everything())


def _send(rank):
    """Bytes of each all-gather of a contrast, a row."""
    shard, sent = shard_of(9), {}
    mine, layers = torch.zeros(ROWS, shard.shard_size), torch.zeros(3, ROWS, shard.shard_size)
    extras = {"candidate_ids": torch.arange(2).expand(ROWS, -1), "similarity": torch.zeros(ROWS, 2)}
    for name, transform, more in [
        ("contrastive", Contrastive(2), extras),
        ("dola", Dola(), {"premature_logits": layers[0]}),
        ("dola of 3 layers", Dola(), {"premature_logits": layers}),
    ]:
        scores = open_scores(mine, shard, name)
        scores.channel.open()
        shard.traffic.reset()
        transform.apply(scores, View.of([[]] * ROWS, extras=more), {})
        sent[name] = (shard.traffic.total_calls, shard.traffic.total_bytes / ROWS / (shard.size - 1))
    return sent


def test_contrasts_send_the_bytes_they_say():
    for sent in RESULTS(3, "send"):
        assert sent == {"contrastive": (3, 16 + 8 + 32), "dola": (4, 32), "dola of 3 layers": (5, 16 + 48 + 24)}


def _run(rank, what, *arguments):
    runners = {
        "process": _process, "constrain": _constrain, "contrast": _contrast, "generate": _generate, "refuse": _refuse,
        "bad_layers": _bad_layers, "chain": _chain, "unusable": _unusable, "no_rows": _no_rows, "send": _send,
    }  # fmt: skip
    return runners[what](rank, *arguments)


SIZES = {"refuse": (1, 4), "bad_layers": (1, 3), "unusable": (2,), "no_rows": (1, 3), "send": (3,)}
RESULTS = Batch(
    _run,
    [
        *(("process", name, seed) for name in PROCESSORS for seed in SEEDS),
        *(("constrain", seed) for seed in SEEDS),
        *(("contrast", *case) for case in CONTRASTS),
        *(("generate", batch) for batch in ((0, 1, 2), (2, 0))),
        *(("refuse", what) for what in BAD),
        *(("bad_layers", value) for value in BAD_VALUES),
        *(("chain", name) for name in CHAINS),
        ("unusable",),
        ("no_rows",),
        ("send",),
    ],
    lambda case: SIZES.get(case[0], ALL_SIZES),
)
