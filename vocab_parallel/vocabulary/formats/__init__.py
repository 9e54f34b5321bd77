"""Vocabularies from the files of tokenizers, whatever their format."""

from vocab_parallel.vocabulary.formats.encoders import old_encoder
from vocab_parallel.vocabulary.formats.reading import find_file, read_vocabulary, tell
from vocab_parallel.vocabulary.formats.tables import byte_identity

__all__ = ["byte_identity", "find_file", "old_encoder", "read_vocabulary", "tell"]
