"""Cases about ZeRO: the same losses at every stage, growing a vocabulary that is partitioned, padding of partitions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.case_runners.common import Expected, Ranks, same_bits
from tests.case_runners.tying import Tied
from tests.cases import Case, as_target, assert_close, load_cases
from tests.integrations.deepspeed_models import host
from vocab_parallel import VocabParallelEmbedding, VocabParallelLMHead, tie_weights, verify_tied
from vocab_parallel.collectives import gather_vocab

STAGES = (0, 1, 2, 3)


def settings(stage: int) -> dict[str, Any]:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}


def observe_zero_equal(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[int, Any]:
    """Three steps at each stage; at TP 1 the ranks are data-parallel, with the same rows."""
    from vocab_parallel.integrations import deepspeed as integration

    assert case.inputs["optimizer"] == "as W01"
    params = load_cases()["W01"].params
    options = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay")}
    ids, target = as_target(case.inputs["ids"]), as_target(case.inputs["target"])
    seen: dict[int, Any] = {}
    with host():
        for stage in STAGES:
            model = Tied(case, dtype, ranks, 3)
            with torch.no_grad():
                model.embedding.weight.copy_(model.local(case.inputs["weight"]))
            optimizer = torch.optim.AdamW(model.parameters(), **options | {"betas": tuple(options["betas"])})
            engine = integration.initialize(model, config=settings(stage), optimizer=optimizer)[0]
            losses = []
            for _ in range(3):
                loss = engine(ids, target)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            seen[stage] = {"losses": torch.stack(losses), "pairs": integration.verify_tied(engine)}
    return seen


def check_zero_equal(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[int, Any]]) -> None:
    losses = expect.take("losses")
    for one in seen:
        for stage in STAGES:
            assert_close(one[stage]["losses"], losses, case, dtype, f"losses at stage {stage}")
            assert one[stage]["pairs"] == [("embedding.weight", "lm_head.weight")]


def observe_resize_zero3(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    from vocab_parallel.integrations import deepspeed as integration

    with host() as deepspeed:
        shard = ranks.shard(case)
        with integration.zero_init(shard, config=settings(3)):
            model: Any = nn.Module()
            model.embedding = VocabParallelEmbedding(case.inputs["hidden"], shard=shard)
            model.lm_head = VocabParallelLMHead(case.inputs["hidden"], shard=shard)
            tie_weights(model.embedding, model.lm_head)
        model.config = SimpleNamespace(vocab_size=case.inputs["vocab"])
        seen: dict[str, Any] = {"num_embeddings_before": model.embedding.shard.vocab_size}
        with deepspeed.zero.GatheredParameters([model.embedding.weight]):
            seen["before"] = gather_vocab(model.embedding.shard, model.embedding.weight)
        shard = integration.resize(model, case.inputs["new_vocab"])
        weight = model.embedding.weight
        seen["num_embeddings_after"] = model.embedding.shard.vocab_size
        seen["config_vocab"] = model.config.vocab_size
        seen["still_partitioned"] = weight.shape[0] == 0 and weight.ds_tensor.numel() < weight.ds_numel
        seen["tie_kept"] = model.lm_head.weight is weight and len(verify_tied(model)) == 1
        with deepspeed.zero.GatheredParameters([weight]):
            seen["after"] = gather_vocab(shard, weight)
        assert dist.get_world_size() > 1, "nothing is partitioned over one rank"
        return seen


def check_resize_zero3(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    for key in ("num_embeddings_before", "num_embeddings_after", "config_vocab", "still_partitioned", "tie_kept"):
        wanted = expect.take(key)
        assert [one[key] for one in seen] == [wanted] * len(seen), key
    assert expect.take("rows_0_9") == "unchanged, equal on all ranks"
    for one in seen:
        assert one["after"].shape == (case.inputs["new_vocab"], case.inputs["hidden"])
        assert same_bits(one["after"][:10], one["before"])
        assert same_bits(one["after"], seen[0]["after"]), "new rows differ between ranks"
        assert one["after"][10:].abs().sum() > 0


def check_zero_padding(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    from vocab_parallel.integrations.deepspeed import partition_padding

    plan = partition_padding(case.inputs["numel"], case.inputs["dp"], alignment=case.inputs["alignment"])
    assert (plan.padded_numel, plan.per_rank) == (expect.take("padded"), expect.take("per_rank"))
    on_rank = expect.take("padding_on_rank")
    assert {rank: plan.padding[int(rank)] for rank in on_rank} == on_rank
    assert sum(plan.padding) == plan.padded_numel - case.inputs["numel"]
    small = partition_padding(5, 4, alignment=8)  # the note's small version
    assert (small.per_rank, small.padding) == (2, (0, 0, 1, 2))
