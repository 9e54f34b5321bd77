"""Policies for tests: one of every transform, random chains of them, and logits with ties and masks."""

from __future__ import annotations

import dataclasses
import random

import torch

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.constraints import Fsm
from vocab_parallel.decode.transforms.contrast import Contrastive, Dola
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.machine import StateMachine
from vocab_parallel.decode.transforms.penalties import RecentPenalties
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
from vocab_parallel.decode.transforms.transform import Transform
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical

VOCAB = 9


def alone(vocab=VOCAB):
    """One process with the whole vocabulary."""
    return VocabShard(VocabLayout(vocab, 1, multiple_of=1))


@dataclasses.dataclass(frozen=True, eq=False)
class Keep(Transform):
    """A filter that keeps a list of ids, and may leave none."""

    name = "keep"
    ids: tuple[int, ...] = ()

    def apply(self, scores, view, state):
        return scores.keep(scores.listed(torch.tensor(self.ids, dtype=torch.int64)), keeps_peak=False)


def every_transform():
    """One of each, with parameters that are not the defaults."""
    return [
        Bias({3: 1.5, 4: -float("inf")}, sequences=(((1, 2), 0.5),)),
        Suppress([1, 2], steps=(0,)),
        Force([3], 2, "all", 0.0),
        MinLength(3, [2], "all"),
        BadWords([[1], [2, 3]], "generated"),
        NoRepeatNgram(2),
        RepetitionPenalty((1.3, 0.9), "generated"),
        FrequencyPenalty(0.4, "all"),
        PresencePenalty(-0.5),
        RecentPenalties(4, 1.2, 0.1, 0.3),
        Prior([1.0, 2.0, 0.0], 0.5, 0.7),
        Temperature((0.0, 0.7)),
        DynamicTemperature(0.5, 1.5, 2.0),
        TopK(7),
        TopP(0.9),
        MinP(0.05),
        Typical(0.8),
        Epsilon(0.01),
        Eta(0.02),
        TopNSigma(float("inf")),
        MirostatV2(4.0, 0.2),
        Fsm(StateMachine.from_sequences([[1, 2], [3]]), eos_ids=(0,)),
        Contrastive(4, 0.5),
        Dola(0.2),
        Normalize(),
    ]


def chain_of(seed, rows, longest=4, vocab=VOCAB):
    """A policy of up to `longest` transforms with parameters drawn for all rows or for each; never an empty row."""
    draw = random.Random(seed)

    def each(make):
        return tuple(make() for _ in range(rows)) if draw.random() < 0.4 else make()

    makers = {
        "bias": lambda: Bias({draw.randrange(vocab): draw.uniform(-3, 3) for _ in range(3)}),
        "suppress": lambda: Suppress([draw.randrange(vocab)]),
        "force": lambda: Force([draw.randrange(vocab) for _ in range(3)], draw.randrange(3), score=0.0),
        "min_length": lambda: MinLength(each(lambda: draw.randrange(6)), [draw.randrange(vocab)]),
        "bad_words": lambda: BadWords([[draw.randrange(vocab), draw.randrange(vocab)] for _ in range(2)]),
        "no_repeat_ngram": lambda: NoRepeatNgram(each(lambda: draw.choice([0, 3]))),
        "repetition_penalty": lambda: RepetitionPenalty(each(lambda: draw.uniform(0.7, 2.0))),
        "frequency_penalty": lambda: FrequencyPenalty(each(lambda: draw.uniform(-1, 1))),
        "presence_penalty": lambda: PresencePenalty(each(lambda: draw.uniform(-1, 1)), "all"),
        "recent_penalties": lambda: RecentPenalties(each(lambda: draw.randrange(-1, 5)), 1.25, 0.25, 0.5),
        "prior": lambda: Prior([draw.uniform(0, 5) for _ in range(vocab)], 0.5, each(lambda: draw.uniform(0, 1))),
        "temperature": lambda: Temperature(each(lambda: draw.choice([0.0, 0.5, 1.0, 1.7]))),
        "dynamic_temperature": lambda: DynamicTemperature(0.5, each(lambda: draw.uniform(0.5, 2.0)), 1.5),
        "top_k": lambda: TopK(each(lambda: draw.randrange(1, vocab + 3))),
        "top_p": lambda: TopP(each(lambda: draw.choice([0.3, 0.8, 0.95, 1.0]))),
        "min_p": lambda: MinP(each(lambda: draw.choice([0.0, 0.02, 0.3]))),
        "typical": lambda: Typical(each(lambda: draw.choice([0.4, 0.9, 1.0]))),
        "epsilon": lambda: Epsilon(each(lambda: draw.choice([0.0, 0.03, 0.2]))),
        "eta": lambda: Eta(each(lambda: draw.choice([0.0, 0.03, 0.2]))),
        "top_n_sigma": lambda: TopNSigma(each(lambda: draw.choice([0.5, 1.0, 2.0]))),
        "mirostat_v2": lambda: MirostatV2(each(lambda: draw.uniform(0.5, 3))),
        "normalize": Normalize,
    }
    names = draw.sample(sorted(makers), draw.randrange(1, longest + 1))
    hard = [name for name in names if name in ("suppress", "force", "min_length", "bad_words", "no_repeat_ngram")]
    soft = [name for name in names if name not in hard]
    chain = tuple(makers[name]() for name in (*hard[:1], *soft))
    return Policy(chain, selector=draw.choice(["sample", "sample", "greedy"]), name=f"chain {seed}")


def logits_of(seed, rows, dtype=torch.float32, *, masked=False, vocab=VOCAB):
    """Quantised, so that ties are common; with `masked` some are -inf, never all of a row."""
    draw = torch.Generator().manual_seed(1000 + seed)
    logits = (torch.randn(rows, vocab, generator=draw, dtype=torch.float64) * 8).round() / 4
    if masked:
        mask = torch.rand(rows, vocab, generator=draw) < 0.3
        mask[:, ::2] = False
        logits = logits.masked_fill(mask, -torch.inf)
    return logits.to(dtype)


def request_lists(draw, rows, vocab=VOCAB):
    """Prompts and generated ids of some lengths, as lists."""

    def ids(longest):
        count = int(torch.randint(0, longest, (), generator=draw))
        return torch.randint(0, vocab, (count,), generator=draw).tolist()

    return [ids(5) for _ in range(rows)], [ids(4) for _ in range(rows)]
