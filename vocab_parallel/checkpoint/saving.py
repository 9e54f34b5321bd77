"""The ranks of a job write one checkpoint: each its rows, what is replicated once, and all of it or nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vocab_parallel.checkpoint.folders import prune
from vocab_parallel.checkpoint.states import SHARDS, Held, ModelState, collect
from vocab_parallel.checkpoint.together import caught, gather_objects
from vocab_parallel.checkpoint.writing import (
    BlockWriter,
    commit,
    described,
    dtype_name,
    json_bytes,
    make_state,
    merge_plans,
    open_aside,
    plan_part,
    write_extras,
)
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import RankGroup
from vocab_parallel.vocabulary.manifest import CheckpointContract, Manifest, TensorSpec

if TYPE_CHECKING:
    from vocab_parallel.vocabulary.identity import VocabIdentity

VOCABULARY = "vocabulary.json"


@dataclass
class Contents:
    """What this rank gives to a checkpoint."""

    step: int
    state: ModelState | None = None  # None: collecting it has failed
    extra: Mapping[str, Any] = field(default_factory=dict)
    manifest: Manifest | None = None
    identity: VocabIdentity | None = None

    def fill(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, staged: bool) -> None:
        """Looks at model and optimizer; `staged` copies what they hold, so that they may change.

        Raises:
            CheckpointLayoutError: Something cannot be saved.
        """
        json_bytes(dict(self.extra))
        state = collect(model, optimizer)
        if self.manifest is None:
            self.manifest = Manifest.of(model, identity=self.identity)
        if staged:
            state.tensors = {key: held.staged() for key, held in state.tensors.items()}
            state.homes.clear()
        self.state = state


def save_together(
    group: RankGroup, final: Path, contents: Contents, fault: Exception | None = None, keep: int | None = None
) -> Path:
    """Writes the folder `final`; every rank of the group calls it, with an error of its own if it has one.

    With `keep`, older checkpoints beside it go when it is there.

    Raises:
        VocabParallelError: On every rank, what went wrong on any: nothing of the checkpoint stays, and one of the same
            name that was there before does.

    Collectives:
        Four rounds of `gather_objects`: values that may differ, plans, what was written, the end.
    """
    call, first = f"save_checkpoint({final.name})", group.rank == 0
    digests = {} if contents.state is None else _digests(contents.state)
    seen = gather_objects(group, call, digests, fault)
    assert contents.state is not None
    tensors, scalars = _spread(contents.state, seen)
    aside = final.parent / f".{final.name}.partial"
    writer = BlockWriter(aside)
    try:
        fault = caught(f"{final} could not be begun", open_aside, final) if first else None
        planner, plan = plan_part({key: held.stored() for key, held in tensors.items()}, writer, first)
        plans, metadata = merge_plans(planner, writer, gather_objects(group, call, plan, fault))
        written: list[Any] = []
        what = f"{final} could not be written by rank {group.rank} of the group"
        fault = caught(what, lambda: written.extend(writer.write_data(planner.finish_plan(plans[group.rank]), planner)
                                                    .wait()))  # fmt: skip
        parts = gather_objects(group, call, (written, writer.files), fault)

        def finish() -> None:
            writer.finish(metadata, [results for results, _ in parts])
            files = {name: about for _, part in parts for name, about in part.items()} | writer.files
            state = _state(contents, tensors, scalars)
            files |= write_extras(aside, _manifest(contents, tensors), None)
            if contents.identity is not None:
                contents.identity.write(aside / VOCABULARY)
                files[VOCABULARY] = described(aside / VOCABULARY)
            commit(aside, final, {**state, "files": files})
            if keep is not None:
                prune(final.parent, keep)

        fault = caught(f"{final} could not be finished", finish) if first else None
        gather_objects(group, call, None, fault)
    except BaseException:
        if first:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return final


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


def _state(contents: Contents, tensors: Mapping[str, Held], scalars: Mapping[str, Any]) -> dict[str, Any]:
    state = contents.state
    assert state is not None
    made = make_state(
        contents.step, {}, layout=state.layout, tables=state.tables, ties=state.ties, scalars=scalars,
        extra=contents.extra,
    )  # fmt: skip
    return made | {"tensors": {key: [dtype_name(held.local.dtype), held.shape] for key, held in tensors.items()}}


def _manifest(contents: Contents, tensors: Mapping[str, Held]) -> Manifest | None:
    """The manifest with what the files hold."""
    if contents.manifest is None or contents.state is None:
        return contents.manifest
    made = contents.state.layout
    layout = VocabLayout.from_padded(made["vocab_size"], made["padded_size"], made["tp_size"])
    specs = {key: TensorSpec(dtype_name(held.local.dtype), tuple(held.shape)) for key, held in tensors.items()}
    return dataclasses.replace(contents.manifest, checkpoint=CheckpointContract.of(layout, specs, contents.step))
