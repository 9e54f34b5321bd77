"""Rung 6: a pipeline of processors leaves each row legal ids and chooses among all ranks' columns in one order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.rungs.own_rows import LOGPROB_TOLERANCE, Rows, differing, own_rows
from vocab_parallel.app.verify.rungs.pipelines import pipeline_checks
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.processors import BadWords, Bias, MinLength, RepetitionPenalty, Suppress
from vocab_parallel.decode.transforms.transform import Transform
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP
from vocab_parallel.reference.policy import final_scores, run_policy
from vocab_parallel.select import greedy, sample, top_k, top_logprobs, top_p

_P = (0.3, 0.6, 0.9, 0.99)


def checks(setting: Setting) -> Sequence[Check]:
    """Selections of the head's own rows, then pipelines of transforms, then vocabularies of few and of many ids."""
    rows = own_rows(setting)
    return [
        Check("greedy", partial(_greedy, rows), 0.0, "ids", "vocab_parallel/select/greedy.py"),
        Check("top-k, values and ids", partial(_top_k, rows), 0.0, "ids", "vocab_parallel/select/top_k.py"),
        Check("top-p, the kept set", partial(_top_p, rows), 0.0, "ids", "vocab_parallel/select/nucleus.py"),
        Check("other filters, how many ids they keep", partial(_supports, rows), 0.0, "ids", _WARPERS),
        Check("all four filters, for each row its own", partial(_filtered, rows), 0.0, "ids", _SELECT),
        Check("log-probabilities of the best", partial(_logprobs, rows), LOGPROB_TOLERANCE, "nats", _MASSES),
        *[
            Check(f"a policy: {name}", partial(_policy, rows, transforms), 0.0, "ids")
            for name, transforms in _chains(setting).items()
        ],
        *pipeline_checks(setting, rows),
    ]


def _greedy(rows: Rows) -> float:
    got = greedy(rows.local, shard=rows.shard)
    return rows.wrong(got, reference.greedy(rows.whole[rows.mine]))


def _top_k(rows: Rows) -> float:
    k = min(50, rows.shard.vocab_size)
    got = top_k(rows.local, k, shard=rows.shard)
    values, ids = reference.top_k(rows.whole[rows.mine], k)
    return rows.wrong(got.token_ids, ids) + rows.wrong(got.values, values)


def _top_p(rows: Rows) -> float:
    """Size, and the last kept id, of each nucleus; then this rank's part of it, which these two decide."""
    p = torch.tensor(_P).repeat(len(rows.whole))[: len(rows.whole)]
    got = top_p(rows.local, p, shard=rows.shard)
    want = reference.nucleus(rows.whole[rows.mine], p[rows.mine])
    wrong = rows.wrong(got.size, want.sum(1)) + rows.wrong(got.last_id, _last(rows.whole[rows.mine], want))
    ids = rows.shard.token_ids(rows.local.device)
    real = rows.local[:, : rows.shard.num_valid]
    edge = got.threshold[:, None]
    kept = (real > edge) | ((real == edge) & (ids <= got.last_id[:, None]))
    whole = torch.zeros_like(got.kept)
    whole[:, : rows.shard.num_valid] = kept
    return wrong + differing(got.kept, whole)


def _last(whole: Tensor, kept: Tensor) -> Tensor:
    """The last id of each kept set in the total order: of the smallest kept value the largest id."""
    values = whole.masked_fill(~kept, torch.inf)
    tied = values == values.amin(1, keepdim=True)
    return torch.where(tied, torch.arange(whole.shape[1]), -1).amax(1)


def _supports(rows: Rows) -> float:
    """What filters leave, each after none."""
    wrong, view = 0.0, rows.view()
    for transform in (MinP(0.05), Epsilon(2 / rows.shard.vocab_size), Eta(3e-3), TopNSigma(1.5)):
        policy = Policy((transform,), name=transform.name)
        state = policy.start(len(rows.whole), rows.streams())
        step = policy.step(rows.local, view, state, shard=rows.shard, trace=True)
        assert step.trace is not None
        none: list[list[int]] = [[]] * len(rows.mine)
        wanted = final_scores(policy.to_dict(), rows.whole[rows.mine], none, none) > -torch.inf
        wrong += rows.wrong(step.trace.support, wanted.sum(1))
    return wrong


def _filtered(rows: Rows) -> float:
    """A draw after the filters is the oracle's at the same random number."""
    at = torch.arange(len(rows.whole))
    vocab_size = rows.shard.vocab_size
    given = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5, 0.2])[at % 5],
        "top_k": torch.tensor([vocab_size, min(50, vocab_size), vocab_size])[at % 3],
        "top_p": torch.tensor([*_P, 1.0])[at % 5],
        "min_p": torch.tensor([0.0, 0.01])[at % 2],
    }
    streams = rows.streams()
    got = sample(rows.local, shard=rows.shard, streams=streams, **given)
    mine = {name: one[rows.mine] for name, one in given.items()}
    return rows.wrong(got.token_ids, reference.sample(rows.whole[rows.mine], streams.bits()[rows.mine], **mine))


def _logprobs(rows: Rows) -> float:
    n = min(20, rows.shard.vocab_size)
    got = top_logprobs(rows.local, n, shard=rows.shard)
    whole = rows.whole[rows.mine].double()
    ids = reference.top_k(whole, n)[1]
    if rows.wrong(got.token_ids, ids):
        return math.inf
    error = got.logprobs.cpu()[rows.mine] - whole.log_softmax(-1).gather(-1, ids)
    return float(error.abs().max()) if error.numel() else 0.0


def _chains(setting: Setting) -> dict[str, list[Transform]]:
    """Pipelines in two orders, with the shards' edges among what is forbidden, lowered and raised."""
    edges = setting.edges
    soft: list[Transform] = [Bias({edges[0]: -0.5, edges[-1]: 0.75}), RepetitionPenalty(1.3)]
    # These stand before filters only: a filter may leave nothing but what they forbid.
    hard: list[Transform] = [BadWords([edges[1:2], [edges[-1], edges[0]]]), MinLength(4, edges[-1:]), Suppress([0])]
    filters: list[Transform] = [Temperature(0.7), TopK(40), TopP(0.9), MinP(0.02)]
    return {"processors, then filters": soft + hard + filters, "filters, then processors": filters[::-1] + soft}


def _policy(rows: Rows, transforms: Sequence[Transform]) -> float:
    """A step of a policy chooses the oracle's ids."""
    policy = Policy(tuple(transforms), name="verify")
    view, streams = rows.view(), rows.streams()
    step = policy.step(rows.local, view, policy.start(len(rows.whole), streams), shard=rows.shard)
    ids = view.prefix[rows.mine].tolist()
    want = run_policy(
        policy.to_dict(), rows.whole[rows.mine], [one[:2] for one in ids], [one[2:] for one in ids],
        streams.bits()[rows.mine],
    )  # fmt: skip
    return rows.wrong(step.token_ids, want.token_ids)


_SELECT = "vocab_parallel/select/sampling.py"
_WARPERS = "vocab_parallel/decode/transforms/truncation.py"
_MASSES = "vocab_parallel/select/masses.py"
RUNG = Rung(
    "processor pipeline",
    "Each step of a pipeline leaves the same legal ids on every rank, and an id is chosen as from one whole row.",
    "vocab_parallel/decode/policy.py",
    checks,
)
