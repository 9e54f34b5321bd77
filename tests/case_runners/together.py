"""Ranks that must agree, fail together, and count what they send."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from tests.batch import Attempt, assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks, differentiate
from tests.cases import Case, as_target, as_tensor, local_part
from tests.multirank.counting import collectives
from vocab_parallel import (
    Traffic,
    VocabShard,
    cross_entropy,
    greedy,
    linear_cross_entropy,
    top_k,
    vocab_parallel_embedding,
)


def observe_fail_together(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Attempt]:
    shard = ranks.shard(case)
    target = as_target(case.inputs[f"rank{ranks.rank}_target"])
    logits, hidden = torch.zeros(2, shard.shard_size, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    weight = torch.zeros(shard.shard_size, 3, dtype=dtype)
    fused = functools.partial(linear_cross_entropy, hidden, weight, target, shard=shard)
    return {
        "cross_entropy": attempt(lambda: cross_entropy(logits, target, shard=shard)),
        "linear_cross_entropy": attempt(fused),
        "linear_cross_entropy of own rows": attempt(functools.partial(fused, sequence_parallel=True)),
        "embedding": attempt(lambda: vocab_parallel_embedding(target, weight, shard=shard)),
    }


def check_fail_together(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Attempt]]) -> None:
    assert expect.take("raises_on_all") is True
    assert expect.take("within_seconds") == 10
    for name in seen[0]:
        attempts = [one[name] for one in seen]
        assert_all_raise(
            f"{case.id} {name}", attempts, ("TargetRangeError", "TokenRangeError"), ["99", "[0, 4)", "rank 1"]
        )


class InOrder(Traffic):
    """Traffic that also keeps the order of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def add(self, collective: str, sent: int) -> None:
        super().add(collective, sent)
        self.order.append(collective)


def observe_uneven_work(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    """Two data-parallel replicas of two TP ranks; the first has nothing to do, in three ways."""
    shard = ranks.shard(case, 4)
    replica = ranks.rank // ranks.tp
    target = as_target(case.inputs[f"dp{replica}_target"])
    hidden = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=dtype)
    weight = as_tensor([[-2.75, 0.75], [-1.5, 2.0], [-0.25, -2.5], [1.0, -1.25]], dtype)
    weight = local_part(weight, 0, shard.shard_size, shard.rank)
    seen: dict[str, Any] = {}
    for name, keep, sequence_parallel in (("ignored", 2, False), ("no rows", 0, False), ("no own rows", 0, True)):
        rows = slice(0, 2 if replica == 1 else keep)
        shard.traffic = InOrder()
        with collectives() as (calls, _):
            call = functools.partial(
                linear_cross_entropy, target=target[rows], shard=shard, sequence_parallel=sequence_parallel
            )
            seen[name] = differentiate(call, [hidden[rows], weight])
        total = seen[name]["grads"][1].clone()
        dist.all_reduce(total)  # as data parallelism would: every rank gets here
        seen[name] |= {"order": shard.traffic.order, "calls": dict(calls), "all replicas": total}
    return seen


def check_uneven_work(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    assert "no hang; same number and order of collectives on both" in expect.take("property")
    for name in seen[0]:
        calls = [one[name] for one in seen]
        assert calls[0]["order"], "nothing was recorded"
        for call in calls:
            assert call["order"] == calls[0]["order"], f"{case.id} {name}: {calls}"
            assert Counter(call["order"]) == call["calls"], f"{case.id} {name}: not all were recorded: {call}"
        for rank, call in enumerate(calls):
            busy = rank >= tp
            assert bool(call["loss"]) == busy and bool(call["grads"][1].any()) == busy, f"{case.id} {name} rank {rank}"
            assert call["all replicas"].any() and call["all replicas"].isfinite().all()


def observe_shape_agree(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Attempt]:
    shape = case.inputs[f"rank{ranks.rank}_shape"]
    shard = ranks.shard(case, 2 * shape[1])
    logits, target = torch.zeros(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.int64)
    other = torch.float64 if ranks.rank else torch.float32
    return {
        "rows": attempt(lambda: cross_entropy(logits, target, shard=shard)),
        "rows, greedy": attempt(lambda: greedy(logits, shard=shard)),
        "dtype": attempt(
            lambda: cross_entropy(torch.zeros(4, shape[1], dtype=other), torch.zeros(4).long(), shard=shard)
        ),
    }


def check_shape_agree(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Attempt]]) -> None:
    assert expect.take("raises_on_all") is True
    names = expect.take("message_names")
    for what, words in (("rows", names), ("rows, greedy", names), ("dtype", ["float32", "float64"])):
        words = [word if word.startswith("[") else f"torch.{word}" for word in words]
        assert_all_raise(f"{case.id} {what}", [one[what] for one in seen], ["LayoutMismatchError"], words)


def observe_collective_count(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for vocab in (case.inputs["vocab"], 1000 * case.inputs["vocab"]):
        shard = ranks.shard(case, vocab)
        rows = case.inputs["tokens"]
        target = torch.zeros(rows, dtype=torch.int64)
        logits = torch.zeros(rows, shard.shard_size, dtype=dtype)
        hidden, weight = torch.zeros(rows, 3, dtype=dtype), torch.zeros(shard.shard_size, 3, dtype=dtype)
        plain = functools.partial(cross_entropy, target=target)
        smoothed = functools.partial(plain, label_smoothing=0.1)
        fused = functools.partial(linear_cross_entropy, target=target)
        for name, call, inputs in (
            ("plain", plain, [logits]),
            ("smoothed", smoothed, [logits]),
            ("fused", fused, [hidden, weight]),
        ):
            inputs = [tensor.clone().requires_grad_() for tensor in inputs]
            shard = VocabShard(shard.layout, shard.group)  # which remembers no other call
            with collectives() as (calls, _):
                loss = call(*inputs, shard=shard)
                forward = Counter(calls)
                loss.backward()
            counted, sent = Counter(shard.traffic.calls), shard.traffic.total_bytes
            one = {"forward": forward, "backward": calls - forward, "counted": counted, "bytes": sent}
            for _ in range(9):  # until the group only remembers calls of this size, see `Exchange`
                shard.traffic.reset()
                call(*inputs, shard=shard)
            one["settled"] = shard.traffic.bytes["all_gather"]
            seen[f"{name}, V={vocab}"] = one
    return seen


def check_collective_count(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    """Ours is one all-gather where the file counts three all-reduces; never more than the file allows."""
    allowed_forward, fused_reductions = (
        expect.take("forward_allreduce_max_count"),
        expect.take("backward_allreduce_fused"),
    )
    allowed_backward, extra = expect.take("backward_allreduce_sharded"), expect.take("label_smoothing_extra")
    none_at_one_rank, elements = expect.take("tp1"), expect.take("elements_per_forward_allreduce")
    vocab = case.inputs["vocab"]
    for one in seen:
        for name, call in one.items():
            forward, backward = call["forward"], call["backward"]
            assert forward + backward == call["counted"], f"{case.id} {name}: not all are counted: {call}"
            if tp == 1:
                assert forward.total() + backward.total() == none_at_one_rank == call["bytes"], (
                    f"{case.id} {name}: {call}"
                )
                continue
            element = 8 if dtype == "float64" else 4
            sent = (call["settled"] // (tp - 1) - 64) // element
            allowed = (allowed_forward + extra * name.startswith("smoothed")) * elements
            assert 0 < sent <= allowed, f"{case.id} {name}: {sent} numbers sent where {allowed} are allowed"
            reductions = {"all_reduce": fused_reductions} if name.startswith("fused") else {}
            assert forward == {"all_gather": 1} | reductions and allowed_forward >= 1, f"{case.id} {name}: {call}"
            assert backward.total() == allowed_backward, f"{case.id} {name}: {call}"
        assert one[f"smoothed, V={vocab}"]["forward"].total() <= one[f"plain, V={vocab}"]["forward"].total() + extra
        for name in ("plain", "smoothed", "fused"):  # what is sent does not depend on the vocabulary
            assert one[f"{name}, V={vocab}"]["bytes"] == one[f"{name}, V={1000 * vocab}"]["bytes"]


def observe_collective_bytes(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    shard = ranks.shard(case)
    whole = torch.randn(case.inputs["batch"], case.vocab_size(), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = local_part(whole, 1, shard.shard_size, shard.rank)
    seen: dict[str, Any] = {}
    for name, call in (("greedy", greedy), ("top-k", functools.partial(top_k, k=case.inputs["k"]))):
        call(logits, shard=shard)  # the first call of a size may exchange twice, see `Exchange`
        shard.traffic.reset()
        with collectives() as (calls, sent):
            result = call(logits, shard=shard)
        ids = result if isinstance(result, torch.Tensor) else result.token_ids
        order = whole.double().sort(dim=-1, descending=True, stable=True).indices
        right = torch.equal(ids, order[:, 0] if name == "greedy" else order[:, : case.inputs["k"]])
        seen[name] = {"right": right, "calls": dict(calls), "bytes": sent.total(), "counted": shard.traffic.total_bytes}
    return seen


def check_collective_bytes(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    """One exchange: to each other rank 64 bytes of header and k pairs of value and id, 8 bytes each, 16 in float64."""
    pairs = expect.take("max_elements_gathered_per_row") // (2 * case.inputs["tp"])
    assert pairs == case.inputs["k"]
    element = 8 if dtype == "float64" else 4
    allowed = (tp - 1) * (case.inputs["batch"] * pairs * 2 * element + 64)
    for one in seen:
        for name, call in one.items():
            assert call["right"], f"{case.id} {name}: wrong ids"
            assert call["calls"] == {"all_gather": 1}, f"{case.id} {name}: {call['calls']}"
            assert call["bytes"] == call["counted"], f"{case.id} {name}: {call}"
            assert 0 < call["bytes"] <= allowed, f"{case.id} {name}: {call['bytes']} bytes where {allowed} are allowed"


def observe_empty_weight(case: Case, dtype: torch.dtype, ranks: Ranks) -> list[Attempt]:
    shard = ranks.shard(case, 4)
    hidden = torch.zeros(case.inputs["hidden_shape"], dtype=dtype)
    target = torch.zeros(len(hidden), dtype=torch.int64)
    found = []
    for shape in (case.inputs["weight_shape"], [0, hidden.shape[1]]):
        weight = torch.zeros(shape, dtype=dtype)
        found.append(attempt(functools.partial(linear_cross_entropy, hidden, weight, target, shard=shard)))
        found.append(attempt(functools.partial(vocab_parallel_embedding, target, weight, shard=shard)))
    return found


def check_empty_weight(case: Case, dtype: str, tp: int, expect: Expected, seen: list[list[Attempt]]) -> None:
    assert expect.take("raises") == "ValueError"
    words = expect.take("message_names")
    for attempts in zip(*seen, strict=True):
        assert_all_raise(case.id, list(attempts), ["UngatheredWeightError"], [words[0]])
        assert words[1] in attempts[0].message.lower()
