"""The gradient norm of a model with a sharded vocabulary: that of the unsharded one, the same bits on every rank."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.batch import attempt
from tests.multirank.counting import collectives
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import require_equal
from vocab_parallel import VocabParallelEmbedding, VocabParallelLMHead, reference, tie_weights, vocab_parameters
from vocab_parallel.gradient_norm import clip_gradients_, gradient_norm

VOCAB, HIDDEN = 9, 4  # with multiple_of=1 over 4 ranks 3, 3, 3 and none
IDS = torch.tensor([0, 3, 3, 8, 5])
TARGET = torch.tensor([3, 8, -100, 5, 0])


def tables():
    draw = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(*shape, generator=draw, dtype=torch.float64)
        for name, shape in {
            "embedding": (VOCAB, HIDDEN), "head": (VOCAB, HIDDEN), "bias": (VOCAB,), "trunk": (HIDDEN, HIDDEN),
        }.items()
    }  # fmt: skip


class Model(nn.Module):
    def __init__(self, shard, *, tied, bias, dtype=torch.float64):
        super().__init__()
        whole = {name: table.to(dtype) for name, table in tables().items()}
        self.embedding = VocabParallelEmbedding(HIDDEN, shard=shard, dtype=dtype)
        self.trunk = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=dtype)
        self.head = VocabParallelLMHead(HIDDEN, shard=shard, bias=bias, dtype=dtype)
        if tied:
            tie_weights(self.embedding, self.head)
        with torch.no_grad():
            self.trunk.weight.copy_(whole["trunk"])
            self.head.weight.copy_(shard.slice(whole["head"]))
            self.embedding.weight.copy_(shard.slice(whole["embedding"]))
            if bias:
                self.head.bias.copy_(shard.slice(whole["bias"]))

    def forward(self, ids, target):
        return self.head.loss(self.trunk(self.embedding(ids)).tanh(), target)


def expected_norm(*, tied, bias):
    whole = {name: table.clone().requires_grad_() for name, table in tables().items()}
    if tied:
        del whole["head"]
    if not bias:
        del whole["bias"]
    hidden = (reference.embedding(IDS, whole["embedding"]) @ whole["trunk"].T).tanh()
    weight = whole["embedding"] if tied else whole["head"]
    loss = reference.linear_cross_entropy(hidden, weight, TARGET, bias=whole.get("bias"))
    gradients = torch.autograd.grad(loss, list(whole.values()))
    return sum(gradient.square().sum() for gradient in gradients).sqrt()


def _norm(rank, tied, bias):
    shard = shard_of(VOCAB)
    model = Model(shard, tied=tied, bias=bias)
    model(IDS, TARGET).backward()
    with collectives() as (calls, sent):
        norm = gradient_norm(model)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    untouched = clip_gradients_(model, 2 * float(norm))
    kept = all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    returned = clip_gradients_(model, float(norm) / 3)
    ratios = [(p.grad - b / 3).abs().max() for p, b in zip(model.parameters(), before, strict=True)]
    return {
        "norm": [norm, untouched, returned], "kept": kept, "off by": max(ratios), "after": gradient_norm(model),
        "calls": dict(calls), "sent": sent["all_reduce"], "size": shard.tp_size,
    }  # fmt: skip


NORMS = Batch(_norm, list(product([False, True], [False, True])))


@TP
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_norm_is_the_unsharded_models_and_clipping_scales_all_by_one_factor(tp, tied, bias):
    expected = expected_norm(tied=tied, bias=bias)
    ranks = NORMS(tp, tied, bias)
    require_equal("norm on every rank", [norm for rank in ranks for norm in rank["norm"]])
    require_equal("norm after clipping", [rank["after"] for rank in ranks])
    assert abs(ranks[0]["norm"][0] - expected) <= 1e-12 * expected
    assert abs(ranks[0]["after"] - expected / 3) <= 1e-12 * expected
    for rank in ranks:
        assert rank["kept"], "a norm under the limit must leave every gradient as it is"
        assert rank["off by"] <= 1e-12
        assert rank["calls"] == ({} if tp == 1 else {"all_reduce": 1})
        assert rank["sent"] == 2 * 8 * (tp - 1) // tp


def _marks(rank):
    """What Megatron marks, and what is None: one world for all."""
    shard = shard_of(VOCAB)
    results = {}

    model = Model(shard, tied=False, bias=False)
    model(IDS, TARGET).backward()
    whole = gradient_norm(model)
    model.head.weight.shared = True  # the last stage's copy of a tied weight
    results["shared"] = (whole**2 - gradient_norm(model) ** 2, _square(shard, model.head.weight))
    clip_gradients_(model, float(gradient_norm(model)) / 2)
    results["shared is scaled too"] = (_square(shard, model.head.weight) * 4, results["shared"][1])

    model = Model(shard, tied=False, bias=False)
    model(IDS, TARGET).backward()
    before = gradient_norm(model)
    model.trunk.weight.tensor_model_parallel = True  # as if each rank held another part of it
    trunk = model.trunk.weight.grad.square().sum()
    results["tensor parallel"] = (gradient_norm(model) ** 2 - before**2, trunk * (shard.tp_size - 1))

    model = Model(shard, tied=False, bias=False)
    model(IDS, TARGET).backward()
    for parameter in model.parameters():
        parameter.main_grad, parameter.grad = parameter.grad * 3, None
    results["main_grad"] = (gradient_norm(model), before * 3)
    clip_gradients_(model, float(before))
    results["main_grad, clipped"] = (gradient_norm(model), before)

    model = Model(shard, tied=False, bias=False)
    model(IDS, TARGET).backward()
    if rank == 0:
        model.head.weight.grad = None
    others = _square(shard, model.head.weight)
    rest = model.trunk.weight.grad.square().sum() + _square(shard, model.embedding.weight)
    results["no gradient on a rank"] = (gradient_norm(model), (rest + others).sqrt())

    extra = nn.Parameter(torch.ones(2))
    extra.grad = torch.full((2,), 5.0)
    results["extra"] = (gradient_norm(model, extra=[extra]) ** 2, rest + others + 50.0)
    empty = nn.Linear(2, 2, dtype=torch.float64)
    results["no vocabulary, no gradient"] = (gradient_norm(empty), torch.zeros((), dtype=torch.float64))
    return results


def _square(shard, parameter):
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    total = gradient.square().sum()
    if shard.group is not None:
        dist.all_reduce(total, group=shard.group)
    return total


@pytest.mark.parametrize("tp", [1, 3])
def test_what_hosts_mark_is_counted_as_they_do(tp):
    for rank, results in enumerate(run_ranks(_marks, tp)):
        for what, (got, expected) in results.items():
            assert abs(float(got - expected)) <= 1e-10 * max(1.0, float(expected)), (what, rank, got, expected)


def _nonfinite(rank, bad):
    """Only the rank that owns id 3 sees it."""
    model = Model(shard_of(VOCAB), tied=True, bias=False)
    model(IDS, TARGET).backward()
    if model.head.shard.start <= 3 < model.head.shard.stop:
        model.head.weight.grad[3 - model.head.shard.start, 0] = bad
    before = model.trunk.weight.grad.clone()
    raised = attempt(lambda: clip_gradients_(model, 1.0))
    return raised.kind, raised.message, torch.equal(model.trunk.weight.grad, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_raises_on_all_and_scales_nothing(bad):
    ranks = run_ranks(_nonfinite, 3, bad)
    assert len(set(ranks)) == 1
    kind, message, unchanged = ranks[0]
    assert kind == "NonFiniteError" and "norm" in message and unchanged


def _stages(rank):
    """Two tensor-parallel ranks on each of two stages; each stage has other parameters."""
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shard = shard_of(VOCAB, 1, tp_groups[rank // 2])
    model = Model(shard, tied=True, bias=False)
    model(IDS, TARGET).backward()
    if rank >= 2:
        for parameter in model.parameters():
            parameter.grad *= 2
    ours = gradient_norm(model, group=pipelines[rank % 2])
    assert [p for p, _ in vocab_parameters(model).values()] == [model.embedding.weight]
    return ours


def test_the_squares_of_pipeline_stages_add_up():
    expected = expected_norm(tied=True, bias=False) * 5**0.5
    norms = run_ranks(_stages, 4)
    require_equal("norm on every rank", norms)
    assert abs(norms[0] - expected) <= 1e-12 * expected


def _against_torch(rank):
    model = Model(shard_of(VOCAB), tied=True, bias=False, dtype=torch.float32)
    model(IDS, TARGET).backward()
    ours = gradient_norm(model)
    return ours, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])


def test_torchs_own_norm_differs_between_ranks():
    """What this module is for: if this fails, torch has learned of shards."""
    ranks = run_ranks(_against_torch, 2)
    require_equal("ours", [ours for ours, _ in ranks])
    assert ranks[0][1] != ranks[1][1]
