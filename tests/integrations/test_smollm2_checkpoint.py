"""SmolLM2-135M, a real tied checkpoint, to 2 and 4 shards, which write what it writes itself, and back bit for bit."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.case_runners.common import same_bits
from tests.integrations.smollm2_model import VOCAB, encode, reader
from tests.integrations.transformers_models import make_shard
from tests.ranks import run_ranks
from vocab_parallel.checkpoint import load_checkpoint
from vocab_parallel.checkpoint.exchange.hugging_face import from_hugging_face, to_hugging_face
from vocab_parallel.decode.policy import Policy
from vocab_parallel.integrations import transformers as vp

LENGTH, NEW = 64, 64
TEXTS = (
    "The output vocabulary is the widest axis of a language model. Every rank owns some of its rows, looks up the ids "
    "that it owns, and exchanges three numbers for each token. What is replicated is the same bits on every rank, and "
    "what fails, fails on every rank with the same error. A checkpoint holds each row once.",
    "Once upon a time there was a small town by the sea, where everybody knew everybody else. In the evening the boats "
    "came home, and the children ran down to the harbour to see what the men had caught that day. One evening a boat "
    "did not come back, and the people of the town lit a fire on the hill so that",
    'def fibonacci(n):\n    """The n-th number of Fibonacci."""\n    first, second = 0, 1\n    for _ in range(n):\n'
    "        first, second = second, first + second\n    return first\n\n\n"
    'def factorial(n):\n    """The product of 1 to n."""\n',
)
OPTIONS = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def folder(tmp_path):
    """For gigabytes that must not stay."""
    yield tmp_path / "large"
    shutil.rmtree(tmp_path / "large")


def _unsharded(rank, first, back, ids):
    """What the model writes, and the logits of both directories."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    logits = []
    for path in (back, first):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(ids[:, :8]).logits)
    return model.generate(ids, do_sample=False, **OPTIONS), *logits


def _sharded(rank, folder, ids):
    """What a model without weights writes once it has loaded a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    torch.set_num_threads(1)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{folder}/assets")).eval()
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # `apply` wants the same weights on every rank
    vp.apply(model, shard=make_shard(VOCAB, 128), prove=False)
    step, _ = load_checkpoint(folder, model)
    vp.verify(model)
    written = vp.generate(model, ids, policy=Policy((), selector="greedy"), **OPTIONS)
    return step, written.sequences, len(model.lm_head.weight)


@pytest.mark.timeout(400)
def test_smollm2_converts_to_2_and_4_shards_that_write_what_it_writes_and_back_bit_for_bit(smollm2, folder):
    file = reader()
    ids = torch.tensor([encode(file, text)[:LENGTH] for text in TEXTS])
    assert ids.shape == (3, LENGTH)
    for tp in (2, 4):
        done = from_hugging_face(smollm2, folder / f"tp{tp}", tp_size=tp, step=tp)
        assert done.ties == {"lm_head.weight": "model.embed_tokens.weight"} and done.vocab_size == VOCAB
    to_hugging_face(folder / "tp4", folder / "back")
    first, back = (load_file(path / "model.safetensors") for path in (smollm2, folder / "back"))
    assert set(first) == set(back) and all(same_bits(tensor, back[name]) for name, tensor in first.items())
    assert (folder / "back" / "config.json").read_bytes() == (smollm2 / "config.json").read_bytes()
    ((written, *logits),) = run_ranks(_unsharded, 1, str(smollm2), str(folder / "back"), ids, timeout=150)
    assert same_bits(*logits) and logits[0].std() > 1
    assert written.shape == (3, LENGTH + NEW)
    for tp in (2, 4):
        for step, found, rows in run_ranks(_sharded, tp, str(folder / f"tp{tp}"), ids, timeout=200, detail=False):
            assert torch.equal(found, written), f"TP {tp} writes something else"
            assert step == tp and rows == VOCAB // tp
