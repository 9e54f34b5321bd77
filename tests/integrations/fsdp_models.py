"""A small tied or untied language model: with a sharded vocabulary for FSDP2, and as plain torch for the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from vocab_parallel import VocabParallelEmbedding, VocabParallelLMHead, tie_weights

DIM, STEPS, SAVED = 6, 10, 5
SETTINGS = {"lr": 5e-3, "eps": 1e-5, "weight_decay": 0.05}
CLIP = 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, hidden):
        return hidden + self.mlp(self.norm(hidden))


class Trunk(nn.Module):
    """What both models have in common."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)

    def hidden(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


class Plain(Trunk):
    def __init__(self, vocab, tied, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(vocab, DIM)
        self.lm_head = nn.Linear(DIM, vocab, bias=bias)
        draw = torch.Generator().manual_seed(vocab)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.4)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, ids, target):
        return F.cross_entropy(self.lm_head(self.hidden(ids)).flatten(0, 1), target.flatten())


class Sharded(Trunk):
    """The same values, this rank's rows of them."""

    def __init__(self, shard, tied, bias=True, mean_group=None):
        super().__init__()
        self.mean_group = mean_group
        self.embedding = VocabParallelEmbedding(DIM, shard=shard)
        self.lm_head = VocabParallelLMHead(DIM, shard=shard, bias=bias)
        whole = Plain(shard.vocab_size, tied, bias).state_dict()
        self.load_state_dict(
            {name: shard.slice(value) if name.startswith(("embedding", "lm_head")) else value
             for name, value in whole.items()}
        )  # fmt: skip
        if tied:
            tie_weights(self.embedding, self.lm_head)

    def forward(self, ids, target):
        return self.loss(self.hidden(ids), target)

    def loss(self, hidden, target):
        return self.lm_head.loss(hidden.flatten(0, 1), target.flatten(), mean_group=self.mean_group)


def batch(vocab, step):
    """Four sequences, of which some have more targets than others: a mean of the ranks' means would be wrong."""
    draw = torch.Generator().manual_seed(step)
    ids, target = (torch.randint(0, vocab, (4, 5), generator=draw) for _ in range(2))
    target[0, 1:] = -100
    target[2, 3] = -100
    return ids, target


def oracle(vocab, tied, steps=STEPS, bias=True, clip=CLIP):
    """One process, the whole model: losses, norms and the model after `steps`."""
    model = Plain(vocab, tied, bias)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(vocab, step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).double())
        optimizer.step()
        losses.append(loss.detach())
    aliases = {"lm_head.weight"} if tied else set()
    whole = {name: value.clone() for name, value in model.state_dict().items() if name not in aliases}
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "model": whole}
