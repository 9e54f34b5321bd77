"""Rung 3: one loss by every schedule, materialised, chunked and fused, on one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.comparing import backward, difference, gradient, relative, scaled, unequal
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.setting import IGNORE, Setting
from vocab_parallel.loss import cross_entropy, kernels, linear_cross_entropy

Loss = Callable[[list[Tensor], str], Tensor]  # of hidden rows, weight and bias; a reduction

_CHUNKS = (1, 5, 16)  # none divides the rows evenly but the first


def checks(setting: Setting) -> Sequence[Check]:
    """On a slice of the user's rows, which this rank holds alone, against the oracle on the same bits."""
    rows, limit, unit = _Schedules(setting), setting.tolerance, "nats, of the largest entry"
    schedules: dict[str, Loss] = {"materialised logits": rows.materialised}
    schedules |= {f"fused, chunks of {size}": partial(rows.fused, size) for size in _CHUNKS}
    schedules["fused, one chunk"] = partial(rows.fused, None)
    made = []
    for name, loss in schedules.items():
        made += [
            Check(f"{name}: loss of each row, dH, dW, db", partial(rows.per_row, loss), limit, unit),
            Check(f"{name}: mean and sum, dH, dW, db", partial(rows.reduced, loss), limit, unit),
        ]
    made.append(
        Check("a second backward gives the same bits", rows.twice, 0.0, "entries", "vocab_parallel/loss/fused.py")
    )
    if kernels.available(setting.hidden):
        made.append(Check("Triton's statistics equal the eager ones", rows.kernels, limit, "relative",
                          "vocab_parallel/loss/kernels/statistics.py"))  # fmt: skip
    return made


RUNG = Rung(
    "training schedule",
    "Whether the logits are held whole, in chunks or never, each row's loss, the sum, the count and the gradients are "
    "the same.",
    "vocab_parallel/loss/engine.py",
    checks,
)


class _Schedules:
    """Hidden rows, targets with ignored rows spread unevenly, and a slice of the head."""

    def __init__(self, setting: Setting) -> None:
        self.shard, self.dtype = setting.slice.alone, setting.dtype
        self.size = self.shard.vocab_size
        self.hidden = setting.hidden
        self.table, self.bias = setting.slice.table, setting.slice.bias
        target = torch.randint(self.size, (len(self.hidden),), generator=setting.draws("schedules"))
        target[0], target[-1] = 0, self.size - 1
        target[2:11], target[13::4] = IGNORE, IGNORE  # a chunk of ignored rows only, and chunks with some
        self.target = target.to(setting.device)
        self.upstream = torch.rand(len(target), generator=setting.draws("upstream")).to(setting.device)

    def materialised(self, inputs: list[Tensor], reduction: str) -> Tensor:
        hidden, weight, bias = inputs
        logits = hidden @ weight[: self.size].T + bias[: self.size]
        stored = F.pad(logits, (0, self.shard.shard_size - self.size), value=torch.nan)
        return cross_entropy(stored, self.target, shard=self.shard, reduction=reduction)

    def fused(self, chunk: int | None, inputs: list[Tensor], reduction: str) -> Tensor:
        hidden, weight, bias = inputs
        return linear_cross_entropy(
            hidden, weight, self.target, shard=self.shard, linear_bias=bias, reduction=reduction, chunk_size=chunk
        )

    def per_row(self, loss: Loss) -> float:
        """Each row's upstream gradient is its own, so that no two rows' errors cancel."""
        inputs, whole = self.inputs(), self.whole()
        got, want = loss(inputs, "none"), self.oracle(whole, "none")
        backward(got * self.upstream.to(got.dtype))
        backward(want * self.upstream.double())
        return max(scaled(got, want), self._wrong_gradients(inputs, whole))

    def reduced(self, loss: Loss) -> float:
        worst = 0.0
        for reduction in ("mean", "sum"):
            inputs, whole = self.inputs(), self.whole()
            got, want = loss(inputs, reduction), self.oracle(whole, reduction)
            backward(got)
            backward(want)
            worst = max(worst, scaled(got, want), self._wrong_gradients(inputs, whole))
        return worst

    def twice(self) -> float:
        inputs = self.inputs()
        loss = self.fused(5, inputs, "mean")
        first, second = (torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2))
        return sum(unequal(one, other) for one, other in zip(second, first, strict=True))

    def kernels(self) -> float:
        from vocab_parallel.loss.kernels.statistics import statistics

        logits = (self.hidden @ self.table.T.to(self.dtype)).contiguous()
        maximum, sumexp = statistics(
            logits.clone(), softcap=None, temperature=1.0, shifted_sum=False, expected=False, top=False, in_place=False
        )[:2]
        wide = logits.double()
        top = wide.amax(1)
        total = (wide - top[:, None]).exp().sum(1)
        return max(difference(maximum, top), difference(sumexp / total, torch.ones_like(total)))

    def inputs(self) -> list[Tensor]:
        """Hidden rows, weight and bias in the dtype; the padding rows hold NaN, which nothing may read."""
        weight, bias = (
            self.shard.slice(table, fill=torch.nan).to(self.dtype).requires_grad_() for table in (self.table, self.bias)
        )
        return [self.hidden.clone().requires_grad_(), weight, bias]

    def whole(self) -> list[Tensor]:
        """The same in float64, without padding."""
        return [one.detach().double().requires_grad_() for one in (self.hidden, self.table, self.bias)]

    def oracle(self, whole: list[Tensor], reduction: str) -> Tensor:
        hidden, table, bias = whole
        return reference.linear_cross_entropy(hidden, table, self.target, bias=bias, reduction=reduction)

    def _wrong_gradients(self, inputs: list[Tensor], whole: list[Tensor]) -> float:
        hidden, weight, bias = (gradient(one) for one in inputs)
        want = [gradient(one) for one in whole]
        return max(
            relative(hidden, want[0]),
            relative(weight, self.shard.slice(want[1])),
            relative(bias, self.shard.slice(want[2])),
        )
