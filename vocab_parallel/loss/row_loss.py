"""A caller's loss of each row's log-probability and entropy, in three GEMMs: policy-gradient objectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel.collectives import apply, uncompiled
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.loss.fused import PerRow, Reduced
from vocab_parallel.loss.linear import prepare
from vocab_parallel.loss.normalizer import Normalizer, Wanted
from vocab_parallel.loss.objective import Coefficients
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.outputs import RowOutputs
from vocab_parallel.loss.targets import Targets
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import VocabShard


class RowStatistics(NamedTuple):
    """What a row loss is made from: `[C]` each, in nats, float32 (float64 for float64), the same bits on every rank.

    Attributes:
        logprob: `log p_target`; 0 for ignored rows.
        entropy: `- sum p log p`; None with `entropy=False`.
        lse: `log sum exp z`.
    """

    logprob: Tensor
    entropy: Tensor | None
    lse: Tensor


@uncompiled
def linear_row_loss(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [shard_size, D]
    target: Tensor,  # [...]
    fn: Callable[..., Tensor],
    *row_data: Tensor,  # [..., *] each, rows as in target
    shard: VocabShard,
    linear_bias: Tensor | None = None,  # [shard_size]
    reduction: str = "mean",
    ignore_index: int = -100,
    entropy: bool = True,
    temperature: float = 1.0,
    softcap: float | None = None,
    mean_group: dist.ProcessGroup | None = None,
    outputs: RowOutputs | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
) -> Tensor:
    """The loss `fn(RowStatistics, *row_data)` of each row, applied between a chunk's statistics and its gradient GEMMs.

    For PPO, with the old log-probabilities and the advantages as row data::

        def ppo(rows, old_logprob, advantage):
            ratio = (rows.logprob - old_logprob).exp()
            clipped = ratio.clamp(0.8, 1.2)
            return -torch.minimum(ratio * advantage, clipped * advantage) - 0.01 * rows.entropy

        loss = linear_row_loss(hidden, weight, actions, ppo, old_logprob, advantage, shard=shard)

    Args:
        fn: Gets the statistics and the row data of some rows, flat: `[C]` and `[C, *]`; returns `[C]`. A row's loss may
            depend on that row only. It must be differentiable and compute the same on every rank and every time: no
            random numbers. With "none" it is called for the same rows again in backward.
        row_data: Tensors that need no gradient, the same on every rank; with `sequence_parallel` as `target`.
        reduction: "mean" over the valid rows, "sum", or "none" (4 GEMMs).
        entropy: Whether `fn` reads the entropy. False keeps the exchange at 12 bytes a row, and hidden behind a GEMM.

    The other arguments, memory and errors: as in `linear_cross_entropy`.

    Collectives:
        As `linear_cross_entropy`, with 16 bytes a row; and one more of 64 bytes at the end, so that an error that `fn`
        raises on one rank is raised on every rank.

    Returns:
        float32 (float64 for float64 input), in the unit of `fn`.
    """
    options = LossOptions(reduction, ignore_index, scores=Scores(softcap, temperature))
    name = f"linear_row_loss({options}, entropy={entropy}, {len(row_data)} row data)"
    trained = torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in (input, linear_weight, linear_bias)
    )
    with WideMean(shard, mean_group, name) as wide:
        input, weight, bias, call = prepare(
            name, lambda data: _RowLoss(fn, data, entropy, trained), input, linear_weight, linear_bias, target, shard,
            options, wide, row_data=row_data, outputs=outputs, sequence_parallel=sequence_parallel,
            chunk_size=chunk_size, memory_budget=memory_budget,
        )  # fmt: skip
        if reduction == "none":
            values: Any = apply(PerRow, input, weight, bias, call)
            return values[0]  # type: ignore[no-any-return]
        return apply(Reduced, input, weight, bias, call, options)


@dataclass(frozen=True)
class _RowLoss:
    """The objective of `linear_row_loss`: the chain rule through `fn` gives the coefficients.

    Attributes:
        trained: A gradient is wanted, now or in backward. Then `fn` is differentiated in forward in any case: there the
            ranks tell each other of an error, while in backward one that raises would leave the others waiting.
    """

    fn: Callable[..., Tensor]
    row_data: tuple[Tensor, ...]
    needs_entropy: bool
    trained: bool
    foreign = True

    @property
    def wanted(self) -> Wanted:
        return Wanted(expected=self.needs_entropy)

    @property
    def dense(self) -> bool:
        return self.needs_entropy

    def evaluate(
        self, normalizer: Normalizer, targets: Targets, index: slice | Tensor, upstream: tuple[Tensor, ...] | None
    ) -> tuple[tuple[Tensor, ...], Coefficients | None]:
        logprob = torch.where(targets.valid, normalizer.target_logprob, 0.0)
        found = [logprob, normalizer.lse, *((normalizer.entropy,) if self.needs_entropy else ())]
        # What autograd keeps of `fn` is for right here. A checkpoint around the loss would take it for the loss's own.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            leaves = [row.detach().requires_grad_(upstream is not None or self.trained) for row in found]
            logprob, lse, entropy = (*leaves, None)[:3]
            rows: object = self.fn(RowStatistics(logprob, entropy, lse), *(data[index] for data in self.row_data))
            if not isinstance(rows, Tensor) or rows.shape != logprob.shape:
                got = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise LayoutMismatchError(f"the row loss must return one number a row {list(logprob.shape)}, got {got}")
        values = (torch.where(targets.valid, rows.detach().to(found[0].dtype), 0.0),)
        given: list[Tensor | None] = [None] * len(leaves)
        if rows.requires_grad:
            of_rows = targets.valid if upstream is None else upstream[0]
            given = list(torch.autograd.grad(rows, leaves, of_rows.to(rows.dtype), allow_unused=True))
        if upstream is None:
            return values, None
        of_logprob, of_lse, of_entropy = (
            torch.zeros_like(found[0]) if grad is None else torch.where(targets.valid, grad, 0.0)
            for grad in (*given, None)[:3]
        )
        return values, Coefficients(
            of_lse - of_logprob, target=-of_logprob, entropy=of_entropy if self.needs_entropy else None
        )


def _as_it_is(x: Tensor) -> Tensor:
    return x
