"""The global gradient norm of a model whose vocabulary is sharded, and clipping by it.

A norm taken with `torch.nn.utils.clip_grad_norm_` is another one on every rank, because each holds other rows. Ranks
that clip by different factors drift apart in what they should hold alike, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.collectives import all_reduce_
from vocab_parallel.errors import NonFiniteError
from vocab_parallel.shard import RankGroup, VocabShard
from vocab_parallel.tying import vocab_parameters

_Over = tuple[int, ...]  # positions in the list of groups: the same on every rank, which rank numbers are not


@torch.no_grad()
def gradient_norm(
    model: nn.Module, *, extra: Iterable[nn.Parameter] = (), group: dist.ProcessGroup | None = None
) -> Tensor:
    """The 2-norm of all gradients of the unsharded model, float64 scalar, the same bits on every rank.

    Each vocabulary shard counts once over its group, what is replicated once, a tied weight once. A DTensor counts over
    the dimensions of its mesh that shard it. What Megatron marks counts as it does there: `tensor_model_parallel` over
    the vocabulary's group, and `shared`, the last stage's copy of a tied weight, not at all.

    Args:
        model: Its gradients are `main_grad` where a Parameter has one, else `grad`; already reduced over data-parallel
            ranks. One that is None counts as zero.
        extra: Parameters outside of `model`, replicated over the vocabulary's group unless they are DTensors.
        group: The ranks that hold the other pipeline stages; their squares are added.

    Collectives:
        One all-reduce of 8 bytes per distinct group of ranks (per kind of parameter sharded over it: a weight over
        the vocabulary and data-parallel ranks beside one over the latter makes 16 bytes), one over `group`.
    """
    sharded = vocab_parameters(model)
    shards = {id(parameter): shard for parameter, shard in sharded.values()}
    for shard in {id(shard): shard for shard in shards.values()}.values():
        shard.raise_deferred()
    home = next(iter(shards.values()), None)
    groups: list[RankGroup] = []
    totals: dict[_Over, Tensor] = {(): torch.zeros((), dtype=torch.float64)}
    for parameter in _each([*model.parameters(), *extra]):
        if getattr(parameter, "shared", False):
            continue
        parallel = home if getattr(parameter, "tensor_model_parallel", False) else None
        over = _sharded_over(parameter, shards.get(id(parameter), parallel), home, groups)
        square = _square(parameter)
        totals[over] = totals[over].to(square.device) + square if over in totals else square
    for at, over_group in enumerate(groups):
        concerned = sorted(over for over in totals if at in over)
        packed = all_reduce_(over_group, torch.stack([totals.pop(over) for over in concerned])).wait()
        for over, value in zip(concerned, packed.unbind(), strict=True):
            left = tuple(other for other in over if other != at)
            totals[left] = totals[left].to(value.device) + value if left in totals else value
    total = totals[()]
    if group is not None and dist.get_world_size(group) > 1:
        total = all_reduce_(_rank_group(group, home), total[None]).wait()[0]
    return total.sqrt()


@torch.no_grad()
def clip_gradients_(
    model: nn.Module,
    max_norm: float,
    *,
    extra: Iterable[nn.Parameter] = (),
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scales all gradients in place, by one factor on every rank, so that their global norm is at most `max_norm`.

    The host waits for the norm.

    Args:
        max_norm: Infinity clips nothing and checks that the norm is finite.

    The other arguments: as in `gradient_norm`.

    Returns:
        The norm before, float64 scalar, the same bits on every rank.

    Collectives:
        Those of `gradient_norm`.

    Raises:
        NonFiniteError: The norm is not finite; on every rank. Nothing is scaled.
    """
    extra = list(extra)
    norm = gradient_norm(model, extra=extra, group=group)
    value = float(norm)
    if not math.isfinite(value):
        raise NonFiniteError(
            f"the global gradient norm is {value}: a gradient holds NaN or infinity, or overflows. No gradient was "
            "changed. Skip this step, and lower the learning rate or look at the last batch."
        )
    gradients = [
        _local(gradient) for p in _each([*model.parameters(), *extra]) if (gradient := _gradient(p)) is not None
    ]
    if value > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / value)
    return norm


def _each(parameters: list[nn.Parameter]) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    for parameter in parameters:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    main_grad = getattr(parameter, "main_grad", None)
    return main_grad if isinstance(main_grad, Tensor) else parameter.grad


def _square(parameter: nn.Parameter) -> Tensor:
    """Sum of the squares of this rank's part of the gradient, float64 scalar."""
    gradient = _gradient(parameter)
    if gradient is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:  # type: ignore[attr-defined]
        gradient = gradient.redistribute(parameter.device_mesh, placements)  # type: ignore[attr-defined]
    norm: Tensor = torch.linalg.vector_norm(_local(gradient), dtype=torch.float64)
    return norm.square()


def _local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, without its import, which takes long; any other tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _sharded_over(parameter: Any, shard: VocabShard | None, home: VocabShard | None, groups: list[RankGroup]) -> _Over:
    """The groups that hold parts of `parameter`, as positions in `groups`, to which new ones are added."""
    over: list[RankGroup] = [shard] if shard is not None else []
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if not placement.is_replicate():
            over.append(_rank_group(parameter.device_mesh.get_group(dim), home))
    return tuple(sorted({_position(group, groups) for group in over if group.size > 1}))


def _position(group: RankGroup, groups: list[RankGroup]) -> int:
    """By their ranks: hosts make several groups of the same ones."""
    ranks = dist.get_process_group_ranks(group.group)
    for at, known in enumerate(groups):
        if dist.get_process_group_ranks(known.group) == ranks:
            return at
    groups.append(group)
    return len(groups) - 1


def _rank_group(group: dist.ProcessGroup, home: VocabShard | None) -> RankGroup:
    """A group whose traffic counts as the vocabulary's, where there is one."""
    return home.wider(group) if home is not None else RankGroup(group)
