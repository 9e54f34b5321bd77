"""What the training asks of the stack it runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vocab_parallel.app.config import Config
from vocab_parallel.app.job import Job
from vocab_parallel.app.model import Head
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest


class Host(ABC):
    """A model, its optimizer and its checkpoints in one stack, on one rank.

    Args:
        config: of the run.
        job: this rank.
        vocab_size: token ids.

    Attributes:
        model: holds the sharded embedding and head.
        shard: this rank's part of the vocabulary.
        tied: names of the two uses of the tied weight.
        trunk_parameters: numbers in the model beside the vocabulary's, over all ranks.
        needs_group: whether one rank alone must have a process group too.
        takes_head_bias: whether ``model.head_bias`` is possible.
    """

    needs_group = True
    takes_head_bias = True

    model: nn.Module
    shard: VocabShard
    tied: tuple[str, str]
    trunk_parameters: int

    def __init__(self, config: Config, job: Job, vocab_size: int) -> None:
        self.config, self.job = config, job

    @abstractmethod
    def hidden(self, ids: Tensor) -> Tensor:  # [B, S] -> [B, S, D]
        """Hidden states as the head takes them, without gradient."""

    @abstractmethod
    def forward(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # [B, S], [B, S] -> [B, S, D], []
        """Hidden states without gradient, and the mean loss in nats over the rows of all replicas."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Gradients of `forward`'s loss alone, meaned over the replicas."""

    @abstractmethod
    def step(self, rate: float) -> float:
        """Clips to ``train.clip`` and updates at `rate` (the trunk at its ratio). Returns the norm before clipping."""

    @abstractmethod
    def head(self) -> Head:
        """This rank's rows of the head as they are now."""

    @abstractmethod
    def save(
        self, folder: Path, step: int, extra: Mapping[str, Any], *, manifest: Manifest, identity: VocabIdentity | None
    ) -> None:
        """Writes the checkpoint of `step` into `folder`, which keeps ``train.keep_checkpoints`` of them.

        It may return before the files are there: `finish_saving` waits for them.
        """

    @abstractmethod
    def finish_saving(self, *, failed: bool = False) -> None:
        """Waits for a save that goes on beside the training, and raises its error.

        Every rank calls it at the end, for the last `save`; the next one waits for the one before by itself.

        Args:
            failed: the training has ended with an error: waits a minute at most, and raises nothing.
        """

    @abstractmethod
    def load(self, checkpoint: Path, *, vocabulary_sha256: str, weights_only: bool = False) -> int:
        """Loads a checkpoint in place, and proves the tie again. Returns its step.

        Raises:
            CheckpointLayoutError: it is of another vocabulary, layout or model.
        """

    @staticmethod
    @abstractmethod
    def latest(folder: Path) -> Path | None:
        """The whole checkpoint of this host with the highest step in `folder`; None if there is none."""

    @staticmethod
    @abstractmethod
    def is_whole(checkpoint: Path) -> bool:
        """Whether the folder holds what makes it a checkpoint of this host."""

    @staticmethod
    @abstractmethod
    def damage(checkpoint: Path, rank: int = 0, size: int = 1) -> list[str]:
        """What is wrong with the files of a whole checkpoint, in words; of `size` ranks, each looks at its share."""
