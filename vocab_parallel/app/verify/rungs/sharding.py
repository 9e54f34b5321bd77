"""Rung 5: the user's head over the user's ranks, at its real size, against one that is whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.comparing import SMALL, apart, backward, difference, gradient, relative, scaled, unequal
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.rungs.normalization import EXTREMES, NormalizationRows
from vocab_parallel.app.verify.setting import IGNORE, ROWS, Setting
from vocab_parallel.embedding import sequence_rows, vocab_parallel_embedding
from vocab_parallel.layout import VocabLayout
from vocab_parallel.loss import cross_entropy, linear_cross_entropy, token_logprobs
from vocab_parallel.loss.invariant import LEAVES
from vocab_parallel.shard import VocabShard

_CHUNK = 7
_LOSS, _OWNER = "nats, of the largest entry", "vocab_parallel/loss/targets.py"
_EMBEDDING, _SHARE = "vocab_parallel/embedding.py", "of the largest entry"
_INVARIANT = "vocab_parallel/loss/invariant.py"
_ROWS_MODULE, _TRAFFIC = "vocab_parallel/loss/rows.py", "vocab_parallel/collectives.py"


def checks(setting: Setting) -> Sequence[Check]:
    """At the real V, D and TP; what needs other ids, on a slice over the ranks, and on one with an empty shard."""
    real, limit = RealHead(setting, setting.hidden, setting.target), setting.tolerance
    small, uneven = (_Over(setting, shard) for shard in (setting.slice.shard, _with_empty_shard(setting)))
    made = [
        Check("lookup over the ranks gives the owner's bits", real.lookup, 0.0, "entries", _EMBEDDING),
        Check("every shard's first and last id as a target", real.edges, limit, "nats", _OWNER),
        Check("dZ of these is P, less 1 in the owner's column alone", real.owners, limit, _SHARE, _OWNER),
        Check("loss of each row", partial(real.part, 0), limit, "nats"),
        Check("dH", partial(real.part, 1), limit, _SHARE, _ROWS_MODULE),
        Check("this rank's dW and db, padding rows 0", partial(real.part, 2), limit, _SHARE,
              "vocab_parallel/loss/gradients.py"),
        Check("loss and dH have the same bits on every rank", real.replicated, 0.0, "entries", _ROWS_MODULE),
        Check("mean, in chunks", real.mean, limit, "nats", "vocab_parallel/loss/fused.py"),
        Check("rows of the sequence on their own ranks: loss, dH", real.sequence_parallel, limit, _LOSS, _ROWS_MODULE),
    ]  # fmt: skip
    for options in ({"label_smoothing": 0.1}, {"label_smoothing": 0.1, "smoothing_over": "others"},
                    {"z_loss": 1e-3, "softcap": 5.0, "temperature": 0.7}):  # fmt: skip
        name = ", ".join(f"{key}={value}" for key, value in options.items())
        made.append(Check(f"{name}: loss, dH, dW", partial(small.fused, **options), limit, _LOSS,
                          "vocab_parallel/loss/objective.py"))  # fmt: skip
    made += [
        Check(f"{name}: loss and dZ over the ranks", partial(small.extremes.against_oracle, change), limit, _LOSS,
              "vocab_parallel/loss/normalizer.py")
        for name, change in EXTREMES.items()
    ]  # fmt: skip
    made.append(Check(f"{uneven.shard.vocab_size} ids, the last shard empty: loss, dH, dW", uneven.fused, limit, _LOSS))
    if LEAVES % setting.shard.tp_size == 0:
        leaves = _Over(setting, _in_leaves(setting))
        made += [
            Check("tp_invariant: loss, dH, dW", partial(leaves.fused, tp_invariant=True), limit, _LOSS, _INVARIANT),
            Check("tp_invariant has the bits of one rank alone", leaves.invariant, 0.0, "entries", _INVARIANT),
        ]
    made.append(Check("calls and bytes are those documented", small.traffic, 0.0, "bytes", _TRAFFIC))
    return made


RUNG = Rung(
    "distributed loss",
    "Over the ranks the loss and every gradient are those of the whole head, and replicated values have the same bits.",
    "vocab_parallel/loss/engine.py",
    checks,
)


class RealHead:
    """The head at its real size. The oracle holds whole logits of few rows, and the table block by block.

    Args:
        hidden: ``[T, D]`` in the setting's dtype, the same on every rank that shares the vocabulary.
        target: int64 ``[T]``.
    """

    def __init__(self, setting: Setting, hidden: Tensor, target: Tensor) -> None:
        self.setting, self.shard, self.hidden, self.target = setting, setting.shard, hidden, target

    @functools.cached_property
    def exact(self) -> Tensor:
        """`Setting.exact` of the rows."""
        return self.setting.exact(self.hidden)

    def lookup(self) -> float:
        ids, wrong = self.target.clamp(min=0), 0.0
        got = vocab_parallel_embedding(ids, self.setting.weight, shard=self.shard)
        for block, rows, _ in self.setting.blocks():
            mine = (ids >= block.start) & (ids < block.stop)
            wrong += unequal(got[mine], rows[ids[mine] - block.start].to(got.dtype))
        return wrong

    def edges(self) -> float:
        """All of them, `ROWS` at a time."""
        worst, every = 0.0, torch.tensor(self.setting.edges, device=self.setting.device)
        for ids in torch.split(every, ROWS):
            logits, exact = self.setting.logits[: len(ids)], self.exact[: len(ids)]
            want = exact.gather(1, ids[:, None])[:, 0] - exact.logsumexp(1)
            got = token_logprobs(logits, ids, shard=self.shard).logprob
            worst = max(worst, scaled(got, want))
        return worst

    def owners(self) -> float:
        worst, every = 0.0, torch.tensor(self.setting.edges, device=self.setting.device)
        for ids in torch.split(every, ROWS):
            local = self.setting.logits[: len(ids)].clone().requires_grad_()
            backward(cross_entropy(local, ids, shard=self.shard, reduction="sum"))
            want = self.exact[: len(ids)].softmax(1)
            want[torch.arange(len(ids)), ids] -= 1.0
            worst = max(worst, relative(gradient(local), self.shard.slice(want, dim=-1)))
        return worst

    @functools.cached_property
    def whole(self) -> tuple[Tensor, Tensor]:
        """The oracle's loss of each row, and the gradient of their sum with respect to the logits, ``[T, V]``."""
        logits = self.exact.clone().requires_grad_()
        rows = reference.cross_entropy(logits, self.target, reduction="none")
        backward(rows)
        return rows.detach(), gradient(logits)

    @functools.cached_property
    def sharded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same of the package: loss of each row, dH, dW and db of the sum."""
        hidden, weight, bias = self.inputs()
        rows = self.loss(hidden, weight, bias, reduction="none")
        backward(self.loss(hidden, weight, bias, reduction="sum", chunk_size=_CHUNK))
        return rows.detach(), gradient(hidden), gradient(weight), gradient(bias)

    @functools.cached_property
    def hidden_gradient(self) -> Tensor:
        """The oracle's dH ``[T, D]`` of the sum."""
        total = torch.zeros_like(self.hidden, dtype=torch.float64)
        for ids, rows, _ in self.setting.blocks():
            total += self.whole[1][:, ids] @ rows
        return total

    def part(self, which: int) -> float:
        """Of the loss (0), dH (1), or dW and db (2)."""
        rows, of_hidden, of_weight, of_bias = self.sharded
        if which == 0:
            return scaled(rows, self.whole[0])
        if which == 1:
            return relative(of_hidden, self.hidden_gradient)
        own = self.shard.slice(self.whole[1], dim=-1)
        return max(self._wrong_weight_gradient(of_weight, own), relative(of_bias, own.sum(0)))

    def _wrong_weight_gradient(self, got: Tensor, own: Tensor) -> float:
        """`relative` of dW, a block of rows at a time: the oracle's, in float64, may be large."""
        hidden, differs, largest, step = self.hidden.double(), 0.0, 0.0, self.setting.block_rows
        for rows, columns in zip(torch.split(got, step), torch.split(own, step, 1), strict=True):
            want = columns.T @ hidden
            differs, largest = max(differs, difference(rows, want)), max(largest, float(want.abs().max()))
        return differs / max(largest, SMALL) if differs < math.inf else differs  # no NaN, which a `max` may lose

    def replicated(self) -> float:
        rows, of_hidden = self.sharded[:2]
        return apart(self.shard, rows) + apart(self.shard, of_hidden)

    def mean(self) -> float:
        with torch.no_grad():
            got = self.loss(*self.inputs(), chunk_size=_CHUNK)
        return scaled(got, self.whole[0].sum() / int((self.target != IGNORE).sum()))

    def sequence_parallel(self) -> float:
        hidden, weight, bias = self.inputs()
        counts = sequence_rows(len(hidden), self.shard.tp_size)
        first = sum(counts[: self.shard.rank])
        own = slice(first, first + counts[self.shard.rank])
        mine = hidden.detach()[own].requires_grad_()
        loss = linear_cross_entropy(
            mine, weight, self.target[own], shard=self.shard, linear_bias=bias, reduction="sum",
            sequence_parallel=True,
        )  # fmt: skip
        backward(loss)
        return max(scaled(loss, self.whole[0].sum()), relative(gradient(mine), self.hidden_gradient[own]))

    def loss(self, hidden: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
        return linear_cross_entropy(hidden, weight, self.target, shard=self.shard, linear_bias=bias, **options)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows, weight and bias (zero if the head has none); padding rows hold NaN, which nothing may read."""
        weight = self.setting.weight.clone()
        bias = torch.zeros_like(weight[:, 0]) if self.setting.bias is None else self.setting.bias.clone()
        weight[self.shard.num_valid :], bias[self.shard.num_valid :] = torch.nan, torch.nan
        return self.hidden.clone().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


class _Over:
    """A slice of the head over the ranks."""

    def __init__(self, setting: Setting, shard: VocabShard) -> None:
        self.setting, self.shard, self.hidden = setting, shard, setting.hidden
        size = shard.vocab_size
        self.table, self.bias = setting.slice.table[:size], setting.slice.bias[:size]
        target = torch.randint(size, (ROWS,), generator=setting.draws("over the ranks"))
        target[4::5] = IGNORE
        self.target = target.to(setting.device)

    @functools.cached_property
    def extremes(self) -> NormalizationRows:
        """Logits at their edges."""
        return NormalizationRows(self.setting, self.shard)

    def fused(self, **options: Any) -> float:
        inputs = self.inputs(self.shard)
        whole = [one.detach().double().requires_grad_() for one in (self.hidden, self.table, self.bias)]
        got = self.loss(self.shard, inputs, chunk_size=_CHUNK, **options)
        options.pop("tp_invariant", None)
        want = reference.linear_cross_entropy(whole[0], whole[1], self.target, bias=whole[2], **options)
        backward(got)
        backward(want)
        of_hidden, of_weight, of_bias = (gradient(one) for one in whole)
        return max(
            scaled(got, want), relative(gradient(inputs[0]), of_hidden),
            relative(gradient(inputs[1]), self.shard.slice(of_weight)),
            relative(gradient(inputs[2]), self.shard.slice(of_bias)), apart(self.shard, got[None]),
        )  # fmt: skip

    def invariant(self) -> float:
        """Of a shard in leaves: the same padded size on one rank and on all."""
        alone, spread, found = self.setting.slice.alone, self.shard, []
        for shard in (spread, alone):
            inputs = self.inputs(shard)
            loss = self.loss(shard, inputs, tp_invariant=True, chunk_size=_CHUNK)
            backward(loss)
            found.append([loss.detach()[None], *(gradient(one) for one in inputs)])
        (loss, of_hidden, of_weight, of_bias), want = found
        real = slice(spread.num_valid)
        own = [spread.slice(one[: alone.vocab_size])[real] for one in want[2:]]
        pairs = [(loss, want[0]), (of_hidden, want[1]), (of_weight[real], own[0]), (of_bias[real], own[1])]
        return sum(unequal(got, one) for got, one in pairs)

    def traffic(self) -> float:
        """Bytes (and calls) of one fused loss that differ from its documentation.

        A payload's size is that of the largest of the last 8, so that a few calls go before.
        """
        shard, hidden, sent = self.shard, self.hidden, self.shard.traffic
        lengths = [min(_CHUNK, ROWS - at) for at in range(0, ROWS, _CHUNK)]
        for _ in range(3):  # of a few exchanges each
            sent.reset()
            self.loss(shard, self.inputs(shard), chunk_size=_CHUNK)
        others, word = shard.tp_size - 1, torch.promote_types(hidden.dtype, torch.float32).itemsize
        if not others:
            return float(sent.total_calls)
        want = {
            "all_gather": len(lengths) * (64 + 3 * word * _CHUNK) * others,
            "all_reduce": sum(2 * rows * hidden[0].nbytes * others // shard.tp_size for rows in lengths),
        }
        differs = sum(abs(sent.bytes[name] - count) for name, count in want.items())
        calls = sum(abs(sent.calls[name] - len(lengths)) for name in want) + abs(sent.total_calls - 2 * len(lengths))
        return float(differs + calls)

    def loss(self, shard: VocabShard, inputs: list[Tensor], **options: Any) -> Tensor:
        hidden, weight, bias = inputs
        return linear_cross_entropy(hidden, weight, self.target, shard=shard, linear_bias=bias, **options)

    def inputs(self, shard: VocabShard) -> list[Tensor]:
        """Hidden rows, weight and bias; padding rows hold NaN, which nothing may read."""
        cast: Callable[[Tensor], Tensor] = lambda table: table.to(self.setting.dtype)  # noqa: E731
        local = [shard.slice(cast(table), fill=torch.nan).requires_grad_() for table in (self.table, self.bias)]
        return [self.hidden.clone().requires_grad_(), *local]


def _with_empty_shard(setting: Setting) -> VocabShard:
    """Three ids for each rank but the last, whose shard is all padding."""
    shard = setting.slice.shard
    size = min(3 * max(1, shard.tp_size - 1), shard.vocab_size)
    return VocabShard(VocabLayout.from_padded(size, 3 * shard.tp_size, shard.tp_size), shard.group)


def _in_leaves(setting: Setting) -> VocabShard:
    """The slice over the ranks, padded as it is on one alone."""
    alone, shard = setting.slice.alone, setting.slice.shard
    return VocabShard(VocabLayout.from_padded(alone.vocab_size, alone.layout.padded_size, shard.tp_size), shard.group)
