"""Warpers against Transformers' own, on rows without ties at a boundary: the same ids stay."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.multirank.warper_cases import placed
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopP, Typical
from vocab_parallel.select.scores import open_scores

ROWS, VOCAB = 120, 97
SHARD = VocabShard(VocabLayout(VOCAB, 1, multiple_of=1))
PAIRS = [
    *((TopK, TopKLogitsWarper, k) for k in (1, 5, 50)),
    *((TopP, TopPLogitsWarper, p) for p in (0.1, 0.5, 0.9, 0.99)),
    *((MinP, MinPLogitsWarper, share) for share in (0.01, 0.1, 0.5)),
    *((Typical, TypicalLogitsWarper, p) for p in (0.1, 0.5, 0.9, 0.99)),
    *((Epsilon, EpsilonLogitsWarper, floor) for floor in (1e-4, 0.003, 0.05, 0.5)),
    *((Eta, EtaLogitsWarper, floor) for floor in (1e-4, 0.003, 0.05, 0.5)),
]


def logits_of(seed, masked):
    draw = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.2, 5.0, ROWS, dtype=torch.float64)[:, None]  # flat rows and sharp ones
    logits = scale * torch.randn(ROWS, VOCAB, generator=draw, dtype=torch.float64)
    if masked:
        logits[torch.rand(ROWS, VOCAB, generator=draw) < 0.3] = -torch.inf
    return logits


def warped(transform, logits):
    scores = open_scores(logits, SHARD, "test")
    return placed(transform.apply(scores, View.of([[]] * len(logits)), {}))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("ours", "theirs", "value"), PAIRS)
def test_the_same_ids_stay_as_with_transformers(ours, theirs, value, masked):
    for seed in range(3):
        logits = logits_of(seed, masked)
        expected = theirs(value)(torch.zeros(ROWS, 0, dtype=torch.int64), logits.clone())
        assert torch.equal(warped(ours(value), logits), expected)


@pytest.mark.parametrize("value", [0.1, 0.7, 1.5, 20.0])
def test_the_same_quotients_as_with_transformers(value):
    for dtype in (torch.float64, torch.float32):
        logits = logits_of(4, True).to(dtype)
        expected = TemperatureLogitsWarper(value)(torch.zeros(ROWS, 0, dtype=torch.int64), logits)
        assert torch.equal(warped(Temperature(value), logits), expected)
