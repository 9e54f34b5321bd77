"""A run that begins or goes on by itself: the same command, started again, finds its folder and its checkpoint."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vocab_parallel.app import config as configs
from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts import Host, host_class
from vocab_parallel.app.job import Job
from vocab_parallel.checkpoint.placing import sync
from vocab_parallel.checkpoint.together import agree, caught
from vocab_parallel.errors import CheckpointLayoutError, ConfigError
from vocab_parallel.shard import RankGroup

# Where and how, not what: a restarted job may differ in these.
FREE = {
    "run", "runs", "name", "train.resume", "data.cache", "parallel.timeout_s", "parallel.threads", "parallel.device",
}  # fmt: skip
_OURS = {"metrics.jsonl", "tensorboard", "checkpoints"}  # what a run that was killed at its start may have left
_STEP = re.compile(r"step-\d{8,}")


def find_place(config: Config, job: Job) -> tuple[Path, Path | None]:
    """The folder that ``run`` names, and the newest checkpoint in it that is whole.

    Each checkpoint is compared with the hashes that it was saved with, the ranks sharing its files (of a host that
    writes its own: with their sizes). One that is damaged is renamed to ``<name>.damaged``, with a line that says so,
    and the one before is taken.

    Returns:
        The folder, and None for a run that begins; the same on every rank.

    Collectives:
        An all-gather of 64 bytes, a few more and two of objects for each checkpoint that is looked at.

    Raises:
        ConfigError: On every rank: the folder is another run's or no run's, or has only damaged checkpoints.
    """
    assert config.run is not None
    folder, host = Path(config.run), host_class(config.host)
    root = folder / "checkpoints"
    _on_first(job, f"look into {folder}", lambda: _require_same(folder, config))
    _on_first(job, f"look into {root}", lambda: _set_unfinished_aside(root, job, host))
    while (latest := _on_first(job, f"look into {root}", lambda: host.latest(root))) is not None:
        if not _damage(latest, job, host):
            return folder, latest
    _on_first(job, f"look into {root}", lambda: _require_none_damaged(root, config))
    return folder, None


def _on_first(job: Job, what: str, work: Callable[[], Any]) -> Any:
    """What `work` gives on the first rank, on every rank; its error is one of every rank."""
    found: list[Any] = []
    fault = caught(f"rank {job.rank} could not {what}", lambda: found.append(work())) if job.first else None
    agree(RankGroup(job.group), what, fault)
    return job.agree(found[0] if job.first else None)


def _damage(latest: Path, job: Job, host: type[Host]) -> list[str]:
    """What is wrong with a checkpoint, the same on every rank; if anything is, it is set aside."""
    mine: list[str] = []
    what = f"{latest} could not be read by rank {job.rank}"
    fault = caught(what, lambda: mine.extend(host.damage(latest, job.rank, job.world)))
    agree(RankGroup(job.group), f"verify {latest.name}", fault)
    words = list(dict.fromkeys(word for one in job.gather(mine) for word in one))
    if words:
        _on_first(job, f"set {latest.name} aside", lambda: _set_aside(latest, words, job))
    return words


def _require_same(folder: Path, config: Config) -> None:
    """Raises if the folder holds something else than this run."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run={folder} is a file: expected the folder of a run, or a new name")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "config.yaml" not in names:
        odd = sorted(name for name in names - _OURS if not (name.startswith(".") and name.endswith(".partial")))
        if odd:
            raise ConfigError(
                f"run={folder} holds {', '.join(odd[:3])} and no config.yaml, so it is no run's folder: give a new name"
            )
        return
    there, here = (_flat(dataclasses.asdict(one)) for one in (configs.load(folder), config))
    differs = [f"{key}={there[key]} there, {here[key]} here" for key in here
               if key not in FREE and here[key] != there[key]]  # fmt: skip
    if differs:
        key = differs[0].partition("=")[0]
        raise ConfigError(
            f"run={folder} was begun with another configuration: {'; '.join(differs)}. A restart must have the same. "
            f"To go on with the change: python -m vocab_parallel train {folder} {key}={here[key]}; for another run, "
            "give another folder"
        )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _set_unfinished_aside(root: Path, job: Job, host: type[Host]) -> None:
    """A folder gets a checkpoint's name when it is whole: one that is not has lost a part."""
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if _STEP.fullmatch(path.name) and path.is_dir() and not host.is_whole(path):
            _set_aside(path, ["a file without which it is no checkpoint is missing"], job)


def _set_aside(path: Path, words: list[str], job: Job) -> None:
    target, number = path.with_name(f"{path.name.removesuffix('.old').strip('.')}.damaged"), 1
    while target.exists():
        number += 1
        target = target.with_name(f"{target.name.partition('.damaged')[0]}.damaged-{number}")
    os.replace(path, target)
    sync(path.parent)
    job.say(f"{path} is damaged and is now {target.name}: {'; '.join(words[:4])}. Going back to the one before")


def _require_none_damaged(root: Path, config: Config) -> None:
    damaged = sorted(path.name for path in root.glob("*.damaged*")) if root.is_dir() else []
    if damaged:
        raise CheckpointLayoutError(
            f"{root} holds no whole checkpoint, only {', '.join(damaged)}: a restart begins nothing anew over them. "
            f"Restore one from a copy, or begin again in another folder: run={config.run}-2"
        )
