"""What the searches have in common: the model that they ask, and transforms whose state follows the beams."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vocab_parallel.agreement import checksum
from vocab_parallel.decode.search.reordering import reorder
from vocab_parallel.decode.transforms.transform import LOGPROB, PROBABILITY, PROCESSED, RAW, Choice, Transform, View
from vocab_parallel.errors import LayoutMismatchError, TokenRangeError
from vocab_parallel.select.scores import Scores, describe, open_scores
from vocab_parallel.shard import VocabShard


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
            prefix: int64 `[R, L]`, prompt and generated ids; -1 where a prompt has none. At the first step R is the
                number of requests, then there are all beams, a request's side by side. Beams that are no longer live
                hold real ids too; what is given for them must not be NaN, and is not used.
            parents: int64 `[R]`, the row of the last step that each row continues.
            state: What the last step returned, already reordered by `parents`; at first the caller's.
        """
        ...


@dataclass(frozen=True)
class Chain:
    """Transforms in their order, and the state of each for the rows at hand."""

    transforms: tuple[Transform, ...] = ()
    states: tuple[dict[str, Tensor], ...] = field(default=())

    @classmethod
    def start(cls, transforms: Sequence[Transform], rows: int) -> Chain:
        """The state of new requests."""
        return cls(tuple(transforms), tuple(one.start(rows) for one in transforms))

    def check(self, vocab_size: int, rows: int, renormalize: bool) -> None:
        """Raises ValueError for what a transform refuses, and for scores that no search can add up."""
        kinds = [RAW]
        for one in self.transforms:
            if kinds[-1] not in one.accepts:
                raise ValueError(f"{one.name} works on {sorted(one.accepts)} scores, and {kinds[-1]} ones reach it")
            kinds.append(one.gives or (PROCESSED if kinds[-1] == RAW else kinds[-1]))
            one.check(vocab_size, rows)
        if kinds[-1] == PROBABILITY:
            raise ValueError("a search adds up log-probabilities, and the transforms leave probabilities")
        if not renormalize and LOGPROB not in kinds:
            raise ValueError(
                "without renormalize, the transforms' scores are added up as they stand: one of them must make "
                "log-probabilities (normalize)."
            )

    def apply(self, scores: Scores, view: View) -> Scores:
        """The scores after all transforms."""
        for one, state in zip(self.transforms, self.states, strict=True):
            scores = one.apply(scores, view, state)
        return scores

    def follow(self, index: Tensor, choice: Choice) -> Chain:
        """For rows that continue the old rows `index` by the chosen ids."""
        listed = index.tolist() if any(one.row_count() is not None for one in self.transforms) else []
        transforms = tuple(one if one.row_count() is None else one.for_rows(listed) for one in self.transforms)
        states = (reorder(state, index) for state in self.states)
        return Chain(transforms, tuple(t.after(state, choice) for t, state in zip(transforms, states, strict=True)))


def ask(
    model: Model, view: View, parents: Tensor, state: Any, chain: Chain, shard: VocabShard, sums: Tensor, name: str
) -> tuple[Scores, Stepped]:
    """The scores after the transforms, of all rows of `view`, and what else the model gave.

    Args:
        sums: float64, the live beams' scores: with the prefixes what the ranks must have in common.
    """
    stepped = model(view.prefix, parents, state)
    same = checksum(torch.cat([view.prefix.flatten(), sums.contiguous().flatten().view(torch.int64)]))
    scores = open_scores(
        stepped.logits, shard, f"{name}(logits {describe(stepped.logits)})", kind="candidates", checksum=same
    )
    with scores.channel.guard():
        rows = len(view.prefix)
        if stepped.logits.shape != (rows, shard.shard_size):
            raise LayoutMismatchError(
                f"the model gave logits {list(stepped.logits.shape)} for {rows} beams: expected [{rows}, "
                f"{shard.shard_size}], of the last position of each."
            )
        return chain.apply(scores, replace(view, extras=dict(stepped.extras or {}))), stepped


def check_prompts(prompts: Tensor | Sequence[Sequence[int]], vocab_size: int) -> View:
    """The view of prompts; raises for no prompts, and for ids that are not real."""
    view = View.of(prompts)
    if view.prefix.dim() != 2 or view.prefix.dtype != torch.int64 or len(view.prefix) == 0:
        raise ValueError(f"prompts must be int64 [B, L] with B of at least 1, got {describe(view.prefix)}")
    bad = ((view.prefix < -1) | (view.prefix >= vocab_size)).nonzero()
    if len(bad):
        row, at = bad[0].tolist()
        raise TokenRangeError(
            f"prompt {row} holds id {int(view.prefix[row, at])} at position {at}, outside [0, {vocab_size}); -1 marks "
            "a place without one."
        )
    return view


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


def checksum_of(prompts: object) -> Tensor | int:
    """Of the prompts, for comparing ranks; 0 where `check_prompts` will say what is wrong with them."""
    try:
        return checksum(View.of(prompts).prefix)  # type: ignore[arg-type]
    except Exception:
        return 0


def words_of(transforms: Sequence[object]) -> str:
    """Transforms in words that the ranks can compare: their names, and a hash of all their parameters."""
    listed = [one.to_dict() if isinstance(one, Transform) else {"name": repr(one)} for one in transforms]
    digest = hashlib.blake2b(repr(listed).encode(), digest_size=8).hexdigest()
    return f"transforms {[one['name'] for one in listed]} {digest}"
