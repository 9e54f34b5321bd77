"""README and pages: commands are the app's, code on checkpoints and vocabularies runs, the table is the one in use."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

import vocab_parallel.app
from tests.pages import PAGES, ROOT, app_commands, block_with
from tests.unit.releases import POLICY, identity_of
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, checkpoint, tie_weights
from vocab_parallel.app import config
from vocab_parallel.app.release import check_policy
from vocab_parallel.checkpoint.release import promote
from vocab_parallel.decode import Policy
from vocab_parallel.vocabulary import VocabMap, migrate_model_
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.rules import RULES

COMMANDS = {" ".join(words): words for page in PAGES for words in app_commands(page)}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_pages_command_is_one_that_the_app_takes(monkeypatch, words):
    module = importlib.import_module(f"vocab_parallel.app.{words[0]}")
    taken = []
    monkeypatch.setattr(module, "main", lambda args: taken.append(args) or 0)
    assert vocab_parallel.app.main(words) == 0
    assert [args.command for args in taken] == [words[0]]
    if words[0] in ("train", "generate"):
        source = ROOT / "configs/smoke.yaml" if words[1].startswith("runs/") else ROOT / taken[0].source
        host = getattr(taken[0], "host", None)
        config.load(source, [*taken[0].overrides, *([f"host={host}"] if host else [])])


def test_the_pages_commands_are_found():
    assert len(COMMANDS) > 40


def test_a_line_that_starts_the_app_is_told_from_others(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```\nA=1 B=2 launch/fsdp.sh c.yaml x=1  # why\nlaunch/local.sh doctor c.yaml\nscripts/test\n"
        "torchrun --nproc-per-node 2 -m vocab_parallel \\\n  report r\npython -m vocab_parallel convert A [--to B]\n"
        "```\n```console\n$ mv a b; python -m vocab_parallel generate r; echo $?\npython -m vocab_parallel x\n```\n"
    )
    assert app_commands(page) == [
        ["train", "--host", "fsdp", "c.yaml", "x=1"], ["doctor", "c.yaml"], ["report", "r"], ["generate", "r"]
    ]  # fmt: skip


def test_the_ordered_table_and_the_map_are_as_printed(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    given: dict[str, object] = {}
    exec(block_with("docs/vocabulary.md", "BpeTrainer("), given)
    exec(block_with("docs/vocabulary.md", "read_vocabulary("), given)
    assert capsys.readouterr().out == "id 2 is 'a' in the first and 'ab' in the second\n"
    assert (given["identity"].size, given["identity"].special_ids) == (323, {"pad": 0, "bos": 1, "eos": 2})
    exec(block_with("docs/vocabulary.md", "VocabMap.from_vocabs("), given)
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
    exec(block_with("docs/checkpoints.md", "AsyncSaver(shard"), given)
    assert given["extra"] == {"seed": 1}
    (tmp_path / "run").mkdir()
    given |= {"folder": tmp_path / "run", "policy": Policy.from_dict(POLICY)}
    given["checkpoint"] = checkpoint.save_checkpoint(
        "b", given["model"], given["optimizer"], 2, manifest=Manifest.of(given["model"], identity=identity_of()),
        identity=identity_of(),
    )  # fmt: skip
    exec(block_with("docs/vocabulary.md", "require_comparable(saved, here)"), given)
    assert (tmp_path / "run" / "manifest.json").is_file()
    assert {one.kind for one in given["differences"]} <= {"may tune", "informational"}
    promote("releases", given["checkpoint"], policy=POLICY, check_policy=check_policy, copy=True)
    exec(block_with("docs/checkpoints.md", "open_current("), given)
    assert given["policy"].to_dict()["name"] == POLICY["name"]
    exec(block_with("README.md", "VocabMap.append(shard.vocab_size, 64)"), given)
    assert given["report"].shard.vocab_size == 9 + 64


def test_the_field_table_is_the_one_that_compare_uses():
    page = (ROOT / "docs/vocabulary.md").read_text(encoding="utf-8")
    table = page.split("<!-- manifest fields -->\n", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    words = {"load": "to load", "compare": "to compare"}
    wanted = []
    for rule in RULES:
        must = ", ".join(words[gate] for gate in rule.gates) or "–"
        other = "–" if len(rule.gates) == 2 else ("informational" if rule.informational else "may tune")
        wanted.append(f"| `{rule.field}` | {must} | {other} | {rule.why} |")
    assert table == wanted


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page):
    """Headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_the_pages_leads_somewhere():
    links = [
        (page, *link) for page in PAGES for link in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", prose(page))
    ]
    assert len(links) > 100
    wrong = []
    for page, path, anchor in links:
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{page.name}: {path}#{anchor}")
    assert wrong == []
