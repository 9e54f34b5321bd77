"""Sums of tokens' log-probabilities over sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.errors import LayoutMismatchError


class MaskedSum(NamedTuple):
    """sum: `[...]` in nats, in the dtype of what was summed. tokens: int64 `[...]`, how many were."""

    sum: Tensor
    tokens: Tensor


def masked_sum(
    logprobs: Tensor,  # [..., L] floating
    mask: Tensor,  # [..., L] bool, or numbers that are 0 where a token does not count
    dim: int = -1,
) -> MaskedSum:
    """The sum of the log-probabilities that the mask selects, and their number; for a mean, divide.

    What is masked out has no part in the sum, also where it is -inf: the log-probability of a token that a filter has
    removed. `(logprobs * mask).sum()` would be NaN there. Differentiable; masked places get a gradient of 0.

    Returns:
        `MaskedSum`; -inf where a selected token is -inf. No collective.

    Raises:
        LayoutMismatchError: Shapes that differ.
    """
    if logprobs.shape != mask.shape:
        raise LayoutMismatchError(f"logprobs {list(logprobs.shape)} and mask {list(mask.shape)} must have one shape")
    selected = mask != 0
    return MaskedSum(torch.where(selected, logprobs, 0.0).sum(dim), selected.sum(dim))
