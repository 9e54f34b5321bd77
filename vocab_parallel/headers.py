"""What ranks say to each other at the head of an exchange, and which error it amounts to."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.deferral import CLASSES, Found, class_code
from vocab_parallel.errors import LayoutMismatchError, rebuild
from vocab_parallel.shard import RankGroup

# int64 words: the call's signature; the class of this rank's error as a number, or 0; rows and target rows; checksum;
# whether this rank goes on without reading the headers; the first row with a bad value, or -1, and that value
HEADER_WORDS = 8
SIGNATURE, FAULT, ROWS, TARGET_ROWS, CHECKSUM, TRUSTS, FOUND_ROW, FOUND_VALUE = range(HEADER_WORDS)
HEADER_BYTES = 8 * HEADER_WORDS
_CACHED = 64
_MIX = [word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]  # splitmix64's

Gather = Callable[[str], list[str]]  # a rank's words -> every rank's


@functools.lru_cache(maxsize=1024)
def signature(call: str) -> int:
    """A call in words, as an int64."""
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little", signed=True)


def constant_header(group: RankGroup, words: tuple[int | Tensor, ...], device: torch.device) -> Tensor:
    """A header `[8]` with these first words and no bad value, without a copy from the host: that would wait."""
    key = (*words, device)
    if key not in group.headers:
        if len(group.headers) == _CACHED:
            group.headers.clear()
        header = torch.zeros(HEADER_WORDS, dtype=torch.int64, device=device)
        for at, word in enumerate((*words, 0, 0)[: TRUSTS + 1]):
            header[at].fill_(word)
        header[FOUND_ROW].fill_(-1)
        group.headers[key] = header
    return group.headers[key]


def message(
    group: RankGroup,
    words: tuple[int | Tensor, ...],
    found: Found | None,
    status: Tensor | None,
    payload: Tensor | None,
    capacity: int,
    device: torch.device,
    *,
    may_read: bool,
) -> Tensor:
    """A header and room for `capacity` bytes with the payload in it, as uint8.

    Args:
        words: The header's up to `TRUSTS`; the checksum may be a tensor.
        found, status: As in `agreement.Exchange`.
        may_read: Whether the host may read tensors: on a CPU it then writes the header at once.
    """
    if may_read and status is None and device.type == "cpu":
        bad = (-1, 0) if found is None else found.words.tolist()
        header = struct.pack(f"<{HEADER_WORDS}q", *map(int, words), *bad)
        parts = [torch.frombuffer(bytearray(header), dtype=torch.uint8)]
        if payload is not None:
            parts.append(as_bytes(payload))
        rest = HEADER_BYTES + capacity - sum(len(part) for part in parts)
        return torch.cat([*parts, torch.zeros(rest, dtype=torch.uint8)] if rest else parts)
    buffer = torch.zeros(HEADER_BYTES + capacity, dtype=torch.uint8, device=device)
    if payload is not None:
        buffer[HEADER_BYTES : HEADER_BYTES + payload.nbytes] = as_bytes(payload)
    in_place = buffer[:HEADER_BYTES].view(torch.int64)
    checksum, constant = words[CHECKSUM], (*words[:CHECKSUM], 0, *words[CHECKSUM + 1 :])
    in_place.copy_(constant_header(group, constant, device))
    if isinstance(checksum, Tensor):
        in_place[CHECKSUM].copy_(checksum)
    else:
        in_place[CHECKSUM].fill_(checksum)
    if found is not None:
        in_place[FOUND_ROW:].copy_(found.words)
    if status is not None:
        in_place[FAULT].copy_(status)
    return buffer


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8, flat."""
    tensor = tensor.contiguous()
    if tensor.numel() < 2:  # contiguous with any stride, and as bytes only with stride 1
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return (tensor if tensor.dim() == 1 else tensor.view(-1)).view(torch.uint8)


def checksum(ids: Tensor) -> Tensor:
    """64 bits of integer ids and their order: an int64 scalar on their device (no synchronisation).

    A sum with a hash of each place as its weight: weights in a regular order would let other ids, or the same ones in
    another order, cancel out.
    """
    flat = ids.reshape(-1).to(torch.int64)
    weight = torch.arange(1, len(flat) + 1, device=flat.device) * _MIX[0]
    weight = (weight ^ (weight >> 32)) * _MIX[1]
    weight = (weight ^ (weight >> 29)) * _MIX[2]
    return ((flat + (flat >> 32)) * weight).sum()  # the bits of two floats may differ in the upper half alone


def checksum_of(*words: list[int] | list[float]) -> int:
    """64 bits of lists of int64 and floats that the host has."""
    packed = [struct.pack(f"={len(one)}{'d' if one and isinstance(one[0], float) else 'q'}", *one) for one in words]
    return int.from_bytes(hashlib.blake2b(b"".join(packed), digest_size=8).digest(), "little", signed=True)


class Verdict(NamedTuple):
    """What one rank needs to know for judging the headers of an exchange, which it may read much later."""

    call: str
    rank: int
    fault: Exception | None
    found: Found | None
    compare_checksum: bool
    expected: tuple[str, int] | None  # the call that the group expected, and its signature

    def error(self, headers: list[list[int]], gather: Gather | None = None) -> Exception | None:
        """The error that the headers `[tp][8]` stand for, or None.

        Args:
            gather: Where all ranks judge now, how to get the words that only some rank has.
        """
        faulty = [rank for rank, header in enumerate(headers) if header[FAULT]]
        if faulty:
            return self._fault(faulty, headers, gather)
        found = [rank for rank, header in enumerate(headers) if header[FOUND_ROW] >= 0]
        if found and self.found is not None:
            error = self.found.describe(*headers[found[0]][FOUND_ROW:])
            return type(error)(f"{error}{_found_by(found)}")
        if any(header[SIGNATURE] != headers[0][SIGNATURE] for header in headers):
            return self._disagreement(headers, gather)
        return self.different_ids(headers) if self.compare_checksum else None

    def _fault(self, faulty: list[int], headers: list[list[int]], gather: Gather | None) -> Exception:
        mine = f"{type(self.fault).__name__}\n{self.fault}" if self.fault is not None else ""
        words = gather(mine)[faulty[0]] if gather is not None else mine
        if not words:
            name = CLASSES[headers[faulty[0]][FAULT] - 1]
            return rebuild(name, f"rank {faulty[0]} of the group raised {name} in {self.call}; its log has the words.")
        class_name, _, message = words.partition("\n")
        return rebuild(class_name, message + _found_by(faulty))

    def _disagreement(self, headers: list[list[int]], gather: Gather | None) -> Exception:
        if gather is not None:
            calls = gather(self.call)
        else:
            known = {headers[self.rank][SIGNATURE]: self.call}
            if self.expected is not None:
                known.setdefault(self.expected[1], self.expected[0])
            calls = [known.get(header[SIGNATURE], "another call, which its log names") for header in headers]
        table = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
        return LayoutMismatchError(
            f"the ranks of the group disagree. {table}. All ranks of a vocabulary-parallel group must make the "
            "same call on the same rows; likely they read different batches, or one slices its rows (see "
            "sequence_parallel)."
        )

    def different_ids(self, headers: list[list[int]]) -> Exception | None:
        """The error of ranks that pass different token ids or targets where these should be replicated."""
        checksums = [header[CHECKSUM] for header in headers]
        if all(checksum == checksums[0] for checksum in checksums):
            return None
        odd = next(rank for rank, checksum in enumerate(checksums) if checksum != checksums[0])
        return LayoutMismatchError(
            f"rank 0 and rank {odd} of the group passed different token ids or row data (such as row_weight) to "
            f"{self.call}. They must be the same on every rank of a vocabulary-parallel group: shard the data loader "
            "over the data-parallel ranks only."
        )

    def code(self, headers: Tensor) -> Tensor:
        """The class of `error` as a number, or 0, of headers `[tp, 8]` on the device: an int64 scalar there."""
        compared = [SIGNATURE, *([CHECKSUM] if self.compare_checksum else [])]
        differ = torch.stack([(headers[:, word] != headers[0, word]).any() for word in compared]).any()
        code = torch.where(differ, class_code(LayoutMismatchError), 0)
        if self.found is not None:
            code = torch.where((headers[:, FOUND_ROW] >= 0).any(), class_code(self.found.error), code)
        fault = headers[:, FAULT].amax()
        return torch.where(fault > 0, fault, code)


def _found_by(ranks: list[int]) -> str:
    return f" [found by rank {', '.join(map(str, ranks))} of the group]"
