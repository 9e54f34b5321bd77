"""Beam search over a converted model: its cache follows the beams, and its logits stay sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.search.beam_search import BeamResult
from vocab_parallel.decode.search.beam_search import beam_search as search_beams
from vocab_parallel.decode.search.hypotheses import LengthPenalty
from vocab_parallel.decode.search.searching import Stepped
from vocab_parallel.integrations.transformers.conversion import conversion_of
from vocab_parallel.integrations.transformers.generation import CachedModel
from vocab_parallel.integrations.transformers.prompts import Prompts


@dataclass(frozen=True)
class Searched:
    """What `beam_search` returns; the same bits on every rank.

    Attributes:
        sequences: int64 `[B * R, S + n]`, the prompts as they were given and the new ids, a row's hypotheses side by
            side, best first; `pad_token_id` after an end. As `model.generate` returns them.
        scores: float64 `[B * R]`, sums of log-probabilities in nats over the length penalty.
        result: Everything else.
    """

    sequences: Tensor
    scores: Tensor
    result: BeamResult


@torch.no_grad()
def beam_search(
    model: Any,
    input_ids: Tensor,  # [B, S] int64, the same on every rank
    *,
    num_beams: int,
    max_new_tokens: int,
    policy: Policy | None = None,
    attention_mask: Tensor | None = None,  # [B, S], 1 where input_ids holds a token
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    length_penalty: LengthPenalty | float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: int = 1,
    groups: int = 1,
    diversity_penalty: float = 0.0,
    renormalize: bool = True,
) -> Searched:
    """`model.generate(num_beams=...)` for a model whose logits stay sharded.

    Args:
        model: A converted model, in the mode it should run in (`model.eval()`).
        policy: Its transforms are applied to each beam's scores. A search draws nothing, and a beam without a legal
            token ends there: selector and fallback do not matter.
        length_penalty, early_stopping, groups, diversity_penalty, renormalize: As in `decode.beam_search`, with the
            defaults of `model.generate`, but that `model.generate` adds scores up as its processors leave them: that
            is a policy of `Normalize()` and then the processors, with `renormalize=False`.
        attention_mask, eos_token_id, pad_token_id: As in `generate`.
        num_return_sequences: R, at most `num_beams`.

    Collectives:
        As `decode.beam_search`, and for each step the embedding's. No logits.

    Raises:
        ConfigError, LayoutMismatchError, TokenRangeError, ValueError: On every rank, as `generate` and
            `decode.beam_search`.
    """
    conversion = conversion_of(model)
    prompts = Prompts.of(
        model, input_ids, attention_mask, eos_token_id, pad_token_id, max_new_tokens, words="beam_search"
    )

    def step(prefix: Tensor, parents: Tensor, state: Any) -> Stepped:
        return Stepped(state(prompts.ids if prefix.shape[1] == prompts.ids.shape[1] else prefix[:, -1:]), state)

    found = search_beams(
        step, prompts.view.prefix, shard=conversion.shard, num_beams=num_beams, max_new_tokens=max_new_tokens,
        eos_ids=prompts.eos_ids, length_penalty=length_penalty, early_stopping=early_stopping, groups=groups,
        diversity_penalty=diversity_penalty, transforms=() if policy is None else policy.transforms,
        renormalize=renormalize, state=CachedModel(model, prompts.mask), num_return=num_return_sequences,
    )  # fmt: skip
    token_ids = torch.where(found.token_ids >= 0, found.token_ids, prompts.pad_id).flatten(0, 1)
    before = input_ids.repeat_interleave(num_return_sequences, 0)
    return Searched(torch.cat([before, token_ids.to(before.device)], 1), found.scores.flatten(), found)
