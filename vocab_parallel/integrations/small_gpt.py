"""A small Megatron-core training in one pipeline stage, for jobs that need one: the app's, its tests, a first look."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def start(tp_size: int, *, seed: int = 0, timeout_minutes: int = 30) -> None:
    """Cuts the world into Megatron's groups: `tp_size` ranks in order share each model. Replaces earlier groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp_size, distributed_timeout_minutes=timeout_minutes)
    # The model has no dropout, so ranks need no random states of their own: the tracker that keeps none.
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)


def gpt(
    padded_size: int, *, dim: int, layers: int, heads: int, wide: int, context: int, std: float = 0.02, seed: int = 0
) -> nn.Module:
    """A tied `GPTModel` with rotary positions and without dropout; the same values at any tensor-parallel size.

    Args:
        padded_size: Rows of the vocabulary over all ranks.
        dim, layers, heads: Of the trunk.
        wide: Width of the feed-forward.
        context: Tokens it attends over.
        std: Of the initial weights.
        seed: Of their stream; PyTorch's own stream stays as it was.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=layers, hidden_size=dim, num_attention_heads=heads, ffn_hidden_size=wide,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        hidden_dropout=0.0, attention_dropout=0.0, add_bias_linear=False, init_method_std=std,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made: nn.Module = GPTModel(
            config, get_gpt_layer_local_spec(), padded_size, context,
            share_embeddings_and_output_weights=True, position_embedding_type="rope",
        )  # fmt: skip
    return made.to(torch.cuda.current_device())


def wrap(
    model: Any, *, rate: float, vocabulary_rate: float, clip: float, betas: tuple[float, float], weight_decay: float
) -> tuple[Any, Any]:
    """Megatron's `DistributedDataParallel` around `model`, and its optimizer with a rate of its own for the vocabulary.

    Returns:
        The wrapped model and the `MegatronOptimizer`.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer="adam", lr=rate, decoupled_lr=vocabulary_rate, adam_beta1=betas[0], adam_beta2=betas[1],
        clip_grad=clip, weight_decay=weight_decay,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [wrapped])
    for group in optimizer.param_groups:
        # By this, among others, it finds its groups again at load; 0.16.1 leaves the vocabulary's like the trunk's.
        vocabulary = any(getattr(parameter, "is_embedding_or_output_parameter", False) for parameter in group["params"])
        group["is_decoupled_lr"] = vocabulary
    return wrapped, optimizer


def losses(model: Any, input: Tensor, target: Tensor | None) -> Tensor:
    """Losses ``[B, S]`` of the next tokens, or the logits where `target` is None; ``input`` is ``[B, S]``."""
    positions = torch.arange(input.shape[1], device=input.device).expand_as(input)
    found: Tensor = model(input, positions, None, labels=target)
    return found


def finish_gradients(wrapped: Any) -> None:
    """Means the gradients over the data-parallel ranks, into `main_grad`."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([wrapped])
