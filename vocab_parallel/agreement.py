"""How the ranks of a group agree, and how an error that one rank sees is raised on every rank.

`Exchange` is the all-gather that carries an operation's payload under a header in which each rank says what it was
asked to do and whether something is wrong with it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.collectives import all_gather
from vocab_parallel.errors import LayoutMismatchError, rebuild
from vocab_parallel.shard import VocabShard, device_of

HEADER_WORDS = 8  # int64: call signature, fault, rows, target rows, checksum, payload bytes, two spare
_SIGNATURE, _FAULT, _ROWS, _TARGET_ROWS, _CHECKSUM, _NEED = range(6)
_HEADER_BYTES = 8 * HEADER_WORDS
_MESSAGE_BYTES = 4096
_FIRST_BYTES = {
    "loss": 48 * 1024,
    "select": 512,
    "header": 0,
}  # of payload, while nothing is known: 4,096 rows of a loss
_WINDOW = 8  # exchanges that a size is remembered for


def capture(check: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """Runs a local check and returns its error instead of raising it, so that this rank still enters the exchange."""
    try:
        check(*args, **kwargs)
    except Exception as error:  # whatever it is, the other ranks are waiting: it must reach them
        return error
    return None


class Exchange:
    """One all-gather of a payload under a header that makes the ranks agree. Starts at construction, ends at `wait`.

    The payload's size must not depend on this rank's arguments: backends abort, hang or corrupt when sizes differ
    between ranks. So every rank sends as much as the largest of the group's last 8 exchanges of this kind needed, a
    number that all ranks share. A call that needs more says so in its header; once all headers agree, its payload
    follows in a second all-gather, and calls of that size need only one from then on.

    Args:
        shard: Whose group to use.
        kind: "loss", "select" or "header" (no payload): what shares a size.
        call: What this rank was asked to do, in words: operation, shapes, dtypes, options. The same on every rank or
            an error.
        payload: This rank's bytes as any contiguous tensor; the same dtype and shape on every rank.
        fault: This rank's own error; every rank then raises it.
        rows, target_rows: Counts that may differ between ranks; readable from `headers` after `wait`.
        checksum: Of what must be the same on every rank; compared unless `compare_checksum` is False.

    Collectives:
        One all-gather of 64 bytes and the shared size; one more if the payload is larger; on an error, one of 4 KiB
        with its words.
        None at tp_size 1.
    """

    def __init__(
        self,
        shard: VocabShard,
        kind: str,
        call: str,
        *,
        payload: Tensor | None = None,
        fault: Exception | None = None,
        rows: int = 0,
        target_rows: int = 0,
        checksum: Tensor | int = 0,
        compare_checksum: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self.shard, self.kind, self.call, self.fault = shard, kind, call, fault
        self._compare_checksum = compare_checksum
        self._payload = payload if fault is None else None
        self.headers: list[list[int]] = []
        if shard.tp_size == 1:
            if fault is not None:
                raise fault
            self.headers = [[0, 0, rows, target_rows, 0, 0]]
            return
        device = payload.device if payload is not None else device or device_of(shard)
        sizes = shard.payload_sizes.setdefault(kind, deque([_FIRST_BYTES[kind]] * _WINDOW, maxlen=_WINDOW))
        capacity = max(sizes)
        self._need = self._payload.nbytes if self._payload is not None else 0
        self._buffer = torch.zeros(_HEADER_BYTES + capacity, dtype=torch.uint8, device=device)
        header = self._buffer[:_HEADER_BYTES].view(torch.int64)
        words = [_signature(call), int(fault is not None), rows, target_rows, 0, self._need]
        header[: len(words)] = torch.tensor(words)
        header[_CHECKSUM] = checksum
        if self._payload is not None and self._need <= capacity:
            self._buffer[_HEADER_BYTES : _HEADER_BYTES + self._need] = _as_bytes(self._payload)
        self._pending = all_gather(shard, self._buffer)

    def wait(self) -> Tensor:
        """All payloads in rank order, `[tp, *payload.shape]`; or the error that some rank has, on every rank."""
        if self.shard.tp_size == 1:
            return self._payload[None] if self._payload is not None else torch.empty(0)
        gathered = self._pending.wait()
        self.headers = gathered[:, :_HEADER_BYTES].contiguous().view(torch.int64).tolist()
        self._raise_if_any()
        if self._payload is None:
            return gathered[:, _HEADER_BYTES:]
        self.shard.payload_sizes[self.kind].append(self._need)
        if self._need > len(self._buffer) - _HEADER_BYTES:
            payloads = all_gather(self.shard, _as_bytes(self._payload)).wait()
        else:
            payloads = gathered[:, _HEADER_BYTES : _HEADER_BYTES + self._need].contiguous()
        return payloads.view(self._payload.dtype).view(self.shard.tp_size, *self._payload.shape)

    def _raise_if_any(self) -> None:
        """Same headers, same decision on every rank; the words follow in one more all-gather."""
        faulty = [rank for rank, header in enumerate(self.headers) if header[_FAULT]]
        disagree = any(header[_SIGNATURE] != self.headers[0][_SIGNATURE] for header in self.headers)
        if faulty:
            words = f"{type(self.fault).__name__}\n{self.fault}" if self.fault is not None else ""
            class_name, _, message = _gather_words(self.shard, words)[faulty[0]].partition("\n")
            error = rebuild(class_name, f"{message} [found by rank {', '.join(map(str, faulty))} of the group]")
            raise error from self.fault
        if disagree:
            calls = _gather_words(self.shard, self.call)
            table = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise LayoutMismatchError(
                f"the ranks of the group disagree. {table}. All ranks of a vocabulary-parallel group must make the "
                "same call on the same rows; likely they read different batches, or one slices its rows (see "
                "sequence_parallel)."
            )
        if self._compare_checksum:
            self.require_equal_checksums()

    def require_equal_checksums(self) -> None:
        """Raises on every rank if what should be replicated (token ids, targets) differs."""
        checksums = [header[_CHECKSUM] for header in self.headers]
        if any(checksum != checksums[0] for checksum in checksums):
            odd = next(rank for rank, checksum in enumerate(checksums) if checksum != checksums[0])
            raise LayoutMismatchError(
                f"rank 0 and rank {odd} of the group passed different token ids to {self.call}. The ids must be the "
                "same on every rank of a vocabulary-parallel group: shard the data loader over the data-parallel "
                "ranks only."
            )

    @property
    def rows(self) -> list[int]:
        """Each rank's `rows`, in rank order."""
        return [header[_ROWS] for header in self.headers]

    @property
    def target_rows(self) -> list[int]:
        return [header[_TARGET_ROWS] for header in self.headers]


def checksum(ids: Tensor) -> Tensor:
    """Order-sensitive 64-bit sum of integer ids, on their device (no synchronisation)."""
    flat = ids.reshape(-1).to(torch.int64)
    return ((flat + 1) * (2 * torch.arange(len(flat), device=flat.device) + 1)).sum()


def _signature(call: str) -> int:
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _gather_words(shard: VocabShard, words: str) -> list[str]:
    encoded = words.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device_of(shard))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in all_gather(shard, sent).wait().cpu()]
