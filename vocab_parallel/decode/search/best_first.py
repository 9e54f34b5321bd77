"""Best-first search: the most promising prefix of any length is continued next, and the result says if it is proven."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode.search.beam import expand
from vocab_parallel.decode.search.hypotheses import LengthPenalty
from vocab_parallel.decode.search.reordering import reorder
from vocab_parallel.decode.search.searching import (
    Chain,
    Model,
    ask,
    at_least_one,
    check_ends,
    check_prompts,
    checksum_of,
)
from vocab_parallel.decode.transforms.transform import Choice, Transform, View
from vocab_parallel.select.channel import Channel
from vocab_parallel.shard import VocabShard, device_of

Heuristic = Callable[[tuple[int, ...], float], float]

_SLACK = 1e-6  # nats: a heuristic may be exact, up to rounding


class Hypothesis(NamedTuple):
    """A finished sequence: its generated tokens, end included; its sum of log-probabilities, and its score, in nats."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    ended: bool  # by an end token, not by the length


class BestFirstResult(NamedTuple):
    """What a best-first search found; the same on every rank.

    Attributes:
        hypotheses: Best first, at most `num_return`.
        proven: Whether no sequence outside of `hypotheses` has a better score than any inside.
        expansions: How often the model was asked.
        dropped: The best score that anything left out by the bounds of queue and `branching` could have reached, in
            nats; -inf if nothing was left out.
        assumed: Whether `proven` rests on the caller's word that the heuristic is admissible: the sums alone do not
            prove it.
    """

    hypotheses: list[Hypothesis]
    proven: bool
    expansions: int
    dropped: float
    assumed: bool


@uncompiled
def best_first_search(
    model: Model,
    prompt: Tensor | Sequence[int],  # int64 [L]
    *,
    shard: VocabShard,
    queue_size: int,
    branching: int,
    max_new_tokens: int,
    max_expansions: int,
    eos_ids: Sequence[int] = (),
    length_penalty: LengthPenalty | float = 0.0,
    heuristic: Heuristic | None = None,
    admissible: bool = False,
    normalize_priority: bool = False,
    transforms: Sequence[Transform] = (),
    renormalize: bool = True,
    state: Any = None,
    num_return: int = 1,
) -> BestFirstResult:
    """The best sequences, from a queue of prefixes of all lengths.

    The prefix of the highest priority `g + h` is taken from the queue, the model is asked, and its best `branching`
    continuations go back; those that end are finished. Of equal priorities the earlier entry is taken. A full queue
    drops its last. The search stops when `num_return` are finished and nothing that is left can pass the worst of them,
    when the queue is empty, or after `max_expansions`.

    When it is optimal: log-probabilities are at most 0, so no continuation of a prefix has a better score than its sum
    over the most favourable length penalty. `proven` is True if the finished ones reach that bound of every prefix that
    is left and of everything dropped. It does not depend on the heuristic, unless the caller says that this is
    `admissible`: then `g + h` bounds the sum too, and less needs to be expanded. Transforms that leave scores above 0
    take away the bound, and the proof. An order alone proves nothing: A* needs both an admissible h and room for all.

    Args:
        model: As in `beam_search`, called with one row; its state is kept with each prefix, so it must not change in
            place: a cache that does needs its step to copy it.
        prompt: The same on every rank.
        queue_size: Prefixes kept.
        branching: Continuations of a prefix that are kept.
        heuristic: h of the generated tokens and their sum: what the rest may add, in nats. The same on every rank.
        admissible: h is never below the log-probability of the best rest. A finished sequence that shows the contrary
            is an error; what the search has left out on this word it cannot check, and says so (`assumed`).
        normalize_priority: Order by `(g + h) / length penalty` of the prefix.
        transforms, renormalize, state, eos_ids, length_penalty: As in `beam_search`.

    Collectives:
        One all-gather of a header; per expansion that of `beam_step` for one row, and those of the transforms.

    Raises:
        ValueError, TokenRangeError, NonFiniteError: On every rank, as in `beam_search`; and an `admissible` heuristic
            that is not. A prefix without a legal token ends there; if nothing is left, there are fewer hypotheses.

    Source: Meister, Cotterell and Vieira, Best-first beam search (2020); Hart, Nilsson and Raphael (1968) for h.
    """
    words = (
        f"best_first_search(queue {queue_size}, {branching}, {max_new_tokens} tokens, {max_expansions}, eos {eos_ids}, "
        f"{length_penalty}, {admissible}, {normalize_priority}, {renormalize}, {num_return})"
    )
    prompts: Tensor | list[Sequence[int]] = prompt[None] if isinstance(prompt, Tensor) else [prompt]
    channel = Channel(shard, words, kind="header", checksum=checksum_of(prompts))
    with channel.guard():
        at_least_one(
            queue_size=queue_size, branching=branching, max_new_tokens=max_new_tokens, max_expansions=max_expansions,
            num_return=num_return,
        )  # fmt: skip
        check_ends(eos_ids, shard.vocab_size)
        penalty = length_penalty if isinstance(length_penalty, LengthPenalty) else LengthPenalty(length_penalty)
        penalty.check(max_new_tokens)
        view, chain = check_prompts(prompts, shard), Chain.start(transforms, 1, shard.vocab_size, renormalize)
        channel.call += f" with {chain.words}"
    channel.open(device_of(shard))
    queue = _Queue(queue_size, num_return, max_new_tokens, penalty, heuristic, admissible, normalize_priority)
    queue.push(_Prefix((), 0.0, view, chain, state))
    expansions = 0
    while queue.items and expansions < max_expansions and not queue.proven:
        expansions += 1
        for child in _continuations(queue, model, shard, branching, renormalize):
            if child.token_ids[-1] in eos_ids or len(child.token_ids) == max_new_tokens:
                queue.finish(child, child.token_ids[-1] in eos_ids)
            else:
                queue.push(child)
    shard.raise_deferred()  # NaN ends a prefix like a dead end does
    return BestFirstResult(queue.finished, queue.proven, expansions, queue.dropped, queue.assumed)


@dataclass
class _Prefix:
    """What can be continued: generated tokens, their sum, and all state after them.

    `limit`: the least that an admissible heuristic has said of it, the prefixes that it continues included.
    """

    token_ids: tuple[int, ...]
    total: float
    view: View
    chain: Chain
    state: Any
    limit: float = math.inf


@dataclass
class _Queue:
    """Prefixes by priority, the finished ones, and the best score that may have been lost."""

    size: int
    count: int
    max_length: int
    penalty: LengthPenalty
    heuristic: Heuristic | None
    admissible: bool
    normalize: bool
    items: list[tuple[float, int, float, _Prefix]] = field(default_factory=list)  # ascending -priority, order; bound
    finished: list[Hypothesis] = field(default_factory=list)
    dropped: float = -math.inf
    dropped_by_sum: float = -math.inf  # the same without the heuristic
    _pushed: int = 0

    def push(self, prefix: _Prefix) -> None:
        rest = 0.0 if self.heuristic is None else self.heuristic(prefix.token_ids, prefix.total)
        if math.isnan(rest):
            raise ValueError(f"the heuristic of {list(prefix.token_ids)} is NaN")
        priority, length = prefix.total + rest, max(1, len(prefix.token_ids))
        priority = priority / self.penalty.of(length) if self.normalize else priority
        bound = self.bound(prefix.total + min(rest, 0.0) if self.admissible else prefix.total, len(prefix.token_ids))
        if self.admissible:
            prefix.limit = min(prefix.limit, prefix.total + rest)
        self._pushed += 1
        bisect.insort(self.items, (-priority, self._pushed, bound, prefix), key=lambda item: item[:2])
        if len(self.items) > self.size:
            _, _, lost, last = self.items.pop()
            self.drop(lost, self.bound(last.total, len(last.token_ids)))

    def drop(self, bound: float, by_sum: float) -> None:
        """Remembers the best score of what is not kept: by the heuristic if it is admissible, and by the sum alone."""
        self.dropped, self.dropped_by_sum = max(self.dropped, bound), max(self.dropped_by_sum, by_sum)

    def bound(self, total: float, length: int) -> float:
        """The best score of any sequence that continues a prefix of this sum."""
        return total / self.penalty.of(self.penalty.bound_length(length + 1, self.max_length))

    def finish(self, prefix: _Prefix, ended: bool) -> None:
        if prefix.total > prefix.limit + _SLACK:
            raise ValueError(
                f"the heuristic is not admissible: {list(prefix.token_ids)} has a log-probability of "
                f"{prefix.total:.6g}, but on the way there sum and heuristic were {prefix.limit:.6g}, so what it has "
                "ruled out may be the best. Raise it, or leave out admissible: then it changes the order alone."
            )
        score = prefix.total / self.penalty.of(len(prefix.token_ids))
        self.finished.append(Hypothesis(prefix.token_ids, prefix.total, score, ended))
        self.finished.sort(key=lambda one: -one.score)  # stable: of equal scores the earlier
        del self.finished[self.count :]

    @property
    def proven(self) -> bool:
        """Whether nothing left or dropped can pass the worst of the finished ones that are asked for."""
        return self._proves([item[2] for item in self.items], self.dropped)

    @property
    def assumed(self) -> bool:
        """Whether the proof needs the heuristic."""
        by_sum = [self.bound(one.total, len(one.token_ids)) for *_, one in self.items]
        return self.proven and not self._proves(by_sum, self.dropped_by_sum)

    def _proves(self, left: list[float], dropped: float) -> bool:
        best = max([*left, dropped])
        if len(self.finished) < self.count:
            return best == -math.inf
        return self.finished[-1].score >= best


def _continuations(queue: _Queue, model: Model, shard: VocabShard, branching: int, renormalize: bool) -> list[_Prefix]:
    """Takes the first prefix from the queue and continues it."""
    _, _, _, one = queue.items.pop(0)
    first = torch.zeros(1, dtype=torch.int64, device=one.view.prefix.device)
    sums = torch.tensor([one.total], dtype=torch.float64, device=first.device)
    scores, stepped = ask(model, one.view, first, one.state, one.chain, shard, sums, "best_first_search step")
    found = expand(scores, branching + 1, normalized=not renormalize)
    logprobs, ids = (x[0].tolist() for x in found)
    if logprobs[branching] > -math.inf:  # the first that is left out, which bounds the others
        lost = queue.bound(one.total + logprobs[branching], len(one.token_ids))
        queue.drop(lost, lost)
    if not renormalize and logprobs[0] > 0:
        queue.drop(math.inf, math.inf)
    children = []
    for logprob, token in zip(logprobs[:branching], ids[:branching], strict=True):
        if logprob > -math.inf:
            chosen = first + token
            choice = Choice(chosen, torch.full_like(sums, logprob), first == 0)
            chain, state = one.chain.follow(first, choice), reorder(stepped.state, first)
            ids_so_far, total = (*one.token_ids, token), one.total + logprob
            children.append(_Prefix(ids_so_far, total, one.view.appended(chosen), chain, state, one.limit))
    return children
