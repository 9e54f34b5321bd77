"""What a model and its optimizer hold on this rank, by the keys of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters
from vocab_parallel.vocabulary.manifest.describing import persistent_buffers, plain_name, shard_of
from vocab_parallel.vocabulary.row_states import is_row_state

SHARDS = "@shards"  # ends the key of a value of a table that is another one on each rank: stored as [tp_size, ...]

Number = bool | int | float


@dataclass(frozen=True)
class Held:
    """This rank's part of a tensor.

    Attributes:
        local: Rows `[first, first + len(local))` of the whole; with `first` None all of it, the same on every rank.
        total: Rows of the whole.
        padding: Rows past the real ones of this rank's storage, which no file has.
    """

    local: Tensor
    first: int | None = None
    total: int = 0
    padding: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def shape(self) -> list[int]:
        """Of the whole."""
        return list(self.local.shape) if self.first is None else [self.total, *self.local.shape[1:]]

    def stored(self) -> Tensor:
        """As `torch.distributed.checkpoint` saves it, and loads into it."""
        return self.local if self.first is None else Rows.of(self.local, self.first, self.total)

    def staged(self) -> Held:
        """A copy in the CPU's memory, without padding. Of a DTensor that is cut over columns: where it is."""
        if isinstance(self.local, DTensor):
            return dataclasses.replace(self, local=self.local.detach().clone(), padding=None)
        copy = torch.empty(self.local.shape, dtype=self.local.dtype, device="cpu").copy_(self.local)
        return dataclasses.replace(self, local=copy, padding=None)


@dataclass
class ModelState:
    """All that a checkpoint of a model keeps.

    Attributes:
        tensors: By key: `model.<name>`, `optimizer.<name>.<state>`; a tied weight once, under its first name.
        scalars: Values of the optimizer's state that are no tensors, by key.
        owners: The parameter or buffer that each key is of.
        homes: The dictionary that holds each value of the optimizer's state, and its name there.
        tables: Names of the parameters over the vocabulary.
        ties: Further name to first name.
        loose: Keys whose values belong to a table, have no rows, and so may be other ones on each rank.
    """

    shard: VocabShard
    tensors: dict[str, Held] = field(default_factory=dict)
    scalars: dict[str, Number] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    homes: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    ties: dict[str, str] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)

    @property
    def layout(self) -> dict[str, int]:
        made = self.shard.layout
        return {"vocab_size": made.vocab_size, "padded_size": made.padded_size, "tp_size": made.tp_size}

    def add(self, key: str, owner: str, held: Held) -> None:
        self.tensors[key], self.owners[key] = held, owner


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ModelState:
    """This rank's part of all that is kept; views of the parameters, nothing is copied.

    Works on plain parameters and on DTensors (FSDP2), the vocabulary's sharded over data-parallel ranks too.

    Raises:
        CheckpointLayoutError: There is nothing over the vocabulary; a parameter has no memory (meta device); the
            optimizer's state has a value that is neither tensor nor number, or is of a Parameter of another model.
    """
    tables = {id(p): shard for p, shard in vocab_parameters(model).values()}
    found = ModelState(shard_of(model))
    names: dict[int, str] = {}
    for raw, parameter in model.named_parameters():
        name = names[id(parameter)] = plain_name(raw)
        if parameter.is_meta:
            raise CheckpointLayoutError(f"{name} is on the meta device: it holds nothing yet, call to_empty() first")
        shard = tables.get(id(parameter))
        found.add(f"model.{name}", name, _held(parameter, shard))
        if shard is not None:
            found.tables.append(name)
    for raw, parameter in model.named_parameters(remove_duplicate=False):
        if names[id(parameter)] != plain_name(raw):
            found.ties[plain_name(raw)] = names[id(parameter)]
    for name, buffer in persistent_buffers(model):
        found.add(f"model.{name}", name, _held(buffer, None))
    if optimizer is not None:
        for owner, values in optimizer.state.items():
            if id(owner) not in names:
                what = f"a Parameter {list(owner.shape)}" if hasattr(owner, "shape") else repr(owner)
                raise CheckpointLayoutError(
                    f"the optimizer keeps a state of {what} that the model does not have: it was built before the "
                    "model was converted or tied. Build it after that"
                )
            _add_states(found, names[id(owner)], owner, values, tables.get(id(owner)))
    return found


def _add_states(
    found: ModelState, owner: str, parameter: Tensor, values: Mapping[str, Any], shard: VocabShard | None
) -> None:
    """The optimizer's values of one parameter."""
    if not isinstance(values, dict):
        raise CheckpointLayoutError(f"the optimizer's state of {owner} is a {type(values).__name__}, expected a dict")
    for name, value in values.items():
        key = f"optimizer.{owner}.{name}"
        if value is None:
            continue
        found.homes[key] = values, name
        of_rows = isinstance(value, Tensor) and is_row_state(name, value.shape, parameter.shape)
        if shard is not None and not of_rows:
            found.loose.add(key)
        if isinstance(value, Tensor):
            found.add(key, owner, _held(value, shard if of_rows else None))
        elif isinstance(value, Number) and abs(value) < 2**63:  # neither infinite nor NaN
            found.scalars[key], found.owners[key] = value, owner
        else:
            raise CheckpointLayoutError(
                f"{key} is a {type(value).__name__} ({value!r:.80}): a checkpoint keeps tensors and finite numbers of "
                "an optimizer's state"
            )


def _held(value: Tensor, shard: VocabShard | None) -> Held:
    """A tensor that is sharded like the vocabulary, or in its own way."""
    value = value.detach()
    if shard is None and not isinstance(value, DTensor):
        return Held(value)
    local = value.to_local() if isinstance(value, DTensor) else value
    if shard is not None:
        first = shard.rank * shard.shard_size + (_offset(value, shard) if isinstance(value, DTensor) else 0)
        count = max(0, min(len(local), shard.stop - first))
        return Held(local[:count], first if count else shard.vocab_size, shard.vocab_size, local[count:])
    assert isinstance(value, DTensor)
    if any(placement.is_partial() for placement in value.placements):
        raise CheckpointLayoutError(f"a DTensor {list(value.shape)} is a sum that is still to be made over its ranks")
    if all(placement.is_replicate() for placement in value.placements):
        return Held(local)
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if list(local.shape[1:]) != list(value.shape[1:]):
        return Held(value)  # cut over columns: torch's own way of saving it
    return Held(local, int(offsets[0]) if len(local) else len(value), len(value))


def _offset(value: DTensor, shard: VocabShard) -> int:
    """Where this rank's rows begin within its tensor-parallel shard, which the data-parallel ranks share."""
    offset = 0
    for dim, placement in enumerate(value.placements[:-1]):  # the last is the tensor-parallel one
        if not placement.is_replicate():
            size = value.device_mesh.size(dim)
            offset += value.device_mesh.get_local_rank(dim) * -(-shard.shard_size // size)
    return offset
