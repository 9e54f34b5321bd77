"""A model and its optimizers, moved to another vocabulary in the middle of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import MeanOfSources, RowInit, without_sources
from vocab_parallel.vocabulary.migration.model_parts import Parts, find_parts, several, vocabulary_shard
from vocab_parallel.vocabulary.migration.moving import map_sha256, migrate
from vocab_parallel.vocabulary.ownership import Mark, guard_steps, mark_groups, mark_of, mark_replaced, set_mark


def migrate_model_(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    vocab_map: VocabMap,
    *,
    init: RowInit | None = None,
    layout: VocabLayout | None = None,
) -> MigrationReport:
    """Moves a model's embedding, head and bias, and the optimizer's state of them, to another vocabulary, in place.

    Each gets a new Parameter; ties stay one Parameter. The optimizer's groups hold the new ones in the places of the
    old, with their states: what is by row moves (moments, Adafactor's row factors, master weights), steps and column
    factors stay. New rows of moments are zero. Where there is a master weight, `init` makes its new rows, and the
    weight's are these, rounded. Gradients are dropped. The modules' `shard` becomes the new one, also where
    configurations repeat sizes and ids of special tokens they are corrected.

    From then on `verify_ownership(model, optimizer)`, which `verify_tied` calls, and the first step refuse another
    optimizer without the migrated state, or one that still holds the old Parameters, and this one refuses to load a
    state from before. What else holds the old shard or Parameters (a `PipelineTie`, an average of weights) is to be
    built anew.

    Args:
        model: With one vocabulary over one group of ranks. Not wrapped by data-parallel wrappers.
        optimizer: Every optimizer that holds a parameter of the vocabulary; None where there is none.
        vocab_map: The same on every rank.
        init: How new rows begin; by default `MeanOfSources()`.
        layout: The new layout over the same ranks; by default with the old one's `multiple_of`.

    Returns:
        What was done, with the new shard.

    Collectives:
        A 64-byte all-gather, the construction of a `VocabShard`, and those of `migrate`.

    Memory:
        New tensors beside the old ones until all have moved, and two blocks (see `migrate`).

    Raises:
        VocabularyError, LayoutError, TyingError, UngatheredWeightError, LayoutMismatchError, CheckpointLayoutError,
            NonFiniteError: On every rank, with nothing changed.
    """
    init = init or MeanOfSources()
    optimizers = several(optimizer)
    modules, src = vocabulary_shard(model)
    layout = layout or VocabLayout(vocab_map.new_size, src.tp_size, multiple_of=src.layout.multiple_of)
    found: list[Parts] = []
    fault = capture(lambda: found.append(find_parts(model, optimizers, vocab_map, layout, src)))
    words = f"migrate_model_({type(model).__name__}, to {layout}"
    if fault is None:
        words += f", {list(found[0].parameters)}, states {found[0].row_states}, {found[0].set_to()})"
    Exchange(src, "header", words, fault=fault, rows=0).wait()  # rows: the host waits for it
    parts = found[0]
    dst = VocabShard(layout, src.group, deferred_errors=src.deferred_errors)
    moved = _migrate_parts(parts, vocab_map, src, dst, init)
    sha256 = vocab_map.new_sha256 or _chained(mark_of(modules[0]), vocab_map)
    report = _report(parts, vocab_map, src.layout, dst, init, sha256)
    _swap(model, parts, moved, (src, dst), Mark(sha256, bool(parts.row_states or parts.other_states)))
    return report


@dataclass(frozen=True)
class MigrationReport:
    """What `migrate_model_` has done.

    Attributes:
        shard: The new shard, for whatever else is given one.
        parameters: Names of what has new rows.
        states: Those of the optimizers that moved, as "parameter.state".
        kept_states: Those that stayed as they were.
        alike: Names of other tensors of the model with as many rows or columns as the old vocabulary: as they were.
        without_sources: How many new rows began as the mean of all rows, because the map names no sources for them.
        settings: Attributes of modules and configurations that were corrected.
        sha256: What the optimizers' groups are marked with.
    """

    shard: VocabShard
    old_layout: VocabLayout
    new_layout: VocabLayout
    kept: int
    new: int
    dropped: int
    init: str
    without_sources: int
    parameters: tuple[str, ...]
    states: tuple[str, ...]
    kept_states: tuple[str, ...]
    alike: tuple[str, ...]
    settings: tuple[str, ...]
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold."""
        result = {name: value for name, value in vars(self).items() if name != "shard"}
        layouts = {name: str(result[name]) for name in ("old_layout", "new_layout")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in (result | layouts).items()}

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"{self.old_layout} -> {self.new_layout}",
            f"{self.kept} rows kept, {self.new} new ({self.init}), {self.dropped} dropped",
            f"moved: {', '.join((*self.parameters, *self.states))}",
        ]
        if self.without_sources:
            lines.append(f"{self.without_sources} new rows have no sources and began as the mean of all rows")
        if self.kept_states:
            lines.append(f"as they were: {', '.join(self.kept_states)}")
        if self.alike:
            lines.append(f"of the vocabulary's size, but no part of it, so as they were: {', '.join(self.alike)}")
        if self.settings:
            lines.append(f"corrected: {', '.join(self.settings)}")
        return lines


@torch.no_grad()
def _migrate_parts(
    parts: Parts, vocab_map: VocabMap, src: VocabShard, dst: VocabShard, init: RowInit
) -> dict[str, Tensor]:
    """New tensors by "parameter" and "parameter.state"."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in parts.parameters.items()}
    tensors |= {f"{name}.{key}": value for (name, key), value in parts.states().items()}
    masters = [f"{name}.{key}" for name, key in parts.masters]
    zero = [name for name in tensors if name not in parts.parameters and name not in masters]
    moved = migrate(tensors, vocab_map, src=src, dst=dst, init=init, zero=zero)
    new_ids = vocab_map.new_ids
    mine = new_ids[(new_ids >= dst.start) & (new_ids < dst.stop)] - dst.start
    for name, key in parts.masters:
        weight, master = moved[name], moved[f"{name}.{key}"]
        places = mine.to(weight.device)
        weight[places] = master[mine.to(master.device)].to(weight)
    return moved


def _swap(
    model: nn.Module, parts: Parts, moved: dict[str, Tensor], shards: tuple[VocabShard, VocabShard], mark: Mark
) -> None:
    """Puts the new tensors in the places of the old ones. Nothing here depends on what other ranks do."""
    fresh: dict[int, nn.Parameter] = {}
    for name, parameter in parts.parameters.items():
        new = nn.Parameter(moved[name], requires_grad=parameter.requires_grad)
        new.__dict__.update(parameter.__dict__)
        mark_replaced(parameter)
        fresh[id(parameter)] = new
    for module in model.modules():
        module._parameters.update({k: fresh[id(p)] for k, p in module._parameters.items() if id(p) in fresh})
        _replace_shard(module, *shards)
    for optimizer in parts.optimizers:
        _swap_states(optimizer, parts, fresh, moved)
        mark_groups(optimizer, {id(parameter) for parameter in fresh.values()}, mark.sha256)
    for holder, key, value in parts.settings:
        setattr(holder, key, value)
    for module in parts.modules:
        set_mark(module, mark)
    guard_steps(fresh.values(), mark)


def _swap_states(
    optimizer: torch.optim.Optimizer, parts: Parts, fresh: dict[int, nn.Parameter], moved: dict[str, Tensor]
) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [fresh.get(id(parameter), parameter) for parameter in group["params"]]
    names = {id(parameter): name for name, parameter in parts.parameters.items()}
    states = list(optimizer.state.items())
    optimizer.state.clear()
    for parameter, values in states:
        name = names.get(id(parameter))
        if name is not None:
            values = {key: moved.get(f"{name}.{key}", value) for key, value in values.items()}
        optimizer.state[fresh.get(id(parameter), parameter)] = values


def _replace_shard(module: nn.Module, src: VocabShard, dst: VocabShard) -> None:
    """Wherever a module, or something of this package that hangs on it, holds a shard of the old vocabulary."""

    def is_old(value: Any) -> bool:
        return isinstance(value, VocabShard) and value.layout == src.layout and value.group == src.group

    for key, value in module.__dict__.items():
        if is_old(value):
            module.__dict__[key] = dst
        elif type(value).__module__.startswith("vocab_parallel."):
            own = getattr(value, "__dict__", {})
            own.update({name: dst for name, one in own.items() if is_old(one)})


def _report(
    parts: Parts, vocab_map: VocabMap, old: VocabLayout, dst: VocabShard, init: RowInit, sha256: str
) -> MigrationReport:
    return MigrationReport(
        shard=dst,
        old_layout=old,
        new_layout=dst.layout,
        kept=vocab_map.kept,
        new=len(vocab_map.new_ids),
        dropped=len(vocab_map.dropped_ids),
        init=str(init),
        without_sources=without_sources(init, vocab_map),
        parameters=tuple(parts.parameters),
        states=tuple(f"{name}.{key}" for name, key in parts.row_states),
        kept_states=tuple(parts.other_states),
        alike=tuple(parts.alike),
        settings=tuple(parts.set_to()),
        sha256=sha256,
    )


def _chained(before: Mark | None, vocab_map: VocabMap) -> str:
    """Stands for the hash of an ordered table that nobody has given: that of the maps which led to it."""
    return hashlib.sha256(f"{before.sha256 if before else ''} {map_sha256(vocab_map)}".encode()).hexdigest()
