"""Other dtypes for the floating-point tensors of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.errors import CheckpointLayoutError


def converted(name: str, own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor gets if floating-point ones are to be `wanted`.

    Raises:
        CheckpointLayoutError: It is of 8 bits, where numbers mean something with their scales only.
    """
    if wanted is None or not own.is_floating_point or own == wanted:
        return own
    if own.itemsize == 1:
        raise CheckpointLayoutError(
            f"{name} is quantised to {own}, and its scales lie in another tensor: its numbers alone cannot become "
            f"{wanted}. Convert without --dtype, or dequantise the model first"
        )
    return wanted


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `Tensor.to`, without numbers that become infinite.

    Raises:
        CheckpointLayoutError: There is one.
    """
    made = tensor.to(dtype)
    if dtype.is_floating_point and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = made.isinf() & ~tensor.isinf()
        if bool(lost.any()):
            raise CheckpointLayoutError(
                f"{name} has {float(tensor[lost][0]):g}, beyond the largest {dtype}, {torch.finfo(dtype).max:g}: "
                "convert to bfloat16 or float32"
            )
    return made
