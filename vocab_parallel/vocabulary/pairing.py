"""Equal tokens of two tables, found by sorted hashes: a dictionary of them takes some 200 bytes a token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vocab_parallel.vocabulary.identity import VocabIdentity

_MIX = 0x1E3779B97F4A7C15  # odd: each kind moves the hashes elsewhere
_FEW = 2**12
_AT_ONCE = 2**14


def pair_equal(
    old: VocabIdentity, old_ids: Tensor, new: VocabIdentity, new_ids: Tensor, *, by_text: bool = False
) -> Tensor:  # old_ids: int64 [n], new_ids: int64 [m], both ascending
    """For each of some old ids, the one of some new ids that is the same token; -1 where there is none: int64 `[n]`.

    Of equal tokens the n-th takes the n-th. Hashes only propose: all that they call equal is compared.

    Args:
        by_text: the kind does not count, and of equal tokens only the first has a partner.

    Memory:
        20 bytes a token, and 2 MB.
    """
    found = torch.full_like(old_ids, -1)
    salt, done = 0, False
    while not done:
        try:
            for here, part in _parts(old, old_ids, new, new_ids, salt, by_text):
                found[here] = part
            done = True
        except _Collision:
            salt += 1
    return found


def _parts(
    old: VocabIdentity, old_ids: Tensor, new: VocabIdentity, new_ids: Tensor, salt: int, by_text: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Places among `old_ids` and the new ids for them; some hashes at a time, so that equal tokens come together."""
    own, others = _hashes(old, old_ids, salt, by_text), _hashes(new, new_ids, salt, by_text)
    parts = 1 << (max(len(old_ids), len(new_ids)) // _AT_ONCE).bit_length()
    for part in range(parts):
        here, there = (((hashes & (parts - 1)) == part).nonzero().flatten() for hashes in (own, others))
        one = _Some(old, old_ids[here], own[here], by_text)
        yield here, _pair(one, _Some(new, new_ids[there], others[there], by_text), once=by_text)


class _Collision(Exception):
    """Different tokens have one hash. Another salt gives others."""


class _Some:
    """Some tokens of a table.

    Attributes:
        hashes: int64 [n].
        order: int64 [n], their places by ascending hash; equal ones in order of their ids.
    """

    def __init__(self, table: VocabIdentity, ids: Tensor, hashes: Tensor, by_text: bool) -> None:
        self.table, self.ids, self.hashes, self.by_text = table, ids, hashes, by_text
        ordered, self.order = self.hashes.sort(stable=True)
        same = (torch.diff(ordered) == 0).nonzero().flatten()
        _require_equal(self, self.order[same], self, self.order[same + 1])

    def turns(self) -> Tensor:
        """For each token, how many equal ones are before it: int64 `[n]`."""
        ordered = self.hashes[self.order]
        result = torch.empty_like(self.order)
        result[self.order] = torch.arange(len(ordered)) - torch.searchsorted(ordered, ordered)
        return result

    def keys(self, places: Tensor) -> Iterator[tuple[str | None, bytes]]:
        """What must be equal of the tokens at these places."""
        tokens, kinds = self.table.tokens, self.table.kinds
        for block in torch.split(self.ids[places], _FEW):
            for token_id in block.tolist():
                yield None if self.by_text else kinds[token_id], tokens[token_id]


def _pair(old: _Some, new: _Some, *, once: bool) -> Tensor:
    found = torch.full_like(old.ids, -1)
    if not len(old.ids) or not len(new.ids):
        return found
    ordered, at = new.hashes[new.order], old.turns()
    fits = at == 0 if once else torch.ones_like(at, dtype=torch.bool)
    at += torch.searchsorted(ordered, old.hashes)
    fits &= at < torch.searchsorted(ordered, old.hashes, right=True)
    del ordered
    here = fits.nonzero().flatten()
    there = new.order[at[here]]
    _require_equal(old, here, new, there)
    found[here] = new.ids[there]
    return found


def _require_equal(one: _Some, places: Tensor, other: _Some, others: Tensor) -> None:
    """Raises unless the tokens at these places are the same, pair by pair."""
    if any(a != b for a, b in zip(one.keys(places), other.keys(others), strict=True)):
        raise _Collision


def _hashes(table: VocabIdentity, ids: Tensor, salt: int, by_text: bool) -> Tensor:
    prefix = salt.to_bytes(2, "little") if salt else b""
    hashes = torch.empty_like(ids)
    for part, block in zip(torch.split(hashes, _FEW), torch.split(ids, _FEW), strict=True):
        tokens = map(table.tokens.__getitem__, block.tolist())
        part.copy_(torch.tensor([token_hash(prefix + token) for token in tokens], dtype=torch.int64))
    if not by_text:
        hashes ^= torch.frombuffer(bytearray(table.kind_codes), dtype=torch.uint8)[ids].long() * _MIX
    return hashes


def token_hash(token: bytes) -> int:
    """64 bits of a token; differs from process to process."""
    return hash(token)
