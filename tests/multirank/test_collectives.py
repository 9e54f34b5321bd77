"""Each autograd collective against its adjoint, and the gathering of whole tables."""

from __future__ import annotations

import pytest
import torch

from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import collectives
from vocab_parallel.collectives import gather_vocab

ROWS = [3, 0, 2, 1]


def apply(name, x, shard, rows):
    if name in ("SumOverShards", "CopyToShards"):
        return getattr(collectives, name).apply(x, shard)
    return getattr(collectives, name).apply(x, shard, rows)


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
