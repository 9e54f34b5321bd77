"""Drawn requests, processors with drawn parameters, and the oracle's answers."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.constraints import Fsm, StateMachine
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
from vocab_parallel.decode.transforms.transform import Transform, View
from vocab_parallel.select.scores import Scores

ROWS = 6
PROCESSORS: dict[str, type[Transform]] = {
    one.name: one
    for one in (
        BadWords, Bias, Force, FrequencyPenalty, MinLength, NoRepeatNgram, PresencePenalty, Prior, RepetitionPenalty,
        Suppress,
    )
}  # fmt: skip
SCOPES = ("all", "generated", "prompt")


class Requests(NamedTuple):
    """Scores `[T, V]`, and the ids of each request."""

    z: Tensor
    prompts: list[list[int]]
    generated: list[list[int]]

    @property
    def view(self) -> View:
        """With padding before, behind and in the middle: a prompt that is padded on the right, then generated ids."""
        longest = max(len(prompt) + len(more) for prompt, more in zip(self.prompts, self.generated, strict=True)) + 2
        rows = []
        for at, (prompt, more) in enumerate(zip(self.prompts, self.generated, strict=True)):
            free = longest - len(prompt) - len(more)
            before = (0, free, free // 2)[at % 3]
            middle = (free - before) // 2
            rows.append([-1] * before + prompt + [-1] * middle + more + [-1] * (free - before - middle))
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        steps = torch.tensor([len(more) for more in self.generated])
        return View(torch.tensor(rows, dtype=torch.int64), lengths, steps)


def requests(seed: int, vocab: int, dtype: torch.dtype = torch.float32) -> Requests:
    """Few different ids, so that they repeat; quantised scores with both zeros and -inf among them."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(ROWS, vocab, generator=generator, dtype=torch.float64) * 3
    z = z.round() if seed % 2 else z
    z[:, 1:] = torch.where(torch.rand(ROWS, vocab - 1, generator=generator) < 0.1, -torch.inf, z[:, 1:])
    few = [draw.randrange(vocab) for _ in range(3)] + [vocab - 1]
    prompts = [[draw.choice(few) for _ in range(draw.randrange(0, 6))] for _ in range(ROWS)]
    generated = [[draw.choice(few) for _ in range(draw.randrange(0, 5))] for _ in range(ROWS)]
    return Requests(z.to(dtype), prompts, generated)


def processor(name: str, seed: int, vocab: int) -> Transform:
    """A processor with drawn parameters: for all rows, or for each."""
    draw = random.Random(seed * 1000 + sorted(PROCESSORS).index(name))
    each = seed % 3 > 0
    fields = {key: field(draw) for key, field in _fields(draw, vocab, each)[name].items()}
    return PROCESSORS[name](**fields)


def _fields(draw: random.Random, vocab: int, each: bool) -> dict[str, dict[str, Any]]:
    def per_row(one):
        return lambda draw: [one(draw) for _ in range(ROWS)] if each else one(draw)

    def some_ids(draw, least=0):
        return [draw.randrange(vocab) for _ in range(draw.randrange(least, 4))]

    def amounts(draw):
        return {draw.randrange(vocab): draw.choice([-float("inf"), 1.7, -2.3, 0.0, 40.0]) for _ in range(3)}

    def number(*values):
        return per_row(lambda draw: draw.choice(values))

    def scope(draw):
        return draw.choice(SCOPES)

    def counts(draw):
        return draw.choice(["generated", "all"])

    def ids(least=0):
        return per_row(lambda draw: some_ids(draw, least))

    def word(draw):
        return some_ids(draw, 1)

    return {
        "bias": {
            "bias": per_row(amounts),
            "sequences": lambda draw: [(word(draw), draw.choice([0.3, -1.1, -float("inf")])) for _ in range(5)],
            "table": lambda draw: draw.choice([None, [(0.25, -0.1)[v % 2] for v in range(vocab)]]),
        },
        "prior": {
            "frequencies": lambda draw: [draw.choice([0, 1, 7, 1000]) for _ in range(vocab)],
            "smoothing": lambda draw: draw.choice([0.5, 1]),
            "strength": number(0, 0.3, 1.0, -2),
        },
        "repetition_penalty": {"penalty": number(0.5, 1, 1.3, 7.7), "scope": scope},
        "frequency_penalty": {"penalty": number(0, -0.7, 0.3, 2), "scope": scope},
        "presence_penalty": {"penalty": number(0, -0.7, 0.3, 2), "scope": scope},
        "suppress": {"token_ids": ids(), "steps": lambda draw: draw.choice([None, [0], [1, 2, 3]])},
        "force": {
            "token_ids": ids(1), "at": number(0, 1, 2, 3), "counts": counts,
            "score": lambda draw: draw.choice([None, 0.0, 1.5]),
        },
        "min_length": {"length": number(0, 1, 2, 5), "eos_ids": ids(), "counts": counts},
        "bad_words": {"words": per_row(lambda draw: [word(draw) for _ in range(5)]), "scope": scope},
        "no_repeat_ngram": {"n": number(0, 1, 2, 3, 9), "scope": scope},
    }  # fmt: skip


def machine(seed: int, vocab: int) -> Fsm:
    """A machine with drawn ranges of ids, and a state for each row."""
    draw = random.Random(seed)
    states = 5
    edges = []
    for state in range(states):
        cuts = sorted(draw.sample(range(vocab + 1), min(vocab + 1, 5)))
        ranges = [one for one in pairwise(cuts) if draw.random() < 0.6]
        edges += [(state, low, high, draw.randrange(states)) for low, high in ranges]
    built = StateMachine.of_edges(edges, states, [0, 2], 1)
    return Fsm(built, [draw.randrange(states) for _ in range(ROWS)], eos_ids=[vocab - 1])


def placed(scores: Scores) -> Tensor:
    """The columns that this rank has at their ids: `[T, V]`, NaN elsewhere."""
    whole = torch.full((len(scores.values), scores.vocab_size + 1), torch.nan, dtype=scores.values.dtype)
    return whole.scatter(1, scores.token_ids.expand_as(scores.values), scores.values)[:, : scores.vocab_size]


def joined(parts: list[Tensor]) -> Tensor:
    """What the ranks hold together; each column must be on one rank, or the same on all."""
    whole = torch.full_like(parts[0], torch.nan)
    for part in parts:
        assert bool((whole.isnan() | part.isnan() | (whole == part)).all()), "ranks differ in a column"
        whole = torch.where(whole.isnan(), part, whole)
    return whole
