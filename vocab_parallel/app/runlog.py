"""The run folder: what a run was made from, what it measured, and where its checkpoints are. One rank writes."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vocab_parallel.app.config import Config
from vocab_parallel.checkpoint.metadata import leads_out
from vocab_parallel.errors import CheckpointLayoutError, ConfigError
from vocab_parallel.vocabulary.files import read_bytes, shortened
from vocab_parallel.vocabulary.manifest import Manifest, strict_json

PACKAGES = ("vocab-parallel", "torch", "numpy", "tiktoken", "mistral-common", "matplotlib", "tensorboard")

_LARGEST_LOG = 2**29


class RunLog:
    """Writes one run folder.

    Args:
        folder: the run folder; made if it is not there.
        resume_step: keep the metrics up to this step and go on after it; None starts a new log.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        require_own_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [] if resume_step is None else [row for row in read_metrics(folder) if row["step"] <= resume_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._metrics = path.open("a", encoding="utf-8")
        purge = None if resume_step is None else resume_step + 1
        self._board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def describe(self, config: Config, manifest: Manifest) -> None:
        """Writes ``config.yaml``, ``env.txt`` and ``manifest.json``."""
        write_whole(self.folder / "config.yaml", config.to_yaml())
        write_whole(self.folder / "env.txt", environment())
        manifest.write(self.folder)

    def step(self, row: Mapping[str, Any]) -> None:
        """Appends one line to ``metrics.jsonl`` and its numbers to TensorBoard; flushed, so a crash keeps it."""
        self._metrics.write(json.dumps(row) + "\n")
        self._metrics.flush()
        for name, value in row.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, row["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes ``summary.json``."""
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._board.close()


def require_own_folders(folder: Path) -> None:
    """Raises if a folder in a run folder is a link out of it: what is written and removed there is somebody else's."""
    for name in ("checkpoints", "tensorboard"):
        if (folder / name).is_symlink() and leads_out(folder, name):
            raise ConfigError(
                f"{folder / name} is a link to {os.readlink(folder / name)[:200]}: expected a folder of the run's own. "
                "Move the whole run folder there, and link that"
            )


def new_folder(config: Config) -> Path:
    """A run folder that does not exist yet: ``runs/<name>-<time>``."""
    stem = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.runs) / stem
    number = 1
    while folder.exists():
        number += 1
        folder = Path(config.runs) / f"{stem}-{number}"
    return folder


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; a last line that a crash cut off is left out.

    Raises:
        ConfigError: a line is no step's.
    """
    path = folder / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    try:
        lines = read_bytes(path, _LARGEST_LOG).splitlines() if path.is_file() else []
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            if not _is_row(row):
                raise ConfigError(f"{path} line {number}: expected a step and its numbers, got {shortened(row)}")
            rows.append(row)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        if not isinstance(error, json.JSONDecodeError):  # bytes that are no text, numbers that are no number
            raise ConfigError(f"{path}: {str(error)[:200]}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: a line is nested too deeply") from error
    return rows


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int and 0 <= row["step"] < 2**63
        and all(one is None or isinstance(one, float) or (isinstance(one, int) and abs(one) < 2**63)
                for one in row.values())
    )  # fmt: skip


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a run folder, such as ``summary.json``.

    Raises:
        ConfigError: the folder holds no such file, or it is damaged.
    """
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {name}: expected a run folder that `train` wrote")
    try:
        return strict_json.read_json(path, f"the {name} of a run folder")
    except CheckpointLayoutError as error:
        raise ConfigError(str(error)) from error


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a run depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def environment() -> str:
    """Readable lines on machine, versions and threads."""
    lines = [f"{name:16} {value}" for name, value in versions().items()]
    lines.append(f"{'platform':16} {platform.platform()}")
    lines.append(f"{'processors':16} {os.cpu_count()}")
    lines.append(f"{'threads a rank':16} {torch.get_num_threads()}")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines.append(f"{'gpus':16} {', '.join(gpus) or 'none'}")
    lines.append(f"{'command':16} {' '.join(['python -m vocab_parallel', *sys.argv[1:]])}")
    return "\n".join(lines) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Writes beside and renames, so that a reader or a crash never meets half a file."""
    aside = path.with_name(f".{path.name}.partial")
    aside.unlink(missing_ok=True)  # a link would be written through
    with aside.open("x", encoding="utf-8") as file:
        file.write(text)
    aside.replace(path)
