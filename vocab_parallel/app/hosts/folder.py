"""Checkpoint folders of the hosts that write their own files: whole or absent, and told apart by their layout."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vocab_parallel.app.hosts.base import Host
from vocab_parallel.app.job import Job
from vocab_parallel.checkpoint.folders import checkpoints, name_of, prune
from vocab_parallel.checkpoint.metadata import inside
from vocab_parallel.checkpoint.placing import aside_of, is_whole, open_aside, put_in_place
from vocab_parallel.checkpoint.together import agree, caught
from vocab_parallel.checkpoint.writing import VOCABULARY, json_bytes, write_file
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import RankGroup, VocabShard
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.strict_json import read_json

STATE = "host.json"  # written last: a folder without it is not a checkpoint


class FolderHost(Host):
    """A host that writes its own files into a checkpoint's folder."""

    @abstractmethod
    def write(self, place: Path) -> None:
        """This rank's part of a checkpoint, into the folder `place`."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """What must be equal at load: the host, the layout, what else its files depend on."""

    def save(
        self, folder: Path, step: int, extra: Mapping[str, Any], *, manifest: Manifest, identity: VocabIdentity | None
    ) -> None:
        def write(place: Path) -> None:
            self.write(place)
            if self.job.first:
                manifest.write(place)
                if identity is not None:
                    identity.write(place / VOCABULARY)

        keep = self.config.train.keep_checkpoints
        save_whole(self.job, folder, step, write, about=self.about(), extra=extra, keep=keep)

    def finish_saving(self, *, failed: bool = False) -> None:
        """`save` has finished when it returns."""

    @staticmethod
    def latest(folder: Path) -> Path | None:
        return latest_whole(folder)

    @staticmethod
    def is_whole(checkpoint: Path) -> bool:
        return is_whole(checkpoint, STATE)

    @staticmethod
    def damage(checkpoint: Path, rank: int = 0, size: int = 1) -> list[str]:
        """By the sizes of the files: a host's own have no hashes."""
        try:
            sizes = _read(checkpoint).get("files", {})
        except CheckpointLayoutError as error:
            return [str(error)]
        if not isinstance(sizes, dict) or not all(inside(checkpoint, name) for name in sizes):
            return [f"{STATE} lists no files of its own"]
        paths = {name: checkpoint / name for name in sizes}
        return [f"{name} is missing or has another size than {sizes[name]} bytes" for name, path in paths.items()
                if not path.is_file() or path.stat().st_size != sizes[name]]  # fmt: skip


def save_whole(
    job: Job,
    folder: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    about: Mapping[str, Any],
    extra: Mapping[str, Any],
    keep: int,
) -> None:
    """Lets every rank `write` into a folder aside, which one rank then gives its name.

    Args:
        job: all its ranks call this.
        folder: of all checkpoints of a run, on storage that every rank sees.
        step: names the checkpoint.
        write: takes the folder aside.
        about: what must be equal at load, such as the host, the layout and the number of replicas.
        extra: JSON values to keep; ``vocabulary_sha256`` among them is compared at load.
        keep: how many checkpoints stay.

    Collectives:
        Three all-gathers of 64 bytes, and those of `write`.

    Raises:
        VocabParallelError: on every rank, what went wrong on one; the checkpoint before stays.
    """
    final, ranks = folder / name_of(step), RankGroup(job.group)
    aside = aside_of(final)
    state = {"step": step, "about": dict(about), "extra": dict(extra)}

    def finish() -> None:
        files = {str(path.relative_to(aside)): path.stat().st_size for path in aside.rglob("*") if path.is_file()}
        write_file(aside / STATE, json_bytes({**state, "files": files}))
        put_in_place(aside, final, state=STATE)
        prune(folder, keep, final, STATE)

    steps = [
        (f"{final} could not be begun", lambda: open_aside(final), job.first),
        (f"{final} could not be written by rank {job.rank}", lambda: write(aside), True),
        (f"{final} could not be finished", finish, job.first),
    ]
    try:
        for what, work, mine in steps:
            agree(ranks, f"save {final.name}", caught(what, work) if mine else None)
    except BaseException:
        if job.first:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def latest_whole(folder: Path) -> Path | None:
    """The whole checkpoint with the highest step in `folder`; None if there is none."""
    return next(reversed(checkpoints(folder, STATE)), None)


def compare(job: Job, checkpoint: Path, about: Mapping[str, Any], vocabulary_sha256: str) -> int:
    """Refuses a checkpoint of another host, layout or vocabulary. Returns its step.

    Raises:
        CheckpointLayoutError: naming what differs, on every rank.
    """
    state: dict[str, Any] = {}
    fault = caught(f"{checkpoint} could not be read by rank {job.rank}", lambda: state.update(_read(checkpoint)))
    agree(RankGroup(job.group), f"load {checkpoint.name}", fault)
    differs = [f"{key} {state['about'].get(key)!r}, here {want!r}" for key, want in about.items()
               if state["about"].get(key) != want]  # fmt: skip
    saved = state["extra"].get("vocabulary_sha256", vocabulary_sha256)
    if saved != vocabulary_sha256:
        here = f"here {vocabulary_sha256[:16]}…: the same ids would mean other tokens"
        differs.append(f"vocabulary sha256 {str(saved)[:16]}…, {here}")
    if differs:
        ranks = state["about"].get("tp_size"), state["about"].get("replicas")
        raise CheckpointLayoutError(
            f"{checkpoint} does not fit this job: saved with {'; '.join(differs)}. Such files load in the host and the "
            f"layout that wrote them only: {ranks[0]} ranks a vocabulary (parallel.tp) and {ranks[1]} replicas"
        )
    return int(state["step"])


def _read(checkpoint: Path) -> dict[str, Any]:
    """The file that was written last."""
    try:
        state = read_json(checkpoint / STATE, "the state of a host's checkpoint")
        good = isinstance(state["about"], dict) and isinstance(state["extra"], dict) and type(state["step"]) is int
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise CheckpointLayoutError(
            f"{checkpoint / STATE} is damaged: use the checkpoint before, mv {checkpoint} {checkpoint}.damaged"
        )
    found: dict[str, Any] = state
    return found


def layout(shard: VocabShard, job: Job) -> dict[str, int]:
    """What a host's own files are bound to."""
    made = shard.layout
    return {"vocab_size": made.vocab_size, "padded_size": made.padded_size, "tp_size": made.tp_size,
            "replicas": job.replicas.size}  # fmt: skip
