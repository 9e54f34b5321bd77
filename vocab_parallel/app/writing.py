"""Text as it comes: whole characters only, and several requests in their order."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from vocab_parallel.app.vocabulary import Vocabulary


class Writer:
    """Shows requests one after the other, each as far as its text has come.

    The first that has not ended is shown at once; what comes for the later ones is kept until it is their turn. So what
    is shown does not depend on which request is how fast.

    Args:
        openings: What is shown before each request's new text.
        show: Takes pieces of text.
    """

    def __init__(self, vocabulary: Vocabulary, openings: Sequence[str], show: Callable[[str], None]) -> None:
        self._texts = [Text(vocabulary) for _ in openings]
        self._kept = list(openings)
        self._ended = [False] * len(openings)
        self._at, self._show = 0, show
        self._shown()

    def add(self, request: int, token_id: int) -> None:
        """One more id of a request."""
        self._kept[request] += self._texts[request].add(token_id)
        self._shown()

    def end(self, request: int) -> None:
        """A request has all its ids."""
        if not self._ended[request]:
            self._kept[request] += self._texts[request].end() + "\n"
            self._ended[request] = True
            self._shown()

    def _shown(self) -> None:
        while self._at < len(self._kept):
            if self._kept[self._at]:
                self._show(self._kept[self._at])
                self._kept[self._at] = ""
            if not self._ended[self._at]:
                return
            self._at += 1


class Text:
    """Token ids to text, piece by piece: a character is given once all its bytes are there."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """What the id completes; nothing for a special id."""
        return self._decoder.decode(self._vocabulary.decode_bytes([token_id]))

    def end(self) -> str:
        """What is left of a character that never ended: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
