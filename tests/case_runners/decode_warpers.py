"""Temperature, and top-k with top-p in two orders."""

from __future__ import annotations

from typing import Any

import torch

from tests.batch import assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks, replicated
from tests.cases import Case, as_tensor, assert_close, local_part
from vocab_parallel import VocabShard
from vocab_parallel.decode.transforms.transform import Transform, View
from vocab_parallel.decode.transforms.warpers import Temperature, TopK, TopP
from vocab_parallel.select.masses import measure, probabilities
from vocab_parallel.select.sampling import draw
from vocab_parallel.select.scores import Scores, open_scores
from vocab_parallel.select.streams import Streams


def warp(logits: torch.Tensor, shard: VocabShard, *transforms: Transform) -> Scores:
    scores = open_scores(local_part(logits, 1, shard.shard_size, shard.rank), shard, "case")
    for transform in transforms:
        with scores.channel.guard():
            transform.check(shard.vocab_size, scores.rows)
        scores = transform.apply(scores, View.of([[]] * scores.rows), {})
    return scores


def observe_temperature(case: Case, dtype: torch.dtype, ranks: Ranks) -> list[dict[str, Any]]:
    """In the dtype of the run and in the case's own, which no tolerance names."""
    return [_observe_temperature(case, one, ranks) for one in (dtype, getattr(torch, case.dtype))]


def _observe_temperature(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    (row,) = as_tensor(case.inputs["logits"], dtype)
    temperatures, shard = case.inputs["temperatures"], ranks.shard(case)
    scores = warp(row.expand(len(temperatures), -1), shard, Temperature(temperatures))
    drawn = draw(scores, Streams.of(range(len(temperatures))))
    whole = scores.values.new_zeros(scores.rows, shard.vocab_size, dtype=torch.float64)
    whole[:, shard.start : shard.stop] = probabilities(scores, measure(scores))
    bad = [
        attempt(lambda value=value: warp(row.expand(2, -1), shard, Temperature([1.0, float(value)])))  # type: ignore[misc]
        for value in case.inputs["bad"]
    ]
    return {"ids": drawn.token_ids, "probs": whole, "bad": bad}


def check_temperature(case: Case, dtype: str, tp: int, expect: Expected, seen: list[list[dict[str, Any]]]) -> None:
    ids, probs, error = expect.take("ids"), expect.take("probs"), expect.take("bad_raises")
    for number in range(2):
        of_ranks = [one[number] for one in seen]
        assert replicated(f"{case.id} ids", [one["ids"] for one in of_ranks]).tolist() == ids
        for row in torch.stack([one["probs"] for one in of_ranks]).sum(0):
            assert_close(row, probs, case, dtype, "probabilities")
        for at, value in enumerate(case.inputs["bad"]):
            attempts = [one["bad"][at] for one in of_ranks]
            assert_all_raise(f"{case.id} at {value}", attempts, [error], ["row 1", str(value)])


def observe_filter_chain(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, list[int]]:
    logits, shard = as_tensor(case.inputs["logits"], dtype), ranks.shard(case)
    k, p = TopK(case.params["k"]), TopP(case.params["p"])

    def kept(*transforms: Transform) -> list[int]:
        scores = warp(logits, shard, *transforms)
        return scores.token_ids.expand_as(scores.values)[scores.values > -torch.inf].tolist()

    return {"in sequence": kept(k, p), "k": kept(k), "p": kept(p)}


def check_filter_chain(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, list[int]]]) -> None:
    ids = {name: {one for rank in seen for one in rank[name]} for name in ("in sequence", "k", "p")}
    assert ids["in sequence"] == set(expect.take("hf_order_kept"))
    assert ids["k"] & ids["p"] == set(expect.take("joint_kept"))  # top-p of the raw distribution
