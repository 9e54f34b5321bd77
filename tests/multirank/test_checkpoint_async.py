"""Saving beside the training: the same bytes as a save that is waited for; replicas and FSDP2 in the same files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.batch import Attempt, assert_all_raise, attempt
from tests.multirank.checkpoint_cases import Model, build, make_optimizer, train
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.checkpoint import latest_checkpoint, load_checkpoint, open_checkpoint, save_checkpoint, writing
from vocab_parallel.checkpoint.saver import AsyncSaver
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations import fsdp
from vocab_parallel.integrations.fsdp.setup import reshard
from vocab_parallel.shard import RankGroup

# vocabulary and padded size by number of ranks: 9 ids on four ranks of 3 rows leave the last one empty
EMPTY = {"vocab": 9, "padded": 12}


def save_both_ways(rank: int, folder: str, kind: str) -> None:
    model, optimizer = build(True, kind, **EMPTY)
    root = Path(folder)
    train(model, optimizer, range(2))
    save_checkpoint(root / "waited", model, optimizer, 2, {"a": [1]}, keep=1)
    with AsyncSaver(model.head.shard, keep=1) as saver:
        saver.save(root / "beside", model, optimizer, 2, {"a": [1]})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
                for value in optimizer.state[parameter].values():
                    value.fill_(-1)
    model, optimizer = build(True, kind, **EMPTY)
    load_checkpoint(root / "beside" / "step-00000002", model, optimizer)
    with AsyncSaver(model.head.shard, keep=2) as saver:
        for step in (3, 4, 5):  # each save waits for the one before
            train(model, optimizer, range(step - 1, step))
            saver.save(root / "steps", model, optimizer, step)
        assert saver.wait() == root / "steps" / "step-00000005"


@pytest.mark.parametrize("tp", [1, 4])
def test_a_save_beside_the_training_has_the_bytes_of_one_that_is_waited_for(tp: int, tmp_path: Path) -> None:
    batch = Batch(save_both_ways, [(str(tmp_path / kind), kind) for kind in ("AdamW", "Adafactor")])
    for kind in ("AdamW", "Adafactor"):
        batch(tp, str(tmp_path / kind), kind)
        same_bytes(tmp_path / kind)


def same_bytes(folder: Path) -> None:
    waited, beside = (open_checkpoint(folder / name / "step-00000002") for name in ("waited", "beside"))
    assert waited.state == beside.state and len(waited.state["files"]) > 2
    assert {path.name for path in (folder / "steps").iterdir()} == {"step-00000004", "step-00000005"}
    beside.verify()
    for step in (4, 5):
        assert open_checkpoint(folder / "steps" / f"step-{step:08d}").read("model.seen").tolist() == [step, step]


def hold_back(rank: int, folder: str) -> list[Any]:
    """`save` returns though no byte can be written yet; the training goes on meanwhile."""
    model, optimizer = build(False)
    train(model, optimizer, range(1))
    gate, real = threading.Event(), writing.BlockWriter.write_data

    def slow(self: Any, *args: Any) -> Any:
        assert gate.wait(20.0)
        return real(self, *args)

    writing.BlockWriter.write_data = slow  # type: ignore[method-assign]
    try:
        with AsyncSaver(model.head.shard) as saver:
            saver.save(folder, model, optimizer, 1)
            before = latest_checkpoint(folder)
            losses = train(model, optimizer, range(1, 4))
            gate.set()
            return [before, saver.wait(), len(set(losses))]
    finally:
        gate.set()
        writing.BlockWriter.write_data = real  # type: ignore[method-assign]


def test_steps_go_on_while_the_files_are_written(tmp_path: Path) -> None:
    for before, after, losses in run_ranks(hold_back, 2, str(tmp_path)):
        assert before is None and after == tmp_path / "step-00000001" and losses == 3


# Kinds of jobs: data-parallel and tensor-parallel ranks of a world of four.
JOBS = [("fsdp", 2, 2), ("fsdp", 4, 1), ("replicas", 2, 2)]


def open_job(kind: str, dp: int, tp: int) -> tuple[Model, Any, RankGroup | None]:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    shard = VocabShard(VocabLayout(13, tp, multiple_of=4), mesh.get_group("tp"))
    model = Model(shard, True)
    if kind == "fsdp":
        fsdp.apply(model, mesh, shard=shard)
    return model, make_optimizer("AdamW", model), RankGroup(dist.group.WORLD) if kind == "replicas" else None


def save_job(rank: int, folder: str, kind: str, dp: int, tp: int) -> int:
    """The same steps on every data-parallel rank; saved waited for and beside."""
    model, optimizer, group = open_job(kind, dp, tp)
    train(model, optimizer, range(3))
    if kind == "fsdp":
        reshard(model)
    save_checkpoint(Path(folder) / "waited", model, optimizer, 3, group=group)
    ranks = group or RankGroup(dist.group.WORLD)
    if kind == "replicas":  # torch's wrapper changes no name
        data = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp")).get_group("dp")
        model = DistributedDataParallel(model, process_group=data)  # type: ignore[assignment]
        with pytest.raises(CheckpointLayoutError, match="share the vocabulary"):
            save_checkpoint(folder, model, optimizer, 3, group=RankGroup(data))
    with AsyncSaver(ranks) as saver:
        saver.save(Path(folder) / "beside", model, optimizer, 3)
    return len(list(optimizer.state))


def load_job(rank: int, folder: str, kind: str, dp: int, tp: int) -> list[float]:
    model, optimizer, group = open_job(kind, dp, tp)
    if kind == "fsdp":
        fsdp.load(Path(folder) / "waited" / "step-00000003", model, optimizer)
    else:
        load_checkpoint(Path(folder) / "waited" / "step-00000003", model, optimizer, group=group)
    return train(model, optimizer, range(3, 6))


def save_apart(rank: int, folder: str) -> list[str]:
    """Replicas that were not told of each other save the same steps into one folder."""
    model, optimizer, _ = open_job("replicas", 2, 2)
    train(model, optimizer, range(3))
    dist.barrier()
    steps = [save_checkpoint(folder, model, optimizer, step, keep=2).name for step in range(1, 13)]
    save_checkpoint(folder, model, optimizer, 3)
    return steps


def test_replicas_without_a_common_group_take_turns(tmp_path: Path, jobs: dict[tuple[Any, ...], Path]) -> None:
    names = [f"step-{step:08d}" for step in range(1, 13)]
    assert run_ranks(save_apart, 4, str(tmp_path)) == [names] * 4
    left = {"step-00000003", *names[-2:]}
    assert {path.name for path in tmp_path.iterdir()} in (left, left - {names[-2]})  # the later of two removes more
    apart, shared = (open_checkpoint(path / "step-00000003") for path in (tmp_path, jobs[JOBS[2]] / "waited"))
    apart.verify()
    assert apart.tensors == shared.tensors
    assert all(torch.equal(apart.read(key), shared.read(key)) for key in apart.tensors)


def read_with_muon(rank: int, folder: str, bad: int) -> Attempt:
    """A step of this optimizer waits for all ranks: it must not begin where one has nothing to read."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard = VocabShard(VocabLayout(13, 2, multiple_of=4), mesh.get_group("tp"))
    model = Model(shard, True)
    fsdp.apply(model, mesh, shard=shard)
    reshard(model)
    path = Path(folder) / "waited" / "step-00000003"
    return attempt(
        lambda: load_checkpoint(path if rank != bad else path / "gone", model, make_optimizer("Muon", model))
    )


def test_no_rank_makes_states_that_need_the_others_before_all_have_read(jobs: dict[tuple[Any, ...], Path]) -> None:
    found = Batch(read_with_muon, [(str(jobs[JOBS[0]]), 1)])(4, str(jobs[JOBS[0]]), 1)
    assert_all_raise("read with Muon", found, ["CheckpointLayoutError"], ["whole"])


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], Path]:
    root = tmp_path_factory.mktemp("jobs")
    places = {job: root / "-".join(map(str, job)) for job in JOBS}
    batch = Batch(save_job, [(str(places[job]), *job) for job in JOBS])
    for job in JOBS:
        assert batch(4, str(places[job]), *job) == [4] * 4
    model, optimizer = build(True, vocab=13, padded=16)
    train(model, optimizer, range(3))
    save_checkpoint(root / "alone" / "waited", model, optimizer, 3)
    return {**places, ("alone",): root / "alone"}


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_fsdp_and_replicas_save_what_one_process_saves(jobs: dict[tuple[Any, ...], Path], job: tuple[Any, ...]) -> None:
    alone = open_checkpoint(jobs["alone",] / "waited" / "step-00000003")
    stored = open_checkpoint(jobs[job] / "waited" / "step-00000003")
    beside = open_checkpoint(jobs[job] / "beside" / "step-00000003")
    assert stored.tensors == alone.tensors == beside.tensors and stored.state["ties"] == alone.state["ties"]
    written = [name for name in stored.state["files"] if name.endswith(".distcp")]
    assert len(written) == 4, "every rank has its share"
    for key in alone.tensors:
        assert torch.allclose(stored.read(key).double(), alone.read(key).double(), atol=1e-5), key
        assert torch.equal(stored.read(key), beside.read(key)), key


MOVES = [(JOBS[0], JOBS[1]), (JOBS[1], JOBS[2]), (JOBS[2], JOBS[0]), (("alone",), JOBS[0]), (JOBS[0], JOBS[2])]


def test_every_kind_of_job_goes_on_from_every_other(jobs: dict[tuple[Any, ...], Path]) -> None:
    model, optimizer = build(True, vocab=13, padded=16)
    want = train(model, optimizer, range(6))[3:]
    batch = Batch(load_job, [(str(jobs[source]), *target) for source, target in MOVES])
    for source, target in MOVES:
        for losses in batch(4, str(jobs[source]), *target):
            assert losses == pytest.approx(want, abs=1e-5), (source, target)
    load_checkpoint(jobs[JOBS[0]] / "beside" / "step-00000003", *build(True, vocab=13, padded=13))
