"""What the requests of a policy carry from step to step, as one value that is saved, reordered and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import checksum
from vocab_parallel.decode.transforms.transform import row_index
from vocab_parallel.errors import ConfigError
from vocab_parallel.select.streams import Streams

VERSION = 1
_DTYPES = {"int64": torch.int64, "float64": torch.float64, "float32": torch.float32, "bool": torch.bool}

States = tuple[dict[str, Tensor], ...]  # of each transform, in their order; tensors with one row a request


@dataclass(frozen=True)
class PolicyState:
    """The state of T requests under one policy. A step gives the next one and leaves this one as it is.

    Attributes:
        streams: Their random numbers.
        states: What each transform keeps.
        origin: int64 `[T]`: which of the requests that the policy started with each row is. Per-row parameters follow.
        digest: Of the policy.
    """

    streams: Streams
    states: States
    origin: Tensor
    digest: str

    def __len__(self) -> int:
        return len(self.origin)

    def rows(self, index: Tensor | Sequence[int], *, children: Tensor | None = None) -> PolicyState:
        """The state of the rows `index`: a batch that lost or reordered rows, or beams by their parents.

        Args:
            index: Rows in the order wanted, or a bool for each row: those that stay.
            children: int64, for rows that are repeated: each one's number among its parent's, so that it gets a stream
                of its own (see `Streams.fork`). Without it copies of a row draw the same numbers.
        """
        index = row_index(index, self.streams.seeds.device)
        streams = self.streams.rows(index) if children is None else self.streams.fork(index, children)
        return PolicyState(streams, self._picked(index), self.origin[index.to(self.origin.device)], self.digest)

    def _picked(self, index: Tensor) -> States:
        return tuple({name: kept[index.to(kept.device)] for name, kept in state.items()} for state in self.states)

    def merged(self, index: Tensor, part: PolicyState) -> PolicyState:
        """This state with the rows `index` taken from `part`, whose rows they are."""
        streams = Streams(
            self.streams.seeds, self.streams.requests, _put(self.streams.draws, index, part.streams.draws)
        )
        states = tuple(
            {name: _put(mine[name], index, theirs[name]) for name in mine}
            for mine, theirs in zip(self.states, part.states, strict=True)
        )
        return PolicyState(streams, states, self.origin, self.digest)

    def checksum(self) -> Tensor:
        """int64 scalar: of everything, for comparing ranks."""
        device = self.streams.seeds.device
        tensors = [self.origin, *(state[name] for state in self.states for name in sorted(state))]
        words = torch.cat([_integers(one).reshape(-1).to(device) for one in tensors])
        return checksum(words) * 31 + self.streams.checksum()

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold, exact to the last bit; `from_state_dict` gives the same state back."""
        return {
            "version": VERSION,
            "policy": self.digest,
            "streams": self.streams.state_dict(),
            "origin": self.origin.tolist(),
            "states": [{name: _saved(kept) for name, kept in state.items()} for state in self.states],
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any], device: torch.device | str = "cpu") -> PolicyState:
        """The state of a `state_dict`.

        Raises:
            ConfigError: Of another version, with something missing, or with parts of different numbers of requests.
            ValueError: Streams that are none.
        """
        if saved.get("version") != VERSION:
            raise ConfigError(f"a policy's state of version {saved.get('version')!r}, this code reads {VERSION}")
        missing = [key for key in ("policy", "streams", "origin", "states") if key not in saved]
        if missing:
            raise ConfigError(f"a policy's state without {', '.join(missing)}: was the file cut off?")
        state = cls(
            Streams.from_state_dict(saved["streams"], device),
            tuple({name: _restored(kept, device) for name, kept in state.items()} for state in saved["states"]),
            torch.tensor(saved["origin"], dtype=torch.int64),
            saved["policy"],
        )
        counts = [len(state.streams), *(len(kept) for one in state.states for kept in one.values())]
        if any(count != len(state) for count in counts):
            raise ConfigError(f"a policy's state of {len(state)} requests holds parts of {counts}: was it edited?")
        return state


def _put(whole: Tensor, index: Tensor, part: Tensor) -> Tensor:
    return whole.index_copy(0, index.to(whole.device), part.to(whole.device, whole.dtype))


def _integers(kept: Tensor) -> Tensor:
    """The bits of a tensor as int64."""
    if kept.is_floating_point():
        kept = kept.contiguous().view(torch.int64 if kept.dtype == torch.float64 else torch.int32)
    return kept.to(torch.int64)


def _saved(kept: Tensor) -> dict[str, Any]:
    """A tensor by its bits: JSON has no infinities, and decimals need care."""
    name = str(kept.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(f"a policy's state holds {', '.join(_DTYPES)}, got {name}")
    return {"dtype": name, "shape": list(kept.shape), "bits": _integers(kept).reshape(-1).tolist()}


def _restored(saved: Mapping[str, Any], device: torch.device | str) -> Tensor:
    dtype = _DTYPES[saved["dtype"]]
    bits = torch.tensor(saved["bits"], dtype=torch.int64, device=device)
    if dtype.is_floating_point:
        bits = bits if dtype == torch.float64 else bits.to(torch.int32)
        return bits.view(dtype).reshape(saved["shape"])
    return bits.to(dtype).reshape(saved["shape"])
