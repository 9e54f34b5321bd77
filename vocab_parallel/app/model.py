"""The language model the app trains: one vocabulary table sharded over the ranks, used twice, around a small trunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.app.config import ModelConfig
from vocab_parallel.app.trunk import Trunk
from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import tie_weights


class Head(NamedTuple):
    """This rank's rows of a head as plain tensors without gradient, however its host stores them."""

    weight: Tensor  # [shard_size, D]
    bias: Tensor | None  # [shard_size]


class LanguageModel(nn.Module):
    """Tied decoder. Its initial values are the same bits at every number of ranks.

    Args:
        config: dimensions.
        shard: this rank's part of the vocabulary.
        seed: of the initial values.
        device: where the parameters go.
        mean_group: ranks with other rows of the same batch; the loss is then the mean over all of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: VocabShard,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        mean_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.mean_group = config.dim**0.5, mean_group
        self.embedding = VocabParallelEmbedding(config.dim, shard=shard, device=device)
        self.embedding.reset_parameters(seed=seed, std=config.init_std)
        self.trunk = Trunk(config, seed=seed).to(device)
        self.lm_head = VocabParallelLMHead(config.dim, shard=shard, bias=config.head_bias, device=device)
        tie_weights(self.embedding, self.lm_head)

    def forward(
        self,
        ids: Tensor,  # [B, S]
        target: Tensor | None = None,  # [B, S]
        *,
        chunk_size: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Hidden states ``[B, S, D]``, the same on every rank; with a target, those without gradient, and the loss.

        The loss belongs in here where a wrapper gathers parameters for a forward only (FSDP, ZeRO-3).

        Collectives: those of one embedding lookup, and of one loss.
        """
        # Rows are small (init_std) for the projection's sake; scaled up they stand level with the trunk's own outputs.
        hidden: Tensor = self.trunk(self.embedding(ids) * self.scale)
        return hidden if target is None else (hidden.detach(), self.loss(hidden, target, chunk_size=chunk_size))

    def loss(self, hidden: Tensor, target: Tensor, *, chunk_size: int | None = None) -> Tensor:
        """Mean loss in nats of hidden states ``[B, S, D]`` against ids ``[B, S]``."""
        value: Tensor = self.lm_head.loss(
            hidden.flatten(0, 1), target.flatten(), chunk_size=chunk_size, mean_group=self.mean_group
        )
        return value

    def head(self) -> Head:
        """The head's rows; of a model whose parameters are plain tensors."""
        bias = self.lm_head.bias
        return Head(self.lm_head.weight.detach(), None if bias is None else bias.detach())
