"""How the ranks of a group agree, and how an error that one rank sees is raised on every rank.

`Exchange` is the all-gather that carries an operation's payload under a header in which each rank says what it was
asked to do and whether something is wrong with it. `judge` is for what shows in gathered data.

Both raise at once where the host may read flags (on a CPU), and otherwise at the next call on the shard or in
backward: places that every rank passes in the same order, so that no rank raises while another one waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.collectives import Pending, all_gather, all_gather_at_once, repeat
from vocab_parallel.deferral import Found, Plan, Step, class_code, first_row
from vocab_parallel.headers import (
    HEADER_BYTES,
    ROWS,
    TARGET_ROWS,
    TRUSTS,
    Verdict,
    as_bytes,
    checksum,
    message,
    signature,
)
from vocab_parallel.shard import RankGroup, device_of

__all__ = ["Exchange", "Found", "capture", "checksum", "first_row", "judge", "raise_deferred", "words_of_all"]

_MESSAGE_BYTES = 4096
# Kinds of exchanges that nothing hides, of few bytes: their latency counts.
_AT_ONCE = {"select", "sample", "candidates"}


def capture(check: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """Runs a local check and returns its error instead of raising it, so that this rank still enters the exchange."""
    try:
        check(*args, **kwargs)
    except Exception as error:  # whatever it is, the other ranks are waiting: it must reach them
        return error
    return None


def raise_deferred(group: RankGroup) -> None:
    """Raises the first error of earlier calls that the host has not read yet, waiting for their flags.

    Every rank must call it at the same places: in each backward, first if it has collectives, else last, so that the
    device has work while the host waits. Calls do it by themselves, in their first exchange.
    """
    group.raise_deferred()


def judge(group: RankGroup, flags: Tensor, error: type[Exception], describe: Callable[[list[Any]], Exception]) -> None:
    """Raises what `flags` say, at once or at the next call or backward.

    Args:
        flags: int64 or float64 `[n]`, the same on every rank. The first is the row at fault, -1 if there is none.
        error: Class of the error.
        describe: The error of the flags as a list; called only for a row at fault. It outlives the call: it should
            hold no tensors.
    """

    def verdict(read: list[Any]) -> Exception | None:
        return describe(read) if read[0] >= 0 else None

    if group.defers(flags.device):
        code = class_code(error)
        group.unread.add(flags, verdict, lambda on_device: torch.where(on_device[0] >= 0, code, 0))
        return
    found = verdict(flags.tolist())
    if found is not None:
        raise found


class Exchange:
    """One all-gather of a payload under a header that makes the ranks agree. Starts at construction, ends at `wait`.

    The payload's size must not depend on this rank's arguments: backends abort, hang or corrupt when sizes differ
    between ranks. So every rank sends as much as the largest of the group's last 8 exchanges of this kind needed, a
    number that all ranks share. Where a call needs more, its payload follows in a second all-gather once all headers
    agree, and calls of that size need only one from then on.

    Where errors are deferred, a call that the group expects (see `Habit`) does not wait for its headers. A rank with
    another call, or with an error, does wait; if others went on, it does what they do, and raises. They raise later.

    Args:
        group: What ranks to agree with.
        kind: "loss", "select", "sample", "candidates", "header" (no payload) or "mean": what shares a size. It must
            not depend on a call's options, in which ranks may differ.
        call: What this rank was asked to do, in words: operation, shapes, dtypes, options. The same on every rank or
            an error. Calls of the same words issue the same collectives in forward.
        payload: This rank's bytes as any contiguous tensor; the same dtype and shape on every rank.
        fault: This rank's own error; every rank then raises it.
        rows, target_rows: Counts that may differ between ranks; readable from `headers` after `wait`, so with them
            the host always waits for the headers.
        checksum: Of what must be the same on every rank; compared unless `compare_checksum` is False.
        found: What a check of values found, if the host has not read it; on every rank or on none.
        status: An int64 scalar: the class of an error that the host has not read, as a number, or 0.
        opens: Whether the call begins with this exchange. Wait for it before any other collective.
        may_fail: With `opens` False: whether a rank may have a fault here, in the middle of a call. Needs no larger
            payload than an earlier exchange of the call.

    Collectives:
        One all-gather of 64 bytes and the shared size; one more if the payload is larger; on an error, one of 4 KiB
        with its words.
        None in a group of one.
    """

    def __init__(
        self,
        group: RankGroup,
        kind: str,
        call: str,
        *,
        payload: Tensor | None = None,
        fault: Exception | None = None,
        rows: int | None = None,
        target_rows: int | None = None,
        checksum: Tensor | int = 0,
        compare_checksum: bool = True,
        found: Found | None = None,
        status: Tensor | None = None,
        opens: bool = True,
        may_fail: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.group, self.kind, self.call, self.fault, self._opens = group, kind, call, fault, opens
        self._payload = payload if fault is None else None
        self.headers: list[list[int]] = []
        if opens and group.within is None:
            group.raise_deferred()
        if group.size == 1:
            self.headers = [[0, 0, rows or 0, target_rows or 0, 0, 0, -1, 0]]
            _alone(group, fault, found)
            return
        group.device = device = payload.device if payload is not None else device or device_of(group)
        self._need = self._payload.nbytes if self._payload is not None else None
        self._signature = signature(f"{call} {self._need}")
        self._defers = group.defers(device)
        self._expected = group.habit.expected() if self._defers and opens else None
        if opens:
            expected = self._expected is not None and self._expected.signature == self._signature
        else:
            expected = not may_fail or group.habit.known
        self._trusts = self._defers and fault is None and rows is None and target_rows is None and expected
        self._verdict = Verdict(
            call, group.rank, fault, found, compare_checksum,
            None if self._expected is None else (self._expected.call, self._expected.signature),
        )  # fmt: skip
        self._capacity = max(group.sizes(kind))
        self._fits = self._payload is not None and self._need is not None and self._need <= self._capacity
        code = 0 if fault is None else class_code(type(fault))
        words = (self._signature, code, rows or 0, target_rows or 0, checksum, int(self._trusts))
        payload = self._payload if self._fits else None
        self._buffer = message(group, words, found, status, payload, self._capacity, device, may_read=not self._defers)
        self._start()

    def _start(self) -> None:
        habit = self.group.habit
        self._rest: Pending | None = None
        with habit.unnoted():  # it is noted as an exchange, not as the all-gathers that it is made of
            self._pending = _gather(self.group, self.kind, self._buffer)
        if self._trusts:
            self._agree()
        elif self._defers and habit.known and not self._opens:  # a fault: the others go on, with a payload
            self._send_rest(self.kind, *(step.need for step in habit.left()[:1]))
        if not self._opens:
            habit.note(Step("exchange", kind=self.kind, need=self._need))

    def _agree(self) -> None:
        """The ranks make one call, or this rank takes it that they do."""
        self._send_rest(self.kind, self._need)
        if self._defers and self._opens:
            known = self._expected if self._trusts else None
            plan = known or Plan(self.call, self._signature, self.kind, self._need)
            self.group.habit.begin(plan, known is not None)

    def _send_rest(self, kind: str, need: int | None = None) -> None:
        """Remembers what an exchange needed, and sends the payload that had no room in it."""
        if need is None:
            return
        self.group.sizes(kind).append(need)
        if need > self._capacity:
            payload = self._buffer.new_zeros(need) if self._payload is None else as_bytes(self._payload)
            with self.group.habit.unnoted():
                self._rest = _gather(self.group, kind, payload)

    def wait(self) -> Tensor:
        """All payloads in rank order, `[tp, *payload.shape]`; or the error that some rank has, on every rank."""
        if self.group.size == 1:
            return self._payload[None] if self._payload is not None else torch.empty(0)
        gathered = self._pending.wait()
        headers = gathered[:, :HEADER_BYTES].contiguous().view(torch.int64)
        if self._trusts:
            self.group.unread.add(headers, self._verdict.error, self._verdict.code)
        else:
            self.headers = headers.tolist()
            self._raise_if_any()
            self._agree()
        if self._payload is None or self._need is None:
            return gathered[:, HEADER_BYTES:]
        if self._rest is not None:
            payloads = self._rest.wait()
        else:
            payloads = gathered[:, HEADER_BYTES : HEADER_BYTES + self._need].contiguous()
        return payloads.view(self._payload.dtype).view(self.group.size, *self._payload.shape)

    def _raise_if_any(self) -> None:
        """Same headers, same decision on every rank; the words follow in one more all-gather."""
        others_go_on = any(header[TRUSTS] for header in self.headers)
        device = self._buffer.device
        error = self._verdict.error(
            self.headers, None if others_go_on else lambda words: words_of_all(self.group, words, device)
        )
        if error is None:
            return
        if others_go_on:
            self._go_along()
        if self._defers:
            self.group.raise_deferred()  # an earlier error comes first, as on ranks that raise later
            self.group.unread.forget()
        raise error from self.fault

    def _go_along(self) -> None:
        """Issues the collectives that the other ranks issue after this one, so that none of them waits in vain."""
        plan, left = self._expected, self.group.habit.left()
        self.group.habit.end()
        if self._opens and plan is not None:
            self._send_rest(plan.kind, plan.need)
            left = plan.steps
        if self._rest is not None:
            self._rest.wait()
        for step in left:
            if step.name == "exchange":
                _imitate(self.group, step, self._buffer)
            else:
                repeat(self.group, step)

    @property
    def rows(self) -> list[int]:
        """Each rank's `rows`, in rank order."""
        return [header[ROWS] for header in self.headers]

    @property
    def target_rows(self) -> list[int]:
        return [header[TARGET_ROWS] for header in self.headers]

    def require_equal_checksums(self) -> None:
        """Raises on every rank if what should be replicated (token ids, targets) differs."""
        error = self._verdict.different_ids(self.headers)
        if error is not None:
            raise error


def _gather(group: RankGroup, kind: str, x: Tensor) -> Pending:
    return all_gather_at_once(group, x) if kind in _AT_ONCE else all_gather(group, x)


def words_of_all(group: RankGroup, words: str, device: torch.device) -> list[str]:
    """What each rank says, of up to 4 KiB."""
    encoded = words.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    gathered = all_gather(group, sent).wait().cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered]


def _alone(group: RankGroup, fault: Exception | None, found: Found | None) -> None:
    """What is left of an exchange in a group of one."""
    if fault is not None:
        raise fault
    if found is not None:
        describe = found.describe
        judge(group, found.words, found.error, lambda words: describe(*words))


def _imitate(group: RankGroup, step: Step, like: Tensor) -> None:
    """Takes part in an exchange of the other ranks."""
    sizes = group.sizes(step.kind)
    capacity = max(sizes)
    _gather(group, step.kind, like.new_zeros(HEADER_BYTES + capacity)).wait()
    if step.need is not None:
        sizes.append(step.need)
        if step.need > capacity:
            _gather(group, step.kind, like.new_zeros(step.need)).wait()
