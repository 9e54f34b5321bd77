"""Finite-state machines over token ids: which ids are legal in a state, and which state each leads to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.history import check_ids
from vocab_parallel.decode.transforms.machine_regex import Edge, compile_regex
from vocab_parallel.errors import TokenRangeError

ANY = 1 << 31  # one past every token id: an edge up to here is for all ids from its first
_STRIDE = 1 << 32
_MOST_STATES = 1 << 22  # a table over all states is made of their number, which a file may say without having edges


@dataclass(frozen=True, eq=False)
class StateMachine:
    """A deterministic machine. Its edges are ranges of ids, so "any id", or "any but these", takes a few.

    Build it with `from_table`, `from_sequences`, `from_regex`, `forced` or `union`.

    Attributes:
        edges: int64 `[E, 4]`: state, first id, one past the last id, next state. By state and id, without overlap.
        accepting: bool `[S]`: the states in which a request may end.
        start: The state of a new request.
    """

    edges: Tensor
    accepting: Tensor
    start: int = 0
    _first: Tensor = field(init=False, repr=False)  # [E] state and first id as one key, ascending
    _offsets: Tensor = field(init=False, repr=False)  # [S + 1] the first edge of each state

    def __post_init__(self) -> None:
        edges = torch.as_tensor(self.edges, dtype=torch.int64).reshape(-1, 4)
        accepting = torch.as_tensor(self.accepting, dtype=torch.bool)
        states = len(accepting)
        edges = edges[(edges[:, 0] * _STRIDE + edges[:, 1]).argsort(stable=True)]
        _check_edges(edges, states, self.start)
        object.__setattr__(self, "edges", edges)
        object.__setattr__(self, "accepting", accepting)
        object.__setattr__(self, "_first", edges[:, 0] * _STRIDE + edges[:, 1])
        object.__setattr__(self, "_offsets", torch.searchsorted(edges[:, 0].contiguous(), torch.arange(states + 1)))

    @property
    def num_states(self) -> int:
        return len(self.accepting)

    @classmethod
    def from_table(
        cls, table: Mapping[int, Mapping[int, int]], *, start: int = 0, accepting: Sequence[int] = ()
    ) -> StateMachine:
        """A machine of an explicit table: state -> token id -> next state. States are numbers from 0."""
        named = {start, *table, *accepting, *(after for row in table.values() for after in row.values())}
        for state in named:
            if _integer(state) < 0:
                raise ValueError(f"states must be integers of at least 0, got {state!r}")
        edges = [(state, one, _integer(one) + 1, after) for state, row in table.items() for one, after in row.items()]
        return cls.of_edges(edges, max(named) + 1, accepting, start)

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]]) -> StateMachine:
        """The machine of some allowed sequences, as a tree: it accepts these and nothing else."""
        tree: list[dict[int, int]] = [{}]
        accepting: set[int] = set()
        for ids in sequences:
            state = 0
            for one in ids:
                if one not in tree[state]:
                    tree[state][one] = len(tree)
                    tree.append({})
                state = tree[state][one]
            accepting.add(state)
        if not accepting:
            raise ValueError("a machine of no sequences allows nothing: give at least one")
        return cls.from_table(dict(enumerate(tree)), accepting=sorted(accepting))

    @classmethod
    def from_regex(cls, pattern: str) -> StateMachine:
        """The machine of a regular expression over token ids, such as `"12 (7|8)+ [3 5-9]* [^2] . 4{2,3}?"`.

        Ids are numbers with spaces between them; `.` is any id, `[...]` one of some ids and ranges, `[^...]` any
        other, and `* + ? {m} {m,} {m,n} ( ) |` are as usual. Every state can still reach an accepting one.

        Raises:
            ValueError: Naming the place in the pattern.
        """
        if not isinstance(pattern, str):
            raise ValueError(f"a regular expression over token ids must be text, got {pattern!r}: put it in quotes")
        edges, states, accepting = compile_regex(pattern, ANY)
        return cls.of_edges(edges, states, accepting, 0)

    @classmethod
    def forced(cls, prefix: Sequence[int]) -> StateMachine:
        """Exactly `prefix`, then anything."""
        edges = [(at, one, _integer(one) + 1, at + 1) for at, one in enumerate(prefix)]
        return cls.of_edges([*edges, (len(prefix), 0, ANY, len(prefix))], len(prefix) + 1, [len(prefix)], 0)

    @classmethod
    def union(cls, machines: Sequence[StateMachine]) -> tuple[StateMachine, tuple[int, ...]]:
        """Several machines side by side, for requests with different ones; and the start state of each."""
        edges, accepting, starts, at = [], [], [], 0
        for machine in machines:
            edges.append(machine.edges + torch.tensor([at, 0, 0, at]))
            accepting.append(machine.accepting)
            starts.append(at + machine.start)
            at += machine.num_states
        return cls(torch.cat(edges), torch.cat(accepting), starts[0]), tuple(starts)

    @classmethod
    def of_edges(cls, edges: Sequence[Edge], states: int, accepting: Sequence[int], start: int) -> StateMachine:
        """A machine of edges in any order; neighbours with the same next state become one."""
        merged: list[Edge] = []
        checked = [(_integer(s), _integer(low), _integer(high), _integer(after)) for s, low, high, after in edges]
        for state, low, high, after in sorted(checked):
            if merged and merged[-1][0] == state and merged[-1][2] == low and merged[-1][3] == after:
                merged[-1] = (state, merged[-1][1], high, after)
            else:
                merged.append((state, low, high, after))
        if not 0 < _integer(states) <= _MOST_STATES:
            raise ValueError(f"a machine has 1 to {_MOST_STATES:,} states, got {states:.6g}")
        for state in accepting:
            if not 0 <= _integer(state) < states:
                raise ValueError(f"the accepting state {state} is outside [0, {states})")
        ends = torch.zeros(states, dtype=torch.bool)
        ends[torch.tensor(list(accepting), dtype=torch.int64)] = True
        return cls(torch.tensor(merged, dtype=torch.int64).reshape(-1, 4), ends, start)

    def to(self, device: torch.device) -> StateMachine:
        """The machine on a device."""
        return self if self.edges.device == device else _moved(self, device)

    def check(self, vocab_size: int, where: str) -> None:
        """Raises TokenRangeError for the first id of an edge that is no real one."""
        last = torch.where(self.edges[:, 2] == ANY, self.edges[:, 1], self.edges[:, 2] - 1)
        bad = ((self.edges[:, 1] < 0) | (last >= vocab_size)).nonzero()
        if len(bad):
            state, first = self.edges[bad[0, 0], :2].tolist()
            wrong = first if first < 0 or first >= vocab_size else int(last[bad[0, 0]])
            check_ids([wrong], vocab_size, f"{where}, state {state},")

    def next_states(
        self,
        states: Tensor,  # int64 [T]
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """int64 `[T]`: the state that each id leads to, -1 where it is illegal."""
        if len(self.edges) == 0:
            return torch.full_like(states, -1)
        at = torch.searchsorted(self._first, states * _STRIDE + token_ids, right=True) - 1
        edge = self.edges[at.clamp(min=0)]
        legal = (at >= 0) & (edge[:, 0] == states) & (token_ids >= edge[:, 1]) & (token_ids < edge[:, 2])
        return torch.where(legal, edge[:, 3], -1)

    def legal(
        self,
        states: Tensor,  # int64 [T]
        token_ids: Tensor,  # int64 [n] or [T, n], ascending
    ) -> Tensor:
        """Bool `[T, n]`: the ids that are legal in each row's state. O(n) a row, and O(log n) an edge of its state."""
        rows, n = len(states), token_ids.shape[-1]
        first, stop = self._offsets[states], self._offsets[states + 1]
        width = int((stop - first).max()) if rows and len(self.edges) else 0
        change = torch.zeros(rows, n + 1, dtype=torch.int8, device=states.device)  # sums of 0 and 1, modulo 256
        if width:
            at = first[:, None] + torch.arange(width, device=states.device)
            there = (at < stop[:, None]).to(torch.int8)
            edge = self.edges[at.clamp(max=len(self.edges) - 1)]
            for side, sign in ((1, 1), (2, -1)):  # a range begins, a range ends: counted, then added up along the row
                change.scatter_add_(1, torch.searchsorted(token_ids, edge[..., side].contiguous()), there * sign)
        return change.cumsum(1, dtype=torch.int8)[:, :n] > 0

    def to_dict(self) -> dict[str, Any]:
        """What JSON and YAML hold."""
        accepting = self.accepting.nonzero()[:, 0].tolist()
        return {"edges": self.edges.tolist(), "states": self.num_states, "accepting": accepting, "start": self.start}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StateMachine:
        """The inverse of `to_dict`; or `{"regex": pattern}`, `{"sequences": lists of ids}`, `{"forced": ids}`."""
        if "regex" in data:
            return cls.from_regex(data["regex"])
        if "sequences" in data:
            return cls.from_sequences(data["sequences"])
        if "forced" in data:
            return cls.forced(data["forced"])
        if set(data) != {"edges", "states", "accepting", "start"}:
            raise ValueError(
                "a machine is {regex: pattern}, {sequences: lists of ids}, {forced: ids}, or has edges, states, "
                f"accepting and start; got {', '.join(map(str, data)) or 'nothing'}"
            )
        return cls.of_edges(data["edges"], data["states"], data["accepting"], data["start"])


def advance(
    machine: StateMachine,
    state: Tensor,  # int64 [T]
    token_ids: Tensor,  # int64 [T]
    active: Tensor | None = None,  # bool [T]
) -> Tensor:
    """The states after these ids were emitted: int64 `[T]`; rows that are not active keep theirs.

    Raises:
        ValueError: Naming row, state and id of the first that is illegal.
    """
    after = machine.to(state.device).next_states(state, token_ids)
    after = after if active is None else torch.where(active, after, state)
    require_legal(machine, state, token_ids, after >= 0)
    return after


def require_legal(machine: StateMachine, state: Tensor, token_ids: Tensor, legal: Tensor) -> None:
    """Raises ValueError for the first row that is not `legal`, naming row, state and id."""
    bad = (~legal).nonzero()
    if len(bad):
        row = int(bad[0, 0])
        where, one = int(state[row]), int(token_ids[row])
        first, stop = machine._offsets[where : where + 2].tolist()
        ranges = ", ".join(_range_text(*edge) for edge in machine.edges[first : min(stop, first + 8), 1:3].tolist())
        more = ", ..." if stop > first + 8 else ""
        raise ValueError(
            f"row {row}: token id {one} is illegal in state {where}, which has edges for {ranges or 'nothing'}{more}. "
            "Likely the token was chosen without this machine's mask, or belongs to another row."
        )


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 2**62:
        raise TokenRangeError(f"the states and token ids of a machine must be integers, got {value!r:.60}")
    return value


def _range_text(low: int, high: int) -> str:
    return f"{low} and up" if high == ANY else str(low) if high == low + 1 else f"{low}-{high - 1}"


def _moved(machine: StateMachine, device: torch.device) -> StateMachine:
    moved = object.__new__(StateMachine)
    for name in ("edges", "accepting", "_first", "_offsets"):
        object.__setattr__(moved, name, getattr(machine, name).to(device))
    object.__setattr__(moved, "start", machine.start)
    return moved


def _check_edges(edges: Tensor, states: int, start: int) -> None:
    """Raises for a state that does not exist, an empty range, and two edges for one id."""
    if not 0 <= start < states:
        raise ValueError(f"the start state {start} is outside [0, {states})")
    for column, what in ((0, "state"), (3, "next state")):
        bad = ((edges[:, column] < 0) | (edges[:, column] >= states)).nonzero()
        if len(bad):
            edge = edges[bad[0, 0]].tolist()
            raise ValueError(f"the {what} {edge[column]} of the edge of id {edge[1]} is outside [0, {states})")
    outside = ((edges[:, 1] < 0) | (edges[:, 2] > ANY)).nonzero()
    if len(outside):
        state, low = edges[outside[0, 0], :2].tolist()
        raise TokenRangeError(f"the edge of state {state} for id {low} is outside [0, {ANY}): there are no such ids")
    if bool((edges[:, 1] >= edges[:, 2]).any()):
        raise ValueError("an edge's first id must be below one past its last id")
    overlap = ((edges[1:, 0] == edges[:-1, 0]) & (edges[1:, 1] < edges[:-1, 2])).nonzero()
    if len(overlap):
        state, low = edges[int(overlap[0, 0]) + 1, :2].tolist()
        raise ValueError(f"state {state} has two edges for id {low}: a machine is deterministic")
