"""The gradients of the fused loss, chunk by chunk, from unnormalised exponentials.

With `e = exp(z - m)` on this shard, `alpha = exp(m - M) / S`, and the target distribution `uniform` everywhere plus
`on_target` on the target, the gradient of a row's logits is

    dz = g (alpha e - uniform - on_target [v = target])

so dH and dW are each a GEMM with e, a target term formed in float32, and a rank-one term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.loss.normalizer import Normalizer
from vocab_parallel.loss.targets import LossOptions, Targets
from vocab_parallel.shard import VocabShard


class HeadGradients:
    """Accumulates dW and db over chunks in float32, and forms each chunk's partial dH.

    Args:
        weight: `[n, D]`, this shard's real rows.
        needs: Whether dH, dW and db are wanted.

    Attributes:
        weight, bias: dW `[shard_size, D]` and db `[shard_size]`, float32 (float64), or None; complete after `finish`.
    """

    def __init__(self, weight: Tensor, shard: VocabShard, options: LossOptions, needs: tuple[bool, ...]) -> None:
        self._rows = weight
        self._needs_hidden, needs_weight, needs_bias = needs
        self._on_target, self._uniform = options.weights(shard.vocab_size)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._sum_of_rows = weight.sum(0, dtype=dtype)
        self._sum_of_hidden = weight.new_zeros(weight.shape[1], dtype=dtype)
        self._sum_of_g = weight.new_zeros((), dtype=dtype)
        self.weight = weight.new_zeros(shard.shard_size, weight.shape[1], dtype=dtype) if needs_weight else None
        self.bias = weight.new_zeros(shard.shard_size, dtype=dtype) if needs_bias else None

    def start(self, exponentials: Tensor, targets: Targets) -> Tensor | None:
        """`e W` `[C, D]` without the target's term: what can be computed while the statistics are exchanged.

        Zeroes the owned target entries of `exponentials` `[C, n]`; `add` brings their term in float32.
        """
        if exponentials.shape[1]:
            column = targets.local[:, None]
            entry = exponentials.gather(1, column).masked_fill_(targets.owned[:, None], 0.0)
            exponentials.scatter_(1, column, entry)
        return exponentials @ self._rows if self._needs_hidden else None

    def add(
        self,
        product: Tensor | None,  # [C, D], what `start` returned
        hidden: Tensor,  # [C, D]
        exponentials: Tensor,  # [C, n]
        maximum: Tensor,  # [C], this shard's m
        normalizer: Normalizer,  # its target_logit is read where this shard owns the target
        targets: Targets,
        g: Tensor,  # [C], upstream gradient of each row for dW and db, 0 for ignored rows
        input_g: Tensor,  # [C] or scalar, the same for dH
    ) -> Tensor | None:
        """Adds a chunk to dW and db; returns its partial dH `[C, D]` in float32 (float64)."""
        alpha = (maximum - normalizer.maximum).exp() / normalizer.sumexp
        alpha = torch.where(targets.valid, alpha, 0.0)
        at_target = torch.expm1(normalizer.target_logprob) + (1.0 - self._on_target)
        at_target = torch.where(targets.owned, at_target, 0.0)
        self._add_to_weight(hidden, exponentials, alpha * g, at_target * g, targets)
        if self._uniform:
            self._sum_of_g += g.sum()
            self._sum_of_hidden += g @ hidden.to(g.dtype)
        if product is None:
            return None
        grad = alpha[:, None] * product
        if len(self._rows):
            grad.addcmul_(at_target[:, None], self._rows[targets.local].to(grad.dtype))
        if self._uniform:
            grad.sub_(torch.where(targets.valid[:, None], self._uniform * self._sum_of_rows, 0.0))
        return grad.mul_(input_g[:, None])

    def _add_to_weight(
        self, hidden: Tensor, exponentials: Tensor, alpha: Tensor, at_target: Tensor, targets: Targets
    ) -> None:
        if exponentials.shape[1] == 0:
            return
        if self.weight is not None:
            weight = self.weight[: len(self._rows)]
            scaled = (alpha[:, None] * hidden).to(hidden.dtype)
            if weight.dtype == hidden.dtype:
                weight.addmm_(exponentials.T, scaled)
            else:
                weight.add_(exponentials.T @ scaled)
            weight.index_add_(0, targets.local, at_target[:, None] * hidden)
        if self.bias is not None:
            bias = self.bias[: len(self._rows)]
            bias.add_(exponentials.T @ alpha.to(exponentials.dtype)).index_add_(0, targets.local, at_target)

    def finish(self) -> None:
        """Adds the uniform part of the targets, the same for every real row."""
        if self._uniform and self.weight is not None:
            self.weight[: len(self._rows)].sub_(self._uniform * self._sum_of_hidden)
        if self._uniform and self.bias is not None:
            self.bias[: len(self._rows)].sub_(self._uniform * self._sum_of_g)
