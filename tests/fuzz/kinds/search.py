"""Joint beam steps, beam search and best-first search on random trees: the oracle's sequences and scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.beam_models import Toy, random_tree
from tests.fuzz.case import Draw, FuzzCase
from tests.tolerances import bits, require_equal
from vocab_parallel.decode.search.beam import beam_step
from vocab_parallel.decode.search.beam_search import beam_search
from vocab_parallel.decode.search.best_first import best_first_search
from vocab_parallel.decode.search.hypotheses import LengthPenalty
from vocab_parallel.reference import beam as oracle


@dataclass(frozen=True, repr=False)
class BeamSteps(FuzzCase):
    kind: ClassVar[str] = "beam"
    vocab: int = 9
    multiple_of: int = 1
    requests: int = 1
    beams: int = 2
    candidates: int | None = None
    dtype: torch.dtype = torch.float32
    shape: str = "normal"

    @classmethod
    def draw(cls, one: Draw) -> BeamSteps:
        return cls(
            ranks=one.ranks(), seed=one.seed(), **one.layout((9, 9, 1, 2, 5, 13, 37, 300)), requests=one(1, 1, 3, 0),
            beams=one(1, 2, 4), candidates=one(None, 1, 3, 11),
            dtype=one(torch.float32, torch.float64, torch.bfloat16, torch.float16),
            shape=one("normal", "ties", "first step", "masks", "offset", "wide"),
        )  # fmt: skip

    def inputs(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        shape = (self.requests, self.beams, self.vocab)
        logits = torch.randn(shape, generator=draw, dtype=torch.float64) * 3
        sums = -torch.rand(shape[:2], generator=draw, dtype=torch.float64) * 4
        if self.shape == "ties":
            logits, sums = (logits / 3).round(), torch.full_like(sums, -2.0)
            # copies and permutations of one row have the same scores; rows that differ by a constant, up to rounding
            logits[:] = logits[:, :1]
            logits[:, 1::2] = logits[:, :1].flip(-1)
        elif self.shape == "first step":
            sums[:, 1:], sums[:, :1] = -math.inf, 0.0
        elif self.shape == "masks":
            logits = torch.where(torch.rand(shape, generator=draw) < 0.6, -math.inf, logits)
            logits[:, 0, 0] = 1.0  # no request without any token
            sums[:, 1:] = sums[:, 1:].masked_fill(torch.rand(sums[:, 1:].shape, generator=draw) < 0.3, -math.inf)
        elif self.shape == "offset":
            logits += torch.tensor([3000.0, -3000.0, 0.0, 1e4], dtype=torch.float64)[: self.beams, None]
        elif self.shape == "wide":
            logits *= 15
        return logits.to(self.dtype), sums

    def run(self, place: Any) -> Any:
        logits, sums = self.inputs()
        shard = place.shard(self.vocab, self.multiple_of)
        mine = shard.slice(logits, -1, fill=math.nan)
        before = bits(mine).clone()
        step = beam_step(mine, sums, shard=shard, candidates=self.candidates)
        assert torch.equal(bits(mine), before), "the logits were modified"
        return tuple(step)

    def check(self, results: list[Any]) -> None:
        names = ("scores", "parents", "token_ids", "logprobs")
        for at, name in enumerate(names):
            require_equal(name, [result[at] for result in results])
        scores, parents, ids, logprobs = results[0]
        logits, sums = self.inputs()
        n = self.candidates or 2 * self.beams
        assert scores.shape == (self.requests, n)
        for b, expected in enumerate(oracle.beam_step(logits, sums, n)):
            fill = n - len(expected)
            assert parents[b].tolist() == [k for _, k, _ in expected] + [0] * fill, (parents, expected)
            assert ids[b].tolist() == [v for *_, v in expected] + [-1] * fill, (ids, expected)
            want = torch.tensor([score for score, *_ in expected] + [-math.inf] * fill, dtype=torch.float64)
            torch.testing.assert_close(scores[b], want, rtol=1e-12, atol=1e-9)
            total = sums[b, parents[b]] + logprobs[b]
            assert torch.equal(torch.where(ids[b] >= 0, total, -math.inf), scores[b]), (total, scores[b])

    def allowed(self) -> bool:
        return min(self.vocab, self.multiple_of, self.beams, self.candidates or 1) >= 1 and self.requests >= 0


@dataclass(frozen=True, repr=False)
class Searches(FuzzCase):
    kind: ClassVar[str] = "search"
    vocab: int = 4
    multiple_of: int = 1
    form: str = "beam"  # or "best-first"
    beams: int = 1
    length: int = 3
    eos: tuple[int, ...] = ()
    alpha: float = 0.0
    penalty: str = "power"
    count: int = 1  # of hypotheses
    requests: int = 1
    normalize_priority: bool = False

    @classmethod
    def draw(cls, one: Draw) -> Searches:
        layout = one.layout((4, 3, 2, 5))
        form = one("beam", "beam", "best-first")
        eos = tuple(one.subset(range(layout["vocab"])))[: layout["vocab"] - 1]
        beams = one(1, 2, 3, 8)
        return cls(
            ranks=one.ranks(), seed=one.seed(), **layout, form=form, beams=beams, length=one(1, 2, 3, 4), eos=eos[:2],
            alpha=one(0.0, 1.0, -0.7, 0.8), penalty=one("power", "gnmt"), count=one(1, 2) if form != "beam" else beams,
            requests=one(1, 2) if form == "beam" else 1, normalize_priority=one(False, True),
        )  # fmt: skip

    def whole(self, request: int) -> Any:
        return random_tree(self.vocab, self.seed % 10**6 + request)

    def run(self, place: Any) -> Any:
        shard = place.shard(self.vocab, self.multiple_of)
        trees = [self.whole(request) for request in range(self.requests)]
        model = Toy(shard, lambda request, ids: trees[request](ids), [1] * self.requests)
        more = {"eos_ids": self.eos, "length_penalty": LengthPenalty(self.alpha, self.penalty)}
        if self.form == "best-first":
            found = best_first_search(
                lambda prefix, parents, state: model(prefix, parents, None), [0], shard=shard, queue_size=5000,
                branching=self.vocab, max_new_tokens=self.length, max_expansions=5000, num_return=self.count,
                normalize_priority=self.normalize_priority, **more,
            )  # fmt: skip
            assert found.proven, "a search with room for all is proven"
            return [[(one.token_ids, one.score) for one in found.hypotheses]]
        result = beam_search(
            model, [[0]] * self.requests, shard=shard, num_beams=self.beams, max_new_tokens=self.length,
            num_return=self.count, **more,
        )  # fmt: skip
        return [
            [(tuple(ids[:length]), score) for ids, length, score in zip(*of, strict=True) if score > -math.inf]
            for of in zip(result.token_ids.tolist(), result.lengths.tolist(), result.scores.tolist(), strict=True)
        ]

    def check(self, results: list[Any]) -> None:
        assert all(result == results[0] for result in results), "the ranks disagree"
        for request, got in enumerate(results[0]):
            whole = self.whole(request)
            if self.form == "beam":
                want = oracle.beam_search(whole, self.beams, self.length, self.eos, self.alpha, self.penalty)
            else:
                tree = oracle.hypotheses(whole, self.length, self.eos)
                want = oracle.best(tree, self.count, self.alpha, self.penalty)
            assert [ids for ids, _ in got] == [ids for ids, _ in want], (got, want)
            assert all(abs(one - other) < 1e-9 for (_, one), (_, other) in zip(got, want, strict=True)), (got, want)

    def allowed(self) -> bool:
        return (
            min(self.multiple_of, self.beams, self.length, self.count, self.requests) >= 1
            and self.vocab >= 2
            and all(0 <= one < self.vocab for one in self.eos)
            and len(self.eos) < self.vocab
            and (self.form == "beam" or self.requests == 1)
            and (self.form != "beam" or self.count == self.beams)
        )
