"""Random chains of transforms, one step: the oracle's ids, the same log-probabilities on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tests.fuzz.case import Draw, FuzzCase
from tests.tolerances import require_equal
from tests.unit.policies import chain_of, logits_of, request_lists
from vocab_parallel import Streams
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.reference.policy import run_policy


@dataclass(frozen=True, repr=False)
class Policies(FuzzCase):
    kind: ClassVar[str] = "policies"
    kept: ClassVar[tuple[str, ...]] = ("only",)
    vocab: int = 9
    multiple_of: int = 1
    rows: int = 1
    longest: int = 7  # transforms of a chain, at most
    only: tuple[int, ...] | None = None  # of the chain's transforms, by place
    dtype: torch.dtype = torch.float32
    masked: bool = False
    trace: bool = False

    @classmethod
    def draw(cls, one: Draw) -> Policies:
        layout = one.layout((9, 9, 5, 13, 23, 97))
        return cls(
            ranks=one.ranks(), seed=one.seed(), **layout, rows=one(1, 3, 8), longest=one(2, 4, 7),
            dtype=one(torch.bfloat16, torch.float32, torch.float32, torch.float64, torch.float16),
            masked=one(False, False, True), trace=one(False, False, True),
        )  # fmt: skip

    def given(self) -> Any:
        policy = chain_of(self.seed, self.rows, self.longest, self.vocab)
        if self.only is not None:
            kept = tuple(policy.transforms[at] for at in self.only if at < len(policy.transforms))
            policy = Policy(kept, selector=policy.selector)
        logits = logits_of(self.seed, self.rows, self.dtype, masked=self.masked, vocab=self.vocab)
        lists = request_lists(torch.Generator().manual_seed(self.seed), self.rows, self.vocab)
        return policy, logits, *lists, Streams.of([self.seed] * self.rows, list(range(self.rows)))

    def run(self, place: Any) -> Any:
        policy, logits, prompts, generated, streams = self.given()
        shard = place.shard(self.vocab, self.multiple_of)
        view = View.of([[*p, *g] for p, g in zip(prompts, generated, strict=True)], [len(p) for p in prompts])
        mine = shard.slice(logits, -1, fill=math.nan)
        step = policy.step(mine, view, policy.start(self.rows, streams), shard=shard, trace=self.trace)
        return step.token_ids, step.logprobs

    def check(self, results: list[Any]) -> None:
        policy, logits, prompts, generated, streams = self.given()
        for at, name in enumerate(("ids", "logprobs")):
            require_equal(name, [result[at] for result in results])
        expected = run_policy(policy.to_dict(), logits, prompts, generated, streams.bits())
        got = results[0][0]
        assert torch.equal(got, expected.token_ids), f"ids {got}, expected {expected.token_ids} of\n{policy.to_json()}"
        wide = 1e-9 if self.dtype == torch.float64 else 1e-4  # scores are float32
        torch.testing.assert_close(results[0][1], expected.logprobs, rtol=wide, atol=wide)

    def simpler(self) -> Iterator[Policies]:
        """With one transform fewer."""
        kept = self.only if self.only is not None else tuple(range(len(self.given()[0].transforms)))
        yield from (replace(self, only=tuple(one for one in kept if one != without)) for without in kept)

    def allowed(self) -> bool:
        return self.vocab >= 5 and self.multiple_of >= 1 and self.rows >= 1 and 1 <= self.longest <= 7
