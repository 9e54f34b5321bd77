"""Ten AdamW steps in DeepSpeed, at every ZeRO stage and both kinds of parallelism, against one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.batch import run_batch
from tests.integrations.deepspeed_models import STEPS, Case, host, moments, moments_wanted, oracle_of, start, train

STAGES = (0, 1, 2, 3)
CASES = [
    *(Case(stage, dp, tp) for dp, tp in ((2, 1), (1, 2), (2, 2)) for stage in STAGES),
    *(Case(stage, 1, 4) for stage in (1, 3)),  # shards of 3, 3, 3 and 0 ids
    *(Case(stage, 1, 2, padded=18) for stage in (0, 2)),  # one rank has all ids
    *(Case(stage, 2, 2, offload=True) for stage in (1, 2, 3)),
    *(Case(stage, 2, 2, accumulate=2, clip=0.3) for stage in STAGES),
    *(Case(stage, 2, 2, dtype="bfloat16") for stage in STAGES),
    Case(1, 2, 2, dtype="bfloat16", float32_sums=True, accumulate=2, clip=0.3),
    Case(3, 2, 2, construct="zero_init"),
    Case(3, 2, 1, construct="zero_init"),
    Case(3, 1, 2, construct="zero_init", offload=True),
    *(Case(stage, 2, 2, uneven=True, clip=0.3) for stage in (1, 3)),
    *(Case(stage, 2, 2, tie=False, bias=True) for stage in (1, 3)),
    *(Case(stage, 2, 2, path=path) for path in ("per row", "logits") for stage in (2, 3)),
]

# Of losses, norms and weights, absolute. In bfloat16 a reduction rounds where the oracle does not; losses are about 2.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def _run(rank: int, world: int, case: Case) -> dict[str, Any]:
    from vocab_parallel.integrations import deepspeed as integration

    with host():
        engine = start(case)
        pairs = [integration.verify_tied(engine)]
        seen: dict[str, Any] = train(case, engine, range(STEPS))
        pairs.append(integration.verify_tied(engine))
        seen |= {"pairs": pairs, "moments": (moments(engine), moments_wanted(case, engine))}
        seen["state"] = integration.full_state_dict(engine, every_rank=True)
        seen["first rank only"] = len(integration.full_state_dict(engine))
        weight = engine.module.embedding.weight
        seen["alias"] = engine.module.head.weight is weight
        seen["ids"] = {getattr(weight, "ds_id", None), getattr(engine.module.head.weight, "ds_id", None)}
        return seen


@functools.cache
def _observed(world: int) -> dict[Case, Any]:
    cases = [case for case in CASES if case.world == world]
    return run_batch(_run, world, cases, timeout=110, detail=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_one_process(case: Case) -> None:
    ranks = _observed(case.world)[case]
    assert not isinstance(ranks, str), ranks
    expected, limit = oracle_of(case), TOLERANCE[case.dtype]
    for step in range(STEPS):
        by_rank = [ranks[replica * case.tp]["losses"][step] for replica in range(case.dp)]
        assert abs(sum(by_rank) / case.dp - expected["losses"][step]) <= limit, f"loss of step {step}"
    for rank, seen in enumerate(ranks):
        peer = rank - rank % case.tp
        assert seen["losses"] == ranks[peer]["losses"], f"ranks {peer} and {rank} hold the same rows"
        assert seen["norms"] == pytest.approx(expected["norms"], abs=limit), f"gradient norms on rank {rank}"
        assert seen["moments"][0] == seen["moments"][1], f"optimizer state on rank {rank}"
        assert seen["alias"] is case.tie
        assert len(seen["ids"]) == (1 if case.tie or case.stage < 3 else 2)
        assert seen["pairs"] == [[("embedding.weight", "head.weight")] if case.tie else []] * 2
        assert set(seen["state"]) == set(expected["state"])
        assert seen["first rank only"] == (0 if rank else len(expected["state"]))
        for name, weight in expected["state"].items():
            assert seen["state"][name].dtype == torch.float32
            torch.testing.assert_close(
                seen["state"][name], weight, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
            )
