"""`apply` and `unapply`: a Transformers model with its embedding, head and loss sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vocab_parallel.agreement import Exchange, capture, checksum
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.errors import ConfigError, VocabParallelError
from vocab_parallel.headers import CHECKSUM
from vocab_parallel.integrations.transformers import checks, proof
from vocab_parallel.integrations.transformers.conversion import Conversion, conversion_of
from vocab_parallel.integrations.transformers.forward import converted_class
from vocab_parallel.integrations.transformers.modules import Snapshot, shard_embedding_, shard_head_, take_whole_tables
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import tie_weights

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # DDP's own name


def apply(
    model: Any,
    *,
    shard: VocabShard,
    data_parallel: bool = False,
    logits_with_loss: bool = False,
    chunk_size: int | None = None,
    prove: bool = True,
) -> list[str]:
    """Shards the embedding, the head and the loss of a causal language model of Transformers, in place.

    Afterwards `model(input_ids, labels=...)` gives the loss over the whole vocabulary without forming logits, and
    without labels the whole logits on every rank, so that `generate` works. The trunk stays as it was. Call it before
    the optimizer is built and before the model is wrapped. Tied weights stay one Parameter.

    Args:
        model: A `PreTrainedModel` with the same weights on every rank.
        shard: Of the model's own vocabulary: `VocabShard(VocabLayout(model.config.vocab_size, tp_size), group)`.
        data_parallel: The ranks hold different batches (their number of rows may differ): a data-parallel job shards
            its vocabulary over its own ranks. The shard's group is the world. Without it all ranks of the group must
            get the same batch.
        logits_with_loss: Return the logits beside a loss too (a Trainer's `compute_metrics` needs them). A call may
            say it for itself: `model(..., return_logits=True)`.
        chunk_size: As in `linear_cross_entropy`.
        prove: Compare loss, logits and some rows of the gradients with the model's own on a small batch. It needs one
            gradient of the whole tables on each rank, for a moment.

    Returns:
        The names of the parameters that are sharded now.

    Collectives:
        One 64-byte all-gather; with `prove` those of a forward and a backward on a few tokens, and one more.

    Raises:
        ConfigError, TyingError, LayoutMismatchError, UngatheredWeightError: On every rank, with the model as it was: it
            cannot be converted (unknown architecture, adapter, quantised or meta weights, broken tie, resized table),
            or it would not give what it gave before.
    """
    found: list[checks.Parts] = []
    evidence: list[proof.Evidence] = []

    def look() -> None:
        found.append(checks.find_parts(model, shard, data_parallel))
        if prove:
            evidence.append(_tried(proof.observe, model, found[0], shard, data_parallel))

    _agree(model, shard, capture(look), f"data_parallel={data_parallel}, {logits_with_loss=}, {prove=}")
    conversion = _convert(model, found[0], shard, data_parallel, logits_with_loss, chunk_size)
    if prove:
        fault = capture(_tried, proof.compare, model, evidence[0], conversion)
        try:
            Exchange(shard, "header", "the proof of a conversion", fault=fault, rows=0).wait()  # rows: wait for it
        except Exception:
            _undo(model, conversion)
            raise
    conversion.labels_known = False  # those of the proof say nothing of the caller's
    for snapshot in conversion.before:
        snapshot.parameters.clear()  # the whole tables end here
    return [name for name, _, _ in conversion.tables()]


def unapply(model: Any) -> None:
    """Gives the model its own embedding, head and loss back, with the rows as they are now.

    The tables are new Parameters: build a new optimizer.

    Collectives:
        One all-gather a table.

    Raises:
        ConfigError, TyingError: The model is not converted, or its tie is broken.
    """
    conversion = conversion_of(model)
    conversion.check(model)
    of_embedding, of_head = (snapshot.parameters for snapshot in conversion.before)
    for _, module, key in conversion.tables():
        local = getattr(module, key)
        whole = nn.Parameter(gather_vocab(conversion.shard, local).contiguous(), requires_grad=local.requires_grad)
        (of_embedding if module is conversion.embedding else of_head)[key] = whole
    if conversion.tied:
        of_head["weight"] = of_embedding["weight"]
    _undo(model, conversion)


def _tried(function: Callable[..., Any], model: Any, *args: Any) -> Any:
    """What the model's own code raises becomes an error with the reason."""
    try:
        return function(model, *args)
    except VocabParallelError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{type(model).__name__} is of an unknown architecture: on a small batch of token ids alone it raises "
            f"{type(error).__name__}: {error}"
        ) from error


def _agree(model: Any, shard: VocabShard, fault: Exception | None, options: str) -> None:
    """The ranks convert the same model with the same weights, or all raise."""
    words, same = f"apply({type(model).__name__}, {options})", None
    if fault is None:
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        words += f" of {len(shapes)} parameters, {sum(parameter.numel() for parameter in model.parameters())} numbers"
        same = checksum(checks.digest(model.parameters()))
    exchange = Exchange(
        shard, "header", words, fault=fault, rows=0, checksum=0 if same is None else same, compare_checksum=False
    )
    exchange.wait()
    differ = len({header[CHECKSUM] for header in exchange.headers}) > 1
    if differ:
        raise ConfigError(
            f"the ranks hold different weights of this {type(model).__name__}: each would shard a table of its own. "
            "Load the same checkpoint on every rank, or set the same seed before the model is built."
        )


def _convert(
    model: Any, parts: checks.Parts, shard: VocabShard, data_parallel: bool, logits_with_loss: bool,
    chunk_size: int | None,
) -> Conversion:  # fmt: skip
    embedding, head = parts.embedding, parts.head
    before = (Snapshot(embedding), Snapshot(head))
    for module in (embedding, head):  # before the tie's own hooks, which compare what is loaded
        module.register_load_state_dict_pre_hook(take_whole_tables)  # type: ignore[no-untyped-call]
    sharded_embedding = shard_embedding_(embedding, shard, data_parallel)
    sharded_head = shard_head_(head, shard, data_parallel)
    if parts.tied:
        tie_weights(sharded_embedding, sharded_head)
    plain = type(model)
    conversion = Conversion(
        sharded_embedding, sharded_head, parts.embedding_name, parts.head_name, shard, data_parallel, parts.tied,
        parts.scores, logits_with_loss, chunk_size, plain, before,
    )  # fmt: skip
    model.__class__ = converted_class(plain)
    model._vocab_parallel = conversion
    if shard.tp_size > 1 and shard.tp_size == dist.get_world_size():
        # A DDP of any group would average rows that are not the same, and begin by sending rank 0's to all.
        ignored = [*getattr(model, _IGNORED, ()), *_names(parts)]
        mark: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        mark(model, ignored)
    return conversion


def _undo(model: Any, conversion: Conversion) -> None:
    model.__class__ = conversion.plain
    del model._vocab_parallel
    embedding, head = conversion.embedding, conversion.head
    for module, snapshot in zip((embedding, head), conversion.before, strict=True):
        snapshot.restore_(module)
    if hasattr(model, _IGNORED):
        mine = _names(conversion)
        setattr(model, _IGNORED, [name for name in getattr(model, _IGNORED) if name not in mine])


def _names(parts: checks.Parts | Conversion) -> list[str]:
    return [f"{parts.embedding_name}.weight", f"{parts.head_name}.weight", f"{parts.head_name}.bias"]
