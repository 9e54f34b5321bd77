"""State follows the beams: every row of every per-beam tensor, whatever holds it, is taken from the beam's parent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

_State = TypeVar("_State")
_PLAIN = (str, bytes, int, float, bool)


def reorder(
    state: _State,
    parents: Tensor,  # int64 [B, K] in each request's own beams, or flat rows [R]
    *,
    beams: int | None = None,
) -> _State:
    """State whose row i is that of the old row `parents[i]`: rows may be repeated, dropped, or become more or fewer.

    Tensors are taken by their first dimension (those without dimensions stay); dicts, lists, tuples and dataclasses by
    what they hold; objects with a method by that: `fork(parents, children)` (random streams, so that the beams of one
    parent draw different numbers), `rows(index)` (views, policy states with their streams), `reorder_cache(index)` or
    `batch_select_indices(index)` (Transformers' caches, which change in place). Text, numbers and None stay, but a list
    of nothing else is refused: it may hold one for each beam.

    Args:
        parents: The same on every rank.
        beams: Old beams a request, if not K: then row b of `[B, K]` parents starts at the old row `b * beams`.

    Returns:
        State of the same make; nothing of the caller's is changed, caches excepted.

    Raises:
        TypeError, ValueError: What cannot be reordered, or has too few rows, by its place in the state.
    """
    result: _State = _reorder(state, flat_parents(parents, beams), "state")
    return result


def flat_parents(parents: Tensor, beams: int | None = None) -> Tensor:
    """Rows of flat `[B * beams, ...]` state, int64 `[B * K]`, from parents `[B, K]` within each request."""
    if parents.dim() == 1:
        return parents
    if parents.dim() != 2:
        raise ValueError(f"parents must be [B, K], or flat rows [R], got {list(parents.shape)}")
    count = parents.shape[1] if beams is None else beams
    if parents.device.type == "cpu" and bool(((parents < 0) | (parents >= count)).any()):
        row, at = ((parents < 0) | (parents >= count)).nonzero()[0].tolist()
        raise ValueError(
            f"parent {int(parents[row, at])} of request {row} is outside [0, {count}), its own beams: a flat index "
            "needs flat rows [R], and other numbers of old and new beams need beams=."
        )
    return (parents + count * torch.arange(len(parents), device=parents.device)[:, None]).flatten()


def _reorder(state: Any, index: Tensor, where: str) -> Any:
    if isinstance(state, Tensor):
        return _take(state, index, where)
    if state is None or isinstance(state, _PLAIN):
        return state
    if hasattr(state, "fork"):
        return state.fork(index, _numbers(index))
    for name in ("reorder_cache", "batch_select_indices"):
        if hasattr(state, name):
            getattr(state, name)(index)
            return state
    if isinstance(state, Mapping):
        return {key: _reorder(value, index, f"{where}[{key!r}]") for key, value in state.items()}
    if isinstance(state, list) and state and all(isinstance(one, _PLAIN) for one in state):
        raise TypeError(
            f"{where} is a list of {len(state)} plain values, which may be one for each beam and would stay behind: "
            "use a tensor with a row for each beam, or a tuple for what all beams share."
        )
    if isinstance(state, (list, tuple)):
        items = [_reorder(value, index, f"{where}[{at}]") for at, value in enumerate(state)]
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)
    if hasattr(state, "rows"):
        streams = {"children": _numbers(index)} if hasattr(state, "streams") else {}
        return state.rows(index, **streams)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        fields = {one.name: getattr(state, one.name) for one in dataclasses.fields(state) if one.init}
        moved = {name: _reorder(value, index, f"{where}.{name}") for name, value in fields.items()}
        return dataclasses.replace(state, **moved)
    raise TypeError(
        f"{where} is a {type(state).__name__}, which beams cannot reorder: use tensors with a row for each beam, "
        "containers of them, or give it a method rows(index)."
    )


def _numbers(index: Tensor) -> Tensor:
    """How many times each entry of `index` came before it: a child's number among its parent's."""
    return (index[:, None] == index[None, :]).tril(-1).sum(1)


def _take(tensor: Tensor, index: Tensor, where: str) -> Tensor:
    if tensor.dim() == 0:
        return tensor
    rows = index.to(tensor.device)
    if tensor.device.type == "cpu" and len(rows) and int(rows.max()) >= len(tensor):
        raise ValueError(
            f"{where} has {len(tensor)} rows, shape {list(tensor.shape)}, but beam {int(rows.max())} of the flat beams "
            "is asked for: its first dimension must be B * K."
        )
    return tensor.index_select(0, rows)
