"""Top-p, min-p and sampling."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.case_runners.common import Expected, Ranks, replicated
from tests.cases import Case, as_tensor, assert_close, local_part
from vocab_parallel import Streams, sample, top_p
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.select.filters import keep_min_p
from vocab_parallel.select.masses import measure, probabilities
from vocab_parallel.select.scores import Scores, open_scores


def _on_ranks(case: Case, dtype: torch.dtype, ranks: Ranks) -> tuple[torch.Tensor, Any]:
    logits = as_tensor(case.inputs["logits"], dtype)
    shard = ranks.shard(case)
    return local_part(logits, 1, shard.shard_size, shard.rank), shard


def _whole(scores: Scores, shard: Any) -> torch.Tensor:
    """The rows' probabilities over the whole vocabulary."""
    local = torch.zeros(scores.rows, shard.shard_size, dtype=torch.float64)
    local[:, : shard.num_valid] = probabilities(scores, measure(scores))
    return gather_vocab(shard, local, dim=1)


def observe_filters(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    """By parameter: the ids that stay in each row, and the probabilities of what stays."""
    logits, shard = _on_ranks(case, dtype, ranks)
    seen = {}
    for part in {*case.params.values(), *(float(_number(key)) for key in case.expect if key.startswith("kept_"))}:
        if case.op == "topp":
            nucleus = top_p(logits, part, shard=shard)
            kept = gather_vocab(shard, nucleus.kept, dim=1)
            assert torch.equal(nucleus.size, kept.sum(1))
            scores = open_scores(logits, shard, "case").keep(nucleus.kept[:, : shard.num_valid])
        else:
            part_of_rows = torch.full((len(logits),), part, dtype=torch.float64)
            scores = keep_min_p(open_scores(logits, shard, "case"), part_of_rows)
            kept = _whole(scores, shard) > 0
        seen[part] = {"kept": [row.nonzero()[:, 0].tolist() for row in kept], "renormalised": _whole(scores, shard)}
    return seen


def _number(key: str) -> str:
    """ "kept_p_0_75" and "kept_min_p_0_3" name 0.75 and 0.3, "kept_p_1e_9" names 1e-9."""
    digits = key.rpartition("p_")[2]
    return digits.replace("e_", "e-") if "e" in digits else digits.replace("_", ".")


def check_filters(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    for part in seen[0]:
        assert all(one[part]["kept"] == seen[0][part]["kept"] for one in seen)
    (given,) = case.params.values()
    for key in expect.left():
        wanted = expect.take(key)
        rows = wanted if isinstance(wanted[0], list) else [wanted]
        if key == "renormalised":
            probs = replicated(f"{case.id} {key}", [one[given][key] for one in seen])
            assert_close(probs, rows, case, dtype, key)
            continue
        got = seen[0][given if key == "kept" else float(_number(key))]["kept"]
        assert got == [sorted(row) for row in rows], f"{case.id} {key}: {got}, expected {rows}"


def observe_sampling(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    logits, shard = _on_ranks(case, dtype, ranks)
    rows = len(logits)
    torch.manual_seed(ranks.rank)  # the default generators of the ranks differ, as when a user did not seed them
    random.seed(ranks.rank)
    if case.op == "sample_agree":
        streams = Streams.of([None] * rows, list(range(rows)), shard=shard)
        return {"ids": sample(logits, shard=shard, streams=streams).token_ids}
    if case.op == "sample_tp_invariant":
        streams = Streams.of([case.inputs["seed"]] * rows, list(range(rows)))
        return {"ids": _draws(logits, shard, streams, 20)}
    if case.op == "sample_distribution":
        many = logits.expand(case.inputs["n"], -1)
        streams = Streams.of([5] * len(many), list(range(len(many))))
        return {"ids": sample(many, shard=shard, streams=streams).token_ids}
    streams = Streams.of(case.inputs["seeds"], shard=shard)
    together = _draws(logits, shard, streams, 20)
    order = torch.arange(rows).roll(1)
    moved = _draws(logits[order], shard, streams.rows(order), 20)[order.argsort()]
    alone = torch.cat([_draws(logits[[r]], shard, streams.rows(torch.tensor([r])), 20) for r in range(rows)])
    twice = _draws(logits[[0, 0]], shard, Streams.of([7, 7]), 20)
    return {"ids": together, "moved": moved, "alone": alone, "twice": twice}


def _draws(logits: torch.Tensor, shard: Any, streams: Streams, count: int) -> torch.Tensor:
    """`[T, count]`, one after the other."""
    ids = []
    for _ in range(count):
        drawn = sample(logits, shard=shard, streams=streams)
        ids.append(drawn.token_ids)
        streams = drawn.streams
    return torch.stack(ids, 1)


def check_sampling(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    found = {name: replicated(f"{case.id} {name}", [one[name] for one in seen]) for name in seen[0]}
    ids = found["ids"]
    assert ids.dtype == torch.int64 and bool(((ids >= 0) & (ids < case.vocab_size())).all())
    if case.op == "sample_tp_invariant":
        assert "ids equal across tp sizes" in expect.take("property")
        (single,) = [observe_sampling(case, getattr(torch, dtype), Ranks(0, 1, 1))["ids"]]
        assert torch.equal(ids, single), f"{ids}\n{single} with one rank"
        assert len(set(ids.flatten().tolist())) > 1, "nothing is drawn at random"
    elif case.op == "sample_batch_invariant":
        assert "row 0 alone == row 0 in any batch" in expect.take("property")
        assert torch.equal(found["moved"], ids) and torch.equal(found["alone"], ids)
        assert torch.equal(found["twice"][0], found["twice"][1])
    elif case.op == "sample_distribution":
        counts = torch.bincount(ids, minlength=case.vocab_size()).double() / case.inputs["n"]
        away = (counts - as_tensor(expect.take("probs"))).abs()
        assert bool((away <= as_tensor(expect.take("max_abs_deviation_5_sigma"))).all()), counts
    else:
        assert "ids identical on all ranks" in expect.take("property")
        assert len(set(ids.tolist())) > 1, "nothing is drawn at random"
