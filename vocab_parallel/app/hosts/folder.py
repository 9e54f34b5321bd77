"""Checkpoint folders of the hosts that write their own files: whole or absent, and told apart by their layout."""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vocab_parallel.app.hosts.base import Host
from vocab_parallel.app.job import Job
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest

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
                    identity.write(place / "vocabulary.json")

        keep = self.config.train.keep_checkpoints
        save_whole(self.job, folder, step, write, about=self.about(), extra=extra, keep=keep)

    def finish_saving(self) -> None:
        """`save` has finished when it returns."""

    @staticmethod
    def latest(folder: Path) -> Path | None:
        return latest_whole(folder)


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
        Two barriers, and those of `write`.
    """
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    if job.first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    job.barrier()
    write(aside)
    job.barrier()
    if job.first:
        with (aside / STATE).open("w", encoding="utf-8") as file:
            json.dump({"step": step, "about": dict(about), "extra": dict(extra)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        for path in _whole(folder)[:-keep]:
            shutil.rmtree(path)
    job.barrier()


def latest_whole(folder: Path) -> Path | None:
    """The whole checkpoint with the highest step in `folder`; None if there is none."""
    found = _whole(folder)
    return found[-1] if found else None


def compare(checkpoint: Path, about: Mapping[str, Any], vocabulary_sha256: str) -> int:
    """Refuses a checkpoint of another host, layout or vocabulary. Returns its step.

    Raises:
        CheckpointLayoutError: naming what differs, on every rank.
    """
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    differs = [f"{key} {state['about'].get(key)!r}, here {want!r}" for key, want in about.items()
               if state["about"].get(key) != want]  # fmt: skip
    if state["extra"].get("vocabulary_sha256", vocabulary_sha256) != vocabulary_sha256:
        differs.append("another vocabulary: the same ids would mean other tokens")
    if differs:
        raise CheckpointLayoutError(f"{checkpoint} does not fit this job: saved with {'; '.join(differs)}")
    return int(state["step"])


def _whole(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name) and (path / STATE).is_file()
    )


def layout(shard: VocabShard, job: Job) -> dict[str, int]:
    """What a host's own files are bound to."""
    made = shard.layout
    return {"vocab_size": made.vocab_size, "padded_size": made.padded_size, "tp_size": made.tp_size,
            "replicas": job.replicas.size}  # fmt: skip
