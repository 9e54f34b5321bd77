"""PyTorch alone: a loop with AdamW; replicas mean their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts.stored import StoredHost
from vocab_parallel.app.job import Job
from vocab_parallel.app.model import Head, LanguageModel
from vocab_parallel.app.optim import average_gradients_, make_optimizer, set_rate
from vocab_parallel.gradient_norm import clip_gradients_
from vocab_parallel.tying import verify_tied, vocab_parameters


class PlainHost(StoredHost):
    """A `LanguageModel`, `torch.optim.AdamW` and the package's own checkpoints."""

    needs_group = False

    def __init__(self, config: Config, job: Job, vocab_size: int) -> None:
        super().__init__(config, job, vocab_size)
        self.shard = job.shard(vocab_size, config.parallel.multiple_of)
        self.model = self.make_model()
        self.optimizer = make_optimizer(self.model, config.train)
        self.tied = verify_tied(self.model, self.optimizer)[0]
        self.trunk_parameters = count_trunk(self.model)

    def make_model(self) -> nn.Module:
        """The model over `shard`, tied."""
        config, job = self.config, self.job
        return LanguageModel(
            config.model, self.shard, seed=config.train.seed, device=job.device, mean_group=job.data_group
        )

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
        average_gradients_(self.model, self.job.replicas)

    def step(self, rate: float) -> float:
        norm = float(clip_gradients_(self.model, self.config.train.clip))
        set_rate(self.optimizer, rate)
        self.optimizer.step()
        return norm

    def head(self) -> Head:
        assert isinstance(self.model, LanguageModel)
        return self.model.head()

    def verify(self) -> None:
        verify_tied(self.model, self.optimizer)


def count_trunk(model: nn.Module) -> int:
    """Numbers in the parameters that are not sharded over the vocabulary; DTensors count whole."""
    owners = {id(parameter) for parameter, _ in vocab_parameters(model).values()}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in owners)


HOST = PlainHost
