"""The chunk loop of everything that is fused with the projection: three GEMMs a chunk, no `[T, v]` tensor.

    Z = H Wᵀ                       then the statistics' exchange, in flight during
    A = exp(Z - m) W               then dH and its reduction, in flight during
    dW += exp(Z - m)ᵀ (alpha H)    and the next chunks

A shard's ids are one range, or several *leaves* (see `invariant`), each with GEMMs and statistics of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange
from vocab_parallel.arguments import target_found
from vocab_parallel.loss.gradients import RangeGradients, logits_gradient
from vocab_parallel.loss.invariant import aligned
from vocab_parallel.loss.normalizer import LocalStatistics, Normalizer, Wanted, merge, require_finite, statistics
from vocab_parallel.loss.objective import Coefficients, Objective, require_distribution
from vocab_parallel.loss.options import Scores
from vocab_parallel.loss.outputs import RowOutputs
from vocab_parallel.loss.rows import RowPlan, row_numbers
from vocab_parallel.loss.targets import Targets, soft_statistics
from vocab_parallel.loss.tree import tree_sum
from vocab_parallel.shard import VocabShard


@dataclass(frozen=True)
class Soft:
    """A target distribution, this shard's columns."""

    target: Tensor  # [T, shard_size]
    is_log: bool


class IdRange:
    """A range of a head's ids, its rows of the head, and the buffer that holds one chunk's logits of it.

    Args:
        ids: Global ids; may be empty.
        at: The first id's row in this rank's storage.
        target: Ids `[T]`, or None with a soft target.
        leaf: Its bits must not depend on where it begins.
    """

    def __init__(
        self, ids: range, at: int, weight: Tensor, bias: Tensor | None, rows: int, targets: Targets, soft: Soft | None,
        leaf: bool,
    ) -> None:  # fmt: skip
        self.storage = slice(at, at + len(ids))
        self.weight = aligned(weight[self.storage]) if leaf else weight[self.storage]
        self.bias = None if bias is None else bias[self.storage]
        self.targets = targets
        self._soft = soft
        # Rows that start at multiples of 64 elements let a GPU load and store 16 bytes at a time.
        width = -(-len(ids) // 64) * 64 if weight.is_cuda else len(ids)
        self._buffer = weight.new_empty(rows, width)[:, : len(ids)]

    def project(self, hidden: Tensor) -> Tensor:
        """Raw logits `[C, n]` of `hidden` `[C, D]`, in the buffer."""
        logits = self._buffer[: len(hidden)]
        if self.bias is None:
            return torch.mm(hidden, self.weight.T, out=logits)
        return torch.addmm(self.bias, hidden, self.weight.T, out=logits)

    def soft(self, index: slice | Tensor) -> Soft | None:
        """The rows `index` of the soft target."""
        return None if self._soft is None else Soft(self._soft.target[index, self.storage], self._soft.is_log)


class Head:
    """One call, prepared: the plan of its rows and the ranges of its ids.

    Args:
        ids: The ranges of all ranks, in order; the same number on each.
        target: Ids `[T]` of all rows of the group. With a soft target 0, and nobody owns it.
        soft: The soft target of all rows, or None.
        every_row: Values of ignored rows matter too.
        leaves: The ranges are leaves.
        words: What all ranks must have been asked to do.
        checksum: Of what must be the same on every rank.
    """

    def __init__(
        self, plan: RowPlan, weight: Tensor, bias: Tensor | None, *, target: Tensor, soft: Soft | None,
        shard: VocabShard, ids: Sequence[range], scores: Scores, ignore_index: int, words: str,
        checksum: Tensor | int = 0, outputs: RowOutputs | None = None, every_row: bool = False, leaves: bool = False,
        opens: bool = True,
    ) -> None:  # fmt: skip
        self.plan, self.shard, self.scores = plan, shard, scores
        self._ids, self._words, self._checksum, self._outputs = ids, words, checksum, outputs
        self._every_row, self._opens, self._ignore_index = every_row or outputs is not None, opens, ignore_index
        self._fault: Exception | None = None
        mine = len(ids) // shard.tp_size
        rows = max(len(row_numbers(chunk)) for chunk in plan.chunks)
        self.ranges = []
        for some in ids[shard.rank * mine : (shard.rank + 1) * mine]:
            owned = range(0) if soft is not None else some
            targets = Targets(target, owned.start, owned.stop, ignore_index)
            at = max(some.start - shard.start, 0)
            self.ranges.append(IdRange(some, at, weight, bias, rows, targets, soft, leaves))
        if outputs is not None:
            outputs.begin()

    @property
    def targets(self) -> Targets:
        """Of all rows; what is owned depends on the range, the rest does not."""
        return self.ranges[0].targets

    def forward(
        self, chunk: int, objective: Objective, gradients: Sequence[RangeGradients] | None, scale: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Normalizer]:
        """One chunk: values and merged statistics, each `[C]`; its gradients go to `gradients` and the plan."""
        index = self.plan.chunks[chunk]
        targets = [some.targets.rows(index) for some in self.ranges]
        hidden = self._hidden(chunk, targets[0].valid)
        wanted = objective.wanted if self._outputs is None else objective.wanted.also(self._outputs.wanted)
        # The softcap's slope would have to be in the exponentials too; dense is exact where the slope nearly vanishes.
        in_place = gradients is not None and not objective.dense and self.scores.softcap is None
        logits = [some.project(hidden) for some in self.ranges]
        payload, local = self._statistics(index, logits, targets, wanted, in_place)
        exchange = self._exchange(chunk, payload, objective.foreign)
        products = None
        if in_place and gradients is not None:
            products = [some.start(z, t) for some, z, t in zip(gradients, logits, targets, strict=True)]
        gathered = exchange.wait().flatten(0, 1)
        normalizer = merge(gathered, wanted, self._ids)
        require_finite(self.shard, normalizer, gathered, targets[0].valid, row_numbers(index))
        require_distribution(self.shard, normalizer, objective, index, row_numbers(index))
        upstream = None if gradients is None else (targets[0].valid.to(normalizer.maximum.dtype),)
        values, coefficients = self._evaluate(objective, normalizer, targets[0], index, upstream)
        if self._outputs is not None:
            self._outputs.collect(normalizer, targets[0])
        if gradients is not None and coefficients is not None and scale is not None:
            if products is None:
                self._add_dense(chunk, hidden, logits, targets, normalizer, coefficients, gradients, scale)
            else:
                maxima = [some.maximum for some in local]
                self._add(chunk, hidden, logits, targets, maxima, products, normalizer, coefficients, gradients, scale)
        return values, normalizer

    def finish(self, objective: Objective) -> None:
        """After the last chunk: where the objective is a caller's code, the ranks compare how it went."""
        if objective.foreign:
            Exchange(
                self.shard, "header", self._words, fault=self._fault, opens=False, may_fail=True,
                device=self.targets.ids.device,
            ).wait()  # fmt: skip

    def backward(
        self, chunk: int, normalizer: Normalizer, coefficients: Coefficients, gradients: Sequence[RangeGradients]
    ) -> None:
        """One chunk again, now that the rows' upstream gradients are known and in `coefficients`."""
        index = self.plan.chunks[chunk]
        targets = [some.targets.rows(index) for some in self.ranges]
        # Rows without a gradient may hold NaN, and a zero coefficient would not keep it out of dW.
        hidden = self.plan.hidden(chunk).masked_fill(~coefficients.active[:, None], 0.0)
        logits = [some.project(hidden) for some in self.ranges]
        scale = torch.ones_like(normalizer.maximum[:1].sum())
        self._add_dense(chunk, hidden, logits, targets, normalizer, coefficients, gradients, scale)

    def _exchange(self, chunk: int, payload: Tensor, may_fail: bool) -> Exchange:
        """The first exchange of a call carries what a device found wrong with the targets, the later ones continue."""
        opens = chunk == 0 and self._opens
        found = target_found(self.targets.ids, self.shard, self._ignore_index) if chunk == 0 else None
        return Exchange(
            self.shard, "loss", self._words, payload=payload, fault=self._fault, checksum=self._checksum, found=found,
            opens=opens, may_fail=may_fail and not opens,
        )  # fmt: skip

    def _evaluate(
        self, objective: Objective, normalizer: Normalizer, targets: Targets, index: slice | Tensor,
        upstream: tuple[Tensor, ...] | None,
    ) -> tuple[tuple[Tensor, ...], Coefficients | None]:  # fmt: skip
        """`objective.evaluate`; an error of a caller's code waits for the next exchange, which takes it to all."""
        try:
            return objective.evaluate(normalizer, targets, index, upstream)
        except Exception as error:
            if not objective.foreign:
                raise
            self._fault = self._fault or error
            zeros = torch.zeros_like(normalizer.maximum)
            return (zeros,), Coefficients(zeros)

    def _hidden(self, chunk: int, valid: Tensor) -> Tensor:
        """The chunk's hidden states `[C, D]`, with what an ignored row may hold zeroed."""
        hidden = self.plan.hidden(chunk)
        keep = valid if not self._every_row else valid | hidden.isfinite().all(1)
        return hidden.masked_fill(~keep[:, None], 0.0)

    def _statistics(
        self, index: slice | Tensor, logits: list[Tensor], targets: list[Targets], wanted: Wanted, in_place: bool
    ) -> tuple[Tensor, list[LocalStatistics]]:
        """The payload `[ranges, k, C]` of the exchange."""
        packed, local = [], []
        for some, z, t in zip(self.ranges, logits, targets, strict=True):
            picked, soft, extra = t.pick(z, self.scores), some.soft(index), None
            if soft is None or in_place:
                found = statistics(z, scores=self.scores, wanted=wanted, in_place=in_place)
            else:
                found = statistics(z, scores=self.scores, wanted=wanted, in_place=False)
                extra = soft_statistics(z, found.maximum, found.sumexp, soft.target, self.scores, soft.is_log)
            if in_place and self._every_row:  # an ignored row that overflowed
                z.masked_fill_((found.maximum.isnan() | (found.maximum == torch.inf))[:, None], 0.0)
            local.append(found)
            packed.append(found.pack(picked, extra))
        return torch.stack(packed), local

    def _add(
        self, chunk: int, hidden: Tensor, exponentials: list[Tensor], targets: list[Targets], maxima: list[Tensor],
        products: list[Tensor | None], normalizer: Normalizer, coefficients: Coefficients,
        gradients: Sequence[RangeGradients], scale: Tensor,
    ) -> None:  # fmt: skip
        """Starts the chunk's dH on its way, then adds to dW and db while it travels."""
        rows = [
            some.unnormalised(maximum, normalizer, coefficients, t)
            for some, maximum, t in zip(gradients, maxima, targets, strict=True)
        ]
        combined = [
            some.combine(hidden, product, *row, t, scale)
            for some, product, row, t in zip(gradients, products, rows, targets, strict=True)
        ]
        partial = [grad for grad, _, _ in combined if grad is not None]
        if partial:
            self.plan.reduce(chunk, tree_sum(partial))
        for some, e, (_, factor, unit), row, t in zip(gradients, exponentials, combined, rows, targets, strict=True):
            some.add(hidden, e, factor, unit, *row, t)

    def _add_dense(
        self, chunk: int, hidden: Tensor, logits: list[Tensor], targets: list[Targets], normalizer: Normalizer,
        coefficients: Coefficients, gradients: Sequence[RangeGradients], scale: Tensor,
    ) -> None:  # fmt: skip
        """The same, of logits that are still raw."""
        index = self.plan.chunks[chunk]
        for some, z, t in zip(self.ranges, logits, targets, strict=True):
            soft = some.soft(index)
            q, is_log = (None, False) if soft is None else (soft.target, soft.is_log)
            logits_gradient(z, z, normalizer, coefficients, t, self.scores, q, is_log)
        products = [accumulator.product(z) for accumulator, z in zip(gradients, logits, strict=True)]
        # Scaled before they add: what a rank adds by itself, and what comes after, depends on the TP size.
        partial = [product.to(scale.dtype) * scale for product in products if product is not None]
        if partial:
            self.plan.reduce(chunk, tree_sum(partial))
        for accumulator, z in zip(gradients, logits, strict=True):
            accumulator.add_dense(hidden, z)
