"""Saving beside the training: a copy in memory at once, the files by a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from vocab_parallel.checkpoint.folders import name_of
from vocab_parallel.checkpoint.saving import Contents, require_count, save_together
from vocab_parallel.checkpoint.together import caught, require_all
from vocab_parallel.shard import RankGroup
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.describing import shard_of, unwrap

if TYPE_CHECKING:
    from vocab_parallel.vocabulary.identity import VocabIdentity


class AsyncSaver:
    """Saves what `save_checkpoint` saves, the same bytes, while the training goes on.

    `save` copies this rank's state to the CPU's memory and returns; a thread writes, hashes and commits. One save is in
    flight: the next one waits for it. An error of any rank is raised on every rank, by the next `save` or `wait`.

    Use it as a context manager, or call `wait` at the end, and before another save into the same folder: one that is in
    flight when the process ends is lost, and the checkpoint before stays.

    Args:
        group: All ranks that save together: the model's shard, or a wider group under FSDP2 and with replicas. None:
            this process alone.
        keep: How many checkpoints stay; None: all.
        timeout: How long a rank's thread waits for the slowest one.

    Collectives:
        At construction the making of a gloo group of the same ranks; the thread's own go over that.

    Memory:
        One copy of this rank's state on the CPU while a save is in flight.
    """

    def __init__(
        self,
        group: RankGroup | None = None,
        *,
        keep: int | None = None,
        timeout: timedelta = timedelta(hours=1),
    ) -> None:
        if keep is not None:
            require_count("keep", keep, 1)
        self.keep = keep
        self._group = RankGroup(None)
        if group is not None and group.group is not None:
            ranks = dist.get_process_group_ranks(group.group)
            own = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
            self._group = RankGroup(own)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._path: Path | None = None

    def save(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        extra: Mapping[str, Any] | None = None,
        *,
        manifest: Manifest | None = None,
        identity: VocabIdentity | None = None,
    ) -> Path:
        """Begins to save ``folder/step-<step>``, which is there after the next `save` or `wait`.

        Raises:
            VocabParallelError: On every rank, what went wrong with the save before.
        """
        self.wait()
        model = unwrap(model)
        shard = shard_of(model)
        require_all(self._group, shard)
        shard.raise_deferred()
        contents = Contents(step, self.keep, extra=extra or {}, manifest=manifest, identity=identity)
        fault = caught("the state could not be collected", contents.fill, model, optimizer, True)
        final = Path(folder) / name_of(step)

        def work() -> None:
            try:
                self._path = save_together(self._group, final, contents, fault)
            except BaseException as error:  # raised where the next `save` or `wait` is called
                self._error = error

        # A daemon: a process that ends by an error must not wait for ranks that have ended too.
        self._thread = threading.Thread(target=work, name=f"save {final.name}", daemon=True)
        self._thread.start()
        return final

    def wait(self) -> Path | None:
        """Waits for the save in flight. Returns the last checkpoint that was saved.

        Raises:
            VocabParallelError: On every rank, what went wrong with it; once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._path

    def settle(self, timeout: float) -> None:
        """Waits up to so many seconds for the save in flight, for a process that ends with another error."""
        if self._thread is not None:
            self._thread.join(timeout)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        if error is None:
            self.wait()
        else:
            self.settle(timeout=60.0)  # the error that is on its way matters more
