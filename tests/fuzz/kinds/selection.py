"""Greedy, top-k, top-p, sampling with a policy in each row, the best log-probabilities: ids exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.fuzz.case import Draw, FuzzCase
from tests.tolerances import bits, require_equal
from vocab_parallel import Streams, greedy, reference, sample, top_k, top_logprobs, top_p

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16)
SHAPES = ("normal", "flat", "peaked", "ties", "masked", "negative")
TEMPERATURES, TOP_PS, MIN_PS = (0.0, 1e-12, 0.3, 0.7, 1.0, 1.5, 4.0), (1e-9, 0.3, 0.5, 0.9, 0.99, 1.0), (0.0, 0.05, 0.3)


def logits_of(seed: int, shape: str, leading: tuple[int, ...], vocab: int, dtype: torch.dtype) -> Tensor:
    """Whole logits; with "masked" some are -inf, never all of a row."""
    draw = torch.Generator().manual_seed(seed)
    z = torch.randn(*leading, vocab, generator=draw, dtype=torch.float64)
    if shape == "masked":
        mask = torch.rand(z.shape, generator=draw) < 0.7
        mask.scatter_(-1, torch.randint(0, vocab, (*leading, 1), generator=draw), False)
        z = z.masked_fill(mask, -torch.inf)
    scales = {"flat": 0.01, "peaked": 8.0}
    z = (z * 2).round() / 2 if shape == "ties" else z * scales.get(shape, 2.0)
    return (z - 1000.0 if shape == "negative" else z).to(dtype)


@dataclass(frozen=True, repr=False)
class Selection(FuzzCase):
    kind: ClassVar[str] = "selection"
    vocab: int = 9
    multiple_of: int = 1
    leading: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float32
    shape: str = "normal"
    operation: str = "greedy"
    k: int = 1
    p: float = 1.0
    each: bool = False  # parameters of `sample` are one a row
    given: tuple[str, ...] = ()  # parameters of `sample`
    strided: bool = False

    @classmethod
    def draw(cls, one: Draw) -> Selection:
        layout = one.layout((9, 9, 1, 2, 5, 13, 37, 300, 1000))
        operation = one("greedy", "top_k", "top_p", "sample", "sample", "top_logprobs")
        flat = operation in ("sample", "top_p")
        return cls(
            ranks=one.ranks(), seed=one.seed(), **layout,
            leading=one((3,), (6,), (1,), (0,), (40,)) if flat else one((3,), (40,), (), (0,), (2, 3), (2, 0)),
            dtype=one(*DTYPES), shape=one(*SHAPES), operation=operation, k=1 + one.below(layout["vocab"]),
            p=one(*TOP_PS), each=one(False, True), strided=one(False, True),
            given=tuple(one.subset(("temperature", "top_k", "top_p", "min_p"))),
        )  # fmt: skip

    def logits(self) -> Tensor:
        return logits_of(self.seed, self.shape, self.leading, self.vocab, self.dtype)

    def parameters(self) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(self.seed + 1)
        rows = self.leading[0]

        def values(choices: tuple[float, ...]) -> Any:
            chosen = torch.tensor(choices, dtype=torch.float64)[
                torch.randint(0, len(choices), (rows + 1,), generator=draw)
            ]
            return chosen[:rows] if self.each else float(chosen[-1])

        made = {"temperature": values(TEMPERATURES), "top_p": values(TOP_PS), "min_p": values(MIN_PS)}
        ks = values((1, 2, 5, 40, self.vocab, self.vocab + 3))
        made["top_k"] = ks.long() if isinstance(ks, Tensor) else int(ks)
        return {name: value for name, value in made.items() if name in self.given}

    def streams(self) -> Streams:
        return Streams.of([self.seed] * self.leading[0], list(range(self.leading[0])))

    def run(self, place: Any) -> Any:
        shard = place.shard(self.vocab, self.multiple_of)
        mine = shard.slice(self.logits(), -1, fill=math.nan)
        if self.strided:
            mine = torch.stack([mine, mine], -1)[..., 0]
        before = bits(mine).clone()
        if self.operation == "greedy":
            found: tuple[Tensor, ...] = (greedy(mine, shard=shard),)
        elif self.operation == "top_k":
            found = tuple(top_k(mine, self.k, shard=shard))
        elif self.operation == "top_logprobs":
            found = tuple(top_logprobs(mine, self.k, shard=shard))
        elif self.operation == "top_p":
            nucleus = top_p(mine, self.p, shard=shard)
            found = nucleus.size, nucleus.mass, nucleus.kept[:, : shard.num_valid]
        else:
            drawn = sample(mine, shard=shard, streams=self.streams(), **self.parameters())
            found = drawn.token_ids, drawn.streams.draws
        assert torch.equal(bits(mine), before), "the logits were modified"
        return found

    def check(self, results: list[Any]) -> None:
        whole = self.logits()
        if self.operation == "top_p":
            size, mass, kept = results[0][0], results[0][1], torch.cat([result[2] for result in results], -1)
            expected = reference.nucleus(whole, torch.full(self.leading, self.p, dtype=torch.float64)) & (
                whole > -torch.inf
            )
            assert torch.equal(kept, expected), f"kept {kept}\n{expected}"
            assert torch.equal(size, expected.sum(1))
            torch.testing.assert_close(mass, (whole.double().softmax(-1) * expected).sum(1), rtol=1e-9, atol=0)
            results = [result[:2] for result in results]
        for at in range(len(results[0])):
            require_equal(f"result {at} on every rank", [result[at] for result in results])
        if self.operation == "greedy":
            _same("ids", results[0][0], reference.greedy(whole))
        elif self.operation == "top_k":
            values, ids = reference.top_k(whole, self.k)
            _same("ids", results[0][1], ids)
            assert results[0][0].dtype == self.dtype and torch.equal(results[0][0], values)
        elif self.operation == "top_logprobs":
            log_p = whole.double().log_softmax(-1)
            _, ids = reference.top_k(whole, self.k)
            log_p = log_p.gather(-1, ids)
            _same("ids", results[0][0], torch.where(log_p > -torch.inf, ids, -1))
            torch.testing.assert_close(results[0][1], log_p, rtol=1e-9, atol=1e-9)
        elif self.operation == "sample":
            _same("ids", results[0][0], self.sampled(whole))
            assert results[0][1].tolist() == [1] * self.leading[0]

    def sampled(self, whole: Tensor) -> Tensor:
        rows, given = self.leading[0], self.parameters()
        plain = {"temperature": 1.0, "top_k": self.vocab, "top_p": 1.0, "min_p": 0.0} | given
        values = {
            name: torch.as_tensor(value).to(torch.int64 if name == "top_k" else torch.float64).expand(rows)
            for name, value in plain.items()
        }
        return reference.sample(whole, self.streams().bits(), **values)

    def allowed(self) -> bool:
        return 1 <= self.k <= self.vocab and self.multiple_of >= 1 and (
            len(self.leading) == 1 or self.operation not in ("sample", "top_p")
        )  # fmt: skip


def _same(name: str, got: Tensor, expected: Tensor) -> None:
    assert got.dtype == torch.int64 and torch.equal(got, expected), f"{name}: {got}\n{expected}"
