"""Random numbers that belong to requests: a value that goes in and comes out, never a generator that ranks share.

The number of a draw is a function of (seed, request, number of the draw). So it does not depend on the other rows of
a batch, on their order, on the rank, on the TP size, or on what was drawn by whom before.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange
from vocab_parallel.headers import checksum
from vocab_parallel.select.order import FEW_ROWS
from vocab_parallel.shard import VocabShard, device_of

ALGORITHM = "philox4x32-10"
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FORK = 0x666F726B  # "fork": keys children apart from draws


@dataclass(frozen=True)
class Streams:
    """One stream a row: int64 `seeds`, `requests`, `draws`, each `[T]`. The same on every rank.

    Attributes:
        seeds: Any 64 bits.
        requests: Any 64 bits; tells requests with one seed apart.
        draws: How many numbers each has given.

    Source:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011): Philox4x32-10 with key = seed and
        counter = (draw, request).
    """

    seeds: Tensor
    requests: Tensor
    draws: Tensor

    @classmethod
    def of(
        cls,
        seeds: Sequence[int | None],
        requests: Sequence[int | str] | None = None,
        *,
        shard: VocabShard | None = None,
        device: torch.device | str = "cpu",
    ) -> Streams:
        """Streams at their beginning.

        Args:
            seeds: One a row, of at most 64 bits. None takes one from the operating system.
            requests: One a row, a number of at most 64 bits or a name; by default 0. Rows with the same seed and
                request draw the same numbers.
            shard: Whose ranks must have the same streams; needed for a seed of None at tp_size above 1.

        Collectives:
            With `shard` one all-gather of 8 bytes a row.

        Raises:
            ValueError: A seed or request that is no 64-bit integer.
            LayoutMismatchError: On every rank: their seeds or requests differ.
        """
        rows = len(seeds)
        names = [0] * rows if requests is None else list(requests)
        fault, unknown = None, [row for row, seed in enumerate(seeds) if seed is None]
        keys = torch.zeros(2, rows, dtype=torch.int64)
        try:
            if len(names) != rows:
                raise ValueError(f"{rows} seeds and {len(names)} requests: each row needs one of each")
            given = [secrets.randbits(64) if seed is None else seed for seed in seeds]
            words = [[_signed(word, "seed", row) for row, word in enumerate(given)]]
            words.append([_signed(word, "request", row) for row, word in enumerate(names)])
            keys = torch.tensor(words, dtype=torch.int64)
        except ValueError as error:
            fault = error
        if shard is not None:
            device_, known = device_of(shard), keys.clone()
            known[0, unknown] = 0
            gathered = Exchange(
                shard, "select", f"Streams.of({rows} rows, no seed in {unknown})", payload=keys[0].to(device_),
                checksum=checksum(known).to(device_), fault=fault,
            ).wait()  # fmt: skip
            keys[0] = gathered[0].cpu()
        elif fault is not None:
            raise fault
        keys = keys.to(device)
        return cls(keys[0], keys[1], torch.zeros_like(keys[0]))

    @property
    def words(self) -> tuple[Tensor, Tensor, Tensor]:
        """All three."""
        return self.seeds, self.requests, self.draws

    def __len__(self) -> int:
        return self.seeds.shape[0]

    def bits(self) -> Tensor:
        """int64 `[T]`, uniform in `[0, 2**62)`: the next number of each row. Does not advance."""
        if self.seeds.device.type == "cpu" and len(self) <= FEW_ROWS:  # in Python's integers: fewer microseconds
            return torch.tensor(self.numbers(self.lists()), dtype=torch.int64)
        words = philox(self.seeds, _halves(self.draws) + _halves(self.requests))
        return (words[0] & 0x7FFFFFFF) << 31 | words[1] & 0x7FFFFFFF

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """`words` on the host."""
        return self.seeds.tolist(), self.requests.tolist(), self.draws.tolist()

    def numbers(self, words: tuple[list[int], list[int], list[int]]) -> list[int]:
        """`bits` on the host, of `lists()`."""
        if len(words[0]) > FEW_ROWS:
            return self.bits().tolist()
        return [_bits(seed, draw, request) for seed, request, draw in zip(*words, strict=True)]

    def advanced(self, active: Tensor | None = None) -> Streams:
        """The streams after one draw of the rows that are `active` (bool `[T]`; None: all)."""
        return Streams(self.seeds, self.requests, self.draws + (1 if active is None else active.to(torch.int64)))

    def rows(self, index: Tensor) -> Streams:
        """The streams of these rows, in this order: a batch that shrinks, grows or is reordered."""
        return Streams(self.seeds[index], self.requests[index], self.draws[index])

    def fork(self, parents: Tensor, children: Tensor) -> Streams:
        """Streams of children, such as beams: number 0 goes on with its parent's, the others begin one of their own.

        Args:
            parents: int64 `[N]`, rows.
            children: int64 `[N]`, each child's number among its parent's.
        """
        from_ = self.rows(parents)
        forked = torch.stack([torch.full_like(children, _FORK), children & _MASK])
        words = philox(from_.seeds, [*philox(from_.seeds, _halves(from_.draws) + _halves(from_.requests))[:2], *forked])
        own = children == 0
        return Streams(
            from_.seeds,
            torch.where(own, from_.requests, words[0] << 32 | words[1]),
            torch.where(own, from_.draws, 0),
        )

    def checksum(self) -> Tensor:
        """int64 scalar: of all three, for comparing ranks."""
        return checksum(torch.stack(self.words))

    def state_dict(self) -> dict[str, Any]:
        """What JSON can hold; `from_state_dict` gives the same streams back."""
        return {
            "algorithm": ALGORITHM,
            "seeds": self.seeds.tolist(),
            "requests": self.requests.tolist(),
            "draws": self.draws.tolist(),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device | str = "cpu") -> Streams:
        """The streams of a `state_dict`.

        Raises:
            ValueError: Of another algorithm, or with entries that are no 64-bit integers, one for each row.
        """
        if state.get("algorithm") != ALGORITHM:
            raise ValueError(f"streams of {state.get('algorithm')!r} cannot go on as {ALGORITHM}")
        lists = [state.get(name) for name in ("seeds", "requests", "draws")]
        if any(not isinstance(one, list) or len(one) != len(lists[0] or []) for one in lists):
            raise ValueError("streams need three lists of one length: seeds, requests, draws")
        words = [[_signed(word, "stream word", row) for row, word in enumerate(one or [])] for one in lists]
        return cls(*(torch.tensor(one, dtype=torch.int64, device=device) for one in words))


def check_streams(streams: object, rows: int) -> None:
    """Raises unless these are streams of `rows` rows."""
    if not isinstance(streams, Streams):
        raise ValueError(f"streams must be Streams, got {type(streams).__name__}: Streams.of(seeds)")
    if len(streams) != rows:
        raise ValueError(
            f"streams of {len(streams)} rows for {rows} rows of logits: after rows have left the batch, take theirs "
            "with streams.rows(index)."
        )


def philox(key: Tensor, counter: Sequence[Tensor]) -> Tensor:
    """Philox4x32-10: int64 `[4, T]` of 32-bit words, from int64 keys `[T]` and four 32-bit counter words `[T]`."""
    words = torch.stack([counter[0], counter[2]]), torch.stack([counter[1], counter[3]])
    even, odd = words  # the two that are multiplied, the two that are mixed in
    keys = torch.stack(_halves(key))
    multiplier, weyl = (torch.tensor(pair, device=key.device)[:, None] for pair in (_MULTIPLIERS, _WEYL))
    for round_ in range(10):
        if round_:
            keys = (keys + weyl) & _MASK
        high, low = _product(even, multiplier)
        even, odd = high.flip(0) ^ odd ^ keys, low.flip(0)
    return torch.stack([even[0], odd[0], even[1], odd[1]])


def _bits(seed: int, draw: int, request: int) -> int:
    """`Streams.bits` of one row."""
    (one, other), (weyl_one, weyl_other), mask = _MULTIPLIERS, _WEYL, _MASK
    key, more = seed & mask, (seed >> 32) & mask
    a, b, c, d = draw & mask, (draw >> 32) & mask, request & mask, (request >> 32) & mask
    for _ in range(10):
        first, second = a * one, c * other
        a, b, c, d = (second >> 32) ^ b ^ key, second & mask, (first >> 32) ^ d ^ more, first & mask
        key, more = (key + weyl_one) & mask, (more + weyl_other) & mask
    return (a & 0x7FFFFFFF) << 31 | b & 0x7FFFFFFF


def _product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the 64 of a product of 32-bit numbers: int64 wraps, and its bits are right."""
    product = x * y
    return (product >> 32) & _MASK, product & _MASK


def _halves(x: Tensor) -> list[Tensor]:
    return [x & _MASK, (x >> 32) & _MASK]


def _signed(value: object, what: str, row: int) -> int:
    """64 bits as an int64; a name by its hash."""
    if isinstance(value, str):
        value = int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise ValueError(f"the {what} of row {row} must be an integer of at most 64 bits, got {value!r}")
    return value - 2**64 if value >= 2**63 else value
