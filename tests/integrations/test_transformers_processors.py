"""Processors against Transformers' own, on prompts of equal length: the same scores in every bit."""

from __future__ import annotations

import math

import torch
from transformers.generation import logits_process as theirs

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.transforms.processors import (
    BadWords,
    Bias,
    Force,
    MinLength,
    NoRepeatNgram,
    RepetitionPenalty,
    Suppress,
)
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.select.scores import open_scores

ROWS, VOCAB = 5, 23
SHARD = VocabShard(VocabLayout(VOCAB, 1, multiple_of=1))
SEEDS = range(26)
EOS = [3, 22]


def ids_and_scores(seed, length):
    """Prompts of few different ids."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 4 + seed % 5, (ROWS, length), generator=generator)
    return ids, torch.randn(ROWS, VOCAB, generator=generator) * 3


def assert_equal(pairs, ids, z, prompt_length):
    view = View.of(ids, [prompt_length] * ROWS)
    for ours, other in pairs:
        got = ours.apply(open_scores(z, SHARD, "test"), view, {}).values
        assert torch.equal(got, other(ids, z.clone())), ours


def test_penalties_and_ngrams_equal_transformers():
    for seed in SEEDS:
        ids, z = ids_and_scores(seed, seed % 13)
        penalty, n, ignored = (0.5, 1.3, 4.0)[seed % 3], 1 + seed % 4, min(seed % 5, ids.shape[1])
        pairs = [
            (RepetitionPenalty(penalty), theirs.RepetitionPenaltyLogitsProcessor(penalty)),
            (RepetitionPenalty(penalty, "generated"), theirs.RepetitionPenaltyLogitsProcessor(penalty, ignored)),
            (NoRepeatNgram(n), theirs.NoRepeatNGramLogitsProcessor(n)),
        ]
        assert_equal(pairs, ids, z, ignored)


def test_biases_bans_and_lengths_equal_transformers():
    single = {2: 0.3, 7: -1.1, 22: -math.inf}
    for seed in SEEDS:
        ids, z = ids_and_scores(seed, 1 + seed % 7)
        generator = torch.Generator().manual_seed(seed + 1)
        words = [torch.randint(0, 5, (1 + at % 4,), generator=generator).tolist() for at in range(12)]
        biases = {tuple(word): float(torch.randint(-9, 9, (1,), generator=generator)) / 4 for word in words}
        pairs = [
            (Bias(single), theirs.SequenceBiasLogitsProcessor({(key,): value for key, value in single.items()})),
            (Bias(sequences=list(biases.items())), theirs.SequenceBiasLogitsProcessor(biases)),
            (BadWords(words), theirs.NoBadWordsLogitsProcessor(words)),
            (MinLength(4, EOS, "all"), theirs.MinLengthLogitsProcessor(4, EOS)),
            (MinLength(3, EOS), theirs.MinNewTokensLengthLogitsProcessor(1, 3, EOS)),
            (Suppress(EOS), theirs.SuppressTokensLogitsProcessor(EOS)),
            (Suppress(EOS, [0]), theirs.SuppressTokensAtBeginLogitsProcessor(EOS, 1)),
            (Force([5], 1, "all", 0.0), theirs.ForcedBOSTokenLogitsProcessor(5)),
            (Force(EOS, 3, "all", 0.0), theirs.ForcedEOSTokenLogitsProcessor(4, EOS)),
        ]
        assert_equal(pairs, ids, z, 1)
