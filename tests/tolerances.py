"""Every tolerance of the tests. Identifiers, replicated values and reshards are compared exactly, without one."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest error allowed against the float64 oracle, relative to the largest entry of the expected tensor (or to 1). For
# small inputs of order one; at realistic sizes the rule is `WORSE_THAN_PYTORCH`.
RELATIVE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}

# Error against the float64 oracle, at most so many times that of PyTorch's own unsharded computation in the same dtype.
WORSE_THAN_PYTORCH = 2.0


def floor(expected: Tensor, dtype: torch.dtype) -> float:
    """Half a unit in the last place of the largest expected entry: no result stored in `dtype` can be held to less."""
    return 0.5 * torch.finfo(dtype).eps * expected.abs().max().item() if expected.numel() else 0.0


def require_close(name: str, got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compares `got` with the oracle's `expected` under `RELATIVE[dtype]`; a failure starts with `name`."""
    assert got.shape == expected.shape, f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}"
    got, expected = got.double(), expected.double()
    same = (got == expected) | (got.isnan() & expected.isnan())  # infinities too
    error = torch.where(same, 0.0, (got - expected).abs())
    finite = expected[expected.isfinite()].abs()
    limit = RELATIVE[dtype] * max(1.0, finite.max().item() if finite.numel() else 1.0)
    assert bool((error <= limit).all()), (
        f"{name}: off by {error.max().item():.3g} (limit {limit:.3g})\n{got}\n{expected}"
    )


def require_equal(name: str, tensors: list[Tensor]) -> None:
    """The same bits in all `tensors` (NaN equals NaN, -0.0 does not equal 0.0); a failure starts with `name`."""
    first = tensors[0]
    for rank, other in enumerate(tensors):
        assert other.dtype == first.dtype, f"{name}: dtype {other.dtype} on rank {rank}, {first.dtype} on rank 0"
        assert other.shape == first.shape, f"{name}: shape {list(other.shape)} on rank {rank}, {list(first.shape)} on 0"
        assert torch.equal(bits(other), bits(first)), f"{name}: rank {rank} differs from rank 0\n{other}\n{first}"


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, for comparisons in which NaN equals NaN."""
    # a clone: what has one row or column counts as contiguous with any stride, and has no view as bytes then
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
