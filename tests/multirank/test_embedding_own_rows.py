"""The lookup of ranks that hold ids of their own: rows and gradients as one rank has them for all ids."""

from __future__ import annotations

import pytest
import torch

from tests.batch import assert_all_raise, attempt
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import Batch
from tests.tolerances import require_close
from vocab_parallel import VocabParallelEmbedding, reference, vocab_parallel_embedding

HIDDEN = 4
# each rank's shape of ids; the first tp of them are used
SPREADS = {
    "equal": [(2, 3)] * 4,
    "uneven": [(5,), (1, 2), (4, 2), (3, 1, 2)],
    "one has none": [(3,), (0,), (2, 2), (0, 5)],
    "none at all": [(0,), (0, 3), (2, 0), (0,)],
}


def tensors(vocab, shape, rank, dtype):
    draw = torch.Generator().manual_seed(11)
    weight = torch.randn(vocab, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)
    draw.manual_seed(20 + rank)
    ids = torch.randint(0, vocab, shape, generator=draw)
    return weight, ids, torch.randn(*shape, HIDDEN, generator=draw, dtype=torch.float64).to(dtype)


def _lookup(rank, vocab, multiple_of, spread, padding_idx, dtype):
    shard = shard_of(vocab, multiple_of)
    weight, ids, upstream = tensors(vocab, SPREADS[spread][rank], rank, dtype)
    local = shard.slice(weight, fill=float("nan")).requires_grad_()
    out = vocab_parallel_embedding(ids, local, shard=shard, padding_idx=padding_idx, own_rows=True)
    (first,) = torch.autograd.grad(out, local, upstream, retain_graph=True)
    (second,) = torch.autograd.grad(out, local, upstream)
    assert torch.equal(first, second)
    assert (first[shard.num_valid :] == 0).all(), "padding has a gradient"
    return out.detach(), first[: shard.num_valid]


LOOKUPS = Batch(
    _lookup,
    [
        *((9, 1, spread, None, torch.float64) for spread in SPREADS),
        *((vocab, multiple, "uneven", None, torch.float64) for vocab, multiple in [(1, 1), (13, 4), (3, 128)]),
        *((9, 1, "uneven", row, torch.float64) for row in (0, 8)),
        *((9, 1, "uneven", None, dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)


@TP
@pytest.mark.parametrize("case", LOOKUPS.cases, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_each_rank_gets_the_rows_of_its_own_ids_and_the_table_the_sum_of_all_gradients(tp, case):
    vocab, _, spread, padding_idx, dtype = case
    ranks = LOOKUPS(tp, *case)
    whole = tensors(vocab, (1,), 0, dtype)[0].double().requires_grad_()
    for rank in range(tp):
        _, ids, upstream = tensors(vocab, SPREADS[spread][rank], rank, dtype)
        expected = reference.embedding(ids, whole, padding_idx=padding_idx)
        assert ranks[rank][0].dtype == dtype
        assert torch.equal(ranks[rank][0].double(), expected.detach()), f"rows of rank {rank}"
        expected.backward(upstream.double())
    require_close("d_weight", torch.cat([gradient for _, gradient in ranks]), whole.grad, dtype)


def _wrong(rank):
    shard = shard_of(9)
    module = VocabParallelEmbedding(HIDDEN, shard=shard, own_rows=True)
    before = shard.traffic.total_calls
    module(torch.arange(rank, 9))
    calls = shard.traffic.total_calls - before
    both = VocabParallelEmbedding(HIDDEN, shard=shard, own_rows=True, sequence_parallel=True)
    return {
        "calls": calls,
        "range": attempt(lambda: module(torch.tensor([1, 9 if rank == 1 else 2]))),
        "dtype": attempt(lambda: module(torch.zeros(2, dtype=torch.float32 if rank == 1 else torch.int64))),
        "both": attempt(lambda: both(torch.zeros(2, dtype=torch.int64))),
        "disagree": attempt(
            lambda: (
                module(torch.arange(2))
                if rank == 0
                else vocab_parallel_embedding(torch.arange(2), module.weight, shard=shard)
            )
        ),
    }


ERRORS = Batch(_wrong, [()])


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("range", "TokenRangeError", ["9", "rank 1"]),
        ("dtype", "LayoutMismatchError", ["torch.float32", "rank 1"]),
        ("both", "ValueError", ["own_rows", "sequence_parallel"]),
        ("disagree", "LayoutMismatchError", ["own"]),
    ],
)
def test_what_one_rank_sees_is_raised_on_all(what, kind, words):
    assert_all_raise(what, [result[what] for result in ERRORS(2)], [kind], words)


def test_a_lookup_is_three_collectives():
    assert [result["calls"] for result in ERRORS(2)] == [3, 3]
