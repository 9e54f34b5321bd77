"""Checkpoints of a converted model: the real rows of whole tables, as Transformers writes and reads them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.errors import ConfigError
from vocab_parallel.integrations.transformers.conversion import Conversion, conversion_of


def full_state_dict(model: Any) -> dict[str, Tensor]:
    """The model's state dict with whole tables of the real rows, as before `apply`; a tied table is one tensor.

    `model.state_dict()` holds this rank's rows only. `model.load_state_dict` takes either.

    Collectives:
        One all-gather a table.

    Raises:
        ConfigError: The model is not converted.
    """
    conversion = conversion_of(model)
    while not hasattr(model, "_vocab_parallel"):
        model = model.module
    conversion.check(model)
    state: dict[str, Tensor] = nn.Module.state_dict(model)
    for name, module, key in conversion.tables():
        whole = gather_vocab(conversion.shard, getattr(module, key))
        for alias in _aliases(conversion, name):
            if alias in state:
                state[alias] = whole
    return state


def save_pretrained(
    model: Any, plain: Any, folder: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
) -> None:
    """`save_pretrained` of the model's own class, on whole tables. Every rank calls it; the world's rank 0 writes.

    Collectives:
        One all-gather a table, and one of 64 bytes after the file is written; none if `state_dict` is given.

    Raises:
        ConfigError: A `state_dict` of one rank's rows.
    """
    conversion = conversion_of(model)
    writes = is_main_process and (not dist.is_initialized() or dist.get_rank() == 0)
    if state_dict is not None:  # whole already: perhaps only this rank is here
        _check_whole(conversion, state_dict)
        plain.save_pretrained(model, folder, writes, state_dict, *args, **kwargs)
        return
    state_dict = full_state_dict(model)
    fault = capture(plain.save_pretrained, model, folder, writes, state_dict, *args, **kwargs)
    Exchange(conversion.shard, "header", "save_pretrained", fault=fault, rows=0).wait()


def _check_whole(conversion: Conversion, state: dict[str, Any]) -> None:
    shard = conversion.shard
    for name, module, key in conversion.tables():
        for alias in _aliases(conversion, name):
            table = state.get(alias)
            if not isinstance(table, Tensor):
                continue
            local = table.data_ptr() == getattr(module, key).data_ptr() and shard.tp_size > 1
            if local or len(table) != shard.vocab_size:
                raise ConfigError(
                    f"{alias} of the given state dict has {len(table)} rows, this rank's part of {shard.vocab_size}: "
                    "saving it would lose the others'. Give full_state_dict(model), or no state dict."
                )


def _aliases(conversion: Conversion, name: str) -> list[str]:
    head = f"{conversion.head_name}.weight"
    return [name, head] if conversion.tied and name == f"{conversion.embedding_name}.weight" else [name]


def full_optimizer_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """The optimizer's state dict with whole moments of the sharded tables, as an unsharded run has them.

    An optimizer that `take_whole_moments` was called for loads it at any layout.

    Collectives:
        One all-gather for each moment of each table.
    """
    conversion = conversion_of(model)
    tables = _positions(conversion, optimizer)
    state: dict[str, Any] = optimizer.state_dict()
    moments = {at: dict(values) for at, values in state["state"].items()}
    for at, table in tables.items():
        for name, value in moments.get(at, {}).items():
            if isinstance(value, Tensor) and value.shape == table.shape:
                moments[at][name] = gather_vocab(conversion.shard, value)
    return state | {"state": moments}


def take_whole_moments(model: Any, optimizer: Any) -> None:
    """Lets a torch optimizer load whole moments: it takes this rank's rows out of them."""
    conversion = conversion_of(model)

    def before(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        moments = {at: dict(values) for at, values in state["state"].items()}
        for at in _positions(conversion, optimizer):
            for name, value in moments.get(at, {}).items():
                if isinstance(value, Tensor) and value.dim() and len(value) == conversion.shard.vocab_size:
                    moments[at][name] = conversion.shard.slice(value)
        return state | {"state": moments}

    optimizer.register_load_state_dict_pre_hook(before)


def _positions(conversion: Conversion, optimizer: Any) -> dict[int, Tensor]:
    """Position of each table among the optimizer's parameters, which is its key in the state dict."""
    tables = {id(getattr(module, key)) for _, module, key in conversion.tables()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {at: parameter for at, parameter in enumerate(held) if id(parameter) in tables}
