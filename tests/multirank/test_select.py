"""Greedy and top-k over sharded logits: exactly the oracle's ids, ties and signed zeros included, on every rank."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.batch import assert_all_raise, attempt
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import Streams, VocabLayout, VocabShard, greedy, reference, top_k
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.keys import ids_of, keys_of, values_of
from vocab_parallel.select.order import pack, unpack
from vocab_parallel.select.sampling import draw
from vocab_parallel.select.scores import Scores, peak_of, top_candidates

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def logits_of(kind, rows, vocab, dtype):
    draw = torch.Generator().manual_seed(7)
    if kind == "normal":
        return torch.randn(rows, vocab, generator=draw, dtype=torch.float64).to(dtype)
    if kind == "ties":  # three values only, and both zeros
        return torch.tensor([-1.0, -0.0, 0.0], dtype=dtype)[torch.randint(0, 3, (rows, vocab), generator=draw)]
    if kind == "negative":  # all negative: padding with zeros would win
        return (-1000.0 - torch.rand(rows, vocab, generator=draw, dtype=torch.float64)).to(dtype)
    if kind == "extreme":
        limits = torch.finfo(dtype)
        values = [limits.min, limits.max, limits.tiny, -limits.tiny, limits.smallest_normal / 2, 0.0, -0.0, -torch.inf]
        mixed = torch.tensor(values, dtype=torch.float64).to(dtype)[torch.randint(0, 8, (rows, vocab), generator=draw)]
        mixed[:, 0] = 1.0  # a finite logit in each row
        return mixed
    raise AssertionError(kind)


def _select(rank, kind, vocab, multiple_of, dtype, padding):
    shard = shard_of(vocab, multiple_of)
    whole = logits_of(kind, 6, vocab, dtype)
    mine = shard.slice(whole, -1, fill=padding)
    before = mine.clone()
    ids = greedy(mine, shard=shard)
    results = {"greedy": ids}
    for k in sorted({1, 2, max(1, vocab // 2), vocab}):
        chosen = top_k(mine, k, shard=shard)
        results[k] = (chosen.values, chosen.token_ids)
    assert torch.equal(mine.nan_to_num(), before.nan_to_num()), "the logits were modified"
    return results


NAN = float("nan")
KINDS = ["normal", "ties", "negative", "extreme"]
LAYOUTS = [(9, 1), (13, 4), (2, 4)]
PADDINGS = [1e30, float("inf"), NAN, 0.0]
SELECTED = Batch(
    _select,
    [
        *((kind, *layout, dtype, NAN) for kind, layout, dtype in product(KINDS, LAYOUTS, DTYPES)),
        *(("negative", 5, 8, torch.float32, padding) for padding in PADDINGS),
    ],
)


@TP
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "multiple_of"), LAYOUTS)
def test_ids_and_values_are_exactly_those_of_the_total_order(tp, dtype, kind, vocab, multiple_of):
    whole = logits_of(kind, 6, vocab, dtype)
    for rank, results in enumerate(SELECTED(tp, kind, vocab, multiple_of, dtype, NAN)):
        where = f"rank {rank}"
        assert torch.equal(results.pop("greedy"), reference.greedy(whole)), where
        for k, (values, ids) in results.items():
            expected_values, expected_ids = reference.top_k(whole, k)
            assert ids.dtype == torch.int64 and values.dtype == dtype, f"{where}, k={k}"
            assert torch.equal(ids, expected_ids), f"{where}, k={k}"
            assert torch.equal(values, expected_values), f"{where}, k={k}"


@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_is_never_selected(padding):
    whole = logits_of("negative", 6, 5, torch.float32)
    for results in SELECTED(2, "negative", 5, 8, torch.float32, padding):
        assert torch.equal(results.pop("greedy"), reference.greedy(whole))
        for k, (_, ids) in results.items():
            assert torch.equal(ids, reference.top_k(whole, k)[1])


def _shapes(rank, leading):
    shard = shard_of(9)
    whole = torch.randn(*leading, 9, generator=torch.Generator().manual_seed(1))
    mine = shard.slice(whole, -1)
    chosen = top_k(mine, 5, shard=shard)
    expected_values, expected_ids = reference.top_k(whole, 5)
    assert torch.equal(greedy(mine, shard=shard), reference.greedy(whole))
    assert torch.equal(chosen.token_ids, expected_ids)
    assert torch.equal(chosen.values, expected_values)
    strided = mine.transpose(0, -1).contiguous().transpose(0, -1) if leading else mine
    assert torch.equal(greedy(strided, shard=shard), reference.greedy(whole)), "strided logits"


SHAPES = Batch(_shapes, [((),), ((1,),), ((0,),), ((2, 3),), ((2, 0, 3),)])


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("leading", [leading for (leading,) in SHAPES.cases])
def test_any_leading_shape(tp, leading):
    SHAPES(tp, leading)


def _large(rank):
    """A realistic vocabulary, many ties in bfloat16, more rows than the exchange first has room for."""
    shard = shard_of(131_072)
    whole = torch.randn(100, 131_072, generator=torch.Generator().manual_seed(2)).bfloat16()
    mine = shard.slice(whole, -1)
    chosen = top_k(mine, 50, shard=shard)
    return greedy(mine, shard=shard), chosen.values, chosen.token_ids


def test_ties_at_the_boundary_of_a_large_bfloat16_vocabulary():
    whole = torch.randn(100, 131_072, generator=torch.Generator().manual_seed(2)).bfloat16()
    values, ids = reference.top_k(whole, 51)
    assert (values[:, 49] == values[:, 50]).any(), "the case must have ties at the boundary"
    for greedy_ids, top_values, top_ids in run_ranks(_large, 2):
        assert torch.equal(greedy_ids, ids[:, 0])
        assert torch.equal(top_values, values[:, :50])
        assert torch.equal(top_ids, ids[:, :50])


def test_an_id_that_no_float_holds_comes_back_from_its_key():
    ids = torch.tensor([0, 2**24 + 1, 2**31 + 1, 2**32 - 2])
    values = torch.tensor([-torch.inf, -0.0, 1.5, torch.nan])
    keys = pack(values, ids)
    assert torch.equal(unpack(keys)[1], ids) and keys.tolist() == sorted(keys.tolist())
    assert keys_of(values.tolist(), ids.tolist()) == keys.tolist()
    assert ids_of(keys.tolist()) == ids.tolist()
    assert torch.equal(torch.tensor(values_of(keys.tolist())).nan_to_num(7.5), unpack(keys)[0].nan_to_num(7.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 40])  # few are chosen with Python's integers
def test_choices_among_ids_that_no_float_holds_are_exact(rows, dtype):
    shard = VocabShard(VocabLayout(2**25, 1))
    values = torch.tensor([-torch.inf, 0.5, 0.0, 0.5], dtype=dtype).expand(rows, -1).contiguous()
    scores = Scores(values, torch.arange(2**24, 2**24 + 4), Channel(shard, "test"), shard.vocab_size)
    assert set(peak_of(scores).token_ids.tolist()) == {2**24 + 1}
    best = top_candidates(scores, 2)
    assert best.token_ids.tolist() == [[2**24 + 1, 2**24 + 3]] * rows
    for given in (scores, best):
        drawn = {token for seed in range(9) for token in draw(given, Streams.of([seed] * rows)).token_ids.tolist()}
        assert {2**24 + 1, 2**24 + 3} <= drawn <= {2**24 + 1, 2**24 + 2, 2**24 + 3}


def _met(rank, operation, columns, value, k):
    """How a call ended whose row 2 holds `value`, and its ids."""
    shard = shard_of(9)
    whole, ids = torch.zeros(4, 9), []
    whole[2, columns] = value
    mine = shard.slice(whole, -1)
    call = {
        "greedy": lambda: greedy(mine, shard=shard)[:, None],
        "top_k": lambda: top_k(mine, k, shard=shard).token_ids,
    }
    met = attempt(lambda: ids.append(call[operation]()))
    return met, ids


NO_CHOICE = [
    (operation, columns, value, 3)
    for operation in ("greedy", "top_k")
    for columns, value in [(8, NAN), (0, NAN), (slice(None), -torch.inf), (slice(None), NAN)]
]
SOME_MASKED = [(operation, slice(0, 5), -torch.inf, 3) for operation in ("greedy", "top_k")]
BAD_K = [("top_k", 8, 0.0, k) for k in (0, -1, 10)]
MET = Batch(_met, [*NO_CHOICE, *SOME_MASKED, *BAD_K])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", NO_CHOICE)
def test_nan_or_no_finite_logit_is_the_same_error_on_every_rank(tp, case):
    assert_all_raise(str(case), [met for met, _ in MET(tp, *case)], ["NonFiniteError"], ["row 2"])


@pytest.mark.parametrize("case", SOME_MASKED)
def test_some_minus_infinities_are_no_error(case):
    for met, ids in MET(2, *case):
        assert met.kind is None and ids[0][2, 0] == 5


@pytest.mark.parametrize("case", BAD_K)
def test_k_outside_the_vocabulary_is_an_error_on_every_rank(case):
    assert_all_raise(str(case), [met for met, _ in MET(2, *case)], ["ValueError"], ["k", str(case[-1])])
