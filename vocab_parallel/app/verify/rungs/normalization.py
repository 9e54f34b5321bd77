"""Rung 2: the loss of given logits, at its edges, on one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.comparing import backward, difference, gradient, relative, scaled, unequal
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.setting import IGNORE, Setting
from vocab_parallel.loss import cross_entropy
from vocab_parallel.shard import VocabShard

_ROWS = 16
_OFFSET = 1e4
_OPTIONS = "vocab_parallel/loss/options.py"


def checks(setting: Setting) -> Sequence[Check]:
    """On logits of a slice of the user's ids, which this rank holds alone, against the oracle on the same bits."""
    rows, limit = NormalizationRows(setting, setting.slice.alone), setting.tolerance
    made = [
        Check(f"{name}: loss and dZ", partial(rows.against_oracle, change), limit, "nats, of the largest entry")
        for name, change in EXTREMES.items()
    ]
    made += [
        Check(f"smoothing over {over}: loss and dZ", partial(rows.smoothing, over), limit, "nats, of the largest entry",
              _OPTIONS)
        for over in ("all", "others")
    ]  # fmt: skip
    return [
        *made,
        Check("adding 16 to every logit changes no bit", rows.translation, 0.0, "rows"),
        Check("dZ is P minus Q, and 0 in ignored rows", rows.p_minus_q, limit, "of the largest entry",
              "vocab_parallel/loss/gradients.py"),
        Check("mean is the sum over the number of valid rows", rows.mean_of_valid, limit, "nats", _OPTIONS),
        Check("of ignored rows only, loss and dZ are 0", rows.all_ignored, 0.0, "nats", _OPTIONS),
    ]  # fmt: skip


RUNG = Rung(
    "normalization",
    "The softmax is stable at any logits, does not change with an offset, and its gradient is P minus Q.",
    "vocab_parallel/loss/normalizer.py",
    checks,
)


def _offsets(logits: Tensor, target: Tensor) -> Tensor:
    """Every row at another offset, up to 1e4 either way."""
    return logits + torch.linspace(-_OFFSET, _OFFSET, len(logits), device=logits.device)[:, None].to(logits.dtype)


def _dominated(logits: Tensor, target: Tensor) -> Tensor:
    """One id is 1e4 above all others: the target itself in even rows, the id before it in odd ones."""
    changed, row = logits.clone(), torch.arange(len(logits), device=logits.device)
    changed[row, (target.clamp(min=0) - row % 2) % logits.shape[1]] = _OFFSET
    return changed


def _masked(logits: Tensor, target: Tensor) -> Tensor:
    """Most columns are -inf, in whole stretches, and never the target's."""
    changed, row = logits.clone(), torch.arange(len(logits), device=logits.device)
    columns = torch.arange(logits.shape[1], device=logits.device)
    changed[(columns * 4 // logits.shape[1])[None] != row[:, None] % 4] = -torch.inf
    changed[row, target.clamp(min=0)] = 0.5
    return changed


EXTREMES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logits at offsets of 1e4": _offsets,
    "one logit 1e4 above all others": _dominated,
    "columns of -inf": _masked,
}


class NormalizationRows:
    """Logits and targets of a small vocabulary, whole on every rank, and the part of a shard.

    Args:
        shard: over this rank alone, or over all.
    """

    def __init__(self, setting: Setting, shard: VocabShard) -> None:
        self.shard, self.dtype, size = shard, setting.dtype, shard.vocab_size
        logits = 2.0 * setting.normal("normalization", _ROWS, size)
        self.logits = logits.to(setting.dtype)
        # Quarters within 8 of 0 stay exact in every dtype when 16 is added.
        self.quarters = (logits * 4).round().clamp(-32, 32).div(4).to(setting.dtype)
        target = torch.randint(size, (_ROWS,), generator=setting.draws("normalization targets"))
        target[0], target[1] = 0, size - 1
        target[3::5] = IGNORE
        self.target = target.to(setting.device)

    def local(self, whole: Tensor) -> Tensor:
        """This shard's columns; padding columns hold NaN, which nothing may read."""
        return self.shard.slice(whole, dim=-1, fill=torch.nan).requires_grad_()

    def loss(self, local: Tensor, **options: Any) -> Tensor:
        """`cross_entropy` of the rows."""
        return cross_entropy(local, self.target, shard=self.shard, **options)

    def against_oracle(self, change: Callable[[Tensor, Tensor], Tensor], **options: Any) -> float:
        whole = change(self.logits, self.target)
        local, wide = self.local(whole), whole.detach().double().requires_grad_()
        got = self.loss(local, reduction="none", **options)
        want = reference.cross_entropy(wide, self.target, reduction="none", **options)
        backward(got)
        backward(want)
        return max(scaled(got, want), self._wrong_gradient(local, gradient(wide)))

    def smoothing(self, over: str) -> float:
        """PyTorch's own loss is a second oracle of "all"."""
        worst = self.against_oracle(lambda logits, target: logits, label_smoothing=0.1, smoothing_over=over)
        if over == "all":
            want = F.cross_entropy(self.logits.double(), self.target, label_smoothing=0.1, reduction="none")
            options: dict[str, Any] = {"label_smoothing": 0.1, "reduction": "none"}
            worst = max(worst, scaled(self.loss(self.local(self.logits), **options), want))
        return worst

    def translation(self) -> float:
        first = self.loss(self.local(self.quarters), reduction="none")
        moved = self.loss(self.local(self.quarters + 16.0), reduction="none")
        return unequal(moved, first)

    def p_minus_q(self) -> float:
        local = self.local(self.logits)
        backward(self.loss(local, reduction="sum"))
        q, valid = reference.target_distribution(self.target, self.shard.vocab_size, IGNORE)
        return self._wrong_gradient(local, torch.where(valid[:, None], self.logits.double().softmax(-1) - q, 0.0))

    def mean_of_valid(self) -> float:
        """With ignored rows spread unevenly; against PyTorch's mean too."""
        local = self.local(self.logits)
        mean, total = (self.loss(local, reduction=reduction) for reduction in ("mean", "sum"))
        wide = self.logits.double()
        count = int((self.target != IGNORE).sum())
        want = F.cross_entropy(wide, self.target)
        return max(difference(mean, want), difference(total / count, want))

    def all_ignored(self) -> float:
        local = self.local(self.logits)
        loss = cross_entropy(local, torch.full_like(self.target, IGNORE), shard=self.shard)
        backward(loss)
        return float(loss.detach().abs()) + float(gradient(local).abs().max())

    def _wrong_gradient(self, local: Tensor, want: Tensor) -> float:
        """Against the whole gradient's columns of this shard; a gradient of padding is wrong."""
        return relative(gradient(local), self.shard.slice(want, dim=-1))
