"""Hard constraints by a finite-state machine: what is legal follows from the ids that a request has emitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.history import Processor, check_ids
from vocab_parallel.decode.transforms.machine import StateMachine, advance, require_legal
from vocab_parallel.decode.transforms.transform import Choice, RowValue, View, row_values
from vocab_parallel.select.scores import Scores

__all__ = ["Fsm", "StateMachine", "advance"]


@dataclass(frozen=True, eq=False)
class Fsm(Processor):
    """Forbids the ids that are illegal in the request's state, and follows the ids that are emitted.

    The state is one number a row (a beam is a row), in the policy's state: the loop that owns the requests keeps it,
    saves it, and reorders it with the parents of beams. A row in a state without a legal id has no support at that
    step, and the policy's fallback decides.

    Args:
        machine: The machine, or the mapping that `StateMachine.from_dict` takes.
        start_state: Of new requests, or one for each (see `StateMachine.union`); None is the machine's.
        eos_ids: Ids that end a request: legal in accepting states, where they leave the state as it is, and in no
            other, whatever the machine's edges say (`.` is every other id).
    """

    name: ClassVar[str] = "fsm"
    hard: ClassVar[bool] = True
    per_row: ClassVar[tuple[str, ...]] = ("start_state",)
    depths: ClassVar[Mapping[str, int]] = {"eos_ids": 1}
    machine: StateMachine | Mapping[str, object]
    start_state: RowValue | None = None
    eos_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.machine, Mapping):
            object.__setattr__(self, "machine", StateMachine.from_dict(self.machine))
        if not isinstance(self.machine, StateMachine):
            raise ValueError(f"fsm's machine must be a StateMachine or its mapping, got {self.machine!r:.80}")

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        self._machine.check(vocab_size, "fsm's machine")
        check_ids(self.eos_ids, vocab_size, "fsm's eos_ids")
        self._starts(self.count(rows))

    def start(self, rows: int) -> dict[str, Tensor]:
        return {"state": self._starts(rows)}

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        device = scores.values.device
        machine, states = self._on(device), state["state"].to(device)
        legal = machine.legal(states, scores.token_ids)
        if self.eos_ids:
            ends = scores.listed(torch.tensor(self.eos_ids, dtype=torch.int64, device=device))
            legal = torch.where(ends, machine.accepting[states][:, None], legal)
        return scores.keep(legal, keeps_peak=False)

    def after(self, state: dict[str, Tensor], choice: Choice) -> dict[str, Tensor]:
        device = choice.token_ids.device
        machine, states = self._on(device), state["state"].to(device)
        ends = torch.isin(choice.token_ids, torch.tensor(self.eos_ids, dtype=torch.int64, device=device))
        require_legal(machine, states, choice.token_ids, ~(choice.active & ends & ~machine.accepting[states]))
        return {**state, "state": advance(machine, states, choice.token_ids, choice.active & ~ends)}

    @property
    def _machine(self) -> StateMachine:
        assert isinstance(self.machine, StateMachine)
        return self.machine

    def _starts(self, rows: int) -> Tensor:
        given = self._machine.start if self.start_state is None else self.start_state
        last = self._machine.num_states - 1
        return row_values(given, rows, "fsm's start_state", low=0, high=last, dtype=torch.int64)

    def _on(self, device: torch.device) -> StateMachine:
        return self.once(device, lambda: self._machine.to(device))
