"""Every shared case whose operation exists, with the file's value and tolerance, at each of its TP sizes and dtypes.

Each operation has a runner: `observe` runs on each rank and returns what it saw, `check` compares what all ranks saw
with the file. A runner must look at every key of a case's `expect`, so a new key in the file fails until something
checks it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.batch import run_batch
from tests.case_runners import (
    checkpoint,
    decode_beam,
    decode_processors,
    decode_warpers,
    deepspeed,
    export,
    layouts,
    losses,
    migration,
    sampling,
    selection,
    together,
    tying,
)
from tests.case_runners.common import Expected, Ranks, Runner
from tests.cases import active_cases, load_cases

# Keys of `expect` that no result of ours can be compared with, and why.
NOT_COMPARED = {
    "G03": {"thread_after": "measured by the reporter", "thread_before": "measured by the reporter"},
    "X07": {"keep_all_ties": "the other policy; ours is exactly k by value, then id"},
}

RUNNERS: dict[str, Runner] = {
    "cross_entropy": Runner(losses.check_cross_entropy, losses.observe_cross_entropy),
    "gloo_bf16": Runner(losses.check_cross_entropy, losses.observe_cross_entropy),
    "no_dist": Runner(losses.check_without_distributed, losses.observe_without_distributed),
    "cross_entropy_misuse": Runner(losses.check_misuse, losses.observe_misuse),
    "cross_entropy_error": Runner(losses.check_loss_error, losses.observe_loss_error),
    "linear_cross_entropy": Runner(losses.check_linear, losses.observe_linear),
    "logprob_entropy": Runner(losses.check_logprobs, losses.observe_logprobs),
    "large_property": Runner(losses.check_large, every_dtype=False),
    "loss_scale": Runner(losses.check_loss_scale, losses.observe_loss_scale),
    "pad_plan": Runner(layouts.check_pad_plan, every_dtype=False),
    "pad_error": Runner(layouts.check_pad_error, every_dtype=False),
    "resize": Runner(migration.check_resize, migration.observe_resize),
    "embedding_error": Runner(layouts.check_embedding_error, layouts.observe_embedding_error),
    "greedy": Runner(selection.check_selection, selection.observe_selection),
    "topk": Runner(selection.check_selection, selection.observe_selection),
    "topk_tie": Runner(selection.check_selection, selection.observe_selection),
    "all_masked": Runner(selection.check_selection, selection.observe_selection),
    "topp": Runner(sampling.check_filters, sampling.observe_filters),
    "minp": Runner(sampling.check_filters, sampling.observe_filters),
    "sample_agree": Runner(sampling.check_sampling, sampling.observe_sampling),
    "sample_tp_invariant": Runner(sampling.check_sampling, sampling.observe_sampling),
    "sample_batch_invariant": Runner(sampling.check_sampling, sampling.observe_sampling),
    "sample_distribution": Runner(sampling.check_sampling, sampling.observe_sampling),
    "temperature": Runner(decode_warpers.check_temperature, decode_warpers.observe_temperature),
    "filter_chain": Runner(decode_warpers.check_filter_chain, decode_warpers.observe_filter_chain),
    "logits_processor": Runner(decode_processors.check_banned, decode_processors.observe_banned),
    "masked_sum": Runner(decode_processors.check_masked_sum, decode_processors.observe_masked_sum),
    "beam_decode": Runner(decode_beam.check_flat_index, every_dtype=False),
    "beam_step": Runner(decode_beam.check_beam_step, decode_beam.observe_beam_step),
    "beam_reorder": Runner(decode_beam.check_reorder, every_dtype=False),
    "tied_step": Runner(tying.check_tied_step, tying.observe_tied_step),
    "tied_load": Runner(tying.check_tied_load, tying.observe_tied_load),
    "tied_mismatch": Runner(tying.check_tied_mismatch, tying.observe_tied_mismatch),
    "untied_load": Runner(tying.check_untied_load, tying.observe_untied_load),
    "pp_dp_tied_reduce": Runner(tying.check_stages_and_data_parallel, tying.observe_stages_and_data_parallel, world=4),
    "replica_equal": Runner(tying.check_replicas, tying.observe_replicas, world=4),
    "tied_middle_stage": Runner(tying.check_middle_stages, tying.observe_middle_stages, world=4),
    "fail_together": Runner(together.check_fail_together, together.observe_fail_together),
    "uneven_work": Runner(together.check_uneven_work, together.observe_uneven_work, world=4),
    "shape_agree": Runner(together.check_shape_agree, together.observe_shape_agree),
    "collective_count": Runner(together.check_collective_count, together.observe_collective_count),
    "collective_bytes": Runner(together.check_collective_bytes, together.observe_collective_bytes),
    "zero_equal": Runner(deepspeed.check_zero_equal, deepspeed.observe_zero_equal, world=2),
    "zero_padding": Runner(deepspeed.check_zero_padding, every_dtype=False),
    "resize_zero3": Runner(deepspeed.check_resize_zero3, deepspeed.observe_resize_zero3, world=2, every_dtype=False),
    "export": Runner(export.check_export, export.observe_export),
    "reshard": Runner(checkpoint.check_reshard, checkpoint.observe_reshard, world=4),
    "load_tie_change": Runner(checkpoint.check_tie_change, checkpoint.observe_tie_change),
    "zero3_empty_weight": Runner(together.check_empty_weight, together.observe_empty_weight),
}

Key = tuple[str, int, str]  # case id, TP size, dtype


def runs() -> list[Key]:
    keys = []
    for case in active_cases():
        dtypes = case.tested_dtypes if RUNNERS[case.op].every_dtype else (case.dtype,)
        keys += [(case.id, tp, dtype) for tp in case.tested_tp_sizes for dtype in dtypes]
    return keys


def parameter(key: Key) -> Any:
    return pytest.param(*key, id=f"{key[0]}-tp{key[1]}-{key[2]}")


def observe(rank: int, world: int, key: Key) -> Any:
    """What one rank sees of one run; with one rank nothing of `torch.distributed` is there."""
    case_id, tp, dtype = key
    case = load_cases()[case_id]
    run = RUNNERS[case.op].observe
    assert run is not None
    return run(case, getattr(torch, dtype), Ranks(rank, tp, world))


def world_of(key: Key) -> int:
    return RUNNERS[load_cases()[key[0]].op].world or key[1]


@functools.cache
def observations(world: int) -> dict[Key, list[Any] | str]:
    """All runs on `world` ranks, in one start of the ranks."""
    keys = [key for key in runs() if world_of(key) == world and RUNNERS[load_cases()[key[0]].op].observe]
    return run_batch(observe, world, keys, timeout=110, detail=False)  # as users run; the other tests check in detail


@pytest.mark.parametrize(("case_id", "tp", "dtype"), [parameter(key) for key in runs()])
def test_case_has_the_value_of_the_file(case_id: str, tp: int, dtype: str) -> None:
    case, key = load_cases()[case_id], (case_id, tp, dtype)
    runner, expect = RUNNERS[case.op], Expected(load_cases()[case_id])
    if runner.observe is None:
        seen: list[Any] | str = []
    elif world_of(key) == 1:
        seen = [observe(0, 1, key)]
    else:
        seen = observations(world_of(key))[key]
    assert not isinstance(seen, str), f"{case_id}: {seen}"
    runner.check(case, dtype, tp, expect, seen)
    unseen = expect.left() - set(NOT_COMPARED.get(case_id, {}))
    assert not unseen, f"{case_id}: nothing compares {sorted(unseen)}"
