"""Scores that contrast a distribution with something the caller brings: similarities of hidden states, another layer.

Contrastive search needs more model steps than one: `contrastive_candidates`, the caller's pass over them, and
`contrastive_select`. DoLa (see `dola`) needs a second row of logits, of an earlier layer through the same head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.arguments import check_logits
from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode.transforms.columns import ranks_of
from vocab_parallel.decode.transforms.dola import Dola
from vocab_parallel.decode.transforms.history import check_choice
from vocab_parallel.decode.transforms.row_transform import SHARE, Bounds, RowTransform
from vocab_parallel.decode.transforms.transform import RowValue, View, row_values
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.masses import measure, probabilities
from vocab_parallel.select.nan import nan_found
from vocab_parallel.select.scores import Scores, describe, top_candidates
from vocab_parallel.shard import VocabShard

__all__ = ["Candidates", "Contrastive", "Dola", "contrastive_candidates", "contrastive_select"]

CONFIDENCES = ("logprob", "probability")


class Candidates(NamedTuple):
    """The likely tokens of each row, by id ascending, the same on every rank.

    token_ids: int64 `[T, K]`; `vocab_size` where a row has fewer. gaps: float64 `[T, K]`, nats below the row's best.
    logprobs, probabilities: float64 `[T, K]` under the whole distribution, nats and 1.
    """

    token_ids: Tensor
    gaps: Tensor
    logprobs: Tensor
    probabilities: Tensor


@uncompiled
def contrastive_candidates(
    logits: Tensor,  # [T, shard_size] floating, this rank's
    k: int,
    *,
    shard: VocabShard,
) -> Candidates:
    """The best k tokens of each row, for which the caller then computes hidden states and their similarities.

    Collectives:
        Two all-gathers, of `8 k` and of 8 bytes a row (`16 k` and 8 for float64). None at tp_size 1.

    Raises:
        NonFiniteError, LayoutMismatchError, ValueError: On every rank: a row with NaN or without a finite logit; not
            this rank's columns; k outside `[1, vocab_size]`.
    """
    channel = Channel(shard, f"contrastive_candidates({describe(logits)}, k={k!r})", found=nan_found(logits, shard))
    with channel.guard():
        check_logits(logits, shard)
        _check_k(k, shard.vocab_size)
    scores = Scores.of(logits, shard, channel)
    return _candidates(scores, k)


def contrastive_select(
    candidates: Candidates,
    similarity: Tensor,  # [T, K] floating, the largest similarity of each candidate with what came before, in [-1, 1]
    alpha: float | Tensor,
    *,
    confidence: str = "logprob",
) -> tuple[Tensor, Tensor]:
    """The best candidate by `(1 - alpha) confidence - alpha similarity`; of equal ones the smallest id.

    Args:
        similarity: `max_j cos(h_v, h_j)` over the hidden states h_j so far; the same on every rank.
        alpha: The weight of the penalty, in [0, 1]; or one a row.
        confidence: "logprob" for `log p_v`; "probability" for `p_v` as in the paper and in Transformers.

    Returns:
        int64 `[T]` token ids, and the float64 `[T, K]` scores of all candidates. No collective.

    Raises:
        ValueError, LayoutMismatchError: alpha outside [0, 1], NaN in a row's similarity; another shape.

    Source:
        Su et al. 2022, "A Contrastive Framework for Neural Text Generation", equation 5.
    """
    if similarity.shape != candidates.token_ids.shape:
        raise LayoutMismatchError(
            f"similarity {list(similarity.shape)} must have one value for each candidate, "
            f"{list(candidates.token_ids.shape)}"
        )
    _require_numbers(similarity)
    check_choice(confidence, CONFIDENCES, "confidence")
    a = row_values(alpha, len(similarity), "alpha", low=0.0, high=1.0, device=similarity.device)[:, None]
    ranked = _contrast(candidates, similarity, a, confidence)
    best = ranked.argmax(1, keepdim=True)  # the first of equal ones, which has the smallest id
    constant = (1.0 - a) * (candidates.logprobs + candidates.gaps) if confidence == "logprob" else 0.0
    return candidates.token_ids.gather(1, best)[:, 0], torch.where(ranked > -torch.inf, ranked + constant, ranked)


@dataclass(frozen=True, eq=False)
class Contrastive(RowTransform):
    """`(1 - alpha) log p_v - alpha max_j cos(h_v, h_j)` over the best k tokens; the others are out.

    The log-probabilities are relative to the row's best one, which changes no choice. The scores are float64.

    Reads from the view's extras, as the caller made them of `contrastive_candidates`: "candidate_ids" int64 `[T, k]`
    and "similarity" floating `[T, k]`, of which the first rank's count.

    Args:
        k: The number of candidates.
        alpha: As in `contrastive_select`; or one for each request.
        confidence: As in `contrastive_select`.

    Collectives:
        Three all-gathers, of `8 k`, 8 and `16 k` bytes a row (the first `16 k` for float64).

    Source:
        Su et al. 2022, "A Contrastive Framework for Neural Text Generation", equation 5.
    """

    name: ClassVar[str] = "contrastive"
    bounds: ClassVar[Bounds] = {"alpha": SHARE}
    per_row: ClassVar[tuple[str, ...]] = ("alpha",)
    k: int
    alpha: RowValue = 0.6
    confidence: str = "logprob"

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        _check_k(self.k, vocab_size)
        check_choice(self.confidence, CONFIDENCES, "contrastive's confidence")

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        rows, device = len(scores.values), scores.values.device
        with scores.channel.guard():
            given = [_candidate_extra(view, name, (rows, self.k)) for name in ("candidate_ids", "similarity")]
        found = _candidates(scores, self.k)
        # what each rank has computed may differ in the last bit: the first rank's decides
        words = torch.stack([given[0], given[1].double().contiguous().view(torch.int64)])
        ids, similarity = ranks_of(scores).gather(words)[0]
        similarity = similarity.view(torch.float64).gather(1, _matched(found, ids))
        _require_numbers(similarity)
        alpha = self.row("alpha", rows).to(device)[:, None]
        values = _contrast(found, similarity, alpha, self.confidence)
        return Scores(values, found.token_ids, scores.channel.alone(), scores.vocab_size)


def _check_k(k: object, vocab_size: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= vocab_size:
        raise ValueError(f"k must be an integer in [1, {vocab_size}] (the vocabulary), got {k!r}")


def _candidates(scores: Scores, k: int) -> Candidates:
    best = top_candidates(scores, k)
    assert best.largest is not None
    masses = measure(replace(scores, largest=best.largest, peak=best.peak))
    gaps = best.largest.double()[:, None] - best.values.double()
    shares = probabilities(best, masses)
    return Candidates(best.token_ids, gaps, masses.logprob(best.values), shares)


def _contrast(candidates: Candidates, similarity: Tensor, alpha: Tensor, confidence: str) -> Tensor:
    """float64 `[T, K]`: the scores, up to a constant of the row; -inf at places not in use."""
    # gaps instead of log-probabilities: a row's constant must not round two candidates to one score
    confident = -candidates.gaps if confidence == "logprob" else candidates.probabilities
    scores = (1.0 - alpha) * confident - alpha * similarity.double()
    return torch.where(candidates.gaps < torch.inf, scores, -torch.inf)


def _matched(found: Candidates, given: Tensor) -> Tensor:
    """int64 `[T, K]`: where each candidate stands among those given."""
    ids, order = given.sort(dim=1)
    at = torch.searchsorted(ids, found.token_ids).clamp(max=ids.shape[1] - 1)
    missing = ((ids.gather(1, at) != found.token_ids) & (found.gaps < torch.inf)).nonzero()
    if len(missing):
        row, place = missing[0].tolist()
        raise ValueError(
            f"contrastive: row {row} has no similarity for its candidate {int(found.token_ids[row, place])}. Take the "
            "candidates of the scores that reach this transform, or put it first."
        )
    return order.gather(1, at)


def _require_numbers(similarity: Tensor) -> None:
    bad = (~similarity.isfinite()).any(1).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        raise ValueError(
            f"similarity of row {row} must be finite, got {similarity[row].tolist()}: likely a hidden state of length 0"
        )


def _candidate_extra(view: View, name: str, shape: tuple[int, int]) -> Tensor:
    value = view.extras.get(name)
    if value is None:
        raise ValueError(f"contrastive needs {name!r} in the view's extras, which hold {sorted(view.extras)}")
    good = value.dtype == torch.int64 if name == "candidate_ids" else value.is_floating_point()
    if value.shape != shape or not good:
        wanted = "int64" if name == "candidate_ids" else "floating"
        raise LayoutMismatchError(
            f"contrastive: extras[{name!r}] must be {wanted} {list(shape)}, got {value.dtype} {list(value.shape)}"
        )
    return value
