"""Rung 1: the head as an affine map, and the lookup, on one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.comparing import backward, gradient, relative, scaled, unequal
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.embedding import vocab_parallel_embedding
from vocab_parallel.head import VocabParallelLMHead

_ROWS = 5
_STEP = 1e-4  # of the finite differences
_FINITE = 1e-7  # their limit: central differences of a square have no error but rounding's
_EMBEDDING = "vocab_parallel/embedding.py"


def checks(setting: Setting) -> Sequence[Check]:
    """On a slice of the user's rows, which this rank holds alone; in the setting's dtype, and in float64."""
    tiny, limit = _Tiny(setting), setting.tolerance
    return [
        Check("logits are H W^T + b", tiny.logits, limit, "of the largest entry"),
        Check("one row's logits, selected before the projection", tiny.selected, limit, "of the largest entry"),
        Check("dH, dW and db of the logits", tiny.gradients, limit, "of the largest entry"),
        Check("dH, dW and db against finite differences in float64", tiny.finite_differences, _FINITE, "relative"),
        Check("lookup gives the table's own bits", tiny.lookup, 0.0, "entries", _EMBEDDING),
        Check(
            "lookup's gradient adds up repeated ids", tiny.lookup_gradient, limit, "of the largest entry", _EMBEDDING
        ),
    ]


RUNG = Rung(
    "head unit",
    "The head is one affine map of hidden rows and the lookup one row of the table, with their exact derivatives.",
    "vocab_parallel/head.py",
    checks,
)


class _Tiny:
    """A slice of the head on this rank alone, beside the oracle's copy of it in float64."""

    def __init__(self, setting: Setting) -> None:
        self.cut, self.dtype, self.device = setting.slice, setting.dtype, setting.device
        self.hidden = setting.hidden[:_ROWS]
        self.size = self.cut.alone.vocab_size
        self.slope = setting.normal("head unit", _ROWS, self.size).double()
        ids = torch.randint(self.size, (4 * _ROWS,), generator=setting.draws("lookup"))
        self.ids = torch.cat([ids, ids[:_ROWS], torch.tensor([0, self.size - 1])]).to(self.device)

    def head(self, dtype: torch.dtype) -> VocabParallelLMHead:
        """The slice as a module."""
        made = VocabParallelLMHead(
            self.cut.table.shape[1], shard=self.cut.alone, bias=True, device=self.device, dtype=dtype
        )
        assert made.bias is not None
        with torch.no_grad():
            made.weight.copy_(self.cut.alone.slice(self.cut.table))
            made.bias.copy_(self.cut.alone.slice(self.cut.bias))
        return made

    def logits(self) -> float:
        return scaled(self.head(self.dtype).logits(self.hidden)[:, : self.size], self.whole()[0])

    def selected(self) -> float:
        got = self.head(self.dtype).logits(self.hidden[None], rows=-1)[:, : self.size]
        return scaled(got, self.whole()[0][-1:])

    def gradients(self) -> float:
        head, hidden = self.head(self.dtype), self.hidden.clone().requires_grad_()
        backward(head.logits(hidden)[:, : self.size] * self.slope.to(self.dtype))
        want, inputs = self.whole()
        backward(want * self.slope.to(self.dtype).double())
        assert head.bias is not None
        got = (hidden.grad, gradient(head.weight)[: self.size], gradient(head.bias)[: self.size])
        return max(relative(mine, gradient(whole)) for mine, whole in zip(got, inputs, strict=True))

    def finite_differences(self) -> float:
        """Each argument is moved along one random direction; the logits' weighted squares are the value."""
        head, hidden = self.head(torch.float64), self.hidden.to(torch.float64, copy=True).requires_grad_()

        def value() -> Tensor:
            return (head.logits(hidden)[:, : self.size].square() * self.slope).sum()

        backward(value())
        wrong = []
        for one in (hidden, head.weight, head.bias):
            assert one is not None
            direction = torch.randn(one.shape, generator=torch.Generator().manual_seed(one.dim())).to(one)
            slope = float((gradient(one) * direction).sum())
            with torch.no_grad():
                above = value_at(one, direction, _STEP, value)
                below = value_at(one, direction, -_STEP, value)
            wrong.append(abs((above - below) / (2 * _STEP) - slope) / max(1.0, abs(slope)))
        return float(torch.tensor(wrong).max())  # which keeps a NaN

    def lookup(self) -> float:
        table = self.cut.table.to(self.dtype)
        got = vocab_parallel_embedding(self.ids, self.cut.alone.slice(table), shard=self.cut.alone)
        return unequal(got, table[self.ids])

    def lookup_gradient(self) -> float:
        weight = self.cut.alone.slice(self.cut.table.to(self.dtype)).requires_grad_()
        whole = self.cut.table.clone().requires_grad_()
        backward(vocab_parallel_embedding(self.ids, weight, shard=self.cut.alone).square())
        backward(reference.embedding(self.ids, whole).square())
        return relative(gradient(weight)[: self.size], gradient(whole))

    def whole(self) -> tuple[Tensor, list[Tensor]]:
        """The oracle's logits in float64, and its hidden rows, table and bias."""
        inputs = [one.detach().double().requires_grad_() for one in (self.hidden, self.cut.table, self.cut.bias)]
        return reference.logits(*inputs), inputs


def value_at(one: Tensor, direction: Tensor, step: float, value: Callable[[], Tensor]) -> float:
    """`value` with `one` moved by `step` along `direction`, and moved back."""
    before = one.detach().clone()
    one.add_(direction, alpha=step)
    found = float(value())
    one.copy_(before)
    return found
