"""The oracle of beam search: whole rows in Python floats, and exhaustive trees of toy models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

Ids = tuple[int, ...]


def log_softmax(row: Sequence[float]) -> list[float]:
    """In nats; `fsum` rounds once, so the order of columns does not matter."""
    top = max(row)
    lse = math.log(math.fsum(math.exp(z - top) for z in row))
    return [(z - top) - lse for z in row]


def beam_step(
    logits: Tensor,  # [B, K, V]
    beam_scores: Tensor,  # [B, K]
    n: int,
    counts: Sequence[Sequence[int]] | None = None,  # [B][V]
    penalty: float = 0.0,
) -> list[list[tuple[float, int, int]]]:
    """The best n (score, parent, token) of each request: score descending, parent ascending, logit descending, id."""
    result = []
    for b, (rows, sums) in enumerate(zip(logits.double().tolist(), beam_scores.double().tolist(), strict=True)):
        lowered = [penalty * c for c in counts[b]] if counts is not None else [0.0] * logits.shape[-1]
        found = []
        for k, (row, total) in enumerate(zip(rows, sums, strict=True)):
            if total > -math.inf and max(row) > -math.inf:
                logp = log_softmax(row)
                found += [(-(total + logp[v] - lowered[v]), k, -z, v) for v, z in enumerate(row) if z > -math.inf]
        result.append([(-score, k, v) for score, k, _, v in sorted(found)[:n]])
    return result


def length_penalty(length: int, alpha: float, kind: str = "power") -> float:
    """What a sum of log-probabilities is divided by: `length**alpha`, or GNMT's `((5 + length) / 6)**alpha`."""
    base = float(length) if kind == "power" else (5 + length) / 6
    return float(base**alpha)


def coverage(attention: Sequence[Sequence[float]], beta: float) -> float:
    """GNMT's cp of attention `[steps][source]`: `beta * sum_i log(min(sum_j a_ji, 1))`."""
    return beta * sum(math.log(min(math.fsum(column), 1.0)) for column in zip(*attention, strict=True))


def hypotheses(
    model: Callable[[Ids], Sequence[float]],  # the logits [V] after a prefix
    max_length: int,
    eos: Sequence[int] = (),
    prefix: Ids = (),
) -> Iterator[tuple[Ids, float]]:
    """Every sequence that ends in one of `eos` or has `max_length` ids, with its sum of log-probabilities: the tree."""
    if prefix and (prefix[-1] in eos or len(prefix) == max_length):
        yield prefix, 0.0
        return
    for token, logp in enumerate(log_softmax(model(prefix))):
        if logp > -math.inf:
            for ids, rest in hypotheses(model, max_length, eos, (*prefix, token)):
                yield ids, logp + rest


def best(
    found: Iterator[tuple[Ids, float]], n: int, alpha: float = 0.0, kind: str = "power"
) -> list[tuple[Ids, float]]:
    """The n best of `hypotheses` by normalised score."""
    scored = ((ids, total / length_penalty(len(ids), alpha, kind)) for ids, total in found)
    return sorted(scored, key=lambda one: (-one[1], one[0]))[:n]


def beam_search(
    model: Callable[[Ids], Sequence[float]],
    beams: int,
    max_length: int,
    eos: Sequence[int] = (),
    alpha: float = 0.0,
    kind: str = "power",
) -> list[tuple[Ids, float]]:
    """Plain beam search to the last length: of each step's best, ends among the first `beams` are kept, others live."""
    live: list[tuple[Ids, float]] = [((), 0.0)]
    ended: list[tuple[Ids, float]] = []
    for length in range(1, max_length + 1):
        grown = [((*ids, v), total + p) for ids, total in live for v, p in enumerate(log_softmax(model(ids)))]
        grown = sorted((one for one in grown if one[1] > -math.inf), key=lambda one: -one[1])
        last = length == max_length
        ended += [(ids, total) for ids, total in grown[:beams] if last or ids[-1] in eos]
        live = [one for one in grown[: (1 + max(1, len(eos))) * beams] if one[0][-1] not in eos][:beams]
    return best(iter(ended), beams, alpha, kind)


def diverse_beam_search(
    model: Callable[[Ids], Sequence[float]], groups: int, width: int, max_length: int, penalty: float
) -> list[list[tuple[Ids, float]]]:
    """Groups that choose in turn, each candidate lowered for each earlier group's beam that has taken its token."""
    live: list[list[tuple[Ids, float]]] = [[((), 0.0)] for _ in range(groups)]
    for _ in range(max_length):
        taken: list[int] = []
        for g in range(groups):
            grown = [((*ids, v), total + p) for ids, total in live[g] for v, p in enumerate(log_softmax(model(ids)))]
            grown = [(ids, total - penalty * taken.count(ids[-1])) for ids, total in grown]
            live[g] = sorted(grown, key=lambda one: -one[1])[:width]
            taken += [ids[-1] for ids, _ in live[g]]
    return live
