"""Collects the entries of a vocabulary file and refuses what no vocabulary can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS, shortened
from vocab_parallel.vocabulary.identity import VocabIdentity

SPARE_IDS = 2**16  # ids without an entry, beyond three for each that has one: more is a broken file


class Table:
    """Entries by id, in any order; ids that no entry names are unused.

    Args:
        path: the file, for messages.
        source: the format, see `VocabIdentity`.
    """

    def __init__(self, path: object, source: str) -> None:
        self.path = path
        self.source = source
        self.entries: dict[int, tuple[str, bytes]] = {}

    def put(self, token_id: object, kind: str, token: bytes, place: str) -> None:
        """Adds the entry of an id; a second one for the same id is an error."""
        if type(token_id) is not int or not 0 <= token_id < MAX_IDS:
            what = f"expected an id in [0, {MAX_IDS:,}), found {shortened(token_id)}"
            raise VocabularyError(f"{self.path}: {place}: {what}")
        if token_id in self.entries:
            there = shortened(self.entries[token_id][1])
            raise VocabularyError(
                f"{self.path}: {place}: id {token_id} is {shortened(token)} here and {there} in an earlier entry"
            )
        self.entries[token_id] = (kind, token)

    def find(self, kind: str, token: bytes) -> int | None:
        """The lowest id with this kind and these bytes."""
        return min((token_id for token_id, entry in self.entries.items() if entry == (kind, token)), default=None)

    def identity(
        self, special_ids: Mapping[str, int], added: Sequence[int] = (), size: int | None = None
    ) -> VocabIdentity:
        """The table as an identity.

        Args:
            special_ids: role to id.
            added: ids of added tokens in the order of the file.
            size: number of ids, where the file states it; otherwise the largest id and one.

        Raises:
            VocabularyError: no entries, or ids so far apart that the file must be broken.
        """
        if not self.entries:
            raise VocabularyError(f"{self.path}: no tokens in this {self.source} file")
        last = max(self.entries)
        size = last + 1 if size is None else size
        if size > 4 * len(self.entries) + SPARE_IDS:
            what = f"{len(self.entries):,} tokens, but ids up to {size - 1:,} (the last, {last:,}, is "
            raise VocabularyError(f"{self.path}: {what}{shortened(self.entries[last][1])}); is an id damaged?")
        rows = [self.entries.get(token_id, ("unused", b"")) for token_id in range(size)]
        tokens, kinds = tuple(token for _, token in rows), tuple(kind for kind, _ in rows)
        try:
            return VocabIdentity(tokens, kinds, special_ids, tuple(added), self.source)
        except VocabularyError as error:
            raise VocabularyError(f"{self.path}: {error}") from error
