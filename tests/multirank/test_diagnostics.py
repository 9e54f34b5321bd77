"""Diagnostics and the reliability curve over shards: the oracle's numbers, the same bits everywhere, stated bytes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.batch import attempt
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import ALL_SIZES, Batch
from tests.tolerances import bits, require_equal
from vocab_parallel.decode.diagnostics.calibration import fit_temperature, reliability
from vocab_parallel.decode.diagnostics.diagnostics import Diagnostics, diagnose
from vocab_parallel.decode.diagnostics.reliability import Reliability
from vocab_parallel.reference import diagnostics as oracle

HEADER = 64
IGNORED = -100
LAYOUTS = [(9, 1), (13, 4), (2, 4), (1, 1), (700, 8)]  # over 4 ranks: 3, 3, 3, 0; 4, 4, 4, 1; 2, 0, 0, 0; 1, 0, 0, 0
KINDS = ["normal", "ties", "masked", "peaked", "flat"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ROW_TEMPERATURES = torch.tensor([0.25, 1.0, 3.0, 0.01, 1e4, 1.0], dtype=torch.float64)
ABSOLUTE = 1e-9  # nats; masses are integers of 2**-44 of the largest, and their exp has 1e-10


def logits_of(kind, vocab, dtype, rows=6):
    draw = torch.Generator().manual_seed(vocab)
    z = torch.randn(rows, vocab, generator=draw, dtype=torch.float64) * 3
    if kind == "ties":
        z = torch.randint(0, 2, (rows, vocab), generator=draw).double() - 1.0
    if kind == "masked":
        keep = torch.rand(rows, vocab, generator=draw) < 0.4
        keep[:, vocab // 2] = True
        z = torch.where(keep, z, -torch.inf)
    if kind == "peaked":
        z[:, vocab - 1] += 60.0
    if kind == "flat":
        z = torch.full_like(z, -7.25)
    return z.to(dtype)


def targets_of(kind, vocab, rows=6):
    """Some wrong, some right, one ignored."""
    best = (logits_of(kind, vocab, torch.float64, rows) + 0.0).sort(dim=1, descending=True, stable=True).indices[:, 0]
    target = torch.where(torch.arange(rows) % 3 == 0, vocab // 2, best)
    target[1] = IGNORED
    return target


def _diagnosed(rank, kind, vocab, multiple_of, dtype):
    shard = shard_of(vocab, multiple_of)
    whole = logits_of(kind, vocab, dtype)
    mine = shard.slice(whole, -1, fill=math.nan)
    before = mine.clone()
    shard.traffic.reset()
    found = {"one": diagnose(mine, shard=shard, temperature=0.7)}
    sent = dict(shard.traffic.bytes), dict(shard.traffic.calls)
    found["rows"] = diagnose(mine, shard=shard, temperature=ROW_TEMPERATURES)
    stacked = diagnose(mine.view(2, 3, -1), shard=shard, temperature=ROW_TEMPERATURES.view(2, 3))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(stacked, found["rows"], strict=True))
    assert stacked.entropy.shape == (2, 3)
    shard.traffic.reset()
    curve = reliability(mine, targets_of(kind, vocab), shard=shard, bins=5, temperature=0.7)
    sent += dict(shard.traffic.bytes), dict(shard.traffic.calls)
    assert torch.equal(bits(mine), bits(before)), "the logits were modified"
    return found, sent, curve


CASES = {dtype: LAYOUTS if dtype == torch.float32 else LAYOUTS[:2] for dtype in DTYPES}
DIAGNOSED = [(kind, *layout, dtype) for kind in KINDS for dtype in DTYPES for layout in CASES[dtype]]
DIAGNOSED_CASES = pytest.mark.parametrize(("kind", "vocab", "multiple_of", "dtype"), DIAGNOSED)


@TP
@DIAGNOSED_CASES
def test_every_diagnostic_is_the_formulas_value(tp, kind, vocab, multiple_of, dtype):
    whole = logits_of(kind, vocab, dtype)
    exact = ABSOLUTE if dtype == torch.float64 else 2e-7  # the division by a temperature rounds float32 scores
    for found, _, _ in RUNS(tp, _diagnosed, kind, vocab, multiple_of, dtype):
        for name, temperature in (("one", 0.7), ("rows", ROW_TEMPERATURES)):
            expected = oracle.diagnose(whole, temperature)
            for field, got, want in zip(Diagnostics._fields, found[name], expected, strict=True):
                if not want.is_floating_point():
                    assert torch.equal(got, want), field
                    continue
                scale = float((whole.double().nan_to_num(neginf=0.0) / 0.01).abs().max()) + vocab
                assert got.dtype == torch.float64, field
                assert torch.allclose(got, want, rtol=1e-9, atol=exact * scale), (field, got - want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_every_rank_and_at_every_tp_size(kind, dtype):
    for vocab, multiple_of in CASES[dtype]:
        ranks = [one for tp in (1, 2, 3, 4) for one in RUNS(tp, _diagnosed, kind, vocab, multiple_of, dtype)]
        for name in ("one", "rows"):
            for field in Diagnostics._fields:
                require_equal(field, [getattr(found[name], field) for found, _, _ in ranks])
        assert len({curve for _, _, curve in ranks}) == 1


@TP
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_costs_its_documented_bytes_and_calls(tp, dtype):
    first = HEADER + 512  # what the first exchange of a kind has room for
    for _, (sent, calls, curve_sent, curve_calls), _ in RUNS(tp, _diagnosed, "normal", 9, 1, dtype):
        if tp == 1:
            assert not sent and not curve_sent
            continue
        assert calls == {"all_gather": 2} and sent == {"all_gather": (tp - 1) * (first + 6 * 32)}
        assert curve_calls == {"all_gather": 3} and curve_sent == {"all_gather": (tp - 1) * (first + 6 * (8 + 32))}


@TP
@DIAGNOSED_CASES
def test_the_curve_has_the_oracles_bins(tp, kind, vocab, multiple_of, dtype):
    whole, target = logits_of(kind, vocab, dtype), targets_of(kind, vocab)
    curve = RUNS(tp, _diagnosed, kind, vocab, multiple_of, dtype)[0][2]
    expected = oracle.calibration(whole, target, 5, 0.7)
    assert curve.rows == 5
    if kind == "flat" and vocab in (2, 1):  # a confidence on the edge of two bins: rounding decides in the oracle
        assert curve.ece == pytest.approx(expected["ece"], abs=1e-9)
        return
    assert list(curve.counts) == expected["rows"]
    for name in ("accuracy", "confidence"):
        for got, want, count in zip(getattr(curve, name), expected[name], curve.counts, strict=True):
            assert (math.isnan(got) and count == 0) if want is None else got == pytest.approx(want, abs=1e-8)
    assert curve.ece == pytest.approx(expected["ece"], abs=1e-8)
    assert curve.nll == pytest.approx(expected["nll"], rel=1e-8, abs=1e-8)


def _parts(rank):
    shard = shard_of(9)
    whole, target = logits_of("normal", 9, torch.float32, 60), targets_of("normal", 9, 60)
    mine = shard.slice(whole, -1)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    parts = sum((reliability(mine[rows], target[rows], shard=shard) for rows in order.split(7)), Reliability.none(15))
    return parts, reliability(mine, target, shard=shard)


def test_curves_of_parts_in_any_order_add_up_to_the_whole():
    for parts, whole in RUNS(3, _parts):
        assert parts == whole and whole.rows == 59


FITTED = {"sharp": 3.0, "soft": 0.4, "calibrated": 1.0}  # the temperature at which the targets were drawn, T


def material(name, rows=400, vocab=31):
    """Logits, and targets drawn from `softmax(logits / T)`."""
    draw = torch.Generator().manual_seed(len(name))
    z = torch.randn(rows, vocab, generator=draw) * 2
    p = (z.double() / FITTED.get(name, 1.0)).softmax(1)
    target = torch.multinomial(p, 1, generator=draw)[:, 0]
    if name == "always right":
        target = z.argmax(1)
    if name == "always worst":
        target = z.argmin(1)
    target[::11] = IGNORED
    return z, target


def _fitted(rank, name, batched):
    shard = shard_of(31)
    whole, target = material(name)
    mine = shard.slice(whole, -1, fill=math.nan)
    batches = (mine, target)
    if batched:
        batches = lambda: zip(mine.split(150), target.split(150), strict=True)  # noqa: E731
    shard.traffic.reset()
    found = fit_temperature(batches, shard=shard, bins=10, task="drawn")
    return found, shard.traffic.calls["all_gather"]


NAMES = [*FITTED, "always right", "always worst"]


@TP
@pytest.mark.parametrize("name", NAMES)
def test_the_temperature_minimises_the_likelihoods_mean_and_is_the_same_for_any_batches_and_ranks(tp, name):
    whole, target = material(name)
    found = [fit for batched in (False, True) for fit, _ in RUNS(tp, _fitted, name, batched)]
    found.append(RUNS(1, _fitted, name, False)[0][0])
    assert len({repr(fit) for fit in found}) == 1
    fit = found[0]
    if name.startswith("always"):
        assert fit.at_bound and fit.temperature == (0.05 if name.endswith("right") else 20.0)
        return
    best = oracle.best_temperature(whole, target, 0.05, 20.0)
    assert not fit.at_bound and fit.converged and fit.temperature == pytest.approx(best, rel=1e-6)
    assert fit.temperature == pytest.approx(FITTED[name], rel=0.15)
    for curve, temperature in ((fit.before, 1.0), (fit.after, best)):
        expected = oracle.calibration(whole, target, 10, temperature)
        assert curve.nll == pytest.approx(expected["nll"], abs=1e-8)
        assert curve.ece == pytest.approx(expected["ece"], abs=1e-5)
    if name != "calibrated":
        assert fit.after.ece < fit.before.ece and fit.after.nll < fit.before.nll
    assert fit.evaluations <= 12


def test_an_evaluation_is_one_exchange():
    for fit, calls in RUNS(4, _fitted, "sharp", False):
        # peaks and targets once; a payload may outgrow what the calls before it needed, at first and once more
        assert calls in range(fit.evaluations + 2, fit.evaluations + 2 + 3)


def _refused(rank, what):
    return attempt(lambda: _bad(rank, what))


def _bad(rank, what):
    shard = shard_of(9)
    shard.deferred_errors = what.endswith("read late")
    whole = torch.zeros(4, 9)
    target = torch.tensor([1, 2, 3, 4])
    options = {}
    if what.startswith("nan"):
        whole[2, 8] = math.nan
    elif what == "masked row":
        whole[2] = -torch.inf
    elif what == "infinite":
        whole[2, 4] = torch.inf
    elif what == "temperature":
        options["temperature"] = torch.tensor([1.0, 1.0, 0.0, 1.0])
    elif what == "infinite temperature":
        options["temperature"] = math.inf
    elif what == "temperatures":
        options["temperature"] = [1.0, 2.0]
    elif what == "other columns on one rank":
        mine = torch.zeros(4, 4 if rank == 1 else shard.shard_size)
        return diagnose(mine, shard=shard)
    elif what == "another temperature on one rank":
        options["temperature"] = torch.full((4,), 1.0 + rank)
    elif what == "target":
        target[2] = 9
    elif what.startswith("impossible target"):
        whole[2, 3] = -torch.inf
    elif what == "other rows":
        target = target[:3]
    mine = shard.slice(whole, -1)
    if what in ("target", "other rows", "nan, read late"):
        return reliability(mine, target, shard=shard)
    if what == "bins":
        return reliability(mine, target, shard=shard, bins=0)
    if what == "negative":
        return reliability(mine, target, shard=shard, temperature=-1.0)
    if what.startswith("impossible target"):
        return fit_temperature((mine, target), shard=shard)
    if what == "no rows":
        return fit_temperature((mine, torch.full_like(target, IGNORED)), shard=shard)
    if what == "bounds":
        return fit_temperature((mine, target), shard=shard, bounds=(2.0, 3.0))
    if what == "used up":
        pairs = iter([(mine, target)])
        return fit_temperature(lambda: pairs, shard=shard)
    if what == "another ignore_index on one rank":
        return fit_temperature((mine, target), shard=shard, ignore_index=IGNORED - rank)
    if what == "a batch less on one rank":
        return fit_temperature(lambda: [(mine, target)] * (2 if rank == 1 else 3), shard=shard)
    if what == "breaks on one rank":
        return fit_temperature(lambda: _breaks(mine, target, rank), shard=shard)
    return diagnose(mine, shard=shard, **options)


def _breaks(mine, target, rank):
    yield mine, target
    if rank == 1:
        raise OSError("disk is gone")
    yield mine, target


BAD = {
    "nan": ("NonFiniteError", "row 2 holds NaN"), "masked row": ("NonFiniteError", "row 2"),
    "infinite": ("NonFiniteError", "row 2"), "temperature": ("ValueError", "temperature of row 2"),
    "infinite temperature": ("ValueError", "got inf"),
    "another ignore_index on one rank": ("LayoutMismatchError", "ignore_index"),
    "temperatures": ("ValueError", "2 values for 4 rows"), 
    "other columns on one rank": ("LayoutMismatchError", "4 columns"),
    "another temperature on one rank": ("LayoutMismatchError", ""), "target": ("TargetRangeError", "target 9 at row 2"),
    "other rows": ("LayoutMismatchError", "[3]"), "bins": ("ValueError", "bins"), "negative": ("ValueError", "-1.0"),
    "impossible target": ("NonFiniteError", "row 2: its target 3"),
    "impossible target, read late": ("NonFiniteError", "row 2: its target 3"),
    "nan, read late": ("NonFiniteError", "row 2 holds NaN"), "no rows": ("ValueError", "no row"),
    "bounds": ("ValueError", "(2.0, 3.0)"), "used up": ("ValueError", "used up"),
    "a batch less on one rank": ("LayoutMismatchError", "there is none"),
    "breaks on one rank": ("VocabParallelError", "disk is gone"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_the_same_error_on_every_rank(what):
    kind, words = BAD[what]
    first, second = RUNS(2, _refused, what)
    assert (first.kind, first.message) == (second.kind, second.message)
    assert first.kind == kind and words in first.message


def _run(rank, function, *case):
    return function(rank, *case)


def _sizes(case):
    return {_parts: (3,), _refused: (2,)}.get(case[0], ALL_SIZES)


RUNS = Batch(
    _run,
    [
        *((_diagnosed, *case) for case in DIAGNOSED),
        (_parts,),
        *((_fitted, name, batched) for name in NAMES for batched in (False, True)),
        *((_refused, what) for what in BAD),
    ],
    _sizes,
)
