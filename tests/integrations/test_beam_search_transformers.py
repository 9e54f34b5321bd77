"""Our beam search beside Transformers' own, on a small random Llama with its cache."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.search.beam_search import beam_search
from vocab_parallel.decode.search.searching import Stepped
from vocab_parallel.decode.transforms.bans import NoRepeatNgram
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.processors import RepetitionPenalty


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.6,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class Cached:
    """A Transformers model with its cache as a search's model."""

    def __init__(self, model):
        self.model = model
        self.name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.no_grad()
    def __call__(self, prefix, parents, cache):
        out = self.model(prefix if cache is None else prefix[:, -1:], use_cache=True, **{self.name: cache})
        return Stepped(out.logits[:, -1], getattr(out, self.name))


MANY_ENDS = (5, 7, 20, 30, 33, 2, 8, 9, 11, 12, 13, 14, 15, 16)
SHARD = VocabShard(VocabLayout(37, 1, multiple_of=1))


def compare(model, beams, eos, transforms=(), processors=None, **options):
    """Ids, scores and parents of both searches, from the same prompts."""
    prompts = torch.randint(3, 37, (2, 5), generator=torch.Generator().manual_seed(0))
    theirs = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), num_beams=beams, max_new_tokens=10, eos_token_id=list(eos),
        pad_token_id=1, do_sample=False, num_return_sequences=beams, return_dict_in_generate=True, output_scores=True,
        output_logits=True, **options, **(processors or {}),
    )  # fmt: skip
    mine = beam_search(
        Cached(model), prompts, shard=SHARD, num_beams=beams, max_new_tokens=10, eos_ids=eos, transforms=transforms,
        renormalize=not transforms, **options,
    )  # fmt: skip
    ids, parents = mine.token_ids.flatten(0, 1), mine.parents.flatten(0, 1)
    assert torch.equal(torch.where(ids < 0, 1, ids), theirs.sequences[:, 5:])
    torch.testing.assert_close(mine.scores.flatten(), theirs.sequences_scores.double(), atol=1e-5, rtol=1e-6)
    first_beam = torch.arange(2).repeat_interleave(beams)[:, None] * beams
    assert torch.equal(torch.where(parents < 0, -1, parents + first_beam), theirs.beam_indices.long())
    return mine


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize(("beams", "eos"), [(2, (5, 9, 11)), (4, (5,)), (4, MANY_ENDS)])
def test_ids_scores_and_parents_are_those_of_generate(llama, beams, eos, alpha, early_stopping):
    options = {"length_penalty": alpha, "early_stopping": early_stopping}
    compare(llama, beams, eos, **options)


def test_penalties_on_log_probabilities_are_added_up_as_generate_does(llama):
    """Transformers normalises first and penalises then, without a normalisation after."""
    plain = compare(llama, 3, (5, 9), length_penalty=0.0, early_stopping="never")
    transforms = [Normalize(), RepetitionPenalty(1.7), NoRepeatNgram(2)]
    processors = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    penalised = compare(llama, 3, (5, 9), transforms, processors, length_penalty=0.0, early_stopping="never")
    assert not torch.equal(plain.token_ids, penalised.token_ids), "the penalties must matter"
