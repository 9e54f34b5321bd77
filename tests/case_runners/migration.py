"""Runs and checks the shared case of a vocabulary that grows with its optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.case_runners.common import Expected, Ranks, replicated
from tests.case_runners.layouts import check_other_tp
from tests.cases import Case, as_tensor, assert_close
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabShard
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration import migrate_model_
from vocab_parallel.vocabulary.migration.initialization import MeanOfRows

STATES = ("exp_avg", "exp_avg_sq")


def observe_resize(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any] | None:
    if "new_vocab" not in case.inputs:
        return None
    old = as_tensor(case.inputs["weight"], dtype)
    layout = VocabLayout(len(old), ranks.tp, multiple_of=case.inputs["multiple"])
    shard = VocabShard(layout, ranks.group())
    model = nn.Sequential(VocabParallelEmbedding(old.shape[1], shard=shard, dtype=dtype))
    model[0].weight = nn.Parameter(shard.slice(old))
    settings = case.expect["with_mean_init"]["one_adam_step"]
    options = {name: settings[name] for name in ("lr", "eps", "weight_decay")}
    optimizer = torch.optim.Adam(model.parameters(), betas=tuple(settings["betas"]), **options)
    optimizer.state[model[0].weight] = {
        "step": torch.tensor(float(case.inputs["step"])),
        **{name: shard.slice(as_tensor(case.inputs[name], dtype)) for name in STATES},
    }
    vocab_map = VocabMap.append(len(old), case.inputs["new_vocab"] - len(old))
    report = migrate_model_(model, optimizer, vocab_map, init=MeanOfRows())
    state = optimizer.state[model[0].weight]
    seen = {"weight": model[0].weight.detach().clone(), **{name: state[name].clone() for name in STATES}}
    seen |= {"step": state["step"].item(), "layout": report.new_layout}
    model[0].weight.grad = report.shard.slice(torch.full((case.inputs["new_vocab"], old.shape[1]), settings["grad"],
                                                         dtype=dtype))  # fmt: skip
    optimizer.step()
    return seen | {"after a step": model[0].weight.detach().clone()}


def check_resize(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    if "new_vocab" not in case.inputs:
        check_other_tp(case, dtype, tp, expect, seen)
        return
    sizes = {"layout_before": len(case.inputs["weight"]), "layout_after": case.inputs["new_vocab"]}
    for name, vocab in sizes.items():  # the file shows them at TP 2
        assert _described(VocabLayout(vocab, 2, multiple_of=case.inputs["multiple"])) == expect.take(name)
    layout = seen[0]["layout"]
    whole = {name: _joined([one[name] for one in seen], layout) for name in ("weight", "after a step", *STATES)}
    old = as_tensor(case.inputs["weight"], whole["weight"].dtype)
    assert expect.take("weight_first_6") == "unchanged"
    assert torch.equal(whole["weight"][: len(old)], old)
    for name in STATES:
        assert torch.equal(whole[name].double(), as_tensor(expect.take(name)))
    assert {one["step"] for one in seen} == {expect.take("step")}
    assert expect.take("new_rows_equal_on_all_ranks") is True
    new_row = replicated(case.id, list(whole["weight"][len(old) :]))
    wanted = expect.take("with_mean_init")
    assert_close(new_row, wanted["new_row"], case, dtype, "new row")
    assert_close(whole["after a step"], wanted["one_adam_step"]["weight_after"], case, dtype, "weight after a step")


def _described(layout: VocabLayout) -> dict[str, Any]:
    rows = [list(layout.range(rank)) for rank in range(layout.tp_size)]
    padded: list[list[Any]] = [[*ids, *["pad"] * (layout.shard_size - len(ids))] for ids in rows]
    return {"padded": layout.padded_size, "per_rank": layout.shard_size, "rows": padded}


def _joined(parts: list[Tensor], layout: VocabLayout) -> Tensor:
    return torch.cat([part[: len(layout.range(rank))] for rank, part in enumerate(parts)])
