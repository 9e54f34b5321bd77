"""Text from a converted model: its cache, this rank's logits of the last position, and a policy over the shards."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.rollout import rollout
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.trace import StepTrace
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.errors import ConfigError
from vocab_parallel.integrations.transformers.conversion import conversion_of, inner_of
from vocab_parallel.integrations.transformers.prompts import Prompts
from vocab_parallel.select.streams import Streams


@dataclass(frozen=True)
class Generated:
    """What `generate` returns; the same bits on every rank.

    Attributes:
        sequences: int64 `[B, S + n]`, the prompts as they were given and the new ids, as `model.generate` returns them.
        token_ids: int64 `[B, n]`, the new ids; `pad_token_id` after a row's end.
        lengths: int64 `[B]`, new ids of each row, its end id included.
        logprobs: float64 `[B, n]`, of the ids under the policy's final distributions, in nats; 0 after a row's end.
        state: The policy's; its streams continue where this call stopped.
        trace: One entry a step, if it was asked for.
    """

    sequences: Tensor
    token_ids: Tensor
    lengths: Tensor
    logprobs: Tensor
    state: PolicyState
    trace: list[StepTrace]


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,  # [B, S] int64, the same on every rank
    *,
    policy: Policy,
    streams: Streams | None = None,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,  # [B, S], 1 where input_ids holds a token
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    streamer: Any = None,
    trace: bool = False,
) -> Generated:
    """Continues prompts with a policy; `model.generate` for a model whose logits stay sharded.

    Only each row's last token is projected, onto this rank's rows of the vocabulary. A row that has ended takes no more
    draws; its stream, its length and its tokens do not depend on the other rows (as far as the model's own arithmetic
    gives a row the same logits in any batch).

    Args:
        model: A converted model, in the mode it should run in (`model.eval()`).
        streams: Of the rows; a policy that draws nothing needs none.
        attention_mask: Prompts may be padded on either side: a row's last token is the last one that the mask marks,
            and its positions count from its first. Without a mask all of `input_ids` are tokens, and a row that ends in
            `pad_token_id` (unless that is an end id too) is an error.
        eos_token_id: Ids that end a row. None: those of `model.generation_config`; an empty list: none.
        pad_token_id: What the result holds after a row's end. None: the generation config's, or the first end id.
        streamer: As in `model.generate`: `put` gets the prompts, then each step's ids, and `end` is called. Give it on
            the rank that prints.
        trace: Keep a `StepTrace` a step.

    Returns:
        `Generated`.

    Collectives:
        A 64-byte all-gather for the call. For each new token the embedding's (a 64-byte all-gather, an all-reduce of
        `D` numbers a row) and those of `policy.step`. No logits.

    Raises:
        ConfigError, LayoutMismatchError, TokenRangeError, ValueError: On every rank, naming row and value: the model is
            not converted, ranks with other prompts, a row without a token, an id out of range, streams of another batch
            size; and what `policy.step` raises.
    """
    conversion = conversion_of(model)
    prompts = Prompts.of(
        model, input_ids, attention_mask, eos_token_id, pad_token_id, max_new_tokens,
        words=f"generate with policy {policy.name!r} {policy.digest}", check=lambda rows: policy.start(rows, streams),
    )  # fmt: skip
    cached = CachedModel(model, prompts.mask)

    def columns(view: View, active: Tensor) -> Tensor:
        first = view.prefix.shape[1] == prompts.ids.shape[1]
        return cached(prompts.ids if first else torch.where(active[:, None], view.prefix[:, -1:], prompts.pad_id))

    if streamer is not None:
        streamer.put(input_ids.cpu())
    kept, traces = [], []  # not the steps themselves, each of which holds a prefix
    state = policy.start(len(input_ids), streams)
    for step in rollout(
        columns, policy, prompts.view, state, shard=conversion.shard, eos_ids=prompts.eos_ids,
        max_new_tokens=max_new_tokens, trace=trace,
    ):  # fmt: skip
        shown = torch.where(step.active, step.token_ids, prompts.pad_id)
        kept.append((shown, step.active, step.logprobs))
        traces += [] if step.trace is None else [step.trace]
        state = step.state
        if streamer is not None:
            streamer.put(shown.cpu())
    if streamer is not None:
        streamer.end()
    token_ids, active, logprobs = (torch.stack(parts, 1) for parts in zip(*kept, strict=True))
    sequences = torch.cat([input_ids, token_ids.to(input_ids.device)], 1)
    return Generated(sequences, token_ids, active.sum(1), logprobs, state, traces)


class CachedModel:
    """A converted model with its cache: ids in, this rank's scores of the last position out.

    Args:
        mask: bool `[B, S]`, the places of the prompts that hold a token; the last is one in every row.
    """

    def __init__(self, model: Any, mask: Tensor) -> None:
        model, conversion = inner_of(model), conversion_of(model)
        self._model, self._conversion, self._mask = model, conversion, mask
        known = inspect.signature(type(model).forward).parameters
        self._takes_positions = "position_ids" in known
        self._cache_name = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5.24
        self._cache: Any = None

    def __call__(self, ids: Tensor) -> Tensor:  # [B, s] -> [B, shard_size]
        """Reads `ids` after what it has read; finite scores for any real ids.

        Collectives:
            Those of one embedding lookup.
        """
        if self._cache is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(ids, dtype=torch.bool)], 1)
        inputs: dict[str, Any] = {
            "input_ids": ids, "attention_mask": self._mask.to(torch.int64), "use_cache": True, "return_dict": True,
            self._cache_name: self._cache,
        }  # fmt: skip
        if self._takes_positions:
            inputs["position_ids"] = (self._mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        conversion = self._conversion
        with conversion.head.answering(lambda hidden: conversion.local_scores(hidden[:, -1])) as answers:
            output = self._model(**inputs)
        self._cache = output.get(self._cache_name)
        if self._cache is None or len(answers) != 1:
            raise ConfigError(
                f"{type(self._model).__name__} returned {'no cache' if self._cache is None else 'a cache'} and called "
                f"its head {len(answers)} times, expected a cache and once: only models with a cache can generate here."
            )
        scores: Tensor = answers[0]
        return scores

    def reorder_cache(self, rows: Tensor) -> None:
        """Makes the cache that of the rows `rows` `[B]`, in that order: beams follow their parents."""
        self._cache.reorder_cache(rows)
        self._mask = self._mask[rows]
