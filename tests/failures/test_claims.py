"""Failures of words: what a truncation, a search, an objective or a comparison is said to be."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from tests.beam_models import Toy, table
from tests.failures.decoding import kept, log_of, probabilities, step_of
from tests.failures.lab import failure, whole_shard
from vocab_parallel import CheckpointLayoutError, ConfigError, Manifest, VocabParallelLMHead, cross_entropy
from vocab_parallel.decode import (
    PRESETS,
    Epsilon,
    Eta,
    MinP,
    Policy,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    beam_search,
    best_first_search,
    hugging_face,
    llama_cpp,
    vllm,
)
from vocab_parallel.vocabulary import compare, require_comparable
from vocab_parallel.vocabulary.manifest import PolicyContract, RandomnessContract

ROW = log_of((0.4, 0.25, 0.15, 0.1, 0.06, 0.04))
ROOM = {"queue_size": 100, "max_expansions": 100}


def of(policy=None, **contract):
    """A manifest of a head with this policy."""
    said = None if policy is None else PolicyContract.of(policy, **contract)
    return Manifest.of(VocabParallelLMHead(4, shard=whole_shard(6)), policy=said, randomness=RandomnessContract(seed=1))


@failure(
    48,
    "A truncation said to keep the model's distribution",
    "shown",
    "A step gives log-probabilities of the model and of what it drew from: an active cut parts them by the mass that "
    "it dropped, and the trace counts the tokens; one that is off changes no bit.",
)
def test_a_cut_shows_in_log_probabilities_and_trace():
    model = ROW.exp()
    cuts = [TopK(3), TopP(0.7), MinP(0.3), Typical(0.7), Epsilon(0.1), Eta(0.3), TopNSigma(1.0)]
    for cut in cuts:
        policy = Policy((cut,))
        drawn, raw = probabilities(policy, ROW), probabilities(policy, ROW, logprobs="raw")
        assert torch.allclose(raw, model, atol=1e-9)
        mass = model[drawn > 0].sum()
        distance = (drawn - model).abs().sum() / 2
        assert distance.item() == pytest.approx(1 - mass.item(), abs=1e-9) and mass < 0.95, cut.name
        step, said = (step_of(policy, ROW, trace=True, logprobs=which) for which in ("processed", "raw"))
        assert (step.logprobs - said.logprobs).item() == pytest.approx(-math.log(mass), abs=1e-8)
        assert step.trace.removed.item() == 6 - step.trace.support.item() > 0
    for off in (TopK(6), TopP(1.0), MinP(0.0), Typical(1.0), Epsilon(0.0), Eta(0.0), TopNSigma(math.inf)):
        assert torch.equal(probabilities(Policy((off,)), ROW), probabilities(Policy(), ROW)), off.name


@failure(
    50,
    "A choice among N texts by a judge called a beam search",
    "refused",
    "`beam_search` takes no judge and its scores are the model's own log-probabilities; `n`, `best_of` and `best_of_n` "
    "are refused wherever a policy is written, with what to do instead.",
)
def test_a_beam_search_ranks_by_the_models_own_probabilities():
    whole = table({(): {0: 0.6, 1: 0.4}, (0,): {0: 0.7, 1: 0.3}, (1,): {0: 0.9, 1: 0.1}}, 2)
    model = Toy(whole_shard(2), lambda _, ids: whole(ids), [1])
    result = beam_search(model, [[0]], shard=model.shard, num_beams=4, max_new_tokens=2)
    texts = result.token_ids[0].tolist()
    assert texts == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert result.scores[0].exp().tolist() == pytest.approx([0.42, 0.36, 0.18, 0.04])
    assert max(texts, key=sum) == [1, 1], "a judge who counts ones takes the least likely"
    assert not {"verifier", "judge", "reward", "scorer"} & set(inspect.signature(beam_search).parameters)
    with pytest.raises(ConfigError, match=r"n=4 has no transform here; repeat the request with other streams"):
        vllm(n=4)
    with pytest.raises(ConfigError, match="knob 'best_of' is unknown"):
        vllm(best_of=4)
    with pytest.raises(ConfigError, match="'best_of_n' is no transform: it ranks finished texts by a judge outside"):
        Policy.from_dict({"transforms": ["best_of_n"]})


@failure(
    62,
    "Min-p taken for the better sampler because a benchmark said so",
    "refused",
    "Min-p is a cut like others: off unless asked for (llama_cpp has its library's default), and the gate before two "
    "runs are compared refuses one with it beside one without.",
)
def test_min_p_is_a_mechanism_that_nothing_prefers():
    for t, alpha in ((0.5, 0.3), (1.0, 0.3), (2.0, 0.3), (2.0, 0.05)):
        within = ROW[0] >= ROW.max() + t * math.log(alpha)
        assert kept(Policy((Temperature(t), MinP(alpha))), ROW) == [within.nonzero()[:, 0].tolist()]
    assert MinP() == MinP(0.0) and torch.equal(probabilities(Policy((MinP(),)), ROW), probabilities(Policy(), ROW))
    defaults = {name: [one.name for one in make().transforms] for name, make in PRESETS.items()}
    assert [name for name, chain in defaults.items() if "min_p" in chain] == ["llama_cpp"]
    with_it, without = of(vllm(min_p=0.1, top_p=0.9)), of(vllm(top_p=0.9))
    with pytest.raises(CheckpointLayoutError, match=r"policy\.transforms"):
        require_comparable(with_it, without)
    assert [one.kind for one in compare(with_it, of(vllm(min_p=0.2, top_p=0.9)))] == ["may tune"]


@failure(
    63,
    "A sampled softmax called a way to choose tokens",
    "refused",
    "No selector or transform of that name: a policy's file that asks for it is told that it estimates a training "
    "loss; the losses here normalise over every real id.",
)
def test_a_sampled_softmax_is_no_selector_and_no_transform():
    with pytest.raises(ConfigError, match="'sampled_softmax' is no transform: it estimates a training loss"):
        Policy.from_dict({"transforms": ["sampled_softmax"]})
    with pytest.raises(ValueError, match="selector must be 'sample' or 'greedy', got 'sampled_softmax'"):
        Policy(selector="sampled_softmax")
    shard, target = whole_shard(6), torch.tensor([1])
    few = ROW[:, [1, 3, 5]].log_softmax(1)[0, 0]
    assert few > ROW[0, 1] + 0.5, "over a few ids a token looks likelier than it is"
    assert cross_entropy(ROW, target, shard=shard).item() == pytest.approx(-math.log(0.25))
    with pytest.raises(TypeError, match="num_sampled"):
        cross_entropy(ROW, target, shard=shard, num_sampled=3)


@failure(
    64,
    "An adaptive or hierarchical softmax put in as a warper",
    "refused",
    "Neither is a transform, which a policy's file is told with the reason; and weights of such a layer do not load "
    "into a head, whose keys and rows are one table's.",
)
def test_another_output_layer_is_no_warper_and_does_not_load():
    layer = nn.AdaptiveLogSoftmaxWithLoss(4, 6, cutoffs=[2, 4], div_value=2.0)
    found = layer.log_prob(torch.ones(1, 4))
    assert found.exp().sum().item() == pytest.approx(1.0, abs=1e-5), "a distribution, of other weights"
    assert sum(p.numel() for p in layer.parameters()) != 6 * 4
    for name in ("adaptive_softmax", "hierarchical_softmax", "mixture_of_softmaxes"):
        with pytest.raises(ConfigError, match=rf"transforms\[1\]: '{name}' is no transform: it is an output layer"):
            Policy.from_dict({"transforms": ["temperature", {"name": name}]})
    head = VocabParallelLMHead(4, shard=whole_shard(6))
    before = head.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*weight.*Unexpected key.*head\.weight"):
        head.load_state_dict(layer.state_dict())
    assert torch.equal(head.weight, before)


@failure(
    65,
    "A search called A* and so believed to be optimal",
    "refused",
    "`proven` is derived from bounds and not from a name; with a heuristic declared admissible the result says that "
    "the proof is `assumed`, and a finished sequence that contradicts the heuristic is an error.",
)
def test_a_search_is_proven_by_bounds_and_a_false_heuristic_is_refused():
    rows = {(): {0: 0.6, 1: 0.4}, (0,): {0: 0.5, 1: 0.5}, (1,): {0: 0.99, 1: 0.01}}
    shard, whole = whole_shard(2), table(rows, 2)
    options = {"shard": shard, "branching": 2, "max_new_tokens": 2, **ROOM}

    def search(**more):
        return best_first_search(Toy(shard, lambda _, ids: whole(ids), [1]), [0], **options | more)

    def against_one(ids, total):
        return -5.0 if ids[:1] == (1,) else 0.0

    best = search()
    assert best.hypotheses[0].token_ids == (1, 0) and best.proven and not best.assumed
    stopped = search(heuristic=against_one, max_expansions=2)
    assert stopped.hypotheses[0].token_ids == (0, 0) and not stopped.proven, "an order alone proves nothing"
    assert search(heuristic=against_one) == best._replace(expansions=3)
    believed = search(heuristic=against_one, admissible=True)
    assert believed.hypotheses[0].token_ids == (0, 0) and believed.proven and believed.assumed
    with pytest.raises(ValueError, match=r"the heuristic is not admissible: \[1, 0\]"):
        search(heuristic=against_one, admissible=True, num_return=3)
    right = search(heuristic=lambda ids, total: 0.0 if len(ids) < 2 else -9.0, admissible=True, num_return=3)
    assert right.proven and not right.assumed
    with pytest.raises(ConfigError, match="'a_star' is no transform: it is a search over sequences"):
        Policy.from_dict({"transforms": ["a_star"]})


@failure(
    66,
    "Two runtimes compared without their order of transforms and kind of log-probabilities",
    "refused",
    "A manifest holds the transforms in order and which log-probabilities are reported; the gate before a comparison "
    "refuses manifests that differ in either, naming the field and why.",
)
def test_order_and_log_probabilities_must_match_before_runs_are_compared():
    knobs = {"temperature": 2.0, "top_p": 0.75}
    theirs = llama_cpp(temp=2.0, top_p=0.75, min_p=0.0, top_k=0)
    ours = hugging_face(do_sample=True, top_k=0, **knobs)
    row = log_of((0.6, 0.2, 0.1, 0.06, 0.04, 1e-9))
    assert (kept(ours, row), kept(theirs, row)) == ([[0, 1, 2]], [[0, 1]]), "the same knobs"
    with pytest.raises(CheckpointLayoutError, match=r"policy\.transforms"):
        require_comparable(of(ours), of(theirs))
    require_comparable(of(ours), of(vllm(**knobs)))
    processed, raw = (step_of(ours, row, logprobs=which) for which in ("processed", "raw"))
    assert torch.equal(processed.token_ids, raw.token_ids) and abs(processed.logprobs - raw.logprobs).item() > 0.1
    with pytest.raises(CheckpointLayoutError, match=r"policy\.logprobs is processed here, raw there"):
        require_comparable(of(ours), of(ours, logprobs="raw"), names=("here", "there"))
