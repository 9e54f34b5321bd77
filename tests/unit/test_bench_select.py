"""What ``bench select`` makes of its times, and the settings that it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vocab_parallel.app.bench import select, select_report
from vocab_parallel.app.bench.select_config import SelectConfig
from vocab_parallel.app.bench.select_contestants import OPERATIONS
from vocab_parallel.app.job import Job
from vocab_parallel.app.settings import from_words
from vocab_parallel.errors import ConfigError


def point(vocab, ours, gather, same=True):
    """A point of one operation, from the rounds' seconds."""
    results = {
        name: select._numbers(2, seconds, {"all_gather": 1}, {"all_gather": 16})
        for name, seconds in (("ours", ours), ("gather", gather))
    }
    ids = {"ours": torch.tensor([1, 2]), "gather_ours": torch.tensor([1, 2 if same else 3])}
    results["compared"] = select._compared(results, ids)
    return {"vocab": vocab, "rows": 2, "kind": "flat", "operations": {"greedy": results}}


def report_of(points, world=2):
    job = Job(0, world, 0, torch.device("cpu"), None)
    return select._report(SelectConfig(contestants=["ours", "gather"]), job, points)


def test_the_verdict_is_the_median_of_the_rounds_ratios():
    made = point(32_768, [1.0, 4.0, 1.0], [2.0, 4.4, 3.0])  # 2, 1.1, 3
    assert made["operations"]["greedy"]["compared"]["gather"]["speedup_median"] == 2.0
    report = report_of([made])
    assert report["passed"] and "pass  ours is faster" in select_report.text(report)
    line = next(line for line in select_report.text(report).splitlines() if line.startswith("greedy"))
    assert line.split() == ["greedy", "1000.000", "3000.000", "2.00", "8", "8", "1"]


def test_slower_fails_only_where_a_rank_has_a_mebibyte_of_logits_and_over_several_ranks():
    slow = [1.0, 2.0, 2.0], [1.5, 1.0, 1.0]
    report = report_of([point(32_768, *slow)])  # 2 rows, 2 ranks
    said = "greedy, V 32,768, B 2, flat: gather takes 0.50 of our time"
    assert not report["passed"] and f"FAIL  {said}" in select_report.text(report)
    report = report_of([point(16_384, *slow)])
    assert report["passed"] and f"slow  {said.replace('32,768', '16,384')}" in select_report.text(report)
    assert report_of([point(32_768, *slow)], world=1)["passed"]


def test_other_ids_than_one_process_gives_fail_at_any_size():
    report = report_of([point(512, [1.0], [2.0], same=False)])
    assert not report["passed"] and "FAIL  other ids than gathered: greedy" in select_report.text(report)


@pytest.mark.parametrize(
    ("word", "named"),
    [("rounds=0", "rounds"), ("batch=[0]", "batch"), ("vocab=[]", "vocab"), ("kinds=[flatt]", "flat"),
     ("operations=[topp]", "top_p"), ("contestants=[gather]", "ours"), ("sample_ms=0", "sample_ms")],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(word, named):
    with pytest.raises(ConfigError, match=named):
        from_words(SelectConfig, [word])


def test_a_list_of_settings_is_read_from_words():
    config = from_words(SelectConfig, ["vocab=[64, 128]", "operations=[greedy]"])
    assert config == dataclasses.replace(SelectConfig(), vocab=[64, 128], operations=["greedy"])


@pytest.mark.parametrize("name", ["top_p", "top_k_top_p"])
def test_the_gathered_nucleus_keeps_the_token_that_crosses_p(name):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4000, 1)
    padded = torch.cat([logits, torch.full((4000, 60), -30.0)], 1)
    drawn = OPERATIONS[name].plain(padded, torch.Generator().manual_seed(0))
    counts = drawn.bincount(minlength=4).double() / 4000
    assert counts[3:].sum() == 0 and torch.allclose(
        counts[:3], torch.tensor([0.5, 0.3, 0.15]).double() / 0.95, atol=0.03
    )
