"""SmolLM2-135M, a real tied checkpoint, writes on 2 sharded ranks what it writes itself."""

from __future__ import annotations

import torch

from tests.integrations.smollm2_model import VOCAB
from tests.integrations.transformers_models import make_shard
from tests.ranks import run_ranks
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.warpers import Temperature, TopP
from vocab_parallel.integrations import transformers as vp
from vocab_parallel.select.streams import Streams

NEW, WIDTH = 12, 576
PROMPTS = [
    [504, 3124, 8374, 314, 260, 43333, 6867],  # The output vocabulary is the widest axis
    [5081, 8014, 22247, 634],  # Every rank owns some
    [1812, 314, 30509, 314, 260],  # What is replicated is the
]


def _write(rank, folder):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    options = {"attention_mask": (ids > 0).to(torch.int64), "eos_token_id": 2, "pad_token_id": 0}
    expected = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options) if rank == 0 else None
    shard = make_shard(VOCAB, 128)
    vp.apply(model, shard=shard, prove=False)
    shard.traffic.reset()
    found = vp.generate(model, ids, policy=Policy((), selector="greedy"), max_new_tokens=NEW, **options)
    sent = shard.traffic.total_bytes
    drawn = vp.generate(
        model, ids, policy=Policy((Temperature(0.8), TopP(0.9))), streams=Streams.of([5, 5, 5], [0, 1, 2]),
        max_new_tokens=3, **options,
    )  # fmt: skip
    return expected, found.sequences, drawn.sequences, sent


def test_smollm2_writes_greedily_at_tp_2_what_it_writes_itself(smollm2):
    (expected, first, drawn, sent), (_, second, also_drawn, _) = run_ranks(
        _write, 2, str(smollm2), timeout=100, detail=False
    )
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert torch.equal(drawn, also_drawn)
    tokens, prompt = NEW * 3, 3 * 7
    lookups = (tokens + prompt) * WIDTH * 4  # each token's row of the embedding, of float32
    gather = tokens * VOCAB // 2 * 4
    assert sent - lookups < gather / 100, (sent, lookups, gather)
