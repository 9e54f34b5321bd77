"""Megatron's word embedding and output layer over our shards: the same names, calls, attributes and Parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn

from vocab_parallel.adjoints import CopyToShards
from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.arguments import check_head
from vocab_parallel.collectives import apply as apply_function
from vocab_parallel.embedding import VocabParallelEmbedding, vocab_parallel_embedding
from vocab_parallel.errors import TyingError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.integrations.megatron.loss import DeferredLogits, TokenLoss
from vocab_parallel.shard import VocabShard

__all__ = ["EMBEDDING", "HEAD", "DeferredLogits", "MegatronEmbedding", "MegatronHead", "mark"]

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

# What Megatron's norm, clipping, optimizers and buffers read from a Parameter sharded over the vocabulary.
_MARKS = {
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 1,
    "allreduce": True,
    "is_embedding_or_output_parameter": True,
}


def mark(parameter: nn.Parameter, **more: bool) -> None:
    """Sets Megatron's marks. Its own layers set some only with `perform_initialization`."""
    for name, value in {**_MARKS, **more}.items():
        setattr(parameter, name, value)


class MegatronEmbedding(VocabParallelEmbedding):
    """In place of a `megatron.core.tensor_parallel.VocabParallelEmbedding`, with its Parameter and its attributes."""

    reduce_scatter_embeddings: bool
    sharded_state_dict = tensor_parallel.VocabParallelEmbedding.sharded_state_dict

    def __init__(self, replaced: Any, shard: VocabShard) -> None:
        super().__init__(replaced.embedding_dim, shard=shard, device="meta")
        _take_over(self, replaced)

    def forward(self, input_: Tensor) -> Tensor:
        """`[b, s]` ids to rows `[b, s, D]`; with `reduce_scatter_embeddings` to this rank's `[s / tp, b, D]`.

        Collectives, Raises: Those of `vocab_parallel_embedding`.
        """
        if self.reduce_scatter_embeddings:
            ids = input_.transpose(0, 1).contiguous()
            return vocab_parallel_embedding(ids, self.weight, shard=self.shard, sequence_parallel=True)
        return vocab_parallel_embedding(input_, self.weight, shard=self.shard)


class MegatronHead(VocabParallelLMHead):
    """In place of the output layer's `ColumnParallelLinear`, with its Parameters and its attributes.

    Attributes:
        weight: None where the embedding on the same stage is tied to it, as in Megatron, which passes the weight.
    """

    sequence_parallel: bool
    gather_output: bool
    tp_group: Any
    sharded_state_dict = tensor_parallel.ColumnParallelLinear.sharded_state_dict

    def __init__(
        self, replaced: Any, shard: VocabShard, token_loss: TokenLoss, tied_to: MegatronEmbedding | None
    ) -> None:
        super().__init__(replaced.input_size, shard=shard, bias=replaced.bias is not None, device="meta")
        _take_over(self, replaced)
        self._register_load_state_dict_pre_hook(_forgive_extra_state)  # type: ignore[no-untyped-call]
        self.token_loss = token_loss
        self.__dict__["_tied_to"] = tied_to  # past nn.Module, which would make a child of it
        self._loss_follows = False
        self._loss_mask: Tensor | None = None

    @property
    def tied_to(self) -> MegatronEmbedding | None:
        """The embedding whose weight it uses, on one stage with it."""
        found: MegatronEmbedding | None = self.__dict__["_tied_to"]
        return found

    @contextmanager
    def loss_follows(self, loss_mask: Tensor | None) -> Iterator[None]:
        """Within, the head returns `DeferredLogits`."""
        self._loss_follows, self._loss_mask = True, loss_mask
        try:
            yield
        finally:
            self._loss_follows, self._loss_mask = False, None

    def forward(  # type: ignore[override]
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        output_cross_entropy_loss: bool = False,
        labels: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """`(logits, None)` of hidden states `[s, b, D]` (with `sequence_parallel` this rank's `[s / tp, b, D]`).

        Logits are `[s, b, shard_size]`, gathered `[s, b, padded_size]`; padding columns are -inf, so that no softmax
        counts them and no argmax finds them. Where a loss follows, they are `DeferredLogits`. Newer Megatron asks for
        the losses themselves with `output_cross_entropy_loss` and `labels`: then `[b, s]`.

        Collectives:
            None here if a loss follows. Else those of `VocabParallelLMHead.logits`, and an all-gather to gather.

        Raises:
            TyingError: The weight that the model passes is not the tied one. On every rank, except that without a loss
                and without `sequence_parallel` nothing is exchanged in which the others could learn of it.
        """
        used, fault = self._weight(weight)
        if output_cross_entropy_loss or self._loss_follows:
            if fault is not None:
                Exchange(self.shard, "loss", "output_layer", fault=fault).wait()
            deferred = DeferredLogits(
                input_, used, self.bias, self.sequence_parallel and self.shard.tp_size > 1, self._loss_mask
            )
            return self.token_loss(labels, deferred) if labels is not None else (deferred, None)
        logits = self._project(input_, used, fault)
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gather:
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return logits, None

    def _weight(self, given: Tensor | None) -> tuple[Any, Exception | None]:
        """The weight to use, and what is wrong with it."""
        alone: Tensor | None = self._parameters["weight"]
        own = alone if self.tied_to is None else self.tied_to.weight
        given = alone if given is None else given
        if given is own and given is not None:
            return given, None
        if self.tied_to is None:
            return given, TyingError(
                f"the output layer was given a weight that is not its own {HEAD}, and it was not tied to "
                f"{EMBEDDING} when apply(model, shard=...) was called. Build the model with "
                "share_embeddings_and_output_weights and call apply on it."
            )
        return given, TyingError(
            f"the output layer was given another weight than {EMBEDDING}, to which {HEAD} was tied by "
            "apply(model, shard=...): something replaced one of them (to_empty, assignment of new Parameters, a "
            "copy). Call apply again on a new model, before DistributedDataParallel and the optimizer."
        )

    def _project(self, hidden: Tensor, weight: Tensor, fault: Exception | None) -> Tensor:
        fault = fault or capture(check_head, hidden, weight, self.bias, self.shard)
        if self.sequence_parallel and self.shard.tp_size > 1:
            hidden = self._gather(hidden, fault)
        elif fault is not None:
            raise fault
        elif self.shard.tp_size > 1:
            hidden = apply_function(CopyToShards, hidden, self.shard)
        logits = F.linear(hidden, weight, self.bias)
        if self.shard.num_valid < self.shard.shard_size:
            logits[..., self.shard.num_valid :] = -torch.inf
        return logits

    def get_extra_state(self) -> None:
        """Megatron's key `_extra_state`, which holds nothing."""

    def set_extra_state(self, state: Any) -> None:
        """Ignored, as in Megatron."""

    def backward_dw(self) -> None:
        """Nothing is delayed."""


def _take_over(module: Any, replaced: Any) -> None:
    """Gives `module` the Parameters and the public attributes of the module it replaces."""
    for name, value in vars(replaced).items():
        if not name.startswith("_") and name != "training":
            setattr(module, name, value)
    for name in list(module._parameters):
        setattr(module, name, getattr(replaced, name, None))
    module.train(replaced.training)
    module.__dict__["adopted"] = module.weight
    module.register_load_state_dict_post_hook(_after_load)


def _forgive_extra_state(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """As Megatron's layers: a checkpoint may lack the key."""
    state.setdefault(f"{prefix}_extra_state")


def _after_load(module: Any, *_: Any) -> None:
    """With `assign=True` the load has made a new Parameter: without marks, and unknown to DDP and the optimizer."""
    weight, adopted = module.weight, module.__dict__["adopted"]
    if weight is adopted or weight is None:
        return
    if hasattr(adopted, "main_grad"):
        raise TyingError(
            f"load_state_dict(assign=True) replaced the Parameter of {EMBEDDING} or {HEAD} after "
            "DistributedDataParallel and the optimizer were built on it: they would go on with the orphan. Load "
            "without assign, or before they are built."
        )
    for name, value in vars(adopted).items():
        setattr(weight, name, value)
    module.__dict__["adopted"] = weight
