"""Sampling and top-p over shards: the oracle's tokens, id for id, on any number of ranks and in any batch."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from tests.batch import assert_all_raise, attempt
from tests.multirank.counting import collectives
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import Streams, greedy, reference, sample, top_k, top_p

# vocabulary, rows a shard is a multiple of; 9 over 4 ranks leaves one empty, 1 all but the first
LAYOUTS = [(9, 1), (1, 1), (2, 4), (37, 1), (300, 8), (1000, 1)]
ROWS = 140  # of each kind and layout: 5 x 6 x 140 x (4 rank counts) = 16,800
KINDS = ["normal", "flat", "peaked", "ties", "masked"]


def logits_of(kind, vocab, rows=ROWS, seed=0):
    draw = torch.Generator().manual_seed(seed * 1000 + vocab)
    normal = torch.randn(rows, vocab, generator=draw)
    if kind == "normal":
        return normal * 2
    if kind == "flat":
        return normal * 0.01
    if kind == "peaked":
        return (normal * 8).double() if vocab == 37 else normal * 8
    if kind == "ties":  # rounded to bfloat16, or to a few values
        return normal.bfloat16() if vocab % 2 else (normal * 2).round() / 2
    masked = normal.masked_fill(torch.rand(rows, vocab, generator=draw) < 0.7, -torch.inf)
    masked[torch.arange(rows), torch.randint(0, vocab, (rows,), generator=draw)] = 0.5
    return masked


def choose(values, rows, draw):
    return torch.tensor(values, dtype=torch.float64)[torch.randint(0, len(values), (rows,), generator=draw)]


def parameters(vocab, rows=ROWS, seed=0):
    """Another policy in each row, greedy ones among them."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "temperature": choose([0.0, 1e-12, 0.3, 0.7, 1.0, 1.0, 1.5, 4.0], rows, draw),
        "top_k": choose([1, 2, 5, 40, vocab, vocab + 3], rows, draw).long(),
        "top_p": choose([1e-9, 0.3, 0.5, 0.9, 0.99, 1.0, 1.0], rows, draw),
        "min_p": choose([0.0, 0.0, 0.05, 0.3, 1.0], rows, draw),
    }


def streams_of(rows=ROWS, seed=7):
    return Streams.of([seed] * rows, list(range(rows)))


def _drawn(rank, kind, vocab, multiple_of):
    shard, whole = shard_of(vocab, multiple_of), logits_of(kind, vocab)
    mine = shard.slice(whole, -1, fill=float("nan"))
    before = mine.clone()
    drawn = sample(mine, shard=shard, streams=streams_of(), **parameters(vocab))
    plain = sample(mine, shard=shard, streams=drawn.streams)
    nucleus = top_p(mine, parameters(vocab)["top_p"], shard=shard)
    assert torch.equal(mine.nan_to_num(), before.nan_to_num()), "the logits were modified"
    return drawn.token_ids, plain.token_ids, plain.streams.draws, nucleus


DRAWN = Batch(_drawn, [(kind, *layout) for kind in KINDS for layout in LAYOUTS])


@TP
@pytest.mark.parametrize(("kind", "vocab", "multiple_of"), DRAWN.cases)
def test_tokens_are_those_of_the_oracle_in_every_row_whatever_its_policy(tp, kind, vocab, multiple_of):
    whole, rows = logits_of(kind, vocab), parameters(vocab)
    expected = reference.sample(whole, streams_of().bits(), **rows)
    plain = reference.draw(whole, streams_of().advanced().bits())
    for got, then, draws, _ in DRAWN(tp, kind, vocab, multiple_of):
        assert torch.equal(got, expected)
        assert torch.equal(then, plain)
        assert draws.tolist() == [2] * ROWS


@TP
@pytest.mark.parametrize(("kind", "vocab", "multiple_of"), DRAWN.cases)
def test_the_nucleus_is_the_oracles_set_with_its_size_mass_and_cut(tp, kind, vocab, multiple_of):
    whole, p = logits_of(kind, vocab), parameters(vocab)["top_p"]
    expected = reference.nucleus(whole, p) & (whole > -torch.inf)
    mass = (whole.double().softmax(-1) * expected).sum(1)
    parts = DRAWN(tp, kind, vocab, multiple_of)
    kept = torch.cat([nucleus.kept for *_, nucleus in parts], 1)
    assert not kept[:, vocab:].any(), "padding is kept"
    assert torch.equal(kept[:, :vocab], expected)
    for *_, nucleus in parts:
        assert torch.equal(nucleus.size, expected.sum(1))
        torch.testing.assert_close(nucleus.mass, mass, rtol=1e-9, atol=0)
        assert not nucleus.threshold[nucleus.threshold == 0].signbit().any(), "-0.0 or 0.0 by chance of the ranks"
        tie = (whole == nucleus.threshold[:, None]) & (torch.arange(vocab) <= nucleus.last_id[:, None])
        assert torch.equal((whole > nucleus.threshold[:, None]) | tie, expected)


def wide():
    """Rows whose nucleus is long, short, and in between."""
    return torch.cat([*(logits_of(kind, 36_000, 4).float() for kind in KINDS), logits_of("normal", 36_000, 4) * 1.75])


PARTS = [torch.arange(24), torch.arange(20, 24), torch.arange(8, 24, 4)]  # all; in between alone; one of each


def _wide(rank):
    """Shards of 9,000 columns and more: the search then has digits of 8 bits, and more candidates come before it."""
    shard, seen = shard_of(36_000), []
    for part in PARTS:
        whole, streams = wide()[part], streams_of(24).rows(part)
        given = parameters(36_000, 24, 1) | {"top_p": torch.full((24,), 0.9)}
        given["top_k"][::2] = 36_000
        given = {name: one[part] for name, one in given.items()}
        drawn = [sample(shard.slice(whole, -1), shard=shard, streams=streams, **given).token_ids]
        drawn.append(sample(shard.slice(whole, -1), shard=shard, streams=streams, top_p=0.9).token_ids)
        expected = drawn
        if rank == 0:
            off = {"temperature": torch.ones(24), "top_k": torch.full((24,), 36_000), "min_p": torch.zeros(24)}
            plain = given | {name: one[part] for name, one in off.items()}
            expected = [reference.sample(whole, streams.bits(), **one) for one in (given, plain)]
        seen.append((drawn, expected, top_p(shard.slice(whole, -1), 0.9, shard=shard).size))
    return seen


WIDE = Batch(_wide, [()])


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_a_large_vocabulary_gives_the_oracles_tokens(tp):
    sizes = reference.nucleus(wide(), torch.full((24,), 0.9)).sum(1)
    for most in (36_000 // 4 // 16, 36_000 // 3 // 16, 1024):  # candidates, at 4, 3 and 2 ranks
        assert all(bool(of.any()) for of in (sizes <= 64, (sizes > 64) & (sizes <= most), sizes > 5000))
    assert bool(((sizes[PARTS[1]] > 64) & (sizes[PARTS[1]] <= 1024)).all()), sizes
    for seen in WIDE(tp):
        for part, (drawn, expected, size) in zip(PARTS, seen, strict=True):
            assert all(torch.equal(*pair) for pair in zip(drawn, expected, strict=True))
            assert torch.equal(size, sizes[part])


def _composed(rank):
    """One batch of all kinds, whole, shuffled, row by row, and from a saved stream."""
    shard = shard_of(37)
    whole = torch.cat([logits_of(kind, 37, 6).float() for kind in KINDS])
    rows = len(whole)
    given, streams = parameters(37, rows), streams_of(rows)
    mine = shard.slice(whole, -1)

    def draw(index, streams):
        chosen = {name: one[index] for name, one in given.items()}
        return sample(mine[index], shard=shard, streams=streams, **chosen)

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
    together = draw(torch.arange(rows), streams)
    moved = draw(order, streams.rows(order)).token_ids[order.argsort()]
    alone = [draw(torch.tensor([row]), streams.rows(torch.tensor([row]))).token_ids for row in range(rows)]
    saved = json.dumps(together.streams.state_dict())
    later = draw(torch.arange(rows), together.streams).token_ids
    replayed = draw(torch.arange(rows), Streams.from_state_dict(json.loads(saved))).token_ids
    in_two = sample(mine.view(5, 6, -1), shard=shard, streams=streams, **given).token_ids
    assert torch.equal(in_two, together.token_ids.view(5, 6))
    assert sample(mine[0], shard=shard, streams=Streams.of([7]), temperature=0).token_ids.shape == ()
    none = torch.arange(0)
    for filters in ({}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}):
        assert sample(mine[none], shard=shard, streams=streams.rows(none), **filters).token_ids.shape == (0,)
    assert draw(none, streams.rows(none)).token_ids.shape == top_p(mine[none], 0.9, shard=shard).size.shape == (0,)
    return together.token_ids, moved, torch.cat(alone), later, replayed


COMPOSED = Batch(_composed, [()])


@TP
def test_a_rows_token_does_not_depend_on_the_batch_and_a_saved_stream_replays(tp):
    (single,) = COMPOSED(1)
    for together, moved, alone, later, replayed in COMPOSED(tp):
        assert torch.equal(together, single[0]) and torch.equal(later, single[3])
        assert torch.equal(moved, together) and torch.equal(alone, together)
        assert torch.equal(replayed, later) and not torch.equal(later, together)


FILTERS = {
    "plain": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
}
DRAWS = 100_000


def _many(rank, name):
    shard = shard_of(13)
    logits = shard.slice(logits_of("normal", 13, 1), -1).expand(DRAWS, -1)
    return torch.bincount(
        sample(logits, shard=shard, streams=streams_of(DRAWS), **FILTERS[name]).token_ids, minlength=13
    )


MANY = Batch(_many, [(name,) for name in FILTERS])


@pytest.mark.parametrize("name", FILTERS)
def test_100_000_draws_have_the_exact_probabilities_by_chi_square(name):
    z = logits_of("normal", 13, 1)[0].double() / FILTERS[name].get("temperature", 1.0)
    p = z.softmax(0)
    if "top_k" in FILTERS[name]:
        p = torch.where(p >= p.sort(descending=True).values[FILTERS[name]["top_k"] - 1], p, 0.0)
        p = p / p.sum()
    if "top_p" in FILTERS[name]:
        ordered = p.sort(descending=True).values
        size = int((ordered.cumsum(0) < FILTERS[name]["top_p"]).sum()) + 1
        p = torch.where(p >= ordered[size - 1], p, 0.0)
        p = p / p.sum()
    p = torch.where(p >= p.max() * FILTERS[name].get("min_p", 0.0), p, 0.0)
    p = p / p.sum()
    assert 2 <= int((p > 0).sum()) < 13 or name == "plain"
    for counts in MANY(2, name):
        assert int(counts.sum()) == DRAWS and not counts[p == 0].any()
        expected = p[p > 0] * DRAWS
        chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
        freedom = len(expected) - 1
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 4, f"{counts} drawn, {expected} expected"


BAD = {
    "negative temperature": ({"temperature": [1.0, -0.5, 1.0]}, ("temperature", "row 1", "-0.5")),
    "NaN temperature": ({"temperature": float("nan")}, ("temperature", "nan")),
    "a temperature for other rows": ({"temperature": [1.0, 1.0]}, ("temperature", "2", "3")),
    "a text": ({"temperature": "hot"}, ("temperature", "hot")),
    "k below 1": ({"top_k": [3, 3, 0]}, ("top_k", "row 2", "0")),
    "fractional k": ({"top_k": 2.5}, ("top_k", "integer", "2.5")),
    "k of more than 64 bits": ({"top_k": [3, 2**70, 3]}, ("top_k", "row 1", str(2**70))),
    "p of 0": ({"top_p": [0.5, 0.0, 1.0]}, ("top_p", "row 1", "0.0")),
    "p above 1": ({"top_p": 1.5}, ("top_p", "1.5")),
    "min-p above 1": ({"min_p": [0.0, 0.0, 2.0]}, ("min_p", "row 2", "2.0")),
    "streams of another batch": ({"streams": Streams.of([1, 2])}, ("streams", "2", "3")),
    "no streams": ({"streams": None}, ("streams", "NoneType")),
    "NaN": ({"logits": (1, 4, float("nan"))}, ("row 1", "nan")),
    "+inf": ({"logits": (2, 8, float("inf"))}, ("row 2", "inf")),
    "a masked row": ({"logits": (2, slice(None), -float("inf"))}, ("row 2", "no finite")),
}
ONE_RANK = {
    "other seeds": {"streams": Streams.of([1, 2, 4])},
    "another p": {"top_p": 0.8},
    "p for each": {"top_p": [0.5, 0.5, 0.6]},
    "no filters": {"top_p": None, "top_k": None},
    "seeds in another order": {"streams": Streams.of([2, 3, 1])},
}


def _bad(rank, name, alone):
    shard = shard_of(9)
    whole = torch.zeros(3, 9)
    given = {"streams": Streams.of([1, 2, 3]), "top_p": 0.5, "top_k": 7}
    if alone is None or rank == alone:
        given |= BAD[name][0] if name in BAD else ONE_RANK[name]
    if "logits" in given:
        row, column, value = given.pop("logits")
        whole[row, column] = value
    result = attempt(lambda: sample(shard.slice(whole, -1), shard=shard, **given))
    good = sample(shard.slice(torch.zeros(3, 9), -1), shard=shard, streams=Streams.of([1, 2, 3])).token_ids
    return result, good


REFUSED = Batch(
    _bad,
    [(name, alone) for name in BAD for alone in (None, 1) if alone is None or "logits" not in BAD[name][0]]
    + [(name, 1) for name in ONE_RANK],
)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("name", "alone"), REFUSED.cases)
def test_bad_input_is_one_error_on_every_rank_with_row_and_value_and_the_ranks_go_on(tp, name, alone):
    results = REFUSED(tp, name, alone)
    words = BAD[name][1] if name in BAD else ("rank 0", "rank 1")
    kinds = ("ValueError", "NonFiniteError", "LayoutMismatchError")
    assert_all_raise(name, [result for result, _ in results], kinds, words)
    assert len({tuple(good.tolist()) for _, good in results}) == 1


SEEDED = {
    "another seed": ([9, None, 3], "abc"),
    "another request": ([1, None, 3], "abb"),
    "a seed where the others have none": ([1, 2, 3], "abc"),
    "a seed of 65 bits": ([1, None, 2**64], "abc"),
}


def _seeded(rank, name):
    shard = shard_of(9)
    seeds, requests = SEEDED[name] if rank == 1 else ([1, None, 3], "abc")
    return attempt(lambda: Streams.of(seeds, requests, shard=shard)), Streams.of([None, 4, None], shard=shard).seeds


REFUSED_STREAMS = Batch(_seeded, [(name,) for name in SEEDED])


@pytest.mark.parametrize("name", SEEDED)
def test_ranks_agree_on_their_streams_and_take_a_seed_of_none_from_the_first(name):
    results = REFUSED_STREAMS(2, name)
    kind, words = ("ValueError", ("row 2", str(2**64))) if "65" in name else ("LayoutMismatchError", ("rank 1",))
    assert_all_raise(name, [result for result, _ in results], [kind], words)
    (seeds, others) = [seeds.tolist() for _, seeds in results]
    assert seeds == others and seeds[1] == 4 and len(set(seeds)) == 3


def _traffic(rank, dtype):
    """Collectives, and bytes a row and rank, of a second call, when exchanges know their size."""
    shard, rows = shard_of(1000), 64
    mine = shard.slice(torch.randn(rows, 1000, generator=torch.Generator().manual_seed(0), dtype=dtype), -1)
    mine[:, 1] += 12 * (rank == 0)
    tied, mixed = torch.zeros_like(mine), mine.clone()
    mixed[5], flat = 0.0, shard.slice(torch.rand(rows, 1000, generator=torch.Generator().manual_seed(1)), -1).to(dtype)
    calls = {
        "greedy": partial(greedy, mine),
        "top-k alone": partial(top_k, mine, 50),
        "plain": partial(sample, mine),
        "temperature": partial(sample, mine, temperature=[0.0, 0.7] * 32),
        "top-k": partial(sample, mine, top_k=50, top_p=0.9, min_p=0.01),
        "top-p": partial(sample, mine, top_p=0.9),
        "top-p of flat rows": partial(sample, flat, top_p=0.9),
        "top-p of tied rows": partial(sample, tied, top_p=0.9),
        "top-p of one tied row": partial(sample, mixed, top_p=0.9),
        "min-p": partial(sample, mine, min_p=0.1),
    }
    seen = {}
    for name, call in calls.items():
        given = {"shard": shard_of(1000)} | ({"streams": streams_of(rows)} if call.func is sample else {})
        call(**given)
        given["shard"].traffic.reset()
        with collectives() as (issued, sent):
            call(**given)
        traffic = given["shard"].traffic
        assert dict(sent) == dict(traffic.bytes) and dict(issued) == dict(traffic.calls)
        assert set(issued) == {"all_gather"}
        seen[name] = issued["all_gather"], (sent["all_gather"] / (shard.tp_size - 1) - 64) / rows
    return seen


TRAFFIC = Batch(_traffic, [(dtype,) for dtype in (torch.float32, torch.bfloat16, torch.float64)])


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("dtype", [dtype for (dtype,) in TRAFFIC.cases])
def test_greedy_sends_8_bytes_a_row_top_k_8_k_and_sampling_24_and_what_its_filters_send(tp, dtype):
    token = 16 if dtype == torch.float64 else 8
    exact, rounds, runs = (3, 2 * token + 8), token, 64 * token + 24
    for seen in TRAFFIC(tp, dtype):
        assert seen["greedy"] == (1, token) and seen["top-k alone"] == (1, 50 * token)
        assert seen["plain"] == (exact if dtype == torch.float64 else (2, 16))
        assert seen["temperature"] == exact and seen["min-p"] == exact
        assert seen["top-k"] == (1, 50 * token), "every rank holds the candidates: nothing more is exchanged"
        # runs of 64 columns; if those do not settle the rows mass, search, and mass and token; else at most the token
        assert seen["top-p"] == (1, runs)
        if dtype == torch.float32:
            assert seen["top-p of flat rows"] == (2, runs + 8)
        assert seen["top-p of tied rows"] == (4 + rounds, runs + 8 + rounds * 128 + 8 + token)
        assert seen["top-p of one tied row"] == (4 + rounds, runs + (8 + rounds * 128) / 64 + 8 + token)
