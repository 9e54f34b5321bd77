"""Finds the same token in two vocabularies, and the sub-tokens of a new one; says what a map does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.identity import KINDS, ROLES, VocabIdentity
from vocab_parallel.vocabulary.pairing import pair_equal

if TYPE_CHECKING:
    from vocab_parallel.vocabulary.mapping import VocabMap

ALLOW_DROP = "pass allow_drop=True (--allow-drop on the command line) if they are to be lost"
_FEW = 2**12


def match(old: VocabIdentity, new: VocabIdentity) -> Tensor:
    """The new id of each old id, int64 `[old.size]`, -1 where there is none; the rules are `VocabMap.from_vocabs`'s."""
    found = pair_equal(old, torch.arange(old.size), new, torch.arange(new.size))
    unused = _are(old, torch.arange(old.size), "unused").nonzero().flatten()
    found[unused] = -1
    stays = unused[unused < new.size]
    stays = stays[_are(new, stays, "unused")]
    found[stays] = stays
    taken = torch.zeros(new.size, dtype=torch.bool)
    taken[found[found >= 0]] = True
    for role in sorted(old.special_ids, key=_role_order):
        here, there = old.special_ids[role], new.special_ids.get(role)
        if there is None or taken[there] or found[here] >= 0:
            continue
        if old.kinds[here] == new.kinds[there] == "special":
            found[here] = there
            taken[there] = True
    # What has no match yet, and is special on one side and normal on the other, goes by its bytes.
    lost, free = (found < 0).nonzero().flatten(), (~taken).nonzero().flatten()
    for was, now in (("normal", "special"), ("special", "normal")):
        own = lost[_are(old, lost, was)]
        found[own] = pair_equal(old, own, new, free[_are(new, free, now)], by_text=True)
    return found


def require_tokens_kept(old: VocabIdentity, old_to_new: Tensor, new_size: int) -> None:
    """Raises `VocabularyError` if an old token, one that is not unused, has no new id."""
    lost, first = 0, list[int]()
    for block in torch.split((old_to_new < 0).nonzero().flatten(), _FEW):
        named = [token_id for token_id in block.tolist() if old.kinds[token_id] != "unused"]
        lost += len(named)
        first = [*first, *named][:5]
    if lost:
        some = ", ".join(f"{token_id} ({old.named(token_id)})" for token_id in first)
        raise VocabularyError(
            f"{lost:,} of {old.size:,} old tokens are not in the new vocabulary of {new_size:,} ids, the first are "
            f"{some}; {ALLOW_DROP}"
        )


def find_sources(
    new_ids: Tensor, new: VocabIdentity, encode: Callable[[bytes], Sequence[int]], old_size: int
) -> Iterator[tuple[int, Sequence[int]]]:  # new_ids: int64 [n]
    """The old ids of the sub-tokens of each new id that is a token; ids without any are left out.

    Raises:
        VocabularyError: `encode` gave an id outside the old vocabulary.
    """
    for block in torch.split(new_ids, _FEW):
        for new_id in block.tolist():
            if new.kinds[new_id] == "unused" or not (parts := encode(new.tokens[new_id])):
                continue
            if not 0 <= min(parts) <= max(parts) < old_size:
                raise VocabularyError(
                    f"the old tokenizer encodes {new.named(new_id)} as ids {tuple(parts)!r:.60}, but the old "
                    f"vocabulary has {old_size:,} ids: it is not the tokenizer of that vocabulary"
                )
            yield new_id, parts


def describe(mapping: VocabMap, old: VocabIdentity | None, new: VocabIdentity | None, limit: int) -> list[str]:
    """See `VocabMap.describe`."""
    for name, identity, size in (("old", old, mapping.old_size), ("new", new, mapping.new_size)):
        if identity is not None and identity.size != size:
            raise VocabularyError(f"the map's {name} vocabulary has {size:,} ids, the one given {identity.size:,}")
    before, after = mapping.pairs()
    moves = before != after
    lines = [
        f"{mapping.old_size:,} old ids to {mapping.new_size:,} new ids",
        f"{int((~moves).sum()):,} stay at their id",
    ]
    text = f"{int(moves.sum()):,} move to another id"
    pairs = list(zip(before[moves][:limit].tolist(), after[moves][:limit].tolist(), strict=True))
    shown = [f"{here} to {there}{_named(old or new, here if old else there)}" for here, there in pairs]
    lines.append(_with_some(text, shown, int(moves.sum())))
    fresh, dropped = mapping.new_ids, mapping.dropped_ids
    shown = [
        f"{token_id}{_named(new, token_id)}{_parts(mapping, old, token_id)}" for token_id in fresh[:limit].tolist()
    ]
    lines.append(_with_some(f"{fresh.numel():,} are new", shown, fresh.numel()))
    if mapping.sources:
        lines.append(f"{len(mapping.sources):,} of the new ids have source sub-tokens")
    shown = [f"{token_id}{_named(old, token_id)}" for token_id in dropped[:limit].tolist()]
    lines.append(_with_some(f"{dropped.numel():,} are dropped", shown, dropped.numel()))
    if old is not None and new is not None:
        lines.extend(_role_lines(mapping, old, new))
    return lines


def _are(table: VocabIdentity, ids: Tensor, kind: str) -> Tensor:
    """Whether each of some ids is of this kind: bool `[n]`."""
    codes = torch.frombuffer(bytearray(table.kind_codes), dtype=torch.uint8)
    return codes[ids] == KINDS.index(kind)


def _role_order(role: str) -> tuple[int, str]:
    return (ROLES.index(role) if role in ROLES else len(ROLES), role)


def _role_lines(mapping: VocabMap, old: VocabIdentity, new: VocabIdentity) -> list[str]:
    lines = []
    for role in sorted({*old.special_ids, *new.special_ids}, key=_role_order):
        here, there = old.special_ids.get(role), new.special_ids.get(role)
        was = "none" if here is None else f"{old.named(here)} (old id {here})"
        now = "none" if there is None else f"{new.named(there)} (new id {there})"
        if here is None or there is None or int(mapping.old_to_new[here]) != there:
            lines.append(f"the {role} token was {was} and is {now}: not the same row")
    return lines


def _named(identity: VocabIdentity | None, token_id: int) -> str:
    return f" ({identity.named(token_id)})" if identity is not None else ""


def _parts(mapping: VocabMap, old: VocabIdentity | None, new_id: int) -> str:
    parts = mapping.sources.get(new_id)
    return f" from {' + '.join(f'{part}{_named(old, part)}' for part in parts)}" if parts else ""


def _with_some(text: str, shown: Sequence[str], total: int) -> str:
    if not shown:
        return text
    return f"{text}: {', '.join(shown)}{', ...' if total > len(shown) else ''}"
