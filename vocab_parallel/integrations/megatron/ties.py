"""Proof that Megatron's tie holds: one Parameter on one stage, or equal copies on the first and the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.errors import TyingError
from vocab_parallel.headers import CHECKSUM
from vocab_parallel.integrations.megatron.modules import EMBEDDING, HEAD, MegatronEmbedding, MegatronHead
from vocab_parallel.pipeline_tie import bits_checksum
from vocab_parallel.shard import VocabShard

_AGAIN = "Call apply on the model where it is built, then wrap it, then build the optimizer."


def verify_tied(model: Any, optimizer: Any = None) -> list[tuple[str, str]]:
    """Proves that the tie of a model holds. Call it after `apply`, after the optimizer is built, after each load.

    On one stage: one Parameter, the embedding's, which the output layer has no second one beside; one place in the
    buffers of DistributedDataParallel, which it and its gradient still lie in; one entry in the optimizer, and so one
    master copy and one state. On the first and the last of several stages: that, and copies that are
    equal in every bit and bear the marks by which Megatron counts them once and exchanges their gradients.

    Args:
        model: What `apply` was called on, bare or wrapped, or this rank's list of model chunks.
        optimizer: `get_megatron_optimizer`'s (also chained, also distributed), or a torch optimizer.

    Returns:
        The tied pair by name; empty on a pipeline stage that has neither.

    Collectives:
        One 64-byte all-gather over the model's embedding group if there are several stages, one over the tensor-
        parallel group; none on a stage in between.

    Raises:
        TyingError: Naming both parameters, on every rank of both groups.
    """
    wrapped = model if isinstance(model, list) else [model]
    stages = [_bare(chunk) for chunk in wrapped]
    uses = {
        EMBEDDING: next((stage.embedding.word_embeddings for stage in stages if stage.pre_process), None),
        HEAD: next((stage.output_layer for stage in stages if stage.post_process), None),
    }
    ours: list[Any] = [use for use in uses.values() if use is not None]
    if not ours:
        return []
    shard: VocabShard | None = getattr(ours[0], "shard", None)
    if not stages[0].share_embeddings_and_output_weights or shard is None:
        raise TyingError(
            f"{EMBEDDING} and {HEAD} are not tied: the model was not built with share_embeddings_and_output_weights, "
            "or apply(model, shard=...) was not called on it."
        )
    fault = capture(_check, wrapped, stages, uses, optimizer)
    own: Tensor | None = ours[0].weight  # None of an output layer that lost its embedding, which is a fault
    tell(stages[0], shard, "megatron.verify_tied", fault, None if own is None else own[: shard.num_valid])
    return [(EMBEDDING, HEAD)]


def tell(model: Any, shard: VocabShard, call: str, fault: Exception | None, copy: Tensor | None = None) -> None:
    """Raises this rank's fault on every rank of its tensor-parallel group and of its embedding group.

    Args:
        copy: This stage's copy of a weight that must be equal on the first and the last stage.

    Collectives:
        One 64-byte all-gather over each of the two.
    """
    group = getattr(model, "embd_group", None)
    if isinstance(group, dist.ProcessGroup) and group.size() > 1 and group.rank() >= 0:
        fault = capture(_compare_copies, group, shard, call, fault, copy)
    Exchange(shard, "header", call, fault=fault).wait()


def _compare_copies(
    group: dist.ProcessGroup, shard: VocabShard, call: str, fault: Exception | None, copy: Tensor | None
) -> None:
    check = 0 if fault is not None or copy is None else bits_checksum(copy)
    device = None if copy is None else copy.device
    exchange = Exchange(
        shard.wider(group), "header", call, fault=fault, rows=0, checksum=check, compare_checksum=False, device=device
    )
    exchange.wait()
    if len({header[CHECKSUM] for header in exchange.headers}) > 1:
        raise TyingError(
            f"{EMBEDDING} on the first stage and {HEAD} on the last are no longer equal. Likely one of them was "
            "loaded or initialised alone, or their gradients were not exchanged (finalize_model_grads does it). "
            "Copy the first stage's to the last before training goes on."
        )


def _check(wrapped: list[Any], stages: list[Any], uses: dict[str, Any], optimizer: Any) -> None:
    embedding, head = uses[EMBEDDING], uses[HEAD]
    if embedding is not None and head is not None:
        _check_one_parameter(embedding, head)
    owner, other = (embedding, HEAD) if embedding is not None else (head, EMBEDDING)
    name = EMBEDDING if embedding is not None else HEAD
    weight = owner.weight
    pair = f"{name} (tied to {other}{' on the other stage' if embedding is None or head is None else ''})"
    if weight is not owner.adopted:
        raise TyingError(
            f"{pair} is not the Parameter that apply found: something replaced it (to_empty, assignment, a load with "
            f"assign=True), and its marks, DistributedDataParallel and the optimizer stayed with the old one. {_AGAIN}"
        )
    _check_marks(weight, pair, copy=embedding is None, alone=embedding is not None and head is not None)
    known = {id(parameter): found for stage in stages for found, parameter in stage.named_parameters()}
    for chunk, stage in zip(wrapped, stages, strict=True):
        buffers = vars(chunk).get("buffers")
        if isinstance(buffers, list) and any(parameter is weight for parameter in stage.parameters()):
            _check_buffers([*buffers, *chunk.expert_parallel_buffers], weight, pair)
    if optimizer is not None:
        _check_optimizer(optimizer, weight, known, pair)


def _check_one_parameter(embedding: MegatronEmbedding, head: MegatronHead) -> None:
    own: Tensor | None = head._parameters["weight"]
    if own is None and head.tied_to is embedding:
        return
    shared = own is not None and _storage(own) == _storage(embedding.weight)
    raise TyingError(
        f"{EMBEDDING} and {HEAD} are no longer one Parameter"
        + (" though they share storage: optimizers see two" if shared else "")
        + f". A tied output layer has no weight of its own; likely a copy was assigned. {_AGAIN}"
    )


def _check_marks(weight: nn.Parameter, pair: str, *, copy: bool, alone: bool) -> None:
    wanted = {"tensor_model_parallel": "its shards are counted once each in the gradient norm"}
    if alone:
        wanted["zero_out_wgrad"] = "DistributedDataParallel adds the lookup's gradient"
    else:
        wanted["shared_embedding"] = "the distributed optimizer cuts both copies alike; they drift apart without"
    if copy:
        wanted["shared"] = "the gradient norm counts only the first stage's copy"
    for name, why in wanted.items():
        if not getattr(weight, name, False):
            raise TyingError(f"{pair} has lost Megatron's mark {name!r}, by which {why}. {_AGAIN}")
    if not copy and getattr(weight, "shared", False):
        raise TyingError(f"{pair} has the mark 'shared' of a second copy: the gradient norm would leave it out.")


def _check_buffers(buffers: list[Any], weight: nn.Parameter, pair: str) -> None:
    """The Parameter has one place in DDP's buffers, and it and its gradient lie there."""
    found = [buffer for buffer in buffers for parameter in buffer.params if parameter is weight]
    if not weight.requires_grad:
        return
    if len(found) != 1:
        raise TyingError(
            f"DistributedDataParallel has {pair} {len(found)} times in its buffers, expected once: it was built on "
            f"other Parameters than the model has now. {_AGAIN}"
        )
    for what, held, buffer in (
        ("data", weight, getattr(found[0], "param_data", None)),
        ("main_grad", getattr(weight, "main_grad", None), found[0].grad_data),
    ):
        if buffer is not None and (held is None or _storage(held) != _storage(buffer)):
            raise TyingError(
                f"the {what} of {pair} is no longer in DistributedDataParallel's buffer (to_empty, or an assignment to "
                f".data): the optimizer would update what the model does not read. {_AGAIN}"
            )


def _check_optimizer(optimizer: Any, weight: nn.Parameter, known: dict[int, str], pair: str) -> None:
    counted = 0
    sharded = False
    for part in _parts(optimizer):
        sharded = sharded or hasattr(part, "model_fp32_groups")
        for parameter in _model_parameters(part):
            counted += parameter is weight
            if id(parameter) not in known:
                raise TyingError(
                    f"the optimizer holds a Parameter {list(parameter.shape)} that the model no longer has, likely "
                    f"{EMBEDDING} or {HEAD} from before they were tied or replaced. {_AGAIN}"
                )
        _check_states(part, pair)
    # A distributed optimizer's rank need not own any part of the Parameter; that some rank does, DDP's buffers prove.
    if counted > 1 or (counted == 0 and not sharded and weight.requires_grad):
        raise TyingError(f"the optimizer holds {pair} {counted} times, expected once. {_AGAIN}")


def _check_states(optimizer: Any, pair: str) -> None:
    inner = getattr(optimizer, "optimizer", optimizer)
    if inner is None:
        return
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    if any(id(parameter) not in held for parameter in inner.state):
        raise TyingError(
            f"the optimizer has a state for a Parameter that is in none of its groups, beside {pair}: it was built "
            f"before something was replaced. {_AGAIN}"
        )


def _parts(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chained one."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(part, "is_stub_optimizer", False):
            yield part


def _model_parameters(optimizer: Any) -> list[nn.Parameter]:
    """The model's Parameters that an optimizer updates, directly or through a master copy or a shard."""
    for names in (("model_float16_groups", "model_fp32_groups"), ("float16_groups", "fp32_from_fp32_groups")):
        if all(hasattr(optimizer, name) for name in names):
            return [parameter for name in names for group in getattr(optimizer, name) for parameter in group]
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _bare(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
