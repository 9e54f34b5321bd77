"""Small GPT models of Megatron-core on gloo ranks, from one set of whole weights, and their oracle in one process."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.integrations.megatron_cpu import cuda_stand_in
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.collectives import gather_vocab

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
HIDDEN, HEADS, SEQUENCE, ROWS, STEPS = 16, 4, 8, 4, 10
LR, EPS, DECAY, CLIP = 2e-3, 1e-5, 0.1, 1.0


class _Imported:
    """The integration, imported where it is used: in the ranks, not by pytest, which would wait for Megatron."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("vocab_parallel.integrations.megatron"), name)


megatron = _Imported()


@dataclass(frozen=True)
class Setup:
    """How a model is spread over ranks, and trained."""

    tp: int = 1
    pp: int = 1
    vocab: int = 9
    tied: bool = True
    sequence_parallel: bool = False
    positions: str = "rope"
    distributed: bool = False  # the optimizer
    dtype: str = "float32"
    microbatches: int = 1
    layers: int = 2
    padded: int | None = None
    chunks: int = 1  # a stage has, in a virtual pipeline
    overlap: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}", f"V{self.vocab}", "tied" if self.tied else "untied", self.positions]
        parts += [f"padded{self.padded}"] if self.padded else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [f"chunks{self.chunks}"] if self.chunks > 1 else []
        parts += ["distributed"] if self.distributed else []
        parts += ["overlap"] if self.overlap else []
        parts += [self.dtype] if self.dtype != "float32" else []
        parts += [f"micro{self.microbatches}"] if self.microbatches > 1 else []
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.options)])

    @property
    def layout(self) -> VocabLayout:
        if self.padded is not None:
            return VocabLayout.from_padded(self.vocab, self.padded, self.tp)
        return VocabLayout(self.vocab, self.tp, multiple_of=1)


@contextmanager
def parallel(setup: Setup) -> Iterator[None]:
    """Megatron's groups of the world's ranks, under the stand-in."""
    from megatron.core import parallel_state

    with cuda_stand_in():
        chunks = setup.chunks if setup.chunks > 1 else None
        parallel_state.initialize_model_parallel(setup.tp, setup.pp, chunks)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def shard_of(setup: Setup) -> VocabShard:
    from megatron.core import parallel_state

    return VocabShard(setup.layout, parallel_state.get_tensor_model_parallel_group())


class Norm(torch.nn.LayerNorm):
    """Torch's, with the mark that Megatron's own norms give their parameters under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def config_of(setup: Setup, **more: Any) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, setup.dtype)
    settings = {
        "num_layers": setup.layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "ffn_hidden_size": 32,
        "tensor_model_parallel_size": setup.tp, "pipeline_model_parallel_size": setup.pp,
        "sequence_parallel": setup.sequence_parallel, "use_cpu_initialization": True, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False, "params_dtype": dtype, "pipeline_dtype": dtype,
        "virtual_pipeline_model_parallel_size": setup.chunks if setup.chunks > 1 else None,
        "bf16": setup.dtype == "bfloat16", "calculate_per_token_loss": True, "attention_softmax_in_fp32": True,
    }  # fmt: skip
    config = TransformerConfig(**{**settings, **more})
    config.finalize_model_grads_func = finalize_model_grads
    return config


def build(setup: Setup, vocab_size: int | None = None, config: Any = None, chunk: int | None = None) -> Any:
    """This stage's GPTModel (or one chunk of it), with the whole model's weights; its own layers, nothing replaced."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    config = config or config_of(setup)
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    spec = TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage=chunk), layer_norm=Norm)
    here = {"ignore_virtual": chunk is None, "vp_stage": chunk}
    model = GPTModel(
        config=config, transformer_layer_spec=spec,
        vocab_size=vocab_size or setup.layout.padded_size, max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**here),
        post_process=parallel_state.is_pipeline_last_stage(**here), vp_stage=chunk,
        share_embeddings_and_output_weights=setup.tied, position_embedding_type=setup.positions,
    )  # fmt: skip
    fill(model, setup)
    return model


@torch.no_grad()
def fill(model: Any, setup: Setup) -> None:
    """Gives each parameter its part of the whole one, whose values follow from its name."""
    rank = dist.get_rank(model.tp_group)
    offset = {id(layer): layer.layer_number - 1 for layer in model.decoder.layers}
    for at, layer in enumerate(model.decoder.layers):
        for name, parameter in layer.named_parameters():
            _fill(parameter, f"layer{offset[id(model.decoder.layers[at])]}.{name}", rank, setup.tp)
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.final_layernorm") or "position_embeddings" in name:
            _fill(parameter, name, rank, setup.tp)
        elif not name.startswith("decoder.layers"):
            table = whole(name if not setup.tied else "table", (setup.vocab, HIDDEN))
            padded = torch.zeros(parameter.shape[0] * setup.tp, HIDDEN)
            padded[: setup.vocab] = table
            padded[setup.vocab :] = whole("padding", (padded.shape[0] - setup.vocab, HIDDEN))
            parameter.copy_(padded.chunk(setup.tp)[rank])


def _fill(parameter: Tensor, name: str, rank: int, tp: int) -> None:
    dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
    shape = list(parameter.shape)
    if dim >= 0:
        shape[dim] *= tp
    value = whole(name, tuple(shape))
    parameter.copy_(value.chunk(tp, dim)[rank] if dim >= 0 else value)


def whole(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(*shape, generator=generator) * (0.4 if name == "table" or "word" in name else 0.2)
    return value + 1.0 if "layernorm.weight" in name else value


def batch(step: int, vocab: int) -> dict[str, Tensor]:
    """The global batch of a step `[ROWS, SEQUENCE]`: ids, labels, and a mask that leaves each row another number."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(vocab, (ROWS, SEQUENCE + 1), generator=generator)
    mask = (torch.arange(SEQUENCE) >= torch.tensor([0, 3, 1, 6])[:, None]).float()
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}


def positions() -> Tensor:
    return torch.arange(SEQUENCE).expand(ROWS, SEQUENCE).contiguous()


def attention_mask() -> Tensor:
    return torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)


def call(model: Any, rows: dict[str, Tensor], labels: bool = True) -> Tensor:
    """The model's output on rows of a batch: losses, or logits."""
    tokens = rows["tokens"]
    given = {"labels": rows["labels"], "loss_mask": rows["loss_mask"]} if labels else {}
    output: Tensor = model(tokens, positions()[: len(tokens)], attention_mask(), **given)
    return output


def loss_func(rows: dict[str, Tensor], losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As in Megatron's pretrain_gpt.py: the masked sum, and what the gradient is divided by at the end."""
    mask = rows["loss_mask"].reshape(-1)
    total = torch.sum(losses.reshape(-1).float() * mask)
    return total, mask.sum().to(torch.int), {"sum": total.detach().clone(), "count": mask.sum()}


def forward_step(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    rows = next(batches)
    return call(model, rows), partial(loss_func, rows)


def wrap(setup: Setup, model: Any) -> Any:
    """Under Megatron's data-parallel wrapper; of chunks a list."""
    if isinstance(model, list):
        return [wrap(setup, chunk) for chunk in model]
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=setup.distributed, overlap_grad_reduce=setup.overlap,
        overlap_param_gather=setup.overlap and setup.distributed,
    )  # fmt: skip
    config = model.config
    if setup.dtype != "float32":
        model = Float16Module(config, model)
    wrapped = DistributedDataParallel(config, settings, model)
    if setup.overlap:
        config.no_sync_func, config.grad_sync_func = wrapped.no_sync, None
        config.param_sync_func = wrapped.start_param_sync if setup.distributed else None
    return wrapped


def optimizer_of(setup: Setup, wrapped: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=LR, weight_decay=DECAY, adam_eps=EPS, clip_grad=CLIP, bf16=setup.dtype == "bfloat16",
        params_dtype=getattr(torch, setup.dtype), use_distributed_optimizer=setup.distributed,
        overlap_param_gather=setup.overlap and setup.distributed,
    )  # fmt: skip
    return get_megatron_optimizer(config, wrapped if isinstance(wrapped, list) else [wrapped])


def adopted(setup: Setup) -> Any:
    """The model with our modules; of chunks a list."""
    chunks = [build(setup, chunk=chunk) for chunk in (range(setup.chunks) if setup.chunks > 1 else [None])]
    for model in chunks:
        megatron.apply(model, shard=shard_of(setup), **dict(setup.options))
    return chunks if setup.chunks > 1 else chunks[0]


def micro_batches(setup: Setup, step: int) -> list[dict[str, Tensor]]:
    """This data-parallel rank's micro-batches."""
    from megatron.core import parallel_state

    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mine = {name: rows.chunk(dp)[rank] for name, rows in batch(step, setup.vocab).items()}
    parts = {name: rows.chunk(setup.microbatches) for name, rows in mine.items()}
    return [{name: parts[name][at] for name in parts} for at in range(setup.microbatches)]


def step_of(setup: Setup, wrapped: Any, optimizer: Any, step: int) -> tuple[Tensor | None, float]:
    """One training step through Megatron's own schedule: the mean loss (on the last stage) and the norm."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    chunks = wrapped if isinstance(wrapped, list) else [wrapped]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    parts = micro_batches(setup, step)
    batches = [iter(parts) for _ in chunks]
    stored = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=batches if len(chunks) > 1 else batches[0], model=chunks,
        num_microbatches=len(parts),
        seq_length=SEQUENCE, micro_batch_size=len(parts[0]["tokens"]), forward_only=False,
    )  # fmt: skip
    _, norm, _ = optimizer.step()
    if not parallel_state.is_pipeline_last_stage():
        return None, norm
    sums = torch.stack([torch.stack([one["sum"], one["count"]]) for one in stored]).sum(0)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums[0] / sums[1], norm


def tables(setup: Setup, model: Any) -> dict[str, Tensor]:
    """The whole vocabulary tables that this stage has, real rows only."""
    owners = {}
    for bare in model if isinstance(model, list) else [model]:
        while hasattr(bare, "module"):
            bare = bare.module
        if bare.pre_process:
            owners["embedding"] = bare.embedding.word_embeddings
        if bare.post_process and bare.output_layer.weight is not None:
            owners["head"] = bare.output_layer
    return {name: gather_vocab(owner.shard, owner.weight).float().clone() for name, owner in owners.items()}


def oracle(rank: int, setup: Setup) -> dict[str, Any]:
    """The same training in one process: Megatron's trunk at TP 1 with its own head, torch's loss, norm and AdamW."""
    alone = {
        "tp": 1,
        "pp": 1,
        "padded": None,
        "sequence_parallel": False,
        "distributed": False,
        "options": (),
        "chunks": 1,
    }
    setup = replace(setup, dtype="float32", **alone)
    with parallel(setup):
        model = build(setup)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, betas=(0.9, 0.999), weight_decay=DECAY)
        losses, norms = [], []
        for step in range(STEPS):
            rows = batch(step, setup.vocab)
            logits = call(model, rows, labels=False)
            per_token = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="none")
            mask = rows["loss_mask"].flatten()
            loss = (per_token * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            losses.append(loss.item())
        found = {"embedding": model.embedding.word_embeddings.weight.detach()}
        if not setup.tied:
            found["head"] = model.output_layer.weight.detach()
        return {"losses": losses, "norms": norms, "tables": found}


def count_states(wrapped: Any, optimizer: Any) -> dict[str, int]:
    """Elements of the optimizer's first moments over the data-parallel ranks, and of this rank's parameters."""
    chunks = wrapped if isinstance(wrapped, list) else [wrapped]
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]
    elements = sum(state["exp_avg"].numel() for part in parts for state in part.optimizer.state.values())
    if any(hasattr(part, "data_parallel_group") for part in parts):
        total = torch.tensor(elements)
        dist.all_reduce(total, group=parts[0].data_parallel_group)
        elements = int(total)
    return {"elements": elements, "of parameters": sum(each.numel() for chunk in chunks for each in chunk.parameters())}
