"""Failures 33 and 34: what the head does not do, and what a plan of it does not count."""

from __future__ import annotations

import ast
import inspect
import json

import pytest
import torch

from tests.failures.lab import failure, whole_shard
from tests.failures.page import ROOT
from vocab_parallel import VocabParallelLMHead, app
from vocab_parallel.app.plan.config import PlanConfig
from vocab_parallel.app.settings import from_words
from vocab_parallel.decode import Policy, TopK, View
from vocab_parallel.select import Streams

VOCAB, WIDTH = 9, 6


@failure(
    33, "Selection, beams or stopping inside the head", "impossible",
    "The head is a projection: no argument and no state of it is about choosing, it imports nothing that chooses, and "
    "what persists from step to step is a `PolicyState` in the caller's hands.",
)  # fmt: skip
def test_the_head_projects_and_keeps_nothing():
    head = VocabParallelLMHead(WIDTH, shard=whole_shard(VOCAB), bias=True)
    with pytest.raises(TypeError, match="top_k"):
        VocabParallelLMHead(WIDTH, shard=whole_shard(VOCAB), top_k=5)
    assert set(inspect.signature(head.logits).parameters) == {"input", "rows", "sequence_parallel"}
    assert set(head.state_dict()) == {"weight", "bias"}
    tree = ast.parse((ROOT / "vocab_parallel" / "head.py").read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    choosing = ("vocab_parallel.decode", "vocab_parallel.select", "vocab_parallel.app")
    assert "vocab_parallel.loss" in imported and not [name for name in imported if str(name).startswith(choosing)]
    hidden = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in head.state_dict().items()}
    policy, view = Policy((TopK(3),)), View.of([[1]])
    first = policy.start(1, Streams.of([5]))
    step = policy.step(head.logits(hidden), view, first, shard=head.shard)
    again = policy.step(head.logits(hidden), view, first, shard=head.shard)  # the state is given, not remembered
    assert torch.equal(step.token_ids, again.token_ids) and step.state is not first
    assert int(first.streams.draws) == 0 and int(step.state.streams.draws) == 1
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@failure(
    34, "The head's costs taken for the whole model's", "impossible",
    "`plan` takes no argument about the model below the head, and both its text and its JSON say what is counted and "
    "what is not.",
)  # fmt: skip
def test_a_plan_counts_the_head_and_says_so(capsys):
    for word in ("layers=32", "heads=16", "optimizer=adamw", "kv_cache=true"):
        with pytest.raises(Exception, match="unknown key"):
            from_words(PlanConfig, [word])
    assert app.main(["plan", "tokens=1024", "hidden=512", "vocab=9000", "tp=2", "device=cpu"]) == 0
    text = capsys.readouterr().out
    assert "counted: one step of the head's loss" in text
    assert "Not counted: the model below the head, its activations and caches, the optimizer" in text
    assert app.main(["plan", "tokens=1024", "hidden=512", "vocab=9000", "tp=2", "device=cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["covers"] in text
    items = {item for one in found["schedules"].values() for item in one["memory_bytes"]}
    assert items and not [item for item in items if "optimizer" in item or "layer" in item]
