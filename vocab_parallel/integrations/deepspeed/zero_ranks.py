"""What the ZeRO files of one tensor-parallel rank hold: elements of parameters, found in flat buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.checkpoint.exchange.opaque import MappedFiles, load_plain
from vocab_parallel.errors import CheckpointLayoutError

State = str | None  # a name; None: the master weights

_FLAT_3, _FLAT_2 = "fp32_flat_groups", "single_partition_of_fp32_groups"  # the masters of stage 3, and of 1 and 2
_OPTIMIZER = "optimizer_state_dict"
_FEW = 2**20


@dataclass(frozen=True)
class Flat:
    """A tensor in a file, as [numel].

    Attributes:
        at: Keys that lead to it.
    """

    file: Path
    at: tuple[str | int, ...]
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, file: Path, at: tuple[str | int, ...], value: Tensor) -> Flat:
        """Where a tensor of a file is.

        Raises:
            CheckpointLayoutError: It repeats few numbers to far more than the file has.
        """
        if value.numel() > _FEW and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointLayoutError(f"{file} says that {at[-1]} has {value.numel()} numbers, more than it holds")
        return cls(file, at, value.numel(), value.dtype)


@dataclass(frozen=True)
class Run:
    """Elements `[first, first + count)` of one tensor-parallel rank's parameter, which lie at `start` of a tensor."""

    first: int
    count: int
    flat: Flat
    start: int


@dataclass(frozen=True)
class Group:
    """The flat buffers of one group of parameters on one data-parallel rank.

    Attributes:
        flats: Masters and elementwise states.
        numbers: What else is in the state.
    """

    flats: Mapping[State, Flat]
    numbers: Mapping[str, float]


@dataclass
class RankFiles:
    """What the files of one tensor-parallel rank hold.

    Attributes:
        stage: 3; or 2, which 1 cannot be told from here.
        dtypes: Of parameters, under all their names.
        shapes: Of parameters on this rank.
        trained: Names of those that the optimizer updates.
        buffers: All else in the model's state.
        weights: Where a parameter is stored in the model's own dtype.
        states: Where the masters and the elementwise states are, by parameter.
        numbers: Other values of the optimizer's state, by parameter.
    """

    stage: int = 2
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, list[Run]] = field(default_factory=dict)
    states: dict[str, dict[State, list[Run]]] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, name: str, first: int, start: int, count: int, group: Group) -> None:
        """Notes that elements from `first` on of a parameter lie at `start` in a group's flat buffers."""
        for state, flat in group.flats.items():
            if not 0 <= start <= start + count <= flat.numel:
                raise CheckpointLayoutError(f"{name} would lie outside of its partition of {flat.numel} elements")
            runs = self.states.setdefault(name, {}).setdefault(state, [])
            if count:
                runs.append(Run(first, count, flat, start))
        if count:
            self.numbers.setdefault(name, {}).update(group.numbers)


def read_rank(models: Sequence[Path], optimizers: Sequence[Path]) -> RankFiles:
    """Finds every parameter in the files of a tensor-parallel rank; holds none of their tensors but buffers.

    Args:
        models: Of the data-parallel ranks under stage 3, else one.
        optimizers: Of the data-parallel ranks, in order.

    Raises:
        CheckpointLayoutError: They are of another format, or do not fit together.
    """
    found, folder = RankFiles(), models[0].parent
    try:
        shapes = _read_model(found, models[0])
        for rank, path in enumerate(optimizers):
            content = load_plain(path)[_OPTIMIZER]
            if _FLAT_3 in content:
                found.stage = 3
                _add_stage_3(found, shapes, content, path, rank, len(optimizers))
            else:
                _add_stage_2(found, content, path)
        if found.stage == 3:
            found.weights.clear()  # their parameters are empty in the model's state
            for rank, path in enumerate(models):
                _add_frozen(found, load_plain(path), path, rank, len(models))
    except CheckpointLayoutError as error:
        raise CheckpointLayoutError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError) as error:
        names = ", ".join(path.name for path in (*models, *optimizers)[:4])
        raise CheckpointLayoutError(
            f"{folder}: {names} are not as DeepSpeed 0.19 saves stages 1, 2 and 3 ({type(error).__name__}: {error}). "
            "Load them in the job that saved them and save them again with 0.19, without NVMe offload and without "
            "elastic_checkpoint"
        ) from error
    return found


def _read_model(found: RankFiles, path: Path) -> list[dict[str, torch.Size]]:
    """The model's state, in the first data-parallel rank's file; returns the trained parameters' shapes by group."""
    model = load_plain(path)
    shapes = [{str(name): torch.Size(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    for group in (*shapes, model.get("frozen_param_shapes") or {}):
        found.shapes |= {name: torch.Size(shape) for name, shape in group.items()}
    found.trained = {name for group in shapes for name in group}
    buffers = set(model.get("buffer_names") or ())
    for name, value in model["module"].items():
        if not isinstance(value, Tensor):
            continue
        flat = Flat.of(path, ("module", name), value)
        if name in buffers:
            found.buffers[name] = value.clone()
            continue
        found.dtypes[name] = value.dtype
        if not path.name.startswith("zero_"):  # stage 1 does not list the shapes of frozen ones
            found.shapes.setdefault(name, value.shape)
        found.weights[name] = [Run(0, flat.numel, flat, 0)]
    return shapes


def _add_stage_2(found: RankFiles, optimizer: Mapping[str, Any], path: Path) -> None:
    """One data-parallel rank's partition of each group, in which the file names each parameter's fragment."""
    states = _states(optimizer, "base_optimizer_state")
    masters = zip(optimizer[_FLAT_2], optimizer["param_slice_mappings"], optimizer["group_paddings"], strict=True)
    for index, (flat, fragments, padding) in enumerate(masters):
        group = _group(path, flat, (_FLAT_2, index), *states[index], padding=int(padding))
        for name, at in fragments.items():
            before = sum(run.count for run in found.states.get(name, {}).get(None, []))
            found.add(name, before, int(at.start), int(at.numel), group)


def _add_stage_3(
    found: RankFiles, shapes: list[dict[str, torch.Size]], optimizer: Mapping[str, Any], path: Path, rank: int,
    dp_size: int,
) -> None:  # fmt: skip
    """One data-parallel rank's equal part of every parameter, one after another in the groups' order."""
    partitions = optimizer.get("ds_zero_partition_groups") or []
    if any(one.get("partition_count", dp_size) != dp_size for one in partitions):
        raise CheckpointLayoutError("parameters are partitioned over some of the data-parallel ranks only (hpZ, MiCS)")
    states = _states(optimizer, _OPTIMIZER)
    for index, (flat, group_shapes) in enumerate(zip(optimizer[_FLAT_3], shapes, strict=True)):
        group, start = _group(path, flat, (_FLAT_3, index), *states[index]), 0
        for name, shape in group_shapes.items():
            numel = math.prod(shape)
            share = -(-numel // dp_size)
            found.add(name, rank * share, start, max(0, min(share, numel - rank * share)), group)
            start += share
        if start != flat.numel():
            raise CheckpointLayoutError(f"group {index} has {flat.numel()} elements, its parameters take {start}")


def _add_frozen(found: RankFiles, model: Mapping[str, Any], path: Path, rank: int, dp_size: int) -> None:
    """Under stage 3 frozen parameters are cut like trained ones, but stored beside the model."""
    for name, values in (model.get("frozen_param_fragments") or {}).items():
        numel = found.shapes[name].numel()
        share = -(-numel // dp_size)
        flat = Flat.of(path, ("frozen_param_fragments", name), values)
        count = max(0, min(share, numel - rank * share))
        found.weights.setdefault(name, []).append(Run(rank * share, count, flat, 0))


def _states(optimizer: Mapping[str, Any], key: str) -> list[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """The base optimizer's state of each group, and where it is: DeepSpeed gives it one flat parameter a group."""
    base = optimizer[key]
    states: list[tuple[tuple[str | int, ...], Mapping[str, Any]]] = []
    for group in base["param_groups"]:
        for parameter in group["params"]:
            state = dict(base["state"].get(parameter, {}))
            if state and "step" in group:
                state.setdefault("step", group["step"])
            states.append(((key, "state", parameter), state))
    return states


def _group(
    path: Path, master: Tensor, master_at: tuple[str | int, ...], at: tuple[str | int, ...], state: Mapping[str, Any],
    *, padding: int = 0,
) -> Group:  # fmt: skip
    """The buffers of a group; stages 1 and 2 store some of them without the `padding` at their end, some with it."""
    flats: dict[State, Flat] = {None: Flat.of(path, (_OPTIMIZER, *master_at), master)}
    numbers: dict[str, float] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and abs(value.numel() - master.numel()) in (0, padding):
            flats[name] = Flat.of(path, (_OPTIMIZER, *at, name), value)
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[name] = float(value) if isinstance(value, Tensor) else value
            if not abs(numbers[name]) < 1e300:
                raise CheckpointLayoutError(f"the optimizer's state {name} is {numbers[name]}, expected a number")
        elif value is not None:
            raise CheckpointLayoutError(f"the optimizer's state {name} has not one value for each element of a weight")
    return Group(flats, numbers)


def read_runs(files: MappedFiles, runs: Sequence[Run], start: int, out: Tensor) -> None:  # out: [n]
    """Fills `out` with elements of a parameter, from `start` on."""
    for run in runs:
        low, high = max(start, run.first), min(start + len(out), run.first + run.count)
        if low < high:
            files.read_into(out[low - start : high - start], run.flat.file, run.flat.at, run.start + low - run.first)


def covers(runs: Sequence[Run], numel: int) -> bool:
    """Whether the runs are all of a parameter, in order and once."""
    at = 0
    for run in runs:
        if run.first != at and run.count:
            return False
        at += run.count
    return at == numel and all(run.start + run.count <= run.flat.numel for run in runs)
