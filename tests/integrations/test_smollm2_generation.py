"""SmolLM2-135M, a real tied checkpoint, writes on 2 sharded ranks what it writes itself."""

from __future__ import annotations

import torch

from tests.integrations.test_smollm2 import VOCAB, checkpoint  # noqa: F401 (a fixture)
from tests.integrations.transformers_models import make_shard
from tests.ranks import run_ranks
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.warpers import Temperature, TopP
from vocab_parallel.integrations import transformers as vp
from vocab_parallel.select.streams import Streams

NEW = 12
STARTS = [(0, 7), (12, 16), (36, 41)]  # of the text: prompts of three lengths


def _write(rank, folder, text):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(stop - start for start, stop in STARTS)
    ids, mask = torch.zeros(3, width, dtype=torch.int64), torch.zeros(3, width, dtype=torch.int64)
    for row, (start, stop) in enumerate(STARTS):
        ids[row, width - (stop - start) :], mask[row, width - (stop - start) :] = text[start:stop], 1
    expected = None
    if rank == 0:
        expected = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=2
        )
    shard = make_shard(VOCAB, 128)
    vp.apply(model, shard=shard, prove=False)
    options = {"attention_mask": mask, "eos_token_id": 2, "pad_token_id": 0}
    shard.traffic.reset()
    found = vp.generate(model, ids, policy=Policy((), selector="greedy"), max_new_tokens=NEW, **options)
    sent = shard.traffic.total_bytes
    drawn = vp.generate(
        model, ids, policy=Policy((Temperature(0.8), TopP(0.9))), streams=Streams.of([5, 5, 5], [0, 1, 2]),
        max_new_tokens=3, **options,
    )  # fmt: skip
    return expected, found.sequences, drawn.sequences, sent


def test_smollm2_writes_greedily_at_tp_2_what_it_writes_itself(checkpoint):  # noqa: F811
    folder, text = checkpoint
    (expected, first, drawn, sent), (_, second, also_drawn, _) = run_ranks(
        _write, 2, str(folder), text, timeout=100, detail=False
    )
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert torch.equal(drawn, also_drawn)
    tokens, prompt = NEW * 3, 3 * 7
    lookups = (tokens + prompt) * 576 * 4  # each token's row of the embedding, of float32
    gather = tokens * VOCAB // 2 * 4
    assert sent - lookups < gather / 100, (sent, lookups, gather)
