"""Runs and checks the shared cases of beam search."""

from __future__ import annotations

from typing import Any

import torch

from tests.case_runners.common import Expected, Ranks, replicated
from tests.cases import Case, as_tensor, assert_close, local_part
from vocab_parallel.decode.search.beam import beam_step, split_flat
from vocab_parallel.decode.search.reordering import reorder


def check_flat_index(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    parents, tokens = split_flat(torch.tensor(case.inputs["flat"]), case.inputs["vocab"])
    assert parents.tolist() == expect.take("parent")
    assert tokens.tolist() == expect.take("token")
    large = case.inputs["large"]
    parents, tokens = split_flat(torch.tensor(large["flat"]), large["vocab"])
    assert {"parent": parents.tolist(), "token": tokens.tolist()} == expect.take("large")
    assert {one.dtype for one in (parents, tokens)} == {torch.int64}


def observe_beam_step(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    shard = ranks.shard(case)
    logits = local_part(as_tensor(case.inputs["logits"], dtype), 1, shard.shard_size, shard.rank)[None]
    sums = as_tensor(case.inputs["prev_scores"])[None]
    assert sums.shape[1] == case.inputs["num_beams"]
    return {"step": tuple(beam_step(logits, sums, shard=shard))}


def check_beam_step(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    scores, parents, tokens, _ = (
        replicated(f"{case.id} {name}", [one["step"][at] for one in seen])[0]
        for at, name in enumerate(("scores", "parents", "tokens", "log-probabilities"))
    )
    assert parents.tolist() == expect.take("parents")
    assert tokens.tolist() == expect.take("tokens")
    assert_close(scores, expect.take("scores"), case, dtype, "scores")


def check_reorder(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    parents, beams = torch.tensor(case.inputs["parents"]), case.inputs["num_beams"]
    assert parents.shape == (case.inputs["batch"], beams)
    cache, flags = torch.tensor(case.inputs["state"]), torch.tensor(case.inputs["state"]) % 2 == 0
    state = {"cache": [(cache[:, None], cache[:, None, None])], "lengths": cache, "finished": flags}
    moved, expected = reorder(state, parents, beams=beams), expect.take("state")
    assert moved["lengths"].tolist() == expected
    assert [one.flatten().tolist() for one in moved["cache"][0]] == [expected, expected]
    assert moved["finished"].tolist() == [one % 2 == 0 for one in expected]
    assert cache.tolist() == case.inputs["state"], "the caller's state was changed"
