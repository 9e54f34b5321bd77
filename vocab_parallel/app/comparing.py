"""How far a result is from what was expected, as one number: for self-tests and for the evaluation ladder."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vocab_parallel.collectives import all_gather
from vocab_parallel.shard import RankGroup

SMALL = 1e-3  # gradients whose largest entry is under this are compared with it


def attempt(run: Callable[[], float]) -> tuple[float, str]:
    """The error that `run` gives, infinite for NaN and for an exception, and the exception's words."""
    try:
        error = float(run())
    except Exception as raised:
        return math.inf, f"{type(raised).__name__}: {raised}"
    return (math.inf if math.isnan(error) else error), ""


def backward(loss: Tensor) -> None:
    """The gradients of the sum of `loss`."""
    loss.sum().backward()  # type: ignore[no-untyped-call]


def gradient(tensor: Tensor) -> Tensor:
    """The gradient that a backward has left."""
    assert tensor.grad is not None, "no gradient was formed"
    return tensor.grad


def difference(got: Tensor, want: Tensor) -> float:
    """The largest absolute difference; infinite if there is a NaN, which a later `max` would lose."""
    _require_shape(got, want)
    return _number((got.detach().double() - want.detach()).abs().max()) if want.numel() else 0.0


def scaled(got: Tensor, want: Tensor) -> float:
    """`difference`, each entry over its own size where that is above 1: of losses, which may be of many sizes."""
    _require_shape(got, want)
    wide = want.detach().double()
    error = (got.detach() - wide).abs() / wide.abs().clamp(min=1.0)
    return _number(error.max()) if want.numel() else 0.0


def relative(got: Tensor | None, want: Tensor) -> float:
    """`difference` over the largest entry expected: of gradients."""
    assert got is not None, "no gradient was formed"
    error = difference(got, want)
    return error / max(SMALL, float(want.abs().max())) if 0 < error < math.inf else error


def unequal(got: Tensor, want: Tensor) -> float:
    """How many entries have other bits; NaN equals itself."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"{got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}")
    return float((_bytes(got) != _bytes(want)).any(-1).sum())


def apart(group: RankGroup, tensor: Tensor) -> float:
    """How many entries of what should be replicated have other bits on some rank than on the first.

    Collectives:
        One all-gather of `tensor`.
    """
    every = _bytes(all_gather(group, tensor.detach()).wait())
    return float((every != every[:1]).any(-1).sum())


def _require_shape(got: Tensor, want: Tensor) -> None:
    if got.shape != want.shape:
        raise AssertionError(f"shape {list(got.shape)}, expected {list(want.shape)}")


def _number(error: Tensor) -> float:
    found = float(error)
    return math.inf if math.isnan(found) else found


def _bytes(tensor: Tensor) -> Tensor:
    """``[..., element size]``."""
    return tensor.detach().contiguous().unsqueeze(-1).view(torch.uint8)
