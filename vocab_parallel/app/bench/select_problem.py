"""The logits of a selection benchmark: made from a seed, the same for every contestant."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from vocab_parallel.app.job import Job
from vocab_parallel.select import Streams
from vocab_parallel.shard import VocabShard

# What the rows are like: a language model's, or hardly anything to choose by.
KINDS = ("model", "flat")
_BODY = {"model": 2.0, "flat": 0.1}  # standard deviation of a row
# A model's row has a head above it: probabilities that fall as rank**-a, another a in each row. So drawn, the nuclei of
# 0.9 are as large as SmolLM2-135M's over English: a quarter under 3 ids, half under 20, a tenth over 300.
_HEAD, _TOP, _LARGEST_INVERSE = 2_000, 18.0, 0.85


@dataclasses.dataclass(frozen=True)
class Problem:
    """Rows to select from, and who selects."""

    kind: str
    logits: Tensor  # [B, shard_size], this rank's columns
    shard: VocabShard
    alone: VocabShard  # the same vocabulary on one rank
    streams: Streams

    @property
    def rows(self) -> int:
        return len(self.logits)


def make(job: Job, kind: str, rows: int, shard: VocabShard, alone: VocabShard, seed: int) -> Problem:
    """Draws the logits of a kind; a function of seed, kind and sizes."""
    draw = torch.Generator().manual_seed(1_000_003 * seed + KINDS.index(kind))
    whole = _BODY[kind] * torch.randn(rows, shard.vocab_size, generator=draw)
    if kind == "model":
        head = min(_HEAD, shard.vocab_size // 4)
        fall = 1.0 / (_LARGEST_INVERSE * torch.rand(rows, 1, generator=draw).sqrt())
        values = _TOP - fall * torch.arange(1, head + 1).log()
        at = torch.rand(rows, shard.vocab_size, generator=draw).topk(head).indices
        whole.scatter_(1, at, torch.maximum(values, whole.gather(1, at)))
    streams = Streams.of([seed] * rows, list(range(rows)), device=job.device)
    return Problem(kind, shard.slice(whole, -1).to(job.device), shard, alone, streams)
