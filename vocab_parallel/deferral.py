"""Errors that the host learns of later: flags it has not read yet, and what ranks may do before they are read.

A rank that does not wait for the other ranks' flags goes on with its call, and its collectives. That is safe as long
as a rank whose call is another one, or wrong, knows what the others are doing, and does it with them before it
raises. So the ranks keep a common `Habit`: the call that they expect next, and its `Plan`. A call that is the expected
one goes on without a look at the flags; any other one looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel import errors

_UNREAD_LIMIT = 256
_HABIT_LENGTH = 4  # calls that tell the next one: enough for an embedding and a loss, or two models in turn
_HABIT_LIMIT = 1024


CLASSES = [*sorted(name for name, value in vars(errors).items() if isinstance(value, type)), "TypeError", "ValueError"]


def class_code(error: type[Exception]) -> int:
    """An error's class as a number above 0, the same on every rank: that of its nearest base which has one."""
    names = [base.__name__ for base in error.__mro__]
    known = next((name for name in names if name in CLASSES), "VocabParallelError")
    return CLASSES.index(known) + 1


def first_row(bad: Tensor) -> Tensor:
    """The first True of `bad` `[T]`, -1 if there is none: an int64 scalar on its device, not read by the host."""
    rows = torch.arange(len(bad), device=bad.device)
    first = torch.cat([torch.where(bad, rows, len(bad)), rows.new_full((1,), len(bad))]).amin()
    return torch.where(first < len(bad), first, -1)


class Found(NamedTuple):
    """What a check of values found, on the device: nobody has read it yet.

    Attributes:
        words: int64 `[2]`: the first offending row and its value; row -1 if all is fine.
        error: Class of the error.
        describe: The error of a row and its value.
    """

    words: Tensor
    error: type[Exception]
    describe: Callable[[int, int], Exception]


class Unread(NamedTuple):
    """Flags on their way to the host.

    Attributes:
        flags: On the device.
        copy: On the host, complete once `copied` is.
        verdict: The error that the flags stand for, or None.
        code: The same on the device: an int64 scalar, the class of the error as a number, or 0.
    """

    flags: Tensor
    copy: Tensor
    copied: torch.cuda.Event | None
    verdict: Callable[[Any], Exception | None]
    code: Callable[[Tensor], Tensor]

    def read(self) -> Exception | None:
        if self.copied is not None:
            self.copied.synchronize()
        return self.verdict(self.copy.tolist())


class UnreadFlags:
    """The flags of calls that have returned before the host read them, oldest first.

    Attributes:
        generation: How many errors have come out of it. What ranks had learned about each other before is void then.
    """

    def __init__(self) -> None:
        self._queue: deque[Unread] = deque()
        self.generation = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, flags: Tensor, verdict: Callable[[Any], Exception | None], code: Callable[[Tensor], Tensor]) -> None:
        """Starts copying `flags` to the host, without waiting."""
        copied = None
        if flags.is_cuda:
            copy = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
            copy.copy_(flags, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(flags.device))
        else:
            copy = flags.detach().to("cpu", copy=True)
        if len(self._queue) == _UNREAD_LIMIT:  # nobody can be told now; the first error is the one that counts
            oldest = self._queue.popleft()
            if oldest.read() is not None:
                self._queue.appendleft(oldest)
                return
        self._queue.append(Unread(flags, copy, copied, verdict, code))

    def read(self) -> None:
        """Waits for all flags and raises the first error."""
        while self._queue:
            error = self._queue.popleft().read()
            if error is not None:
                self.forget()
                raise error

    def forget(self) -> None:
        """After an error: what else is under way follows from it."""
        self._queue.clear()
        self.generation += 1

    def code(self) -> Tensor | None:
        """The class of the first error as a number, or 0: an int64 scalar on the device. None if there are no flags."""
        if not self._queue:
            return None
        codes = torch.stack([unread.code(unread.flags) for unread in self._queue])
        return codes.gather(0, first_row(codes > 0).clamp(min=0)[None])[0]


class Step(NamedTuple):
    """A collective that a call issued: its name and what this rank gave. Of an exchange: its kind and payload bytes."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    device: torch.device | None = None
    kind: str = ""
    need: int | None = None


@dataclass
class Plan:
    """What a call that the ranks have agreed on does in forward: its first exchange, then `steps`."""

    call: str
    signature: int
    kind: str
    need: int | None
    steps: list[Step] = field(default_factory=list)


class Habit:
    """Which call follows which. Made of calls that all ranks agreed on, so the same on every rank.

    Attributes:
        current: The plan of the call under way.
        known: Whether it is a plan from before; else the call is writing it.
    """

    def __init__(self) -> None:
        self._recent: tuple[int, ...] = ()
        self._next: dict[tuple[int, ...], int] = {}
        self._plans: dict[int, Plan] = {}
        self.current: Plan | None = None
        self.known = False
        self._at = 0

    def expected(self) -> Plan | None:
        """The call that came last time after the last few calls; after fewer of them, where so many never came."""
        for start in range(len(self._recent) + 1):
            if self._recent[start:] in self._next:
                return self._plans[self._next[self._recent[start:]]]
        return None

    def begin(self, plan: Plan, known: bool) -> None:
        """The ranks begin a call."""
        self.current, self.known, self._at = plan, known, 0
        if len(self._next) > _HABIT_LIMIT:
            self._recent, self._next, self._plans = (), {}, {}
        for start in range(len(self._recent) + 1):
            self._next[self._recent[start:]] = plan.signature
        self._plans[plan.signature] = plan
        self._recent = (*self._recent, plan.signature)[-_HABIT_LENGTH:]

    def note(self, step: Step) -> None:
        """The call under way issues a collective."""
        if self.current is not None:
            self._at += 1
            if not self.known:
                self.current.steps.append(step)

    @contextmanager
    def unnoted(self) -> Iterator[None]:
        """Collectives that are parts of something noted already."""
        current, self.current = self.current, None
        try:
            yield
        finally:
            self.current = current

    def left(self) -> list[Step]:
        """What the call under way, which is known, has still to issue."""
        return self.current.steps[self._at :] if self.current is not None else []

    def end(self) -> None:
        """No call is under way."""
        self.current = None
