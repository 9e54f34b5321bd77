"""Each autograd collective against its adjoint; gathers in one step, of whole tables, of words."""

from __future__ import annotations

import pytest
import torch

from tests.multirank.counting import collectives as collectives_issued
from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import adjoints, collectives
from vocab_parallel.agreement import Exchange
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.deferral import Plan, Step
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.select.words import exchange_words

ROWS = [3, 0, 2, 1]


def apply(name, x, shard, rows):
    if name in ("SumOverShards", "CopyToShards"):
        return getattr(adjoints, name).apply(x, shard)
    return getattr(adjoints, name).apply(x, shard, rows)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(name, rank, tp):
    """`x` and the gradient `y` of the output on one rank. Replicated ones get the same seed on every rank."""
    mine, total = ROWS[rank], sum(ROWS[:tp])
    x_rows = {"GatherRows": mine}.get(name, total)
    y_rows = {"ScatterRows": mine}.get(name, total)
    x = draw(0 if name == "CopyToShards" else 10 + rank, x_rows, 2)
    y = draw(1 if name == "SumOverShards" else 20 + rank, y_rows, 2)
    return x, y


def _adjoint(rank, name):
    shard = shard_of(9)
    x, y = operands(name, rank, shard.tp_size)
    x = x.requires_grad_()
    out = apply(name, x, shard, ROWS[: shard.tp_size])
    (gradient,) = torch.autograd.grad(out, x, y)
    return {"x": x.detach(), "y": y, "out": out.detach(), "gradient": gradient, "calls": shard.traffic.total_calls}


NAMES = ["SumOverShards", "CopyToShards", "GatherRows", "ScatterRows"]
ADJOINT = Batch(_adjoint, [(name,) for name in NAMES])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_backward_is_the_adjoint_of_forward(name, tp):
    """`<A x, y> = <x, A' y>`, a replicated tensor being one tensor however many ranks hold it."""
    ranks = ADJOINT(tp, name)
    forward = [(result["out"] * result["y"]).sum() for result in ranks]
    backward = [(result["x"] * result["gradient"]).sum() for result in ranks]
    left = forward[0] if name == "SumOverShards" else sum(forward)
    right = backward[0] if name == "CopyToShards" else sum(backward)
    assert torch.isclose(left, right, rtol=1e-12)
    replicated = {"SumOverShards": ["out"], "GatherRows": ["out"], "CopyToShards": ["out", "gradient"]}.get(name, [])
    for key in replicated:
        for result in ranks:
            assert torch.equal(result[key], ranks[0][key]), f"{key} differs between ranks"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_forward_is_what_the_name_says(tp):
    x = {name: [operands(name, rank, tp)[0] for rank in range(tp)] for name in ("SumOverShards", "ScatterRows")}
    total = sum(x["ScatterRows"])
    starts = [sum(ROWS[:rank]) for rank in range(tp)]
    for rank, result in enumerate(ADJOINT(tp, "SumOverShards")):
        assert torch.allclose(result["out"], sum(x["SumOverShards"]), rtol=1e-12), f"sum on rank {rank}"
    for rank, result in enumerate(ADJOINT(tp, "GatherRows")):
        expected = torch.cat([operands("GatherRows", other, tp)[0] for other in range(tp)])
        assert torch.equal(result["out"], expected), f"gather on rank {rank}"
    for rank, result in enumerate(ADJOINT(tp, "ScatterRows")):
        assert torch.allclose(result["out"], total[starts[rank] :][: ROWS[rank]], rtol=1e-12), f"scatter on rank {rank}"
    for rank, result in enumerate(ADJOINT(tp, "CopyToShards")):
        assert torch.equal(result["out"], result["x"]), f"copy on rank {rank}"
        assert (result["calls"] == 0) == (tp == 1)


def _leave_arguments_alone(rank):
    shard = shard_of(9)
    x = draw(rank, 4, 2)
    before = x.clone()
    for name in ("SumOverShards", "CopyToShards", "GatherRows", "ScatterRows"):
        leaf = x.clone().requires_grad_()
        rows = [4, 4] if name == "GatherRows" else [3, 1]
        out = apply(name, leaf, shard, rows)
        upstream = torch.ones_like(out)
        out.backward(upstream)
        assert torch.equal(leaf.detach(), before), f"{name} modified its input"
        assert torch.equal(upstream, torch.ones_like(out)), f"{name} modified the gradient it was given"


def test_arguments_and_upstream_gradients_are_left_alone():
    run_ranks(_leave_arguments_alone, 2)


def _gather(rank, vocab, multiple_of, dim, dtype):
    shard = shard_of(vocab, multiple_of)
    shape = [2, 2]
    shape.insert(dim, vocab)
    table = draw(4, *shape).to(dtype)
    local = shard.slice(table, dim, fill=1e30)
    assert torch.equal(gather_vocab(shard, local, dim=dim), table)
    assert torch.equal(gather_vocab(shard, local.requires_grad_(), dim=dim), table)


TABLES = Batch(
    _gather,
    [
        (vocab, multiple_of, dim, dtype)
        for vocab, multiple_of in [(9, 1), (5, 4), (1, 1)]
        for dim in (0, 1)
        for dtype in (torch.float64, torch.bfloat16)
    ],
)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("case", TABLES.cases)
def test_slicing_then_gathering_gives_the_whole_table_back_without_padding(tp, case):
    TABLES(tp, *case)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]
SHAPES = [(), (1,), (3,), (2, 1, 3), (0, 2), (1, 5)]


def block(rank, dtype, shape):
    return (torch.arange(torch.Size(shape).numel()).view(shape) * 7 + rank * 3 % 5).to(dtype)


def strided(x):
    """The same values with gaps between them."""
    wide = x.new_zeros(*x.shape, 2)
    wide[..., 0] = x
    return wide[..., 0]


def _at_once(rank, dtype, shape):
    shard = shard_of(9)
    mine = strided(block(rank, dtype, shape))
    with collectives_issued() as (issued, sent):
        direct = collectives.all_gather_at_once(shard, mine).wait()
    return direct, collectives.all_gather(shard, mine).wait(), dict(issued), dict(sent), dict(shard.traffic.bytes)


AT_ONCE = Batch(_at_once, [(dtype, shape) for dtype in DTYPES for shape in SHAPES])


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gather_at_once_is_the_gather_and_sends_the_same_bytes(dtype, shape, tp):
    expected = torch.stack([block(rank, dtype, shape) for rank in range(tp)])
    size = expected[0].nbytes * (tp - 1)
    for direct, ring, issued, sent, counted in AT_ONCE(tp, dtype, shape):
        assert direct.dtype == dtype and torch.equal(direct, expected) and torch.equal(ring, expected)
        if tp > 1:
            assert (issued, sent, counted) == ({"all_gather": 1}, {"all_gather": size}, {"all_gather": 2 * size})


def _repeated(rank):
    """One rank imitates what the others gather."""
    shard = shard_of(9)
    x = torch.ones(3, dtype=torch.float32)
    for gather in (collectives.all_gather_at_once, collectives.all_gather):
        if rank == 0:
            name = gather.__name__
            collectives.repeat(shard, Step(name, tuple(x.shape), x.dtype, x.device))
        else:
            gathered = gather(shard, x).wait()
            assert torch.equal(gathered.sum(1), torch.tensor([0.0] + [3.0] * (shard.size - 1)))
    noted = Plan("", 0, "select", None)
    shard.habit.begin(noted, known=False)
    collectives.all_gather_at_once(shard, x).wait()
    return noted.steps


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_that_goes_along_repeats_a_gather_at_once(tp):
    for steps in run_ranks(_repeated, tp):
        assert steps == [Step("all_gather_at_once", (3,), torch.float32, torch.device("cpu"))]


def _words(rank, needs):
    """Exchanges of words by their own function on some ranks, by `Exchange` on the others: they meet."""
    shard, seen = shard_of(9), []
    for at, need in enumerate(needs):
        words = [10 * rank + place - 2**62 for place in range(need)]
        if (rank + at) % 2:
            got = exchange_words(shard, "select", f"call {at}", words, checksum=at)
        else:
            payload = torch.tensor(words, dtype=torch.int64)
            got = Exchange(shard, "select", f"call {at}", payload=payload, checksum=at).wait().tolist()
        seen.append((got, shard.traffic.total_bytes))
    return seen


NEEDS = [1, 3, 0, 70, 64, 2, 80]  # more than the 64 words that there is room for at first


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_words_are_exchanged_in_the_message_of_any_other_exchange(tp):
    ranks = run_ranks(_words, tp, NEEDS)
    for at, need in enumerate(NEEDS):
        expected = [[10 * rank + place - 2**62 for place in range(need)] for rank in range(tp)]
        assert all(seen[at][0] == expected and seen[at][1] == ranks[0][at][1] for seen in ranks)


def _odd(rank, what):
    shard = shard_of(9)
    odd = rank == shard.size - 1
    call = "other" if odd and what == "call" else "one"
    try:
        if odd and what == "fault":
            Exchange(shard, "select", call, fault=ValueError("no words here"), device=torch.device("cpu")).wait()
        checksum = int(odd and what == "checksum")
        exchange_words(shard, "select", call, [1, 2] if odd and what == "need" else [1], checksum=checksum)
    except (ValueError, LayoutMismatchError) as error:
        return type(error).__name__, str(error), exchange_words(shard, "select", "after", [rank])
    return None


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("call", "LayoutMismatchError the ranks of the group disagree. rank 0: one"),
        ("need", "LayoutMismatchError the ranks of the group disagree. rank 0: one"),
        ("checksum", "LayoutMismatchError rank 0 and rank {last} of the group passed different token ids"),
        ("fault", "ValueError no words here [found by rank {last} of the group]"),
    ],
)
def test_ranks_that_disagree_over_words_get_one_error(what, says, tp):
    ranks = run_ranks(_odd, tp, what)
    assert all(one == ranks[0] for one in ranks)
    name, message, after = ranks[0]
    assert f"{name} {message}".startswith(says.format(last=tp - 1))
    assert after == [[rank] for rank in range(tp)], "the group is of use after it"
