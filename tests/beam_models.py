"""Toy models for searches: logits that are a function of the ids so far, whole for the oracle and sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vocab_parallel import VocabShard
from vocab_parallel.decode.search.searching import Stepped

Ids = tuple[int, ...]
Whole = Callable[[Ids], Sequence[float]]


def random_tree(vocab: int, seed: int, spread: float = 2.0, steps: int | None = None) -> Whole:
    """Normal logits, another draw after each sequence; with `steps` on a grid of that many a nat, so that many tie."""

    def logits(ids: Ids) -> list[float]:
        number = seed + 1
        for one in ids:
            number = (number * 1_000_003 + one + 1) % (2**31 - 1)
        row = torch.randn(vocab, generator=torch.Generator().manual_seed(number)) * spread
        return [float(z) for z in (row if steps is None else (row * steps).round() / steps)]

    return logits


def table(rows: dict[Ids, dict[int, float]], vocab: int) -> Whole:
    """Probabilities by prefix, the rest shared among the other ids; uniform where a prefix has no entry."""

    def logits(ids: Ids) -> list[float]:
        given = rows.get(ids, {})
        rest = (1.0 - sum(given.values())) / max(1, vocab - len(given))
        return [torch.tensor(given.get(v, rest), dtype=torch.float64).log().item() for v in range(vocab)]

    return logits


class Toy:
    """A sharded model of `whole`, which also proves that its state follows the beams.

    Args:
        prompts: Their lengths; what `whole` is asked for is the generated ids, after the prompt's number.
    """

    def __init__(self, shard: VocabShard, whole: Callable[[int, Ids], Sequence[float]], prompts: Sequence[int]) -> None:
        self.shard, self.whole, self.prompts = shard, whole, list(prompts)
        self.calls = 0
        self.rows: list[int] = []
        self.attention: Callable[[int, Ids], Sequence[float]] | None = None
        self.dtype = torch.float64

    def __call__(self, prefix: torch.Tensor, parents: torch.Tensor, state: Any) -> Stepped:
        self.calls += 1
        self.rows.append(len(prefix))
        generated = [[one for one in row if one >= 0] for row in prefix.tolist()]
        per_request = len(prefix) // len(self.prompts)
        if state is not None:
            before = state["nested"][0]
            assert torch.equal(before, prefix[:, :-1]), "state does not follow the beams"
            assert torch.equal(state["request"], torch.arange(len(self.prompts)).repeat_interleave(per_request))
        requests = [row // per_request for row in range(len(prefix))]
        ids = [tuple(row[self.prompts[b] :]) for b, row in zip(requests, generated, strict=True)]
        whole = torch.tensor([self.whole(b, one) for b, one in zip(requests, ids, strict=True)], dtype=self.dtype)
        attention = None
        if self.attention is not None:
            attention = torch.tensor([self.attention(b, one) for b, one in zip(requests, ids, strict=True)])
        kept = {"nested": (prefix.clone(),), "request": torch.tensor(requests), "name": "toy"}
        return Stepped(self.shard.slice(whole, -1, fill=float("nan")), kept, attention)
