"""Banned and allowed ids, and sums over log-probabilities of filtered rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.batch import assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks, replicated
from tests.cases import Case, as_tensor, assert_close, local_part
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.constraints import Fsm, StateMachine
from vocab_parallel.decode.transforms.processors import BadWords, Bias, Force, MinLength, Suppress
from vocab_parallel.decode.transforms.sequence import masked_sum
from vocab_parallel.decode.transforms.transform import Transform, View


def _naming(token_id: int) -> dict[str, Transform]:
    """Every way to ban an id, or to allow no other."""
    return {
        "suppress": Suppress([token_id]),
        "bias": Bias({token_id: -math.inf}),
        "bad_words": BadWords([[token_id]]),
        "min_length": MinLength(1, token_id),
        "force": Force([token_id], 0),
        "fsm": Fsm(StateMachine.from_sequences([[token_id]])),
    }


def observe_banned(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    vocab, padded = case.inputs["vocab"], case.inputs["pad_to"]
    shard = VocabShard(VocabLayout.from_padded(vocab, padded, ranks.tp), ranks.group())
    legal, refused = case.inputs["banned"]
    whole = torch.arange(float(vocab)).to(dtype)[None]  # the last real id is the best
    logits = local_part(whole, 1, shard.shard_size, shard.rank, fill=1e30)

    def step(transform: Transform) -> torch.Tensor:
        policy = Policy((transform,), selector="greedy")
        return policy.step(logits, View.of([[]]), policy.start(1), shard=shard).token_ids

    return {
        "legal": {name: step(transform) for name, transform in _naming(legal).items()},
        "at a step": {name: attempt(lambda one=one: step(one)) for name, one in _naming(refused).items()},
        "at construction": {
            name: attempt(lambda one=one: Policy((one,), vocab_size=vocab)) for name, one in _naming(refused).items()
        },
    }


def check_banned(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    assert expect.take("raises_or_ignores") == "id 5 (>= 5) is refused with its value; id 4 is legal"
    for name in _naming(0):
        chosen = replicated(f"{case.id} {name}", [one["legal"][name] for one in seen]).item()
        assert chosen == (4 if name in ("force", "fsm") else 3), f"{name} chose {chosen}"
        for when in ("at a step", "at construction"):
            attempts = [one[when][name] for one in seen]
            assert_all_raise(f"{case.id} {name} {when}", attempts, ["TokenRangeError"], ["token id 5", "[0, 5)", name])


def observe_masked_sum(case: Case, dtype: torch.dtype, ranks: Ranks) -> Any:
    mask = torch.tensor(case.inputs["mask"])
    return tuple(masked_sum(as_tensor(case.inputs["logprobs"], dtype), mask))


def check_masked_sum(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    ((total, tokens),) = seen
    assert_close(total, expect.take("sum"), case, dtype, "sum")
    assert tokens.item() == expect.take("count")
