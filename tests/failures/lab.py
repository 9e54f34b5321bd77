"""The failure lab: each known mistake has one test, which names what the interface answers to it.

    @failure(18, "Cross entropy over the time axis instead of the vocabulary", "refused",
             "The last dimension must be the shard's columns, so another axis is an error on every rank.")
    def test_the_vocabulary_is_the_last_axis_or_nothing(): ...

`python -m tests.failures` writes docs/failures.md from these marks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vocab_parallel import VocabLayout, VocabShard

ANSWERS = {
    "impossible": "no argument of the interface can say it",
    "refused": "an error, the same on every rank",
    "shown": "a test shows the right result beside the one that the mistake gives",
}
COUNT = 66

_Test = TypeVar("_Test", bound=Callable[..., Any])


@dataclass(frozen=True)
class Failure:
    """A known mistake and what becomes of it here.

    Attributes:
        number: Its place in the list, 1 to 66.
        title: The mistake, in a few words, without a full stop.
        answer: One of `ANSWERS`.
        how: What the interface does about it: a sentence.
    """

    number: int
    title: str
    answer: str
    how: str

    def __post_init__(self) -> None:
        if not 1 <= self.number <= COUNT:
            raise ValueError(f"failures have the numbers 1 to {COUNT}, got {self.number}")
        if self.answer not in ANSWERS:
            raise ValueError(f"failure {self.number}: the answer is one of {', '.join(ANSWERS)}, got {self.answer!r}")
        if not self.title or self.title.endswith(".") or not self.how.endswith("."):
            raise ValueError(f"failure {self.number}: the title has no full stop, the sentence after it has one")


def failure(number: int, title: str, answer: str, how: str) -> Callable[[_Test], _Test]:
    """Marks a test as the one that shows a failure, and what is done about it."""
    one = Failure(number, title, answer, how)

    def mark(test: _Test) -> _Test:
        test.failure = one  # type: ignore[attr-defined]
        return test

    return mark


def whole_shard(vocab_size: int, *, multiple_of: int = 1) -> VocabShard:
    """The whole vocabulary on one rank, without a process group."""
    return VocabShard(VocabLayout(vocab_size, 1, multiple_of=multiple_of))


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The class and the message of the error that a call must raise: what a rank can send home."""
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"no error, but {result!r}")


def the_same_on_all(results: Sequence[Any]) -> Any:
    """What every rank has, plain values; an error if they differ."""
    assert all(result == results[0] for result in results), f"the ranks differ: {list(results)}"
    return results[0]
