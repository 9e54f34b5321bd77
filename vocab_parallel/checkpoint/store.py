"""Checkpoints by global row: written by the ranks together, loaded at any other number of ranks and padding."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from vocab_parallel.checkpoint.files import (
    StoredCheckpoint,
    check_files,
    open_checkpoint,
    read_state,
    require_unchanged,
)
from vocab_parallel.checkpoint.folders import name_of
from vocab_parallel.checkpoint.loading import TIES, Matched, match, place_others, require_equal
from vocab_parallel.checkpoint.metadata import PlainReader
from vocab_parallel.checkpoint.moments import forget, made_moments
from vocab_parallel.checkpoint.placing import STATE
from vocab_parallel.checkpoint.saving import Contents, save_together
from vocab_parallel.checkpoint.states import ModelState, collect
from vocab_parallel.checkpoint.together import agree, caught, ranks_of
from vocab_parallel.checkpoint.writing import MANIFEST, described
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import RankGroup
from vocab_parallel.tying import verify_tied
from vocab_parallel.vocabulary.manifest import Manifest, require_loadable
from vocab_parallel.vocabulary.manifest.describing import shard_of, unwrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vocab_parallel.vocabulary.identity import VocabIdentity


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int | None = None,
    manifest: Manifest | None = None,
    identity: VocabIdentity | None = None,
    group: RankGroup | None = None,
) -> Path:
    """Saves `model` and `optimizer` as ``folder/step-<step>``.

    Each rank writes the vocabulary's rows that it owns, real ones only, under their global number; what is replicated
    is written once, a tied weight under its first name. Written aside and renamed: a crash leaves the one before.

    A value of a table's optimizer state that has no rows and is another one on each rank (the column factor of
    Adafactor) is kept for each rank, as ``<key>@shards``.

    Args:
        folder: Holds the checkpoints of one run; on storage that every rank sees.
        model: With plain parameters, or DTensors under FSDP2; contains a vocabulary-sharded parameter.
        optimizer: Its state is saved too; None saves weights only.
        extra: JSON values to keep beside the tensors.
        keep: How many checkpoints stay; None: all.
        manifest: What the model is; by default `Manifest.of(model)`. What it says of the files is filled in.
        identity: The ordered vocabulary, written as vocabulary.json.
        group: All ranks that call this, replicas among them, if they are more than those of the vocabulary; found by
            itself for FSDP2, over the ranks of its mesh. Replicas in it share the writing. Those that are not in one
            group write one after the other, each all of it.

    Returns:
        The checkpoint's folder.

    Collectives:
        Four all-gathers of 64 bytes, each with a second one of hashes, plans or file lists.

    Memory:
        One block of `rows.BLOCK_BYTES`, and the largest tensor that is not over the vocabulary.

    Raises:
        VocabParallelError: On every rank, whatever went wrong on one; the checkpoint before stays.
    """
    model = unwrap(model)
    shard = shard_of(model)
    ranks = ranks_of(model, shard, group)
    shard.raise_deferred()
    contents = Contents(step, keep, extra=extra or {}, manifest=manifest, identity=identity)
    fault = caught("the state could not be collected", contents.fill, model, optimizer)
    return save_together(ranks, Path(folder) / name_of(step), contents, fault)


@torch.no_grad()
def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    vocabulary_sha256: str | None = None,
    manifest: Manifest | None = None,
    tie: str = "error",
    verify: bool = True,
    cast: bool = False,
    group: RankGroup | None = None,
) -> tuple[int, dict[str, Any]]:
    """Loads a checkpoint into `model`, and into `optimizer` if given, in place: any TP size, padding and replicas.

    All is compared before anything changes: files, manifest, vocabulary, ties, names, shapes, dtypes. Padding becomes
    zero.

    Args:
        folder: One checkpoint, as `save_checkpoint` or `latest_checkpoint` returned it.
        optimizer: Over the model's parameters; its learning rate and other settings stay. None loads weights only.
        vocabulary_sha256: Of the vocabulary in use; compared with what the checkpoint knows.
        manifest: What this job expects; by default `Manifest.of(model)`.
        tie: For a checkpoint that was saved tied and a model that is not: "error", or "untie": each use begins as a
            copy of the one weight and its moments. The reverse loads where both tensors are equal.
        verify: Read every file first and compare its hash; the ranks share the files.
        cast: Convert tensors of another dtype.
        group: All ranks that call this, as in `save_checkpoint`.

    Returns:
        The step, and the `extra` values that were saved.

    Collectives:
        Three all-gathers of 64 bytes; those of a step of the optimizer, if it has any and no state yet.

    Raises:
        CheckpointLayoutError: On every rank, with both sides: no whole checkpoint, damaged files, another vocabulary,
            tie, architecture or dtype; an optimizer where none was saved.
        TyingError: A tie does not hold after the load.
    """
    path, model = Path(folder), unwrap(model)
    shard = shard_of(model)
    ranks = ranks_of(model, shard, group)
    shard.raise_deferred()
    plan = _Plan(path, model, optimizer, tie, cast)
    what = f"{path} could not be read by rank {ranks.rank} of the group"
    fault = caught(what, plan.read, ranks, vocabulary_sha256, manifest, verify)
    call = f"load_checkpoint({path.name}, state {plan.digest}, {plan.kind or 'no optimizer'}, tie={tie}, cast={cast})"
    agree(ranks, call, fault)  # before a step of the optimizer, which may wait for other ranks
    try:
        agree(ranks, call, caught(what, plan.fit, ranks))
    except BaseException:
        plan.undo()
        raise
    agree(ranks, call, caught(f"{what}; the model is loaded in part", plan.run))
    verify_tied(model, optimizer, required=False)
    return plan.stored.step, plan.stored.state["extra"]


class _Plan:
    """One load on one rank."""

    stored: StoredCheckpoint
    mine: ModelState
    found: Matched
    digest = ""  # of the checkpoint's state: ranks that see different folders notice

    def __init__(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, tie: str, cast: bool
    ) -> None:  # fmt: skip
        self.path, self.model, self.optimizer, self.tie, self.cast = path, model, optimizer, tie, cast
        self.kind = None if optimizer is None else type(optimizer).__name__
        self.made: list[Tensor] = []

    def read(self, ranks: RankGroup, sha256: str | None, manifest: Manifest | None, verify: bool) -> None:
        """Opens and checks the files, and compares the vocabulary and the manifest."""
        if self.tie not in TIES:
            raise CheckpointLayoutError(f"tie={self.tie!r}: expected one of {', '.join(TIES)}")
        state = read_state(self.path)
        if verify:
            check_files(self.path, state["files"], ranks.rank, ranks.size)
            require_unchanged(self.path, state)
        self.digest = described(self.path / STATE)["sha256"][:16]
        self.stored = open_checkpoint(self.path)
        self._gate(sha256, manifest)

    def fit(self, ranks: RankGroup) -> None:
        """Finds a place for each value: all else that can fail before anything changes."""
        stored, state = self.stored, self.stored.state
        kept = {key for key in (*stored.tensors, *state["scalars"]) if key.startswith("optimizer.")}
        self.begins = not kept and state.get("optimizer") == self.kind  # saved before its first step
        optimizer = None if self.begins else self.optimizer
        if optimizer is not None:
            self.made = made_moments(self.model, optimizer, kept, state["ties"])
        self.mine = collect(self.model, optimizer)
        if not kept and any(key.startswith("optimizer.") for key in self.mine.owners):
            raise CheckpointLayoutError(
                f"{self.path} holds weights only, no state for this {self.kind}: load it with optimizer=None, which "
                "begins the optimizer anew"
            )
        self.found = match(stored, self.mine, tie=self.tie, optimizer=self.optimizer is not None, cast=self.cast)
        require_equal(stored, self.found.equal, ranks)

    def run(self) -> None:
        """Fills model and optimizer."""
        left = list(self.found.tensors)
        while left:  # a key may come twice, once in a pass
            one_pass = dict(reversed(left))
            with _alone(self.path):
                load(
                    {key: held.stored() for key, held in one_pass.items()},
                    storage_reader=PlainReader(self.path),
                    no_dist=True,
                )
            left = [(key, held) for key, held in left if held is not one_pass.get(key)]
        for _, held in self.found.tensors:
            if held.padding is not None:
                held.padding.zero_()
        place_others(self.stored, self.mine, self.found)
        if self.begins and self.optimizer is not None:
            self.optimizer.state.clear()

    def undo(self) -> None:
        """Takes back the states that were made for a load that is refused."""
        if self.optimizer is not None:
            forget(self.optimizer, self.made)

    def _gate(self, sha256: str | None, manifest: Manifest | None) -> None:
        state, mine = self.stored.state, shard_of(self.model).vocab_size
        saved = Manifest.read(self.path) if (self.path / MANIFEST).is_file() else None
        known = [state["extra"].get("vocabulary_sha256"), saved and saved.vocabulary.ordered_table_sha256]
        known = [one for one in known if isinstance(one, str)]
        fix = f"python -m vocab_parallel migrate {self.path} TARGET --old-vocab OLD --new-vocab NEW"
        if (its := state["layout"]["vocab_size"]) != mine:
            raise CheckpointLayoutError(
                f"{self.path} holds a vocabulary of {its} ids, this model has {mine}. To move it to another "
                f"vocabulary: {fix}"
            )
        if sha256 is not None and known and sha256 not in known:
            raise CheckpointLayoutError(
                f"{self.path} was made with the vocabulary sha256 {known[0][:16]}…, this job uses sha256 "
                f"{sha256[:16]}…: the same ids would mean other tokens. Use the saved vocabulary, or move it: {fix}"
            )
        if saved is not None:
            here = manifest or Manifest.of(self.model)
            if self.cast:
                head = dataclasses.replace(here.head, parameter_dtype=saved.head.parameter_dtype)
                here = dataclasses.replace(here, head=head)
            # Tensors and ties are compared one by one later, with what may be done about them.
            require_loadable(dataclasses.replace(saved, checkpoint=None), here, where=str(self.path), retie=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Each rank reads by itself, which is meant though DCP warns of it; and its errors become ones that all hear of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:  # no Exception, but a BaseException
            cause = next(iter(error.failures.values()))[0]
            words = str(cause) if isinstance(cause, CheckpointLayoutError) else f"{path} is damaged ({cause!r:.300})"
            raise CheckpointLayoutError(words) from error
