"""A converted model under DeepSpeed's engine: ZeRO 1 and 3 train it as one process does."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.integrations.deepspeed_models import host
from tests.integrations.transformers_models import batch, build, make_optimizer, make_shard, train
from tests.multirank.shared_world import Batch
from tests.tolerances import require_equal
from vocab_parallel.integrations import deepspeed as ds
from vocab_parallel.integrations import transformers as vp

VOCAB, STEPS = 19, 10


def _train(rank, stage):
    model = build("llama", VOCAB)
    expected = train(copy.deepcopy(model), VOCAB, STEPS)
    vp.apply(model, shard=make_shard(VOCAB))
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    losses, norms = [], []
    with host():
        engine, *_ = ds.initialize(model, config=config, optimizer=make_optimizer(model))
        for step in range(STEPS):
            ids, labels = batch(VOCAB, step)
            loss = engine(input_ids=ids, labels=labels).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
            norms.append(float(engine.get_global_grad_norm()))
        tied = ds.verify_tied(engine)
    return {
        "loss": torch.stack(losses), "expected": expected["loss"], "norm": torch.tensor(norms).double(),
        "expected norm": expected["norm"], "tied": tied,
        "alias": model.lm_head.weight is model.model.embed_tokens.weight,
    }  # fmt: skip


ENGINES = Batch(_train, [(1,), (3,)])


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_trains_a_converted_model_as_one_process(stage):
    ranks = ENGINES(2, stage)
    require_equal("losses on every rank", [rank["loss"] for rank in ranks])
    for rank in ranks:
        assert torch.allclose(rank["loss"], rank["expected"], rtol=0, atol=1e-5), rank["loss"] - rank["expected"]
        assert torch.allclose(rank["norm"], rank["expected norm"], rtol=1e-4), rank["norm"] / rank["expected norm"]
        assert rank["alias"]
        assert list(rank["tied"]) == [("model.embed_tokens.weight", "lm_head.weight")]
