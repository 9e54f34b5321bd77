"""The language-model head over a sharded vocabulary: local logits, or the fused loss that never holds them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vocab_parallel.adjoints import CopyToShards, GatherRows
from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.arguments import check_head, local_rows
from vocab_parallel.collectives import apply, uncompiled
from vocab_parallel.embedding import init_rows_
from vocab_parallel.loss import linear_cross_entropy
from vocab_parallel.shard import VocabShard
from vocab_parallel.tie_loading import own_storage


class VocabParallelLMHead(nn.Module):
    """A linear layer onto the vocabulary, this rank's rows of it.

    Args:
        in_features: Width of the table.
        projection: Applied to hidden states before the table, on every rank alike. With it, hidden states need not have
            the table's width: a head tied to a narrower embedding is
            `VocabParallelLMHead(E, shard=shard, projection=nn.Linear(D, E, bias=False))`. Its parameters are replicated
            and get their whole gradient on every rank, also with `sequence_parallel`.

    Attributes:
        weight: `[shard_size, in_features]`.
        bias: `[shard_size]` or None.
        projection: `[..., D]` to `[..., in_features]`, or None.
    """

    def __init__(
        self,
        in_features: int,
        *,
        shard: VocabShard,
        bias: bool = False,
        projection: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.shard = in_features, shard
        self.weight = nn.Parameter(torch.empty(shard.shard_size, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shard.shard_size, device=device, dtype=dtype)) if bias else None
        self.projection = projection
        self.register_load_state_dict_pre_hook(own_storage)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self, *, seed: int = 0, std: float = 0.02) -> None:
        """Normal rows, the same bits for a token id at any TP size; zero bias and padding rows.

        The projection stays as it is.
        """
        init_rows_(self.weight, self.shard, seed=seed, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, rows: Tensor | slice | int | None = None) -> Tensor:
        """`logits`."""
        return self.logits(input, rows)

    @uncompiled
    def logits(
        self, input: Tensor, rows: Tensor | slice | int | None = None, *, sequence_parallel: bool = False
    ) -> Tensor:
        """This rank's logits `[..., shard_size]`, in the input's dtype; padding columns hold what their rows give.

        Args:
            input: `[..., D]`, the same on every rank; with `sequence_parallel` this rank's rows of the first dimension.
            rows: Select rows of the (gathered) input's second-to-last dimension before the projection: an index,
                slice or index tensor. Decoding needs the last position only: `rows=-1` saves the rest of the GEMM.

        Collectives:
            Forward: none (with `sequence_parallel` a 64-byte all-gather and one of the rows). Backward: one all-reduce
            of dH (a reduce-scatter; and one all-reduce per parameter of a `projection`).

        Raises:
            LayoutMismatchError, UngatheredWeightError: On this rank; with `sequence_parallel` on every rank.
        """
        input = self.project(input, sequence_parallel=sequence_parallel)
        weight, bias = self._local()
        fault = capture(check_head, input, weight, bias, self.shard)
        if sequence_parallel and self.shard.tp_size > 1:
            input = self._gather(input, fault)
        elif fault is not None:
            raise fault
        elif self.shard.tp_size > 1:
            input = apply(CopyToShards, input, self.shard)
        if rows is not None:
            input = input[..., rows, :]
        return F.linear(input, weight, bias)

    def _gather(self, input: Tensor, fault: Exception | None) -> Tensor:
        if fault is not None:
            Exchange(self.shard, "header", "logits", fault=fault).wait()
        wanted = "wanted" if torch.is_grad_enabled() and input.requires_grad else "not wanted"
        call = f"logits(input [*, {', '.join(map(str, input.shape[1:]))}] {input.dtype}, gradient {wanted})"
        exchange = Exchange(self.shard, "header", call, rows=len(input), device=input.device)
        exchange.wait()
        return apply(GatherRows, input, self.shard, exchange.rows)

    def loss(
        self,
        input: Tensor,
        target: Tensor,
        *,
        sequence_parallel: bool = False,
        chunk_size: int | None = None,
        **options: Any,
    ) -> Tensor:
        """`linear_cross_entropy` of the projected input with this head's weight and bias; `options` are its options."""
        weight, bias = self._local()
        return linear_cross_entropy(
            self.project(input, sequence_parallel=sequence_parallel),
            weight,
            target,
            shard=self.shard,
            linear_bias=bias,
            sequence_parallel=sequence_parallel,
            chunk_size=chunk_size,
            **options,
        )

    @uncompiled
    def project(self, input: Tensor, *, sequence_parallel: bool = False) -> Tensor:
        """The input in the table's width: `[..., in_features]`; the input itself without a `projection`.

        With `sequence_parallel` each rank projects its own rows, so what a rank knows of the projection's gradient is a
        part: backward adds the parts up, one all-reduce for each of its parameters.
        """
        if self.projection is None:
            return input
        if not sequence_parallel or self.shard.tp_size == 1:
            return self.projection(input)  # type: ignore[no-any-return]
        parameters: dict[str, Tensor] = dict(self.projection.named_parameters())
        if torch.is_grad_enabled():
            parameters = {name: apply(CopyToShards, p, self.shard) for name, p in parameters.items()}
        projected: Tensor = torch.func.functional_call(self.projection, parameters, (input,))
        return projected

    def _local(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as plain tensors of this rank's rows."""
        bias = self.bias if self.bias is None else local_rows(self.bias, self.shard)
        return local_rows(self.weight, self.shard), bias

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.shard}, bias={self.bias is not None}"
