"""A tied model for DeepSpeed on CPU ranks, its data, and the same model in one process: plain torch, whole tables."""

from __future__ import annotations

import collections
import functools
import logging
import os
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vocab_parallel import (
    VocabLayout,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    VocabShard,
    cross_entropy,
    tie_weights,
)
from vocab_parallel.embedding import init_rows_

HIDDEN, TOKENS, STEPS, HALF = 4, 6, 10, 5
# Adam divides noise by noise where a gradient vanishes; an eps above the noise keeps its steps comparable.
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


@contextmanager
def host() -> Generator[Any, None, None]:
    """DeepSpeed in a rank: the environment of a launcher, no op compiled, its own warnings not ours."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()), DS_ACCELERATOR="cpu",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCH_COMPILE_DISABLE="1")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

        vars(deepspeed.ops)["__compatible_ops__"] = collections.defaultdict(bool)
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        yield deepspeed


@functools.cache
def tensor_groups(tp: int) -> list[Any]:
    """The world in groups of `tp` consecutive ranks; one of each size in a process."""
    return [dist.new_group(list(range(at, at + tp))) for at in range(0, dist.get_world_size(), tp)]


def make_shard(tp: int, vocab: int, padded: int | None = None) -> VocabShard:
    layout = VocabLayout(vocab, tp, multiple_of=1)
    if padded is not None:
        layout = VocabLayout.from_padded(vocab, padded, tp)
    return VocabShard(layout, tensor_groups(tp)[dist.get_rank() // tp] if tp > 1 else None)


class Model(nn.Module):
    """Embedding, one residual block, head."""

    def __init__(self, shard: VocabShard, *, tie: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(HIDDEN, shard=shard)
        self.norm = nn.LayerNorm(HIDDEN)
        self.block = nn.Linear(HIDDEN, HIDDEN)
        self.head = VocabParallelLMHead(HIDDEN, shard=shard, bias=bias)
        if tie:
            tie_weights(self.embedding, self.head)

    def forward(self, ids: Tensor, target: Tensor, *, path: str = "fused", **options: Any) -> Tensor:
        hidden = self.embedding(ids)
        hidden = hidden + self.block(self.norm(hidden)).tanh()
        if path == "logits":
            return cross_entropy(self.head(hidden), target, shard=self.head.shard, **options)
        if path == "per row":  # recomputes the projection in backward
            rows = self.head.loss(hidden, target, chunk_size=4, reduction="none")
            return rows.sum() / (target != -100).sum()
        return self.head.loss(hidden, target, chunk_size=4, **options)


class Oracle(nn.Module):
    """The same on whole tables."""

    def __init__(self, vocab: int, *, seed: int = 0, tie: bool = True, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(vocab, HIDDEN, _weight=torch.empty(vocab, HIDDEN))
        self.norm = nn.LayerNorm(HIDDEN)
        self.block = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, vocab, bias=bias)
        alone = VocabShard(VocabLayout(vocab, 1, multiple_of=1))
        with torch.no_grad():
            for weight in (self.embedding.weight, self.head.weight):
                init_rows_(weight, alone, seed=0, std=0.02)
            if bias:
                self.head.bias.zero_()
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
        hidden = self.embedding(ids)
        logits = self.head(hidden + self.block(self.norm(hidden)).tanh())
        return F.cross_entropy(logits.float(), target, reduction=reduction)


@dataclass(frozen=True)
class Case:
    """One way to run the model.

    Attributes:
        padded: Rows with padding; default the next multiple of `tp`.
        path: From hidden states to the loss: "fused", "per row", or "logits".
        construct: "plain", or "zero_init" to build under `zero_init`.
    """

    stage: int
    dp: int
    tp: int
    vocab: int = 9
    padded: int | None = None
    dtype: str = "float32"
    float32_sums: bool = False  # data_types.grad_accum_dtype, which chooses another optimizer for bfloat16 in stage 1
    offload: bool = False
    accumulate: int = 1
    clip: float = 0.0
    construct: str = "plain"
    tie: bool = True
    bias: bool = False
    uneven: bool = False  # another number of tokens on each data-parallel rank
    path: str = "fused"

    def __str__(self) -> str:
        words = [f"zero{self.stage}", f"dp{self.dp}", f"tp{self.tp}", f"V{self.vocab}"]
        words += [f"padded{self.padded}"] if self.padded else []
        words += [self.dtype] if self.dtype != "float32" else []
        words += [name for name in ("float32_sums", "offload", "bias", "uneven") if getattr(self, name)]
        words += ["untied"] if not self.tie else []
        words += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        words += [f"clip{self.clip}"] if self.clip else []
        words += [self.construct] if self.construct != "plain" else []
        words += [self.path.replace(" ", "_")] if self.path != "fused" else []
        return "-".join(words)

    @property
    def world(self) -> int:
        return self.dp * self.tp

    def config(self, **more: Any) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": self.clip, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": self.dtype == "bfloat16"},
        }  # fmt: skip
        if self.float32_sums:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config | more

    def batch(self, step: int, replica: int, micro: int) -> tuple[Tensor, Tensor]:
        """Ids and targets of one micro-batch: of every rank that holds other rows, and of the oracle."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * replica + micro)
        ids = torch.randint(self.vocab, (TOKENS,), generator=generator)
        target = torch.randint(self.vocab, (TOKENS,), generator=generator)
        target[replica if not self.uneven else slice(0, 4 * replica)] = -100
        return ids, target


def build(case: Case, *, seed: int = 0) -> Any:
    """The case's model on this rank, not yet in an engine; `seed` draws the trunk."""
    from vocab_parallel.integrations import deepspeed as integration

    torch.manual_seed(seed)
    shard = make_shard(case.tp, case.vocab, case.padded)
    if case.construct == "zero_init":
        with integration.zero_init(shard, config=case.config()):
            return Model(shard, tie=case.tie, bias=case.bias)
    return Model(shard, tie=case.tie, bias=case.bias)


def start(case: Case, *, seed: int = 0, **more: Any) -> Any:
    """An engine of the case."""
    from vocab_parallel.integrations import deepspeed as integration

    model = build(case, seed=seed)
    optimizer = functools.partial(torch.optim.AdamW, **ADAMW)
    return integration.initialize(model, config=case.config(**more), optimizer=optimizer)[0]


def train(case: Case, engine: Any, steps: range) -> dict[str, list[float]]:
    """Losses (the mean of this rank's micro-batches) and gradient norms, by step."""
    from vocab_parallel.gradient_norm import gradient_norm

    seen: dict[str, list[float]] = {"losses": [], "norms": []}
    replica = dist.get_rank() // case.tp
    options: dict[str, Any] = {"path": case.path}
    if case.uneven:
        options["mean_group"] = engine.data_parallel_group
    for step in steps:
        losses = []
        for micro in range(case.accumulate):
            loss = engine(*case.batch(step, replica, micro), **options)
            engine.backward(loss)
            if case.stage == 0 and micro == case.accumulate - 1:
                seen["norms"].append(float(gradient_norm(engine.module)))
            losses.append(float(loss))
            engine.step()
        if case.stage:
            seen["norms"].append(float(engine.get_global_grad_norm()))
        seen["losses"].append(sum(losses) / len(losses))
    return seen


@functools.cache
def oracle(
    vocab: int, dp: int, *, steps: int = STEPS, accumulate: int = 1, clip: float = 0.0, tie: bool = True,
    bias: bool = False, uneven: bool = False, dtype: str = "float32", dp_from_half: int = 0,
    idle_step: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The same training in one process: losses, gradient norms, and the parameters at the end."""
    case = Case(0, dp, 1, vocab=vocab, uneven=uneven)
    model = Oracle(vocab, tie=tie, bias=bias)
    master = model
    if dtype == "bfloat16":  # float32 masters of a model that computes in bfloat16
        model = Oracle(vocab, tie=tie, bias=bias).bfloat16()
        with torch.no_grad():
            for mine, its in zip(master.parameters(), model.parameters(), strict=True):
                mine.copy_(its)
    optimizer = torch.optim.AdamW(master.parameters(), **ADAMW)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    if idle_step:
        for mine in master.parameters():
            mine.grad = torch.zeros_like(mine)
        optimizer.step()
    for step in range(steps):
        replicas = dp_from_half if dp_from_half and step >= HALF else dp
        batches = [case.batch(step, replica, micro) for replica in range(replicas) for micro in range(accumulate)]
        if uneven:
            count = sum(int((target != -100).sum()) for _, target in batches)
            loss = torch.stack([model(ids, target, reduction="sum") for ids, target in batches]).sum() / count
        else:
            loss = torch.stack([model(ids, target) for ids, target in batches]).mean()
        optimizer.zero_grad()
        model.zero_grad()
        loss.backward()
        if master is not model:
            for mine, its in zip(master.parameters(), model.parameters(), strict=True):
                mine.grad = its.grad.float()
        limit = clip or float("inf")
        seen["norms"].append(float(torch.nn.utils.clip_grad_norm_(master.parameters(), limit)))
        optimizer.step()
        if master is not model:
            with torch.no_grad():
                for mine, its in zip(master.parameters(), model.parameters(), strict=True):
                    its.copy_(mine)
        seen["losses"].append(loss.item())
    return seen | {"state": {name: p.detach().clone() for name, p in master.named_parameters()}}


def oracle_of(case: Case, **more: Any) -> dict[str, Any]:
    return oracle(
        case.vocab, case.dp, accumulate=case.accumulate, clip=case.clip, tie=case.tie, bias=case.bias,
        uneven=case.uneven, dtype=case.dtype,
        idle_step=case.dtype == "bfloat16" and case.stage == 0,  # DeepSpeed takes one to make the optimizer's state
        **more,
    )  # fmt: skip


def moments(engine: Any) -> int:
    """Elements of first moments that this rank's optimizer keeps."""
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return sum(state["exp_avg"].numel() for state in base.state.values())


def moments_wanted(case: Case, engine: Any) -> int:
    """As many as one set for each Parameter takes, the tied one once, with ZeRO's padding."""
    from vocab_parallel.integrations.deepspeed import partition_padding

    sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters()]
    if case.stage == 0:
        return sum(sizes)
    if case.stage == 3:
        return sum(-(-size // case.dp) for size in sizes)
    return partition_padding(sum(sizes), case.dp, alignment=2 * case.dp).per_rank
