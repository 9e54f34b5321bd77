"""Diagnostics of rows, the reliability curve, fitted temperatures and the logit lens: the oracle's numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.fuzz.case import Draw, FuzzCase
from tests.fuzz.kinds.selection import logits_of
from tests.tolerances import bits, require_equal
from vocab_parallel import VocabParallelLMHead
from vocab_parallel.decode.diagnostics.calibration import fit_temperature, reliability
from vocab_parallel.decode.diagnostics.diagnostics import Diagnostics, diagnose
from vocab_parallel.decode.diagnostics.lens import logit_lens
from vocab_parallel.reference import diagnostics as oracle

IGNORED = -100


@dataclass(frozen=True, repr=False)
class Diagnosed(FuzzCase):
    kind: ClassVar[str] = "diagnostics"
    vocab: int = 9
    multiple_of: int = 1
    rows: int = 3
    dtype: torch.dtype = torch.float32
    shape: str = "normal"
    what: str = "rows"  # or "curve", "fit", "lens"
    temperature: float = 1.0
    each: bool = False  # another temperature in each row
    bins: int = 5
    bias: bool = False
    k: int = 1

    @classmethod
    def draw(cls, one: Draw) -> Diagnosed:
        layout = one.layout((9, 9, 1, 2, 13, 37, 300))
        return cls(
            ranks=one.ranks(), seed=one.seed(), **layout, rows=one(1, 3, 17),
            dtype=one(torch.float32, torch.float64, torch.bfloat16, torch.float16),
            shape=one("normal", "flat", "ties", "masked", "negative"), what=one("rows", "rows", "curve", "fit", "lens"),
            temperature=one(1.0, 0.7, 0.25, 3.0), each=one(False, True), bins=one(1, 5, 15), bias=one(False, True),
            k=1 + one.below(min(layout["vocab"], 6)),
        )  # fmt: skip

    def logits(self) -> Tensor:
        return logits_of(self.seed, self.shape, (self.rows,), self.vocab, self.dtype)

    def temperatures(self) -> Any:
        """One, or one a row."""
        if not self.each:
            return self.temperature
        draw = torch.Generator().manual_seed(self.seed + 2)
        return 0.25 + 3 * torch.rand(self.rows, generator=draw, dtype=torch.float64)

    def target(self) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed + 1)
        target = self.logits().double().argmax(1)
        other = torch.randint(0, self.vocab, (self.rows,), generator=draw)
        finite = self.logits().gather(1, other[:, None])[:, 0] > -torch.inf
        target = torch.where((torch.rand(self.rows, generator=draw) < 0.5) & finite, other, target)
        target[1:] = target[1:].masked_fill(torch.rand(self.rows - 1, generator=draw) < 0.2, IGNORED)
        return target

    def lens_parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states, weight, bias and targets; on a grid, so that products are exact in any order."""
        draw = torch.Generator().manual_seed(self.seed)
        shapes = ((2, self.rows, 4), (self.vocab, 4), (self.vocab,))
        values = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in shapes]
        hidden, weight, bias = (((2 * value).round() / 2).float() for value in values)
        return hidden, weight, bias * self.bias, torch.randint(0, self.vocab, (self.rows,), generator=draw)

    def run(self, place: Any) -> Any:
        shard = place.shard(self.vocab, self.multiple_of)
        if self.what == "lens":
            hidden, weight, bias, target = self.lens_parts()
            head = VocabParallelLMHead(4, shard=shard, bias=self.bias)
            with torch.no_grad():
                head.weight.copy_(shard.slice(weight, fill=math.nan))
                if self.bias:
                    head.bias.copy_(shard.slice(bias))
            return tuple(logit_lens(hidden, nn.Identity(), head, norm_name="none", k=self.k, target=target))[1:]
        mine = shard.slice(self.logits(), -1, fill=math.nan)
        before = bits(mine).clone()
        if self.what == "rows":
            found: Any = tuple(diagnose(mine, shard=shard, temperature=self.temperatures()))
        elif self.what == "curve":
            found = reliability(mine, self.target(), shard=shard, bins=self.bins, temperature=self.temperature)
        else:
            found = fit_temperature((mine, self.target()), shard=shard, bins=self.bins, task="drawn")
        assert torch.equal(bits(mine), before), "the logits were modified"
        return found

    def check(self, results: list[Any]) -> None:
        if self.what in ("rows", "lens"):
            for at in range(len(results[0])):
                require_equal(f"result {at} on every rank", [result[at] for result in results])
        else:
            assert len({repr(result) for result in results}) == 1, "the ranks disagree"
        {"rows": self.check_rows, "curve": self.check_curve, "fit": self.check_fit, "lens": self.check_lens}[self.what](
            results[0]
        )

    def check_rows(self, found: Any) -> None:
        # scores are the quotients in float32, or in float64 for float64: of those, everything is exact
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        t = torch.as_tensor(self.temperatures(), dtype=torch.float64).expand(self.rows)
        scores = (self.logits().to(wide) / t.to(wide)[:, None]).double()
        expected = oracle.diagnose(scores)
        expected = expected._replace(energy=-t * expected.lse)
        scale = float(scores.nan_to_num(neginf=0.0).abs().max()) + self.vocab
        for name, got, want in zip(Diagnostics._fields, found, expected, strict=True):
            if not want.is_floating_point():
                assert torch.equal(got, want), (name, got, want)
                continue
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9 * scale), (name, got, want)

    def check_curve(self, found: Any) -> None:
        expected = oracle.calibration(self.logits(), self.target(), self.bins, self.temperature)
        # float32 scores over a temperature are rounded, so a confidence on an edge may fall to either side
        log_p = (self.logits().double() / self.temperature).log_softmax(1)
        edges = log_p.amax(1).exp() * self.bins
        close = 1e-8 if self.dtype == torch.float64 or self.temperature == 1.0 else 1e-3
        if not bool(((edges - edges.round()).abs() < 1e-4).any()):
            assert list(found.counts) == expected["rows"], (found, expected)
            assert abs(found.ece - expected["ece"]) < close, (found, expected)
        assert abs(found.nll - expected["nll"]) < close * (1 + abs(expected["nll"])), (found, expected)

    def check_fit(self, found: Any) -> None:
        best = oracle.best_temperature(self.logits(), self.target(), 0.05, 20.0)
        if found.at_bound:
            assert best < 0.0501 or best > 19.9, (found, best)
        else:  # a flat likelihood says little of its minimum
            slack = abs(oracle.calibration(self.logits(), self.target(), 1, found.temperature)["nll"]
                        - oracle.calibration(self.logits(), self.target(), 1, best)["nll"])  # fmt: skip
            assert abs(found.temperature - best) < 1e-5 * best or slack < 1e-9, (found, best, slack)

    def check_lens(self, found: Any) -> None:
        hidden, weight, bias, target = self.lens_parts()
        ids, logprobs, entropy, rank = oracle.lens(hidden, lambda rows: rows @ weight.T + bias, target)
        assert torch.equal(found[0], ids[..., : self.k]), (found[0], ids)
        assert torch.allclose(found[1], logprobs[..., : self.k], rtol=0, atol=1e-9)
        assert torch.allclose(found[2], entropy, rtol=0, atol=1e-9)
        assert any(torch.equal(one, rank) for one in found[3:] if one.dtype == torch.int64), (found[3:], rank)

    def allowed(self) -> bool:
        return min(self.vocab, self.multiple_of, self.rows, self.bins, self.k) >= 1 and self.k <= self.vocab
