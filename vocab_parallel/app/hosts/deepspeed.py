"""DeepSpeed: the app's model in an engine, at any ZeRO stage, with the vocabulary over tensor-parallel ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts import folder as folders
from vocab_parallel.app.hosts.plain import count_trunk
from vocab_parallel.app.job import Job
from vocab_parallel.app.model import Head, LanguageModel
from vocab_parallel.app.optim import make_optimizer, set_rate
from vocab_parallel.checkpoint.together import agree, caught
from vocab_parallel.errors import CheckpointLayoutError, ConfigError
from vocab_parallel.gradient_norm import gradient_norm
from vocab_parallel.integrations import deepspeed as integration
from vocab_parallel.integrations.deepspeed.trust import require_known
from vocab_parallel.shard import RankGroup
from vocab_parallel.vocabulary.manifest.strict_json import read_json

_TAG = "state"


class DeepSpeedHost(folders.FolderHost):
    """A `LanguageModel` in an engine of `integrations.deepspeed.initialize`, with ``host_config`` as its settings.

    What the run's own configuration says goes before the file's: batch sizes, clipping and the optimizer.
    """

    def __init__(self, config: Config, job: Job, vocab_size: int) -> None:
        super().__init__(config, job, vocab_size)
        self.shard = job.shard(vocab_size, config.parallel.multiple_of)
        model = LanguageModel(
            config.model, self.shard, seed=config.train.seed, device=job.device, mean_group=job.data_group
        )
        self.model, self.trunk_parameters = model, count_trunk(model)
        self.settings = engine_settings(config, job)
        if job.device.type == "cpu":
            # Its shared-memory collectives would be compiled at the first use, which needs ninja; gloo serves as well.
            importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        data_group = job.data_group if self.shard.tp_size > 1 else None
        optimizer = make_optimizer(model, config.train)
        self.engine = integration.initialize(model, config=self.settings, data_group=data_group, optimizer=optimizer)[0]
        self.tied = integration.verify_tied(self.engine)[0]

    @torch.no_grad()
    def hidden(self, ids: Tensor) -> Tensor:
        found: Tensor = self.engine(ids)
        return found

    def forward(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden, loss = self.engine(input, target, chunk_size=self.config.train.chunk_size)
        return hidden, loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self, rate: float) -> float:
        plain = self.settings["zero_optimization"].get("stage", 0) == 0
        norm = gradient_norm(self.engine.module) if plain else None  # such an engine clips without telling the norm
        set_rate(self.engine.optimizer, rate)
        self.engine.step()
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def head(self) -> Head:
        """Gathered from ZeRO's partitions, if it has any, into copies."""
        module = self.engine.module.lm_head
        parts = [part for part in (module.weight, module.bias) if hasattr(part, "ds_id")]
        if not parts:
            return Head(module.weight.detach(), None if module.bias is None else module.bias.detach())
        parts[0].all_gather(param_list=parts)
        whole = [part.detach().clone() for part in parts]
        parts[0].partition(param_list=parts, has_been_updated=False)
        return Head(whole[0], whole[1] if len(whole) > 1 else None)

    def load(self, checkpoint: Path, *, vocabulary_sha256: str, weights_only: bool = False) -> int:
        step = folders.compare(self.job, checkpoint, self.about(), vocabulary_sha256)
        what = f"{checkpoint} could not be looked through by rank {self.job.rank}"
        agree(RankGroup(self.job.group), f"load {checkpoint.name}", caught(what, require_known, checkpoint / _TAG))
        # With the optimizer always: of stage 3, DeepSpeed has the weights alone by zero_to_fp32, which refuses TP > 1.
        self.engine.load_checkpoint(str(checkpoint), _TAG)
        integration.verify_tied(self.engine)
        return step

    def write(self, place: Path) -> None:
        self.engine.save_checkpoint(str(place), _TAG)

    def about(self) -> dict[str, Any]:
        return {**folders.layout(self.shard, self.job), "host": "deepspeed",
                "stage": self.settings["zero_optimization"].get("stage", 0)}  # fmt: skip


def engine_settings(config: Config, job: Job) -> dict[str, Any]:
    """The engine's settings of ``host_config``, with what follows from the run.

    Raises:
        ConfigError: the file is not there, or not JSON.
    """
    settings: dict[str, Any] = {"zero_optimization": {"stage": 1}}
    if config.host_config is not None:
        try:
            settings = read_json(Path(config.host_config), "a configuration of DeepSpeed")
        except CheckpointLayoutError as error:
            raise ConfigError(f"host_config={config.host_config}: not a JSON file for DeepSpeed ({error})") from error
    share = config.train.batch // job.replicas.size
    for key in ("optimizer", "scheduler", "train_batch_size"):
        settings.pop(key, None)
    settings.setdefault("zero_optimization", {"stage": 0})
    return settings | {
        "train_micro_batch_size_per_gpu": share,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.train.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }


HOST = DeepSpeedHost
