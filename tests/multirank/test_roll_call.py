"""Ranks that do not come are named, by those that wait for them; and an attempt meets only its own ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabShard, cross_entropy
from vocab_parallel.app.meeting import meet
from vocab_parallel.app.roll_call import RollCall, where
from vocab_parallel.collectives import all_reduce_, lost_rank, short
from vocab_parallel.errors import CollectiveError, LayoutMismatchError, NonFiniteError

MISSING = 2


def lose_a_rank(rank: int, folder: str, how: str) -> tuple[str, str] | None:
    """Ranks 0 and 1 sum over three ranks in a group of a short timeout; rank 2 ends, or comes too late."""
    store = dist.FileStore(f"{folder}/{how}", 3)
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    shard = VocabShard(VocabLayout(9, 3, multiple_of=1), group)
    roll_call = RollCall(store, rank, 3, patience=1.0)
    dist.barrier()
    if rank == MISSING:
        time.sleep(4)  # the ranks of a test leave together
        return None
    try:
        for step in range(2):
            total_of(shard, step)
    except RuntimeError as error:
        explained = roll_call.explain(error)
        assert isinstance(explained, CollectiveError)
        return str(error), str(explained)
    return None


def total_of(shard: VocabShard, step: int) -> torch.Tensor:
    return all_reduce_(shard, torch.full((3,), float(step))).wait()


def test_ranks_that_wait_in_vain_name_the_one_that_hangs_and_what_it_does(tmp_path: Path) -> None:
    said = run_ranks(lose_a_rank, 3, str(tmp_path), "late", detail=False)
    assert said[MISSING] is None
    for rank in (0, 1):
        first, all_of_it = said[rank]
        assert (
            first.startswith(f"all_reduce failed on rank {rank} of the 3 ranks of its group: ") and "GLHF" not in first
        )
        assert (
            "Of 3 ranks, these do not answer: rank 2 (pid " in all_of_it
            and "these do not answer: rank 1" not in all_of_it
        )
        assert "it runs, and hangs or works elsewhere; look: py-spy dump --pid" in all_of_it, all_of_it
        assert "It waited in: the caller's code" in all_of_it


def test_a_stopped_and_an_ended_process_are_told_apart(tmp_path: Path) -> None:
    store = dist.HashStore()
    mine = RollCall(store, 0, 4, patience=0.3)
    stopped = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    try:
        stopped.send_signal(signal.SIGSTOP)
        host = store.get("roll_call/who/0").decode().split(" ", 1)[1]
        store.set("roll_call/who/1", f"{stopped.pid} {host}")
        store.set("roll_call/who/2", f"{ended.pid} {host}")
        store.set("roll_call/who/3", "77 another-machine")
        found = mine.explain(RuntimeError("Timed out waiting 2000ms for recv operation to complete"))
    finally:
        stopped.kill()
        stopped.wait()
    text = str(found)
    assert f"rank 1 (pid {stopped.pid} on {host}: it is stopped, by SIGSTOP or a debugger; kill -CONT" in text
    assert f"rank 2 (pid {ended.pid} on {host}: it has ended; torchrun's Root Cause names it" in text
    assert "rank 3 (pid 77 on another-machine: look there: py-spy dump --pid 77)" in text


def test_ranks_that_wait_at_different_places_hear_of_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    mine = RollCall(store, 0, 2, patience=5.0)
    store.set("roll_call/failed/1", "train > validate")
    found = mine.explain(CollectiveError("all_gather failed: Connection closed by peer"))
    assert "Every other rank reports a failed collective too; rank 1 waited in: train > validate" in str(found)
    assert capsys.readouterr().err.startswith("CollectiveError (rank 0): all_gather failed: Connection closed by peer")


def test_an_error_of_this_rank_is_no_lost_rank(capsys: pytest.CaptureFixture[str]) -> None:
    mine = RollCall(dist.HashStore(), 0, 2, patience=0.0)
    for error in (NonFiniteError("timeout of the norm"), RuntimeError("shapes do not match"), OSError("timed out")):
        assert mine.explain(error) is None
    assert capsys.readouterr().err == ""


def test_what_a_backend_says_is_put_into_words() -> None:
    closed = RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:1. This is typically caused by x. GLHF!")
    assert short(closed) == "[pair.cc:537] Connection closed by peer [127.0.0.1]:1"
    assert lost_rank(closed) == "Another rank has ended; its log has the first error."
    assert "did not come in time" in str(lost_rank(RuntimeError("Timed out waiting 40000ms for recv operation")))
    assert lost_rank(RuntimeError("Expected 3 elements")) is None


def test_a_trace_gives_the_operations_that_it_passed() -> None:
    with pytest.raises(LayoutMismatchError) as caught:
        cross_entropy(torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64), shard=VocabShard(VocabLayout(5, 1), None))
    assert where(caught.value.__traceback__).startswith("cross_entropy")
    with pytest.raises(ZeroDivisionError) as other:
        _ = 1 // 0
    assert where(other.value.__traceback__) == "the caller's code"


def test_an_attempt_meets_none_of_the_one_before(tmp_path: Path) -> None:
    """A store that outlives a restart holds the names, calls and answers of ranks that are gone."""
    store = dist.HashStore()
    attempts = [meeting(store, 3, delays) for delays in ((0.0, 0.1, 0.2), (0.2, 0.0, 0.1), (0.1, 0.2, 0.0))]
    for found in attempts:
        assert [one.get("address/1") for one in found] == [found[1].get("address/1")] * 3
    assert [found[0].get("address/1") for found in attempts] == [b"0", b"1", b"2"]


def meeting(store: dist.Store, world: int, delays: tuple[float, ...]) -> list[dist.Store]:
    found: dict[int, dist.Store] = {}

    def come(rank: int) -> None:
        time.sleep(delays[rank])
        found[rank] = meet(store, rank, world, timedelta(seconds=20))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    attempt = store.add("attempts of this test", 1) - 1
    assert not found[1].check(["address/1"])
    found[1].set("address/1", str(attempt))
    return [found[rank] for rank in range(world)]


def test_ranks_that_never_start_are_named(tmp_path: Path) -> None:
    store = dist.HashStore()
    with pytest.raises(CollectiveError, match=r"of 4 ranks, \[1, 2, 3\] did not come in time"):
        meet(store, 0, 4, timedelta(seconds=0.2))
    with pytest.raises(CollectiveError, match="rank 2: rank 0 did not come within 0 s"):
        meet(store, 2, 4, timedelta(seconds=0.2))


def test_a_rank_ends_with_the_torchrun_that_started_it(tmp_path: Path) -> None:
    child = (
        "import os, sys, time; from vocab_parallel.__main__ import end_with_agent; end_with_agent(); "
        "open(sys.argv[1], 'w').write(str(os.getpid())); os.rename(sys.argv[1], sys.argv[2]); time.sleep(60)"
    )
    noted, ready = tmp_path / "noted", tmp_path / "ready"
    words = ["-c", child, str(noted), str(ready)]
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, *{words!r}]); time.sleep(60)"
    agent = subprocess.Popen([sys.executable, "-c", parent], env=os.environ | {"TORCHELASTIC_RUN_ID": "none"})
    try:
        wait_for(ready.is_file)
        pid = int(ready.read_text())
    finally:
        agent.kill()
        agent.wait()
    wait_for(lambda: not runs(pid))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Any, limit: float = 60.0) -> None:
    until = time.monotonic() + limit
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)
