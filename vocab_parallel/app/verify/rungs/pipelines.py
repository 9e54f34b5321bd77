"""What a pipeline promises whatever the model: its order, its types, what it forbids, and whole ids of any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.comparing import difference
from vocab_parallel.app.verify.ladder import Check
from vocab_parallel.app.verify.rungs.own_rows import Rows, differing, not_raised_alike, small_rows, unlike_first
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.presets import PRESETS
from vocab_parallel.decode.stepping import Step
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.processors import Force, Suppress
from vocab_parallel.decode.transforms.transform import PROBABILITY, Transform, View
from vocab_parallel.decode.transforms.warpers import Temperature, TopK, TopP
from vocab_parallel.errors import EmptySupportError
from vocab_parallel.select import greedy, sample, top_k, top_p
from vocab_parallel.select.scores import Scores
from vocab_parallel.select.streams import Streams

_ORDERED = (0.6, 0.2, 0.1, 0.06, 0.04)
# Probabilities, knobs, and how many ids each library's order of them leaves.
_PRESETS = (
    (_ORDERED, {"temperature": 2.0, "top_p": 0.75}, {"hugging_face": 3, "vllm": 3, "llama_cpp": 2}),
    (_ORDERED, {"temperature": 2.0, "min_p": 0.3}, {"hugging_face": 4, "vllm": 4, "llama_cpp": 2}),
    ((0.5, 0.2, 0.17, 0.13), {"min_p": 0.3, "top_p": 0.78}, {"hugging_face": 3, "vllm": 2, "llama_cpp": 3}),
)
_NEUTRAL: Mapping[str, Mapping[str, Any]] = {
    "hugging_face": {"do_sample": True, "top_k": 0},
    "vllm": {},
    "llama_cpp": {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0},
}
_BEYOND_BFLOAT16 = 1021  # ids from 257 on have no bfloat16 of their own
_BEYOND_FLOAT32 = 2**24 + 4


def pipeline_checks(setting: Setting, rows: Rows) -> list[Check]:
    """Checks on the head's own `rows`, and on rows of vocabularies made for the purpose."""
    nucleus, order = "vocab_parallel/select/filters.py", "vocab_parallel/select/order.py"
    fallback = "vocab_parallel/decode/running.py"
    return [
        Check("two filters, each order its own support", partial(_order, setting), 0.0, "tokens"),
        Check("three libraries' orders", partial(_presets, setting), 0.0, "tokens", "vocab_parallel/decode/presets.py"),
        Check("types of scores at every edge", _edges, 0.0, "edges"),
        Check("scores are of the type they claim", partial(_typed, rows), 1e-4, "nats"),
        Check("forbidden ids are not chosen, forced ones are", partial(_masks, rows), 0.0, "ids"),
        Check("a row without an id is an error on every rank", partial(_empty, rows), 0.0, "ranks", fallback),
        Check("a declared fallback answers for such rows", partial(_fallbacks, rows), 0.0, "ids", fallback),
        Check("top-p at the edges of shards", partial(_boundaries, setting), 0.0, "ids", nucleus),
        Check("ids above 256 of bfloat16 logits", partial(_ids, setting, _BEYOND_BFLOAT16, 16), 0.0, "ids", order),
        Check("ids above 2**24 of bfloat16 logits", partial(_ids, setting, _BEYOND_FLOAT32, 1), 0.0, "ids", order),
    ]


def _step(rows: Rows, *transforms: Transform, trace: bool = False, **given: Any) -> Step:
    policy = Policy(transforms, name="verify", **given)
    state = policy.start(len(rows.whole), rows.streams())
    return policy.step(rows.local, rows.view(), state, shard=rows.shard, trace=trace)


def _support(rows: Rows, transforms: Sequence[Transform], wanted: int) -> float:
    """How many tokens too few or too many the transforms leave of one row."""
    step = _step(rows, *transforms, trace=True)
    assert step.trace is not None
    return float((step.trace.support - wanted).abs().sum())


def _order(setting: Setting) -> float:
    """Top-p after top-k sees a renormalised row."""
    rows = small_rows(setting, torch.tensor([[0.4, 0.22, 0.18, 0.1, 0.1]]).log())
    return _support(rows, (TopK(3), TopP(0.7)), 2) + _support(rows, (TopP(0.7), TopK(3)), 3)


def _presets(setting: Setting) -> float:
    wrong = 0.0
    for probabilities, knobs, left in _PRESETS:
        rows = small_rows(setting, torch.tensor([probabilities], dtype=torch.float64).log())
        for name, wanted in left.items():
            named = {("temp" if (name, knob) == ("llama_cpp", "temperature") else knob): one
                     for knob, one in knobs.items()}  # fmt: skip
            policy = PRESETS[name](**{**_NEUTRAL[name], **named})
            wrong += _support(rows, policy.transforms, wanted)
    return wrong


@dataclass(frozen=True, eq=False)
class _Probabilities(Transform):
    """Stands for a transform whose scores are no longer logarithms."""

    name: ClassVar[str] = "probabilities"
    gives: ClassVar[str | None] = PROBABILITY


def _edges() -> float:
    """What a policy says of its edges, and that it refuses one that does not fit."""
    found = [edge[1:] for edge in Policy((Suppress([0]), Temperature(0.7), Normalize())).edges()]
    wanted = [("raw", "processed"), ("processed", "processed"), ("processed", "logprob")]
    refused = 0
    for transforms in ((_Probabilities(), Temperature(0.7)), (_Probabilities(),)):
        try:
            Policy(transforms)
        except ValueError as error:
            refused += "'probabilities'" in str(error)
    return float(sum(one != other for one, other in zip(found, wanted, strict=True)) + 2 - refused)


def _typed(rows: Rows) -> float:
    """The chosen id's score: at first the model's, at the end of a policy that normalises its log-probability."""
    step = _step(rows, Normalize(), trace=True)
    assert step.trace is not None
    raw = rows.whole.gather(1, step.token_ids.cpu()[:, None])[:, 0].double()
    return max(difference(step.trace.raw_score.cpu(), raw), difference(step.trace.score, step.trace.logprob))


def _masks(rows: Rows) -> float:
    """Forbids the best two ids of every row and the shards' edges, then forces each row to an edge."""
    best = reference.top_k(rows.whole, 2)[1].flatten()
    edges = rows.setting.edges
    banned = torch.tensor(sorted({*best.tolist(), *edges}))
    wrong = 0.0
    for selector in ("greedy", "sample"):
        if len(banned) < rows.shard.vocab_size:
            ids = _step(rows, Suppress(banned.tolist()), selector=selector).token_ids.cpu()
            wrong += unlike_first(rows.setting, ids) + float(torch.isin(ids, banned).sum())
        forced = [edges[row % len(edges)] for row in range(len(rows.whole))]
        step = _step(rows, Temperature(0.5), Force([[one] for one in forced], 1), selector=selector)
        wrong += unlike_first(rows.setting, step.token_ids) + differing(step.token_ids.cpu(), torch.tensor(forced))
    return wrong


@dataclass(frozen=True, eq=False)
class _Nothing(Transform):
    """A filter that leaves no id."""

    name: ClassVar[str] = "nothing"

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        return scores.keep(torch.zeros_like(scores.values, dtype=torch.bool), keeps_peak=False)


def _empty(rows: Rows) -> float:
    """A constraint that contradicts another; a fallback that a constraint forbids; a model without a finite logit."""
    last = rows.shard.vocab_size - 1
    contradiction = (Suppress([last]), Force([last], 1))
    masked = Rows(rows.setting, rows.shard, torch.full_like(rows.local, -torch.inf), rows.whole, rows.mine)
    calls = (
        lambda: _step(rows, *contradiction),
        lambda: _step(rows, Suppress([last]), _Nothing(), fallback={"token": last}),
        lambda: _step(rows, *contradiction, fallback={"undo": True}),
        lambda: _step(masked),
    )
    return sum(not_raised_alike(rows.setting, call, EmptySupportError) for call in calls)


def _fallbacks(rows: Rows) -> float:
    """A token in the place of what a filter left nothing of, or the scores before it."""
    last = rows.shard.vocab_size - 1
    token = _step(rows, _Nothing(), fallback={"token": last})
    undone = _step(rows, _Nothing(), selector="greedy", fallback={"undo": True})
    wrong = unlike_first(rows.setting, token.token_ids) + differing(
        token.token_ids, torch.full_like(token.token_ids, last)
    )
    return wrong + differing(token.logprobs, torch.zeros_like(token.logprobs)) + rows.wrong(
        undone.token_ids, reference.greedy(rows.whole[rows.mine])
    )  # fmt: skip


def _boundaries(setting: Setting) -> float:
    """Rows whose likeliest ids lie on both sides of the shards' edges, where a nucleus of each shard holds others."""
    size = 37
    shard = setting.job.shard(size, 1)
    pairs = [(ids[0] - 1, ids[0]) for ids in map(shard.layout.range, range(1, shard.tp_size)) if len(ids)]
    whole = torch.randn(48, size, generator=setting.draws("boundaries")) * 2
    for row, pair in enumerate((pairs * 2)[: len(whole)]):
        whole[row] = -2.0
        whole[row, list(pair)] = torch.tensor([3.0, 3.0] if row < len(pairs) else [3.0, 3.5])
    rows = small_rows(setting, whole)
    p = torch.tensor([0.2, 0.45, 0.7, 0.95])[torch.arange(len(whole)) % 4]
    nucleus = top_p(rows.local, p, shard=rows.shard)
    drawn = sample(rows.local, shard=rows.shard, streams=rows.streams(), top_p=p).token_ids.cpu()
    kept = rows.shard.slice(reference.nucleus(whole, p), -1)
    off = {"temperature": torch.ones(48), "top_k": torch.full((48,), size), "min_p": torch.zeros(48)}
    wanted = reference.sample(whole, rows.streams().bits(), top_p=p, **off)
    return differing(nucleus.kept.cpu(), kept) + differing(drawn, wanted)


def _ids(setting: Setting, vocab_size: int, count: int) -> float:
    """Odd ids of a vocabulary, which no float of few digits tells from their neighbours.

    Memory: two bytes a row and id of this rank's, and the float32 of them for the time of a call.
    """
    shard = setting.job.shard(vocab_size, 1)
    far = vocab_size - 1 - vocab_size % 2  # odd
    best = [[far - 2 * ((row + at) % 4) for at in range(4)] for row in range(count)]
    local = torch.full((count, shard.shard_size), -100.0, dtype=torch.bfloat16, device=setting.device)
    for row, ids in enumerate(best):
        for score, one in zip((8.0, 7.0, 6.0, 5.0), ids, strict=True):
            if shard.start <= one < shard.stop:
                local[row, one - shard.start] = score
    streams = Streams.of([setting.config.generate.seed] * count, list(range(count)))
    first = greedy(local, shard=shard)
    four = top_k(local, 4, shard=shard).token_ids
    drawn = sample(local, shard=shard, streams=streams).token_ids
    found = torch.cat([first, four.flatten(), drawn]).cpu()
    scores = torch.tensor([[8.0, 7.0, 6.0, 5.0]]).expand(count, -1)
    whole = torch.tensor(best)
    in_order = whole.argsort(1)  # a draw goes through ids as they rise
    at = in_order.gather(1, reference.draw(scores.gather(1, in_order), streams.bits())[:, None])
    wanted = torch.cat([whole[:, 0], whole.flatten(), whole.gather(1, at)[:, 0]])
    return unlike_first(setting, found) + differing(found, wanted)
