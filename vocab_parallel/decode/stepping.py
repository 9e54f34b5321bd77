"""One step of a policy: its transforms over the active requests, the choice, and what is asked for beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.agreement import Found, checksum, first_row
from vocab_parallel.decode.running import Fallback, Job, Ran, run
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.trace import Recorder, StepTrace, record, spread_rows
from vocab_parallel.decode.transforms.transform import Choice, Transform, View
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.logprobs import TopLogprobs, best_logprobs
from vocab_parallel.select.masses import Masses, measure
from vocab_parallel.select.sampling import draw
from vocab_parallel.select.scores import Scores, value_at, with_peak
from vocab_parallel.select.streams import Streams
from vocab_parallel.shard import VocabShard


class Step(NamedTuple):
    """What a step chose, the same on every rank.

    Attributes:
        token_ids: int64 `[T]`, -1 in rows that are not active.
        logprobs: float64 `[T]`, nats: of the chosen token, under the distribution that was asked for; 0 there.
        state: To go on with.
        trace: If asked for.
        top: If asked for: token_ids and logprobs `[T, n]`, -1 and -inf in rows that are not active.
    """

    token_ids: Tensor
    logprobs: Tensor
    state: PolicyState
    trace: StepTrace | None
    top: TopLogprobs | None


class Plan(NamedTuple):
    """What a step needs of a policy."""

    name: str
    transforms: tuple[Transform, ...]
    selector: str
    fallback: Fallback
    special_ids: Mapping[str, int]


@dataclass(frozen=True)
class Wanted:
    """What a step returns beside the tokens; see `Policy.step`."""

    trace: bool = False
    removed_ids: bool = False
    top_logprobs: int = 0
    logprobs: str = "processed"


def take_step(
    plan: Plan,
    logits: Tensor,  # [T, shard_size]
    view: View,
    state: PolicyState,
    rows: Tensor,  # int64 [n], the active ones, ascending
    *,
    shard: VocabShard,
    channel: Channel,
    wanted: Wanted,
) -> Step:
    """Chooses for the rows `rows` and leaves the others as they are."""
    count, view = len(state), view.to(logits.device)
    if len(rows) == count:
        return _step(plan, logits, view, state, rows, shard, channel, wanted)
    if len(rows) == 0:
        channel.open(logits.device)
    part = _step(plan, logits[rows], view.rows(rows), state.rows(rows), rows, shard, channel, wanted)
    top = part.top and TopLogprobs(
        spread_rows(part.top.token_ids, rows, count, -1), spread_rows(part.top.logprobs, rows, count, -torch.inf)
    )
    return Step(
        spread_rows(part.token_ids, rows, count, -1),
        spread_rows(part.logprobs, rows, count, 0.0),
        state.merged(rows, part.state),
        part.trace and part.trace.spread(rows, count),
        top,
    )


def _step(
    plan: Plan, logits: Tensor, view: View, state: PolicyState, rows: Tensor, shard: VocabShard, channel: Channel,
    wanted: Wanted,
) -> Step:  # fmt: skip
    """A step of requests that are all active; `rows` are their numbers in the batch."""
    transforms = _of_requests(plan.transforms, state)
    raw = Scores.of(logits, shard, channel)
    recorder = Recorder(channel, plan.special_ids if wanted.removed_ids else {}) if wanted.trace else None
    job = Job(
        plan.name, transforms, state.states, view, rows, plan.fallback, channel,
        recorder.note if recorder is not None else lambda scores: None,
        wants_legal=wanted.trace or plan.fallback.kind == "token",
    )  # fmt: skip
    ran = run(job, raw)
    chosen = _choose(plan.selector, ran, state.streams)
    logprobs, top = _reported(raw, ran, chosen, wanted)
    trace = None
    if recorder is not None:
        names = tuple(transform.name for transform in transforms)
        draws = state.streams.draws.to(rows.device)
        trace = record(recorder, names, raw, ran, chosen.token_ids, draws, plan.fallback)
    return Step(chosen.token_ids, logprobs, _following(transforms, state, chosen), trace, top)


def _of_requests(transforms: tuple[Transform, ...], state: PolicyState) -> tuple[Transform, ...]:
    """The transforms with their per-row parameters those of the requests at hand."""
    if all(one.row_count() is None for one in transforms):
        return transforms
    origin = state.origin.tolist()
    return tuple(one if one.row_count() is None else one.for_rows(origin) for one in transforms)


class _Chosen(NamedTuple):
    token_ids: Tensor
    logprobs: Tensor
    masses: Masses
    streams: Streams


def _choose(selector: str, ran: Ran, streams: Streams) -> _Chosen:
    if selector == "sample":
        drawn = draw(ran.scores, streams)
        values = drawn.values + 0.0  # no -0.0, as where a value has travelled: the same bits at every TP size
        return _Chosen(drawn.token_ids, drawn.masses.logprob(values), drawn.masses, drawn.streams)
    scores = with_peak(ran.scores)
    assert scores.peak is not None
    masses = measure(scores)
    return _Chosen(scores.peak.token_ids, masses.logprob(scores.peak.values), masses, streams)


def _reported(raw: Scores, ran: Ran, chosen: _Chosen, wanted: Wanted) -> tuple[Tensor, TopLogprobs | None]:
    """Log-probabilities `[T]` of the chosen tokens, and of the best ones if wanted, in the distribution wanted."""
    scores, masses, logprobs = ran.scores, chosen.masses, chosen.logprobs
    if wanted.logprobs == "raw":
        scores = with_peak(raw)
        masses = measure(scores)
        logprobs = masses.logprob(value_at(scores, chosen.token_ids))
    return logprobs, best_logprobs(scores, wanted.top_logprobs, masses) if wanted.top_logprobs else None


def _following(transforms: tuple[Transform, ...], state: PolicyState, chosen: _Chosen) -> PolicyState:
    states = []
    for transform, kept in zip(transforms, state.states, strict=True):
        device = next(iter(kept.values())).device if kept else chosen.token_ids.device
        token_ids = chosen.token_ids.to(device)
        choice = Choice(token_ids, chosen.logprobs.to(device), torch.ones_like(token_ids, dtype=torch.bool))
        states.append(transform.after(kept, choice))
    return PolicyState(chosen.streams, tuple(states), state.origin, state.digest)


def step_checksum(view: View, state: PolicyState, rows: Tensor) -> Tensor:
    """int64 scalar: of what must be the same on every rank."""
    device = view.prefix.device
    words = [view.prefix.reshape(-1), view.prompt_length, view.step, rows.to(device)]
    return checksum(torch.cat(words)) * 31 + state.checksum().to(device)


def bad_rows(logits: Tensor, rows: Tensor, shard: VocabShard) -> Found:
    """The first active row with NaN or +inf among this rank's real columns, unread."""
    real = logits.detach()[:, : shard.num_valid]
    worst = real.amax(1) if real.shape[1] else real.new_zeros(len(real))
    active = torch.zeros(len(real), dtype=torch.bool, device=real.device).index_fill(0, rows, True)
    row = first_row(active & (worst.isnan() | (worst == torch.inf)))
    return Found(torch.stack([row, torch.full_like(row, shard.rank)]), NonFiniteError, _describe_bad)


def _describe_bad(row: int, rank: int) -> Exception:
    return NonFiniteError(
        f"row {row} holds NaN or +inf among the logits of rank {rank} of the group: it has no distribution. Likely an "
        "overflow upstream, or an uninitialised weight."
    )
