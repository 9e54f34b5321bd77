"""`Policy`: what turns a step's scores into tokens, as an ordered, named list of transforms and a selector.

The order is part of the meaning: a temperature changes what top-p keeps, a penalty after a filter cannot bring back
what the filter removed. A policy says it, checks it, saves it, and runs it to the same tokens on every rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.arguments import check_logits
from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode import policy_file
from vocab_parallel.decode.running import Fallback
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.stepping import Plan, Step, Wanted, bad_rows, step_checksum, take_step
from vocab_parallel.decode.transforms.transform import LOG_SPACE, RAW, Transform, View, check_view
from vocab_parallel.errors import LayoutMismatchError, TokenRangeError
from vocab_parallel.headers import signature
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.logprobs import check_count
from vocab_parallel.select.scores import describe
from vocab_parallel.select.streams import Streams, check_streams
from vocab_parallel.shard import VocabShard

_ANY_VOCAB = 2**31  # ids have 32 bits in an exchange


class Edge(NamedTuple):
    """A transform of a policy, and the types of the scores that it gets and gives."""

    name: str
    takes: str
    gives: str


@dataclass(frozen=True, eq=False)
class Policy:
    """An ordered list of transforms, and how a token is chosen from what they leave.

    Args:
        transforms: In the order in which they are applied.
        selector: "sample" draws from the final distribution, one number of the request's stream a step; "greedy" takes
            the best token by the total order and draws nothing.
        fallback: For a row that no token is left in: "error"; `{"token": id}`, if all hard transforms allow that one;
            or `{"undo": True}`, the scores before the transform that emptied the row, unless that is a hard one.
        vocab_size: Where given, ids are checked now, not at the first step, and only once.
        name: For errors and files.
        special_ids: Names of ids whose removal a trace records, such as `{"eos": 2}`.

    Raises:
        ValueError: An order that cannot be (naming both transforms), or a parameter out of range.
        TokenRangeError: An id outside the vocabulary.
    """

    transforms: tuple[Transform, ...] = ()
    selector: str = "sample"
    fallback: str | Mapping[str, Any] = "error"
    vocab_size: int | None = None
    name: str = "policy"
    special_ids: Mapping[str, int] = field(default_factory=dict)
    digest: str = field(init=False, default="")
    _answer: Fallback = field(init=False, repr=False, default=Fallback())

    def __post_init__(self) -> None:
        object.__setattr__(self, "transforms", tuple(self.transforms))
        object.__setattr__(self, "special_ids", dict(self.special_ids))
        if self.selector not in ("sample", "greedy"):
            raise ValueError(f"selector must be 'sample' or 'greedy', got {self.selector!r}")
        for one in self.transforms:
            if not isinstance(one, Transform):
                raise ValueError(f"transforms must be Transforms, got {one!r}")
        object.__setattr__(self, "_answer", policy_file.fallback(self.fallback))
        self.edges()
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size < 1):
            raise ValueError(f"vocab_size must be None or an integer of at least 1, got {self.vocab_size!r}")
        self._check(self.vocab_size, None)
        whole = self.to_dict()
        text = json.dumps({key: whole[key] for key in ("selector", "fallback", "transforms")}, sort_keys=True)
        object.__setattr__(self, "digest", hashlib.blake2b(text.encode(), digest_size=8).hexdigest())

    @uncompiled
    def step(
        self,
        logits: Tensor,  # [T, shard_size] floating, this rank's
        view: View,  # of T requests
        state: PolicyState,  # of T requests
        *,
        shard: VocabShard,
        active: Tensor | None = None,  # bool [T]
        trace: bool = False,
        removed_ids: bool = False,
        top_logprobs: int = 0,
        logprobs: str = "processed",
    ) -> Step:
        """Chooses the next token of each active request.

        Args:
            logits: This rank's columns; padding columns are never read and never chosen.
            view: The requests' ids so far.
            state: From `start`, or of the last step.
            active: Requests that go on; None is all. The others' logits are not looked at, they draw nothing, and
                their state stays.
            trace: Also return what happened.
            removed_ids: With `trace`: also which of `special_ids` each transform removed.
            top_logprobs: Also return this many best tokens with log-probabilities.
            logprobs: Of which distribution log-probabilities are: the "processed" one that the token is chosen from,
                or the "raw" one of the logits.

        Returns:
            `Step`; nothing that was passed in is changed.

        Collectives:
            All-gathers of bytes a row and rank (for float32; none at tp_size 1): those of the transforms, and 8 (best),
            8 (masses), 8 (sample: token); raw log-probabilities 24; top n `8 n`; a trace: see `trace.record`; a
            fallback: see `running.run`. One header of 64 bytes rides with the first.

        Raises:
            EmptySupportError: A row without a token, naming row, step and transform.
            NonFiniteError, LayoutMismatchError, ValueError: NaN or +inf; wrong shapes; another number of requests in
                state or view; ranks with another policy, state or prefix. All on every rank.
        """
        marked = sorted(self.special_ids.items()) if trace and removed_ids else []
        words = self._words(logits, view, trace, marked, top_logprobs, logprobs)
        channel = Channel(shard, words, kind="candidates")
        with channel.guard():  # a transform, too, may refuse this step's data before anything was exchanged
            rows = self._admit(logits, view, state, shard, active)
            if top_logprobs:
                check_count(top_logprobs, shard.vocab_size)
            if logprobs not in ("raw", "processed"):
                raise ValueError(f"logprobs must be 'raw' or 'processed', got {logprobs!r}")
            origin = signature(str(state.origin.tolist()))  # whose parameters apply decides what is exchanged
            channel.call = f"{words} with {len(rows)} of {len(logits)} requests active, {origin:x}"
            channel.checksum = step_checksum(view, state, rows).to(logits.device)
            channel.found = bad_rows(logits, rows, shard)
            plan = Plan(self.name, self.transforms, self.selector, self._answer, self.special_ids)
            wanted = Wanted(trace, removed_ids, top_logprobs, logprobs)
            return take_step(plan, logits, view, state, rows, shard=shard, channel=channel, wanted=wanted)

    def start(self, rows: int, streams: Streams | None = None) -> PolicyState:
        """The state of new requests.

        Args:
            rows: T; parameters with one value for each request must have T.
            streams: Their random numbers, one stream a row. A greedy policy needs none.

        Raises:
            ValueError: Parameters or streams of another number of rows; a sampling policy without streams.
        """
        if streams is None and self.selector == "sample":
            raise ValueError("a policy that samples needs streams: policy.start(rows, Streams.of(seeds))")
        streams = Streams.of([0] * rows, list(range(rows))) if streams is None else streams
        check_streams(streams, rows)
        self._check(self.vocab_size, rows)
        states = tuple(transform.start(rows) for transform in self.transforms)
        return PolicyState(streams, states, torch.arange(rows), self.digest)

    def edges(self) -> list[Edge]:
        """Each transform with the type of the scores it gets and gives: raw, processed, logprob or probability."""
        kind, before, edges = RAW, "the logits", []
        for transform in self.transforms:
            if kind not in transform.accepts:
                raise ValueError(
                    f"policy {self.name!r}: {transform.name!r} cannot follow {before}, which gives {kind} scores: it "
                    f"takes {', '.join(sorted(transform.accepts))}."
                )
            gives = transform.gives or ("processed" if kind == RAW else kind)
            edges.append(Edge(transform.name, kind, gives))
            kind, before = gives, repr(transform.name)
        if kind not in LOG_SPACE:
            raise ValueError(
                f"policy {self.name!r}: the selector {self.selector!r} cannot follow {before}, which gives {kind} "
                f"scores: it takes {', '.join(sorted(LOG_SPACE))}."
            )
        return edges

    def to_dict(self) -> dict[str, Any]:
        """What JSON and YAML hold; `from_dict` gives the same policy back."""
        return {
            "version": policy_file.VERSION,
            "name": self.name,
            "selector": self.selector,
            "fallback": self.fallback if isinstance(self.fallback, str) else dict(self.fallback),
            "vocab_size": self.vocab_size,
            "special_ids": dict(self.special_ids),
            "transforms": [transform.to_dict() for transform in self.transforms],
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, more: Sequence[type[Transform]] = ()) -> Policy:
        """The policy of a `to_dict`, or of a file written by hand: only `transforms` is needed.

        Args:
            more: Transform classes beside those of this package.

        Raises:
            ConfigError: An unknown transform or field, named with the nearest known one; another version.
        """
        return cls(**policy_file.parse(data, more))

    def for_vocabulary(self, vocab_size: int) -> Policy:
        """This policy with its ids checked against a vocabulary, once and for all steps."""
        return dataclasses.replace(self, vocab_size=vocab_size)

    def _check(self, vocab_size: int | None, rows: int | None) -> None:
        for transform in self.transforms:
            try:
                transform.check(vocab_size or _ANY_VOCAB, rows)
            except LayoutMismatchError:  # of a table: its length cannot be judged yet
                if vocab_size is not None:
                    raise
        vocab_size = vocab_size or _ANY_VOCAB
        ids: list[tuple[str, object]] = list(self.special_ids.items())
        if self._answer.kind == "token":
            ids.append(("fallback", self._answer.token_id))
        for name, token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise TokenRangeError(f"{name}'s token id must be an integer in [0, {vocab_size}), got {token_id!r}")

    def _words(self, logits: object, view: object, *options: object) -> str:
        """The call in words, the same on every rank."""
        data: dict[str, object] = {}
        if isinstance(view, View):
            data = {"prefix": view.prefix, **{name: view.extras[name] for name in sorted(view.extras)}}
        shapes = "".join(f", {name} {describe(value)}" for name, value in data.items())
        return f"policy.step({describe(logits)}{shapes}, policy {self.name!r} {self.digest}, {options})"

    def _admit(self, logits: Tensor, view: object, state: object, shard: VocabShard, active: object) -> Tensor:
        """The active rows, int64; or the error of arguments that do not fit each other."""
        check_logits(logits, shard)
        if logits.dim() != 2:
            raise LayoutMismatchError(f"a policy takes logits [T, {shard.shard_size}], got {list(logits.shape)}")
        rows = len(logits)
        if not isinstance(view, View) or not isinstance(state, PolicyState):
            raise ValueError(f"step takes a View and a PolicyState, got {type(view).__name__}, {type(state).__name__}")
        check_view(view)
        for what, count in (("state", len(state)), ("view", len(view.prefix))):
            if count != rows:
                raise ValueError(
                    f"the {what} is of {count} requests, the logits of {rows} rows: after requests have left the "
                    f"batch, take the others' with {what}.rows(index)."
                )
        if state.digest != self.digest:
            raise ValueError(f"the state is of policy {state.digest}, this one is {self.digest} ({self.name!r})")
        if self.vocab_size not in (None, shard.vocab_size):
            raise LayoutMismatchError(
                f"policy {self.name!r} is for a vocabulary of {self.vocab_size}, the shard's is {shard.vocab_size}"
            )
        check_streams(state.streams, rows)
        if self.vocab_size is None:
            self._check(shard.vocab_size, None)
        if view.prefix.numel() and int(view.prefix.amax()) >= shard.vocab_size:
            raise TokenRangeError(
                f"the view's prefix holds id {int(view.prefix.amax())}, outside [0, {shard.vocab_size})"
            )
        if active is None:
            return torch.arange(rows, device=logits.device)
        if not isinstance(active, Tensor) or active.dtype != torch.bool or active.shape != (rows,):
            raise ValueError(f"active must be a bool tensor [{rows}], got {active!r}")
        return active.to(logits.device).nonzero()[:, 0]
