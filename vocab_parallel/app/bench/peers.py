"""What `bench loss` compares: our loss, the floor, and the losses of other libraries, each called as its own users do.

A contestant's step takes a `Problem`, leaves the gradients of the mean loss in its tensors' `grad`, and returns the
loss. Other libraries are looked up by name when they are asked for, so none is needed, and none is imported otherwise.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from vocab_parallel.app.bench.problem import Problem
from vocab_parallel.app.job import Job
from vocab_parallel.layout import VocabLayout
from vocab_parallel.loss import linear_cross_entropy
from vocab_parallel.shard import VocabShard


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the rows are cut, for the contestants that cut them; None leaves it to them."""

    chunk_size: int | None = None  # rows
    memory_budget: int | None = None  # bytes


# Forward and backward; the loss is None from the floor, which has none.
Step = Callable[[Problem, Choice], Tensor | None]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the contestants run."""

    job: Job
    timeout: timedelta

    def group(self) -> dist.ProcessGroup:
        """A new process group of all ranks. Each contestant has its own: a failure in one leaves the others usable."""
        group: dist.ProcessGroup = dist.new_group(timeout=self.timeout)
        return group


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to compute the loss and its gradients.

    Attributes:
        about: what it is, in a line.
        prepare: makes the step; may issue collectives, so it is called on all ranks or on none.
        modules: what has to be importable.
        distribution: whose version is reported.
        ranks: "any", "one" or "several".
        cuda_only: needs a GPU.
        logit_bytes: what it keeps for each logit of the shard at its peak, about; 0 if it forms no whole logits.
    """

    about: str
    prepare: Callable[[Place], Step]
    modules: Sequence[str] = ()
    distribution: str | None = None
    ranks: str = "any"
    cuda_only: bool = False
    logit_bytes: int = 0

    def missing(self, job: Job) -> str | None:
        """Why it cannot run here, or None. Issues no collective."""
        os.environ.setdefault("DS_ACCELERATOR", job.device.type)  # else DeepSpeed looks for one, and warns
        if self.cuda_only and job.device.type != "cuda":
            return "needs a GPU"
        if self.ranks != "any" and (self.ranks == "one") != (job.world == 1):
            return "runs on one rank only" if self.ranks == "one" else "needs several ranks"
        for name in self.modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # a broken package may raise anything
                return f"{type(error).__name__}: {error}"
        return None

    def version(self) -> str | None:
        """Of its distribution, if that is installed."""
        try:
            return None if self.distribution is None else metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


def _ours(place: Place) -> Step:
    group = place.group() if place.job.world > 1 else None
    shards: dict[int, VocabShard] = {}

    def loss(problem: Problem, choice: Choice) -> Tensor:
        vocab = problem.shape.vocab
        if vocab not in shards:
            shards[vocab] = VocabShard(VocabLayout(vocab, problem.shape.world, multiple_of=1), group)
        options: dict[str, Any] = {key: value for key, value in vars(choice).items() if value is not None}
        return linear_cross_entropy(problem.hidden, problem.weight, problem.target, shard=shards[vocab], **options)

    return _with_backward(loss)


def _floor(place: Place) -> Step:
    buffers: dict[tuple[Any, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def step(problem: Problem, choice: Choice) -> None:
        hidden, weight = problem.hidden.detach(), problem.weight.detach()
        rows = min(choice.chunk_size or len(hidden), len(hidden))
        key = (rows, weight.shape, weight.dtype)
        if key not in buffers:
            buffers[key] = (weight.new_empty(rows, len(weight)), torch.empty_like(hidden[:rows]), weight.clone())
        logits, hidden_product, weight_product = buffers[key]
        for start in range(0, len(hidden), rows):
            chunk = hidden[start : start + rows]
            count = len(chunk)
            torch.mm(chunk, weight.T, out=logits[:count])
            torch.mm(logits[:count], weight, out=hidden_product[:count])
            torch.mm(logits[:count].T, chunk, out=weight_product)

    return step


def _megatron(place: Place) -> Step:
    state = importlib.import_module("megatron.core.parallel_state")
    loss = importlib.import_module("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    # It takes its group from a global.
    minutes = max(1, math.ceil(place.timeout.total_seconds() / 60))
    state.initialize_model_parallel(place.job.world, distributed_timeout_minutes=minutes)
    group = state.get_tensor_model_parallel_group()
    return _with_backward(
        lambda problem, choice: loss(_megatron_logits(problem, group), problem.target[:, None]).mean()
    )


def _megatron_fused(place: Place) -> Step:
    loss = importlib.import_module("megatron.core.fusions.fused_cross_entropy").fused_vocab_parallel_cross_entropy
    group = place.group()
    return _with_backward(
        lambda problem, choice: loss(_megatron_logits(problem, group), problem.target[:, None], group).mean()
    )


def _megatron_logits(problem: Problem, group: dist.ProcessGroup) -> Any:
    """`[T, 1, V / ranks]` as ColumnParallelLinear forms them; its backward all-reduces dH during the dW product."""
    linear = importlib.import_module("megatron.core.tensor_parallel.layers")
    return linear.linear_with_grad_accumulation_and_async_allreduce(
        input=problem.hidden[:, None],
        weight=problem.weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=problem.shape.world > 1,
        sequence_parallel=False,
        tp_group=group,
    )


def _deepspeed(place: Place) -> Step:
    return _deepspeed_step(place, lambda choice: None)


def _deepspeed_same_chunk(place: Place) -> Step:
    return _deepspeed_step(place, lambda choice: choice.chunk_size)


def _deepspeed_step(place: Place, chunk_size: Callable[[Choice], int | None]) -> Step:
    backend = "nccl" if place.job.device.type == "cuda" else "gloo"
    # Its shared-memory collectives would be compiled at the first use, which needs ninja; gloo serves as well.
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    importlib.import_module("deepspeed").init_distributed(backend, verbose=False)
    loss = importlib.import_module(_DEEPSPEED_LOSS).vocab_parallel_linear_cross_entropy
    group = place.group() if place.job.world > 1 else None
    return _with_backward(
        lambda problem, choice: loss(
            problem.hidden, problem.weight, problem.target, tp_group=group, chunk_size=chunk_size(choice)
        )
    )


def _loss_parallel(place: Place) -> Step:
    tensors = importlib.import_module("torch.distributed.tensor")
    parallel = importlib.import_module("torch.distributed.tensor.parallel")
    mesh = importlib.import_module("torch.distributed.device_mesh").DeviceMesh.from_group(
        place.group(), place.job.device.type
    )
    replicated, sharded = [tensors.Replicate()], [tensors.Shard(0)]

    def step(problem: Problem, choice: Choice) -> Tensor:
        hidden = tensors.DTensor.from_local(problem.hidden, mesh, replicated, run_check=False)
        weight = tensors.DTensor.from_local(problem.weight, mesh, sharded, run_check=False)
        target = tensors.DTensor.from_local(problem.target, mesh, replicated, run_check=False)
        with parallel.loss_parallel():
            loss: Any = functional.cross_entropy(functional.linear(hidden, weight), target)
            loss.backward()
        local: Tensor = loss.detach().to_local()
        return local

    return step


def _torch_linear(place: Place) -> Step:
    options = torch.nn.LinearCrossEntropyOptions()
    loss = functional.linear_cross_entropy
    return _with_backward(lambda problem, choice: loss(problem.hidden, problem.weight, problem.target, options=options))


def _liger(place: Place) -> Step:
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return _with_backward(lambda problem, choice: loss(problem.weight, problem.hidden, problem.target))


def _cut_cross_entropy(place: Place) -> Step:
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return _with_backward(lambda problem, choice: loss(problem.hidden, problem.weight, problem.target))


def _with_backward(loss: Callable[[Problem, Choice], Tensor]) -> Step:
    def step(problem: Problem, choice: Choice) -> Tensor:
        value = loss(problem, choice)
        value.backward()  # type: ignore[no-untyped-call]
        return value.detach()

    return step


_DEEPSPEED_LOSS = "deepspeed.sequence.linear_cross_entropy"
_MEGATRON_MODULES = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.layers")

CONTESTANTS = {
    "floor": Contestant(
        "only three matrix products a chunk, into preallocated buffers: Z = H W^T, Z W, Z^T H; in ours' chunks",
        _floor,
    ),
    "ours": Contestant("linear_cross_entropy", _ours, distribution="vocab-parallel"),
    "megatron": Contestant(
        "Megatron-core: its column-parallel projection, then vocab_parallel_cross_entropy",
        _megatron, logit_bytes=8, modules=_MEGATRON_MODULES, distribution="megatron-core",
    ),
    "megatron_fused": Contestant(
        "Megatron-core: the same projection, then fused_vocab_parallel_cross_entropy (rounds the gradient to bfloat16)",
        _megatron_fused, logit_bytes=12, modules=_MEGATRON_MODULES, distribution="megatron-core",
    ),
    "deepspeed": Contestant(
        "DeepSpeed: vocab_parallel_linear_cross_entropy, in chunks of its own choice",
        _deepspeed, modules=(_DEEPSPEED_LOSS,), distribution="deepspeed",
    ),
    "deepspeed_same_chunk": Contestant(
        "DeepSpeed: the same in ours' chunks",
        _deepspeed_same_chunk, modules=(_DEEPSPEED_LOSS,), distribution="deepspeed",
    ),
    "loss_parallel": Contestant(
        "PyTorch: cross_entropy of DTensor logits under loss_parallel, as its documentation calls it",
        _loss_parallel, modules=("torch.distributed.tensor.parallel",), distribution="torch", ranks="several",
        logit_bytes=20,
    ),
    "torch_linear": Contestant(
        "PyTorch: torch.nn.functional.linear_cross_entropy, chunked, in chunks of its own choice",
        _torch_linear, distribution="torch", ranks="one",
    ),
    "liger": Contestant(
        "Liger: LigerFusedLinearCrossEntropyLoss",
        _liger, modules=("liger_kernel.transformers",), distribution="liger-kernel", ranks="one", cuda_only=True,
    ),
    "cut_cross_entropy": Contestant(
        "Cut Cross Entropy: linear_cross_entropy, its default gradient filter on",
        _cut_cross_entropy, modules=("cut_cross_entropy",), distribution="cut-cross-entropy", ranks="one",
        cuda_only=True,
    ),
}  # fmt: skip
