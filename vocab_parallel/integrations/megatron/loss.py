"""The loss of each token, from hidden states and a weight where Megatron would pass logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import first_row, judge
from vocab_parallel.collectives import apply as apply_function
from vocab_parallel.errors import ConfigError
from vocab_parallel.loss import RowOutputs, cross_entropy, linear_cross_entropy
from vocab_parallel.shard import VocabShard

_PROPORTIONAL = 1e-5  # how far a row's gradient may be from its part of the mask, relatively


@dataclass(frozen=True)
class DeferredLogits:
    """What the output layer returns where a loss follows: not logits, but what they would be projected from.

    All that Megatron does with logits on their way to the loss is to multiply them by a number (muP).

    Attributes:
        hidden: `[s, b, D]`, with `sequence_parallel` this rank's `[s / tp, b, D]`.
        weight, bias: `[shard_size, D]` and `[shard_size]` or None.
        loss_mask: `[b, s]`, if the model was given one.
        scale: What the logits are to be multiplied by.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    sequence_parallel: bool
    loss_mask: Tensor | None = None
    scale: float = 1.0

    def __mul__(self, factor: float) -> DeferredLogits:
        return DeferredLogits(**{**vars(self), "scale": self.scale * factor})

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the logits are not formed where a loss follows, so there is no {name!r}: call the model without labels"
        )


@dataclass(frozen=True)
class TokenLoss:
    """What stands for `compute_language_model_loss`.

    Attributes:
        options: Of `linear_cross_entropy` and `cross_entropy`: ignore_index, label_smoothing, smoothing_over, z_loss,
            softcap.
        chunks: Of `linear_cross_entropy`: chunk_size, memory_budget.
        masked_sum: See `apply`.
    """

    shard: VocabShard
    options: dict[str, Any]
    chunks: dict[str, Any]
    masked_sum: bool = False

    def __call__(self, labels: Tensor, logits: DeferredLogits | Tensor) -> Tensor:
        """The losses `[b, s]` in nats, float32, of `labels` `[b, s]`.

        Args:
            logits: Deferred, or this rank's `[s, b, shard_size]` of a caller that has formed them.

        Collectives:
            Those of `linear_cross_entropy` (`cross_entropy`) over the tensor-parallel group.

        Raises:
            TargetRangeError, LayoutMismatchError, NonFiniteError: On every rank of it.
        """
        target = labels.transpose(0, 1).reshape(-1)
        if not isinstance(logits, DeferredLogits):
            rows = cross_entropy(logits.flatten(0, 1), target, shard=self.shard, reduction="none", **self.options)
        elif self.masked_sum:
            rows = self._masked(target, logits)
        else:
            rows = self._fused(target, logits, reduction="none")
        return rows.view(labels.shape[1], labels.shape[0]).transpose(0, 1).contiguous()

    def _fused(self, target: Tensor, logits: DeferredLogits, **how: Any) -> Tensor:
        return linear_cross_entropy(
            logits.hidden.flatten(0, 1), logits.weight, target, shard=self.shard, linear_bias=logits.bias,
            sequence_parallel=logits.sequence_parallel, temperature=1.0 / logits.scale, **self.chunks, **self.options,
            **how,
        )  # fmt: skip

    def _masked(self, target: Tensor, logits: DeferredLogits) -> Tensor:
        """Rows whose gradients are formed in forward, as those of `sum(rows * loss_mask)`."""
        if logits.loss_mask is None:
            raise ConfigError(
                "apply(..., masked_sum=True) needs the loss mask in the model's forward: "
                "model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)."
            )
        z_loss = self.options["z_loss"]
        outputs = RowOutputs("logprob", *(["lse"] if z_loss else []))
        mask = logits.loss_mask.transpose(0, 1).reshape(-1).float()
        total = self._fused(target, logits, reduction="sum", row_weight=mask, outputs=outputs)
        assert outputs.logprob is not None
        rows = -outputs.logprob
        if z_loss:
            assert outputs.lse is not None
            rows = rows + z_loss * outputs.lse.square() * (target != self.options["ignore_index"])
        return apply_function(_MaskedRows, total, rows, mask, self.shard)


class _MaskedRows(torch.autograd.Function):
    """Forward: the rows of a sum. Adjoint: the sum's gradient, where that of the rows is a multiple of the mask."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, rows: Tensor, mask: Tensor, shard: VocabShard) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shard = shard
        return rows.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        grad = grads[0]
        at = mask.abs().argmax()
        factor = torch.where(mask[at] == 0, 0.0, grad[at] / mask[at])
        expected = factor * mask
        wrong = (grad - expected).abs() > _PROPORTIONAL * expected.abs()

        def describe(words: list[int]) -> Exception:
            return ConfigError(
                f"the gradient of the losses is no multiple of loss_mask (first at row {words[0]} of [s, b]), but "
                "apply(..., masked_sum=True) promised that they are used in sum(losses * loss_mask) only. Leave "
                "masked_sum out: any use of the losses is then right, for one more GEMM."
            )

        judge(ctx.shard, first_row(wrong)[None], ConfigError, describe)
        return factor, None, None, None
