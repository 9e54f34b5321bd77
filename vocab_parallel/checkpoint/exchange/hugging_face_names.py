"""What the names and the configuration of a Hugging Face directory say: which tensors are tables, and what is tied."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vocab_parallel.checkpoint.exchange.safetensors_files import SafetensorsFiles
from vocab_parallel.errors import CheckpointLayoutError, VocabularyError
from vocab_parallel.vocabulary.files import read_bytes, too_many
from vocab_parallel.vocabulary.manifest.describing import scores_of

CONFIG = "config.json"
_LARGEST_CONFIG, _MOST_LISTS = 2**25, 2**20
_SECTIONS = ("text_config", "llm_config", "language_config", "decoder", "generator")  # of models of more than text

# Architectures that have an embedding and another head than that of a language model, or none.
_WITHOUT_HEAD = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel", "ForTextEncoding")

# The module that holds a table, as the field names it; those of the second line only where their rows fit.
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "tokens_embed", "word_embedding")
EMBEDDINGS_TOO = ("embeddings", "embedding", "shared")
HEADS = ("lm_head", "embed_out", "output_layer", "output_projection", "proj_out", "lm_loss", "generator_lm_head")
HEADS_TOO = ("output", "head", "decoder", "predictions")


class ModelConfig:
    """A config.json, whose language model's fields may lie in a section of it.

    Attributes:
        values: As they stand there.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    @classmethod
    def read(cls, path: Path) -> ModelConfig:
        """Of a file.

        Raises:
            CheckpointLayoutError: No such file, or no JSON object.
        """
        try:
            data = read_bytes(path, _LARGEST_CONFIG)
            if too_many(data, _MOST_LISTS):
                raise VocabularyError(f"more than {_MOST_LISTS:,} lists")
            values = json.loads(data)  # with Infinity, which Transformers writes
        except OSError as error:
            raise CheckpointLayoutError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointLayoutError(f"{path} is not JSON ({str(error)[:200]})") from error
        if not isinstance(values, dict):
            raise CheckpointLayoutError(f"{path} is no JSON object")
        return cls(values)

    def get(self, name: str) -> Any:
        """A field of the language model's section, else of the top; None if neither has it."""
        return next((one[name] for one in (*self._sections(), self.values) if one.get(name) is not None), None)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the tables, as the configuration says."""
        found = self.get("vocab_size")
        return found if type(found) is int and found > 0 else None

    @property
    def tied(self) -> bool | None:
        """Whether the head is the embedding; None if it does not say, or its sections say both."""
        said = [one.get("tie_word_embeddings") for one in (self.values, *self._sections())]
        known = {one for one in said if isinstance(one, bool)}
        return known.pop() if len(known) == 1 else None

    @property
    def has_head(self) -> bool:
        """Whether the architecture has a language model's head: ``LlamaModel`` has none, ``GPT2LMHeadModel`` one."""
        found = self.values.get("architectures")
        names = [str(name) for name in found] if isinstance(found, list) else []
        of_text = [name for name in names if not any(word in name for word in _WITHOUT_HEAD)]
        return not names or any("Head" in name or not name.endswith("Model") for name in of_text)

    def scores(self) -> dict[str, Any]:
        """What the model's forward does to its logits, as a manifest has it."""
        return scores_of(self.get)

    def corrected(
        self, *, vocab_size: int, tied: bool | None, dtype: str | None
    ) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
        """The values for tables of other rows and (if given) ties and dtype; and in words what has changed."""
        wanted = {"vocab_size": vocab_size, "tie_word_embeddings": tied, "dtype": dtype, "torch_dtype": dtype}
        needed = {"vocab_size": self.vocab_size is None, "tie_word_embeddings": self.tied is None}
        changes: list[str] = []
        values = {**self.values, **{name: {**self.values[name]} for name in self._section_names()}}
        for where, one in (("", values), *((f"{name}.", values[name]) for name in self._section_names())):
            for name, value in wanted.items():
                stands = one.get(name) is not None or (not where and needed.get(name, False))
                if value is not None and stands and one.get(name) != value:
                    changes.append(f"{where}{name} {json.dumps(one.get(name))} is now {json.dumps(value)}")
                    one[name] = value
        return values, changes

    def require_plain(self, dtype: torch.dtype | None) -> None:
        """Raises if the model is quantised and its numbers are to get another dtype."""
        if dtype is not None and self.get("quantization_config"):
            raise CheckpointLayoutError(
                f"{CONFIG} has a quantization_config: {dtype} would change scales and leave what they scale. Convert "
                "without --dtype, or dequantise the model first"
            )

    def _sections(self) -> Iterator[dict[str, Any]]:
        yield from (self.values[name] for name in self._section_names())

    def _section_names(self) -> list[str]:
        return [name for name in _SECTIONS if isinstance(self.values.get(name), dict)]


@dataclass(frozen=True)
class Tables:
    """The tensors over the vocabulary of a directory.

    Attributes:
        embedding, head: Names of the two weights; one of them is None if the files hold one only.
        copies: Further embeddings and heads to the first, as encoders, decoders and layers that predict further tokens
            have them: they must be equal.
        names: Of all tables, the embedding first, then the head, then others such as biases.
        rows: Of the longest, padding included.
    """

    embedding: str | None
    head: str | None
    copies: Mapping[str, str]
    names: tuple[str, ...]
    rows: int


def find_tables(folder: Path, files: SafetensorsFiles, vocab_size: int, given: Sequence[str] | None) -> Tables:
    """Which tensors are tables: by the names of the field and by their rows, or as given.

    Raises:
        CheckpointLayoutError: None, or several that do not fit each other; naming what could be meant.
    """
    shapes = {name: place.shape for name, place in files.places.items()}
    hint = f"candidates: {', '.join(_candidates(shapes, vocab_size))}"
    if given is not None:
        if missing := [name for name in given if not _rows(shapes.get(name, ())) or given.count(name) > 1]:
            raise CheckpointLayoutError(f"{folder} has no table {missing[0]}, or it is named twice; {hint}")
        named = list(given)
        short = [name for name in given if _rows(shapes[name]) < vocab_size]
    else:
        named = [name for name, shape in shapes.items() if _is_named(name) and _rows(shape) >= vocab_size]
        short = [name for name, shape in shapes.items() if _strong(name) and 0 < _rows(shape) < vocab_size]
    if short:
        raise CheckpointLayoutError(
            f"{folder}: {short[0]} has {_rows(shapes[short[0]]):,} rows, the vocabulary {vocab_size:,} ids. Give the "
            f"right --vocab-size, or name the tables by --tables; {hint}"
        )
    weights = [name for name in named if len(shapes[name]) == 2 and (given is not None or name.endswith("weight"))]
    embeddings = [name for name in weights if _module(name) in (*EMBEDDINGS, *EMBEDDINGS_TOO)]
    embeddings.sort(key=lambda name: (_module(name) != "shared", name.count(".")))
    heads = sorted((name for name in weights if name not in embeddings), key=lambda name: name.count("."))
    if given is not None:  # the first is the embedding, whatever it is called
        embeddings, heads = weights[:1], weights[1:2]
    uneven = given is None and len({_rows(shapes[name]) for name in named}) > 1
    if not weights or uneven:
        what = "no table is known by its name" if not weights else "which tensors are the tables is not clear"
        raise CheckpointLayoutError(
            f"{folder}: {what} among those of {vocab_size:,} rows or more. Name them by --tables, the embedding before "
            f"the head; {hint}"
        )
    first = [*embeddings[:1], *heads[:1]]
    names = (*first, *[name for name in named if name not in first])
    copies = {copy: kind[0] for kind in (embeddings, heads) for copy in kind[1:]}
    rows = max(_rows(shapes[name]) for name in named)
    return Tables(next(iter(embeddings), None), next(iter(heads), None), copies, names, rows)


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _is_named(name: str) -> bool:
    return _module(name) in (*EMBEDDINGS, *EMBEDDINGS_TOO, *HEADS, *HEADS_TOO)


def _strong(name: str) -> bool:
    return _module(name) in (*EMBEDDINGS, *HEADS) and name.endswith("weight")


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 0


def _candidates(shapes: Mapping[str, Sequence[int]], vocab_size: int) -> list[str]:
    found = [name for name, shape in shapes.items() if _is_named(name) or _rows(shape) >= vocab_size]
    found = found or sorted(shapes, key=lambda name: -_rows(shapes[name]))[:4]
    return [f"{name} {list(shapes[name])}" for name in found[:8]]
