"""The harness itself: what the ranks return, raise, and how a rank that hangs or dies is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks, run_ranks_expecting_errors


def _sum(rank, tensor):
    total = tensor * (rank + 1)
    dist.all_reduce(total)
    return {"rank": rank, "world": dist.get_world_size(), "sum": total, "threads": torch.get_num_threads()}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_results_come_back_in_rank_order_and_by_value(tp):
    results = run_ranks(_sum, tp, torch.arange(3.0))
    assert [result["rank"] for result in results] == list(range(tp))
    for result in results:
        assert result["world"] == tp
        assert result["threads"] == 1
        assert torch.equal(result["sum"], torch.arange(3.0) * sum(range(1, tp + 1)))


def _debug_level(rank):
    return dist.get_debug_level() == dist.DebugLevel.DETAIL


def test_collectives_are_checked_unless_switched_off():
    assert run_ranks(_debug_level, 2) == [True, True]
    assert run_ranks(_debug_level, 2, detail=False) == [False, False]


def _subgroups(rank):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = torch.tensor(float(rank))
    dist.all_reduce(mine, group=groups[rank % 2])
    return mine.item()


def test_groups_need_not_be_the_world():
    assert run_ranks(_subgroups, 4) == [2.0, 4.0, 2.0, 4.0]


def test_a_call_after_the_first_is_quick():
    run_ranks(_sum, 2, torch.ones(1))
    start = time.monotonic()
    for _ in range(3):
        run_ranks(_sum, 2, torch.ones(1))
    assert (time.monotonic() - start) / 3 < 3.0  # about 0.3 s on two idle cores


def _raise_on(rank, bad):
    if rank == bad:
        raise ValueError(f"bad value on rank {rank}")
    return rank


def test_a_raising_rank_is_reported_with_its_own_traceback():
    with pytest.raises(RankFailure, match="bad value on rank 1") as caught:
        run_ranks(_raise_on, 2, 1)
    assert caught.value.errors == {1: ("ValueError", "bad value on rank 1")}
    assert "in _raise_on" in caught.value.details[1]


def _raise_while_the_other_waits(rank):
    if rank == 0:
        raise ValueError("never joined")
    dist.all_reduce(torch.ones(1))


def test_the_rank_that_failed_first_comes_first_and_its_peer_does_not_wait_for_the_time_limit():
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(_raise_while_the_other_waits, 2)
    assert time.monotonic() - start < 12
    assert list(caught.value.errors) == [0, 1]
    assert caught.value.errors[0] == ("ValueError", "never joined")


def _raise_everywhere(rank):
    raise KeyError(rank)


def test_expected_errors_are_returned_for_each_rank():
    assert run_ranks_expecting_errors(_raise_everywhere, 2) == [("KeyError", "0"), ("KeyError", "1")]
    with pytest.raises(AssertionError, match=r"ranks \[0\] returned"):
        run_ranks_expecting_errors(_raise_on, 2, 1)


def _warn(rank):
    warnings.warn("something is off", stacklevel=1)


def test_a_warning_on_a_rank_is_an_error():
    assert run_ranks_expecting_errors(_warn, 1) == [("UserWarning", "something is off")]


def _sleep_for_ever(rank, marker):
    if rank == 1:
        child = subprocess.Popen(["sleep", "1000"])
        with open(marker, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    return rank


def test_a_hung_rank_prints_its_stacks_and_nothing_is_left_behind(tmp_path, capfd):
    marker = tmp_path / "pids"
    with pytest.raises(RankFailure) as caught:
        run_ranks(_sleep_for_ever, 2, str(marker), timeout=2)
    assert list(caught.value.errors) == [1]
    assert caught.value.errors[1].type == "RankHung"
    assert "_sleep_for_ever" in caught.value.details[1]
    assert "_sleep_for_ever" in capfd.readouterr().err
    for pid in map(int, marker.read_text().split()):
        assert _is_gone(pid), f"process {pid} was left behind"


def _is_gone(pid):
    """Killed processes may stay as zombies until their parent collects them."""
    for _ in range(50):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def _wait_for_a_rank_that_sleeps(rank):
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))


def test_a_rank_that_waits_in_a_collective_says_so_before_the_time_limit():
    with pytest.raises(RankFailure) as caught:
        run_ranks(_wait_for_a_rank_that_sleeps, 2, timeout=3)
    assert "all_reduce" in caught.value.details[0]
    assert "_wait_for_a_rank_that_sleeps" in caught.value.details[1]


def _die(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_dead_rank_is_named_with_its_signal():
    with pytest.raises(RankFailure, match="killed by SIGKILL") as caught:
        run_ranks(_die, 2)
    assert caught.value.errors[1] == ("RankDied", "killed by SIGKILL")
    assert "_die" in caught.value.details[0]
