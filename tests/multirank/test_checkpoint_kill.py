"""A kill at any moment of a save leaves a checkpoint that loads, the one before or the new one, whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.multirank.checkpoint_cases import train
from tests.multirank.killing import SCENARIOS, Killer, check, every_moment, held, save, small
from tests.ranks import RankFailure, run_ranks
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint


def test_a_kill_at_any_moment_of_a_save_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    moments = every_moment(str(tmp_path), 13)
    assert not isinstance(moments, str), moments
    first = [one for one in moments if one[:2] == (SCENARIOS[0], False)]
    assert len(first) >= 50 and len(set(moments)) == len(moments) >= 100
    assert [at for _, _, at, _ in first] == list(range(1, len(first) + 1)), "every moment of that save"
    events = {what.split()[0] for *_, what in moments}
    assert events >= {"mkdir", "open", "write", "fsync", "replace", "unlink", "rmdir"}, events
    for scenario in SCENARIOS:
        for by_thread in (False, True):
            left = Counter(what.split()[1] for one, how, _, what in moments if (one, how) == (scenario, by_thread))
            assert set(left) == {"old", "new"}, (scenario, by_thread, left)


def save_and_die(rank: int, folder: str, victim: int, at: int, by_thread: bool) -> None:
    model, optimizer = small()
    train(model, optimizer, range(2))
    if rank == victim:
        Killer(at)
    save(Path(folder), SCENARIOS[0], by_thread, model, optimizer)


def save_first(rank: int, folder: str) -> None:
    model, optimizer = small()
    train(model, optimizer, range(1))
    save_checkpoint(folder, model, optimizer, 1, {"which": "old"})


def test_a_rank_that_is_killed_while_two_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run_ranks(save_first, 2, str(tmp_path))
    model, optimizer = small()
    train(model, optimizer, range(1))
    load_checkpoint(tmp_path / "step-00000001", model, optimizer)  # the sums of two ranks, not those of one
    want = {"old": held(model, optimizer)}
    for victim, at, by_thread in ((0, 2, False), (1, 3, False), (1, 6, True), (0, 12, True)):
        with pytest.raises(RankFailure) as caught:
            run_ranks(save_and_die, 2, str(tmp_path), victim, at, by_thread)
        assert caught.value.errors[victim].type == "RankDied" and len(caught.value.errors) == 2
        assert check(tmp_path, want, f"rank {victim} at {at}") == "old"
