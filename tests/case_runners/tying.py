"""Tied weights: one step, and what loading does to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.batch import assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks, joined, replicated, same_bits
from tests.cases import Case, as_target, as_tensor, assert_close, load_cases, local_part
from vocab_parallel import (
    PipelineTie,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    collectives,
    linear_cross_entropy,
    tie_weights,
    verify_tied,
    vocab_parallel_embedding,
    vocab_parameters,
)
from vocab_parallel.shard import RankGroup


class Tied(nn.Module):
    """`logits = E[ids] @ E.T`, the smallest tied model."""

    def __init__(self, case: Case, dtype: torch.dtype, ranks: Ranks, width: int, tie: bool = True) -> None:
        super().__init__()
        self.shard = ranks.shard(case, case.vocab_size() if "weight" in case.inputs else 4)
        self.embedding = VocabParallelEmbedding(width, shard=self.shard, dtype=dtype)
        self.lm_head = VocabParallelLMHead(width, shard=self.shard, dtype=dtype)
        if tie:
            tie_weights(self.embedding, self.lm_head)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.lm_head.loss(self.embedding(ids), target)

    def local(self, whole: Any) -> torch.Tensor:
        table = as_tensor(whole, self.embedding.weight.dtype)
        return local_part(table, 0, self.shard.shard_size, self.shard.rank, fill=0.0)


def observe_tied_step(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    table = as_tensor(case.inputs["weight"], dtype)
    ids, target = as_target(case.inputs["ids"]), as_target(case.inputs["target"])
    model = Tied(case, dtype, ranks, table.shape[1])
    with torch.no_grad():
        model.embedding.weight.copy_(model.local(case.inputs["weight"]))
    weight = model.embedding.weight
    assert [id(parameter) for parameter, _ in vocab_parameters(model).values()] == [id(weight)]
    assert case.params["optimizer"] == "AdamW"
    options = {key: case.params[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(model.parameters(), **options | {"betas": tuple(options["betas"])})
    seen: dict[str, Any] = {"parameters": len(list(model.parameters())), "losses": []}
    detached = weight.detach()
    hidden = vocab_parallel_embedding(ids, weight, shard=model.shard)
    (seen["dweight_embedding_part"],) = torch.autograd.grad(
        linear_cross_entropy(hidden, detached, target, shard=model.shard), weight
    )
    (seen["dweight_head_part"],) = torch.autograd.grad(
        linear_cross_entropy(hidden.detach(), weight, target, shard=model.shard), weight
    )
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = model(ids, target)
        loss.backward()
        seen["losses"].append(loss.detach())
        if step == 1:
            seen["dweight"] = weight.grad.clone()
        optimizer.step()
        seen[f"weight_after_{step}"] = weight.detach().clone()
    verify_tied(model, optimizer)
    state = optimizer.state[weight]
    seen["states"] = len(optimizer.state)
    return seen | {"exp_avg_after_3": state["exp_avg"], "exp_avg_sq_after_3": state["exp_avg_sq"]}


def check_tied_step(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    assert {one["parameters"] for one in seen} == {one["states"] for one in seen} == {1}
    losses = [replicated(f"{case.id} loss {step}", [one["losses"][step] for one in seen]) for step in range(3)]
    assert_close(losses[0], expect.take("loss"), case, dtype, "loss")
    without_zero = load_cases()["W11"]  # the same model at ZeRO stages 0 to 3; this is its stage 0
    if dtype in without_zero.tol:
        assert_close(torch.stack(losses), without_zero.expect["losses"], without_zero, dtype, "losses of three steps")
    whole = {name: joined(name, case, 0, [one[name] for one in seen]) for name in seen[0] if name in expect}
    for name, value in whole.items():
        assert_close(value, expect.take(name), case, dtype, name)
    squares = sum(one["dweight"].double().square().sum() for one in seen)
    assert_close(squares.sqrt(), expect.take("grad_norm"), case, dtype, "grad_norm")


LOADS = ("embed key only", "both keys", "head key only")


def observe_tied_load(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[Any, Any]:
    """The state in one key or both, copied or assigned, in the model's dtype or another."""
    whole = as_tensor(case.inputs["state"]["embed"])
    seen: dict[Any, Any] = {}
    for load in LOADS:
        for assign in (False, True):
            for state_dtype in (dtype, torch.float32):
                model = Tied(case, dtype, ranks, whole.shape[1])
                with torch.no_grad():
                    model.embedding.weight.copy_(model.local(case.inputs["old"]))
                local = model.local(case.inputs["state"]["embed"]).to(state_dtype)
                keys = {"embed key only": ["embedding.weight"], "head key only": ["lm_head.weight"]}.get(load)
                keys = keys or ["embedding.weight", "lm_head.weight"]
                state = {key: local.clone() for key in keys}
                model.load_state_dict(state, strict=load == "both keys", assign=assign)
                seen[load, assign, state_dtype] = {
                    "embed": model.embedding.weight.detach(),
                    "head": model.lm_head.weight.detach(),
                    "same_parameter": model.embedding.weight is model.lm_head.weight,
                    "named_parameters_count": len(list(model.named_parameters())),
                    "pairs": verify_tied(model),
                }
    return seen


def check_tied_load(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[Any, Any]]) -> None:
    assert case.inputs["also"] == ["both keys", "only lm_head key", "assign=True"]
    wanted = {key: expect.take(key) for key in ("embed", "head", "same_parameter", "named_parameters_count")}
    for how in seen[0]:
        for name in ("embed", "head"):
            rows = torch.cat([one[how][name] for one in seen])
            assert_close(rows, wanted[name], case, dtype, f"{how}: {name}")
        for one in seen:
            assert one[how]["same_parameter"] is wanted["same_parameter"], how
            assert one[how]["named_parameters_count"] == wanted["named_parameters_count"], how
            assert one[how]["pairs"] == [("embedding.weight", "lm_head.weight")], how


def observe_tied_mismatch(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    """Two tensors where the config says one: in the checkpoint, in the model after the tie, in the optimizer."""
    embed, head = case.inputs["embed"], case.inputs["head"]
    tied = Tied(case, dtype, ranks, 2)
    state = {"embedding.weight": tied.local(embed), "lm_head.weight": tied.local(head)}
    found = {"load": attempt(lambda: tied.load_state_dict(state))}
    found["assign"] = attempt(lambda: tied.load_state_dict(state, assign=True))
    still_tied = len(verify_tied(tied)) == 1
    tied.lm_head.weight = nn.Parameter(tied.local(head))
    found["separate"] = attempt(lambda: verify_tied(tied))
    tied.lm_head.weight = nn.Parameter(tied.embedding.weight.detach())  # equal values, even one storage, but two
    found["one storage"] = attempt(lambda: verify_tied(tied))
    late = Tied(case, dtype, ranks, 2, tie=False)
    optimizer = torch.optim.SGD(late.parameters(), lr=0.1)
    found["optimizer"] = attempt(lambda: tie_weights(late.embedding, late.lm_head, optimizer=optimizer))
    tie_weights(late.embedding, late.lm_head)
    found["optimizer, verified"] = attempt(lambda: verify_tied(late, optimizer))
    return {"still tied": still_tied, "found": found}


def check_tied_mismatch(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    assert expect.take("either")[0] == "raise naming both parameters"
    assert expect.take("never") == "save only embed"
    for what in seen[0]["found"]:
        words = ["embedding.weight", "lm_head.weight"]
        assert_all_raise(f"{case.id} {what}", [one["found"][what] for one in seen], ["TyingError"], words)
    assert all(one["still tied"] for one in seen), f"{case.id}: a refused checkpoint took the tie apart"


def observe_untied_load(case: Case, dtype: torch.dtype, ranks: Ranks) -> bool:
    """A model that is not tied loads two keys with one tensor: its weights stay two."""
    apart = True
    for assign in (False, True):
        model = Tied(case, dtype, ranks, 2, tie=False)
        table = model.local([[float(row), 1.0] for row in range(4)])
        state = {"embedding.weight": table, "lm_head.weight": table.view_as(table)}
        model.load_state_dict(state, assign=assign)
        verify_tied(model, required=False)
        before = model.embedding.weight.detach().clone()
        with torch.no_grad():
            model.lm_head.weight += 1.0
        apart &= same_bits(model.lm_head.weight.detach(), before + 1.0)
        apart &= same_bits(model.embedding.weight.detach(), before)
    return apart


def check_untied_load(case: Case, dtype: str, tp: int, expect: Expected, seen: list[bool]) -> None:
    assert case.inputs == {"shared_storage_state": True, "config_tied": False}
    assert expect.take("after") == "adding 1 to head leaves embed unchanged"
    assert seen == [True] * tp


def observe_stages_and_data_parallel(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Two stages with a copy each, two data-parallel ranks of each: the exchange before and after their reduction."""
    stage, replica = divmod(ranks.rank, 2)
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][replica]
    replicas = RankGroup([dist.new_group([0, 1]), dist.new_group([2, 3])][stage])
    seen = {}
    for order in ("exchange, then mean", "mean, then exchange", "exchange, then mean by parts"):
        weight = nn.Parameter(torch.zeros(2, dtype=dtype))
        weight.grad = torch.full((2,), case.inputs[f"g_pp{stage}_dp{replica}"], dtype=dtype)
        tie = PipelineTie(weight, stages)
        tie.start()
        if order.startswith("exchange"):
            tie.reduce_gradients()
        if order.endswith("parts"):  # as a distributed optimizer does: each replica keeps one entry
            part = collectives.reduce_scatter(replicas, weight.grad).wait() / 2
            weight.grad = collectives.all_gather(replicas, part).wait().flatten()
        else:
            weight.grad = collectives.all_reduce_(replicas, weight.grad).wait() / 2
        if order.startswith("mean"):
            tie.reduce_gradients()
        seen[order] = weight.grad
    return seen


def check_stages_and_data_parallel(
    case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, torch.Tensor]]
) -> None:
    wanted = expect.take("final_on_every_rank")
    for order in seen[0]:
        value = replicated(f"{case.id}: {order}", [one[order] for one in seen])
        assert_close(value, [wanted, wanted], case, dtype, order)


def _other_stage(rank: int, tp: int) -> int:
    return rank + tp if rank // tp % 2 == 0 else rank - tp


def observe_replicas(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, list[torch.Tensor]]:
    """AdamW steps on two pipeline stages with a copy each, of `tp` ranks; four ranks are two such pipelines at tp 1."""
    stage, peer = ranks.rank // ranks.tp % 2, _other_stage(ranks.rank, ranks.tp)
    pairs = sorted({tuple(sorted((rank, _other_stage(rank, ranks.tp)))) for rank in range(ranks.world)})
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    shard = ranks.shard(case, 6)
    module = (VocabParallelLMHead if stage else VocabParallelEmbedding)(3, shard=shard, dtype=dtype)
    module.reset_parameters(seed=stage, std=1.0)
    gain = nn.Parameter(torch.ones(3, dtype=dtype))  # replicated over the tensor-parallel ranks
    tie = PipelineTie(module.weight, groups[tuple(sorted((ranks.rank, peer)))], stages=2)
    tie.start()
    optimizer = torch.optim.AdamW([module.weight, gain], lr=0.1)
    ids, target = torch.tensor([1, 4, 4, 0]), torch.tensor([4, 0, 2, 5])
    copies, gains = [], []
    for _ in range(case.inputs["steps"]):
        optimizer.zero_grad()
        hidden = torch.zeros(4, 3, dtype=dtype)
        if stage:
            dist.recv(hidden, peer)
            module.loss(hidden.requires_grad_() * gain, target).backward()
            dist.send(hidden.grad, peer)
        else:
            rows = module(ids) * gain
            dist.send(rows.detach(), peer)
            dist.recv(hidden, peer)
            rows.backward(hidden)
        tie.reduce_gradients()
        optimizer.step()
        tie.verify(optimizer)
        copies.append(module.weight.detach().clone())
        gains.append(gain.detach().clone())
    return {"copies": copies, "gains": gains}


def check_replicas(
    case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, list[torch.Tensor]]]
) -> None:
    assert expect.take("property").startswith("first-stage and last-stage copies bit-identical after every step")
    for step in range(case.inputs["steps"]):
        for rank in range(len(seen)):
            if rank // tp % 2 == 0:
                copies = [seen[at]["copies"][step] for at in (rank, rank + tp)]
                replicated(f"{case.id}: copies after step {step}", copies)
            first = rank - rank % tp
            replicated(f"{case.id}: gain after step {step}", [seen[at]["gains"][step] for at in (first, rank)])
        before = seen[0]["copies"][step - 1] if step else None
        assert before is None or not same_bits(before, seen[0]["copies"][step]), "a step must move the copies"


def observe_middle_stages(case: Case, dtype: torch.dtype, ranks: Ranks) -> Any:
    """Four stages, of which the first and the last hold a copy."""
    ends = case.inputs["ranks_with_embedding"]
    group = dist.new_group(ends)
    weight = nn.Parameter(torch.full((3, 2), float(ranks.rank + 1), dtype=dtype)) if ranks.rank in ends else None
    tie = PipelineTie(weight, group if weight is not None else None, stages=case.inputs["pp"])
    tie.start()
    started = weight.detach().clone() if weight is not None else None
    if weight is not None:
        weight.grad = torch.full_like(weight, float(ranks.rank))
    tie.reduce_gradients()
    tie.verify()
    return started, None if weight is None else weight.grad, tie.traffic.total_calls


def check_middle_stages(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    assert expect.take("property") == "ranks 1,2: no-op; 0 and 3 equal after broadcast"
    ends = case.inputs["ranks_with_embedding"]
    for rank, one in enumerate(seen):
        assert rank in ends or one == (None, None, 0)
    replicated(f"{case.id} weight", [seen[rank][0] for rank in ends])
    assert_close(seen[ends[0]][0], [[1.0, 1.0]] * 3, case, dtype, "weight after the broadcast")
    for rank in ends:
        assert_close(seen[rank][1], [[3.0, 3.0]] * 3, case, dtype, "gradient")
