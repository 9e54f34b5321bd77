"""Failures 21 to 24: which row of the hidden states the next token comes from."""

from __future__ import annotations

import pytest
import torch

from tests.failures.lab import failure, whole_shard
from vocab_parallel import VocabParallelLMHead, greedy
from vocab_parallel.decode import Policy

VOCAB, PAD = 19, 0
GREEDY = Policy(selector="greedy")
SHORT, LONG = [3, 1, 4], [2, 7, 1, 8, 5]
IDS = torch.tensor([[*SHORT, PAD, PAD], LONG])
MASK = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def models():
    """A Llama of Transformers, and the same one converted."""
    from tests.integrations.transformers_models import build
    from vocab_parallel.integrations import transformers as vp

    plain, converted = build("llama", VOCAB).eval(), build("llama", VOCAB).eval()
    vp.apply(converted, shard=whole_shard(VOCAB))
    return plain, converted


def generate(model, ids, **options):
    from vocab_parallel.integrations import transformers as vp

    given = {"policy": GREEDY, "max_new_tokens": 3, "eos_token_id": [], "pad_token_id": PAD} | options
    return vp.generate(model, ids, **given).token_ids


@failure(
    21, "The last column of prompts padded on the right", "refused",
    "`generate` projects each row's last real token, on whichever side the padding is, by the attention mask; without "
    "a mask a row that ends in padding is an error on every rank.",
)  # fmt: skip
def test_each_row_continues_after_its_own_last_token(models):
    plain, converted = models
    careless = plain(IDS, attention_mask=MASK).logits[:, -1].argmax(-1)
    alone = torch.cat([generate(converted, torch.tensor([row])) for row in (SHORT, LONG)])
    assert int(careless[0]) != int(alone[0, 0]) and int(careless[1]) == int(alone[1, 0])
    assert torch.equal(generate(converted, IDS, attention_mask=MASK), alone)
    left = torch.tensor([[PAD, PAD, *SHORT], LONG])
    assert torch.equal(generate(converted, left, attention_mask=MASK.flip(1)), alone)
    with pytest.raises(ValueError, match="row 0 of input_ids ends in pad_token_id 0, and there is no attention_mask"):
        generate(converted, IDS)
    assert generate(converted, IDS, eos_token_id=PAD).shape == (2, 3)  # an end id that pads may be meant


@failure(
    22, "An argmax over the positions", "impossible",
    "Selection has no argument for an axis: it takes `[..., columns of this rank]` and gives one id a row, `[...]`, "
    "each inside the vocabulary.",
)  # fmt: skip
def test_greedy_chooses_among_ids_only():
    logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    positions = logits.argmax(1)
    assert positions.shape == (2, VOCAB) and int(positions.max()) < 5  # places in time, whatever they are called
    shard = whole_shard(VOCAB)
    chosen = greedy(logits, shard=shard)
    assert torch.equal(chosen, logits.argmax(-1)) and chosen.shape == (2, 5)
    with pytest.raises(TypeError, match="dim"):
        greedy(logits, shard=shard, dim=1)


@failure(
    23, "The first position's logits taken for the next token's", "impossible",
    "`generate` has no argument for a position: of each row only the last token's state reaches the head, so there "
    "are no logits of other positions to choose from.",
)  # fmt: skip
def test_generation_projects_the_last_position_only(models):
    plain, converted = models
    ids = torch.tensor([LONG])
    every = plain(ids).logits
    first, last = int(every[0, 0].argmax()), int(every[0, -1].argmax())
    assert first != last
    shapes = []
    head, logits = converted.lm_head, converted.lm_head.logits
    head.logits = lambda hidden, *args, **kwargs: shapes.append(list(hidden.shape)) or logits(hidden, *args, **kwargs)
    try:
        assert int(generate(converted, ids)[0, 0]) == last
    finally:
        del head.logits
    assert shapes == [[1, head.in_features]] * 3


@failure(
    24, "`logits_to_keep=0` read as no logits", "impossible",
    "The head is told which rows, not how many: none given is all, an index is that row, an empty slice is none; a "
    "converted Transformers model keeps the host's reading of 0, all positions, and refuses to keep fewer with "
    "labels.",
)  # fmt: skip
def test_the_head_is_told_which_rows(models):
    plain, converted = models
    ids = torch.tensor([LONG])
    whole = plain(ids, logits_to_keep=0).logits
    assert whole.shape == (1, 5, VOCAB)  # not none
    for keep in (0, 1, 2):
        assert torch.allclose(
            converted(ids, logits_to_keep=keep).logits, plain(ids, logits_to_keep=keep).logits, atol=1e-5
        )
    with pytest.raises(ValueError, match="no logits_to_keep with labels"):
        converted(ids, labels=ids, logits_to_keep=1)
    head = VocabParallelLMHead(4, shard=whole_shard(VOCAB))
    hidden = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))
    every = head.logits(hidden)
    assert every.shape == (1, 5, VOCAB)
    assert torch.allclose(head.logits(hidden, rows=0), every[:, 0])
    assert torch.allclose(head.logits(hidden, rows=-1), every[:, -1])
    assert head.logits(hidden, rows=slice(0)).shape == (1, 0, VOCAB)
