"""One step of a beam search over sharded logits: the best continuations of all beams together, in one exchange."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.agreement import checksum, first_row
from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode.search.normalizer import WORDS, class_sums, merge_sums
from vocab_parallel.errors import EmptySupportError, LayoutMismatchError, NonFiniteError
from vocab_parallel.select.order import best_columns, merge
from vocab_parallel.select.scores import Scores, describe, open_scores
from vocab_parallel.shard import VocabShard


class BeamStep(NamedTuple):
    """The best continuations of the beams of each request, best first; the same bits on every rank.

    Attributes:
        scores: float64 `[B, n]`, in nats: the parent's score plus log p of the token; -inf where there are fewer.
        parents: int64 `[B, n]`, in `[0, K)`: which beam is continued; 0 where there are fewer.
        token_ids: int64 `[B, n]`: by which token; -1 where there are fewer.
        logprobs: float64 `[B, n]`, in nats: log p of the token alone; -inf where there are fewer.
    """

    scores: Tensor
    parents: Tensor
    token_ids: Tensor
    logprobs: Tensor


class Expansion(NamedTuple):
    """The best continuations of each row by itself, best first; the same bits on every rank.

    Attributes:
        logprobs: float64 `[T, c]`, in nats; -inf where the row has fewer.
        token_ids: int64 `[T, c]`; -1 where the row has fewer.
    """

    logprobs: Tensor
    token_ids: Tensor


@uncompiled
def beam_step(
    logits: Tensor,  # [B, K, shard_size] floating, this rank's
    beam_scores: Tensor,  # [B, K] float64 or float32, the same on every rank
    *,
    shard: VocabShard,
    candidates: int | None = None,
) -> BeamStep:
    """The best `candidates` of the K·V continuations of each request.

    A candidate's score is `beam_scores + log softmax(logits)`. The order is: score descending, parent ascending, and of
    one parent's: logit descending, token id ascending. (Scores round, so different logits may give one score.)

    Args:
        logits: This rank's columns; padding columns are never read.
        beam_scores: Sums of log-probabilities in nats. -inf: the beam is not active. At the first step, where all beams
            hold the same prefix, only one may be active (or K is 1): a second one with score 0 is refused.
        candidates: n, by default 2 K: then K are left if each beam ends.

    Returns:
        `BeamStep` of `[B, n]`.

    Collectives:
        One all-gather of `104 + 8 n` bytes a row of `[B, K]` (`104 + 16 n` for float64). None at tp_size 1.

    Raises:
        LayoutMismatchError, ValueError, NonFiniteError, EmptySupportError: On every rank: shapes that disagree;
            candidates < 1, or a beam score that is NaN or +inf, or two of a request that are 0; a logit that is NaN or
            +inf; an active request without any token.

    Source: the class sums of `normalizer`; the joint step as in Sutskever et al. (2014), section 3.2.
    """
    words = f"beam_step(logits {describe(logits)}, beam_scores {describe(beam_scores)}, candidates={candidates})"
    scores = open_scores(logits, shard, words, kind="candidates", checksum=_bits_of(beam_scores))
    with scores.channel.guard():
        if _shape(logits)[:-1] != _shape(beam_scores) or logits.dim() != 3:
            raise LayoutMismatchError(
                f"logits {describe(logits)} and beam_scores {describe(beam_scores)} disagree: expected "
                "[B, K, shard_size] and [B, K]. Flat rows [B * K, shard_size] need a view first."
            )
    return beam_step_scores(scores, beam_scores, candidates)


def beam_step_scores(
    scores: Scores,  # rows B * K, the beams of a request side by side
    beam_scores: Tensor,  # [B, K]
    candidates: int | None = None,
    *,
    normalized: bool = False,
) -> BeamStep:
    """`beam_step` of scores that transforms have been applied to.

    Args:
        normalized: The scores are log-probabilities as they stand, or what a search should add up in their place;
            otherwise they are normalised over their support.

    Collectives:
        As `beam_step`; none if every rank holds the columns already.
    """
    with scores.channel.guard():
        _check(scores, beam_scores, candidates)
    n = 2 * beam_scores.shape[1] if candidates is None else candidates
    expansion = expand(scores, n, normalized=normalized)
    _require_sums(scores, beam_scores)
    step = join(expansion, beam_scores, n)
    require_candidates(scores, beam_scores.amax(1) > -torch.inf, step.scores[:, 0])
    return step


def expand(scores: Scores, count: int, *, normalized: bool = False) -> Expansion:
    """The best `count` continuations of each row, by score descending, then token id ascending.

    Args:
        normalized: As in `beam_step_scores`.

    Collectives:
        One all-gather of `104 + 8 count` bytes a row (`8 count` if normalized; 16 for 8 with float64), none if every
        rank holds the columns.

    Raises:
        NonFiniteError: On every rank, for the first row with NaN or +inf.
    """
    may_read = not scores.channel.group.defers(scores.values.device)
    best = best_columns(scores.values, scores.token_ids, count, may_read=may_read)  # [1 or 2, T, count]
    planes = len(best)
    parts = best.permute(1, 0, 2).flatten(1)
    if not normalized:
        parts = torch.cat([class_sums(scores.values, scores.vocab_size), parts], 1)
    gathered = scores.channel.gather(parts)
    found = gathered[:, :, -planes * count :].reshape(len(gathered), scores.rows, planes, count)
    values, ids = merge(found.transpose(1, 2), count)
    real = (ids >= 0) & (ids < scores.vocab_size)
    values = torch.where(real, values, -torch.inf)
    _require_finite(scores, values[:, 0])
    if normalized:
        logprobs = values.double()
    else:
        logprobs = merge_sums(gathered[:, :, :WORDS], scores.vocab_size).logprobs(values)
    there = values > -torch.inf
    return Expansion(torch.where(there, logprobs, -torch.inf), torch.where(there, ids, -1))


def join(
    expansion: Expansion,  # of B * K rows
    beam_scores: Tensor,  # [B, K]
    candidates: int,
    *,
    penalized: Tensor | None = None,  # int64 [B, m]
    penalty: float = 0.0,
) -> BeamStep:
    """The best `candidates` of all beams of a request, from each beam's own best.

    Args:
        expansion: At least `candidates` a row, and m more where tokens are penalised.
        penalized: Ids whose score is lowered by `penalty` for each time they are listed; below 0 is none.
        penalty: Nats, at least 0.

    Returns:
        `BeamStep` of `[B, candidates]`; its `logprobs` are without the penalty.
    """
    shape = (*beam_scores.shape, expansion.logprobs.shape[1])  # [B, K, c]
    logprobs, ids = expansion.logprobs.view(shape), expansion.token_ids.view(shape)
    joint = beam_scores.double()[:, :, None] + logprobs
    if penalized is not None:
        times = (ids[..., None] == penalized[:, None, None, :]).sum(3)
        joint = joint - penalty * torch.where(ids >= 0, times, 0).double()
    flat = joint.flatten(1)
    if flat.shape[1] < candidates:
        flat = torch.nn.functional.pad(flat, (0, candidates - flat.shape[1]), value=-torch.inf)
    scores, at = flat.sort(dim=1, descending=True, stable=True)  # of equal scores the smaller parent's stay first
    scores, at = scores[:, :candidates], at[:, :candidates]
    there = scores > -torch.inf
    at = torch.where(there, at, 0)
    parents, _ = split_flat(at, shape[2])
    return BeamStep(
        scores,
        parents,
        torch.where(there, ids.flatten(1).gather(1, at), -1),
        torch.where(there, logprobs.flatten(1).gather(1, at), -torch.inf),
    )


def split_flat(
    flat: Tensor,  # int64 [...]
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Parent and token of indices into the flattened `[K, V]`, by integers: a float's division rounds past 2**24."""
    return torch.div(flat, vocab_size, rounding_mode="floor"), flat.remainder(vocab_size)


def require_candidates(scores: Scores, active: Tensor, best: Tensor) -> None:
    """Raises on every rank for the first `active` request `[B]` whose `best` candidate `[B]` does not exist."""

    def describe_row(flags: list[int]) -> Exception:
        return EmptySupportError(
            f"request {flags[0]} has active beams, and none of them a legal token: masks or a truncation left all ids "
            "at -inf. Leave at least one legal, or let the beams end before."
        )

    if len(best):
        scores.channel.judge(first_row(active & (best == -torch.inf))[None], EmptySupportError, describe_row)


def _check(scores: Scores, beam_scores: Tensor, candidates: object) -> None:
    if candidates is not None and (isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 1):
        raise ValueError(f"candidates must be an integer of at least 1, got {candidates!r}")
    good = beam_scores.dim() == 2 and beam_scores.shape[1] > 0 and beam_scores.is_floating_point()
    if not good or beam_scores.numel() != scores.rows:
        raise LayoutMismatchError(
            f"beam_scores must be floating [B, K], K at least 1, for {scores.rows} rows of scores, got "
            f"{describe(beam_scores)}"
        )


def _shape(x: object) -> list[int]:
    return list(x.shape) if isinstance(x, Tensor) else []


def _bits_of(beam_scores: object) -> Tensor | int:
    """The checksum of what must be the same on every rank."""
    if not isinstance(beam_scores, Tensor) or not beam_scores.is_floating_point():
        return 0
    return checksum(beam_scores.detach().double().contiguous().view(-1).view(torch.int64))


def _require_sums(scores: Scores, beam_scores: Tensor) -> None:
    """Raises on every rank for the first of `beam_scores` `[B, K]` that is NaN or +inf, or a second 0 of its request.

    Of different prefixes one at most has a probability of 1: beams that all begin at 0 are copies of one prefix.
    """
    beams = beam_scores.shape[1]

    def describe_beam(flags: list[float]) -> Exception:
        row, beam = divmod(int(flags[0]), beams)
        if flags[1] == 0.0:
            return ValueError(
                f"beam_scores of request {row} are 0 for two beams, the second is beam {beam}: likely the first step, "
                "where all beams hold the prompt and each continuation would come once for each of them. Leave one "
                "active, the others at -inf, or pass one beam a request."
            )
        return ValueError(
            f"beam_scores of request {row}, beam {beam} is {flags[1]}: a sum of log-probabilities is finite, or -inf "
            "for a beam that is not active."
        )

    flat = beam_scores.detach().double().flatten()
    if len(flat):
        zero = beam_scores.detach() == 0.0
        again = zero & (zero.cumsum(1) > 1)
        at = first_row(flat.isnan() | (flat == torch.inf) | again.flatten())
        value = flat.index_select(0, at.clamp(min=0)[None])[0]
        scores.channel.judge(torch.stack([at.double(), value]), ValueError, describe_beam)


def _require_finite(scores: Scores, first: Tensor) -> None:
    """Raises on every rank for the first row whose best value `[T]` is NaN or +inf."""

    def describe_row(flags: list[int]) -> Exception:
        what = "NaN" if flags[1] else "+inf"
        return NonFiniteError(
            f"row {flags[0]} holds {what}: no distribution has it. Likely an overflow upstream, or a transform that "
            "took -inf from -inf."
        )

    if len(first):
        row = first_row(first.isnan() | (first == torch.inf))
        nan = first.index_select(0, row.clamp(min=0)[None])[0].isnan().to(torch.int64)
        scores.channel.judge(torch.stack([row, nan]), NonFiniteError, describe_row)
