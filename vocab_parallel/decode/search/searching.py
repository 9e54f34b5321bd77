"""What the searches have in common: the model that they ask, and transforms whose state follows the beams."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vocab_parallel.agreement import checksum
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.search.reordering import reorder
from vocab_parallel.decode.transforms.transform import LOGPROB, Choice, Transform, View
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError, TokenRangeError
from vocab_parallel.select.scores import Scores, describe, open_scores, with_largest
from vocab_parallel.shard import VocabShard, device_of


class Stepped(NamedTuple):
    """What a model gives for one step of R beams.

    Attributes:
        logits: `[R, shard_size]`, this rank's columns of the position after each prefix.
        state: The model's own state for the next step, such as a cache: anything that `reorder` takes.
        attention: `[R, S]` of this step to the source, the same on every rank. For coverage only.
        extras: What transforms read from `View.extras`, a row a beam.
    """

    logits: Tensor
    state: Any = None
    attention: Tensor | None = None
    extras: Mapping[str, Tensor] | None = None


class Model(Protocol):
    """A model as a search calls it."""

    def __call__(self, prefix: Tensor, parents: Tensor, state: Any, /) -> Stepped:
        """The logits after each prefix.

        Args:
            prefix: int64 `[R, L]`, prompt and generated ids; -1 where a prompt has none, which in prompts given as
                lists is behind the short ones: there the last id is not in the last column. At the first step R is the
                number of requests, then there are all beams, a request's side by side. Beams that are no longer live
                hold real ids too; what is given for them must not be NaN, and is not used.
            parents: int64 `[R]`, the row of the last step that each row continues.
            state: What the last step returned, already reordered by `parents`; at first the caller's.
        """
        ...


@dataclass(frozen=True)
class Chain:
    """Transforms in their order, and the state of each for the rows at hand.

    Attributes:
        words: The transforms as the ranks compare them: names, and a digest of all parameters.
    """

    transforms: tuple[Transform, ...]
    states: tuple[dict[str, Tensor], ...]
    words: str

    @classmethod
    def start(cls, transforms: Sequence[Transform], rows: int, vocab_size: int, renormalize: bool) -> Chain:
        """The state of new requests; ValueError for what a transform refuses, and for scores no search can add up."""
        policy = Policy(tuple(transforms), selector="greedy", name="search")
        for one in policy.transforms:
            one.check(vocab_size, rows)
        if not renormalize and all(edge.gives != LOGPROB for edge in policy.edges()):
            raise ValueError(
                "without renormalize, the transforms' scores are added up as they stand: one of them must make "
                "log-probabilities (normalize)."
            )
        words = f"transforms {[one.name for one in policy.transforms]} {policy.digest}"
        return cls(policy.transforms, tuple(one.start(rows) for one in policy.transforms), words)

    def apply(self, scores: Scores, view: View) -> Scores:
        """The scores after all transforms. A row that one of them empties, a dead end, stays empty.

        Collectives:
            Those of the transforms. If one cannot do with an empty row, or errors are read late, they run with such
            rows stood in for: 8 bytes a row more for each that does not know the largest value.
        """
        if not self.transforms:
            return scores
        if not scores.channel.group.defers(scores.values.device):
            try:
                return self._plain(scores, view)
            except NonFiniteError:
                if not scores.channel.agreed:
                    raise  # else all ranks are here: their rows are empty alike
        return self._past_dead_ends(scores, view)

    def _plain(self, scores: Scores, view: View) -> Scores:
        for one, state in zip(self.transforms, self.states, strict=True):
            scores = one.apply(scores, view, state)
        return scores

    def _past_dead_ends(self, scores: Scores, view: View) -> Scores:
        """As `_plain`; what follows a transform sees its empty rows as uniform ones."""
        scores, dead = _stood_in(scores)
        for one, state in zip(self.transforms, self.states, strict=True):
            scores, gone = _stood_in(one.apply(scores, view, state))
            dead = dead | gone
        return scores.keep(~dead[:, None].expand_as(scores.values), keeps_peak=False)

    def follow(self, index: Tensor, choice: Choice) -> Chain:
        """For rows that continue the old rows `index` by the chosen ids."""
        listed = index.tolist() if any(one.row_count() is not None for one in self.transforms) else []
        transforms = tuple(one if one.row_count() is None else one.for_rows(listed) for one in self.transforms)
        states = (reorder(state, index) for state in self.states)
        after = tuple(one.after(state, choice) for one, state in zip(transforms, states, strict=True))
        return Chain(transforms, after, self.words)


def _stood_in(scores: Scores) -> tuple[Scores, Tensor]:
    """The scores with 0 for every id of an empty row, and which rows these are, bool `[T]`."""
    scores = with_largest(scores)
    assert scores.largest is not None
    empty = scores.largest == -torch.inf
    values = torch.where(empty[:, None] & (scores.token_ids < scores.vocab_size), 0.0, scores.values)
    return scores.with_values(values, torch.where(empty, 0.0, scores.largest)), empty


def ask(
    model: Model,
    view: View,
    parents: Tensor,
    state: Any,
    chain: Chain,
    shard: VocabShard,
    sums: Tensor,
    name: str,
    *,
    attends: bool = False,
) -> tuple[Scores, Stepped]:
    """The scores after the transforms, of all rows of `view`, and what else the model gave.

    Args:
        sums: float64, the live beams' scores: with prefixes and attention what the ranks must have in common.
        attends: The attention is needed.
    """
    stepped = model(view.prefix, parents, state)
    replicated = [view.prefix, _bits(sums)]
    if attends and isinstance(stepped.attention, Tensor):
        replicated.append(_bits(stepped.attention))
    same = checksum(torch.cat([one.flatten().to(view.prefix.device) for one in replicated]))
    scores = open_scores(
        stepped.logits, shard, f"{name}(logits {describe(stepped.logits)})", kind="candidates", checksum=same
    )
    with scores.channel.guard():
        _check_stepped(stepped, view.prefix, shard, attends)
        return chain.apply(scores, replace(view, extras=dict(stepped.extras or {}))), stepped


def _bits(values: Tensor) -> Tensor:
    return values.detach().double().contiguous().view(torch.int64)


def _check_stepped(stepped: Stepped, prefix: Tensor, shard: VocabShard, attends: bool) -> None:
    rows, logits, attention = len(prefix), stepped.logits, stepped.attention
    if logits.shape != (rows, shard.shard_size) or logits.device != prefix.device:
        raise LayoutMismatchError(
            f"the model gave logits {list(logits.shape)} on {logits.device} for {rows} beams: expected [{rows}, "
            f"{shard.shard_size}], of the last position of each, on {prefix.device}, where the prompts are."
        )
    if not attends:
        return
    if attention is None:
        raise ValueError("coverage needs the attention of each step: Stepped(logits, state, attention)")
    finite = bool(attention.isfinite().all())
    if attention.dim() != 2 or len(attention) != rows or not finite:
        got = f"{describe(attention)}{'' if finite else ' with NaN or inf'}"
        raise ValueError(f"the attention must be finite [{rows}, S], a row a beam, got {got}")


def check_prompts(prompts: Tensor | Sequence[Sequence[int]], shard: VocabShard) -> View:
    """The view of prompts, lists on the group's device; raises for no prompts, and for ids that are not real."""
    listed: Sequence[Sequence[object]] = () if isinstance(prompts, Tensor) else prompts
    for row in listed:
        for one in row:
            if not isinstance(one, numbers.Integral):  # a tensor would cut it off
                raise ValueError(f"prompts hold integer ids, got {one!r}")
    view, vocab_size = View.of(prompts), shard.vocab_size
    if view.prefix.dim() != 2 or view.prefix.dtype != torch.int64 or len(view.prefix) == 0:
        raise ValueError(f"prompts must be int64 [B, L] with B of at least 1, got {describe(view.prefix)}")
    bad = ((view.prefix < -1) | (view.prefix >= vocab_size)).nonzero()
    if len(bad):
        row, at = bad[0].tolist()
        raise TokenRangeError(
            f"prompt {row} holds id {int(view.prefix[row, at])} at position {at}, outside [0, {vocab_size}); -1 marks "
            "a place without one."
        )
    return view if isinstance(prompts, Tensor) else view.to(device_of(shard))


def check_ends(eos_ids: Sequence[int], vocab_size: int) -> None:
    """Raises for an end id that is not real."""
    listed: Sequence[object] = eos_ids
    for one in listed:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab_size:
            raise TokenRangeError(f"eos_ids holds {one!r}, outside [0, {vocab_size})")


def at_least_one(**values: object) -> None:
    """Raises for the first named value that is not an integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def checksum_of(prompts: object, source: Tensor | None = None) -> Tensor | int:
    """Of what every rank is given, for comparing ranks; 0 where the checks will say what is wrong with it."""
    try:
        prefix = View.of(prompts).prefix  # type: ignore[arg-type]
        more = prefix.new_zeros(0) if source is None else source.flatten().to(prefix)
        return checksum(torch.cat([prefix.flatten(), more]))
    except Exception:
        return 0
