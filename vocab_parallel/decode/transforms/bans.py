"""Processors that remove ids from the support: what they remove is forbidden, and no fallback brings it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.columns import as_columns
from vocab_parallel.decode.transforms.history import (
    COUNTS,
    SCOPES,
    Phrases,
    Processor,
    aligned,
    check_choice,
    ids_of,
    length_of,
    places,
)
from vocab_parallel.decode.transforms.row_transform import LARGEST, Bounds
from vocab_parallel.decode.transforms.transform import RowValue, View, row_values
from vocab_parallel.select.scores import Scores

_COUNT: Mapping[str, Any] = {"low": 0, "dtype": torch.int64}
IdList = Sequence[int] | Sequence[Sequence[int]]  # for all requests, or one list for each


@dataclass(frozen=True, eq=False)
class Suppress(Processor):
    """Forbids ids.

    Args:
        token_ids: The ids, or a list for each request.
        steps: Numbers of generated ids at which they are forbidden; None is always. `(0,)`: not as the first one.

    Source:
        `SuppressTokensLogitsProcessor` and `SuppressTokensAtBeginLogitsProcessor` of Transformers.
    """

    name: ClassVar[str] = "suppress"
    hard: ClassVar[bool] = True
    per_row: ClassVar[tuple[str, ...]] = ("token_ids",)
    depths: ClassVar[Mapping[str, int]] = {"token_ids": 1}
    token_ids: IdList
    steps: Sequence[int] | None = None

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        self.check_ids("token_ids", vocab_size)
        if self.steps is not None:
            row_values(self.steps, len(self.steps), "suppress's steps", low=0, dtype=torch.int64)

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        banned = self.ids_like("token_ids", scores)
        if self.steps is not None:
            now = torch.isin(view.step, torch.tensor(self.steps, dtype=torch.int64, device=view.step.device))
            banned = torch.where(now[:, None], banned, -1)
        return _ban(scores, banned)


@dataclass(frozen=True, eq=False)
class Force(Processor):
    """Forbids all other ids at one length: a forced beginning, or a forced end.

    Args:
        token_ids: The ids that stay, or a list for each request.
        at: The length at which they are forced.
        counts: Of what: the ids "generated" (0 is the first step), or "all" with the prompt's.
        score: None leaves their scores. A number gives them that score, also where something before has forbidden
            them: Transformers gives 0.

    Source:
        `ForcedBOSTokenLogitsProcessor` (`at=1, counts="all", score=0.0`) and `ForcedEOSTokenLogitsProcessor`
        (`at=max_length - 1, counts="all", score=0.0`) of Transformers.
    """

    name: ClassVar[str] = "force"
    hard: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"at": _COUNT}
    per_row: ClassVar[tuple[str, ...]] = ("token_ids", "at")
    depths: ClassVar[Mapping[str, int]] = {"token_ids": 1}
    token_ids: IdList
    at: RowValue
    counts: str = "generated"
    score: float | None = None

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        self.check_ids("token_ids", vocab_size)
        for row, ids in enumerate(self.for_each_row("token_ids")):
            if len(ids) == 0:
                raise ValueError(f"force's token_ids of row {row} are empty: nothing would be legal")
        check_choice(self.counts, COUNTS, "force's counts")
        if self.score is not None:
            row_values(self.score, 1, "force's score", low=-LARGEST, high=LARGEST)

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        now = (length_of(view, self.counts) == self.row("at", scores.rows, scores.values))[:, None]
        if not bool(now.any()):
            return scores
        if self.score is not None:
            scores = as_columns(scores)  # of the forced ids, which need not be among the candidates
        z, forced = scores.values, scores.listed(self.ids_like("token_ids", scores))
        kept = z if self.score is None else torch.full_like(z, self.score)
        return scores.with_values(torch.where(now, torch.where(forced, kept, -torch.inf), z))


@dataclass(frozen=True, eq=False)
class MinLength(Processor):
    """Forbids the end-of-sequence ids before a length is reached.

    Args:
        length: The number of ids before the first that may end the sequence.
        eos_ids: The ids, or a list for each request.
        counts: What counts: the ids "generated", or "all" with the prompt's.

    Source:
        `MinNewTokensLengthLogitsProcessor` ("generated") and `MinLengthLogitsProcessor` ("all") of Transformers.
    """

    name: ClassVar[str] = "min_length"
    hard: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"length": _COUNT}
    per_row: ClassVar[tuple[str, ...]] = ("length", "eos_ids")
    depths: ClassVar[Mapping[str, int]] = {"eos_ids": 1}
    length: RowValue
    eos_ids: IdList
    counts: str = "generated"

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        self.check_ids("eos_ids", vocab_size)
        check_choice(self.counts, COUNTS, "min_length's counts")

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        early = length_of(view, self.counts) < self.row("length", scores.rows, scores.values)
        if not bool(early.any()):
            return scores
        return _ban(scores, torch.where(early[:, None], self.ids_like("eos_ids", scores), -1))


@dataclass(frozen=True, eq=False)
class BadWords(Processor):
    """Forbids id sequences: a single id always, the last id of a longer one where the ids so far end in the others.

    Args:
        words: The sequences, or a list of them for each request.
        scope: Where the beginning of a sequence may stand: in "all" ids, or among those "generated" only.

    Source:
        `NoBadWordsLogitsProcessor` of Transformers.
    """

    name: ClassVar[str] = "bad_words"
    hard: ClassVar[bool] = True
    per_row: ClassVar[tuple[str, ...]] = ("words",)
    depths: ClassVar[Mapping[str, int]] = {"words": 2}
    words: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
    scope: str = "all"

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        for row, words in enumerate(self.for_each_row("words")):
            if not all(isinstance(word, tuple) and word for word in words):
                where = f" of row {row}" if self.varies("words") else ""
                raise ValueError(f"bad_words's words{where} must be lists of one or more token ids, got {words!r}")
        self.check_ids("words", vocab_size)
        check_choice(self.scope, SCOPES, "bad_words's scope")

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        device = scores.values.device
        phrases = self.once(device, lambda: Phrases.of(self.for_each_row("words"), device))
        ended = phrases.ended_by_next(aligned(ids_of(view, self.scope)))
        return _ban(scores, torch.where(ended, phrases.last, -1))


@dataclass(frozen=True, eq=False)
class NoRepeatNgram(Processor):
    """Forbids every id that would make a second copy of n ids in a row.

    Args:
        n: 1 lets no id occur twice; 0 is off.
        scope: Where the first copy may stand: in "all" ids, or among those "generated" only.

    Source:
        `NoRepeatNGramLogitsProcessor` of Transformers; Paulus et al. 2018, "A Deep Reinforced Model for Abstractive
        Summarization", section 2.5.
    """

    name: ClassVar[str] = "no_repeat_ngram"
    hard: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"n": _COUNT}
    per_row: ClassVar[tuple[str, ...]] = ("n",)
    n: RowValue
    scope: str = "all"

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        check_choice(self.scope, SCOPES, "no_repeat_ngram's scope")

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        n = self.row("n", scores.rows, scores.values)
        return _ban(scores, repeating(aligned(ids_of(view, self.scope)), n))


def repeating(
    history: Tensor,  # int64 [T, L], as `aligned` gives
    n: Tensor,  # int64 [T]
) -> Tensor:
    """int64 `[T, L]`: the ids that would repeat an n-gram, -1 in the other places. O(T L) for each place of an n-gram.

    An id is one if the n - 1 ids before it are the last n - 1.
    """
    length = history.shape[1]
    repeats = (history >= 0) & (n > 0)[:, None]
    longest = min(max(n.tolist(), default=0), length + 1)
    for back in range(1, longest):
        if back >= length:
            repeats &= (n <= back)[:, None]
            break
        last = history[:, length - back, None]
        before = torch.nn.functional.pad(history, (back, 0), value=-1)[:, :length]
        repeats &= (before == last) | (n <= back)[:, None]
    return torch.where(repeats, history, -1)


def _ban(scores: Scores, ids: Tensor) -> Scores:
    """-inf at the ids `[T, m]`; -1 is none."""
    z, n = scores.values, scores.values.shape[1]
    if n == 0:  # what is known of the rows is dropped on every rank alike
        return scores.with_values(z)
    at = places(scores.token_ids, n, ids)
    lowest = torch.where(at < n, -torch.inf, torch.inf).to(z.dtype)
    return scores.with_values(z.scatter_reduce(1, at.clamp(max=n - 1), lowest, "amin"))
