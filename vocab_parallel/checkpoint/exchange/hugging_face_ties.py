"""Ties of a Hugging Face directory: what the configuration says against what the files hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vocab_parallel.checkpoint.exchange.hugging_face_names import CONFIG, ModelConfig, Tables
from vocab_parallel.checkpoint.exchange.safetensors_files import SafetensorsFiles, row_ranges
from vocab_parallel.errors import CheckpointLayoutError

# Another tensor's name begins so: the head's name, in a file that names the embedding alone. The first that fits.
_HEAD_OF = (
    ("language_model.model.", "language_model.lm_head.weight"),
    ("text_model.model.", "text_model.lm_head.weight"),
    ("cls.predictions.", "cls.predictions.decoder.weight"),
    ("predictions.", "predictions.decoder.weight"),
    ("lm_head.dense.", "lm_head.decoder.weight"),
    ("generator_predictions.", "generator_lm_head.weight"),
    ("vocab_projector.", "vocab_projector.weight"),
    ("lm_loss.", "lm_loss.weight"),
    ("pred_layer.proj.", "pred_layer.proj.weight"),
    ("model.encoder.conv1.", "proj_out.weight"),
    ("gpt_neox_japanese.", "embed_out.weight"),
    ("biogpt.", "output_projection.weight"),
    ("rwkv.", "head.weight"),
    ("", "lm_head.weight"),
)
# The same for the embedding's name, in a file that names the head alone.
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
    """The name of each tensor in the model with its name in the files, and the ties, a head's first."""
    names = {name: name for name in files.places}
    embedding, head, tied = tables.embedding, tables.head, config.tied
    ties = dict(tables.copies)
    for copy, first in ties.items():
        if not _equal(files, first, copy, real):
            raise CheckpointLayoutError(
                f"{source}: which tensors are the tables is not clear: {first} and {copy} are two different tensors. "
                "Name the tables by --tables, the embedding before the head; others then stay as they are"
            )
        del names[copy]
    if embedding is not None and head is not None:
        equal = tied is not False and _equal(files, embedding, head, real)
        if tied and not equal:
            raise CheckpointLayoutError(
                f"{source}: {CONFIG} says tie_word_embeddings, but {embedding} and {head} are two different tensors. "
                'If the model has two weights, write "tie_word_embeddings": false there; if one, take the other out'
            )
        if not equal:
            return names, ties
        del names[head]
        return names, {head: embedding, **dict.fromkeys(ties, embedding)}
    if tied is False and config.has_head:
        raise CheckpointLayoutError(
            f"{source}: {embedding or head} is the only table, but by {CONFIG} embedding and head are not tied: a file "
            'is missing, or the model is tied and "tie_word_embeddings": true is right there'
        )
    if embedding is not None and not config.has_head:
        return names, ties
    made = _partner(str(embedding or head), files, _HEAD_OF if embedding is not None else _EMBEDDING_OF)
    if made in names:
        raise CheckpointLayoutError(
            f"{source}: {embedding or head} is the only table, and {made}, which would be tied to it, is a tensor of "
            "its own: name both by --tables, the embedding before the head"
        )
    if embedding is not None:
        return names, {made: embedding, **ties}
    return {made if name == head else name: name for name in names}, {str(head): made, **dict.fromkeys(ties, made)}


def _equal(files: SafetensorsFiles, one: str, other: str, rows: int) -> bool:
    """Whether the real rows of two tables have the same bits."""
    first, second = files.places[one], files.places[other]
    if first.dtype != second.dtype or first.shape[1:] != second.shape[1:]:
        return False
    return all(
        files.read(one, start, stop).view(torch.uint8).equal(files.read(other, start, stop).view(torch.uint8))
        for start, stop in row_ranges((rows, *first.shape[1:]), first.dtype)
    )


def _partner(name: str, files: SafetensorsFiles, known: Sequence[tuple[str, str]]) -> str:
    """The other name of a tied weight that the files hold once."""
    kept = [alias for alias, held in files.metadata.items() if held == name]  # as safetensors' save_model notes it
    found = kept + [other for begin, other in known if any(key.startswith(begin) for key in files.places)]
    if not found:
        raise CheckpointLayoutError(f"{name} is tied to an embedding that no file names: save the model again")
    return found[0]
