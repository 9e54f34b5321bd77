"""Small checkpoints, tokenizers and policies for tests of releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from vocab_parallel import VocabLayout
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest

TOKENS = ["<pad>", "<s>", "</s>", "a", "b", "c", "d", "e", "f"]
ROLES = {"pad": 0, "bos": 1, "eos": 2}
POLICY = {
    "version": 1, "name": "careful", "selector": "sample", "fallback": "error", "vocab_size": 9,
    "special_ids": {"eos": 2},
    "transforms": [{"name": "suppress", "token_ids": [0]}, {"name": "temperature", "temperature": 0.5}],
}  # fmt: skip


def tokenizer_file(path: Path, tokens: list[str] = TOKENS) -> Path:
    """A tokenizer.json whose first three tokens are special."""
    added = [
        {"id": at, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for at, token in enumerate(tokens[:3])
    ]  # fmt: skip
    vocab = {token: at for at, token in enumerate(tokens)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": tokens[0]}
    data = {"version": "1.0", "added_tokens": added, "pre_tokenizer": None, "model": model}
    path.write_text(json.dumps(data))
    return path


def identity_of(tokens: list[str] = TOKENS) -> VocabIdentity:
    return VocabIdentity.of_tokens(tokens, special_ids=ROLES, added=(0, 1, 2))


def checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    tokens: list[str] = TOKENS,
    tp: int = 2,
    width: int = 6,
    bias: bool = True,
    edit: Any = None,
    manifest: bool = True,
    dtype: torch.dtype = torch.float32,
    rows: int | None = None,
    table: bool = True,
) -> Path:
    """A checkpoint of a small model with AdamW's state, over `tp` ranks; `rows` may be more than there are tokens."""
    draw = torch.Generator().manual_seed(seed)
    size = rows or len(tokens)
    layout = VocabLayout(size, tp, multiple_of=1)
    tables = {"embedding.weight": (size, width)}
    if not tied:
        tables["head.weight"] = (size, width)
    if bias:
        tables["head.bias"] = (size,)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in tables.items():
        tensors[f"model.{name}"] = torch.randn(shape, generator=draw).to(dtype)
        for state in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{state}"] = torch.rand(shape, generator=draw).to(dtype)
        tensors[f"optimizer.{name}.step"] = torch.tensor(7.0)
    tensors["model.trunk.weight"] = torch.randn(width, width, generator=draw).to(dtype)
    ties = {"head.weight": "embedding.weight"} if tied else {}
    names = list(tables)
    if edit is not None:
        edit(tensors, ties)
    parts = []
    for rank in range(tp):
        ids = layout.range(rank)
        parts.append({
            key: Rows.of(value[ids.start : ids.stop], ids.start, size) if value.shape[:1] == (size,) else value
            for key, value in tensors.items()
        })  # fmt: skip
    identity = identity_of(tokens).resized(size)
    saved = Manifest.of_tensors(
        {key: (value.dtype, value.shape) for key, value in tensors.items()},
        tables=names, ties=ties, layout=layout, identity=identity, step=7,
    )  # fmt: skip
    described = {"vocab_size": size, "padded_size": layout.padded_size, "tp_size": tp}
    state = make_state(7, tensors, layout=described, tables=names, ties=ties)
    assets = {"vocabulary.json": json.dumps(identity.to_json()).encode()} if table else {}
    return write_checkpoint(
        folder / f"step-{seed:08d}", parts, state=state, manifest=saved if manifest else None, assets=assets
    )
