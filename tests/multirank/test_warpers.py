"""Warpers and controllers over shards: the oracle's support id for id, and the same bits on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.batch import assert_all_raise, attempt
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import ALL_SIZES, Batch
from tests.multirank.warper_cases import (
    CUTS,
    MU,
    ROWS,
    TRANSFORMS,
    expected_kept,
    expected_temperature,
    placed,
)
from tests.tolerances import bits
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.transform import Choice, View
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from vocab_parallel.reference import warpers as oracle
from vocab_parallel.select.masses import measure
from vocab_parallel.select.scores import open_scores, peak_of

VIEW = View.of([[]] * ROWS)


def logits_of(kind, vocab, dtype):
    draw = torch.Generator().manual_seed(vocab)
    normal = 2 * torch.randn(ROWS, vocab, generator=draw, dtype=torch.float64)
    if kind == "quantised":  # a few values only: ties everywhere, masses on the thresholds
        return (normal.round() / 2).to(dtype)
    if kind == "flat":  # all equal, and two levels
        levels = torch.where(torch.arange(vocab) % 2 == 0, 0.0, -3.0).expand(ROWS, -1).clone()
        levels[::2] = 1.0
        return levels.to(dtype)
    if kind == "masked":  # whole shards out of the support, down to one token
        masked = normal.masked_fill(torch.rand(ROWS, vocab, generator=draw) < 0.5, -torch.inf)
        masked[:3, : vocab // 2] = -torch.inf
        masked[3] = -torch.inf
        masked[:, -1] = 0.25
        return masked.to(dtype)
    if kind == "peaked":
        normal[torch.arange(ROWS), torch.arange(ROWS) % vocab] += 30.0
        return normal.to(dtype)
    return normal.to(dtype)


def _warp(rank, kind, vocab, multiple_of, dtype):
    shard = shard_of(vocab, multiple_of)
    mine = shard.slice(logits_of(kind, vocab, dtype), -1, fill=torch.nan)
    before = mine.clone()
    results = {}
    for name, transform in TRANSFORMS.items():
        scores = open_scores(mine, shard, name)
        with scores.channel.guard():
            transform.check(vocab, ROWS)
        untouched = scores.values.clone()
        state = {"mu": torch.tensor(MU, dtype=torch.float64)} if name == "mirostat_v2" else {}
        warped = transform.apply(scores, VIEW, state)
        assert torch.equal(scores.values, untouched), f"{name} modified its scores"
        results[name] = (placed(warped), measure(warped).total)
    assert torch.equal(bits(mine), bits(before)), "the logits were modified"
    return results


KINDS = ["normal", "quantised", "flat", "masked", "peaked"]
LOGITS = [
    *((kind, vocab, 1, torch.float32) for kind in KINDS for vocab in (9, 67)),
    ("normal", 9, 1, torch.float64),
    ("masked", 9, 1, torch.float64),
    ("peaked", 13, 4, torch.float64),
    ("normal", 2, 4, torch.float64),
    ("normal", 1, 1, torch.float32),  # every other rank is empty
    ("flat", 2, 4, torch.float16),
    ("quantised", 13, 4, torch.bfloat16),
    ("normal", 67, 1, torch.bfloat16),
    ("normal", 600, 1, torch.bfloat16),  # more than a block of masses, and ties
]
CASES = pytest.mark.parametrize(("kind", "vocab", "multiple_of", "dtype"), LOGITS)


def joined(tp, case, name):
    """The whole warped rows, from what each rank holds."""
    return torch.stack([results[name][0] for results in RESULTS(tp, "warp", *case)]).amax(0)


@TP
@CASES
def test_each_truncation_keeps_the_oracles_ids_and_their_values(tp, kind, vocab, multiple_of, dtype):
    logits = logits_of(kind, vocab, dtype)
    for name in CUTS:
        kept = expected_kept(name, logits.double())
        warped = joined(tp, (kind, vocab, multiple_of, dtype), name)
        assert torch.equal(warped > -torch.inf, kept), f"{name}\n{warped}\n{kept}\n{logits}"
        assert torch.equal(warped[kept], logits[kept].to(warped.dtype)), f"{name} changed a value"


@TP
@CASES
def test_each_temperature_gives_the_oracles_distribution(tp, kind, vocab, multiple_of, dtype):
    logits = logits_of(kind, vocab, dtype)
    for name in ("temperature", "dynamic_temperature"):
        warped = joined(tp, (kind, vocab, multiple_of, dtype), name)
        temperature = expected_temperature(name, logits)
        rows = zip(logits.to(warped.dtype), temperature, strict=True)
        expected = torch.stack([quotients(row, t) for row, t in rows])
        assert warped.isfinite().any(1).all() and not warped.isnan().any() and warped.amax() < torch.inf
        got, wanted = warped.double().softmax(1), expected.double().softmax(1)
        assert (got - wanted).abs().max() < 1e-6, f"{name} {temperature}\n{warped}\n{expected}"
        if name == "temperature":
            assert torch.equal(warped, expected)


def quotients(row, temperature):
    """`z / T` in the scores' dtype; the first best alone at 0."""
    if temperature < 2.0**-64:
        return torch.where(torch.arange(len(row)) == row.argmax(), row, -torch.inf)
    return row / temperature.to(row.dtype)


@pytest.mark.parametrize("tp", [2, 3, 4])
@CASES
def test_every_result_is_the_same_bits_on_any_number_of_ranks(tp, kind, vocab, multiple_of, dtype):
    case = (kind, vocab, multiple_of, dtype)
    for name in TRANSFORMS:
        alone = RESULTS(1, "warp", *case)[0][name]
        assert torch.equal(bits(joined(tp, case, name)), bits(alone[0])), name
        for rank, results in enumerate(RESULTS(tp, "warp", *case)):
            assert torch.equal(results[name][1], alone[1]), f"{name} on rank {rank}"


def _any_batch(rank, order):
    """The requests `order` of a batch, as a batch of their own."""
    shard = shard_of(13)
    index = torch.tensor(order, dtype=torch.int64)
    mine = shard.slice(logits_of("normal", 13, torch.float64)[index], -1)
    results = {}
    for name, transform in TRANSFORMS.items():
        state = {"mu": torch.tensor(MU, dtype=torch.float64)[index]} if name == "mirostat_v2" else {}
        chosen = transform.for_rows(order)
        results[name] = placed(chosen.apply(open_scores(mine, shard, name), VIEW.rows(index), state))
    return results


ORDERS = [(7, 3), (5, 0, 6, 20, 1), (4,), ()]


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("order", ORDERS)
def test_a_request_is_warped_alike_in_any_batch(tp, order):
    whole, part = (
        {name: torch.stack([results[name] for results in RESULTS(tp, "batch", one)]).amax(0) for name in TRANSFORMS}
        for one in (tuple(range(ROWS)), order)
    )
    for name in TRANSFORMS:
        assert torch.equal(bits(whole[name][list(order)]), bits(part[name])), name


LARGE = 20_000
LARGE_P = (0.2, 0.5, 0.9, 0.99)


def large_logits(dtype):
    return (2.5 * torch.randn(4, LARGE, generator=torch.Generator().manual_seed(9))).to(dtype)


def _large(rank, dtype):
    shard = shard_of(LARGE, 64)
    scores = open_scores(shard.slice(large_logits(dtype), -1), shard, "typical")
    return placed(Typical(LARGE_P).apply(scores, View.of([[]] * 4), {})) > -torch.inf


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_typical_ids_of_a_large_vocabulary_are_the_oracles(tp, dtype):
    expected = oracle.typical(large_logits(dtype), torch.tensor(LARGE_P, dtype=torch.float64))
    kept = torch.stack(RESULTS(tp, "large", dtype)).any(0)
    assert torch.equal(kept, expected), (kept != expected).nonzero()


# bytes of each all-gather, a row and rank, of float32 scores whose best is not known; top-p depends on the rows
SENT = {
    "temperature": [8],  # a row is greedy
    "top_k": [8 * 12],  # the largest k below the vocabulary
    "min_p": [8],
    "typical": [8, 32, *[128] * 8],
    "epsilon": [8, 8],
    "eta": [8, 32],
    "top_n_sigma": [8, 16, 24],
    "dynamic_temperature": [8, 32],
    "mirostat_v2": [8, 8],
}


OFF = [TopP(1.0), Typical(1.0), Epsilon(0.0), Eta(0.0), TopNSigma(float("inf")), TopK(67), Temperature(1.0)]


def _send(rank, kind):
    shard, sent = shard_of(67), {}
    mine = shard.slice(logits_of(kind, 67, torch.float32), -1)
    for name in SENT:
        transform = TopK((12, 3, 100, 1) * (ROWS // 4)) if name == "top_k" else TRANSFORMS[name]
        scores = open_scores(mine, shard, name)
        scores.channel.open()
        shard.traffic.reset()
        transform.apply(scores, VIEW, {"mu": torch.tensor(MU, dtype=torch.float64)})
        sent[name] = (shard.traffic.total_calls, shard.traffic.total_bytes / ROWS / (shard.size - 1))
    shard.traffic.reset()
    for transform in OFF:
        transform.apply(scores, VIEW, {})
    return sent, shard.traffic.total_calls


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_warper_sends_the_bytes_it_says_whatever_the_row_holds(tp, kind):
    for rank, (sent, when_off) in enumerate(RESULTS(tp, "send", kind)):
        assert when_off == 0
        assert sent == {name: (len(each), sum(each)) for name, each in SENT.items()}, f"rank {rank}"


BAD = {
    "temperature": (Temperature([1.0, -0.5]), ["row 1", "-0.5"]),
    "temperature nan": (Temperature([float("nan"), 1.0]), ["row 0", "nan"]),
    "temperature of other rows": (Temperature([1.0, 1.0, 1.0]), ["3 values", "2 rows"]),
    "top_k": (TopK([5, 0]), ["row 1", "0"]),
    "top_k fraction": (TopK([2.5, 1]), ["row 0", "2.5"]),
    "top_p": (TopP([0.0, 0.5]), ["row 0", "0.0"]),
    "top_p above": (TopP([0.5, 1.5]), ["row 1", "1.5"]),
    "min_p": (MinP([0.5, 1.0001]), ["row 1", "1.0001"]),
    "typical": (Typical([1.0, -1.0]), ["row 1", "-1.0"]),
    "typical nan": (Typical([1.0, float("nan")]), ["row 1", "nan"]),
    "epsilon": (Epsilon([-1e-3, 0.0]), ["row 0", "-0.001"]),
    "eta": (Eta([0.0, 2.0]), ["row 1", "2.0"]),
    "top_n_sigma": (TopNSigma([1.0, -1.0]), ["row 1", "-1.0"]),
    "dynamic_temperature": (DynamicTemperature([0.5, 1.5], 1.0), ["row 1", "1.5"]),
    "dynamic_temperature high": (DynamicTemperature(0.0, [1.0, float("inf")]), ["row 1", "inf"]),
    "dynamic_temperature exponent": (DynamicTemperature(0.0, 1.0, [1.0, -1.0]), ["row 1", "-1.0"]),
    "mirostat_v2 tau": (MirostatV2([5.0, -5.0]), ["row 1", "-5.0"]),
    "mirostat_v2 eta": (MirostatV2(5.0, [float("nan"), 0.1]), ["row 0", "nan"]),
}


def _refuse(rank, name):
    shard = shard_of(9)
    scores = open_scores(torch.zeros(2, shard.shard_size), shard, "refused")

    def check():
        with scores.channel.guard():
            # one rank's parameters are wrong, the others wait for it
            (BAD[name][0] if rank == shard.size - 1 else Temperature(1.0)).check(9, 2)
        scores.channel.open()

    return attempt(check)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_parameter_of_one_rank_is_the_same_error_on_every_rank_naming_row_and_value(tp, name):
    assert_all_raise(name, RESULTS(tp, "refuse", name), ["ValueError"], BAD[name][1])


def _controlled(rank, steps):
    """Mirostat over some steps with given uniforms, its state taken along."""
    shard = shard_of(13)
    transform, states = MirostatV2([1.0, 2.0, 3.0] * 2, 0.5), []
    state = transform.start(6)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        logits = torch.randn(6, 13, generator=draw)
        warped = transform.apply(open_scores(shard.slice(logits, -1), shard, "mirostat"), VIEW, state)
        best = peak_of(warped)
        active = torch.arange(6) != step % 6
        chosen = Choice(torch.where(active, best.token_ids, -1), measure(warped).logprob(best.values), active)
        state = transform.after(state, chosen)
        states.append(state["mu"])
    return torch.stack(states)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_a_controllers_state_is_the_same_bits_on_every_rank(tp):
    alone = RESULTS(1, "controlled", 12)[0]
    assert len(alone.unique()) > 30, "the state must move"
    for states in RESULTS(tp, "controlled", 12):
        assert torch.equal(states, alone)


def _run(rank, what, *arguments):
    runners = {
        "warp": _warp, "batch": _any_batch, "large": _large, "send": _send, "refuse": _refuse,
        "controlled": _controlled,
    }  # fmt: skip
    return runners[what](rank, *arguments)


SIZES = {"batch": (1, 3), "large": (1, 2), "send": (2, 3), "refuse": (1, 4)}
RESULTS = Batch(
    _run,
    [
        *(("warp", *case) for case in LOGITS),
        *(("batch", order) for order in (tuple(range(ROWS)), *ORDERS)),
        *(("large", dtype) for dtype in (torch.float32, torch.bfloat16)),
        *(("send", kind) for kind in KINDS),
        *(("refuse", name) for name in BAD),
        ("controlled", 12),
    ],
    lambda case: SIZES.get(case[0], ALL_SIZES),
)
