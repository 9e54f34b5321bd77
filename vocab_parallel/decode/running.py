"""Runs a policy's transforms over the scores of one step, and answers for rows that they leave without a token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.agreement import first_row
from vocab_parallel.decode.state import States
from vocab_parallel.decode.transforms.transform import Transform, View
from vocab_parallel.errors import EmptySupportError, NonFiniteError
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.scores import Scores, value_at, with_largest


@dataclass(frozen=True)
class Fallback:
    """What happens to a row that no token is left in.

    Attributes:
        kind: "error"; "token": that one is chosen if the hard constraints allow it; "undo": the scores before the
            transform that emptied the row are kept, unless it is a hard one.
        token_id: Of kind "token".
    """

    kind: Literal["error", "token", "undo"] = "error"
    token_id: int = -1


class Job(NamedTuple):
    """What a run needs to know beside the scores.

    Attributes:
        policy: Its name, for errors.
        transforms, states, view: Of the rows at hand.
        rows: int64 `[T]`: their numbers in the caller's batch.
        fallback: For rows without a token.
        channel: The call's.
        observe: Told the scores at the start and after each transform.
        wants_legal: Whether the scores under the hard transforms alone are needed.
    """

    policy: str
    transforms: Sequence[Transform]
    states: States
    view: View
    rows: Tensor
    fallback: Fallback
    channel: Channel
    observe: Callable[[Scores], None] = lambda scores: None
    wants_legal: bool = False


class Ran(NamedTuple):
    """scores: after all transforms, largest values known. legal: under the hard ones alone, if wanted.

    emptied: Bool `[T, transforms]`: which of them left no token, where a fallback has answered.
    """

    scores: Scores
    legal: Scores
    emptied: Tensor


def run(job: Job, scores: Scores) -> Ran:
    """The scores `[T, V]` after all transforms; every row has a token.

    Collectives:
        Those of the transforms, and 8 bytes a row for the largest value unless it is known. Another fallback than
        "error", or errors read late (CUDA): 8 bytes a row at the start and after each transform that does not know it.

    Raises:
        EmptySupportError: On every rank, naming row, step and the transform that removed the last token.
    """
    if job.fallback.kind != "error" or job.channel.group.defers(scores.values.device):
        return _tracked(job, scores)
    try:
        ran = _plain(job, scores)
        assert ran.scores.largest is not None
        if not bool(ran.scores.largest.eq(-torch.inf).any()):
            return ran
    except NonFiniteError:
        if job.channel.agreed:  # a transform met an empty row. All ranks are here: the supports are the same on all
            _tracked(_silent(job), scores)
        raise
    return _tracked(_silent(job), scores)  # raises


def _silent(job: Job) -> Job:
    return job._replace(observe=lambda scores: None, wants_legal=False)


def _plain(job: Job, scores: Scores) -> Ran:
    legal, only_hard = scores, True
    job.observe(scores)
    for transform, state in zip(job.transforms, job.states, strict=True):
        scores = transform.apply(scores, job.view, state)
        legal, only_hard = _legal(job, transform, state, legal, scores, only_hard)
        job.observe(scores)
    emptied = torch.zeros(len(job.rows), len(job.transforms), dtype=torch.bool, device=job.rows.device)
    return Ran(with_largest(scores), legal, emptied)


def _legal(
    job: Job, transform: Transform, state: dict[str, Tensor], legal: Scores, scores: Scores, only_hard: bool
) -> tuple[Scores, bool]:
    """The scores under the hard transforms alone, up to this one; and whether there have been no others."""
    if not job.wants_legal or not transform.is_hard():
        return legal, only_hard and transform.is_hard()
    return (scores if only_hard else transform.apply(legal, job.view, state)), only_hard


def _tracked(job: Job, scores: Scores) -> Ran:
    """As `_plain`, looking for empty rows at the start and after each transform."""
    scores = with_largest(scores)
    legal, only_hard = scores, job.fallback.kind != "token"  # whose token would pass for one that is legal
    emptied = torch.zeros(len(job.rows), len(job.transforms), dtype=torch.bool, device=job.rows.device)
    _require_tokens(job, scores, -1)
    job.observe(scores)
    for at, (transform, state) in enumerate(zip(job.transforms, job.states, strict=True)):
        before, scores = scores, with_largest(transform.apply(scores, job.view, state))
        legal, only_hard = _legal(job, transform, state, legal, scores, only_hard)
        assert scores.largest is not None
        gone = scores.largest == -torch.inf
        if job.fallback.kind == "undo" and not transform.is_hard() and _same_columns(before, scores):
            scores = _undone(before, scores, gone)
            emptied[:, at] = gone
        elif job.fallback.kind == "token":
            scores = _only(scores, gone, job.fallback.token_id)
            emptied[:, at] = gone
        else:
            _require_tokens(job, scores, at)
        job.observe(scores)
    if job.fallback.kind == "token":
        scores = _forced(job, scores, legal, emptied.any(1))
    return Ran(scores, legal, emptied)


def _same_columns(before: Scores, scores: Scores) -> bool:
    """Whether a transform has left the columns as they were; the same on every rank, however many it holds."""
    if before.replicated != scores.replicated:
        return False
    return not scores.replicated or before.token_ids.shape == scores.token_ids.shape


def _undone(before: Scores, scores: Scores, rows: Tensor) -> Scores:
    """`scores`, but those `before` in these rows (bool `[T]`)."""
    assert before.largest is not None and scores.largest is not None
    values = torch.where(rows[:, None], before.values, scores.values)
    undone = scores.with_values(values, torch.where(rows, before.largest, scores.largest))
    if not scores.replicated:
        return undone
    return replace(undone, token_ids=torch.where(rows[:, None], before.token_ids, scores.token_ids))


def _forced(job: Job, scores: Scores, legal: Scores, hit: Tensor) -> Scores:
    """The fallback's token alone in the rows that are `hit` (bool `[T]`), which all hard transforms must allow."""
    token_id = job.fallback.token_id
    if not job.channel.group.defers(hit.device) and not bool(hit.any()):
        return scores
    allowed = value_at(legal, torch.full_like(job.rows, token_id)) > -torch.inf
    _judge(job, hit & ~allowed, f"and the fallback's token {token_id} is not legal there either", -2)
    return _only(scores, hit, token_id)


def _only(scores: Scores, rows: Tensor, token_id: int) -> Scores:
    """One token, with score 0, as the only one of these rows (bool `[T]`)."""
    assert scores.largest is not None
    largest = torch.where(rows, 0.0, scores.largest)
    if not scores.replicated:
        alone = torch.where(scores.token_ids == token_id, 0.0, -torch.inf).to(scores.values.dtype)
        return scores.with_values(torch.where(rows[:, None], alone, scores.values), largest)
    alone, ids = torch.full_like(scores.values, -torch.inf), torch.full_like(scores.token_ids, scores.vocab_size)
    alone[:, 0], ids[:, 0] = 0.0, token_id
    values = torch.where(rows[:, None], alone, scores.values)
    return replace(scores.with_values(values, largest), token_ids=torch.where(rows[:, None], ids, scores.token_ids))


def _require_tokens(job: Job, scores: Scores, at: int) -> None:
    assert scores.largest is not None
    _judge(job, scores.largest == -torch.inf, "no token is left", at)


def _judge(job: Job, bad: Tensor, what: str, at: int) -> None:
    """Raises for the first of the `bad` rows; `at` is the number of the transform, -1 the model, -2 all of them."""
    if len(bad) == 0:
        return
    row = first_row(bad)
    here = row.clamp(min=0)[None]
    number = torch.where(row >= 0, job.rows.index_select(0, here)[0], -1)
    step = job.view.step.to(bad.device).index_select(0, here)[0]
    names = [transform.name for transform in job.transforms]
    describe = functools.partial(_describe, job.policy, names, job.fallback.kind, what, at)
    job.channel.judge(torch.stack([number, step]), EmptySupportError, describe)


def _describe(policy: str, names: list[str], fallback: str, what: str, at: int, flags: list[Any]) -> Exception:
    row, step = flags
    where = f"row {row}, step {step}"
    chain = " > ".join(names) or "no transform"
    if at == -1:
        return EmptySupportError(f"{where}: {what}: the model's logits are -inf for every id, before any transform.")
    if at == -2:
        return EmptySupportError(f"{where}: no token was left {what}, in policy {policy!r} ({chain}).")
    advice = "a hard constraint is never undone. " if fallback == "undo" else "Or declare a fallback for such rows. "
    return EmptySupportError(
        f"{where}: {what} after {names[at]!r} (transform {at + 1} of policy {policy!r}: {chain}). Likely what comes "
        f"before has removed all that it allows: put constraints before filters, or loosen one. {advice.strip()}"
    )
