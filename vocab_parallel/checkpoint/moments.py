"""State for an optimizer that has none yet, so that there is something to load into."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from vocab_parallel.vocabulary.manifest.describing import plain_name


def made_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, kept: Collection[str], ties: Mapping[str, str]
) -> list[Tensor]:
    """Lets the optimizer make the states that a checkpoint has and it has not: by a step at rate 0 of zero gradients.

    Only the optimizer knows what it keeps. Parameters and gradients stay as they are.

    Args:
        kept: The checkpoint's keys of optimizer state; if there are none, all parameters get a state, to be seen.
        ties: The checkpoint's, further name to first name.

    Returns:
        The parameters that got a state.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain_name(name))
    owners = {owner for owner, own in names.items() if not kept or _has_state(own, kept, ties)}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    bare = [parameter for parameter in held if id(parameter) in owners and not optimizer.state.get(parameter)]
    if not bare:
        return []
    gradients = [parameter.grad for parameter in held]
    settings = [dict(group) for group in optimizer.param_groups]  # some count their steps here
    try:
        for parameter in held:
            parameter.grad = None
        for parameter in bare:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            group["lr"] = 0.0 * group["lr"]
        optimizer.step()
    except BaseException:
        forget(optimizer, bare)
        raise
    finally:
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.clear()
            group.update(before)
    return bare


def forget(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Takes states back that were made."""
    for parameter in parameters:
        optimizer.state.pop(parameter, None)


def _has_state(names: list[str], kept: Collection[str], ties: Mapping[str, str]) -> bool:
    """Whether the checkpoint has a state of the parameter with these names."""
    starts = tuple(f"optimizer.{ties.get(name, name)}." for name in names)
    return any(key.startswith(starts) for key in kept)
