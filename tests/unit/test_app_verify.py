"""The command `verify` on one rank: what it prints, writes and returns, from a configuration and from a run folder."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.byte_tokenizers import write_merged_bytes
from tests.multirank.broken import BREAKS, replaced
from vocab_parallel import app, tying
from vocab_parallel.app import config as configs
from vocab_parallel.app import model
from vocab_parallel.app.comparing import difference, relative, scaled, unequal
from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts.plain import PlainHost
from vocab_parallel.app.job import join
from vocab_parallel.app.verify.command import verify
from vocab_parallel.app.verify.ladder import Rung, failed_rungs
from vocab_parallel.app.verify.rungs import RUNGS, search
from vocab_parallel.app.verify.rungs.migration import tokens_apart
from vocab_parallel.app.verify.rungs.own_rows import differing
from vocab_parallel.app.verify.rungs.sampling import chi_square
from vocab_parallel.app.verify.setting import ROWS, Setting
from vocab_parallel.app.vocabulary import open_vocabulary

ROOT = Path(__file__).parents[2]
SMOKE = str(ROOT / "configs" / "smoke.yaml")
SMALL = ["model.dim=8", "model.heads=2", "model.context=16"]
LOWER = RUNGS[:5]
Told = tuple[list[Any], str, dict[str, Any], str]


def config_of(*words: str) -> Config:
    return configs.load(SMOKE, [*SMALL, *words])


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Climbs in this process: results, what was printed, verify.json and verify.html."""

    def run(rungs: Sequence[Rung] = LOWER, **options: Any) -> Told:
        results = verify(config_of(f"runs={tmp_path}"), rungs, **options)
        [folder] = [options["out"]] if "out" in options else tmp_path.glob("verify-smoke-*")
        page = (folder / "verify.html").read_text()
        return results, capsys.readouterr().out, json.loads((folder / "verify.json").read_text()), page

    return run


def test_the_reports_tell_what_was_compared_and_where(told: Any) -> None:
    results, printed, report, page = told()
    assert "5 of 5 rungs passed" in printed and "FAIL" not in printed
    assert report["passed"] and report["about"]["layout"].startswith("V=259 padded to 264") and report["seconds"] > 0
    assert report["about"]["dtype"] == "float32" and report["about"]["weights"] == "fresh"
    assert [rung["name"] for rung in report["rungs"]] == [rung.name for rung in LOWER]
    checks = [check for rung in report["rungs"] for check in rung["checks"]]
    assert len(checks) == len(results) and all(check["error"] <= check["tolerance"] for check in checks)
    for rung in LOWER:
        assert rung.invariant in printed and rung.name in page and rung.name in printed
    assert all(check["check"].replace("'", "&#x27;") in page for check in checks)
    assert "model:" in report["config"] and "torch" in report["environment"]


def test_a_fault_is_printed_and_reported_with_the_module_to_look_in(told: Any, tmp_path: Path) -> None:
    with BREAKS["two ids swapped in a map"].make():
        results, printed, report, page = told(LOWER[2:], out=tmp_path / "there")
    assert failed_rungs(results) == ["vocabulary migration"]
    assert "2 of 3 rungs passed" in printed and "; failed: vocabulary migration" in printed
    assert "look in vocab_parallel/vocabulary/mapping.py" in printed
    assert not report["passed"] and [rung["passed"] for rung in report["rungs"]] == [True, False, True]
    assert "<b>FAIL</b>" in page and "look in <code>vocab_parallel/vocabulary/mapping.py</code>" in page


def test_the_ladder_ends_at_the_first_failed_rung_if_it_is_told_to(told: Any, tmp_path: Path) -> None:
    with BREAKS["a mean of means"].make():
        results, printed, report, page = told(out=tmp_path / "there", stop=True)
    assert failed_rungs(results) == ["training schedule"] and "vocabulary migration" not in printed
    assert "2 of 5 rungs passed" in printed and not report["passed"]
    assert "Not climbed" in page


def test_a_model_that_is_not_tied_when_it_is_opened_fails_at_its_rung_in_the_reports_too(told: Any) -> None:
    with BREAKS["a copied tie"].make(), replaced((model, "tie_weights", tying.tie_weights)):
        results, printed, report, page = told()
    assert failed_rungs(results) == ["vocabulary migration"]
    assert "FAIL" in printed and "look in vocab_parallel/tying.py" in printed and "0 of 5 rungs passed" in printed
    assert "no longer one Parameter" in results[0].words
    assert not report["passed"] and report["rungs"][3]["checks"][0]["words"] == results[0].words
    assert "Not climbed" in page and "FAILED" in page


def _a_position_late(host: PlainHost, input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, loss = FORWARD(host, input, target)
    return hidden.roll(1, 1), loss


def _with_dropout(host: PlainHost, ids: torch.Tensor) -> torch.Tensor:
    return 3.0 * torch.nn.functional.dropout(HIDDEN(host, ids))


FORWARD, HIDDEN = PlainHost.forward, PlainHost.hidden


@pytest.mark.parametrize(
    ("method", "faulty", "which"),
    [("forward", _a_position_late, "a training step's loss"), ("hidden", _with_dropout, "and a second time")],
)
def test_a_host_whose_model_is_not_what_it_says_fails_end_to_end(
    told: Any, method: str, faulty: Any, which: str
) -> None:
    with replaced((PlainHost, method, faulty)):
        results, *_ = told(RUNGS[8:])
    assert failed_rungs(results) == ["end to end"]
    wrong = [one for one in results if not one.passed]
    assert any(which in one.check for one in wrong) and not [one.words for one in wrong if one.words]
    assert len(wrong) < len(results)


def test_reports_that_cannot_be_written_are_refused_before_the_climb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for words in (["--out", str(tmp_path / "file" / "there")], [f"runs={tmp_path}/file"]):
        assert app.main(["verify", SMOKE, *words]) == 2
        printed = capsys.readouterr()
        assert str(tmp_path / "file") in printed.err and "Give --out a folder" in printed.err
        assert "head unit" not in printed.out


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    place = tmp_path_factory.mktemp("run")
    words = [
        *SMALL, "train.steps=1", "train.warmup=1", "train.validation_sequences=1", "generate.max_tokens=1",
        f"runs={place}", f"data.cache={place}", f"data.paths=[{ROOT / 'docs'}]", "data.max_bytes=100000",
    ]  # fmt: skip
    assert app.main(["train", SMOKE, *words]) == 0
    [folder] = place.glob("smoke-*")
    return folder


def test_a_run_folder_is_verified_with_its_newest_weights(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["verify", str(run_folder), "--out", str(tmp_path), "--dtype", "float64"]) == 0
    assert "9 of 9 rungs passed" in capsys.readouterr().out
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["about"]["weights"] == f"of the newest checkpoint in {run_folder}"
    assert report["about"]["dtype"] == "float64"
    with opened(configs.load(run_folder), folder=run_folder) as trained, opened(configs.load(run_folder)) as fresh:
        assert not torch.equal(trained.weight, fresh.weight)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_damaged_row_of_a_run_ends_with_status_1_and_names_the_head(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    head = model.LanguageModel.head

    def damaged(self: model.LanguageModel) -> model.Head:
        weight, bias = head(self)
        weight = weight.clone()
        weight[7] = number
        return model.Head(weight, bias)

    monkeypatch.setattr(model.LanguageModel, "head", damaged)
    assert app.main(["verify", str(run_folder), "--out", str(tmp_path), "--stop"]) == 1
    printed = capsys.readouterr().out
    assert "0 of 9 rungs passed" in printed and "failed: head unit" in printed
    report = json.loads((tmp_path / "verify.json").read_text())
    [logits, *_] = report["rungs"][0]["checks"]
    assert not report["passed"] and logits["error"] is None and not logits["words"]  # no number in JSON


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.yaml"], "no configuration at nowhere.yaml"),
        ([SMOKE, "parallel.tp=3"], "parallel.tp=3"),
        ([SMOKE, "host=fsdp"], "needs a process group"),
    ],
)
def test_a_configuration_that_cannot_work_ends_with_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.main(["verify", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_a_checkpoint_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(config_of().to_yaml())
    assert app.main(["verify", str(tmp_path)]) == 2
    assert "holds no whole checkpoint" in capsys.readouterr().err


@contextmanager
def opened(config: Config, **options: Any) -> Iterator[Setting]:
    """A setting for a while."""
    with join(config.parallel) as job:
        yield Setting.open(job, config, open_vocabulary(config.data.vocab), **options)


def test_the_rows_that_are_read_hold_every_shards_edges() -> None:
    with opened(config_of()) as setting:
        assert setting.edges == [0, 258] and setting.target[:2].tolist() == [0, 258]
        assert len(setting.target) == ROWS == len(setting.hidden) and int((setting.target == -100).sum()) == 3


def test_tokens_of_a_users_file_that_were_swapped_in_its_table_are_found(tmp_path: Path) -> None:
    folder = write_merged_bytes(tmp_path / "tokenizer", shuffled=True)
    with opened(config_of(f"data.vocab={folder}")) as setting:
        assert setting.vocabulary.size == 323 and tokens_apart(setting) == 0.0
        vocabulary: Any = setting.vocabulary
        tokens = list(vocabulary.identity.tokens)
        tokens[70], tokens[71] = tokens[71], tokens[70]
        vocabulary._identity = dataclasses.replace(vocabulary.identity, tokens=tuple(tokens))
        assert tokens_apart(setting) == 2.0


@pytest.mark.parametrize("compare", [difference, scaled, relative])
def test_a_number_that_is_none_is_an_infinite_error_wherever_it_stands(compare: Any) -> None:
    want = torch.tensor([1.0, 2.0, -4.0], dtype=torch.float64)
    assert compare(want.clone(), want) == 0.0
    for at in range(3):
        got = want.clone()
        got[at] = torch.nan
        assert max(0.0, compare(got, want)) == math.inf  # `max` itself would pass over a NaN
    assert max(0.0, compare(want * torch.inf, want * torch.inf)) == math.inf  # of which nothing can be known
    assert compare(want[:0], want[:0]) == 0.0
    with pytest.raises(AssertionError, match="expected \\[3\\]"):
        compare(want[:, None], want)  # which broadcasting would compare with


def test_ids_of_another_shape_are_never_the_same() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    assert differing(ids, ids) == 0.0 and differing(ids, ids[:1]) == differing(ids[:, None], ids) == math.inf


def test_a_score_that_is_no_number_is_an_infinite_error_of_a_search() -> None:
    wanted = [((1,), -1.0), ((2,), -2.0)]
    with opened(config_of()) as setting:
        assert search._error(setting, wanted[::-1], wanted) == 0.0
        for found in ([((1,), -1.0), ((2,), math.nan)], wanted[:1], []):
            assert max(0.0, search._error(setting, found, wanted)) == math.inf
        assert search._error(setting, [], []) == math.inf, "nothing was compared"


def test_the_page_lists_every_fault_that_the_ladder_is_tested_with() -> None:
    page = (ROOT / "docs" / "verify.md").read_text()
    rows = [f"| {name} | {one.rung} | `{one.module}` |" for name, one in BREAKS.items()]
    assert page.endswith("\n".join(rows) + "\n")


def test_errors_are_absolute_or_over_their_own_or_the_largest_entry() -> None:
    want = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert [compare(want + 0.5, want) for compare in (difference, scaled, relative)] == [0.5, 0.5, 0.125]
    assert [scaled(want + off, want) for off in torch.tensor([[0.0, 0.5], [0.25, 0.5]])] == [0.125, 0.25]
    assert [compare(want / 8 + 0.5, want / 8) for compare in (scaled, relative)] == [0.5, 1.0]
    assert relative(torch.tensor([1e-6]), torch.zeros(1)) == pytest.approx(1e-3)
    assert unequal(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([-0.0, torch.nan, 1.0])) == 1.0


def test_a_goodness_of_fit_is_pearsons() -> None:
    """A die of 88 throws, statistic 2 with 5 degrees of freedom: p = 0.849145."""
    throws, fair = torch.tensor([16.0, 18, 16, 14, 12, 12]).double(), torch.full((6,), 1 / 6, dtype=torch.float64)
    assert chi_square(throws, fair) == pytest.approx(1 - 0.849145, abs=1e-6)
    assert chi_square(throws * 100, fair) > 1 - 1e-6
    assert chi_square(torch.tensor([10.0, 1.0]).double(), torch.tensor([1.0, 0.0]).double()) == math.inf


def test_a_goodness_of_fit_puts_rare_ids_together() -> None:
    p = torch.tensor([0.9, 0.09, *[0.01 / 50] * 50], dtype=torch.float64)
    drawn = torch.zeros(52, dtype=torch.float64)
    drawn[:2], drawn[10] = torch.tensor([900.0, 90.0]), 10.0
    assert chi_square(drawn, p) < 0.1, "ten draws of all rare ids together are what is expected"
    drawn[10] = 60.0
    assert chi_square(drawn, p) > 1 - 1e-6
