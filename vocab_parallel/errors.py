"""The error tree. Every error a user can catch derives from `VocabParallelError`."""

from __future__ import annotations


class VocabParallelError(Exception):
    """Root of the tree."""


class LayoutError(VocabParallelError, ValueError):
    """A layout that cannot exist, such as a padded size below the vocabulary size."""


class LayoutMismatchError(VocabParallelError, ValueError):
    """Shapes, dtypes or options that disagree, between arguments or between ranks."""


class TokenRangeError(VocabParallelError, ValueError):
    """A token id outside `[0, vocab_size)`."""


class TargetRangeError(TokenRangeError):
    """A target outside `[0, vocab_size)` that is not `ignore_index`."""


class NonFiniteError(VocabParallelError, ValueError):
    """A row with NaN, or with no finite logit."""


class EmptySupportError(NonFiniteError):
    """A row that masks or a truncation have left without any token."""


class UngatheredWeightError(VocabParallelError, ValueError):
    """A weight with zero rows: a ZeRO-3 parameter that has not been gathered."""


class TyingError(VocabParallelError, ValueError):
    """Two uses of one weight that are not one Parameter, or stopped being one."""


class CheckpointLayoutError(VocabParallelError, ValueError):
    """A checkpoint of another vocabulary or layout."""


class VocabularyError(VocabParallelError, ValueError):
    """A vocabulary file that cannot be read, or a mapping of ids that is no partial bijection."""


class ConfigError(VocabParallelError, ValueError):
    """A configuration with an unknown key or a value of the wrong type."""


class CollectiveError(VocabParallelError, RuntimeError):
    """A collective that failed, with its name and this rank."""


def rebuild(class_name: str, message: str) -> Exception:
    """Makes again, on this rank, an error that another rank described by class name and message."""
    found = globals().get(class_name) or {"ValueError": ValueError, "TypeError": TypeError}.get(class_name)
    if isinstance(found, type) and issubclass(found, Exception):
        return found(message)
    return VocabParallelError(f"{class_name}: {message}")
