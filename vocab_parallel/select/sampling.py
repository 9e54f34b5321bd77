"""Exact sampling over shards: the same token at every TP size, in any batch, and again from a saved stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.headers import checksum_of
from vocab_parallel.select.filters import MIN_TEMPERATURE, keep_min_p, keep_top_k, keep_top_p, temper
from vocab_parallel.select.held import is_few, tokens_of, tokens_of_best
from vocab_parallel.select.keys import best_of_keys, floats, ids_of, integers, keys_of, values_of
from vocab_parallel.select.masses import Masses, measure
from vocab_parallel.select.order import FEW_ROWS, NONE, column_keys, ids_at, merge
from vocab_parallel.select.parameters import row_list
from vocab_parallel.select.position import column_at, tokens
from vocab_parallel.select.scores import (
    FEW_KEYS,
    Scores,
    best_words,
    describe,
    held_by_all,
    may_use_words,
    open_scores,
    rows_of,
)
from vocab_parallel.select.streams import Streams, check_streams
from vocab_parallel.shard import VocabShard

_FILTERS = {"temperature": temper, "top_k": keep_top_k, "top_p": keep_top_p, "min_p": keep_min_p}


class Sample(NamedTuple):
    """token_ids: int64 `[...]`, the same on every rank. streams: after the draw."""

    token_ids: Tensor
    streams: Streams


class Drawn(NamedTuple):
    """What `draw` gives.

    Attributes:
        token_ids: int64 `[T]`, -1 in inactive rows.
        values: `[T]`, their scores.
        masses: Of what was drawn from.
        streams: Advanced by one in active rows.
    """

    token_ids: Tensor
    values: Tensor
    masses: Masses
    streams: Streams


@uncompiled
def sample(
    logits: Tensor,  # [..., shard_size] floating, this rank's
    *,
    shard: VocabShard,
    streams: Streams,
    temperature: object = 1.0,
    top_k: object = None,
    top_p: object = None,
    min_p: object = None,
) -> Sample:
    """One token of each row, drawn from the distribution that temperature, top-k, top-p and min-p leave, in this order.

    A row takes the next number of its own stream, and the id at which the probabilities, added up in id order, pass
    it. Probabilities are integers, so neither the TP size nor the batch changes a token.

    Args:
        logits: This rank's columns; padding columns are never read and never drawn.
        streams: One for each row, the same on every rank.
        temperature: 0 takes the best token, by the total order. Like the others a number, or one for each row.
        top_k: Integers; `vocab_size` or more leaves a row as it is. Exactly k tokens, ties by id.
        top_p: In (0, 1]; 1 leaves a row as it is.
        min_p: In [0, 1]; 0 leaves a row as it is.

    Returns:
        `Sample`: the tokens, and the streams to go on with.

    Collectives:
        Of bytes a row, none at tp_size 1. An all-gather of 8 (best and mass), and the token: an all-gather of 8, or a
        broadcast if all rows fall to one rank. A draw that this does not decide: 8 more, 24 in all. Three all-gathers
        of 8 (best, mass, token) for float64 (16, 8, 16), with min-p or greedy rows, and where errors are deferred.
        Top-k: one of 8 k (16 k) in place of the first. If it cuts every row, to 1,024 at most, every rank holds all
        candidates and no more follow.
        Top-p: those of `top_p` up to the nucleus in place of the first. If every rank holds it, no more follow; if it
        was searched for, mass and token; else the token.

    Raises:
        ValueError: On every rank: a parameter out of range, with row and value; streams of another number of rows.
        NonFiniteError, LayoutMismatchError: On every rank: a row with NaN, +inf or without a finite logit; not this
            rank's columns; other streams or parameters on another rank.
    """
    rows = rows_of(logits, shard)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    values: dict[str, list[Any]] = {}
    fault, same, numbers = None, 0, []
    try:
        check_streams(streams, rows)
        values = _checked(given, rows)
        words = streams.lists()
        numbers, same = streams.numbers(words), checksum_of(*words, *values.values())
    except ValueError as error:
        fault = error
    call = f"sample(logits {describe(logits)}{_in_words(values, shard.vocab_size)})"
    scores = open_scores(logits, shard, call, kind="sample", checksum=same, may_hide_nan=False)
    if fault is not None:
        with scores.channel.guard():
            raise fault
    token_ids = _token_ids(scores, values, streams, numbers)
    return Sample(token_ids.view(logits.shape[:-1]), streams.advanced())


def _token_ids(scores: Scores, values: dict[str, list[Any]], streams: Streams, numbers: list[int]) -> Tensor:
    """int64 `[T]`, at the streams' next numbers; in Python's numbers where the host may and they are few."""
    drawn = None
    for name, one in values.items():
        if name == "top_k" and _cuts_to_few(scores, one):
            keys = best_words(scores, max(one))
            if "min_p" not in values:
                parts = values.get("top_p", [1.0] * scores.rows)
                drawn = tokens_of_best(keys, one, parts, numbers, scores.vocab_size)
            if drawn is not None:
                return integers(drawn)
            scores = held_by_all(scores, keys)
        scores = _FILTERS[name](scores, torch.tensor(one, dtype=torch.int64 if name == "top_k" else torch.float64))
    if _quick(scores):
        drawn = tokens(scores, numbers)
    elif is_few(scores):
        drawn = tokens_of(scores, numbers)
    return draw(scores, streams).token_ids if drawn is None else integers(drawn)


def draw(scores: Scores, streams: Streams, *, active: Tensor | None = None) -> Drawn:
    """One column of each row by its probability: inverse of the cumulative masses in id order, at a uniform number.

    Args:
        scores: At least one column a row above -inf.
        streams: One a row; active rows take one number.
        active: Bool `[T]`; the others get id -1 and keep their streams. None: all.

    Collectives:
        All-gathers of 8 bytes a row (16 for a float64 token): the peak unless it is known, the masses, the token. None
        if every rank holds the columns.
    """
    masses = measure(scores)
    at = _scaled(streams.bits().to(scores.values.device), masses.total)  # in [0, total)
    if scores.channel.size == 1:
        column = column_at(scores, masses, at)[:, None]
        values, token_ids = scores.values.gather(1, column) + 0.0, ids_at(scores.token_ids, column)
    else:
        if may_use_words(scores):
            return _drawn_by_words(scores, masses, at, streams.advanced(active), active)
        through = masses.by_rank.cumsum(0)
        owner = (through <= at).sum(0).clamp(max=scores.channel.size - 1)  # an empty row may be told of later
        at = at - (through - masses.by_rank).gather(0, owner[None])[0]
        token = column_keys(
            scores.values, scores.token_ids, column_at(scores, masses, at), owner == scores.channel.rank
        )
        values, token_ids = merge(scores.channel.gather(token), 1)
    values, token_ids = values[:, 0], token_ids[:, 0]
    if active is not None:
        token_ids = torch.where(active, token_ids, -1)
    return Drawn(token_ids, values, masses, streams.advanced(active))


def _drawn_by_words(scores: Scores, masses: Masses, at: Tensor, streams: Streams, active: Tensor | None) -> Drawn:
    """`draw` of few rows: only the rank that a row falls to looks for its column."""
    mine, rest, words = [], [], []
    for row, (position, of_ranks) in enumerate(zip(at.tolist(), masses.by_rank.t().tolist(), strict=True)):
        owner = 0
        while position >= of_ranks[owner]:
            position, owner = position - of_ranks[owner], owner + 1
        if owner == scores.channel.rank:
            mine.append(row)
            rest.append(position)
    words = [NONE] * scores.rows
    if mine:
        rows = torch.tensor(mine)
        part = scores.at(rows)
        fewer = masses._replace(largest=masses.largest[rows], blocks=masses.blocks[rows])
        column = column_at(part, fewer, torch.tensor(rest))[:, None]
        values, token_ids = part.values.gather(1, column), ids_at(part.token_ids, column)
        for row, word in zip(mine, keys_of(values[:, 0].tolist(), token_ids[:, 0].tolist()), strict=True):
            words[row] = word
    keys = [key for (key,) in best_of_keys(scores.channel.gather_words(words), scores.rows, 1)]
    values, token_ids = floats(values_of(keys)), integers(ids_of(keys))
    if active is not None:
        token_ids = torch.where(active, token_ids, -1)
    return Drawn(token_ids, values, masses, streams)


def _cuts_to_few(scores: Scores, k: list[int]) -> bool:
    """Whether top-k leaves so few columns of each row that the host can draw among their keys."""
    most = max(k, default=scores.vocab_size)
    return most < scores.vocab_size and scores.rows * most <= FEW_KEYS and may_use_words(scores)


def _quick(scores: Scores) -> bool:
    """Whether `tokens` can draw: it has what `draw` would exchange in fewer steps, unless only the masses are left."""
    values, channel = scores.values, scores.channel
    if channel.size == 1 or values.dtype == torch.float64 or values.device.type != "cpu":
        return False
    return not channel.group.defers(values.device) and (scores.largest is None or scores.sums is not None)


def _checked(given: dict[str, object], rows: int) -> dict[str, list[Any]]:
    """The parameters that do something, T numbers each, in the order in which they apply."""
    largest = torch.finfo(torch.float32).max
    values = {}
    if not (type(given["temperature"]) in (int, float) and given["temperature"] == 1):
        values["temperature"] = row_list(given["temperature"], rows, "temperature", low=0.0, high=largest)
    if given["top_k"] is not None:
        values["top_k"] = row_list(given["top_k"], rows, "top_k", low=1, integer=True)
    if given["top_p"] is not None:
        values["top_p"] = row_list(given["top_p"], rows, "top_p", low=0.0, high=1.0, low_open=True)
    if given["min_p"] is not None:
        values["min_p"] = row_list(given["min_p"], rows, "min_p", low=0.0, high=1.0)
    return values


def _in_words(values: dict[str, list[Any]], vocab_size: int) -> str:
    """The parameters by name, with what of their values decides on the collectives (see `deferral.Plan`)."""
    words = ""
    for name, one in values.items():
        words += f", {name}"
        if name == "temperature" and any(value < MIN_TEMPERATURE for value in one):
            words += " with greedy rows"
        elif name == "top_k":
            cut = [k for k in one if k < vocab_size]
            words += f" of {'all' if len(cut) == len(one) else 'some'} rows up to {max(cut, default=0)}"
        elif name == "top_p" and all(value >= 1.0 for value in one):
            words += " off"
    return words


def _scaled(bits: Tensor, total: Tensor) -> Tensor:
    """`floor(bits * total / 2**62)`, both int64 below 2**62, without losing a bit: in halves of 31."""
    if bits.device.type == "cpu" and len(bits) <= FEW_ROWS:
        each = zip(bits.tolist(), total.tolist(), strict=True)
        return torch.tensor([one * other >> 62 for one, other in each], dtype=torch.int64)
    low = (1 << 31) - 1
    a, b, c, d = bits >> 31, bits & low, total >> 31, total & low
    carry = ((a * d & low) + (b * c & low) + (b * d >> 31)) >> 31
    return a * c + (a * d >> 31) + (b * c >> 31) + carry
