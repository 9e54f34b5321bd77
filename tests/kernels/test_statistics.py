"""The statistics kernel against PyTorch in float64 and against its eager twin."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import require_close, require_equal
from vocab_parallel.loss import kernels, normalizer
from vocab_parallel.loss.kernels.statistics import Statistics, statistics
from vocab_parallel.loss.normalizer import Wanted
from vocab_parallel.loss.options import Scores

NOTHING: dict[str, Any] = {
    "softcap": None, "temperature": 1.0, "shifted_sum": False, "expected": False, "top": False, "in_place": False,
}  # fmt: skip
EVERYTHING: dict[str, Any] = NOTHING | {"shifted_sum": True, "expected": True, "top": True}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INF, NAN = float("inf"), float("nan")


def random(rows: int, columns: int, dtype: torch.dtype, device: str, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + columns)
    return (torch.randn(rows, columns, generator=generator) * scale).to(device, dtype)


def oracle(logits: Tensor, softcap: float | None, temperature: float) -> tuple[Statistics, Tensor]:
    """All statistics but the target's, in float64, and the exponentials."""
    x = logits.double()
    z = (x if softcap is None else softcap * torch.tanh(x / softcap)) / temperature
    m = z.amax(1, keepdim=True)
    d = z - torch.where(m == -INF, 0.0, m)
    e = d.exp()
    top = z.sort(dim=1, descending=True, stable=True)
    second = top.values[:, 1] if z.shape[1] > 1 else torch.full_like(m[:, 0], -INF)
    expected = torch.where(z == -INF, 0.0, e * d).sum(1)
    return Statistics(m[:, 0], e.sum(1), d.sum(1), expected, second, top.indices[:, 0], None), e


def require_statistics(got: Statistics, expected: Statistics, dtype: torch.dtype) -> None:
    work = torch.promote_types(dtype, torch.float32)
    for name, some, other in zip(Statistics._fields[:5], got, expected, strict=False):
        if other is None:
            assert some is None, name
            continue
        assert some is not None and some.dtype == work, name
        require_close(name, some, other, work)
    if expected.argmax is not None:
        assert got.argmax is not None
        assert got.argmax.tolist() == expected.argmax.tolist()


@pytest.mark.parametrize("columns", [1, 2, 16, 37, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_everything_at_once(dtype: torch.dtype, columns: int, blocking: str, device: str) -> None:
    logits = random(3, columns, dtype, device)
    buffer, target = logits.clone(), torch.tensor([0, -1, columns - 1], device=device)
    options = EVERYTHING | {"softcap": 4.0, "temperature": 0.7, "in_place": True}
    got = statistics(buffer, **options, target=target)
    expected, exponentials = oracle(logits, 4.0, 0.7)
    require_statistics(got, expected, dtype)
    require_close("exponentials", buffer, exponentials, dtype)
    z = 4.0 * torch.tanh(logits.double() / 4.0) / 0.7
    assert got.target_score is not None
    score = torch.where(target >= 0, z.gather(1, target.clamp(min=0)[:, None])[:, 0], 0.0)
    require_close("target", got.target_score, score, torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (None, 1.3), (30.0, 1.0), (0.5, 2.0)])
def test_scores(softcap: float | None, temperature: float, blocking: str, device: str) -> None:
    logits = random(3, 53, torch.float32, device, scale=8.0)
    logits[:, ::5] *= 0.01  # both branches of tanh
    buffer = logits.clone()
    options = EVERYTHING | {"softcap": softcap, "temperature": temperature, "in_place": True}
    got = statistics(buffer, **options)
    expected, exponentials = oracle(logits, softcap, temperature)
    require_statistics(got._replace(argmax=None), expected._replace(argmax=None), torch.float32)
    require_close("exponentials", buffer, exponentials, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_small_scores_under_a_softcap(dtype: torch.dtype, device: str) -> None:
    """Relative to themselves: `1 - exp(-2x)` would keep only what is left of 1."""
    logits = torch.tensor([[1e-6], [-3e-5], [1e-3], [-0.04], [0.6], [-0.62], [0.63], [5.0]], dtype=dtype, device=device)
    got = statistics(logits.clone(), **NOTHING | {"softcap": 1.0, "temperature": 0.7})
    ratio = got.maximum / (torch.tanh(logits.double()) / 0.7)[:, 0]
    require_close("score", ratio, torch.ones_like(ratio), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_equals_the_eager_twin(
    softcap: float | None, dtype: torch.dtype, blocking: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random(4, 45, dtype, device)
    logits[0, 3:40] = -INF
    logits[1] = -INF
    buffer, other = logits.clone(), logits.clone()
    got = statistics(buffer, **EVERYTHING | {"softcap": softcap, "temperature": 0.8, "in_place": True})
    monkeypatch.setattr(kernels, "available", lambda tensor: False)
    wanted = Wanted(shifted_sum=True, expected=True, top=True)
    twin = normalizer.statistics(other, scores=Scores(softcap, 0.8), wanted=wanted, in_place=True)
    fields = (twin.maximum, twin.sumexp, twin.shifted_sum, twin.expected, twin.second, twin.argmax)
    require_statistics(got, Statistics(*fields, target_score=None), dtype)
    require_close("exponentials", buffer, other, dtype)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)), ids=str)
def test_what_is_not_wanted(wanted: tuple[bool, ...], device: str) -> None:
    options = dict(zip(("shifted_sum", "expected", "top", "in_place"), wanted, strict=True))
    logits = random(2, 37, torch.float32, device)
    buffer = logits.clone()
    got = statistics(buffer, **NOTHING | options)
    full = statistics(logits.clone(), **EVERYTHING)
    fields = {"shifted_sum": options["shifted_sum"], "expected": options["expected"], "second": options["top"],
              "argmax": options["top"], "target_score": False}  # fmt: skip
    for name, some in got._asdict().items():
        if not fields.get(name, True):
            assert some is None, name
        else:
            require_close(name, some, getattr(full, name), torch.float32)
    assert torch.equal(buffer, logits) != options["in_place"]


def test_the_target_is_scored_as_the_maximum_is(blocking: str, device: str) -> None:
    logits = random(6, 37, torch.bfloat16, device, scale=20.0)
    target = logits.argmax(1)
    for softcap, temperature in ((None, 0.7), (5.0, 0.3)):
        options = NOTHING | {"softcap": softcap, "temperature": temperature, "in_place": True}
        got = statistics(logits.clone(), **options, target=target)
        assert got.target_score is not None
        require_equal("target", [got.target_score, got.maximum])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties(dtype: torch.dtype, blocking: str, device: str) -> None:
    logits = torch.full((6, 40), -1.0, dtype=dtype, device=device)
    logits[0, [9, 35]] = 2.0  # in the first block and in the last, which is not whole
    logits[1, [33, 38, 39]] = 2.0
    logits[2, 20], logits[2, 7], logits[2, 36] = 3.0, 2.5, 2.5
    logits[3, 10], logits[3, 30] = -0.0, 0.0
    logits[4, 10], logits[4, 30] = 0.0, -0.0  # row 5: all equal
    got = statistics(logits, **NOTHING | {"top": True})
    assert got.argmax is not None and got.argmax.dtype == torch.int64
    assert got.argmax.tolist() == [9, 33, 20, 10, 10, 0]
    assert got.second is not None and got.second.tolist() == [2.0, 2.0, 2.5, 0.0, 0.0, -1.0]
    assert got.maximum.tolist() == [2.0, 2.0, 3.0, 0.0, 0.0, -1.0]


def test_no_columns_one_column_no_rows(blocking: str, device: str) -> None:
    none = statistics(torch.empty(3, 0, device=device), **EVERYTHING | {"in_place": True},
                      target=torch.full((3,), -1, device=device))  # fmt: skip
    assert none.maximum.tolist() == [-INF] * 3 and none.sumexp.tolist() == [0.0] * 3
    assert [x.tolist() for x in none[2:] if x is not None] == [[0.0] * 3, [0.0] * 3, [-INF] * 3, [0] * 3, [0.0] * 3]
    logits = torch.tensor([[5.0], [-INF]], device=device)
    one = statistics(logits, **EVERYTHING | {"in_place": True})
    assert one.maximum.tolist() == [5.0, -INF] and one.sumexp.tolist() == [1.0, 0.0]
    assert one.second is not None and one.second.tolist() == [-INF] * 2
    assert one.argmax is not None and one.argmax.tolist() == [0, 0]
    assert logits.tolist() == [[1.0], [0.0]]
    empty = statistics(torch.empty(0, 5, device=device), **EVERYTHING)
    assert [len(x) for x in empty if x is not None] == [0] * 6


@pytest.mark.parametrize("finite", [(), (0,), (20,), (39,), (3, 39)], ids=str)
def test_minus_infinity(finite: tuple[int, ...], blocking: str, device: str) -> None:
    logits = torch.full((1, 40), -INF, device=device)
    for column in finite:
        logits[0, column] = float(column)
    buffer = logits.clone()
    got = statistics(buffer, **EVERYTHING | {"in_place": True})
    expected, exponentials = oracle(logits, None, 1.0)
    require_statistics(got, expected, torch.float32)
    require_close("exponentials", buffer, exponentials, torch.float32)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, of a block of the interpreter
def test_nan_and_infinity(blocking: str, device: str) -> None:
    logits = random(9, 40, torch.float32, device)
    for row, column in enumerate((0, 17, 39)):
        logits[row, column] = NAN
        logits[3 + row, column] = INF
    logits[6, 2], logits[6, 39] = INF, NAN
    logits[7] = NAN
    logits[8, 1], logits[8, 30] = -INF, INF
    got = statistics(logits.clone(), **EVERYTHING | {"in_place": True})
    assert got.maximum.isnan().tolist() == [True] * 3 + [False] * 3 + [True] * 2 + [False]
    assert (got.maximum == INF).tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True]
    assert got.argmax is not None and bool(((got.argmax >= 0) & (got.argmax < 40)).all())


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_offsets(offset: float, blocking: str, device: str) -> None:
    """Differences are taken before anything rounds, so an offset that the inputs hold exactly costs nothing."""
    logits = (random(4, 60, torch.float32, device) * 64).round() / 64  # 1e4 + k / 64 is exact
    plain = statistics(logits.clone(), **EVERYTHING | {"in_place": True})
    buffer = logits + offset
    moved = statistics(buffer, **EVERYTHING | {"in_place": True})
    for name in ("sumexp", "shifted_sum", "expected", "argmax"):
        require_equal(name, [getattr(moved, name), getattr(plain, name)])
    require_equal("maximum", [moved.maximum, plain.maximum + offset])


def test_the_largest_numbers(blocking: str, device: str) -> None:
    logits = torch.full((2, 40), -3e38, device=device)
    logits[0, 20] = 3e38
    logits[1, 5], logits[1, 30] = -20.0, 20.0
    buffer = logits.clone()
    got = statistics(buffer, **NOTHING | {"expected": True, "in_place": True})
    assert got.sumexp.tolist() == [1.0, 1.0]
    assert got.expected is not None and bool((got.expected.abs() < 1e-10).all())
    assert buffer.sum(1).tolist() == [1.0, 1.0]


def test_views(blocking: str, device: str) -> None:
    values = random(3, 37, torch.float32, device)
    expected, exponentials = oracle(values, None, 1.0)
    wide = torch.full((3, 64), NAN, device=device)
    storages = {
        "columns": (wide.clone(), lambda x: x[:, 5:42]),
        "every second": (torch.full((3, 80), NAN, device=device), lambda x: x[:, 1:75:2]),
        "transposed": (torch.full((40, 4), NAN, device=device), lambda x: x[1:38, :3].T),
    }
    for name, (storage, view) in storages.items():
        view(storage).copy_(values)
        got = statistics(view(storage), **EVERYTHING | {"in_place": True})
        require_statistics(got, expected, torch.float32)
        require_close(name, view(storage), exponentials, torch.float32)
        assert int(storage.isnan().sum()) == storage.numel() - values.numel(), name


@pytest.mark.parametrize("far", ["rows", "columns"])
def test_offsets_past_two_to_the_31(far: str, device: str) -> None:
    """The view's third row, or column, is 2^31 + 16 elements into a storage of which three short pieces are touched."""
    stride = (1 << 30) + 8
    storage = torch.empty(2 * stride + 3, dtype=torch.float16, device=device)
    logits = storage.as_strided((3, 3), (stride, 1) if far == "rows" else (1, stride))
    values = random(3, 3, torch.float16, device)
    logits.copy_(values)
    got = statistics(logits, **EVERYTHING | {"in_place": True}, target=torch.tensor([2, 2, 2], device=device))
    expected, exponentials = oracle(values, None, 1.0)
    require_statistics(got, expected, torch.float16)
    require_close("exponentials", logits, exponentials, torch.float16)
    assert got.target_score is not None
    require_equal("target", [got.target_score, values[:, 2].float()])
