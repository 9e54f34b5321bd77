"""A tied weight held twice, on the first and the last pipeline stage: equal bits, one exchange, counted once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.batch import attempt
from tests.multirank.counting import collectives
from tests.multirank.sharded import shard_of
from tests.ranks import run_ranks
from tests.tolerances import require_close, require_equal
from vocab_parallel import (
    PipelineTie,
    TyingError,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    clip_gradients_,
    reference,
)
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.gradient_norm import gradient_norm

VOCAB, HIDDEN, STEPS = 9, 4, 3
IDS = torch.tensor([0, 3, 3, 8, 5])
TARGET = torch.tensor([3, 8, -100, 5, 0])
SETTINGS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
CLIP = 0.3


def table():
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Stage(nn.Module):
    """One stage of three parts: the embedding with a scale, nothing, the head."""

    def __init__(self, stage, last, shard, dtype):
        super().__init__()
        if stage == 0:
            self.embedding = VocabParallelEmbedding(HIDDEN, shard=shard, dtype=dtype)
            self.scale = nn.Parameter(torch.linspace(0.5, 2, HIDDEN, dtype=dtype))
        if stage == last:
            self.head = VocabParallelLMHead(HIDDEN, shard=shard, dtype=dtype)
            self.head.reset_parameters(seed=7)  # other values, which start must replace


def _train(rank, tp, stages, dtype):
    """`stages` pipeline stages of `tp` ranks: hidden states go forward, their gradients back, by hand."""
    tp_groups = [dist.new_group(list(range(at, at + tp))) for at in range(0, tp * stages, tp)]
    stage, tp_rank, last = rank // tp, rank % tp, stages - 1
    ties = [dist.new_group([at, last * tp + at]) for at in range(tp)]
    pipes = [dist.new_group([at + s * tp for s in range(stages)]) for at in range(tp)]
    shard = shard_of(VOCAB, 1, tp_groups[stage])
    model = Stage(stage, last, shard, dtype)
    weight = {0: lambda: model.embedding.weight, last: lambda: model.head.weight}.get(stage, lambda: None)()
    if stage == 0:
        with torch.no_grad():
            weight.copy_(shard.slice(table().to(dtype)))
    tie = PipelineTie(weight, None if weight is None else ties[tp_rank], stages=stages)
    tie.start()
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS) if weight is not None else None
    seen = []
    for _ in range(STEPS):
        model.zero_grad()
        loss, calls = _step(model, stage, last, tp, tie, dtype)
        norm = clip_gradients_(model, CLIP, group=pipes[tp_rank])
        if optimizer is not None:
            optimizer.step()
        tie.verify(optimizer)
        copy = None if weight is None else gather_vocab(shard, weight).clone()
        scale = model.scale.detach().clone() if stage == 0 else None
        seen.append({"norm": norm, "loss": loss, "copy": copy, "calls": calls, "scale": scale})
    return seen


def _step(model, stage, last, tp, tie, dtype):
    loss, rank = None, dist.get_rank()
    hidden = torch.zeros(len(IDS), HIDDEN, dtype=dtype)
    if stage == 0:
        hidden = (model.embedding(IDS) * model.scale).tanh()
        dist.send(hidden.detach(), rank + last * tp)
        gradient = torch.zeros_like(hidden)
        dist.recv(gradient, rank + last * tp)
        hidden.backward(gradient)
    if stage == last:
        dist.recv(hidden, rank - last * tp)
        hidden.requires_grad_()
        loss = model.head.loss(hidden, TARGET)
        loss.backward()
        dist.send(hidden.grad, rank - last * tp)
        loss = loss.detach()
    with collectives() as (calls, _):
        tie.reduce_gradients()
    return loss, dict(calls)


def oracle():
    weight, scale = table().requires_grad_(), torch.linspace(0.5, 2, HIDDEN, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.AdamW([weight, scale], **SETTINGS)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = reference.linear_cross_entropy((reference.embedding(IDS, weight) * scale).tanh(), weight, TARGET)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([weight.grad, scale.grad])
        for parameter in (weight, scale):
            parameter.grad *= CLIP / norm
        assert norm > CLIP
        optimizer.step()
        values = {"copy": weight.detach().clone(), "scale": scale.detach().clone()}
        seen.append({"loss": loss.detach(), "norm": norm, **values})
    return seen


@pytest.mark.parametrize(("tp", "stages"), [(1, 2), (2, 2), (1, 4)])
def test_copies_train_as_one_weight_and_stay_the_same_bits(tp, stages):
    ranks = run_ranks(_train, tp * stages, tp, stages, torch.float64)
    first, last = ranks[:tp], ranks[-tp:]
    for step, expected in enumerate(oracle()):
        copies = [rank[step]["copy"] for rank in (*first, *last)]
        require_equal(f"copies after step {step}", copies)
        require_close(f"weight after step {step}", copies[0], expected["copy"], torch.float64)
        scales = [rank[step]["scale"] for rank in first]
        require_equal(f"replicated parameter after step {step}", scales)
        require_close(f"scale after step {step}", scales[0], expected["scale"], torch.float64)
        require_equal(f"norm of step {step} on every stage", [rank[step]["norm"] for rank in ranks])
        require_close(f"norm of step {step}", ranks[0][step]["norm"], expected["norm"], torch.float64)
        require_close(f"loss of step {step}", last[0][step]["loss"], expected["loss"], torch.float64)
        for rank in (*first, *last):
            assert rank[step]["calls"] == {"all_reduce": 1}, "the gradients are exchanged once"
        for rank in ranks[tp:-tp]:
            assert rank[step]["copy"] is None and rank[step]["calls"] == {}, "stages between do nothing"


BOTH = ("embedding.weight on stage 0", "lm_head.weight on stage 1")


def _broken(rank):
    """Every way of losing two copies, on two ranks that are the two stages."""
    group = dist.group.WORLD

    def fresh(**settings):
        weight = nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)))
        tie = PipelineTie(weight, group, stages=2)
        tie.start()
        return weight, tie, torch.optim.AdamW([weight], **{"lr": 1e-3, **settings})

    found = {}

    weight, tie, optimizer = fresh()
    tie.verify(optimizer)
    found["intact"] = attempt(lambda: tie.verify(optimizer))
    found["started"] = weight.detach().clone()
    if rank == 1:
        weight.data[4, 2] = torch.nextafter(weight.data[4, 2], torch.tensor(9.0))
    found["one bit"] = attempt(lambda: tie.verify())

    weight, tie, _ = fresh()
    if rank == 1:
        with torch.no_grad():
            weight.copy_(weight.flip(0))
    found["rows in another order"] = attempt(lambda: tie.verify())

    weight, tie, optimizer = fresh()
    weight.grad = torch.full_like(weight, 2.0 * rank - 1.0)
    optimizer.step()
    found["a step without the exchange"] = attempt(lambda: tie.verify(optimizer))

    _, tie, optimizer = fresh(weight_decay=0.1 * rank)
    found["another rule"] = attempt(lambda: tie.verify(optimizer))

    _, tie, optimizer = fresh()
    if rank == 0:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    found["optimizer first"] = attempt(lambda: tie.verify(optimizer))

    weight, tie, _ = fresh()
    if rank == 1:
        del weight.shared
    found["not marked"] = attempt(lambda: tie.verify())

    odd = PipelineTie(nn.Parameter(torch.zeros(5 + rank, 3)), group, stages=2)
    found["other shapes"] = attempt(odd.start)
    odd = PipelineTie(nn.Parameter(torch.zeros(5, 3, dtype=[torch.float32, torch.bfloat16][rank])), group, stages=2)
    found["other dtypes"] = attempt(odd.start)
    found["no group"] = attempt(lambda: PipelineTie(weight, None, stages=2))
    found["no weight"] = attempt(lambda: PipelineTie(None, group, stages=2))
    return found


def test_every_way_of_parting_two_copies_raises_on_both_stages_and_names_both():
    first, last = run_ranks(_broken, 2)
    assert first.pop("intact").kind is None and last.pop("intact").kind is None
    require_equal("bits after start", [first.pop("started"), last.pop("started")])
    assert len(first) == 10
    for what, raised in first.items():
        assert raised.kind == last[what].kind == "TyingError", (what, raised, last[what])
        assert raised.message == last[what].message, what
        assert all(name in raised.message for name in BOTH), (what, raised.message)


def _details(rank):
    """What start and the exchange do to single values."""
    group = dist.group.WORLD
    special = torch.tensor([[-0.0, float("nan"), float("-inf"), 1e-45]], dtype=torch.float32)
    weight = nn.Parameter(special.clone() if rank == 0 else torch.ones(1, 4))
    tie = PipelineTie(weight, group)
    tie.start()
    seen = {"bits": weight.detach().view(torch.int32), "marks": [getattr(weight, "shared", False), tie.is_first]}

    weight = nn.Parameter(torch.zeros(2, 3).T)  # not contiguous
    tie = PipelineTie(weight, group)
    tie.start()
    weight.grad = torch.full((2, 3), rank + 1.0).T
    tie.reduce_gradients()
    seen["transposed"] = weight.grad
    weight.grad = None if rank == 0 else torch.ones(3, 2)
    tie.reduce_gradients()
    seen["none on one stage"] = weight.grad
    weight.main_grad, weight.grad = torch.full((3, 2), rank + 1.0), None
    tie.reduce_gradients()
    seen["main_grad"] = weight.main_grad
    assert weight.grad is None
    half = nn.Parameter(torch.full((2, 2), float(rank), dtype=torch.bfloat16))
    tie = PipelineTie(half, group)
    tie.start()
    tie.verify()
    seen["bfloat16"] = half.detach()
    return seen


def test_the_start_copies_bits_and_the_exchange_takes_any_gradient():
    first, last = run_ranks(_details, 2)
    require_equal("bits", [first["bits"], last["bits"]])
    assert first["bits"][0, 0] == -(2**31), "-0.0 stays -0.0"
    assert first["marks"] == [False, True] and last["marks"] == [True, False]
    for what, value in {"transposed": 3.0, "none on one stage": 1.0, "main_grad": 3.0, "bfloat16": 0.0}.items():
        for seen in (first, last):
            assert bool((seen[what] == value).all()), (what, seen[what])


def test_on_one_stage_and_between_stages_nothing_happens():
    weight = nn.Parameter(torch.ones(2, 2))
    middle = PipelineTie(None, None)
    for call in (middle.start, middle.reduce_gradients, middle.verify):
        call()
    assert not middle.is_first
    with pytest.raises(TyingError):
        PipelineTie(weight, None)


def _alone(rank):
    weight = nn.Parameter(torch.ones(2, 2))
    tie = PipelineTie(weight, dist.group.WORLD)
    tie.start()
    weight.grad = torch.ones(2, 2)
    tie.reduce_gradients()
    tie.verify(torch.optim.SGD([weight], lr=1.0))
    model = nn.Module()
    model.weight = weight
    return hasattr(weight, "shared"), float(gradient_norm(model)), tie.traffic.total_calls


def test_a_pipeline_of_one_stage_is_an_ordinary_model():
    assert run_ranks(_alone, 1) == [(False, 2.0, 0)]
