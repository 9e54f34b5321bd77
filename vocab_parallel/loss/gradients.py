"""From a row's five coefficients (see `objective`) to the gradients of logits, hidden states, weight and bias.

Two ways. *Dense*: form `dz` in float32, block by block, write it over the logits, and multiply. *Unnormalised*: with
`e = exp(z - m)` of this shard and `alpha = a exp(m - M) / S`,

    dz = alpha e + (dz at the target) [v = target] - u

so dH and dW are each a GEMM with e, which needs no exchange, a target term formed in float32, and a rank-one term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.loss import kernels
from vocab_parallel.loss.normalizer import Normalizer, row_blocks
from vocab_parallel.loss.objective import Coefficients
from vocab_parallel.loss.options import Scores
from vocab_parallel.loss.targets import Targets, probabilities

# Elements of a product that is added to a float32 gradient at a time: what stays in cache.
_PRODUCT_ELEMENTS = 1 << 21


def logits_gradient(
    logits: Tensor,  # [T, n] raw
    out: Tensor,  # [T, n], may be `logits` itself
    normalizer: Normalizer,  # [T]
    coefficients: Coefficients,  # [T]
    targets: Targets,  # [T]
    scores: Scores,
    soft: Tensor | None = None,  # [T, n], the soft target
    soft_is_log: bool = False,
) -> None:
    """Writes the gradient of the raw logits to `out`, in blocks of rows; 0 in rows without a coefficient."""
    c = coefficients.scaled(1.0 / scores.temperature)
    at_target, active = c.at_target(normalizer), c.active
    on_p = c.probability / normalizer.sumexp
    blocks = row_blocks(logits) if logits.shape[1] else []
    scratch = logits.new_empty(blocks[0].stop, logits.shape[1], dtype=on_p.dtype) if blocks else on_p
    for block in blocks:
        z, slope = scores.apply_with_slope_(scratch[: block.stop - block.start].copy_(logits[block]))
        d = z.sub_(normalizer.maximum[block, None])
        if c.entropy is not None:
            log_p = (d - normalizer.log_sum[block, None]).clamp_(min=-1e4)
            d.exp_()
            factor = on_p[block, None] - (c.entropy / normalizer.sumexp)[block, None] * (
                log_p.add_(normalizer.entropy[block, None])
            )
            d.mul_(factor)
        else:
            d.exp_().mul_(on_p[block, None])
        if c.target is not None:
            at = (torch.arange(len(d), device=d.device), targets.local[block])
            d.index_put_(at, torch.where(targets.owned[block], at_target[block], d[at]))
        if c.soft is not None and soft is not None:
            d.sub_(c.soft[block, None] * probabilities(soft[block], d.dtype, soft_is_log)[0])
        if c.uniform is not None:
            d.sub_(c.uniform[block, None])
        if slope is not None:
            d.mul_(slope)
        out[block] = d.masked_fill_(~active[block, None], 0.0)  # an ignored row may hold NaN


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad * factor` in `dtype`, for a backward: in place of a `grad` that nobody sees again, else in blocks."""
    if grad.dtype == dtype and not torch._C._autograd._get_current_graph_task_keep_graph():
        return grad.mul_(factor)
    if grad.dtype == dtype or grad.dim() != 2:
        return (grad * factor).to(dtype)
    out = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)
    for block in row_blocks(grad):
        out[block] = grad[block] * factor
    return out


class RangeGradients:
    """dW and db of one range of ids, accumulated over chunks in float32 (float64), and each chunk's partial dH.

    Args:
        weight: `[n, D]`, the range's rows.
        grad_weight: Where dW `[n, D]` goes, whatever is in it; None if not wanted.
        grad_bias: Where db `[n]` goes, zeroed; None if not wanted.
        needs_hidden: Whether dH is wanted.
    """

    def __init__(
        self, weight: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None, needs_hidden: bool, scores: Scores
    ) -> None:
        self._rows, self._weight, self._bias, self._needs_hidden = weight, grad_weight, grad_bias, needs_hidden
        self._scores = scores
        self._empty = True  # nothing is in dW yet
        self._sum_of_rows: Tensor | None = None
        self._uniform: Tensor | None = None  # sum of the rows' u
        self._uniform_hidden: Tensor | None = None  # sum of u H

    def start(self, exponentials: Tensor, targets: Targets) -> Tensor | None:
        """`e W` `[C, D]` without the target's term: what can be computed while the statistics are exchanged.

        Zeroes the owned target entries of `exponentials` `[C, n]`; later their term comes in float32.
        """
        if exponentials.shape[1]:
            at = (torch.arange(len(exponentials), device=exponentials.device), targets.local)
            exponentials.index_put_(at, exponentials[at].masked_fill_(targets.owned, 0.0))  # scatter_ copies it all
        return self.product(exponentials)

    def product(self, left: Tensor) -> Tensor | None:
        """`left W` `[C, D]` of `left` `[C, n]`, if dH is wanted."""
        return left @ self._rows if self._needs_hidden else None

    def unnormalised(
        self, maximum: Tensor, normalizer: Normalizer, coefficients: Coefficients, targets: Targets
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`alpha`, the target's entry of the raw logits' gradient, and `u`, each `[C]`."""
        c = coefficients.scaled(1.0 / self._scores.temperature)
        weight = torch.where(maximum == -torch.inf, 0.0, (maximum - normalizer.maximum).exp() / normalizer.sumexp)
        alpha = torch.where(c.active, c.probability * weight, 0.0)
        return alpha, torch.where(targets.owned, c.at_target(normalizer), 0.0), c.uniform

    def combine(
        self, hidden: Tensor, product: Tensor | None, alpha: Tensor, at_target: Tensor, uniform: Tensor | None,
        targets: Targets, scale: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """What follows the exchange.

        Returns:
            The chunk's partial dH `[C, D]` in float32 (float64), times `scale`; the factor `alpha H / unit` `[C, D]` of
            dW in H's dtype, None if dW is not wanted; and `unit`, None where it is 1.
        """
        unit = None
        if hidden.dtype == torch.float16 and len(alpha):  # about 1 / V: its product with H would underflow
            unit = alpha.abs().amax().clamp(min=torch.finfo(alpha.dtype).tiny)
        if uniform is not None and product is not None and self._sum_of_rows is None:
            self._sum_of_rows = self._rows.sum(0, dtype=alpha.dtype)
        if kernels.available(hidden):
            from vocab_parallel.loss.kernels.epilogue import scale as scale_kernel

            of_weight = None
            if self._weight is not None:
                of_weight = torch.ones_like(alpha) if unit is None else (1.0 / unit).expand_as(alpha)
            grad, factor = scale_kernel(
                product, hidden, self._rows, targets.local, alpha, at_target, scale.expand_as(alpha), of_weight,
                uniform, self._sum_of_rows,
            )  # fmt: skip
            return grad, factor, unit
        factor = None
        if self._weight is not None:
            factor = ((alpha if unit is None else alpha / unit)[:, None] * hidden).to(hidden.dtype)
        if product is None:
            return None, factor, unit
        grad = (alpha * scale)[:, None] * product
        if len(self._rows):
            grad.addcmul_((at_target * scale)[:, None], self._rows[targets.local].to(grad.dtype))
        if uniform is not None and self._sum_of_rows is not None:
            grad.addcmul_((uniform * scale)[:, None], self._sum_of_rows, value=-1.0)
        return grad, factor, unit

    def add(
        self, hidden: Tensor, exponentials: Tensor, factor: Tensor | None, unit: Tensor | None, alpha: Tensor,
        at_target: Tensor, uniform: Tensor | None, targets: Targets,
    ) -> None:  # fmt: skip
        """Adds the chunk to dW and db."""
        if not len(self._rows):
            return
        if uniform is not None:
            total, of_hidden = uniform.sum(), uniform @ hidden.to(uniform.dtype)
            self._uniform = total if self._uniform is None else self._uniform + total
            self._uniform_hidden = of_hidden if self._uniform_hidden is None else self._uniform_hidden + of_hidden
        if self._weight is not None and factor is not None:
            self._add_product(exponentials, factor, unit)
            self._weight.index_add_(0, targets.local, at_target[:, None] * hidden)
        if self._bias is not None:
            alpha = alpha if unit is None else alpha / unit
            product = (exponentials.T @ alpha.to(exponentials.dtype)).to(alpha.dtype)
            self._bias.add_(product if unit is None else product * unit).index_add_(0, targets.local, at_target)

    def add_dense(self, hidden: Tensor, gradient: Tensor) -> None:
        """Adds a chunk whose logit gradient `[C, n]` is formed to dW and db."""
        if self._weight is not None:
            self._add_product(gradient, hidden)
        if self._bias is not None:
            self._bias.add_(gradient.sum(0, dtype=self._bias.dtype))

    def _add_product(self, left: Tensor, right: Tensor, unit: Tensor | None = None) -> None:
        """`dW += leftᵀ right`, in float32 beyond one product."""
        assert self._weight is not None
        empty, self._empty = self._empty, False
        if self._weight.dtype == right.dtype:
            torch.mm(left.T, right, out=self._weight) if empty else self._weight.addmm_(left.T, right)
            return
        # Measured on a CPU in bfloat16: leftᵀ right takes twice as long as rightᵀ left, which is its transpose.
        on_cpu = right.device.type == "cpu"
        transposed = right.T.contiguous() if on_cpu else None
        step = max(1, _PRODUCT_ELEMENTS // right.shape[1]) if on_cpu else len(self._weight)
        for at in range(0, len(self._weight), step):
            into, some = self._weight[at : at + step], left[:, at : at + step]
            product = some.T @ right if transposed is None else (transposed @ some).T
            if empty:
                into.copy_(product)
                if unit is not None:
                    into.mul_(unit)
            elif unit is None:
                into.add_(product)
            else:
                into.addcmul_(product.to(unit.dtype), unit)

    def finish(self) -> None:
        """Adds the uniform part of the targets, the same for every real row."""
        if self._weight is not None and self._empty:
            self._weight.zero_()
        if self._uniform is None or self._uniform_hidden is None:
            return
        if self._weight is not None:
            self._weight.sub_(self._uniform_hidden)
        if self._bias is not None:
            self._bias.sub_(self._uniform)
