"""`apply`: which modules of a Megatron model are replaced, and which models are refused."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor

from vocab_parallel.agreement import capture
from vocab_parallel.errors import ConfigError, LayoutMismatchError, TyingError
from vocab_parallel.integrations.megatron.loss import DeferredLogits, TokenLoss
from vocab_parallel.integrations.megatron.modules import EMBEDDING, HEAD, MegatronEmbedding, MegatronHead, mark
from vocab_parallel.integrations.megatron.ties import tell, verify_tied
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.shard import VocabShard

# Output layers whose forward we know: Megatron's own, and the one of newer versions that fuses a loss of its own.
_KNOWN_HEADS = ("ColumnParallelLinear", "LinearCrossEntropyModule")


def apply(
    model: Any,
    *,
    shard: VocabShard,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_over: str = "all",
    z_loss: float = 0.0,
    softcap: float | None = None,
    masked_sum: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
) -> list[str]:
    """Replaces embedding, output layer and loss of a Megatron language model, in place.

    Call it where the model is built, before `Float16Module`, `DistributedDataParallel` and the optimizer. Parameters
    stay the same objects with the same values and names; rows of padding become zero. With labels the model returns
    the losses without ever forming logits; without labels it returns logits as before, with -inf in padding columns.

    Args:
        model: This stage's `GPTModel`, or another `LanguageModule` with `embedding.word_embeddings` and `output_layer`
            (`HybridModel`, `MambaModel`). A pipeline stage without either is left as it is.
        shard: `VocabShard(VocabLayout.from_padded(vocab_size, model.vocab_size, tp), model.tp_group)` with the number
            of real tokens: Megatron's own `vocab_size` is padded.
        ignore_index: Labels that count nothing: loss 0, gradient 0. Megatron's `loss_mask` still decides what the mean
            divides by.
        label_smoothing, smoothing_over, z_loss, softcap: As in `linear_cross_entropy`.
        masked_sum: The training script uses the losses in `sum(losses * loss_mask)` only, times any number, and gives
            the model the mask, as Megatron's `pretrain_gpt.py` does. Then gradients are formed in forward, with three
            GEMMs instead of four; any other use raises `ConfigError` in backward.
        chunk_size, memory_budget: As in `linear_cross_entropy`.

    Returns:
        The qualified names of what was replaced; empty on a pipeline stage between the first and the last.

    Collectives:
        One 64-byte all-gather over the shard's group, and one over the model's embedding group if there are several
        stages; of a tied model those of `verify_tied`.

    Raises:
        ConfigError: Of a model or an option that is not supported, with the reason.
        LayoutMismatchError: The shard is over other ranks, or of another padded size, than the model.
        TyingError: A tied model whose DistributedDataParallel or optimizer exists already.
            Each on every rank of the group.
    """
    options = {
        "ignore_index": ignore_index, "label_smoothing": label_smoothing, "smoothing_over": smoothing_over,
        "z_loss": z_loss, "softcap": softcap,
    }  # fmt: skip
    chunks = {"chunk_size": chunk_size, "memory_budget": memory_budget}
    fault = capture(_check, model, shard, options, masked_sum)
    tell(model, shard, f"megatron.apply({options}, {chunks}, {masked_sum=})", fault)
    replaced: list[str] = []
    embedding = None
    tied = model.share_embeddings_and_output_weights
    if model.pre_process:
        embedding = MegatronEmbedding(model.embedding.word_embeddings, shard)
        model.embedding.word_embeddings = embedding
        replaced.append(EMBEDDING.removesuffix(".weight"))
    if model.post_process:
        loss = TokenLoss(shard, options, chunks, masked_sum)
        model.output_layer = MegatronHead(model.output_layer, shard, loss, embedding if tied else None)
        model.__class__ = _with_fused_loss(type(model))
        replaced += [HEAD.removesuffix(".weight"), "compute_language_model_loss"]
    _mark_parameters(model, shard, tied)
    if tied and replaced and not getattr(model.config, "virtual_pipeline_model_parallel_size", None):
        verify_tied(model)  # with several chunks a stage, the two ends are not built at one time
    return replaced


def _mark_parameters(model: Any, shard: VocabShard, tied: bool) -> None:
    """Megatron's marks, which it leaves out without `perform_initialization`; and zero rows of padding."""
    both = model.pre_process and model.post_process
    owners = [model.embedding.word_embeddings] if model.pre_process else []
    owners += [model.output_layer] if model.post_process else []
    for owner in owners:
        for parameter in owner.parameters(recurse=False):
            mark(parameter)
            with torch.no_grad():
                parameter[shard.num_valid :].zero_()
    if tied and both:
        # The head adds its part to main_grad; the lookup's comes in .grad, which DDP drops without this mark.
        model.embedding.word_embeddings.weight.zero_out_wgrad = True
    elif tied and owners:
        owners[0].weight.shared_embedding = True
        if model.post_process:
            owners[0].weight.shared = True


def _with_fused_loss(base: type) -> type:
    """The model's class with the loss at its seam: the head defers where labels are given, the loss takes it up."""
    seam = "_postprocess" if hasattr(base, "_postprocess") else "forward"
    original = getattr(base, seam)
    signature = inspect.signature(original)

    def through(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**kwargs, **signature.bind(self, *args, **kwargs).arguments}
        follows = self.post_process and given.get("labels") is not None and given.get("output_processor") is None
        with ExitStack() as stack:
            if follows:
                stack.enter_context(self.output_layer.loss_follows(given.get("loss_mask")))
            return original(self, *args, **kwargs)

    def compute_language_model_loss(self: Any, labels: Tensor, logits: DeferredLogits | Tensor) -> Tensor:
        loss: Tensor = self.output_layer.token_loss(labels, logits)
        return loss

    body = {seam: through, "compute_language_model_loss": compute_language_model_loss}
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**named, **body})


def _check(model: Any, shard: VocabShard, options: dict[str, Any], masked_sum: bool) -> None:
    LossOptions(
        "none", options["ignore_index"], options["label_smoothing"], options["smoothing_over"], options["z_loss"],
        Scores(options["softcap"], 1.0),
    ).check()  # fmt: skip
    if masked_sum and options["label_smoothing"]:
        raise ConfigError("masked_sum has no label smoothing: leave one of the two out")
    _check_model(model)
    _check_modules(model)
    _check_shard(model, shard)


def _check_model(model: Any) -> None:
    kind = type(model).__name__
    if hasattr(model, "module"):
        raise ConfigError(
            f"{kind} wraps the model: call apply on the model itself, where it is built, before Float16Module and "
            "DistributedDataParallel."
        )
    needed = ("pre_process", "post_process", "share_embeddings_and_output_weights", "vocab_size", "config")
    missing = [name for name in (*needed, "compute_language_model_loss") if not hasattr(model, name)]
    if missing:
        raise ConfigError(f"{kind} is no Megatron language model that is known here: it has no {', '.join(missing)}.")
    config = model.config
    if getattr(config, "mtp_num_layers", None):
        raise ConfigError(
            f"{kind} has multi-token prediction (mtp_num_layers={config.mtp_num_layers}), whose heads read real "
            "logits and share the embedding with a further stage. Set mtp_num_layers to None."
        )
    if getattr(config, "defer_embedding_wgrad_compute", False):
        raise ConfigError(
            "defer_embedding_wgrad_compute keeps the logits' gradients for later, and the fused loss never has them. "
            "Turn it off: dW is formed with the loss anyway."
        )


def _check_modules(model: Any) -> None:
    embedding = getattr(getattr(model, "embedding", None), "word_embeddings", None) if model.pre_process else None
    head = getattr(model, "output_layer", None) if model.post_process else None
    for name, module in (("embedding.word_embeddings", embedding), ("output_layer", head)):
        if isinstance(module, MegatronEmbedding | MegatronHead):
            raise ConfigError(f"{name} is replaced already: apply was called twice.")
    if model.pre_process and type(embedding) is not tensor_parallel.VocabParallelEmbedding:
        raise ConfigError(_unknown("embedding.word_embeddings", embedding, "VocabParallelEmbedding"))
    known = isinstance(head, tensor_parallel.ColumnParallelLinear) and type(head).__name__ in _KNOWN_HEADS
    if model.post_process and not known:
        raise ConfigError(_unknown("output_layer", head, "ColumnParallelLinear"))
    if head is not None and head.bias is not None and head.skip_bias_add:
        raise ConfigError("output_layer returns its bias apart (skip_bias_add), but the fused loss has to add it.")
    tied = model.share_embeddings_and_output_weights
    if head is not None and not (tied and model.pre_process) and head.weight is None:
        raise ConfigError(f"{HEAD} is None, and {EMBEDDING} on this stage is not tied to it.")
    for name, module in ((EMBEDDING, embedding), (HEAD, head)):
        if module is None:
            continue
        if any(getattr(module, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")):
            raise ConfigError(f"{name.removesuffix('.weight')} has hooks, which its replacement would lose.")
        weight = module.weight
        if weight is not None and weight.is_meta:
            raise ConfigError(
                f"{name} is on the meta device: to_empty makes new Parameters, and Megatron's marks on the old ones "
                "(tensor_model_parallel, shared, shared_embedding) are lost. Build the model on its device."
            )
        if weight is not None and hasattr(weight, "main_grad"):
            raise TyingError(
                f"DistributedDataParallel, and perhaps the optimizer, was built before apply: it holds {EMBEDDING} "
                f"and {HEAD} as they were. Call apply first, then DistributedDataParallel and the optimizer."
            )


def _unknown(name: str, module: object, expected: str) -> str:
    return (
        f"{name} is a {type(module).__name__}, not Megatron's tensor_parallel.{expected}. An adapter, a quantised or "
        "another fused layer computes something else, which its replacement would drop: call apply before adapters "
        "are attached, or leave this layer out of them."
    )


def _check_shard(model: Any, shard: VocabShard) -> None:
    group = model.tp_group
    mine = [dist.get_rank()] if shard.group is None else dist.get_process_group_ranks(shard.group)
    if mine != dist.get_process_group_ranks(group):
        raise LayoutMismatchError(
            f"the shard is over the ranks {mine}, the model's tensor-parallel group over "
            f"{dist.get_process_group_ranks(group)}. Build it with VocabShard(layout, model.tp_group)."
        )
    if shard.layout.padded_size != model.vocab_size:
        raise LayoutMismatchError(
            f"the shard has {shard.layout.padded_size} rows ({shard.layout}), the model {model.vocab_size}: its own "
            "padding. Build the layout with VocabLayout.from_padded(vocab_size, model.vocab_size, tp_size)."
        )
