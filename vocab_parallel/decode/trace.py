"""What a policy did at a step: observations per row, the same bits on every rank, and no claim about the text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.decode.running import Fallback, Ran
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.masses import measure
from vocab_parallel.select.scores import Scores, top_candidates, value_at


@dataclass(frozen=True)
class StepTrace:
    """One step of T requests. Of a row that was not active every number is NaN or -1, every flag False.

    Attributes:
        transforms: Their names, in order.
        active: bool `[T]`.
        margin: float64 `[T]`: best minus second score after all transforms; inf where only one token is left.
        entropy: float64 `[T]`, nats, of the final distribution.
        support: int64 `[T]`: tokens left after all transforms.
        legal: int64 `[T]`: tokens that the hard transforms alone leave.
        removed: int64 `[T, transforms]`: how many fewer tokens each transform left, after a fallback's answer; below 0
            where a `force` with a score brought some back.
        removed_special: By the name of a special id, bool `[T, transforms]`: whether the transform removed it.
        raw_score, score: float64 `[T]`: of the chosen token, before and after the transforms.
        logprob: float64 `[T]`, nats: of the chosen token under the final distribution.
        draw: int64 `[T]`: number of the draw in the request's stream; where nothing is drawn, of its next one.
        emptied: Bool `[T, transforms]`: which of them left no token, where a fallback has answered.
        fallback: What it was.
    """

    transforms: tuple[str, ...]
    active: Tensor
    margin: Tensor
    entropy: Tensor
    support: Tensor
    legal: Tensor
    removed: Tensor
    removed_special: Mapping[str, Tensor]
    raw_score: Tensor
    score: Tensor
    logprob: Tensor
    draw: Tensor
    emptied: Tensor
    fallback: Fallback

    def reason(self, row: int) -> str | None:
        """Why a fallback answered in this row; None where none did."""
        names = [name for name, left in zip(self.transforms, self.emptied[row].tolist(), strict=True) if left]
        if not names:
            return None
        did = f"token {self.fallback.token_id} was chosen" if self.fallback.kind == "token" else "it was undone"
        return f"{', '.join(names)} left no token: {did}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """One JSON-able dict an active row; NaN and inf are None."""
        return [self._row(row) for row in range(len(self.active)) if bool(self.active[row])]

    def _row(self, row: int) -> dict[str, Any]:
        numbers: dict[str, Any] = {"row": row}
        for name in ("margin", "entropy", "support", "legal", "raw_score", "score", "logprob", "draw"):
            value = getattr(self, name)[row].item()
            numbers[name] = value if math.isfinite(value) else None
        numbers["removed"] = [
            [name, count] for name, count in zip(self.transforms, self.removed[row].tolist(), strict=True)
        ]
        if self.removed_special:
            numbers["removed_special"] = {
                name: [one for one, gone in zip(self.transforms, flags[row].tolist(), strict=True) if gone]
                for name, flags in self.removed_special.items()
            }
        numbers["fallback"] = self.reason(row)
        return numbers

    def spread(self, rows: Tensor, count: int) -> StepTrace:
        """The trace of a batch of `count` rows, of which these are the rows `rows`, the others not active."""
        spread: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Tensor):
                spread[one.name] = spread_rows(value, rows, count, _nothing(value))
        special = {name: spread_rows(value, rows, count, False) for name, value in self.removed_special.items()}
        return replace(self, **spread, removed_special=special)


class Recorder:
    """Counts what is left after each transform on this rank's columns; the ranks' counts are gathered once.

    Args:
        channel: The call's.
        special_ids: Named ids whose removal is recorded.
    """

    def __init__(self, channel: Channel, special_ids: Mapping[str, int]) -> None:
        self._channel, self._special = channel, dict(special_ids)
        self._words: list[Tensor] = []

    def note(self, scores: Scores) -> None:
        """Notes the scores at the start, after each transform, and at the end those of the hard ones alone."""
        left = scores.values > -torch.inf
        words = [left.sum(1)]
        for token_id in self._special.values():
            listed = scores.listed(torch.tensor([token_id], device=left.device))
            words.append((listed & left).sum(1))
        here = torch.stack(words)
        if scores.replicated and self._channel.rank > 0:
            here = torch.zeros_like(here)  # the first rank counts what all hold
        self._words.append(here)

    def gathered(self) -> Tensor:
        """int64 `[notes, 1 + special ids, T]`: the tokens left, and whether each special id is."""
        return self._channel.gather(torch.stack(self._words)).sum(0)

    @property
    def special(self) -> list[str]:
        return list(self._special)


def record(
    recorder: Recorder,
    names: tuple[str, ...],
    raw: Scores,  # [T, V]
    ran: Ran,
    token_ids: Tensor,  # int64 [T]
    draw: Tensor,  # int64 [T]
    fallback: Fallback,
) -> StepTrace:
    """The trace of rows that are all active.

    Collectives:
        Of bytes a row and rank: 32 (masses with moments), 16 (the best two; 32 for float64), 16 (raw and final score)
        and `8 (transforms + 2)`, as much again for each special id. Those of the scores after a top-k that all ranks
        hold are free.
    """
    recorder.note(ran.legal)
    left = recorder.gathered()  # start, after each transform, legal
    masses = measure(ran.scores, moments=True)
    best = top_candidates(ran.scores, min(2, ran.scores.vocab_size)).values.double().sort(1, descending=True).values
    second = best[:, 1] if best.shape[1] > 1 else torch.full_like(best[:, 0], -torch.inf)
    score = value_at(ran.scores, token_ids)
    removed = (left[:-2] - left[1:-1]).movedim(2, 0)  # [T, transforms, 1 + special]
    return StepTrace(
        transforms=names,
        active=torch.ones_like(token_ids, dtype=torch.bool),
        margin=best[:, 0] - second,
        entropy=masses.entropy,
        support=left[-2, 0],
        legal=left[-1, 0],
        removed=removed[:, :, 0],
        removed_special={name: removed[:, :, 1 + at] > 0 for at, name in enumerate(recorder.special)},
        raw_score=value_at(raw, token_ids).double(),
        score=score.double(),
        logprob=masses.logprob(score),
        draw=draw,
        emptied=ran.emptied,
        fallback=fallback,
    )


def spread_rows(value: Tensor, rows: Tensor, count: int, nothing: float) -> Tensor:
    """`[count, ...]`: `value` at the rows `rows`, `nothing` at the others."""
    return value.new_full((count, *value.shape[1:]), nothing).index_copy(0, rows, value)


def _nothing(value: Tensor) -> float:
    return math.nan if value.is_floating_point() else False if value.dtype == torch.bool else -1
