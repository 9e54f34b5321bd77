"""The page's three lines and the argument file are what they say."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import Setup, megatron
from tests.ranks import run_ranks
from vocab_parallel import VocabLayout

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/hosts/megatron.md"
ARGUMENTS = ROOT / "configs/megatron/tied_tp2.args"


def three_lines() -> str:
    found = re.findall(r"<!-- three lines -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(found) == 1
    return str(found[0])


def _three_lines(rank: int, source: str, setup: Setup) -> dict[str, Any]:
    with models.parallel(setup):
        model = models.build(setup)
        exec(source, {"model": model, "vocab_size": setup.vocab})
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        pairs = megatron.verify_tied(wrapped, optimizer)
        losses = [models.step_of(setup, wrapped, optimizer, step)[0].item() for step in range(2)]
        return {"pairs": pairs, "losses": losses}


def test_the_three_lines_train_as_they_stand_on_the_page() -> None:
    expected = run_ranks(models.oracle, 1, Setup())[0]["losses"]
    for found in run_ranks(_three_lines, 2, three_lines(), Setup(tp=2)):
        assert len(found["pairs"]) == 1
        assert max(abs(a - b) for a, b in zip(found["losses"], expected[:2], strict=True)) < 1e-5


def arguments() -> dict[str, Any]:
    """The file's flags and values, as pretrain_gpt.py's parser names them."""
    lines = [line for line in ARGUMENTS.read_text().splitlines() if not line.startswith("#")]
    words = shlex.split(" ".join(lines))
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else True
            found[word[2:].replace("-", "_")] = value
    return found


def test_the_argument_file_pads_as_our_layout_and_asks_for_nothing_that_is_refused() -> None:
    given = arguments()
    vocab, multiple = int(given["vocab_size"]), int(given["make_vocab_size_divisible_by"])
    tp = int(given["tensor_model_parallel_size"])
    unit = multiple * tp  # Megatron's rule
    assert VocabLayout(vocab, tp, multiple_of=multiple).padded_size == -(-vocab // unit) * unit
    assert not {"mtp_num_layers", "defer_embedding_wgrad_compute", "untie_embeddings_and_output_weights"} & set(given)


def _arguments(rank: int, given: dict[str, Any], setup: Setup) -> list[float]:
    names = ("hidden_dropout", "attention_dropout", "layernorm_epsilon")
    with models.parallel(setup):
        config = models.config_of(setup, **{name: float(given[name]) for name in names if name in given})
        model = models.build(setup, config=config)
        megatron.apply(model, shard=models.shard_of(setup))
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        megatron.verify_tied(wrapped, optimizer)
        return [models.step_of(setup, wrapped, optimizer, step)[0].item() for step in range(3)]


def test_a_small_model_with_the_arguments_of_the_file_trains() -> None:
    given = arguments()
    setup = replace(
        Setup(), tp=int(given["tensor_model_parallel_size"]), pp=int(given["pipeline_model_parallel_size"]),
        sequence_parallel="sequence_parallel" in given, positions=given["position_embedding_type"],
        distributed="use_distributed_optimizer" in given, dtype="bfloat16" if "bf16" in given else "float32",
        tied="untie_embeddings_and_output_weights" not in given,
    )  # fmt: skip
    expected = run_ranks(models.oracle, 1, Setup())[0]["losses"]
    for losses in run_ranks(_arguments, 2, given, setup):
        assert max(abs(a - b) for a, b in zip(losses, expected[:3], strict=True)) < 3e-2
