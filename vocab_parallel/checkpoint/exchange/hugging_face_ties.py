"""Ties of a Hugging Face directory: what the configuration says against what the files hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from vocab_parallel.checkpoint.exchange.hugging_face_names import CONFIG, ModelConfig, Tables
from vocab_parallel.checkpoint.exchange.safetensors_files import SafetensorsFiles, row_ranges
from vocab_parallel.errors import CheckpointLayoutError

# An embedding's name ends so: its head's name. The first that fits.
_HEAD_OF = (
    ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
    ("gpt_neox_japanese.embed_in.weight", "embed_out.weight"),
    ("biogpt.embed_tokens.weight", "output_projection.weight"),
    ("rwkv.embeddings.weight", "head.weight"),
    ("", "lm_head.weight"),
)
# Another tensor's name begins so: the embedding's name, in a file that names the head alone.
_EMBEDDING_OF = (
    ("model.language_model.", "model.language_model.embed_tokens.weight"),
    ("model.decoder.", "model.decoder.embed_tokens.weight"),
    ("model.", "model.embed_tokens.weight"),
    ("transformer.h.", "transformer.wte.weight"),
    ("gpt_neox.", "gpt_neox.embed_in.weight"),
)


def names_and_ties(
    source: Path, files: SafetensorsFiles, config: ModelConfig, tables: Tables, real: int
) -> tuple[dict[str, str], dict[str, str]]:
    """The name of each tensor in the model with its name in the files, and the ties."""
    names = {name: name for name in files.places}
    embedding, head, tied = tables.embedding, tables.head, config.tied
    if embedding is not None and head is not None:
        equal = tied is not False and _equal(files, embedding, head, real)
        if tied and not equal:
            raise CheckpointLayoutError(
                f"{source}: {CONFIG} says tie_word_embeddings, but {embedding} and {head} are two different tensors. "
                'If the model has two weights, write "tie_word_embeddings": false there; if one, take the other out'
            )
        if not equal:
            return names, {}
        del names[head]
        return names, {head: embedding}
    if tied is False and config.has_head:
        raise CheckpointLayoutError(
            f"{source}: {embedding or head} is the only table, but by {CONFIG} embedding and head are not tied: a file "
            'is missing, or the model is tied and "tie_word_embeddings": true is right there'
        )
    if embedding is not None:
        return names, {head_name(embedding, files.metadata): embedding} if config.has_head else {}
    assert head is not None
    first = embedding_name(head, files)
    return {first if name == head else name: name for name in names}, {head: first}


def _equal(files: SafetensorsFiles, one: str, other: str, rows: int) -> bool:
    """Whether the real rows of two tables have the same bits."""
    first, second = files.places[one], files.places[other]
    if first.dtype != second.dtype or first.shape[1:] != second.shape[1:]:
        return False
    return all(
        files.read(one, start, stop).view(torch.uint8).equal(files.read(other, start, stop).view(torch.uint8))
        for start, stop in row_ranges((rows, *first.shape[1:]), first.dtype)
    )


def head_name(embedding: str, metadata: Mapping[str, str]) -> str:
    """The name of the head that is tied to an embedding, from a file that holds it once."""
    kept = [alias for alias, name in metadata.items() if name == embedding]  # as safetensors' save_model notes it
    return kept[0] if kept else next(head for end, head in _HEAD_OF if embedding.endswith(end))


def embedding_name(head: str, files: SafetensorsFiles) -> str:
    """The name of the embedding that is tied to a head, from a file that holds it once.

    Raises:
        CheckpointLayoutError: No other name tells which model this is.
    """
    kept = [alias for alias, name in files.metadata.items() if name == head]
    known = [name for begin, name in _EMBEDDING_OF if any(key.startswith(begin) for key in files.places)]
    if not kept and not known:
        raise CheckpointLayoutError(
            f"{head} is tied to an embedding that no file has the name of: save the model again"
        )
    return kept[0] if kept else known[0]
