"""A real model's rows over real text: nucleus sampling sends a small part of what gathering its logits does."""

from __future__ import annotations

import heapq
import statistics

import pytest
import torch

from tests.integrations.smollm2_model import VOCAB, logits_of
from tests.integrations.transformers_models import make_shard
from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.select import Streams, sample

POSITIONS, FLAT = 300, 3  # of the text; rows that gathering could hope to be cheaper for
WARM_UP = 9  # rows: a group first has room for more than a row, and forgets that after its last 8 exchanges
EVERY = {2: 1, 4: 3}  # which rows, at each TP size


@pytest.fixture(scope="module")
def rows(smollm2, tmp_path_factory):
    """A file of `[rows, V]` float32 logits at the positions of a text, and of flat ones; the text's ids; and ids drawn.

    The last are those of one process.
    """
    logits, ids = logits_of(smollm2, heapq.__about__, POSITIONS)
    draw = torch.Generator().manual_seed(0)
    flat = torch.stack([torch.zeros(VOCAB), torch.full((VOCAB,), -3.0), 1e-3 * torch.randn(VOCAB, generator=draw)])
    path = tmp_path_factory.mktemp("logits") / "logits.pt"
    whole = torch.cat([logits, flat])
    torch.save(whole, path)
    alone = VocabShard(VocabLayout(VOCAB, 1))
    expected = sample(whole, shard=alone, streams=streams(len(whole)), top_p=0.9).token_ids
    return path, ids, expected


def streams(count):
    return Streams.of([7] * count, list(range(count)))


def _sampled(rank, path, every):
    """The ids of chosen rows one by one, and what each has sent."""
    shard = make_shard(VOCAB, 128)
    whole = torch.load(path, mmap=True, weights_only=True)
    chosen = [*range(0, POSITIONS, every), *range(POSITIONS, POSITIONS + FLAT)]
    mine = shard.slice(whole[chosen], -1)
    owned = streams(POSITIONS + FLAT)
    ids, sent = [], []
    for at, row in [(0, 0)] * WARM_UP + list(enumerate(chosen)):
        shard.traffic.reset()
        mine_now = owned.rows(torch.tensor([row]))
        ids.append(sample(mine[at : at + 1], shard=shard, streams=mine_now, top_p=0.9).token_ids)
        sent.append(shard.traffic.total_bytes)
    return chosen, torch.cat(ids)[WARM_UP:], sent[WARM_UP:], 4 * shard.shard_size * (shard.size - 1)


def test_the_logits_are_a_language_models_on_its_text(rows):
    path, ids, _ = rows
    logits = torch.load(path, mmap=True, weights_only=True)[: POSITIONS - 1]
    loss = torch.nn.functional.cross_entropy(logits, ids[1:])
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert loss < 4.0 and entropy.median() > 0.5, "neither noise, nor a text that it has learned by heart"


@pytest.mark.parametrize("tp", list(EVERY))
def test_a_nucleus_sends_under_a_twentieth_of_a_gather_and_never_more_than_one(rows, tp, capsys):
    path, _, expected = rows
    for chosen, ids, sent, gather in run_ranks(_sampled, tp, str(path), EVERY[tp], detail=False):
        assert torch.equal(ids, expected[chosen]), "the tokens of one process"
        assert statistics.median(sent[:-FLAT]) < gather / 20
        assert max(sent) <= gather
    with capsys.disabled():
        print(
            f"\nSmolLM2, TP {tp}, top-p 0.9: median {statistics.median(sent[:-FLAT]):,.0f} bytes a row and rank, most "
            f"{max(sent):,}, flat rows {sent[-FLAT:]}; a gather sends {gather:,}"
        )
