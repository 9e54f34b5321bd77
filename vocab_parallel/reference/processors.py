"""The oracle of processors, constraints and contrasts: whole rows `[T, V]`, one row and one id after the other.

A processor gets the scores, the prompts and the generated ids as lists, and its fields as a policy file has them;
`process` finds it by name. What it writes has the scores' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.reference import warpers

Rows = Sequence[Sequence[int]]


def process(name: str, z: Tensor, prompts: Rows, generated: Rows, **fields: Any) -> Tensor:
    """The scores after the processor of this name."""
    return _PROCESSORS[name](z.clone(), prompts, generated, **fields)


def bias(z: Tensor, prompts: Rows, generated: Rows, bias: Any = None, sequences: Any = (), table: Any = None) -> Tensor:
    """`z + b`: ids, then the table, then sequences that the next id would complete, added up first."""
    for t, row in enumerate(z):
        total, history = torch.zeros_like(row), [*prompts[t], *generated[t]]
        for token, amount in (of_row(bias or {}, t)).items():
            total[int(token)] += float(amount)
        total += 0.0 if table is None else torch.as_tensor(table).to(row.dtype)
        for ids, amount in sequences:
            total[ids[-1]] += float(amount) if ends_with(history, ids[:-1]) else 0.0
        z[t] = row + total
    return z


def prior(z: Tensor, prompts: Rows, generated: Rows, frequencies: Any, smoothing: float, strength: Any = 1.0) -> Tensor:
    """`z - s log pi`, `pi = (f + a) / sum(f + a)`."""
    smoothed = [f + smoothing for f in torch.as_tensor(frequencies, dtype=torch.float64).tolist()]
    log_pi = torch.tensor([math.log(f / math.fsum(smoothed)) for f in smoothed], dtype=torch.float64).to(z.dtype)
    return torch.stack([row - of_row(strength, t) * log_pi for t, row in enumerate(z)])


def repetition_penalty(z: Tensor, prompts: Rows, generated: Rows, penalty: Any = 1.0, scope: str = "all") -> Tensor:
    """`z / r` or `r z` by sign, for the ids that have occurred."""
    for t, row in enumerate(z):
        for v in known(row, within(prompts, generated, scope, t)):
            row[v] = row[v] * of_row(penalty, t) if row[v] < 0 else row[v] / of_row(penalty, t)
    return z


def frequency_penalty(
    z: Tensor, prompts: Rows, generated: Rows, penalty: Any = 0.0, scope: str = "generated"
) -> Tensor:
    """`z - c n`."""
    for t, row in enumerate(z):
        history = within(prompts, generated, scope, t)
        for v in known(row, history):
            row[v] -= torch.tensor(of_row(penalty, t), dtype=z.dtype) * history.count(v)
    return z


def presence_penalty(z: Tensor, prompts: Rows, generated: Rows, penalty: Any = 0.0, scope: str = "generated") -> Tensor:
    """`z - c` for the ids that have occurred."""
    for t, row in enumerate(z):
        for v in known(row, within(prompts, generated, scope, t)):
            row[v] -= of_row(penalty, t)
    return z


def suppress(z: Tensor, prompts: Rows, generated: Rows, token_ids: Any, steps: Any = None) -> Tensor:
    """-inf at the ids, always or at some steps."""
    for t, row in enumerate(z):
        if steps is None or len(generated[t]) in steps:
            row[ids_of_row(token_ids, t)] = -torch.inf
    return z


def force(
    z: Tensor, prompts: Rows, generated: Rows, token_ids: Any, at: Any, counts: str = "generated", score: Any = None
) -> Tensor:
    """-inf at all other ids at one length."""
    for t, row in enumerate(z):
        if length_of(prompts, generated, counts, t) == of_row(at, t):
            kept = {v: float(row[v]) if score is None else score for v in ids_of_row(token_ids, t)}
            row[:] = -torch.inf
            for v, value in kept.items():
                row[v] = value
    return z


def min_length(
    z: Tensor, prompts: Rows, generated: Rows, length: Any, eos_ids: Any, counts: str = "generated"
) -> Tensor:
    """-inf at the end-of-sequence ids before a length."""
    for t, row in enumerate(z):
        if length_of(prompts, generated, counts, t) < of_row(length, t):
            row[ids_of_row(eos_ids, t)] = -torch.inf
    return z


def bad_words(z: Tensor, prompts: Rows, generated: Rows, words: Any, scope: str = "all") -> Tensor:
    """-inf at the last id of a sequence whose other ids end the ids so far."""
    per_row = any(isinstance(one, (list, tuple)) for word in words for one in word)
    for t, row in enumerate(z):
        for word in words[t] if per_row else words:
            if ends_with(within(prompts, generated, scope, t), word[:-1]):
                row[word[-1]] = -torch.inf
    return z


def no_repeat_ngram(z: Tensor, prompts: Rows, generated: Rows, n: Any, scope: str = "all") -> Tensor:
    """-inf at every id that would make a second copy of n ids in a row."""
    for t, row in enumerate(z):
        size, history = of_row(n, t), within(prompts, generated, scope, t)
        grams = {tuple(history[at : at + size]) for at in range(len(history) - size + 1)} if size else set()
        for v in range(len(row)):
            if size and len(history) >= size - 1 and (*history[len(history) - size + 1 :], v) in grams:
                row[v] = -torch.inf
    return z


def fsm_legal(machine: Mapping[str, Any], state: int, eos_ids: Sequence[int] = ()) -> Callable[[int], bool]:
    """Whether an id is legal in a state of a machine, as its `to_dict` gives it: an end where it may end."""
    ranges = [(low, high) for of, low, high, _ in machine["edges"] if of == state]
    may_end = state in machine["accepting"]
    return lambda v: may_end if v in eos_ids else any(low <= v < high for low, high in ranges)


def fsm_next(machine: Mapping[str, Any], state: int, token: int, eos_ids: Sequence[int] = ()) -> int:
    """The state after a legal id was emitted; an end leaves it."""
    if token in eos_ids:
        return state
    return next(int(after) for of, low, high, after in machine["edges"] if of == state and low <= token < high)


def fsm(z: Tensor, states: Sequence[int], machine: Mapping[str, Any], eos_ids: Sequence[int] = ()) -> Tensor:
    """-inf at the ids that are illegal in each row's state."""
    legal = [list(map(fsm_legal(machine, state, eos_ids), range(z.shape[1]))) for state in states]
    return torch.where(torch.tensor(legal, dtype=torch.bool).view(z.shape), z, -torch.inf)


def js_divergence(z: Tensor, others: Tensor) -> Tensor:
    """float64 `[T, M]`, nats, between each row and the rows `[T, M, V]`."""
    p, q = z.double().softmax(-1)[:, None], others.double().softmax(-1)
    m = (p + q) / 2
    terms: Tensor = torch.special.xlogy(p, p / m) + torch.special.xlogy(q, q / m)
    return terms.sum(-1) / 2


def dola(z: Tensor, premature: Tensor, relative_top: Any = 0.1) -> Tensor:
    """float64 `log p - log q` where `p >= a max p`; q is the layer of `[T, M, V]` that diverges most from p."""
    layer = js_divergence(z, premature).argmax(1)
    log_p = z.double().log_softmax(-1)
    log_q = premature[torch.arange(len(z)), layer].double().log_softmax(-1)
    plausible = warpers.min_p(z, relative_top)
    return torch.where(plausible, log_p - log_q, -torch.inf)


def contrastive(z: Tensor, similarity: Tensor, k: int, alpha: Any, confidence: str = "logprob") -> Tensor:
    """float64 `[T, V]`: `(1 - a) confidence - a similarity` `[T, V]` for the first k in the total order, else -inf."""
    a = warpers.per_row(alpha, z)
    log_p = z.double().log_softmax(-1)
    score = (1 - a) * (log_p if confidence == "logprob" else log_p.exp()) - a * similarity.double()
    return torch.where(warpers.top_k(z, k), score, -torch.inf)


def of_row(value: Any, t: int) -> Any:
    """A parameter's value in row t."""
    listed = value.tolist() if isinstance(value, Tensor) else value
    return listed[t] if isinstance(listed, (list, tuple)) else listed


def ids_of_row(ids: Any, t: int) -> list[int]:
    """The ids of row t, of ids for all rows or of a list for each."""
    return list(ids[t]) if any(isinstance(one, (list, tuple)) for one in ids) else list(ids)


def within(prompts: Rows, generated: Rows, scope: str, t: int) -> list[int]:
    """The ids of row t that count."""
    parts = {"all": [*prompts[t], *generated[t]], "generated": [*generated[t]], "prompt": [*prompts[t]]}
    return parts[scope]


def length_of(prompts: Rows, generated: Rows, counts: str, t: int) -> int:
    """How many ids row t has."""
    return len(generated[t]) + (len(prompts[t]) if counts == "all" else 0)


def ends_with(history: Sequence[int], ids: Sequence[int]) -> bool:
    """Whether the ids so far end in these."""
    return len(ids) == 0 or list(history[-len(ids) :]) == list(ids)


def known(row: Tensor, history: Sequence[int]) -> set[int]:
    """The different ids of the vocabulary among these."""
    return {v for v in history if v < len(row)}


_PROCESSORS: Mapping[str, Callable[..., Tensor]] = {
    "bias": bias, "prior": prior, "repetition_penalty": repetition_penalty, "frequency_penalty": frequency_penalty,
    "presence_penalty": presence_penalty, "suppress": suppress, "force": force, "min_length": min_length,
    "bad_words": bad_words, "no_repeat_ngram": no_repeat_ngram,
}  # fmt: skip
