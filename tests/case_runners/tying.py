"""Tied weights: one step, and what loading does to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.batch import assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks, joined, replicated, same_bits
from tests.cases import Case, as_target, as_tensor, assert_close, load_cases, local_part
from vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelLMHead,
    linear_cross_entropy,
    tie_weights,
    verify_tied,
    vocab_parallel_embedding,
    vocab_parameters,
)


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
    model = Tied(case, dtype, ranks, 2, tie=False)
    table = model.local([[float(row), 1.0] for row in range(4)])
    model.load_state_dict({"embedding.weight": table, "lm_head.weight": table.view_as(table)})
    before = model.embedding.weight.detach().clone()
    with torch.no_grad():
        model.lm_head.weight += 1.0
    moved = same_bits(model.lm_head.weight.detach(), before + 1.0)
    return moved and same_bits(model.embedding.weight.detach(), before)


def check_untied_load(case: Case, dtype: str, tp: int, expect: Expected, seen: list[bool]) -> None:
    assert case.inputs == {"shared_storage_state": True, "config_tied": False}
    assert expect.take("after") == "adding 1 to head leaves embed unchanged"
    assert seen == [True] * tp
