"""All ranks' files of a ZeRO checkpoint as whole tensors, read by rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.checkpoint.exchange.opaque import MappedFiles, load_plain
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed.notes import LAYOUT_FILE
from vocab_parallel.integrations.deepspeed.zero_ranks import RankFiles, Run, State, covers, read_rank, read_runs
from vocab_parallel.integrations.deepspeed.zero_tag import MOST_RANKS, read_layout

_INFO = "universal_checkpoint_info"


@dataclass(frozen=True)
class Cut:
    """A tensor in pieces.

    Attributes:
        shape: Of the whole, real rows only.
        dtype: That its rows are given in.
        local: Shape on each tensor-parallel rank.
        dim: That it is cut over; None where all ranks have the same.
        runs: Of each tensor-parallel rank.
        files: To read them with.
    """

    shape: torch.Size
    dtype: torch.dtype
    local: torch.Size
    dim: int | None
    runs: Sequence[Sequence[Run]]
    files: MappedFiles

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows `[start, stop)` of the whole, [stop - start, ...]; a 0-dimensional tensor is one row."""
        width, count = math.prod(self.local[1:]), self.local[0] if self.local else 1
        if self.dim == 1:
            sides = [self._elements(runs, start * width, stop * width) for runs in self.runs]
            return torch.cat([side.view(-1, *self.local[1:]) for side in sides], dim=1).to(self.dtype)
        made = torch.empty((stop - start) * width, dtype=self.runs[0][0].flat.dtype)
        for rank, runs in enumerate(self.runs):
            low, high = max(start - rank * count, 0), min(stop - rank * count, count)
            if low < high:
                place = (low + rank * count - start) * width
                read_runs(self.files, runs, low * width, made[place : place + (high - low) * width])
        return made.view(-1, *self.local[1:]).to(self.dtype)

    def _elements(self, runs: Sequence[Run], start: int, stop: int) -> Tensor:
        made = torch.empty(stop - start, dtype=runs[0].flat.dtype)
        read_runs(self.files, runs, start, made)
        return made


@dataclass
class ZeroFiles:
    """All ranks' files of one tag.

    Attributes:
        tables: Parameters over the vocabulary, as `vocab_parallel.json` describes them.
        aliases: Further names of tied parameters to the first.
        model: Of the first rank, without its tensors.
        ranks: By tensor-parallel rank.
    """

    folder: Path
    tables: Mapping[str, Mapping[str, Any]]
    aliases: dict[str, str]
    model: Mapping[str, Any]
    dp_size: int
    ranks: list[RankFiles]
    files: MappedFiles = field(default_factory=MappedFiles)

    @classmethod
    def open(cls, folder: Path) -> ZeroFiles:
        """Notes where in the files everything is.

        Raises:
            CheckpointLayoutError: Files are missing, or do not fit together.
        """
        tables, aliases = read_layout(folder)
        tp_size = int(next(iter(tables.values()))["tp_size"])
        by_rank = not (folder / _model_name(0)).is_file()  # as stage 3 saves it
        name = _model_name(0, 0 if by_rank else None)
        model = _dictionary(folder / name)
        dp_size = _count(model, "dp_world_size", folder / name)
        if dp_size * tp_size > MOST_RANKS:
            raise CheckpointLayoutError(f"{folder / name} says {dp_size} x {tp_size} ranks, more than any job has")
        if _count(model, "mp_world_size", folder / name) != tp_size:
            raise CheckpointLayoutError(
                f"{folder / name} was saved by {model['mp_world_size']} tensor-parallel ranks, {LAYOUT_FILE} beside it "
                f"says {tp_size}: files of two checkpoints lie in one folder. Save it again into an empty one"
            )
        models = [
            [_model_name(t, d if by_rank else None) for d in range(dp_size if by_rank else 1)] for t in range(tp_size)
        ]
        states = [_state_names(model, t, dp_size) for t in range(tp_size)]
        _require(folder, [name for names in (*models, *states) for name in names], dp_size, tp_size, model)
        ranks = [
            read_rank([folder / name for name in models[t]], [folder / name for name in states[t]])
            for t in range(tp_size)
        ]
        return cls(folder, tables, aliases, model, dp_size, ranks)

    @property
    def vocab_size(self) -> int:
        return int(next(iter(self.tables.values()))["vocab_size"])

    @property
    def step(self) -> int:
        """Optimizer steps of the engine."""
        found = self.model.get("global_steps")
        return found if type(found) is int and 0 <= found < 2**62 else 0

    @cached_property
    def names(self) -> list[str]:
        """All parameters, in the model's order, each once."""
        first = self.ranks[0]
        names = [name for name in first.dtypes if name not in self.aliases]
        missing = [name for name in (*self.tables, *first.states) if name not in names]
        missing += [name for name in names if name not in first.shapes]
        if missing:
            raise CheckpointLayoutError(
                f"{self.folder} holds no weight of {', '.join(missing)}. Save it without exclude_frozen_parameters"
            )
        return names

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers, which all ranks have."""
        return {name: value for name, value in self.ranks[0].buffers.items() if name not in self.aliases}

    def weight(self, name: str) -> Cut:
        """A parameter in the model's dtype."""
        runs = [rank.weights.get(name) or rank.states.get(name, {}).get(None, []) for rank in self.ranks]
        return self._cut(name, runs, self.ranks[0].dtypes[name])

    def states(self, name: str) -> dict[State, Cut]:
        """The master weight (None) and the elementwise optimizer states of a parameter; none of a frozen one."""
        found: dict[State, Cut] = {}
        of_trained: dict[State, list[Run]] = {None: []} if name in self.ranks[0].trained else {}
        for state, runs in (self.ranks[0].states.get(name) or of_trained).items():
            every = [runs, *(rank.states.get(name, {}).get(state, []) for rank in self.ranks[1:])]
            found[state] = self._cut(name, every, next((run.flat.dtype for run in runs), torch.float32))
        return found

    def numbers(self, name: str) -> dict[str, float]:
        """What else the optimizer keeps of a parameter, such as `step`."""
        return self.ranks[0].numbers.get(name, {})

    def origin(self) -> dict[str, Any]:
        """Where a converted checkpoint is from, as JSON values."""
        return {
            "zero_stage": 3 if self.ranks[0].stage == 3 else _stage_of(self.model) or 2,
            "dp_size": self.dp_size,
            "tp_size": len(self.ranks),
            "padded_size": next(iter(self.tables.values()))["padded_size"],
            "version": str(self.model.get("ds_version")),
        }

    def _cut(self, name: str, runs: list[list[Run]], dtype: torch.dtype) -> Cut:
        local = self.ranks[0].shapes[name]
        for rank, found in enumerate(runs):
            if self.ranks[rank].shapes.get(name) != local or not covers(found, local.numel()):
                raise CheckpointLayoutError(
                    f"{self.folder}: the files do not hold all {local.numel()} elements of {name} {list(local)} on "
                    f"tensor-parallel rank {rank}: they are of different saves, or of another DeepSpeed than 0.19"
                )
        dim, shape = self._whole(name, local, runs)
        return Cut(shape, dtype, local, dim, runs if dim is not None else runs[:1], self.files)

    def _whole(self, name: str, local: torch.Size, runs: list[list[Run]]) -> tuple[int | None, torch.Size]:
        """The dimension that a parameter is cut over, and its whole shape."""
        size = len(self.ranks)
        if name in self.tables:
            entry = self.tables[name]
            if local[0] * size != entry["padded_size"] or list(local[1:]) != entry["row"]:
                raise CheckpointLayoutError(
                    f"{self.folder}: {name} is {list(local)} on each of {size} ranks, {LAYOUT_FILE} says "
                    f"{entry['padded_size']} rows of {entry['row']} in all: files of two checkpoints lie in one folder"
                )
            return 0, torch.Size([entry["vocab_size"], *local[1:]])
        info = self.model.get(_INFO)
        info = info if isinstance(info, dict) else {}
        pattern = rf"^{re.escape(name)}$"
        if size == 1 or pattern in info.get("tp_replicated_parameter_patterns", ()):
            return None, local
        if name not in self.ranks[0].trained:
            self._check_frozen(name, runs)
            return None, local
        dim = 1 if pattern in info.get("parameter_with_row_parallelism_patterns", ()) else 0
        return dim, torch.Size([n * size if at == dim else n for at, n in enumerate(local)])

    def _check_frozen(self, name: str, runs: list[list[Run]]) -> None:
        """Nothing notes whether a frozen parameter is cut: it is not where all ranks have the same."""
        numel, block = self.ranks[0].shapes[name].numel(), 2**20
        for start in range(0, numel, block):
            parts = [torch.empty(min(block, numel - start), dtype=one[0].flat.dtype) for one in runs]
            for part, one in zip(parts, runs, strict=True):
                read_runs(self.files, one, start, part)
            if not all(torch.equal(parts[0], other) for other in parts[1:]):
                raise CheckpointLayoutError(
                    f"{self.folder}: the frozen parameter {name} differs between tensor-parallel ranks, and DeepSpeed "
                    "does not note how it is cut. Have it require gradients while it is saved"
                )


def _model_name(tp_rank: int, dp_rank: int | None = None) -> str:
    sharded = "" if dp_rank is None else f"zero_pp_rank_{dp_rank}_"
    return f"{sharded}mp_rank_{tp_rank:02d}_model_states.pt"


def _state_names(model: Mapping[str, Any], tp_rank: int, dp_size: int) -> list[str]:
    config = model.get("ds_config")
    bfloat16 = config.get("bf16", {}) if isinstance(config, dict) else {}
    prefix = "bf16_" if isinstance(bfloat16, dict) and bfloat16.get("enabled") else ""
    return [f"{prefix}zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}_optim_states.pt" for rank in range(dp_size)]


def _require(folder: Path, names: list[str], dp_size: int, tp_size: int, model: Mapping[str, Any]) -> None:
    if _stage_of(model) == 0:
        raise CheckpointLayoutError(
            f"{folder} is of ZeRO stage 0, whose optimizer state is by position and not by name. Save such an engine "
            "with vocab_parallel.checkpoint.save_checkpoint, or its weights with "
            "vocab_parallel.integrations.deepspeed.export"
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise CheckpointLayoutError(
            f"{folder} was saved by {dp_size} data-parallel x {tp_size} tensor-parallel ranks; of their {len(names)} "
            f"files {len(missing)} are missing: {', '.join(missing[:4])}{more}. Copy them from the nodes that wrote "
            "them"
        )


def _stage_of(model: Mapping[str, Any]) -> int | None:
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if isinstance(stage, int) else None


def _dictionary(path: Path) -> dict[str, Any]:
    """What a model's file says, without its tensors."""
    value = load_plain(path)
    if not isinstance(value, dict):
        raise CheckpointLayoutError(f"{path} holds a {type(value).__name__}, expected a dictionary of DeepSpeed")
    return {key: one for key, one in value.items() if key not in ("module", "optimizer", "frozen_param_fragments")}


def _count(model: Mapping[str, Any], name: str, path: Path) -> int:
    value = model.get(name)
    if type(value) is not int or not 0 < value < MOST_RANKS:
        raise CheckpointLayoutError(f"{path} says {name} {value!r}, expected a number of ranks")
    return value
