"""Faults of the package, each as somebody might write it, and the rung of `verify` and the module that must tell it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from vocab_parallel import tying
from vocab_parallel.decode.search import frontier
from vocab_parallel.loss import gradients, linear, rows, targets
from vocab_parallel.loss.objective import CrossEntropy
from vocab_parallel.select import crossing, filters, held, keys, masses, nucleus, order, scores
from vocab_parallel.select.streams import Streams
from vocab_parallel.tie_loading import Tie
from vocab_parallel.vocabulary import VocabMap
from vocab_parallel.vocabulary.migration import models


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes that are something else for a while: owner, name, value."""
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def wrong_owner() -> AbstractContextManager[None]:
    """The first id of a later shard has no owner."""
    begin = targets.Targets.__init__

    def late(self, target, start, stop, ignore_index):
        begin(self, target, start + 1 if start else 0, stop, ignore_index)
        self.local = torch.where(self.owned, self.local + (1 if start else 0), 0)

    return replaced((targets.Targets, "__init__", late))


def everyone_subtracts() -> AbstractContextManager[None]:
    """Every rank subtracts the target in its own first row, where it is not the owner."""

    def unnormalised(self, maximum, normalizer, coefficients, targets):
        c = coefficients.scaled(1.0 / self._scores.temperature)
        weight = torch.where(maximum == -torch.inf, 0.0, (maximum - normalizer.maximum).exp() / normalizer.sumexp)
        return torch.where(c.active, c.probability * weight, 0.0), c.at_target(normalizer), c.uniform

    return replaced((gradients.RangeGradients, "unnormalised", unnormalised))


def local_smoothing() -> AbstractContextManager[None]:
    """The smoothed mass is spread over as many classes as this rank has."""
    prepare = linear.prepare

    def local(name, objective, input, weight, bias, target, shard, options, *more, **settings):
        classes = max(1, shard.num_valid)
        return prepare(
            name, lambda data: CrossEntropy(options, classes, *data), input, weight, bias, target, shard, options,
            *more, **settings,
        )  # fmt: skip

    return replaced((linear, "prepare", local))


def mean_of_means() -> AbstractContextManager[None]:
    """The mean of the chunks' means, as if each had as many valid rows."""
    loss = linear._loss

    def chunked(input, weight, bias, target, shard, options, row_weight, mean_group, *, chunk_size=None, **settings):
        arguments = (shard, options, row_weight, mean_group)
        if options.reduction != "mean" or chunk_size is None or settings.get("sequence_parallel"):
            return loss(input, weight, bias, target, *arguments, chunk_size=chunk_size, **settings)
        parts = zip(input.split(chunk_size), target.split(chunk_size), strict=True)
        means = [loss(h, weight, bias, t, *arguments, chunk_size=chunk_size, **settings) for h, t in parts]
        return torch.stack(means).mean()

    return replaced((linear, "_loss", chunked))


def copied_tie() -> AbstractContextManager[None]:
    """The head gets a copy of the embedding's values."""

    def copy(embedding, lm_head, *also, **options):
        lm_head.weight = nn.Parameter(embedding.weight.detach().clone())
        Tie(embedding).join(lm_head, "lm_head.weight")

    return replaced((tying, "tie_weights", copy))


def swapped_ids() -> AbstractContextManager[None]:
    """Two rows of a map are exchanged."""
    made = VocabMap.from_vocabs.__func__

    def swapped(cls, *arguments, **options):
        found = made(cls, *arguments, **options)
        old, new = found.pairs()
        new = torch.cat([new[:1], new[1:3].flip(0), new[3:]])
        return VocabMap.from_pairs(found.old_size, found.new_size, torch.stack([old, new], 1), allow_drop=True)

    return replaced((VocabMap, "from_vocabs", classmethod(swapped)))


def stale_moments() -> AbstractContextManager[None]:
    """A migration moves the rows, and leaves the optimizer's state where it was if it still fits."""
    swap = models._swap_states

    def left(optimizer, parts, fresh, moved):
        old = {f"{name}.{key}": state for (name, key), state in parts.states().items()}
        kept = {name: old[name] if name in old and old[name].shape == new.shape else new for name, new in moved.items()}
        swap(optimizer, parts, fresh, kept)

    return replaced((models, "_swap_states", left))


def no_reduction() -> AbstractContextManager[None]:
    """Each rank keeps its own part of dH."""

    def reduce(self, chunk, grad):
        if self._grad is None:
            self._grad = torch.empty_like(self._input, memory_format=torch.contiguous_format)
        self._grad[self.chunks[chunk]] = grad.to(self._grad.dtype)

    return replaced((rows.ReplicatedRows, "reduce", reduce))


def local_top_p() -> AbstractContextManager[None]:
    """Each rank sorts its own columns and keeps p of its own mass."""

    def local(given, p, *, masked=False):
        given = scores.with_largest(given)
        values, at = given.values.sort(dim=1, descending=True, stable=True)
        mass = values.double().softmax(1).nan_to_num()
        kept = torch.zeros_like(values, dtype=torch.bool).scatter(1, at, mass.cumsum(1) - mass < p[:, None])
        mask = kept & (given.values > -torch.inf)
        return crossing.Crossing(given, mask, masses=masses.measure(given))

    return replaced((filters, "crossing", local), (nucleus, "crossing", local))


# Modules that functions of the same name hide.
_BY_IDS = [f"vocab_parallel.select.{name}" for name in ("greedy", "top_k")]


def float_ids(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Candidates' ids travel as floats beside their values."""
    unpack = order.unpack

    def floating(keys):
        values, ids = unpack(keys)
        return values, ids.to(dtype).to(torch.int64)

    def listed(words):
        return torch.tensor(ids_of(words)).to(dtype).to(torch.int64).tolist()

    ids_of = keys.ids_of
    of_few = [(module, "ids_of", listed) for module in (held, scores, *(sys.modules[name] for name in _BY_IDS))]
    return replaced((order, "unpack", floating), *of_few)


def other_numbers(change: Callable[[Streams], Streams]) -> AbstractContextManager[None]:
    """Streams give the numbers of others, on the host as well."""
    bits, lists = Streams.bits, Streams.lists

    def of_others(self):
        return bits(self if len(self) <= order.FEW_ROWS else change(self))  # of few rows they come from the lists

    return replaced((Streams, "bits", of_others), (Streams, "lists", lambda self: lists(change(self))))


def one_stream() -> AbstractContextManager[None]:
    """All rows of a batch take the first row's number."""
    return other_numbers(lambda streams: streams.rows(torch.zeros(len(streams), dtype=torch.int64)))


def no_request() -> AbstractContextManager[None]:
    """The request is left out of what a number depends on."""
    return other_numbers(lambda streams: dataclasses.replace(streams, requests=torch.zeros_like(streams.requests)))


def batch_draws() -> AbstractContextManager[None]:
    """A number depends on the row's place in the batch."""
    return other_numbers(
        lambda streams: dataclasses.replace(streams, requests=streams.requests + torch.arange(len(streams)))
    )


def no_reordering() -> AbstractContextManager[None]:
    """A search leaves the model's state where it was."""
    return replaced((frontier, "reorder", lambda state, index: state))


class Break(NamedTuple):
    """A fault, and who tells it."""

    make: Callable[[], AbstractContextManager[None]]
    rung: str
    module: str


BREAKS = {
    name: Break(make, rung, f"vocab_parallel/{module}.py")
    for rung, faults in {
        "training schedule": {"a mean of means": (mean_of_means, "loss/engine")},
        "vocabulary migration": {
            "a copied tie": (copied_tie, "tying"),
            "two ids swapped in a map": (swapped_ids, "vocabulary/mapping"),
            "moments left behind by a migration": (stale_moments, "vocabulary/migration/models"),
        },
        "distributed loss": {
            "a wrong owner": (wrong_owner, "loss/targets"),
            "a target subtracted on every rank": (everyone_subtracts, "loss/gradients"),
            "a shard's V in smoothing": (local_smoothing, "loss/objective"),
            "a missing reduction of dH": (no_reduction, "loss/rows"),
        },
        "processor pipeline": {
            "a shard-local top-p": (local_top_p, "select/filters"),
            "a float32 id": (lambda: float_ids(torch.float32), "select/order"),
            "an id in the logits' bfloat16": (lambda: float_ids(torch.bfloat16), "select/order"),
        },
        "stochastic policy": {
            "a stream shared by a batch": (one_stream, "select/streams"),
            "a stream shared by requests": (no_request, "select/streams"),
            "a stream of the place in a batch": (batch_draws, "select/streams"),
        },
        "search": {"a state that does not follow its beam": (no_reordering, "decode/search/reordering")},
    }.items()
    for name, (make, module) in faults.items()
}
