"""The language model the app trains: one vocabulary table sharded over the ranks, used twice, around a small trunk."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vocab_parallel.app.config import ModelConfig
from vocab_parallel.app.trunk import Trunk
from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import tie_weights


class LanguageModel(nn.Module):
    """Tied decoder. Its initial values are the same bits at every number of ranks.

    Args:
        config: dimensions.
        shard: this rank's part of the vocabulary.
        seed: of the initial values.
        device: where the parameters go.
    """

    def __init__(
        self, config: ModelConfig, shard: VocabShard, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.scale = config.dim**0.5
        self.embedding = VocabParallelEmbedding(config.dim, shard=shard, device=device)
        self.embedding.reset_parameters(seed=seed, std=config.init_std)
        self.trunk = Trunk(config, seed=seed).to(device)
        self.lm_head = VocabParallelLMHead(config.dim, shard=shard, bias=config.head_bias, device=device)
        tie_weights(self.embedding, self.lm_head)

    def forward(self, ids: Tensor) -> Tensor:  # [B, S] -> [B, S, D]
        """Hidden states, the same on every rank. Collectives: those of one embedding lookup."""
        # Rows are small (init_std) for the projection's sake; scaled up they stand level with the trunk's own outputs.
        hidden: Tensor = self.trunk(self.embedding(ids) * self.scale)
        return hidden

    def loss(self, hidden: Tensor, target: Tensor, *, chunk_size: int | None = None) -> Tensor:
        """Mean loss in nats of hidden states ``[B, S, D]`` against ids ``[B, S]``."""
        value: Tensor = self.lm_head.loss(hidden.flatten(0, 1), target.flatten(), chunk_size=chunk_size)
        return value
