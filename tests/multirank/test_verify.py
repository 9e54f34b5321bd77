"""The ladder on 1 to 4 ranks: the package climbs it, and each fault written into the package is told by its rung."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.multirank.broken import BREAKS, replaced
from vocab_parallel.app import config as configs
from vocab_parallel.app.job import join
from vocab_parallel.app.verify import setting as settings
from vocab_parallel.app.verify.ladder import Check, Rung, climb, failed_rungs
from vocab_parallel.app.verify.rungs import RUNGS, pipelines
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.app.vocabulary import open_vocabulary

ranks.preload("tests.multirank.test_verify")

ROOT = Path(__file__).parents[2]
NAMES = [rung.name for rung in RUNGS]
LOWER = 5  # rungs of the head and its loss; those of decoding do not rest on them
# 259 ids in shards of 88: over three ranks the last is not full, over four it is empty
SMALL = ["model.dim=8", "model.heads=2", "model.context=24", "parallel.multiple_of=88", "train.batch=2"]
POLICY = f"generate.policy={ROOT}/configs/policies"
WHOLE = {  # on so many ranks: dtype and further words
    1: (torch.bfloat16, [f"{POLICY}/beam.yaml"]),
    2: (torch.float32, [f"{POLICY}/strict.yaml"]),
    3: (torch.float64, [f"{POLICY}/creative.yaml", "model.head_bias=true"]),
    4: (torch.bfloat16, []),
}
REPLICAS = (torch.float16, ["parallel.tp=2"])  # on four ranks
# A fault of what the ranks do together is written in at both sizes, another at one of them.
SHARDED = [what for what, one in BREAKS.items() if one.rung == "distributed loss" or "shard" in what]
BROKEN = [(what, tp) for at, what in enumerate(BREAKS) for tp in ((2, 3) if what in SHARDED else (2 + at % 2,))]
CASES = {
    tp: ["whole", *more, *(what for what, size in BROKEN if size == tp)]
    for tp, more in {1: [], 2: ["odd"], 3: ["blocks"], 4: ["replicas"]}.items()
}
pytestmark = pytest.mark.timeout(280)  # more than a world may take, so that it can say who hangs


@functools.cache
def world(tp):
    """Of each rank: what each case gave, and the setting's numbers."""
    return ranks.run_ranks(climb_all, tp, timeout=240.0)


def climb_all(rank):
    tp = torch.distributed.get_world_size()
    with opened(*WHOLE[tp]) as setting:
        found = {case: CLIMBS.get(case, broken)(setting, case) for case in CASES[tp]}
        return found, (setting.hidden, setting.draws("x").initial_seed(), setting.normal("x", 4))


@contextmanager
def opened(dtype: torch.dtype, words: list[str]) -> Iterator[Setting]:
    """A setting on this world's ranks."""
    config = configs.load(ROOT / "configs" / "smoke.yaml", [*SMALL, *words])
    with join(config.parallel) as job:
        yield Setting.open(job, config, open_vocabulary("bytes"), dtype=dtype)


def whole(setting, case, rungs=RUNGS):
    """Each check's result, without the seconds, which no two ranks share."""
    return [dataclasses.replace(one, seconds=0.0) for one in climb(setting, rungs)]


def replicas(setting, case):
    """The rungs of the head, with two replicas of two ranks."""
    with opened(*REPLICAS) as own:
        return whole(own, case, RUNGS[:LOWER])


def broken(setting, case):
    """With a fault in the package: up to the rung that knows it, from the first of its half of the ladder."""
    known = NAMES.index(BREAKS[case].rung)
    many = pipelines._BEYOND_FLOAT32 if case == "a float32 id" else 2**12  # only that one needs so many ids
    with BREAKS[case].make(), replaced((pipelines, "_BEYOND_FLOAT32", many)):
        return whole(setting, case, RUNGS[LOWER if known >= LOWER else 0 : known + 1])


def odd(setting, case):
    """Rungs that hold nowhere."""

    def only_here() -> float:
        if setting.job.rank == setting.job.world - 1:
            raise ValueError("seen by the last rank")
        return 0.0

    def unready(setting):
        raise KeyError("no such thing")

    checks = [
        Check("an error of one rank", only_here, 1.0, "errors"),
        Check("the largest of all ranks", lambda: float(setting.job.rank), 0.5, "ranks", "there.py"),
        Check("no number", lambda: math.nan, 1e9, "numbers"),
        Check("what comes after", lambda: 0.0, 0.0, "errors"),
    ]
    made = {"odd": lambda setting: checks, "unready": unready, "empty": lambda setting: []}
    return whole(setting, case, [Rung(name, "Holds nowhere.", "here.py", one) for name, one in made.items()])


def blocks(setting, case):
    """The oracle's logits and its blocks' ids: with all of the table in one block, and with ten rows of a rank."""
    found = []
    for size in (settings._BLOCK_BYTES, 8 * setting.width * 10 * setting.shard.tp_size):
        with replaced((settings, "_BLOCK_BYTES", size)):
            found.append((setting.exact(setting.hidden), [ids for ids, _, _ in setting.blocks()]))
    return found


CLIMBS = {"whole": whole, "replicas": replicas, "odd": odd, "blocks": blocks}


def told(tp, case):
    """A climb's results, which must be those of every rank."""
    every = [found[case] for found, _ in world(tp)]
    assert all(one == every[0] for one in every), "the ranks were told different results"
    return every[0]


@pytest.mark.parametrize(("tp", "case"), [*((tp, "whole") for tp in WHOLE), (4, "replicas")])
def test_the_package_climbs_the_ladder(tp, case):
    results = told(tp, case)
    assert not failed_rungs(results), [one for one in results if not one.passed]
    assert list(dict.fromkeys(one.rung for one in results)) == (NAMES if case == "whole" else NAMES[:LOWER])
    assert len(results) > (85 if case == "whole" else 45)
    assert all(one.error < math.inf and (ROOT / one.module).exists() for one in results)


@pytest.mark.parametrize(("what", "tp"), BROKEN)
def test_a_broken_package_fails_at_the_rung_that_knows(what, tp):
    results = told(tp, what)
    wrong = [one for one in results if not one.passed]
    assert failed_rungs(results) == [BREAKS[what].rung], wrong
    assert BREAKS[what].module in {one.module for one in wrong}, wrong
    if NAMES.index(BREAKS[what].rung) >= LOWER:
        assert not [one.words for one in wrong if one.words], "a wrong result must be told as one, not an exception"


def test_an_error_of_one_rank_is_every_ranks_and_the_ladder_goes_on():
    found = [(one.rung, one.check, one.passed, one.error, one.module, one.words) for one in told(2, "odd")]
    assert found == [
        ("odd", "an error of one rank", False, math.inf, "here.py", "rank 1: ValueError: seen by the last rank"),
        ("odd", "the largest of all ranks", False, 1.0, "there.py", ""),
        ("odd", "no number", False, math.inf, "here.py", ""),
        ("odd", "what comes after", True, 0.0, "here.py", ""),
        ("unready", "preparation", False, math.inf, "here.py", "rank 0: KeyError: 'no such thing'"),
        ("empty", "preparation", False, math.inf, "here.py", ""),
    ]


def test_the_oracle_of_a_table_in_blocks_is_that_of_the_whole_table():
    for found, _ in world(3):
        (logits, once), (parts, many) = found["blocks"]
        torch.testing.assert_close(parts, logits, rtol=1e-13, atol=1e-13)
        assert len(once) == 3 and len(many) > 20
        assert sorted(at for block in many for at in range(block.start, block.stop)) == list(range(259))


def test_the_settings_numbers_are_the_same_at_every_number_of_ranks():
    (hidden, *numbers), (same, *others) = world(4)[3][1], world(1)[0][1]
    assert torch.equal(hidden, same) and numbers[0] == others[0] and torch.equal(numbers[1], others[1])
