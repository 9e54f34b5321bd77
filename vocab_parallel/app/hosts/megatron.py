"""Megatron-core: a small `GPTModel` over tensor-parallel ranks, its data-parallel wrapper and its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts import folder as folders
from vocab_parallel.app.job import Job
from vocab_parallel.app.model import Head
from vocab_parallel.app.optim import mean_over_replicas
from vocab_parallel.archives import require_archive
from vocab_parallel.checkpoint.together import agree, caught
from vocab_parallel.errors import ConfigError
from vocab_parallel.integrations import megatron as integration
from vocab_parallel.integrations import small_gpt
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import RankGroup, VocabShard


class MegatronHost(folders.FolderHost):
    """A tied `GPTModel` of ``model``'s dimensions; its trunk is tensor-parallel over the vocabulary's ranks too."""

    takes_head_bias = False

    def __init__(self, config: Config, job: Job, vocab_size: int) -> None:
        super().__init__(config, job, vocab_size)
        check(config, job)
        train, model = config.train, config.model
        small_gpt.start(job.tp, seed=train.seed, timeout_minutes=max(1, round(config.parallel.timeout_s / 60)))
        layout = VocabLayout(vocab_size, job.tp, multiple_of=config.parallel.multiple_of)
        gpt: Any = small_gpt.gpt(
            layout.padded_size, dim=model.dim, layers=model.layers, heads=model.heads,
            wide=model.dim * model.mlp_ratio, context=model.context, std=model.init_std, seed=train.seed,
        )  # fmt: skip
        self.shard = VocabShard(layout, gpt.tp_group)
        integration.apply(gpt, shard=self.shard)
        self.model: Any = gpt
        self.trunk_parameters = _count_trunk(gpt, job.tp)
        self.wrapped, self.optimizer = small_gpt.wrap(
            gpt, rate=train.lr * train.trunk_lr_ratio, vocabulary_rate=train.lr, clip=train.clip,
            betas=(train.betas[0], train.betas[1]), weight_decay=train.weight_decay,
        )  # fmt: skip
        self.tied = integration.verify_tied(gpt, self.optimizer)[0]
        self._seen: Tensor | None = None
        gpt.decoder.register_forward_hook(self._see)

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        small_gpt.losses(self.wrapped, ids, None)
        return self._hidden()

    def forward(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = small_gpt.losses(self.wrapped, input, target).mean()
        return self._hidden(), mean_over_replicas(loss, self.job.replicas)

    def backward(self, loss: Tensor) -> None:
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        small_gpt.finish_gradients(self.wrapped)

    def step(self, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["max_lr"] / self.config.train.lr
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def head(self) -> Head:
        return Head(self.model.embedding.word_embeddings.weight.detach(), None)

    def load(self, checkpoint: Path, *, vocabulary_sha256: str, weights_only: bool = False) -> int:
        step = folders.compare(self.job, checkpoint, self.about(), vocabulary_sha256)
        saved: dict[str, Any] = {}

        def read() -> None:
            require_archive(self._file(checkpoint))
            saved.update(torch.load(self._file(checkpoint), map_location=self.job.device, weights_only=True))

        fault = caught(f"{self._file(checkpoint)} could not be read", read)
        agree(RankGroup(self.job.group), f"load {checkpoint.name}", fault)
        self.model.load_state_dict(saved["model"])
        if not weights_only:
            self.optimizer.load_state_dict(saved["optimizer"])
        integration.verify_tied(self.model, self.optimizer)
        return step

    def write(self, place: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self._file(place))

    def _file(self, place: Path) -> Path:
        return place / f"rank-{self.job.rank:05d}.pt"

    def about(self) -> dict[str, Any]:
        return {**folders.layout(self.shard, self.job), "host": "megatron"}

    def _see(self, module: Any, args: Any, output: Tensor) -> None:
        self._seen = output.detach()

    def _hidden(self) -> Tensor:
        """Of the last forward: ``[B, S, D]`` of Megatron's ``[S, B, D]``."""
        assert self._seen is not None
        found, self._seen = self._seen.transpose(0, 1), None
        return found


def check(config: Config, job: Job) -> None:
    """Raises ConfigError where Megatron cannot run, in words of this configuration."""
    try:
        torch.cuda.current_device()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"host=megatron needs CUDA, where Megatron-core puts its buffers, and there is none ({error}). Use "
            "host=plain, deepspeed, transformers or fsdp"
        ) from error
    if config.model.heads % job.tp:
        raise ConfigError(f"model.heads={config.model.heads} do not divide over {job.tp} tensor-parallel ranks")


def _count_trunk(model: Any, tp: int) -> int:
    """Numbers beside the vocabulary's; those that Megatron marks are parts of `tp`."""
    shards = {id(p) for p in (model.embedding.word_embeddings.weight,)}
    return sum(
        p.numel() * (tp if getattr(p, "tensor_model_parallel", False) else 1)
        for p in model.parameters()
        if id(p) not in shards
    )


HOST = MegatronHost
