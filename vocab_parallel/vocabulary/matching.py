"""Finds the same token in two vocabularies, and the sub-tokens of a new one; says what a map does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.identity import ROLES, VocabIdentity

if TYPE_CHECKING:
    from vocab_parallel.vocabulary.mapping import VocabMap


def match(old: VocabIdentity, new: VocabIdentity) -> list[int]:
    """The new id of each old id, -1 where there is none; the rules are those of `VocabMap.from_vocabs`."""
    new_ids: dict[tuple[str, bytes], int] = {}
    further: dict[tuple[str, bytes], list[int]] = {}  # ids of equal tokens after the first, in order
    for token_id, key in enumerate(zip(new.kinds, new.tokens, strict=True)):
        if new_ids.setdefault(key, token_id) != token_id:
            further.setdefault(key, []).append(token_id)
    found = [new_ids.get(key, -1) for key in zip(old.kinds, old.tokens, strict=True)]
    _share_equals(found, old, further)
    for token_id, kind in enumerate(old.kinds):
        if kind == "unused":
            stays = token_id < new.size and new.kinds[token_id] == "unused"
            found[token_id] = token_id if stays else -1
    taken = set(found)
    for role in sorted(old.special_ids, key=_role_order):
        here, there = old.special_ids[role], new.special_ids.get(role)
        if there is None or there in taken or found[here] >= 0:
            continue
        if old.kinds[here] == new.kinds[there] == "special":
            found[here] = there
            taken.add(there)
    _match_text(found, old, new, taken)
    return found


def find_sources(
    new_ids: Sequence[int], new: VocabIdentity, encode: Callable[[bytes], Sequence[int]], old_size: int
) -> dict[int, tuple[int, ...]]:
    """The old ids of the sub-tokens of each new id that is a token; ids without any are left out.

    Raises:
        VocabularyError: `encode` gave an id outside the old vocabulary.
    """
    sources = {}
    for new_id in new_ids:
        if new.kinds[new_id] == "unused" or not (parts := tuple(encode(new.tokens[new_id]))):
            continue
        if not 0 <= min(parts) <= max(parts) < old_size:
            raise VocabularyError(
                f"the old tokenizer encodes {new.named(new_id)} as ids {parts!r:.60}, but the old vocabulary has "
                f"{old_size:,} ids: it is not the tokenizer of that vocabulary"
            )
        sources[new_id] = parts
    return sources


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


def _share_equals(found: list[int], old: VocabIdentity, further: dict[tuple[str, bytes], list[int]]) -> None:
    """The n-th of equal old tokens takes the n-th of the equal new ones; `found` has the first for all of them."""
    seen: dict[int, int] = {}
    for token_id, target in enumerate(found):
        if target < 0:
            continue
        count = seen.get(target, 0)
        seen[target] = count + 1
        if count:
            others = further.get((old.kinds[token_id], old.tokens[token_id]), [])
            found[token_id] = others[count - 1] if count <= len(others) else -1


def _match_text(found: list[int], old: VocabIdentity, new: VocabIdentity, taken: set[int]) -> None:
    """What has no match yet, and is special on one side and normal on the other, goes by its bytes."""
    other = {"normal": "special", "special": "normal"}
    lost: dict[tuple[str, bytes], int] = {}
    for token_id, kind in enumerate(old.kinds):
        if found[token_id] < 0 and kind in other:
            lost.setdefault((other[kind], old.tokens[token_id]), token_id)
    for new_id, key in enumerate(zip(new.kinds, new.tokens, strict=True)):
        if new_id not in taken and (old_id := lost.pop(key, None)) is not None:
            found[old_id] = new_id


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
