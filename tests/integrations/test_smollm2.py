"""SmolLM2-135M, a real tied checkpoint, fine-tuned on 2 sharded ranks: equal to the unsharded run, with its memory."""

from __future__ import annotations

import ctypes
import gc
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.smollm2_model import VOCAB
from tests.integrations.transformers_models import make_shard
from tests.ranks import run_ranks
from vocab_parallel.gradient_norm import gradient_norm
from vocab_parallel.integrations import transformers as vp

STEPS, ROWS, LENGTH = 8, 2, 8
# "The output vocabulary is the widest axis of a language model. Every rank owns some of its rows, looks up the ids that
# it owns, and exchanges three numbers for each token. What is replicated ...", by the checkpoint's own tokenizer
IDS = [
    504, 3124, 8374, 314, 260, 43333, 6867, 282, 253, 1789, 1743, 30, 5081, 8014, 22247, 634, 282, 624, 10055, 28, 5117,
    614, 260, 27503, 338, 357, 22247, 28, 284, 16866, 1296, 2966, 327, 971, 9624, 30, 1812, 314, 30509, 314, 260, 1142,
    335, 897, 8014, 28, 284, 732, 12512, 28, 12512, 335, 897, 8014, 351, 260, 1142, 4514, 30, 330, 2613, 338, 314,
    11812, 314, 582, 8709, 351, 827, 2925, 42, 260, 32214, 12927, 624, 10055, 28, 260, 18261, 11292, 370, 411, 601, 28,
    284, 1062, 5091, 480, 26085, 288, 260, 1142, 1379, 30,
]  # fmt: skip


def window(ids, step):
    """`[ROWS, LENGTH]` ids and labels; the rows have different numbers of labels."""
    starts = [(7 * step + 31 * row) % (len(ids) - LENGTH) for row in range(ROWS)]
    input = torch.stack([ids[at : at + LENGTH] for at in starts])
    labels = input.clone()
    labels[0, :4] = -100
    return input, labels


def peak_bytes(reset=False):
    """Largest resident memory of this process since the reset."""
    if reset:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what only loading needed goes back
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _tune(rank, mode, folder, ids, table):
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # a tensor's memory goes back as soon as it is freed
    torch.set_num_threads(2 if mode == "unsharded" else 1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    wrapped = model
    if mode != "unsharded":
        vp.apply(model, shard=make_shard(VOCAB, 128), data_parallel=mode == "data parallel")
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if mode == "data parallel" else model
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # off the file, which would stay mapped whole
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4, fused=True)
    peak_bytes(reset=True)
    losses, norms = [], []
    for step in range(STEPS):
        input, labels = window(ids, step)
        if mode == "data parallel":
            input, labels = input[rank : rank + 1], labels[rank : rank + 1]
        loss = wrapped(input, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        if step % 5 == 0:
            norms.append(gradient_norm(model))
        optimizer.step()
        losses.append(loss.detach())
    peak = peak_bytes()
    weight = model.get_input_embeddings().weight
    result = {
        "loss": torch.stack(losses), "norm": torch.stack(norms), "peak": peak, "alias": weight is model.lm_head.weight,
        "states": sum(held is weight for held in optimizer.state), "rows": len(weight),
        "trunk": model.model.layers[-1].mlp.down_proj.weight.detach(),
    }  # fmt: skip
    if mode != "unsharded":
        vp.verify(model, optimizer)
        weight = vp.full_state_dict(model)["model.embed_tokens.weight"]
    if rank == 0:
        torch.save(weight.detach(), table)
    return result


@pytest.mark.timeout(300)
def test_smollm2_fine_tunes_at_tp_2_and_as_data_parallel_vocabulary_group_as_unsharded(smollm2, tmp_path, capsys):
    ids = torch.tensor(IDS)
    runs = {
        mode: run_ranks(_tune, world, mode, str(smollm2), ids, str(tmp_path / mode), timeout=250, detail=False)
        for mode, world in (("unsharded", 1), ("same batch", 2), ("data parallel", 2))
    }
    (expected,) = runs.pop("unsharded")
    assert expected["loss"][0] < 7.0, "this model knows English"
    assert expected["loss"][-3:].mean() < expected["loss"][:3].mean(), "and learns the text"
    table = torch.load(tmp_path / "unsharded")
    lines = [f"unsharded: peak {expected['peak'] / 1e6:,.0f} MB"]
    for mode, ranks in runs.items():
        for rank in ranks:
            assert torch.allclose(rank["loss"], expected["loss"], rtol=0, atol=1e-4), rank["loss"] - expected["loss"]
            assert torch.allclose(rank["norm"], expected["norm"], rtol=1e-3), rank["norm"] / expected["norm"] - 1
            assert rank["alias"] and rank["states"] == 1 and rank["rows"] == VOCAB // 2
            assert torch.allclose(rank["trunk"], expected["trunk"], rtol=0, atol=2e-5)
            # weight, gradient and two moments of half the table are 226 MB; a DDP has buckets of its own
            less = 50e6 if mode == "data parallel" else 226e6
            assert rank["peak"] < expected["peak"] - less, (rank["peak"], expected["peak"])
        assert torch.allclose(torch.load(tmp_path / mode), table, rtol=0, atol=2e-5)
        largest = max(float((rank["loss"] - expected["loss"]).abs().max()) for rank in ranks)
        peaks = ", ".join(f"{rank['peak'] / 1e6:,.0f}" for rank in ranks)
        lines.append(f"{mode}: largest difference of a loss {largest:.1e}; peak of each rank {peaks} MB")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
