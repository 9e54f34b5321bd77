"""A small Llama of Transformers, for jobs that need one: the app's training, its tests, a first look."""

from __future__ import annotations

from typing import Any

from torch import nn


def llama(
    vocab_size: int, *, dim: int, layers: int, heads: int, wide: int, context: int, std: float = 0.02, seed: int = 0
) -> nn.Module:
    """A tied `transformers.LlamaForCausalLM`, the same values on every rank.

    Args:
        vocab_size: Token ids.
        dim, layers, heads: Of the trunk.
        wide: Width of the feed-forward.
        context: Tokens it attends over.
        std: Of the initial weights.
        seed: Of their stream; PyTorch's own stream stays as it was.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=vocab_size, hidden_size=dim, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=context,
        initializer_range=std, tie_word_embeddings=True, use_cache=False, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: nn.Module = LlamaForCausalLM(config)
    return made
