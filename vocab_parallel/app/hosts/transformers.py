"""Transformers: a small Llama, converted by `integrations.transformers.apply`, in the plain loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel.app.hosts.plain import PlainHost
from vocab_parallel.app.model import Head
from vocab_parallel.app.optim import mean_over_replicas
from vocab_parallel.integrations import small_llama
from vocab_parallel.integrations import transformers as integration


class TransformersHost(PlainHost):
    """A tied `LlamaForCausalLM` of ``model``'s dimensions; the trunk is the same on every rank."""

    takes_head_bias = False

    def make_model(self) -> Any:
        model = self.config.model
        llama: Any = small_llama.llama(
            self.shard.vocab_size, dim=model.dim, layers=model.layers, heads=model.heads,
            wide=model.dim * model.mlp_ratio, context=model.context, std=model.init_std, seed=self.config.train.seed,
        )  # fmt: skip
        llama = llama.to(self.job.device)
        integration.apply(llama, shard=self.shard, chunk_size=self.config.train.chunk_size)
        self._seen: list[Tensor] = []
        llama.get_output_embeddings().register_forward_pre_hook(self._see)
        return llama

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        model: Any = self.model
        found: Tensor = model.get_decoder()(ids).last_hidden_state
        return found

    def forward(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        self._seen.clear()
        loss = self.model(input, labels=target, shift_labels=target).loss  # `target` is shifted already
        return self._seen.pop(), mean_over_replicas(loss, self.job.replicas)

    def head(self) -> Head:
        model: Any = self.model
        return Head(model.get_output_embeddings().weight.detach(), None)

    def _see(self, module: Any, args: tuple[Tensor, ...]) -> None:
        self._seen.append(args[0].detach())


HOST = TransformersHost
