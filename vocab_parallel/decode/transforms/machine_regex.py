"""Regular expressions over token ids, compiled to the edges of a deterministic machine.

The usual way: the expression becomes a machine with free moves (Thompson), and sets of its states become the states of
a machine without choice. No part is without ids, so from every state an end can be reached. Ids are kept as ranges
throughout: all ids that the expression does not tell apart are one letter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Edge = tuple[int, int, int, int]  # state, first id, one past the last id, next state
Range = tuple[int, int]

_TOKEN = re.compile(r"\s*(?:(\d+)|(\{\s*\d+\s*(?:,\s*\d*\s*)?\})|(\[\^?[\d\s-]*\])|([.()|*+?]))")
_STATE_LIMIT = 1 << 16
_REPEAT_LIMIT = 1 << 12
_LENGTH_LIMIT = 1 << 20  # of the text
_MOVE_LIMIT = 1 << 20  # ranges of ids: a set of many, repeated, has as many each time
_WORK_LIMIT = 1 << 20  # states of all sets of states


def compile_regex(pattern: str, stop: int) -> tuple[list[Edge], int, list[int]]:
    """The edges, the number of states and the accepting states of `pattern`; state 0 is the start.

    Args:
        stop: One past the largest id that `.` and `[^...]` stand for.
    """
    nfa = _Nfa()
    try:
        first, last = _Parser(pattern, stop, nfa).parse()
    except RecursionError as error:
        raise ValueError("regular expression over token ids: parentheses nested too deeply") from error
    return _determinise(nfa, first, last)


@dataclass
class _Nfa:
    """Moves by ids, and free moves, of each state."""

    moves: list[list[tuple[Range, int]]] = field(default_factory=list)
    free: list[list[int]] = field(default_factory=list)
    ranges: int = 0
    visited: int = 0

    def state(self) -> int:
        if len(self.moves) >= _STATE_LIMIT:
            raise ValueError(f"the regular expression needs more than {_STATE_LIMIT} states: shorten its repetitions")
        self.moves.append([])
        self.free.append([])
        return len(self.moves) - 1

    def closure(self, states: frozenset[int]) -> frozenset[int]:
        """The states that free moves lead to, and themselves."""
        found, left = set(states), list(states)
        while left:
            for after in self.free[left.pop()]:
                if after not in found:
                    found.add(after)
                    left.append(after)
        self.visited += len(found)
        if self.visited > _WORK_LIMIT:
            raise ValueError("the regular expression needs too many sets of states: make it simpler")
        return frozenset(found)


class _Parser:
    """Builds the machine of a pattern. Each rule returns the first and the last state of its part."""

    def __init__(self, pattern: str, stop: int, nfa: _Nfa) -> None:
        self.pattern, self.stop, self.nfa = pattern, stop, nfa
        self.tokens: list[str] = []
        self.starts: list[int] = []
        self.at = 0
        position = 0
        end = len(pattern.rstrip())
        if end > _LENGTH_LIMIT:
            raise ValueError(f"a regular expression over token ids of {end:,} signs, more than {_LENGTH_LIMIT:,}")
        while position < end:
            match = _TOKEN.match(pattern, position)
            if match is None:
                raise self.error("unknown sign", position + len(pattern[position:]) - len(pattern[position:].lstrip()))
            self.tokens.append(match.group().strip())
            self.starts.append(match.end() - len(match.group().lstrip()))
            position = match.end()

    def parse(self) -> tuple[int, int]:
        part = self.alternatives()
        if self.at < len(self.tokens):
            raise self.error("unexpected")
        return part

    def alternatives(self) -> tuple[int, int]:
        parts = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            parts.append(self.sequence())
        if len(parts) == 1:
            return parts[0]
        first, last = self.nfa.state(), self.nfa.state()
        for start, end in parts:
            self.nfa.free[first].append(start)
            self.nfa.free[end].append(last)
        return first, last

    def sequence(self) -> tuple[int, int]:
        first = last = self.nfa.state()
        while self.peek() not in ("", "|", ")"):
            start, end = self.repeated()
            self.nfa.free[last].append(start)
            last = end
        return first, last

    def repeated(self) -> tuple[int, int]:
        begin = self.at
        part = self.atom()
        if self.peek() in ("*", "+", "?") or self.peek()[:1] == "{":
            low, high = self.bounds()
            part = self.times(begin, low, high)
            if self.peek() in ("*", "+", "?") or self.peek()[:1] == "{":
                raise self.error("two repetitions in a row: use parentheses, at")
        return part

    def bounds(self) -> tuple[int, int | None]:
        sign = self.tokens[self.at]
        self.at += 1
        if sign in "*+?":
            return int(sign == "+"), 1 if sign == "?" else None
        numbers = [one.strip() for one in sign[1:-1].split(",")]
        low = int(numbers[0])
        high = low if len(numbers) == 1 else int(numbers[1]) if numbers[1] else None
        if (high is not None and high < low) or max(low, high or 0) > _REPEAT_LIMIT:
            self.at -= 1
            raise self.error(f"a repetition must be {{low,high}} with low <= high <= {_REPEAT_LIMIT}, got")
        return low, high

    def times(self, begin: int, low: int, high: int | None) -> tuple[int, int]:
        """The atom that begins at token `begin`, `low` to `high` times: made anew for each time."""
        end = self.at
        first = last = self.nfa.state()
        skips = []
        for count in range(low if high is None else high):
            if count >= low:
                skips.append(last)
            start, stop = self.again(begin)
            self.nfa.free[last].append(start)
            last = stop
        if high is None:  # and any number more
            start, stop = self.again(begin)
            self.nfa.free[last].append(start)
            self.nfa.free[stop].append(start)
            skips.append(last)
            last = self.nfa.state()
            self.nfa.free[stop].append(last)
        for state in skips:
            self.nfa.free[state].append(last)
        self.at = end
        return first, last

    def again(self, begin: int) -> tuple[int, int]:
        self.at = begin
        return self.atom()

    def atom(self) -> tuple[int, int]:
        token = self.peek()
        if token == "(":
            self.at += 1
            part = self.alternatives()
            if self.peek() != ")":
                raise self.error("expected ) before")
            self.at += 1
            return part
        if token in (")", "|", "*", "+", "?", "") or token[0] == "{":
            raise self.error("expected an id before")
        first, last = self.nfa.state(), self.nfa.state()
        ranges = self.ranges(token)
        self.nfa.ranges += len(ranges)
        if self.nfa.ranges > _MOVE_LIMIT:
            raise ValueError(f"the regular expression needs more than {_MOVE_LIMIT} ranges of ids: make it simpler")
        self.nfa.moves[first] += [(one, last) for one in ranges]
        self.at += 1
        return first, last

    def ranges(self, token: str) -> list[Range]:
        if token == ".":
            return [(0, self.stop)]
        if token[0] != "[":
            return [(int(token), int(token) + 1)]
        found: list[Range] = []
        for part in re.sub(r"\s*-\s*", "-", token.strip("[^]")).split():
            low, _, high = part.partition("-")
            if not low or (part != low and not high) or "-" in high or int(high or low) < int(low):
                raise self.error(f"{part!r} is no range of ids in")
            found.append((int(low), int(high or low) + 1))
        listed = sorted(found) if token[1] != "^" else self.others(sorted(found))
        if not listed:
            raise self.error("no ids in")
        return listed

    def others(self, listed: list[Range]) -> list[Range]:
        found: list[Range] = []
        next_id = 0
        for first, last in [*listed, (self.stop, self.stop)]:
            if first > next_id:
                found.append((next_id, first))
            next_id = max(next_id, last)
        return found

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def error(self, what: str, position: int | None = None) -> ValueError:
        if position is None:
            position = self.starts[self.at] if self.at < len(self.starts) else len(self.pattern)
        rest = self.pattern[position : position + 12] or "the end"
        where = f"place {position} of {self.pattern!r:.200}"
        return ValueError(f"regular expression over token ids: {what} {rest!r}, {where}")


def _determinise(nfa: _Nfa, first: int, last: int) -> tuple[list[Edge], int, list[int]]:
    """The machine of the sets of states that the same ids lead to."""
    start = nfa.closure(frozenset([first]))
    numbers, left, edges = {start: 0}, [start], []
    while left:
        states = left.pop()
        for low, high, reached in _letters([move for state in states for move in nfa.moves[state]]):
            after = nfa.closure(reached)
            if after not in numbers:
                if len(numbers) >= _STATE_LIMIT:
                    raise ValueError(f"the regular expression needs more than {_STATE_LIMIT} states: make it simpler")
                numbers[after] = len(numbers)
                left.append(after)
            edges.append((numbers[states], low, high, numbers[after]))
    return edges, len(numbers), [number for states, number in numbers.items() if last in states]


def _letters(moves: Sequence[tuple[Range, int]]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Ranges of ids that `moves` do not tell apart, and the states that each leads to."""
    change: dict[int, Counter[int]] = {}
    for (low, high), after in moves:
        change.setdefault(low, Counter())[after] += 1
        change.setdefault(high, Counter())[after] -= 1
    now: Counter[int] = Counter()
    cuts = sorted(change)
    for low, high in pairwise(cuts):
        for after, times in change[low].items():
            now[after] += times
            if now[after] == 0:
                del now[after]
        if now:
            yield low, high, frozenset(now)
