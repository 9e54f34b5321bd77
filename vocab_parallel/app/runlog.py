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
from vocab_parallel.errors import ConfigError
from vocab_parallel.vocabulary.manifest import Manifest

PACKAGES = ("vocab-parallel", "torch", "numpy", "tiktoken", "mistral-common", "matplotlib", "tensorboard")


class RunLog:
    """Writes one run folder.

    Args:
        folder: the run folder; made if it is not there.
        resume_step: keep the metrics up to this step and go on after it; None starts a new log.
    """

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [] if resume_step is None else [row for row in read_metrics(folder) if row["step"] <= resume_step]
        _write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._metrics = path.open("a", encoding="utf-8")
        purge = None if resume_step is None else resume_step + 1
        self._board: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def describe(self, config: Config, manifest: Manifest) -> None:
        """Writes ``config.yaml``, ``env.txt`` and ``manifest.json``."""
        _write_whole(self.folder / "config.yaml", config.to_yaml())
        _write_whole(self.folder / "env.txt", environment())
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
        _write_whole(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._board.close()


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
    """The lines of ``metrics.jsonl``; a last line that a crash cut off is left out."""
    path = folder / "metrics.jsonl"
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of a run folder, such as ``summary.json``.

    Raises:
        ConfigError: the folder holds no such file.
    """
    path = folder / name
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {name}: expected a run folder that `train` wrote")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


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


def _write_whole(path: Path, text: str) -> None:
    """Writes beside and renames, so that a reader or a crash never meets half a file."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
