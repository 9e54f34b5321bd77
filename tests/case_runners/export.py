"""Export of a sharded model as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.case_runners.common import Expected, Ranks, same_bits
from tests.cases import Case, local_part
from vocab_parallel import VocabParallelEmbedding, VocabParallelLMHead
from vocab_parallel.checkpoint import save_checkpoint
from vocab_parallel.checkpoint.exchange.hugging_face import to_hugging_face

NAMES = ("embed_tokens.weight", "lm_head.weight", "lm_head.bias")
GARBAGE = 777.0  # in the padding rows, which no file may hold


def observe_export(case: Case, dtype: torch.dtype, ranks: Ranks) -> Any:
    """All ranks save, each its rows; the first exports, with a configuration that counts the padding."""
    shard = ranks.shard(case)
    assert shard.layout.padded_size == case.inputs["padded"] and shard.tp_size == case.inputs["tp"]
    model = nn.ModuleDict({
        "embed_tokens": VocabParallelEmbedding(2, shard=shard, dtype=dtype),
        "lm_head": VocabParallelLMHead(2, shard=shard, bias=True, dtype=dtype),
    })  # fmt: skip
    with torch.no_grad():
        for parameter, whole in zip(model.parameters(), tables(case, dtype), strict=True):
            parameter.copy_(local_part(whole, 0, shard.shard_size, shard.rank, GARBAGE))
    folder = [tempfile.mkdtemp(prefix="export-") if ranks.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    saved = save_checkpoint(folder[0], model, None, 1)
    if ranks.rank != 0:
        return None
    config = Path(folder[0]) / "config.json"
    config.write_text(json.dumps({"vocab_size": case.inputs["padded"]}))
    target = Path(folder[0]) / "exported"
    to_hugging_face(saved, target, config=config)
    seen = load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())
    shutil.rmtree(folder[0])
    return seen


def tables(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Embedding, head and bias of the real rows; each row has values of its own."""
    ids = torch.arange(case.inputs["vocab"], dtype=dtype)
    return [torch.stack([ids, -ids], 1), torch.stack([ids / 2, ids * 2], 1), ids + 1]


def check_export(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    tensors, config = seen[0]
    wanted = dict(zip(NAMES, tables(case, getattr(torch, dtype)), strict=True))
    assert set(tensors) == set(wanted)
    rows = expect.take("exported_rows")
    assert {len(tensor) for tensor in tensors.values()} == {rows}
    for name, tensor in wanted.items():
        assert same_bits(tensors[name], tensor), f"{case.id}: {name}"
    assert config["vocab_size"] == expect.take("config_vocab_size")
