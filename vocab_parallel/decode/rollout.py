"""The loop around a policy: the model's logits, one step of the policy, its ids appended, until all have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.trace import StepTrace
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.shard import VocabShard


@dataclass(frozen=True)
class Advance:
    """One step of every request; the same bits on every rank.

    Attributes:
        token_ids: int64 `[T]`; -1 where a request had ended before.
        logprobs: float64 `[T]`, of the chosen ids under the policy's final distribution, in nats; 0 where ended before.
        active: bool `[T]`, the requests that this step was for.
        ended: bool `[T]`, those that have ended by now, by an end id.
        view: With the ids appended.
        state: The policy's, after the step.
        trace: Of the step, if it was asked for.
    """

    token_ids: Tensor
    logprobs: Tensor
    active: Tensor
    ended: Tensor
    view: View
    state: PolicyState
    trace: StepTrace | None


def rollout(
    columns: Callable[[View, Tensor], Tensor],
    policy: Policy,
    view: View,
    state: PolicyState,
    *,
    shard: VocabShard,
    eos_ids: Sequence[int],
    max_new_tokens: int,
    trace: bool = False,
) -> Iterator[Advance]:
    """Steps until every request has an end id, or `max_new_tokens` more ids.

    A request that has ended is drawn for no more: its stream stays where it is, and no other request notices.

    Args:
        columns: The model: of a view and of the active requests bool `[T]` this rank's logits of the next position
            `[T, shard_size]`; what it gives for the others must be finite, and is not used.
        view: The prompts.
        eos_ids: Ids that end a request; they count among its ids.

    Yields:
        An `Advance` a step.

    Collectives:
        Those of `columns` and of `policy.step`.
    """
    active = torch.ones(len(view.prefix), dtype=torch.bool, device=view.prefix.device)
    ends = torch.tensor(list(eos_ids), dtype=torch.int64, device=view.prefix.device)
    for _ in range(max_new_tokens):
        step = policy.step(columns(view, active), view, state, shard=shard, active=active, trace=trace)
        state, view = step.state, view.appended(step.token_ids)  # where the logits are, from now on
        active, ends = active.to(view.prefix.device), ends.to(view.prefix.device)
        left = active & ~torch.isin(step.token_ids, ends)
        yield Advance(step.token_ids, step.logprobs, active, ~left, view, state, step.trace)
        active = left
        if not bool(active.any()):
            return
