"""Scores of whole rows in one process, and what transforms leave of them."""

from __future__ import annotations

import torch

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.select.scores import open_scores


def scores_of(logits):
    logits = torch.as_tensor(logits)
    if logits.dtype == torch.int64:
        logits = logits.double()
    return open_scores(logits, VocabShard(VocabLayout(logits.shape[-1], 1, multiple_of=1)), "test")


def log_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log()


def warp(scores, *transforms, state=None):
    view = View.of([[]] * scores.rows)
    for transform in transforms:
        transform.check(scores.vocab_size, scores.rows)
        scores = transform.apply(scores, view, transform.start(scores.rows) if state is None else state)
    return scores


def kept(scores):
    """The ids of the support, row by row."""
    ids = scores.token_ids.expand_as(scores.values)
    return [row[value > -torch.inf].tolist() for row, value in zip(ids, scores.values, strict=True)]


def random_rows(rows=6, vocab=40, seed=0, scale=2.0):
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
