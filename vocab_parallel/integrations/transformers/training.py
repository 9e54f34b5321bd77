"""What a Trainer and accelerate must know of a converted model: its norm, its data, its whole checkpoints."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from vocab_parallel.agreement import Exchange, capture, checksum
from vocab_parallel.errors import ConfigError, LayoutMismatchError, TyingError
from vocab_parallel.gradient_norm import gradient_norm
from vocab_parallel.headers import CHECKSUM
from vocab_parallel.integrations.transformers import checks
from vocab_parallel.integrations.transformers.conversion import Conversion, conversion_of
from vocab_parallel.integrations.transformers.saving import (
    full_optimizer_state,
    full_state_dict,
    take_whole_moments,
)
from vocab_parallel.tying import verify_tied


def attach(host: Any, model: Any = None) -> None:
    """Makes a `Trainer` or an `Accelerator` right for a converted model. Before `trainer.train()`, or `prepare`.

    - Gradient clipping uses the norm over all shards, the same on every rank. (The host's own would take each rank's
      part for the whole, scale the replicated trunk by another factor on each rank, and so part the replicas.)
    - Checkpoints hold whole tables; resuming takes this rank's rows out of them.
    - Without `data_parallel`: the ranks of the shard's group get the same batches and count as one data-parallel rank,
      so the loss is not multiplied by their number; the rest of the world, if any, is data parallel: the model is
      wrapped in a DDP over the ranks with the same rows. Groups must be of consecutive ranks.
    - The tie is verified before training begins and with each checkpoint.

    Args:
        host: A `transformers.Trainer`, whose model is converted, or an `accelerate.Accelerator`.
        model: The converted model; needed with an Accelerator.

    Collectives:
        Without `data_parallel`: creates the process groups of a device mesh.

    Raises:
        ConfigError: The model is not converted; float16 with a gradient scaler; ranks of the group that are not
            consecutive; DeepSpeed or FSDP, which have integrations of their own.
    """
    trainer = host if hasattr(host, "accelerator") else None
    accelerator = trainer.accelerator if trainer is not None else host
    model = trainer.model if trainer is not None else model
    conversion = conversion_of(model)
    _check_accelerator(accelerator)
    _attach_accelerator(accelerator, model, conversion)
    if not conversion.data_parallel and conversion.shard.tp_size > 1:
        _share_batches(accelerator, conversion)
    if trainer is not None:
        _attach_trainer(trainer, model, conversion)
    conversion.managed = True


def verify(model: Any, optimizer: Any = None) -> list[tuple[str, str]]:
    """Proves that a converted model still is one: its tie, its optimizer, and a trunk that is the same on every rank.

    Args:
        optimizer: Anything with `param_groups`: it must hold each sharded parameter once, and nothing that the model no
            longer has (it was built before `apply`).

    Returns:
        The tied pair by name; nothing if the model is not tied.

    Collectives:
        One 64-byte all-gather.

    Raises:
        TyingError: Naming both parameters.
        LayoutMismatchError: The replicated parameters differ between ranks: gradients were clipped by a norm of each
            rank's own, or the ranks got different batches. On every rank.
    """
    conversion = conversion_of(model)
    while not hasattr(model, "_vocab_parallel"):
        model = model.module
    pairs: list[tuple[str, str]] = []

    def check() -> None:
        conversion.check(model)
        pairs.extend(verify_tied(model, optimizer, required=False))
        if optimizer is not None:
            _check_optimizer(conversion, optimizer)

    fault = capture(check)
    tables = tables_of(conversion)
    trunk = [parameter for parameter in model.parameters() if id(parameter) not in tables]
    exchange = Exchange(
        conversion.shard, "header", "verify", fault=fault, rows=0, checksum=checksum(checks.digest(trunk)),
        compare_checksum=False,
    )  # fmt: skip
    exchange.wait()
    if len({header[CHECKSUM] for header in exchange.headers}) > 1:
        raise LayoutMismatchError(
            "the replicated parameters of the model differ between the ranks of the vocabulary's group. Likely causes: "
            "gradients clipped without attach (or clip_gradients_), different batches without data_parallel, different "
            "dropout, no DDP with data_parallel."
        )
    return pairs


def _check_optimizer(conversion: Conversion, optimizer: Any) -> None:
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for name, module, key in conversion.tables():
        parameter = getattr(module, key)
        if parameter.requires_grad and held.count(id(parameter)) != 1:
            raise TyingError(
                f"the optimizer holds the sharded Parameter {name} {held.count(id(parameter))} times, expected once. "
                "Build it after apply, from model.parameters()."
            )


def _check_accelerator(accelerator: Any) -> None:
    kind = getattr(accelerator.distributed_type, "value", str(accelerator.distributed_type))
    if "DEEPSPEED" in kind or "FSDP" in kind or "MEGATRON" in kind:
        raise ConfigError(f"{kind} keeps the gradients itself: use vocab_parallel.integrations of that host instead")
    if accelerator.scaler is not None:
        raise ConfigError(
            "float16 with a gradient scaler: ranks would skip different steps, as each looks at its own rows for "
            "overflow. Use bfloat16."
        )


def _attach_accelerator(accelerator: Any, model: Any, conversion: Conversion) -> None:
    plain_clip, plain_state = accelerator.clip_grad_norm_, accelerator.get_state_dict
    plain_optimizer = accelerator.prepare_optimizer

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if {id(parameter) for parameter in given}.isdisjoint(tables_of(conversion)):
            return plain_clip(given, max_norm, norm_type)  # type: ignore[no-any-return]
        return clip_like_torch_(model, max_norm, norm_type)

    def get_state_dict(wrapped: Any, unwrap: bool = True) -> Any:
        if accelerator.unwrap_model(wrapped) is model:
            return full_state_dict(model)
        return plain_state(wrapped, unwrap)

    def prepare_optimizer(optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = plain_optimizer(optimizer, device_placement)
        inner = prepared.optimizer
        if not tables_of(conversion).isdisjoint(id(p) for group in inner.param_groups for p in group["params"]):
            take_whole_moments(model, inner)
            prepared.state_dict = lambda: full_optimizer_state(model, inner)
        return prepared

    accelerator.clip_grad_norm_, accelerator.get_state_dict = clip_grad_norm_, get_state_dict
    accelerator.prepare_optimizer = prepare_optimizer


def tables_of(conversion: Conversion) -> set[int]:
    """The identities of the sharded parameters."""
    return {id(getattr(module, key)) for _, module, key in conversion.tables()}


def clip_like_torch_(model: Any, max_norm: float, norm_type: float = 2) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of all parameters of a model with sharded ones; returns the norm before.

    A norm that is not finite is returned, not raised, as hosts expect.

    Collectives:
        One all-reduce of 8 bytes.

    Raises:
        ConfigError: Another norm than 2.
    """
    if norm_type != 2:
        raise ConfigError(f"only the 2-norm is summed over shards, got norm_type={norm_type}")
    norm = gradient_norm(model)
    if max_norm != float("inf"):
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
    return norm.float()


def _share_batches(accelerator: Any, conversion: Conversion) -> None:
    """The ranks of the shard's group count as one data-parallel rank."""
    shard, world = conversion.shard, dist.get_world_size()
    ranks = dist.get_process_group_ranks(shard.group) if shard.group is not None else [0]
    first = dist.get_rank() // shard.tp_size * shard.tp_size
    if ranks != list(range(first, first + shard.tp_size)):
        raise ConfigError(
            f"the shard's group is of the ranks {ranks}; accelerate gives one batch to consecutive ranks, here "
            f"{first} to {first + shard.tp_size - 1}."
        )
    mesh = init_device_mesh(
        accelerator.device.type, (world // shard.tp_size, shard.tp_size), mesh_dim_names=("dp_replicate", "tp")
    )
    accelerator.state.device_mesh = mesh
    plain_prepare = accelerator.prepare_model

    def prepare_model(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        prepared = plain_prepare(model, device_placement=device_placement, evaluation_mode=True)
        if evaluation_mode or mesh.size(0) == 1 or isinstance(prepared, DistributedDataParallel):
            return prepared
        options = accelerator.ddp_handler.to_kwargs() if accelerator.ddp_handler is not None else {}
        wrapped: Any = DistributedDataParallel(prepared, process_group=mesh.get_group("dp_replicate"), **options)
        wrapped._is_accelerate_prepared = True
        accelerator._models[-1] = wrapped
        return wrapped

    accelerator.prepare_model = prepare_model
    accelerator.gather_for_metrics = _gathers_once(accelerator, shard.tp_size)


def _gathers_once(accelerator: Any, tp_size: int) -> Any:
    """`gather_for_metrics` that takes what the ranks of a group hold alike once, not once from each."""
    from accelerate.utils import recursively_apply

    plain, plain_gather = accelerator.gather_for_metrics, accelerator.gather

    def first_of_each(gathered: Tensor) -> Tensor:
        blocks = gathered.view(accelerator.num_processes, -1, *gathered.shape[1:])
        return blocks[::tp_size].flatten(0, 1)

    def gather_for_metrics(data: Any, use_gather_object: bool = False) -> Any:
        accelerator.gather = lambda tensor: recursively_apply(first_of_each, plain_gather(tensor))
        try:
            return plain(data, use_gather_object)
        finally:
            accelerator.gather = plain_gather

    return gather_for_metrics


def _attach_trainer(trainer: Any, model: Any, conversion: Conversion) -> None:
    plain_model, plain_state, plain_create = (
        trainer.save_model, trainer._save_optimizer_and_scheduler, trainer.create_optimizer,
    )  # fmt: skip

    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        verify(model, trainer.optimizer)
        whole = full_state_dict(model)  # every rank is here; only one goes on to write
        plain = trainer._save
        trainer._save = lambda folder=None, state_dict=None: plain(folder, state_dict=whole)
        try:
            plain_model(output_dir, _internal_call)
        finally:
            trainer._save = plain

    def save_optimizer(output_dir: str) -> None:
        whole = full_optimizer_state(model, trainer.optimizer.optimizer)
        gathers = trainer.optimizer.state_dict
        trainer.optimizer.state_dict = lambda: whole
        try:
            plain_state(output_dir)
        finally:
            trainer.optimizer.state_dict = gathers

    def create_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = plain_create(*args, **kwargs)
        verify(model, trainer.optimizer)
        return optimizer

    trainer.save_model, trainer.create_optimizer = save_model, create_optimizer
    trainer._save_optimizer_and_scheduler = save_optimizer
    if not conversion.data_parallel:
        _count_groups_once(trainer, conversion.shard.tp_size)


def _count_groups_once(trainer: Any, tp_size: int) -> None:
    """The ranks of a group count as one where the Trainer counts rows, tokens and results."""
    plain = trainer._get_num_items_in_batch

    def items(batch_samples: Any, device: Any) -> Any:
        count = plain(batch_samples, device)
        # It divides by the size even where it has not summed over the ranks.
        return count if count is None or trainer.args.average_tokens_across_devices else count * tp_size

    trainer.get_tp_size = lambda: tp_size
    trainer._get_num_items_in_batch = items
    trainer.gather_function = trainer.accelerator.gather_for_metrics
