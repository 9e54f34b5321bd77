"""Greedy and top-k."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.batch import assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks, replicated
from tests.cases import Case, as_tensor, assert_close, local_part
from vocab_parallel import (
    greedy,
    top_k,
)


def observe_selection(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    name = "logits" if "logits" in case.inputs else "logits_real"
    logits = as_tensor(case.inputs[name], dtype)
    shard = ranks.shard(case, logits.shape[-1]) if "pad_to" not in case.params else ranks.shard(case)

    def local(whole: torch.Tensor) -> torch.Tensor:
        fill = case.inputs.get("padding_logit", math.nan)
        return local_part(whole, 1, shard.shard_size, shard.rank, fill)

    seen: dict[str, Any] = {}
    if case.op == "all_masked":
        seen["greedy error"] = attempt(lambda: greedy(local(logits), shard=shard))
        seen["top-k error"] = attempt(lambda: top_k(local(logits), 2, shard=shard))
        logits = logits[1:]
    seen["greedy"] = greedy(local(logits), shard=shard)
    seen["all"] = tuple(top_k(local(logits), logits.shape[-1], shard=shard))
    if "k" in case.params:
        seen["k"] = tuple(top_k(local(logits), case.params["k"], shard=shard))
    if "top3" in case.expect:
        seen["top3"] = tuple(top_k(local(logits), 3, shard=shard))
    if "probs_k2_exact" in case.expect:
        probs = as_tensor([case.inputs["probs"]], dtype)
        small = ranks.shard(case, probs.shape[-1])
        seen["probs"] = tuple(top_k(local_part(probs, 1, small.shard_size, small.rank), 2, shard=small))
    return seen


def check_selection(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    def ids(name: str) -> list[Any]:
        found = [one[name] if isinstance(one[name], torch.Tensor) else one[name][1] for one in seen]
        assert {one.dtype for one in found} == {torch.int64}
        return replicated(f"{case.id} {name}", found).tolist()

    def values(name: str) -> torch.Tensor:
        return replicated(f"{case.id} {name}", [one[name][0] for one in seen])

    everything = ids("all")
    assert [row[0] for row in everything] == ids("greedy"), "greedy is not the first of the order"
    assert all(sorted(row) == list(range(len(row))) for row in everything), "an id is lost, doubled or padding"
    if case.op == "greedy":
        assert ids("greedy") == expect.take("ids")
    elif "ids" in expect:
        assert ids("k") == expect.take("ids")
    if "values" in expect:
        assert_close(values("k"), expect.take("values"), case, dtype, "values")
    if "top3" in expect:
        assert ids("top3") == [expect.take("top3")]
    if "sampled_never" in expect:
        assert not set(expect.take("sampled_never")) & {token_id for row in everything for token_id in row}
    if "exact_k_lowest_id" in expect:
        assert ids("k") == expect.take("exact_k_lowest_id")
        assert ids("probs") == [expect.take("probs_k2_exact")]
    if "row1_greedy" in expect:
        assert ids("greedy") == [expect.take("row1_greedy")]
        assert "ValueError on every rank naming row 0" in expect.take("row0")
        assert expect.take("never") == ["hang", "token 0 silently", "padded id"]
        for name in ("greedy error", "top-k error"):
            assert_all_raise(f"{case.id} {name}", [one[name] for one in seen], ["NonFiniteError"], ["row 0"])
