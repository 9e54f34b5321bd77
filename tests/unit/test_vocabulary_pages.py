"""docs/vocabulary.md and docs/checkpoints.md: their code runs, their commands are the app's, their table is in use."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

import vocab_parallel.app
from tests.unit.releases import POLICY, identity_of
from tests.unit.test_decoding_page import block_with
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, checkpoint, tie_weights
from vocab_parallel.app.release import check_policy
from vocab_parallel.checkpoint.release import promote
from vocab_parallel.decode import Policy
from vocab_parallel.vocabulary import VocabMap, migrate_model_
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.rules import RULES

ROOT = Path(__file__).parents[2]
PAGES = ("docs/vocabulary.md", "docs/checkpoints.md", "README.md")


def commands():
    """Every command line of the app on the pages, continuation lines joined."""
    found = []
    for page in PAGES:
        text = Path(page).read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"^(?:\$ (?:[^\n$`]*; )?)?python -m vocab_parallel ([^\n`|\[]*)$", text, re.M)
        found += [pytest.param(shlex.split(line.partition(";")[0], comments=True), id=line[:40]) for line in lines]
    assert len(found) > 20
    return found


@pytest.mark.parametrize("words", commands())
def test_a_pages_command_is_one_that_the_app_takes(monkeypatch, words):
    module = importlib.import_module(f"vocab_parallel.app.{words[0]}")
    taken = []
    monkeypatch.setattr(module, "main", lambda args: taken.append(args) or 0)
    assert vocab_parallel.app.main(words) == 0
    assert [args.command for args in taken] == [words[0]]


def test_the_ordered_table_and_the_map_are_as_printed(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    given: dict[str, object] = {}
    exec(block_with(ROOT / "docs/vocabulary.md", "BpeTrainer("), given)
    exec(block_with(ROOT / "docs/vocabulary.md", "read_vocabulary("), given)
    assert capsys.readouterr().out == "id 2 is 'a' in the first and 'ab' in the second\n"
    assert (given["identity"].size, given["identity"].special_ids) == (323, {"pad": 0, "bos": 1, "eos": 2})
    exec(block_with(ROOT / "docs/vocabulary.md", "VocabMap.from_vocabs("), given)
    printed = capsys.readouterr().out
    assert f"```\n{printed}```" in (ROOT / "docs/vocabulary.md").read_text(encoding="utf-8")


def trained():
    """What the pages' code begins with."""
    shard = VocabShard(VocabLayout(9, 1, multiple_of=2))
    embedding, head = VocabParallelEmbedding(4, shard=shard), VocabParallelLMHead(4, shard=shard)
    tie_weights(embedding, head)
    model = torch.nn.ModuleDict({"embedding": embedding, "lm_head": head})
    optimizer = torch.optim.AdamW(model.parameters())
    head.loss(torch.randn(3, 4), torch.tensor([1, 2, 3])).backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "shard": shard, "step": 1, "identity": identity_of()}


def test_a_migration_in_the_middle_of_a_run():
    given = trained() | {"vocab_map": VocabMap.append(9, 2)}
    exec(block_with("docs/vocabulary.md", "migrate_model_(model"), given)
    assert given["shard"].vocab_size == 11 and len(given["model"]["lm_head"].weight) >= 11
    assert not [check for check in given["report"].states if "exp_avg" not in check]


def test_the_code_that_saves_loads_describes_and_releases(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = vars(checkpoint) | trained() | {"VocabMap": VocabMap, "migrate_model_": migrate_model_}
    exec(block_with(ROOT / "docs/checkpoints.md", "AsyncSaver(shard"), given)
    assert given["extra"] == {"seed": 1}
    (tmp_path / "run").mkdir()
    given |= {"folder": tmp_path / "run", "policy": Policy.from_dict(POLICY)}
    given["checkpoint"] = checkpoint.save_checkpoint(
        "b", given["model"], given["optimizer"], 2, manifest=Manifest.of(given["model"], identity=identity_of()),
        identity=identity_of(),
    )  # fmt: skip
    exec(block_with(ROOT / "docs/vocabulary.md", "require_comparable(saved, here)"), given)
    assert (tmp_path / "run" / "manifest.json").is_file()
    assert {one.kind for one in given["differences"]} <= {"may tune", "informational"}
    promote("releases", given["checkpoint"], policy=POLICY, check_policy=check_policy, copy=True)
    exec(block_with(ROOT / "docs/checkpoints.md", "open_current("), given)
    assert given["policy"].to_dict()["name"] == POLICY["name"]
    exec(block_with(ROOT / "README.md", "VocabMap.append(shard.vocab_size, 64)"), given)
    assert given["report"].shard.vocab_size == 9 + 64


def test_the_field_table_is_the_one_that_compare_uses():
    page = Path("docs/vocabulary.md").read_text(encoding="utf-8")
    table = page.split("<!-- manifest fields -->\n", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    words = {"load": "to load", "compare": "to compare"}
    wanted = []
    for rule in RULES:
        must = ", ".join(words[gate] for gate in rule.gates) or "–"
        other = "–" if len(rule.gates) == 2 else ("informational" if rule.informational else "may tune")
        wanted.append(f"| `{rule.field}` | {must} | {other} | {rule.why} |")
    assert table == wanted
