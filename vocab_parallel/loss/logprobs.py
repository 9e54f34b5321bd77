"""Log-probabilities of given tokens and entropies, differentiable in both: what policy-gradient training needs."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.arguments import check_logits
from vocab_parallel.collectives import apply, uncompiled
from vocab_parallel.loss.checks import check_devices, check_same_rows, check_targets
from vocab_parallel.loss.cross_entropy import LogitsCall, per_row_of_logits
from vocab_parallel.loss.fused import PerRow
from vocab_parallel.loss.linear import prepare
from vocab_parallel.loss.objective import LogProbability
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.wide_mean import WideMean
from vocab_parallel.shard import VocabShard


class LogProbs(NamedTuple):
    """Per-row values in nats, of the target's shape, float32 (float64 for float64): the same bits on every rank.

    Attributes:
        logprob: `log p_target`; 0 for ignored rows.
        entropy: `- sum p log p`, of every row, ignored ones too.
    """

    logprob: Tensor
    entropy: Tensor


@uncompiled
def token_logprobs(
    logits: Tensor,  # [..., shard_size] floating
    target: Tensor,  # [...] int64, the same on every rank
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> LogProbs:
    """Log-probability of each target under sharded `logits`, and the entropy of each row; both differentiable.

    Args:
        logits, target, temperature, softcap, ignore_index: As in `cross_entropy`.

    Collectives:
        Forward: one all-gather of 16 bytes a row. Backward: none. None at tp_size 1.

    Raises:
        TargetRangeError, LayoutMismatchError, NonFiniteError: On every rank.
    """
    options = LossOptions("none", ignore_index, scores=Scores(softcap, temperature))

    def check() -> None:
        options.check()
        check_logits(logits, shard)
        check_targets(target, shard, options)
        check_same_rows("logits", logits, target, False)
        check_devices(logits=logits, target=target)

    fault = capture(check)
    if fault is not None:
        Exchange(shard, "loss", "token_logprobs", fault=fault).wait()
    call = LogitsCall(
        f"token_logprobs({options})", lambda _: LogProbability(), target, (), shard, options.scores, ignore_index
    )
    return LogProbs(*per_row_of_logits(logits, call))


@uncompiled
def linear_token_logprobs(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [shard_size, D]
    target: Tensor,  # [...]
    *,
    shard: VocabShard,
    linear_bias: Tensor | None = None,  # [shard_size]
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    memory_budget: int | None = None,
) -> LogProbs:
    """`token_logprobs(input @ linear_weight.T + linear_bias, target)` without ever holding the logits.

    The projection is computed again in backward (4 GEMMs): each row has upstream gradients of its own. Where the loss
    is a function of each row, `linear_row_loss` needs 3.

    Args:
        The rest: as in `linear_cross_entropy`.

    Collectives:
        Forward: per chunk one all-gather of 16 bytes a row. Backward: per chunk one reduction of dH.

    Raises:
        As `linear_cross_entropy`.
    """
    options = LossOptions("none", ignore_index, scores=Scores(softcap, temperature))
    input, weight, bias, call = prepare(
        f"linear_token_logprobs({options})", lambda _: LogProbability(), input, linear_weight, linear_bias, target,
        shard, options, WideMean(shard, None, ""), sequence_parallel=sequence_parallel, chunk_size=chunk_size,
        memory_budget=memory_budget, every_row=True,
    )  # fmt: skip
    values: Any = apply(PerRow, input, weight, bias, call)
    return LogProbs(*values)
