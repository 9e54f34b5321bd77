"""What configurations of models repeat of a vocabulary: its size, and ids of tokens, which move with their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vocab_parallel.vocabulary.mapping import VocabMap

SIZES = ("vocab_size", "decoder_vocab_size")
_ENDS = ("_token_id", "_token_ids", "_token_index", "suppress_tokens", "bad_words_ids", "force_words_ids")


def holds_ids(key: str) -> bool:
    """Whether a setting of this name, as Transformers has them, is an id of a token or a list of some."""
    return key.endswith(_ENDS)


def moved_ids(value: Any, vocab_map: VocabMap, lost: Callable[[int], int | None]) -> Any:
    """Ids where their tokens are now: one, a list, or a list of sequences; what is no old id stays.

    Args:
        lost: What stands for the id of a dropped token; None: it is left out, and a sequence with it is too.
    """

    def moved(one: Any) -> Any:
        if type(one) is not int or not 0 <= one < vocab_map.old_size:
            return one
        new = int(vocab_map.old_to_new[one])
        return new if new >= 0 else lost(one)

    if not isinstance(value, list | tuple):
        return moved(value)
    if any(isinstance(one, list | tuple) for one in value):
        inner = [[moved(each) for each in one] if isinstance(one, list | tuple) else moved(one) for one in value]
        return [one for one in inner if one is not None and not (isinstance(one, list) and None in one)]
    found: list[Any] = []
    seen: set[int] = set()
    for one in map(moved, value):
        if one is not None and not (type(one) is int and one in seen):
            found.append(one)
            seen.update([one] if type(one) is int else [])
    return found
