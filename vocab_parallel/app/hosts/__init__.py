"""The stacks that a training can run in, behind one interface. Only the chosen one is imported."""

from __future__ import annotations

import importlib
import importlib.util

from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts.base import Host
from vocab_parallel.app.job import Job
from vocab_parallel.errors import ConfigError

__all__ = ["Host", "host_class", "open_host"]

_PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron", "transformers": "transformers"}


def host_class(name: str) -> type[Host]:
    """The host called ``plain``, ``deepspeed``, ``megatron``, ``transformers`` or ``fsdp``.

    Raises:
        ConfigError: its package is not installed.
    """
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ConfigError(f"host={name} needs its package: pip install 'vocab-parallel[{name}]', or use host=plain")
    found: type[Host] = importlib.import_module(f"vocab_parallel.app.hosts.{name}").HOST
    return found


def open_host(config: Config, job: Job, vocab_size: int) -> Host:
    """Model and optimizer in the stack that ``config.host`` names.

    Raises:
        ConfigError: something in the configuration cannot work there; and as `host_class`.
    """
    replicas, chosen = job.replicas.size, host_class(config.host)
    if config.train.batch % replicas:
        raise ConfigError(
            f"train.batch={config.train.batch} sequences do not divide among {replicas} data-parallel replicas "
            f"({job.world} ranks, parallel.tp={job.tp}): make it a multiple of {replicas}"
        )
    if chosen.needs_group and job.group is None:
        raise ConfigError(f"host={config.host} needs a process group: start it with torchrun on 2 ranks or more")
    if config.model.head_bias and not chosen.takes_head_bias:
        raise ConfigError(f"model.head_bias=true: the model of host={config.host} has no bias on its head")
    return chosen(config, job, vocab_size)
