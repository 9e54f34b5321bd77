"""The ranks of a job write one checkpoint: each its rows, what is replicated once, and all of it or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from vocab_parallel.checkpoint.folders import prune
from vocab_parallel.checkpoint.placing import Turn, aside_of, open_aside, require_replaceable
from vocab_parallel.checkpoint.states import SHARDS, Held, ModelState, collect
from vocab_parallel.checkpoint.together import caught, gather_objects
from vocab_parallel.checkpoint.writing import (
    VOCABULARY,
    BlockWriter,
    commit,
    described,
    json_bytes,
    make_state,
    merge_plans,
    plan_part,
    write_extras,
)
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import RankGroup
from vocab_parallel.vocabulary.manifest import CheckpointContract, Manifest, TensorSpec

if TYPE_CHECKING:
    from vocab_parallel.vocabulary.identity import VocabIdentity


@dataclass
class Contents:
    """What this rank gives to a checkpoint."""

    step: int
    keep: int | None = None
    state: ModelState | None = None  # None: collecting it has failed
    extra: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    identity: VocabIdentity | None = None
    optimizer: str | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def fill(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, staged: bool = False) -> None:
        """Looks at model and optimizer; `staged` copies what they hold, so that they may change.

        Raises:
            CheckpointLayoutError: Something cannot be saved.
        """
        require_count("step", self.step, 0)
        if self.keep is not None:
            require_count("keep", self.keep, 1)
        self.extra = json.loads(json_bytes(dict(self.extra)))  # a copy, all the way down
        state = collect(model, optimizer)
        self.optimizer = None if optimizer is None else type(optimizer).__name__
        if self.manifest is None:
            self.manifest = Manifest.of(model, identity=self.identity)
        if staged:
            state.tensors = {key: held.staged() for key, held in state.tensors.items()}
            state.homes.clear()
        self.digests = _digests(state)
        self.state = state


def save_together(group: RankGroup, final: Path, contents: Contents, fault: Exception | None = None) -> Path:
    """Writes the folder `final`; every rank of the group calls it, with an error of its own if it has one.

    With `contents.keep`, older checkpoints beside it go when it is there.

    Raises:
        VocabParallelError: On every rank, what went wrong on any: nothing of the checkpoint stays, and one of the same
            name that was there before does.

    Collectives:
        Four rounds of `gather_objects`: values that may differ, plans, what was written, the end.
    """
    call, here = f"save_checkpoint({final.name})", f"by rank {group.rank} of the group"
    seen = gather_objects(group, call, contents.digests, fault)
    save = _Save(group, final, contents)
    try:
        fault = caught(f"{final} could not be begun {here}", save.begin, seen)
        plans = gather_objects(group, call, save.plan, fault)
        fault = caught(f"{final} could not be written {here}", save.write, plans)
        parts = gather_objects(group, call, (save.written, save.writer.files), fault)
        fault = caught(f"{final} could not be finished", save.finish, parts) if save.first else None
        gather_objects(group, call, None, fault)
    except BaseException:
        if save.begun:
            shutil.rmtree(save.aside, ignore_errors=True)
        raise
    finally:
        save.turn.give_back()
    return final


class _Save:
    """One save on one rank."""

    tensors: dict[str, Held]
    scalars: dict[str, Any]
    planner: DefaultSavePlanner
    plan: SavePlan | None = None
    metadata: Metadata

    def __init__(self, group: RankGroup, final: Path, contents: Contents) -> None:
        self.rank, self.first = group.rank, group.rank == 0
        self.final, self.aside, self.contents = final, aside_of(final), contents
        self.writer = BlockWriter(self.aside)
        self.written: list[Any] = []
        self.turn, self.begun = Turn(), False

    def begin(self, digests: list[dict[str, str]]) -> None:
        assert self.contents.state is not None
        self.tensors, self.scalars = _spread(self.contents.state, digests)
        stored = {key: held.stored() for key, held in self.tensors.items()}
        self.planner, self.plan = plan_part(stored, self.writer, self.first)
        if self.first:
            self.turn.take(self.final.parent)
            require_replaceable(self.final)
            self.begun = True
            open_aside(self.final)

    def write(self, plans: list[Any]) -> None:
        merged, self.metadata = merge_plans(self.planner, self.writer, plans)
        self.written += self.writer.write_data(self.planner.finish_plan(merged[self.rank]), self.planner).wait()

    def finish(self, parts: list[Any]) -> None:
        """On the first rank: what stands beside the tensors, and the name."""
        contents, held = self.contents, self.contents.state
        assert held is not None and contents.manifest is not None
        state = make_state(
            contents.step, self.tensors, layout=held.layout, tables=held.tables, ties=held.ties, scalars=self.scalars,
            extra=contents.extra, optimizer=contents.optimizer,
        )  # fmt: skip
        specs = {key: TensorSpec(dtype, tuple(shape)) for key, (dtype, shape) in state["tensors"].items()}
        contract = CheckpointContract.of(held.shard.layout, specs, contents.step)
        self.writer.finish(self.metadata, [results for results, _ in parts])
        files = {name: about for _, part in parts for name, about in part.items()} | self.writer.files
        files |= write_extras(self.aside, dataclasses.replace(contents.manifest, checkpoint=contract), None)
        if contents.identity is not None:
            contents.identity.write(self.aside / VOCABULARY)
            files[VOCABULARY] = described(self.aside / VOCABULARY)
        commit(self.aside, self.final, {**state, "files": files})
        try:
            prune(self.final.parent, contents.keep, self.final)
        except OSError as error:  # the checkpoint itself is there
            warnings.warn(f"older checkpoints could not be removed: {error}", stacklevel=2)


def require_count(name: str, value: object, least: int) -> None:
    """Raises unless it is a whole number."""
    if type(value) is not int or not least <= value < 2**63:
        raise CheckpointLayoutError(f"{name}={value!r}: expected an int, at least {least}")


def _digests(state: ModelState) -> dict[str, str]:
    """A hash of each value that may be another one on each rank."""
    found = {}
    for key in sorted(state.loose):
        value = state.scalars[key] if key in state.scalars else state.tensors[key].local
        content = repr(value).encode()
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            content = repr((value.dtype, value.shape)).encode() + bytes(flat.view(torch.uint8).tolist())
        found[key] = hashlib.sha256(content).hexdigest()
    return found


def _spread(state: ModelState, digests: list[dict[str, str]]) -> tuple[dict[str, Held], dict[str, Any]]:
    """Tensors and numbers, with those that differ between ranks as rows of one tensor `[tp_size, ...]`."""
    for rank, one in enumerate(digests):
        if odd := sorted(set(one) ^ set(digests[0])):
            raise CheckpointLayoutError(
                f"rank 0 and rank {rank} hold different optimizer states ({', '.join(odd[:4])}): only one of them has "
                "made a step, or they have other optimizers"
            )
    tensors, scalars = dict(state.tensors), dict(state.scalars)
    for key in state.loose:
        if all(one[key] == digests[0][key] for one in digests):
            continue
        value: Any = scalars.pop(key) if key in scalars else tensors.pop(key).local
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        tensors[key + SHARDS] = Held(value[None], state.shard.rank, state.shard.tp_size)
    return tensors, scalars
