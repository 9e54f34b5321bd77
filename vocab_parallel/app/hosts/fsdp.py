"""FSDP2: the app's model as DTensors, the vocabulary over one dimension of a mesh and everything over the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts.plain import count_trunk
from vocab_parallel.app.hosts.stored import StoredHost
from vocab_parallel.app.job import Job
from vocab_parallel.app.model import Head, LanguageModel
from vocab_parallel.app.optim import make_optimizer, set_rate
from vocab_parallel.gradient_norm import clip_gradients_
from vocab_parallel.integrations import fsdp as integration
from vocab_parallel.integrations.fsdp.setup import reshard
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import VocabShard


class FSDPHost(StoredHost):
    """A `LanguageModel` under `integrations.fsdp.apply`, with AdamW; its checkpoints load at any number of ranks."""

    def __init__(self, config: Config, job: Job, vocab_size: int) -> None:
        super().__init__(config, job, vocab_size)
        mesh = init_device_mesh(job.device.type, (job.replicas.size, job.tp), mesh_dim_names=("dp", "tp"))
        layout = VocabLayout(vocab_size, job.tp, multiple_of=config.parallel.multiple_of)
        self.shard = VocabShard(layout, mesh.get_group("tp"))
        self.model: Any = LanguageModel(
            config.model, self.shard, seed=config.train.seed, device=job.device, mean_group=job.data_group
        )
        self.trunk_parameters = count_trunk(self.model)
        integration.apply(self.model, mesh, shard=self.shard)
        self.optimizer = make_optimizer(self.model, config.train)
        self.tied = integration.verify_tied(self.model, self.optimizer)[0]

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids)
        return found

    def forward(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden, loss = self.model(input, target, chunk_size=self.config.train.chunk_size)
        return hidden, loss

    def backward(self, loss: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, rate: float) -> float:
        norm = float(clip_gradients_(self.model, self.config.train.clip))
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        return norm

    @torch.no_grad()
    def head(self) -> Head:
        """Gathered over the replicas, into copies."""
        self.model.unshard()
        found = self.model.head()
        weight, bias = (None if part is None else part.to_local().clone() for part in found)
        self.model.reshard()
        assert weight is not None
        return Head(weight, bias)

    def settle(self) -> None:
        reshard(self.model)

    def verify(self) -> None:
        integration.verify_tied(self.model, self.optimizer)


HOST = FSDPHost
