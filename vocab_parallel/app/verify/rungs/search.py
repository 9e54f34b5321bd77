"""Rung 8: searches over a tree of few ids, sharded over the job's ranks, against the whole tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.app.comparing import difference
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.rungs.own_rows import LOGPROB_TOLERANCE, own_rows, unlike_first
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.decode.search.beam import beam_step
from vocab_parallel.decode.search.beam_search import BeamResult, beam_search
from vocab_parallel.decode.search.best_first import best_first_search
from vocab_parallel.decode.search.searching import Stepped
from vocab_parallel.reference import beam as oracle
from vocab_parallel.shard import VocabShard

VOCAB, END, LENGTH = 5, 1, 4  # over 4 ranks of 2, 2, 1 and 0 ids
_ALPHA = 0.6
Ids = tuple[int, ...]
Whole = Callable[[Ids], list[float]]
Found = list[tuple[Ids, float]]


def checks(setting: Setting) -> Sequence[Check]:
    """Two trees for every search, and trees by hand for the bound that ends one."""
    shard = setting.job.shard(VOCAB, 1)
    toys = [Toy(setting, shard, tree(seed)) for seed in (1, 2)]
    exhaustive, beams = partial(_exhaustive, toys), "vocab_parallel/decode/search/beam.py"
    found, kept = "vocab_parallel/decode/search/frontier.py", "vocab_parallel/decode/search/reordering.py"
    rules, limit = "vocab_parallel/decode/search/hypotheses.py", LOGPROB_TOLERANCE
    return [
        Check("one step of beams on the head's logits", partial(_own_step, setting), limit, "nats", beams),
        Check("wide enough, the best of the whole tree", exhaustive, limit, "nats", found),
        Check("narrow, the oracle's beams and scores", partial(_narrow, toys), limit, "nats", found),
        Check("parents lead to the tokens and sums", partial(_parents, toys), limit, "nats", found),
        Check("a model's state follows its beams", partial(_reordered, toys), 0.0, "rows", kept),
        Check("a search ends where nothing can win any more", partial(_stops, setting, shard), 0.0, "steps", rules),
        Check("diverse groups are the oracle's", partial(_diverse, toys), limit, "nats", found),
        Check("best-first, proven, is the best of the tree", partial(_best_first, toys), limit, "nats", _BEST),
    ]


def tree(seed: int) -> Whole:
    """The whole logits after each sequence of ids: another draw for each."""

    @cache
    def logits(ids: Ids) -> list[float]:
        number = seed
        for one in ids:
            number = (number * 1_000_003 + one + 1) % (2**31 - 1)
        row: list[float] = (torch.randn(VOCAB, generator=torch.Generator().manual_seed(number)) * 2).tolist()
        return row

    return logits


class Toy:
    """A tree as a sharded model, which counts the rows whose state is not that of their own beam."""

    def __init__(self, setting: Setting, shard: VocabShard, whole: Whole) -> None:
        self.setting, self.shard, self.whole = setting, shard, whole
        self.strays = 0

    def __call__(self, prefix: Tensor, parents: Tensor, state: Any) -> Stepped:
        if state is not None:
            self.strays += int((state["nested"][0] != prefix[:, :-1]).any(1).sum())
        rows = [self.whole(tuple(ids[1:])) for ids in prefix.tolist()]
        local = self.shard.slice(torch.tensor(rows).to(prefix.device), -1, fill=torch.nan)
        return Stepped(local, {"nested": (prefix.clone(),)})

    def search(self, beams: int, length: int = LENGTH, **options: Any) -> BeamResult:
        """A beam search after a prompt of one id."""
        return beam_search(self, [[0]], shard=self.shard, num_beams=beams, max_new_tokens=length, **options)


def _listed(result: BeamResult) -> Found:
    ids = [tuple(one for one in line if one >= 0) for line in result.token_ids[0].tolist()]
    return [pair for pair in zip(ids, result.scores[0].tolist(), strict=True) if pair[1] != -math.inf]


def _error(setting: Setting, found: Found, wanted: Found) -> float:
    """The largest difference of scores, infinite if the sequences are not the same on all ranks. One object broadcast.

    Compared by sequence: two with all but equal scores may come in either order.
    """
    same = setting.job.agree(found) == found
    found, wanted = sorted(found), sorted(wanted)
    if not same or not wanted or [ids for ids, _ in found] != [ids for ids, _ in wanted]:
        return math.inf
    return difference(*(_doubles(score for _, score in each) for each in (found, wanted)))


def _doubles(numbers: Iterable[float]) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.float64)


def _exhaustive(toys: Sequence[Toy]) -> float:
    """As many beams as there are prefixes one id short: then no beam is left out."""
    errors = []
    for toy in toys:
        result = toy.search(VOCAB**2, 3, eos_ids=(END,), length_penalty=_ALPHA, num_return=6)
        wanted = oracle.best(oracle.hypotheses(toy.whole, 3, (END,)), 6, _ALPHA)
        errors.append(_error(toy.setting, _listed(result), wanted))
    return max(errors)


def _narrow(toys: Sequence[Toy]) -> float:
    errors = []
    for toy in toys:
        for alpha in (0.0, _ALPHA):
            result = toy.search(3, eos_ids=(END,), length_penalty=alpha)
            errors.append(_error(toy.setting, _listed(result), oracle.beam_search(toy.whole, 3, LENGTH, (END,), alpha)))
    return max(errors)


def _parents(toys: Sequence[Toy]) -> float:
    """Every step's candidates from the beams that the steps before left, by the oracle's step."""
    errors = []
    for toy in toys:
        result = toy.search(3, trace=True)
        live: Found = [((), 0.0)]
        for [step] in result.trace:
            rows = torch.tensor([[toy.whole(ids) for ids, _ in live]])
            sums = torch.tensor([[total for _, total in live]], dtype=torch.float64)
            [wanted] = oracle.beam_step(rows, sums, len(step.scores[0]))
            found = [(ids, parent) for ids, parent in zip(*(one[0].tolist() for one in (step.token_ids, step.parents)),
                                                          strict=True)][: len(wanted)]  # fmt: skip
            same = found == [(token, parent) for _, parent, token in wanted]
            scores = _doubles(score for score, *_ in wanted)
            errors.append(difference(step.scores[0].cpu()[: len(wanted)], scores) if same else math.inf)
            live = [((*live[parent][0], token), score) for score, parent, token in wanted][:3]
        errors.append(_error(toy.setting, _listed(result), live))  # they end as the beams that live to the last length
    return max(errors)


def _reordered(toys: Sequence[Toy]) -> float:
    for toy in toys:
        toy.strays = 0
        toy.search(3, eos_ids=(END,), length_penalty=_ALPHA)
        toy.search(4, groups=2, diversity_penalty=0.7)
    return float(sum(toy.strays for toy in toys))


def _stops(setting: Setting, shard: VocabShard) -> float:
    """An end that is the likeliest id, and a longer sequence that beats it only by the length penalty."""
    nothing = -math.inf
    rows = {
        (): [math.log(0.45), math.log(0.55), nothing, nothing, nothing],
        (0,): [nothing, nothing, 0.0, nothing, nothing],
    }
    end = [nothing, 0.0, nothing, nothing, nothing]
    toy = Toy(setting, shard, lambda ids: rows.get(ids, end))
    wrong = 0.0
    for alpha, early, ids, steps in (
        (0.0, "never", (END,), 1),  # a sum only falls
        (1.0, "never", (0, 2, END), 3),  # the longer one may still win, and does
        (1.0, True, (END,), 1),  # as many ends as beams are enough
    ):
        result = toy.search(1, eos_ids=(END,), length_penalty=alpha, early_stopping=early)
        wrong += abs(result.steps - steps) + float(_listed(result)[0][0] != ids)
    return wrong


def _diverse(toys: Sequence[Toy]) -> float:
    errors = []
    for toy in toys:
        for penalty in (0.8, 50.0):
            result = toy.search(4, groups=2, diversity_penalty=penalty)
            groups = oracle.diverse_beam_search(toy.whole, 2, 2, LENGTH, penalty)
            errors.append(_error(toy.setting, _listed(result), list(chain(*groups))))
    return max(errors)


def _best_first(toys: Sequence[Toy]) -> float:
    errors = []
    for toy in toys:
        result = best_first_search(
            toy, [0], shard=toy.shard, queue_size=1000, branching=VOCAB, max_new_tokens=LENGTH, max_expansions=1000,
            eos_ids=(END,), num_return=2,
        )  # fmt: skip
        found = [(one.token_ids, one.score) for one in result.hypotheses]
        wanted = oracle.best(oracle.hypotheses(toy.whole, LENGTH, (END,)), 2)
        errors.append(_error(toy.setting, found, wanted) if result.proven else math.inf)
    return max(errors)


def _own_step(setting: Setting) -> float:
    """Two requests of three beams on the head's own rows: the oracle's order of each row's best, and of all of them."""
    rows = own_rows(setting)
    n = min(6, setting.vocabulary.size)
    sums = -torch.rand(2, 3, generator=setting.draws("sums"), dtype=torch.float64) * 4
    step = beam_step(rows.local[:6].view(2, 3, -1), sums.to(rows.local.device), shard=rows.shard, candidates=n)
    whole = rows.whole[:6].double()
    logprobs = whole.log_softmax(-1)
    error = unlike_first(setting, torch.cat([step.parents, step.token_ids]))
    for request in range(2):
        found = []
        for beam in range(3):
            row = request * 3 + beam
            for place, token in enumerate(whole[row].sort(descending=True, stable=True).indices[:n].tolist()):
                found.append((-float(sums[request, beam] + logprobs[row, token]), beam, place, token))
        wanted = sorted(found)[:n]
        ids = list(zip(step.parents[request].tolist(), step.token_ids[request].tolist(), strict=True))
        if ids != [(beam, token) for _, beam, _, token in wanted]:
            error = math.inf
        error = max(error, difference(step.scores[request].cpu(), _doubles(-one[0] for one in wanted)))
    return error


_BEST = "vocab_parallel/decode/search/best_first.py"
RUNG = Rung(
    "search",
    "Over a tree that can be listed whole, searches find its best sequences, with their sums, parents and ends.",
    "vocab_parallel/decode/search/beam_search.py",
    checks,
)
