"""The merge and the scaling against PyTorch in float64 and against their eager twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tolerances import require_close, require_equal
from vocab_parallel.loss.kernels.epilogue import merge, merge_reference, scale, scale_reference

INF, NAN = float("inf"), float("nan")
NAMES = ("maximum", "sumexp", "target")


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("ranks", "rows"), [(1, 5), (2, 128), (3, 131), (8, 1), (4, 0)])
def test_merge(ranks: int, rows: int, dtype: torch.dtype, device: str) -> None:
    payload = random(ranks, 3, rows, dtype=dtype, device=device) * 5  # strided, as an exchange returns it
    m, s, z = payload[:, 0], payload[:, 1].abs_().add_(1.0), payload[:, 2]
    if ranks > 2 and rows > 2:
        m[0, 0] = m[1, 1] = m[2, 1] = -INF  # empty shards
        m[:, 2], s[:, 2] = -INF, 0.0
    got, twin = merge(m, s, z), merge_reference(m, s, z)
    exact = merge_reference(m.double(), s.double(), z.double())
    for name, some, other, best in zip(NAMES, got, twin, exact, strict=True):
        assert some.dtype == dtype and some.shape == (rows,)
        require_close(name, some, other, dtype)
        require_close(name, some, best, dtype)


def test_merge_adds_in_rank_order(device: str) -> None:
    """1 + 1e8 - 1e8 is 1 in another order; and the target's score of one owner comes out as it went in."""
    m, s = torch.zeros(3, 2, device=device), torch.tensor([[1.0, 1e8], [1e8, -1e8], [-1e8, 1.0]], device=device)
    z = torch.tensor([[0.0, 0.1], [0.3, 0.0], [0.0, 0.0]], device=device)
    got = merge(m, s, z)
    assert got[1].tolist() == [0.0, 1.0]
    require_equal("target", [got[2], torch.tensor([0.3, 0.1], device=device)])


def test_merge_of_what_is_not_finite(device: str) -> None:
    m = torch.tensor([[NAN, 1.0, INF, 1.0, -INF], [2.0, NAN, 1.0, INF, -INF]], device=device)
    s = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 0.0]], device=device)
    z = torch.tensor([[0.0, 0.0, 0.0, 0.0, -INF], [0.0, 0.0, NAN, 0.0, 0.0]], device=device)
    for name, some, other in zip(NAMES, merge(m, s, z), merge_reference(m, s, z), strict=True):
        require_close(name, some, other, torch.float32)


def operands(
    rows: int, columns: int, vocab: int, dtype: torch.dtype, device: str, uniform: bool
) -> tuple[Tensor | None, ...]:
    work = torch.promote_types(dtype, torch.float32)
    vectors = [random(rows, dtype=work, device=device, seed=seed) for seed in range(10, 15)]
    vectors[1][::2] = 0.0  # rows whose target this shard does not own
    local = torch.arange(rows, device=device) * 7 % max(vocab, 1)
    return (
        random(rows, columns, dtype=dtype, device=device, seed=1),
        random(rows, columns, dtype=dtype, device=device, seed=2),
        random(vocab, columns, dtype=dtype, device=device, seed=3),
        local, vectors[0], vectors[1], vectors[2], vectors[3],
        vectors[4] if uniform else None,
        random(columns, dtype=work, device=device, seed=4) if uniform else None,
    )  # fmt: skip


def exact(arguments: tuple[Tensor | None, ...]) -> tuple[Tensor | None, Tensor | None]:
    doubles = [x.double() if x is not None and x.is_floating_point() else x for x in arguments]
    return scale_reference(*doubles)  # type: ignore[arg-type]


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("columns", [1, 40, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scale(dtype: torch.dtype, columns: int, uniform: bool, device: str) -> None:
    arguments = operands(5, columns, 9, dtype, device, uniform)
    work = torch.promote_types(dtype, torch.float32)
    got = scale(*arguments)  # type: ignore[arg-type]
    for other in (scale_reference(*arguments), exact(arguments)):  # type: ignore[arg-type]
        for name, some, best, precision in zip(("grad", "scaled"), got, other, (work, dtype), strict=True):
            assert some is not None and best is not None and some.dtype == precision
            require_close(name, some, best, precision)


def test_scale_without_one_or_the_other(device: str) -> None:
    arguments = operands(4, 20, 9, torch.bfloat16, device, True)
    both = scale(*arguments)  # type: ignore[arg-type]
    grad, none = scale(*arguments[:7], None, *arguments[8:])  # type: ignore[arg-type]
    assert none is None and grad is not None and both[0] is not None
    require_equal("grad", [grad, both[0]])
    none, scaled = scale(None, *arguments[1:])  # type: ignore[arg-type]
    assert none is None and scaled is not None and both[1] is not None
    require_equal("scaled", [scaled, both[1]])
    assert scale(None, *arguments[1:7], None) == (None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "columns", "vocab"), [(0, 8, 5), (3, 8, 0), (3, 8, 1)])
def test_scale_of_nothing(rows: int, columns: int, vocab: int, device: str) -> None:
    """No rows; a shard without ids, which owns no target."""
    arguments = operands(rows, columns, vocab, torch.float32, device, True)
    got, other = scale(*arguments), scale_reference(*arguments)  # type: ignore[arg-type]
    for name, some, best in zip(("grad", "scaled"), got, other, strict=True):
        assert some is not None and best is not None
        require_close(name, some, best, torch.float32)


def test_scale_reads_no_row_of_a_target_that_another_shard_owns(device: str) -> None:
    arguments = list(operands(4, 20, 9, torch.float32, device, False))
    weight, at_target = arguments[2], arguments[5]
    assert weight is not None and at_target is not None
    arguments[3] = torch.tensor([0, 5, 0, 6], device=device)
    weight[0] = NAN
    assert at_target.tolist()[::2] == [0.0, 0.0]
    grad, _ = scale(*arguments)  # type: ignore[arg-type]
    assert grad is not None and bool(grad.isfinite().all())


def test_scale_of_views(device: str) -> None:
    arguments = list(operands(6, 24, 9, torch.bfloat16, device, True))
    plain = scale(*arguments)  # type: ignore[arg-type]
    for at, matrix in enumerate(arguments[:3]):
        assert matrix is not None
        arguments[at] = torch.cat([matrix, matrix]).T.contiguous().T[: len(matrix)]
    for at in (4, 5, 6, 7):
        vector = arguments[at]
        assert vector is not None
        arguments[at] = torch.stack([vector, vector], 1)[:, 0]
    for name, some, other in zip(("grad", "scaled"), scale(*arguments), plain, strict=True):  # type: ignore[arg-type]
        assert some is not None and other is not None
        require_equal(name, [some, other])
    for at in (6, 7):  # one number for every row
        arguments[at] = torch.tensor(0.5, device=device).expand(6)
    for some, best in zip(scale(*arguments), exact(tuple(arguments)), strict=True):  # type: ignore[arg-type]
        assert some is not None and best is not None
        require_close("expanded", some, best, some.dtype)


@pytest.mark.parametrize("far", ["product", "hidden", "weight"])
def test_scale_past_two_to_the_31(far: str, device: str) -> None:
    """A matrix whose third row is 2^31 + 16 elements into a storage of which three short pieces are touched."""
    arguments = list(operands(3, 8, 3, torch.bfloat16, device, False))
    arguments[3] = torch.full((3,), 2, device=device)
    plain = scale(*arguments)  # type: ignore[arg-type]
    at = ("product", "hidden", "weight").index(far)
    matrix, stride = arguments[at], (1 << 30) + 8
    assert matrix is not None
    storage = torch.empty(2 * stride + 8, dtype=matrix.dtype, device=device)
    arguments[at] = storage.as_strided((3, 8), (stride, 1)).copy_(matrix)
    for name, some, other in zip(("grad", "scaled"), scale(*arguments), plain, strict=True):  # type: ignore[arg-type]
        assert some is not None and other is not None
        require_equal(name, [some, other])
