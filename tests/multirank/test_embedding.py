"""The sharded lookup on 1 to 4 ranks against the oracle: rows, gradients, sequence-parallel output, initial values."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import bits, require_close, require_equal
from vocab_parallel import (
    VocabParallelEmbedding,
    reference,
    vocab_parallel_embedding,
)
from vocab_parallel.collectives import gather_vocab

HIDDEN = 4


def tensors(vocab, leading, dtype):
    draw = torch.Generator().manual_seed(11)
    weight = torch.randn(vocab, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, vocab, leading, generator=draw)
    upstream = torch.randn(*leading, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    return weight, ids, upstream


def _lookup(rank, vocab, multiple_of, leading, dtype, padding_idx, spread):
    shard = shard_of(vocab, multiple_of)
    weight, ids, upstream = tensors(vocab, leading, dtype)
    local = shard.slice(weight, fill=float("nan")).requires_grad_()
    before = bits(local).clone()
    out = vocab_parallel_embedding(ids, local, shard=shard, padding_idx=padding_idx, sequence_parallel=spread)
    if spread:
        share = -(-leading[0] // shard.tp_size)
        upstream = upstream[rank * share : (rank + 1) * share].contiguous()
    (first,) = torch.autograd.grad(out, local, upstream, retain_graph=True)
    (second,) = torch.autograd.grad(out, local, upstream)
    require_equal("second backward", [first, second])
    assert torch.equal(bits(local), before), "the weight was modified"
    assert (first[shard.num_valid :] == 0).all(), "padding has a gradient"
    return out.detach(), first[: shard.num_valid]


SPREAD = pytest.mark.parametrize("spread", [False, True], ids=["replicated", "sequence_parallel"])
LAYOUTS = [(9, 1), (5, 2), (1, 1), (2, 1), (1, 4), (13, 4), (3, 128)]
LEADING = [(0,), (1,), (4, 3), (5, 2), (2, 2, 3), (3, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOOKUPS = Batch(
    _lookup,
    [
        *(
            (vocab, multiple, (7,), torch.float64, None, spread)
            for (vocab, multiple), spread in product(LAYOUTS, (False, True))
        ),
        *((9, 1, leading, torch.float64, None, spread) for leading, spread in product(LEADING, (False, True))),
        (9, 1, (), torch.float64, None, False),
        *((9, 1, (40,), torch.float64, row, spread) for row, spread in product([0, 4, 8], (False, True))),
        *((9, 1, (7,), dtype, None, spread) for dtype, spread in product(DTYPES, (False, True))),
    ],
)


def check(tp, vocab=9, multiple_of=1, leading=(7,), dtype=torch.float64, padding_idx=None, spread=False):
    weight, ids, upstream = tensors(vocab, leading, dtype)
    ranks = LOOKUPS(tp, vocab, multiple_of, leading, dtype, padding_idx, spread)
    if spread:
        out = torch.cat([rows for rows, _ in ranks])
    else:
        out = ranks[0][0]
        require_equal("rows on every rank", [rows for rows, _ in ranks])
    whole = weight.double().requires_grad_()
    expected = reference.embedding(ids, whole, padding_idx=padding_idx)
    expected.backward(upstream.double())
    assert out.dtype == dtype
    assert torch.equal(out.double(), expected.detach()), "a lookup must be exact"
    require_close("d_weight", torch.cat([gradient for _, gradient in ranks]), whole.grad, dtype)


@TP
@pytest.mark.parametrize(("vocab", "multiple_of"), LAYOUTS)
@SPREAD
def test_any_vocabulary_over_any_number_of_ranks(tp, vocab, multiple_of, spread):
    check(tp, vocab, multiple_of, spread=spread)


@TP
@pytest.mark.parametrize("leading", LEADING)
@SPREAD
def test_any_leading_shape(tp, leading, spread):
    check(tp, leading=leading, spread=spread)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_single_id_without_a_dimension(tp):
    check(tp, leading=())


@TP
@pytest.mark.parametrize("padding_idx", [0, 4, 8])
@SPREAD
def test_the_row_of_padding_idx_gets_no_gradient_whoever_owns_it(tp, padding_idx, spread):
    check(tp, leading=(40,), padding_idx=padding_idx, spread=spread)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@SPREAD
def test_dtypes(tp, dtype, spread):
    check(tp, dtype=dtype, spread=spread)


def _int32(rank):
    shard = shard_of(9)
    weight, ids, _ = tensors(9, (7,), torch.float32)
    out = vocab_parallel_embedding(ids.int(), shard.slice(weight), shard=shard)
    assert torch.equal(out, weight[ids])


def test_ids_may_be_int32():
    run_ranks(_int32, 2)


def _module(rank, vocab, multiple_of, dtype, seed):
    shard = shard_of(vocab, multiple_of)
    module = VocabParallelEmbedding(HIDDEN, shard=shard, padding_idx=2, dtype=dtype)
    module.reset_parameters(seed=seed, std=0.5)
    assert (module.weight[shard.num_valid :] == 0).all(), "padding rows must start at zero"
    ids = torch.arange(vocab)
    whole = gather_vocab(shard, module.weight)
    assert torch.equal(module(ids), whole)
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_rows_are_the_same_bits_at_every_number_of_ranks_and_padding(dtype):
    vocab = 3001  # several blocks of the random stream, and shards that cut them
    one = run_ranks(_module, 1, vocab, 1, dtype, 3)[0]
    for tp, multiple_of in [(2, 128), (3, 1), (4, 64)]:
        require_equal(f"rows at {tp} ranks", [one, *run_ranks(_module, tp, vocab, multiple_of, dtype, 3)])
    assert not torch.equal(one, run_ranks(_module, 2, vocab, 1, dtype, 4)[0]), "another seed must give other rows"
    assert (one[2] == 0).all(), "the row of padding_idx must start at zero"
    others = torch.cat([one[:2], one[3:]]).float()
    assert abs(others.std() - 0.5) < 0.02
    assert len(others.unique(dim=0)) == vocab - 1, "rows must differ from each other"


def _sequence_parallel_module(rank):
    shard = shard_of(9)
    module = VocabParallelEmbedding(HIDDEN, shard=shard, sequence_parallel=True)
    plain = VocabParallelEmbedding(HIDDEN, shard=shard)
    ids = torch.arange(5)
    assert torch.equal(module(ids), plain(ids)[3 * rank : 3 * rank + 3])


def test_the_module_hands_its_settings_on():
    run_ranks(_sequence_parallel_module, 2)
