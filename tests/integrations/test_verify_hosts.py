"""`verify` in each host, on two ranks: the loss sharded against whole, and text end to end, of the host's own model."""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests import ranks
from tests.integrations.megatron_cpu import cuda_stand_in
from tests.ranks import run_ranks
from vocab_parallel.app import config as configs
from vocab_parallel.app.job import join
from vocab_parallel.app.verify.ladder import climb, failed_rungs
from vocab_parallel.app.verify.rungs import end_to_end, sharding
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.app.vocabulary import open_vocabulary

ranks.preload("vocab_parallel.app.verify.rungs")

ROOT = Path(__file__).parents[2]
SMALL = ["model.dim=16", "model.context=24", "train.batch=2"]
# host, ranks that share the vocabulary (of two; with 1 they are replicas), file
CASES = [("deepspeed", 2, "zero1"), ("deepspeed", 1, "zero3"), ("fsdp", 2, ""), ("fsdp", 1, ""),
         ("transformers", 2, ""), ("transformers", 1, ""), ("megatron", 2, "")]  # fmt: skip
pytestmark = pytest.mark.timeout(280)  # more than the world has, so that it can say which rank hangs


def climbed_all(rank):
    """Of each case the results and what failed, or the trace of an exception."""
    os.environ["LOCAL_RANK"] = str(rank)
    return [attempt(case) for case in CASES]


def attempt(case):
    try:
        with warnings.catch_warnings(), cuda_stand_in() if case[0] == "megatron" else nullcontext():
            warnings.simplefilter("ignore")  # the hosts' own
            return climbed(*case)
    except Exception:
        return [], [traceback.format_exc()]


def climbed(host, tp, file):
    words = [*SMALL, f"host={host}", f"parallel.tp={tp}"]
    words += [f"host_config={ROOT}/configs/deepspeed/{file}.json"] if file else []
    config = configs.load(ROOT / "configs" / "smoke.yaml", words)
    with join(config.parallel) as job:
        setting = Setting.open(job, config, open_vocabulary("bytes"))
        results = climb(setting, [sharding.RUNG, end_to_end.RUNG])
    return [(one.rung, one.check, one.passed, one.error, one.words) for one in results], failed_rungs(results)


@functools.cache
def world():
    return run_ranks(climbed_all, 2, timeout=240.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).strip("-"))
def test_a_host_passes_the_rungs_that_read_its_model(case):
    every = [rank[CASES.index(case)] for rank in world()]
    results, failed = every[0]
    assert not failed, "\n".join([*failed, *(str(one) for one in results if not one[2])])
    assert every[0] == every[1], "the ranks were told different results"
    assert {rung for rung, *_ in results} == {sharding.RUNG.name, end_to_end.RUNG.name}
    assert len([one for one in results if one[0] == end_to_end.RUNG.name]) == 6
