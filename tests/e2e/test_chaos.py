"""A training that is killed, and whose disk fails, ends with the same bits; `scripts/chaos` in small."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chaos.jobs import ROOT, SETTINGS, run_job
from tests.chaos.saboteur import Strike
from tests.chaos.scenarios import Reference, exact, faults_of_job, faults_of_run
from tests.ranks import run_ranks
from vocab_parallel import app

# In one job, so that the ranks start no more often than they must: in a collective; in a save; a full disk; and the
# newest checkpoint is damaged before the last start. A hang is left to `scripts/chaos` and `test_roll_call`: torchrun
# takes 30 s to kill a stopped rank.
PLAN = [
    Strike(0, 1, "kill", "collective", 6, 3),
    Strike(1, 0, "kill", "save", 1, 12),
    Strike(2, 1, "full", "save", 2, 3),
    Strike(3, 0, "flip", "start", at=5),
]


def train_undisturbed(rank: int, place: str) -> int:
    settings = [str(ROOT / SETTINGS[0]), *SETTINGS[1:], f"data.cache={place}/cache", f"run={place}/undisturbed"]
    return app.main(["train", *settings])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    place = tmp_path_factory.mktemp("chaos")
    assert run_ranks(train_undisturbed, 2, str(place), detail=False) == [0, 0]
    folder = place / "undisturbed"
    return Reference(folder, 2, exact(folder), 0, {})


@pytest.mark.timeout(240)  # four starts of a job
def test_a_training_that_everything_happens_to_ends_with_the_same_bits_and_leaves_nothing(whole: Reference) -> None:
    place = whole.folder.parent
    words = ["train", *SETTINGS, f"data.cache={place / 'cache'}", f"run={place / 'run'}"]
    ended = run_job(place / "struck", 2, words, PLAN, restarts=3, limit=200.0)
    assert faults_of_job(ended, PLAN) == [], ended.log
    assert faults_of_run(place / "run", whole) == [], ended.log
    assert "step-00000012 could not be written by rank 1 of the group: OSError: [Errno 28]" in ended.log, ended.log
    assert len(list((place / "run" / "checkpoints").glob("*.damaged"))) == 1


def test_the_checks_of_chaos_find_what_differs(whole: Reference, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole.folder, run)
    assert faults_of_run(run, whole) == []
    (run / "checkpoints" / ".step-00000044.partial").mkdir()
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"loss": 5.', '"loss": 6.', 1))
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000040")
    found = faults_of_run(run, whole)
    assert [words.split(" ")[0] for words in found] == ["the", "it", "its", "left"], found
