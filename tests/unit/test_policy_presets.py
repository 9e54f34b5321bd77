"""The orders of other libraries: against Transformers' own list of processors, and by hand where the order matters."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.presets import PRESETS, hugging_face, llama_cpp, vllm
from vocab_parallel.decode.transforms.machine import StateMachine
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.errors import ConfigError
from vocab_parallel.select.streams import Streams

VOCAB = 30


def distribution(policy, logits, prefixes=None, prompt_length=None):
    """Log-probabilities `[T, V]` that the policy draws from, by id."""
    rows, vocab = logits.shape
    view = View.of(prefixes if prefixes is not None else [[]] * rows, prompt_length)
    state = policy.start(rows, Streams.of([0] * rows))
    shard = VocabShard(VocabLayout(vocab, 1, multiple_of=1))
    top = policy.step(logits, view, state, shard=shard, top_logprobs=vocab).top
    ids = torch.where(top.token_ids < 0, vocab, top.token_ids)
    filled = torch.full((rows, vocab + 1), -torch.inf, dtype=torch.float64)
    return filled.scatter(1, ids, top.logprobs)[:, :vocab]


def kept(policy, probabilities, prefixes=None, prompt_length=None):
    """The ids that are left of one row of probabilities."""
    logits = torch.tensor([probabilities], dtype=torch.float64).log()
    return (distribution(policy, logits, prefixes, prompt_length)[0] > -torch.inf).nonzero()[:, 0].tolist()


def names(policy):
    return [transform.name for transform in policy.transforms]


# Transformers


def theirs(knobs, ids, prompt_length):
    """The scores after Transformers' own list of processors, built by its own code."""
    from transformers import GenerationConfig, PreTrainedConfig
    from transformers.generation.utils import GenerationMixin

    class Model(GenerationMixin):
        config = PreTrainedConfig()

    config = GenerationConfig(**{"top_k": 50, "temperature": 1.0, **knobs})
    eos = config.eos_token_id
    config._eos_token_tensor = None if eos is None else torch.tensor([eos])
    processors = Model()._get_logits_processor(
        config, input_ids_seq_length=prompt_length, model_kwargs={}, device="cpu"
    )
    return lambda logits: processors(ids, logits.clone())


def knobs_of(seed):
    """Some knobs, of both kinds."""
    draw = random.Random(seed)
    eos = draw.choice([7, 8])
    some = {
        "temperature": draw.uniform(0.3, 2.0), "top_k": draw.randrange(2, VOCAB), "top_p": draw.uniform(0.3, 0.99),
        "min_p": draw.uniform(0.01, 0.3), "typical_p": draw.uniform(0.3, 0.99),
        "epsilon_cutoff": draw.uniform(0.01, 0.1), "eta_cutoff": draw.uniform(0.01, 0.1),
        "repetition_penalty": draw.uniform(0.8, 1.6),
        "no_repeat_ngram_size": draw.randrange(1, 4), "bad_words_ids": [[draw.randrange(VOCAB)], [7], [1, 2], [3, 4]],
        "sequence_bias": [[[draw.randrange(VOCAB)], 2.0], [[1, 2], -3.0]], "min_length": draw.randrange(5, 12),
        "min_new_tokens": draw.randrange(1, 6), "suppress_tokens": [draw.randrange(VOCAB)],
        "begin_suppress_tokens": [draw.randrange(VOCAB)], "renormalize_logits": True,
    }  # fmt: skip
    chosen = {name: some[name] for name in draw.sample(sorted(some), draw.randrange(2, 7))}
    return {"do_sample": True, "eos_token_id": eos, **chosen}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(60))
def test_any_knobs_give_the_distribution_of_transformers(seed):
    knobs, draw = knobs_of(seed), torch.Generator().manual_seed(seed)
    logits = torch.randn(4, VOCAB, generator=draw) * 3
    ids = torch.randint(0, 6, (4, 8), generator=draw)
    prompt_length = 8 if seed % 2 else 5
    scores = theirs(knobs, ids, prompt_length)(logits)
    policy = hugging_face(**knobs)
    ours = distribution(policy, logits, ids, torch.full((4,), prompt_length))
    expected = scores.double().log_softmax(1)
    assert torch.equal(ours > -torch.inf, expected > -torch.inf), policy.to_json()
    finite = expected > -torch.inf
    assert torch.allclose(ours[finite], expected[finite], atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [1, 2, 5])
def test_forced_ends_are_those_of_transformers(length):
    knobs = {"forced_bos_token_id": 3, "forced_eos_token_id": 7, "max_length": 6, "eos_token_id": 7}
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(length))
    ids = torch.ones(2, length, dtype=torch.int64)
    expected = theirs(knobs, ids, 1)(logits).double().log_softmax(1)
    assert torch.allclose(distribution(hugging_face(**knobs), logits, ids), expected, atol=1e-6)


def test_hugging_face_takes_tensors_and_one_value_for_each_request():
    policy = hugging_face(do_sample=True, temperature=torch.tensor(0.5), top_k=torch.tensor([2, 3]))
    assert [policy.transforms[0].temperature, policy.transforms[1].k] == [0.5, (2, 3)]
    assert hugging_face(forced_eos_token_id=3, max_length=[5, 9]).transforms[0].at == (4, 8)


def test_hugging_face_without_sampling_is_greedy_and_takes_no_knob_of_sampling():
    policy = hugging_face(repetition_penalty=1.2)
    assert (policy.selector, names(policy)) == ("greedy", ["repetition_penalty"])
    with pytest.raises(ConfigError, match="temperature acts with do_sample=True only"):
        hugging_face(temperature=0.5)


def test_hugging_face_orders_all_its_knobs():
    policy = hugging_face(
        do_sample=True, renormalize_logits=True, eta_cutoff=0.1, epsilon_cutoff=0.1, typical_p=0.9, min_p=0.1,
        top_p=0.9, temperature=0.7, begin_suppress_tokens=[1], suppress_tokens=[2], forced_eos_token_id=3, max_length=9,
        constraint=StateMachine.forced([1]), min_new_tokens=2, min_length=3, eos_token_id=3, bad_words_ids=[[4]],
        no_repeat_ngram_size=2, repetition_penalty=1.2, sequence_bias={(5,): 1.0},
    )  # fmt: skip
    assert names(policy) == [
        "bias", "repetition_penalty", "no_repeat_ngram", "bad_words", "min_length", "min_length", "fsm", "force",
        "suppress", "suppress", "temperature", "top_k", "top_p", "min_p", "typical", "epsilon", "eta", "normalize",
    ]  # fmt: skip


# what the orders mean, by hand


def test_temperature_comes_before_top_p_and_min_p_in_transformers_and_vllm_and_after_them_in_llama_cpp():
    probabilities = [0.6, 0.2, 0.1, 0.06, 0.04]
    # at temperature 2 they go like their roots: 0.39, 0.22, 0.16, 0.12, 0.10
    assert kept(hugging_face(do_sample=True, temperature=2.0, top_p=0.75), probabilities) == [0, 1, 2]
    assert kept(vllm(temperature=2.0, top_p=0.75), probabilities) == [0, 1, 2]
    assert kept(llama_cpp(temp=2.0, top_p=0.75, min_p=0.0, top_k=0), probabilities) == [0, 1]
    # as parts of the largest: 1, 1/3, 1/6, 1/10, 1/15; their roots 1, 0.58, 0.41, 0.32, 0.26
    assert kept(hugging_face(do_sample=True, temperature=2.0, min_p=0.3), probabilities) == [0, 1, 2, 3]
    assert kept(vllm(temperature=2.0, min_p=0.3), probabilities) == [0, 1, 2, 3]
    assert kept(llama_cpp(temp=2.0, top_p=1.0, min_p=0.3, top_k=0), probabilities) == [0, 1]


def test_min_p_comes_before_top_p_in_vllm_and_after_it_in_transformers_and_llama_cpp():
    probabilities = [0.5, 0.2, 0.17, 0.13]
    # min-p 0.3 leaves 0.5, 0.2, 0.17 of a sum of 0.87: two of them are 0.80 of it, before it they are 0.7
    assert kept(vllm(min_p=0.3, top_p=0.78), probabilities) == [0, 1]
    assert kept(hugging_face(do_sample=True, min_p=0.3, top_p=0.78), probabilities) == [0, 1, 2]
    assert kept(llama_cpp(temp=1.0, min_p=0.3, top_p=0.78), probabilities) == [0, 1, 2]


def test_top_k_comes_before_top_p_in_all_of_them():
    probabilities = [0.4, 0.22, 0.18, 0.1, 0.1]
    # of the best three, two are 0.775 of their mass; of all they are 0.62
    for policy in (hugging_face(do_sample=True, top_k=3, top_p=0.7), vllm(top_k=3, top_p=0.7)):
        assert kept(policy, probabilities) == [0, 1]
    assert kept(llama_cpp(temp=1.0, top_k=3, top_p=0.7, min_p=0.0), probabilities) == [0, 1]
    assert kept(Policy(vllm(top_k=3, top_p=0.7).transforms[::-1]), probabilities) == [0, 1, 2]


def test_a_penalty_comes_before_the_filters_and_can_change_what_they_keep():
    probabilities = [0.4, 0.35, 0.15, 0.1]  # all logarithms are negative: 2 log 0.4 is below log 0.35 and log 0.15
    seen = [[0]]
    assert kept(hugging_face(do_sample=True, repetition_penalty=2.5, top_k=2), probabilities, seen) == [1, 2]
    assert kept(vllm(repetition_penalty=2.5, top_k=2), probabilities, seen) == [1, 2]
    assert kept(llama_cpp(penalty_repeat=2.5, top_k=2, top_p=1.0, min_p=0.0), probabilities, seen) == [1, 2]
    late = vllm(repetition_penalty=2.5, top_k=2).transforms[::-1]
    assert kept(Policy(late), probabilities, seen) == [0, 1]


def test_vllm_multiplies_the_repetition_penalty_before_it_subtracts_the_others():
    logits, prefix = torch.tensor([[2.0, -1.0, 0.5]]), [[2, 0, 0]]  # the prompt is the first id
    policy = vllm(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.125)
    # id 0, generated twice: 2 / 2 - 0.5 - 0.125; id 2, in the prompt: 0.5 / 2
    expected = torch.tensor([[0.375, -1.0, 0.25]]).double().log_softmax(1)
    assert torch.allclose(distribution(policy, logits, prefix, [1]), expected, atol=1e-9)


def test_llama_cpp_penalises_the_last_ids_of_prompt_and_text():
    logits, prefix = torch.tensor([[2.0, -1.0, 0.5]]), [[2, 0, 0]]
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0}
    policy = llama_cpp(penalty_repeat=2.0, penalty_freq=0.25, penalty_present=0.125, penalty_last_n=2, **off)
    expected = torch.tensor([[0.375, -1.0, 0.5]]).double().log_softmax(1)
    assert torch.allclose(distribution(policy, logits, prefix, [1]), expected, atol=1e-9)
    policy = llama_cpp(penalty_repeat=2.0, penalty_freq=0.25, penalty_present=0.125, **off)
    expected = torch.tensor([[0.375, -1.0, 0.25 - 0.375]]).double().log_softmax(1)
    assert torch.allclose(distribution(policy, logits, prefix, [1]), expected, atol=1e-9)


def test_vllm_orders_all_its_knobs():
    policy = vllm(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, frequency_penalty=0.1,
        presence_penalty=0.1, logit_bias={1: 2.0}, allowed_token_ids=[1, 2, 3], bad_words=[[4]], min_tokens=2,
        stop_token_ids=[5], constraint=StateMachine.forced([1]),
    )  # fmt: skip
    assert names(policy) == [
        "fsm", "fsm", "bad_words", "min_length", "bias", "repetition_penalty", "frequency_penalty", "presence_penalty",
        "temperature", "min_p", "top_k", "top_p",
    ]  # fmt: skip


def test_vllm_allows_only_the_allowed_ids_at_every_step():
    policy = vllm(allowed_token_ids=[1, 3])
    state, view = policy.start(1, Streams.of([0])), View.of([[]])
    for _ in range(5):
        step = policy.step(torch.zeros(1, 5), view, state, shard=VocabShard(VocabLayout(5, 1, multiple_of=1)))
        state, view = step.state, view.appended(step.token_ids)
        assert step.token_ids.item() in (1, 3)


def test_a_constraint_of_vllm_is_ended_by_its_ends_alone():
    policy = vllm(constraint=StateMachine.from_sequences([[3]]), eos_token_id=1, stop_token_ids=[4])
    state = policy.start(1, Streams.of([0]))
    shard, top = VocabShard(VocabLayout(5, 1, multiple_of=1)), []
    for prefix in ([], [3]):
        step = policy.step(torch.zeros(1, 5), View.of([prefix], [0]), state, shard=shard, top_logprobs=3)
        state = step.state
        top.append(step.top.token_ids.tolist())
    assert top == [[[3, -1, -1]], [[1, 4, -1]]]


def test_vllm_takes_one_value_for_each_request_and_a_tiny_temperature_as_greedy():
    policy = vllm(temperature=[0.0, 1e-6, 1.0], top_k=[-1, 0, 2], logit_bias={"1": 3.0})
    logits = torch.tensor([[0.0, 0.0, 1.0, 2.0]] * 3).log_softmax(1)
    found = distribution(policy, logits) > -torch.inf
    assert found.tolist() == [
        [False, True, False, False],
        [False, True, False, False],
        [False, True, False, True],
    ]


def test_llama_cpp_has_its_defaults_and_its_order():
    assert names(llama_cpp()) == ["top_k", "top_p", "min_p", "temperature"]
    policy = llama_cpp(
        penalty_repeat=1.1, top_n_sigma=2.0, typ_p=0.9, dynatemp_range=0.3, logit_bias={1: -1.0},
        constraint=StateMachine.forced([1]),
    )  # fmt: skip
    assert names(policy) == [
        "fsm", "bias", "recent_penalties", "top_n_sigma", "top_k", "typical", "top_p", "min_p", "dynamic_temperature",
    ]  # fmt: skip
    last = policy.transforms[-1]
    assert (last.low, last.high) == (pytest.approx(0.5), pytest.approx(1.1))


def test_llama_cpp_takes_another_order_and_a_negative_temperature_as_greedy():
    policy = llama_cpp(samplers=["temperature", "top_k"], temp=[-1.0, 2.0])
    assert names(policy) == ["temperature", "top_k"]
    assert policy.transforms[0].temperature == (0.0, 2.0)
    with pytest.raises(ConfigError, match="did you mean top_k"):
        llama_cpp(samplers=["topk"])


def test_mirostat_replaces_the_truncation_of_llama_cpp():
    assert names(llama_cpp(mirostat=2, penalty_repeat=1.3, logit_bias={1: 1.0})) == [
        "bias", "temperature", "mirostat_v2",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="version 1"):
        llama_cpp(mirostat=1)


@pytest.mark.parametrize(
    ("preset", "knobs", "words"),
    [
        ("llama_cpp", {"dry_multiplier": 0.8}, "dry_multiplier=0.8 has no transform here"),
        ("llama_cpp", {"xtc_probability": 0.5}, "not ignored"),
        ("llama_cpp", {"ignore_eos": True}, "logit_bias"),
        ("llama_cpp", {"top_pp": 0.5}, "did you mean top_p"),
        ("vllm", {"guided_decoding": "json"}, "StateMachine"),
        ("vllm", {"bad_words": ["no"]}, "tokenizer"),
        ("vllm", {"min_tokens": 3}, "stop_token_ids"),
        ("hugging_face", {"num_beams": 4}, "beam_search"),
        ("hugging_face", {"top_h": 0.4}, "top_h"),
        ("hugging_face", {"min_new_tokens": 3}, "eos_token_id"),
        ("hugging_face", {"forced_eos_token_id": 3}, "max_length"),
        ("hugging_face", {"temprature": 1.0}, "did you mean temperature"),
    ],
)
def test_what_is_not_here_is_refused_and_not_ignored(preset, knobs, words):
    with pytest.raises(ConfigError, match=words):
        PRESETS[preset](**knobs)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_knob_that_is_off_is_accepted_and_a_value_out_of_range_is_an_error(preset):
    off = {"hugging_face": {"guidance_scale": 1.0}, "vllm": {"n": 1}, "llama_cpp": {"dry_multiplier": 0.0}}
    PRESETS[preset](**off[preset])
    bad = {"do_sample": True, "top_p": math.nan} if preset == "hugging_face" else {"top_p": math.nan}
    with pytest.raises(ValueError, match="top_p"):
        PRESETS[preset](**bad)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_policy_like_any_other(preset):
    policy = PRESETS[preset](**({"do_sample": True} if preset == "hugging_face" else {}))
    assert policy.name == preset
    assert Policy.from_dict(json.loads(policy.to_json())).digest == policy.digest
