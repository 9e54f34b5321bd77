"""The code blocks of docs/decoding.md, and the README's on decoding, run as they are printed."""

from __future__ import annotations

import torch

from tests.pages import block_with
from vocab_parallel import Streams, VocabLayout, VocabShard, decode, greedy, sample
from vocab_parallel.decode import Fsm, StateMachine, View, contrastive_candidates, contrastive_select, vllm

VOCAB = 64


def names() -> dict[str, object]:
    shard = VocabShard(VocabLayout(VOCAB, 1, multiple_of=1))
    return {"shard": shard, "torch": torch, **vars(decode), "Streams": Streams, "greedy": greedy, "sample": sample}


def test_the_four_functions():
    given = names() | {"logits": torch.randn(3, VOCAB)}
    exec(block_with("docs/decoding.md", "nucleus = top_p(logits, 0.9"), given)
    assert given["token_ids"].shape == given["ids"].shape == (3,) and given["best"].token_ids.shape == (3, 50)
    assert int(given["token_ids"][0]) == int(given["ids"][0]), "temperature 0 is greedy"


def test_the_readmes_lines():
    given = names() | {"logits": torch.randn(2, VOCAB)}
    exec(block_with("README.md", "ids, streams = sample(logits"), given)
    assert given["ids"].shape == (2,) and given["streams"].draws.tolist() == [1, 1]


def test_a_policys_loop():
    steps = iter([True, True, False])
    block = block_with("docs/decoding.md", "policy = vllm(").replace("while ...:", "while next(steps):")
    given = names() | {"vllm": vllm, "View": View, "logits": torch.randn(2, VOCAB), "steps": steps}
    exec(block, given)
    assert given["view"].step.tolist() == [2, 2]


def test_machines_for_constraints():
    given = names() | {"Temperature": decode.Temperature, "TopP": decode.TopP, "Policy": decode.Policy}
    exec(block_with("docs/decoding.md", "StateMachine.from_regex("), given)
    assert isinstance(given["policy"].transforms[0], Fsm) and isinstance(given["machine"], StateMachine)


def test_a_contrastive_step():
    block = block_with("docs/decoding.md", "contrastive_candidates(logits, 4").replace("= ...", "= torch.zeros(2, 4)")
    given = names() | {"logits": torch.randn(2, VOCAB)}
    given |= {"contrastive_candidates": contrastive_candidates, "contrastive_select": contrastive_select}
    exec(block, given)
    assert given["token_ids"].tolist() == given["logits"].argmax(1).tolist()


def test_the_loop_for_a_model_of_ones_own():
    given = names() | {"columns": lambda view, active: torch.randn(2, VOCAB)}
    exec(block_with("docs/decoding.md", "for step in rollout(columns"), given)
    assert given["step"].token_ids.shape == (2,)


def test_no_name_is_said_to_be_exported_that_is_not():
    missing = [name for name in decode.__all__ if not hasattr(decode, name)]
    assert missing == []
