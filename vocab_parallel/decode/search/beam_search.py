"""Beam search: the loop around a model whose logits are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode.search.beam import BeamStep
from vocab_parallel.decode.search.frontier import Frontier, Rules
from vocab_parallel.decode.search.hypotheses import Coverage, Finished, LengthPenalty
from vocab_parallel.decode.search.searching import Chain, Model, check_prompts, checksum_of
from vocab_parallel.decode.transforms.transform import Transform
from vocab_parallel.select.channel import Channel
from vocab_parallel.shard import VocabShard, device_of


class BeamResult(NamedTuple):
    """The best hypotheses of each request, best first; the same bits on every rank.

    Attributes:
        token_ids: int64 `[B, R, L]`, the generated tokens, end token included; -1 after the last.
        scores: float64 `[B, R]`, in nats: `sums / length penalty + coverage`; -inf where there are fewer than R.
        sums: float64 `[B, R]`, in nats: sums of log-probabilities, less diversity penalties.
        lengths: int64 `[B, R]`, tokens generated.
        parents: int64 `[B, R, L]`, the beam of its request that each token continued; -1 after the last.
        ended: bool `[B, R]`: by an end token, not by `max_new_tokens`.
        steps: How often the model was asked.
        trace: Each step's candidates, of each group; empty unless asked for.
    """

    token_ids: Tensor
    scores: Tensor
    sums: Tensor
    lengths: Tensor
    parents: Tensor
    ended: Tensor
    steps: int
    trace: list[list[BeamStep]]


@uncompiled
def beam_search(
    model: Model,
    prompts: Tensor | Sequence[Sequence[int]],  # int64 [B, L], -1 where there is none, or lists of ids
    *,
    shard: VocabShard,
    num_beams: int,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    length_penalty: LengthPenalty | float = 0.0,
    coverage: Coverage | None = None,
    source: Tensor | None = None,  # bool [B, S]
    early_stopping: bool | str = "never",
    groups: int = 1,
    diversity_penalty: float = 0.0,
    transforms: Sequence[Transform] = (),
    renormalize: bool = True,
    state: Any = None,
    num_return: int | None = None,
    trace: bool = False,
) -> BeamResult:
    """The best continuations that a search with `num_beams` beams a request finds.

    Each step takes the best `(1 + max(1, number of eos_ids)) K` of the K·V continuations of a request's beams, as
    `beam_step` does. Those among the best K that end move to the finished set; the best K of the others live on. At
    `max_new_tokens` the best K are finished as they are. A request is over when no live beam can enter its finished set
    any more (`hypotheses.can_improve`). The first step has one beam: all K would hold the same prefix.

    Args:
        model: See `Model`: called once a step, for the beams of all requests.
        prompts: The same on every rank; a tensor lies on the logits' device.
        length_penalty: A number is alpha of the "power" kind.
        coverage: Added to a finished hypothesis' score; needs `Stepped.attention`.
        source: For coverage, which source positions there are.
        early_stopping: "never" stops where no live beam could win; False and True as in Transformers.
        groups: Diverse beam search: groups of `num_beams / groups` beams choose in turn, with finished sets of their
            own.
        diversity_penalty: Nats that a candidate loses for each live beam of an earlier group that has just chosen the
            same token. They stay in the beam's score.
        transforms: Applied to the scores in this order, such as a policy's: constraints, penalties. Their state follows
            the beams.
        renormalize: Scores are log-probabilities over what the transforms leave. False: what they leave is added up as
            it stands; with `Normalize` first and penalties after it, this is Transformers' order. (A transform may then
            raise a score above 0, and the bound for stopping is none.)
        state: The model's, for B rows; `reorder` moves it.
        num_return: R, by default `num_beams`.
        trace: Keep each step's candidates.

    Collectives:
        One all-gather of a header. A step: one of `104 + 8 (groups + max(1, number of eos_ids)) K / groups` bytes a
        beam (16 for 8 with float64), and those of the transforms. None at tp_size 1.

    Raises:
        ValueError, TokenRangeError, NonFiniteError, EmptySupportError: On every rank: bad options or prompts, naming
            row and value; NaN or +inf; a request whose beams have no legal token and none of which has ended.

    Source: Sutskever et al. (2014), section 3.2; Wu et al. (2016), section 7; Vijayakumar et al. (2018), algorithm 1.
        The bookkeeping of ends is Transformers' (`GenerationMixin._beam_search`).
    """
    words = (
        f"beam_search({num_beams} beams, {max_new_tokens} tokens, eos {eos_ids}, {length_penalty}, {coverage}, "
        f"early_stopping {early_stopping}, {groups} groups, {diversity_penalty}, renormalize {renormalize}, "
        f"{num_return})"
    )
    channel = Channel(shard, words, kind="header", checksum=checksum_of(prompts, source))
    with channel.guard():
        penalty = length_penalty if isinstance(length_penalty, LengthPenalty) else LengthPenalty(length_penalty)
        rules = Rules(
            num_beams, groups, max_new_tokens, tuple(eos_ids), penalty, coverage or Coverage(), early_stopping,
            diversity_penalty, renormalize,
        )  # fmt: skip
        rules.check(shard.vocab_size, num_return)
        view = check_prompts(prompts, shard)
        chain = Chain.start(transforms, len(view.prefix), shard.vocab_size, renormalize)
        channel.call += f" with {chain.words}"
    channel.open(device_of(shard))
    search = Frontier(rules, shard, view, source, chain, state)
    steps: list[list[BeamStep]] = []
    while search.going:
        chosen = search.advance(model)
        steps += [chosen] if trace else []
    shard.raise_deferred()  # NaN ends a search like a dead end does
    best = Finished.best(search.finished, num_beams if num_return is None else num_return)
    longest = int(best.lengths.max())
    return BeamResult(
        best.token_ids[:, :, :longest], best.scores, best.sums, best.lengths, best.parents[:, :, :longest], best.ended,
        search.length, steps,
    )  # fmt: skip
