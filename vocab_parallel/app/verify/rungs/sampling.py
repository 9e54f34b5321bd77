"""Rung 7: a draw belongs to its request, comes again from a saved stream, and has the distribution that it claims."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.rungs.own_rows import Rows, differing, own_rows, small_rows, unlike_first
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.stepping import Step
from vocab_parallel.decode.transforms.controllers import MirostatV2
from vocab_parallel.decode.transforms.warpers import TopP
from vocab_parallel.reference.policy import final_scores
from vocab_parallel.select import Streams, sample

ALPHA = 1e-6  # a right sampler fails a check of a distribution with this probability, once and for all: seeds are fixed
DRAWS = 4096
_SMALL = 23  # ids that the distributions are of
_EXPECTED = 8.0  # draws that a cell of a chi-square has at least
_FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "all filters": {"temperature": 1.3, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
}
_TAU, _ETA = 3.0, 0.2  # bits, and a gain
_PARAMETERS = {"temperature": "temperature", "top_k": "k", "top_p": "p", "min_p": "min_p"}


def checks(setting: Setting) -> Sequence[Check]:
    """Replay of draws from the head's own rows, then distributions of draws from a few ids' logits of one of them."""
    rows = own_rows(setting)
    one = small_rows(setting, rows.whole[:1, : min(_SMALL, setting.vocabulary.size)].float())
    streams, limit = "vocab_parallel/select/streams.py", 1 - ALPHA
    return [
        Check("each draw is the oracle's at its random number", partial(_oracle, rows), 0.0, "ids"),
        Check("a row alone, in other company, and replayed", partial(_replayed, rows), 0.0, "ids", streams),
        Check("a policy's saved state goes on where it was", partial(_resumed, rows), 0.0, "ids", _STATE),
        *[
            Check(f"{DRAWS} requests, {name}", partial(_requests, one, given), limit, "1 - p")
            for name, given in _FILTERS.items()
        ],
        Check(f"{DRAWS} draws of one request", partial(_one_request, one), limit, "1 - p", streams),
        Check("two requests are independent", partial(_pairs, one, requests=(1, 2)), limit, "1 - p", streams),
        Check("two seeds are independent", partial(_pairs, one, seeds=(1, 2)), limit, "1 - p", streams),
    ]


def _oracle(rows: Rows) -> float:
    streams = rows.streams()
    got = sample(rows.local, shard=rows.shard, streams=streams)
    return rows.wrong(got.token_ids, reference.draw(rows.whole[rows.mine], streams.bits()[rows.mine]))


def _replayed(rows: Rows) -> float:
    """Two draws of four rows, then the same ones in another order, alone, and from the text of a saved stream."""
    index = torch.arange(4)

    def draw(streams: Streams, which: Tensor) -> tuple[Tensor, Streams]:
        drawn = sample(rows.local[which.to(rows.local.device)], shard=rows.shard, streams=streams, top_p=0.95)
        return drawn.token_ids.cpu(), drawn.streams

    first, after = draw(rows.streams().rows(index), index)
    saved = json.dumps(after.state_dict())
    second, _ = draw(after, index)
    order = index.flip(0)
    moved, moved_after = draw(rows.streams().rows(order), order)
    alone, _ = draw(rows.streams().rows(index[2:3]), index[2:3])
    again, _ = draw(Streams.from_state_dict(json.loads(saved)), index)
    moved_again, _ = draw(moved_after, order)
    wrong = unlike_first(rows.setting, torch.cat([first, second, again]))
    return wrong + sum((
        differing(moved.flip(0), first), differing(alone, first[2:3]), differing(again, second),
        differing(moved_again.flip(0), second),
    ))  # fmt: skip


def _resumed(rows: Rows) -> float:
    """Three steps of a policy that carries state; then from the first on, saved, and with the requests turned round."""
    policy = Policy((TopP(0.95), MirostatV2(_TAU, _ETA)), name="verify")
    forward = torch.arange(4)

    def steps(state: PolicyState, order: Tensor, count: int) -> list[Step]:
        view, taken = rows.view().rows(order), []
        for _ in range(count):
            taken.append(policy.step(rows.local[order.to(rows.local.device)], view, state, shard=rows.shard))
            state, view = taken[-1].state, view.appended(taken[-1].token_ids)
        return taken

    [first] = steps(policy.start(4, rows.streams().rows(forward)), forward, 1)
    saved = json.dumps(first.state.state_dict())
    then = steps(first.state, forward, 2)
    back = forward.flip(0)
    again = steps(PolicyState.from_state_dict(json.loads(saved)).rows(back), back, 2)
    ids = [torch.stack([step.token_ids for step in each]).cpu() for each in ([first, *then], again)]
    stuck = differing(then[-1].state.streams.draws.cpu(), torch.full((4,), 3))
    surprise = first.logprobs.cpu() / -math.log(2)
    mu = 2 * _TAU - _ETA * (surprise - _TAU)  # bits; of each request its own
    stuck += float(((first.state.states[1]["mu"].cpu() - mu).abs() > 1e-9).sum())
    return unlike_first(rows.setting, ids[0]) + differing(ids[1].flip(1), ids[0][1:]) + stuck


def _requests(one: Rows, given: dict[str, Any]) -> float:
    """The first draw of many requests."""
    return _fit(one, Streams.of([_seed(one)] * DRAWS, range(DRAWS)), given)


def _one_request(one: Rows) -> float:
    """The first draws of one request."""
    return _fit(one, _stream(_seed(one), 7), {})


def _fit(one: Rows, streams: Streams, given: dict[str, Any]) -> float:
    ids, wrong = _drawn(one, streams, given)
    p = _probabilities(one.whole, given)
    counts = torch.bincount(ids, minlength=len(p)).double()
    return math.inf if wrong else chi_square(counts, p)


def _pairs(one: Rows, *, seeds: Sequence[int] = (0, 0), requests: Sequence[int] = (0, 0)) -> float:
    """Draw by draw, the ids of two streams side by side, against the product of their distributions."""
    drawn = [_drawn(one, _stream(*words), {}) for words in zip(seeds, requests, strict=True)]
    p = _probabilities(one.whole, {})
    cells = drawn[0][0] * len(p) + drawn[1][0]
    counts = torch.bincount(cells, minlength=len(p) ** 2).double()
    return math.inf if any(wrong for _, wrong in drawn) else chi_square(counts, torch.outer(p, p).flatten())


def _drawn(one: Rows, streams: Streams, given: dict[str, Any]) -> tuple[Tensor, float]:
    """An id for each stream from the one row, and how many of them differ between ranks."""
    many = one.local.expand(len(streams), -1)
    ids = sample(many, shard=one.shard, streams=streams, **given).token_ids.cpu()
    return ids, unlike_first(one.setting, ids)


def _stream(seed: int, request: int) -> Streams:
    """A request's first draws, as a row each."""
    words = torch.full((2, DRAWS), seed)
    words[1] = request
    return Streams(words[0], words[1], torch.arange(DRAWS))


def _seed(one: Rows) -> int:
    return one.setting.config.generate.seed


def _probabilities(
    whole: Tensor,  # [1, V]
    given: dict[str, Any],
) -> Tensor:
    """The oracle's distribution after the filters, float64 `[V]`."""
    transforms = [{"name": name, _PARAMETERS[name]: value} for name, value in given.items()]
    return final_scores({"transforms": transforms}, whole, [[]], [[]]).double().softmax(-1)[0]


def chi_square(
    counts: Tensor,  # [n] float64
    p: Tensor,  # [n] float64, sums to 1
) -> float:
    """1 - the p-value of a goodness-of-fit test: how sure one may be that the draws are of another distribution.

    Cells that expect few draws are one cell together. A draw that has no probability gives infinity.

    Source: Pearson (1900); the survival function is the regularised upper incomplete gamma function.
    """
    if bool(counts[p == 0].any()):
        return math.inf
    order = p.argsort(descending=True)
    counts, expected = counts[order], p[order] * counts.sum()
    rest = expected.flip(0).cumsum(0).flip(0) - expected  # what comes after each cell
    kept = max(1, int(((expected >= _EXPECTED) & ((rest >= _EXPECTED) | (rest <= 1e-9))).sum()))
    cells = [torch.cat([one[:kept], one[kept:].sum()[None]]) for one in (counts, expected)]
    seen, wanted = (cell[cells[1] > 1e-9] for cell in cells)
    statistic = ((seen - wanted).square() / wanted).sum()
    freedom = torch.tensor(max(1, len(wanted) - 1), dtype=torch.float64)
    return float(torch.special.gammainc(freedom / 2, statistic / 2))


_STATE = "vocab_parallel/decode/state.py"
RUNG = Rung(
    "stochastic policy",
    "A request's draws are its own, come again from its saved stream, and have the distribution that is claimed.",
    "vocab_parallel/select/sampling.py",
    checks,
)
