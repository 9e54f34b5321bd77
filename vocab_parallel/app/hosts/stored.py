"""Hosts whose checkpoints are the package's own: they load at any number of ranks, and each other's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vocab_parallel.app.hosts.base import Host
from vocab_parallel.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from vocab_parallel.checkpoint.files import check_file, open_checkpoint, read_state
from vocab_parallel.checkpoint.folders import name_of
from vocab_parallel.checkpoint.placing import STATE, is_whole
from vocab_parallel.checkpoint.saver import AsyncSaver
from vocab_parallel.checkpoint.writing import is_unchanged
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import RankGroup
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest


class StoredHost(Host):
    """A host with a `torch` optimizer and checkpoints of `checkpoint`."""

    optimizer: torch.optim.Optimizer

    def settle(self) -> None:
        """Before a save or a load: lets the model's modules hold the Parameters that the optimizer has."""

    def save(
        self, folder: Path, step: int, extra: Mapping[str, Any], *, manifest: Manifest, identity: VocabIdentity | None
    ) -> None:
        self.settle()
        about: dict[str, Any] = {"manifest": manifest, "identity": identity}
        if self.config.train.async_checkpoints:
            self._saver.save(folder, self.model, self.optimizer, step, extra, **about)
            return
        keep = self.config.train.keep_checkpoints
        save_checkpoint(folder, self.model, self.optimizer, step, extra, keep=keep, group=self._ranks, **about)

    def finish_saving(self, *, failed: bool = False) -> None:
        if failed and "_saver" in vars(self):
            self._saver.settle(timeout=min(60.0, self.config.parallel.timeout_s))
        elif self.config.train.async_checkpoints and not failed:
            self._saver.wait()

    def load(self, checkpoint: Path, *, vocabulary_sha256: str, weights_only: bool = False) -> int:
        self.settle()
        optimizer = None if weights_only else self.optimizer
        step, _ = load_checkpoint(
            checkpoint, self.model, optimizer, vocabulary_sha256=vocabulary_sha256, group=self._ranks
        )
        self.verify()
        return step

    def verify(self) -> None:
        """Proves the tie again after a load."""

    @staticmethod
    def latest(folder: Path) -> Path | None:
        return latest_checkpoint(folder)

    @staticmethod
    def is_whole(checkpoint: Path) -> bool:
        return is_whole(checkpoint)

    @staticmethod
    def damage(checkpoint: Path, rank: int = 0, size: int = 1) -> list[str]:
        """By the hash of each file, that of the state itself included."""
        try:
            state = read_state(checkpoint)
            if name_of(state["step"]) not in checkpoint.name or not is_unchanged(state):
                return [f"{STATE} is not as it was saved"]
            mine = sorted(state["files"])[rank::size]
            found = [check_file(checkpoint, name, state["files"], content=name in mine) for name in state["files"]]
            if not any(found):
                open_checkpoint(checkpoint)
        except CheckpointLayoutError as error:
            return [str(error)]
        return [one for one in found if one is not None]

    @functools.cached_property
    def _ranks(self) -> RankGroup:
        """All of the job: replicas write their part, and hear of errors."""
        return RankGroup(self.job.group)

    @functools.cached_property
    def _saver(self) -> AsyncSaver:
        return AsyncSaver(self._ranks, keep=self.config.train.keep_checkpoints)
