"""A small causal decoder trunk: the part between the vocabulary table's two uses, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vocab_parallel.app.config import ModelConfig


class Trunk(nn.Module):
    """Pre-norm decoder blocks with rotary positions; no dropout, no bias.

    Args:
        config: dimensions.
        seed: of the initial values, which come from a generator of their own: the same bits on every rank.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.register_buffer("rotation", rotation(config.context, config.dim // config.heads), persistent=False)
        self.reset_parameters(seed=seed)

    def reset_parameters(self, *, seed: int) -> None:
        """Normal weights of variance 1 / inputs; the two projections back into the stream smaller by sqrt(2 layers)."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
                continue
            back = name.endswith(("out.weight", "down.weight"))
            scale = parameter.shape[1] ** -0.5 / ((2 * len(self.blocks)) ** 0.5 if back else 1.0)
            with torch.no_grad():
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, scale, generator=generator))

    def forward(self, input: Tensor) -> Tensor:  # [B, S, D] -> [B, S, D]
        """Hidden states, normalised; row t sees rows 0 to t only."""
        hidden = input
        for block in self.blocks:
            hidden = block(hidden, self.rotation)
        normalised: Tensor = self.norm(hidden)
        return normalised


class Block(nn.Module):
    """Attention and a feed-forward, each behind an RMS norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, wide = config.dim, config.dim * config.mlp_ratio
        self.heads = config.heads
        self.norm_attention = nn.RMSNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.norm_mlp = nn.RMSNorm(dim, eps=1e-6)
        self.up = nn.Linear(dim, wide, bias=False)
        self.down = nn.Linear(wide, dim, bias=False)

    def forward(self, input: Tensor, table: Tensor) -> Tensor:
        """Adds attention and feed-forward to ``input [B, S, D]``."""
        batch, length, dim = input.shape
        split = (batch, length, 3, self.heads, dim // self.heads)
        q, k, v = self.qkv(self.norm_attention(input)).view(split).permute(2, 0, 3, 1, 4)  # each [B, heads, S, d]
        mixed = F.scaled_dot_product_attention(rotate(q, table), rotate(k, table), v, is_causal=True)
        hidden = input + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        result: Tensor = hidden + self.down(F.gelu(self.up(self.norm_mlp(hidden))))
        return result


def rotation(length: int, width: int, base: float = 10_000.0) -> Tensor:
    """Cosines and sines of rotary positions, float32 ``[2, length, width / 2]``. Source: RoFormer, equation 15."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()]).float()


def rotate(input: Tensor, table: Tensor) -> Tensor:  # [..., S, d], [2, >= S, d / 2] -> [..., S, d]
    """Rotates each pair (i, i + d/2) by its position's angle."""
    cos, sin = table[:, : input.shape[-2]]
    a, b = input.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
