"""Models, optimizers and oracle of the checkpoint tests."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, tie_weights
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint

VOCAB, WIDTH, TOKENS = 29, 6, 16
PADDED = {1: 32, 2: 32, 3: 30, 4: 32}  # 29 ids: 8, 8, 8 and 5 on four ranks; 10, 10 and 9 on three
STEPS = {"AdamW": 20, "amsgrad": 4, "SGD": 4, "Adafactor": 4, "Muon": 4}  # saved after so many, and as many again


class Model(nn.Module):
    """Embedding, linear, head. With tp_invariant the loss's bits do not depend on the number of ranks."""

    def __init__(self, shard: VocabShard, tied: bool, invariant: bool = False, bias: bool = True, **made: Any) -> None:
        super().__init__()
        self.invariant = invariant and shard.tp_size != 3  # which needs a power of two
        width = made.pop("width", WIDTH)
        self.embedding = VocabParallelEmbedding(width, shard=shard, **made)
        self.embedding.reset_parameters(seed=3, std=0.5)
        self.trunk = nn.Linear(width, width, **made)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.trunk.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.head = VocabParallelLMHead(width, shard=shard, bias=bias, **made)
        self.head.reset_parameters(seed=4, std=0.5)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        if tied:
            tie_weights(self.embedding, self.head)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        self.seen += 1
        hidden = torch.tanh(self.trunk(self.embedding(ids)))
        loss: Tensor = self.head.loss(hidden, target, tp_invariant=self.invariant)
        return loss


def batch(step: int, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    both = torch.randint(vocab, (2, TOKENS), generator=generator)
    return both[0], both[1]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if kind == "AdamW":
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
    if kind == "amsgrad":
        return torch.optim.AdamW(parameters, lr=0.02, amsgrad=True)
    if kind == "SGD":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    if kind == "Adafactor":
        return torch.optim.Adafactor(parameters, lr=0.02)
    if kind == "Muon":
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)
    raise ValueError(kind)


def build(
    tied: bool, kind: str = "AdamW", invariant: bool = False, *, vocab: int = VOCAB, padded: int | None = None,
    **made: Any,
) -> tuple[Model, torch.optim.Optimizer]:  # fmt: skip
    """On all ranks that there are."""
    tp = dist.get_world_size() if dist.is_initialized() else 1
    layout = VocabLayout.from_padded(vocab, padded or PADDED[tp], tp)
    shard = VocabShard(layout, dist.group.WORLD if tp > 1 else None)
    model = Model(shard, tied, invariant, **made)
    return model, make_optimizer(kind, model)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*batch(step, model.head.shard.vocab_size))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def oracle(tied: bool, kind: str) -> list[float]:
    """All steps of the same model without shards, by torch alone."""
    sharded, _ = build(tied, kind)
    table, head = (nn.Parameter(p.detach()[:VOCAB].clone()) for p in (sharded.embedding.weight, sharded.head.weight))
    head = table if tied else head
    bias = nn.Parameter(sharded.head.bias.detach()[:VOCAB].clone())
    trunk = sharded.trunk
    held = nn.Module()
    held.table, held.trunk, held.bias = table, trunk, bias
    if not tied:
        held.head = head
    optimizer = make_optimizer(kind, held)
    losses = []
    for step in range(2 * STEPS[kind]):
        ids, target = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(torch.tanh(trunk(F.embedding(ids, table))), head, bias), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_and_save(rank: int, folder: str, tied: bool, kind: str, invariant: bool) -> list[float]:
    model, optimizer = build(tied, kind, invariant)
    losses = train(model, optimizer, range(STEPS[kind]))
    save_checkpoint(folder, model, optimizer, STEPS[kind], {"note": [1, "x"]})
    return losses + train(model, optimizer, range(STEPS[kind], 2 * STEPS[kind]))


def load_and_train(rank: int, folder: str, again: str, tied: bool, kind: str, invariant: bool) -> dict[str, Any]:
    """Loads into NaN, saves what was loaded under another name, and trains on."""
    model, optimizer = build(tied, kind, invariant)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step, extra = load_checkpoint(Path(folder) / f"step-{STEPS[kind]:08d}", model, optimizer)
    assert (step, extra) == (STEPS[kind], {"note": [1, "x"]}) and model.seen.tolist() == [step, step]
    assert (model.embedding.weight is model.head.weight) is tied
    padding = model.embedding.weight.detach()[model.head.shard.num_valid :]
    assert not padding.any(), "padding is zero, whatever was there"
    save_checkpoint(again, model, optimizer, step)
    losses = train(model, optimizer, range(step, 2 * step))
    return {"losses": losses, "warnings": [str(one.message) for one in caught]}


def digest(model: nn.Module) -> str:
    """A hash of all parameters' bits."""
    content = b"".join(bytes(p.detach().reshape(-1).view(torch.uint8).tolist()) for p in model.parameters())
    return hashlib.sha256(content).hexdigest()
