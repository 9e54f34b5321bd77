"""Rung 9: the run's own model in its own host: a training step's loss, its head's gradients, and text after prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from vocab_parallel.app.comparing import difference
from vocab_parallel.app.decoding import Decoding, Windows, decoding_of, search_prompts
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.rungs.own_rows import LOGPROB_TOLERANCE, differing, unlike_first
from vocab_parallel.app.verify.rungs.sharding import RealHead
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.collectives import gather_rows, gather_vocab
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.rollout import Advance, rollout
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.layout import VocabLayout
from vocab_parallel.reference.policy import run_policy
from vocab_parallel.select.streams import Streams
from vocab_parallel.shard import VocabShard

PROMPTS = ("import ", "The ", "1 2 3 ")
NEW_IDS = 4
_LENGTH, _POSITIONS = 12, 96  # ids of a training row, and of all together, of which the oracle has whole logits


def checks(setting: Setting) -> Sequence[Check]:
    """One training step, then text by the greedy policy and by that of the section ``generate``."""
    training = _Training(setting)
    limit = training.setting.tolerance
    policy = Policy((), selector="greedy", vocab_size=setting.vocabulary.size, name="greedy")
    found = [
        Check("a training step's loss", training.step, limit, "nats"),
        Check("dH, dW and db of its hidden rows in its head", lambda: training.gradient, limit, _LARGEST),
        *_text_checks(setting, Decoding(policy), "greedy"),
    ]
    asked = decoding_of(setting.config.generate, setting.vocabulary.size, len(PROMPTS))
    if asked.search.beams > 1:
        name = f"a search with {asked.search.beams} beams: ids"
        return [*found, Check(name, partial(_searched, setting, asked), 0.0, "ids", _SEARCH)]
    return [*found, *_text_checks(setting, asked, f"policy {asked.policy.name}")]


def _text_checks(setting: Setting, decoding: Decoding, name: str) -> list[Check]:
    text = _Text(setting, decoding.policy)
    return [
        Check(f"{name}: ids after {len(PROMPTS)} prompts, and a second time", text.write, 0.0, "ids", _POLICY),
        Check(f"{name}: log-probabilities", lambda: text.logprobs, LOGPROB_TOLERANCE, "nats", _POLICY),
    ]


class _Training:
    """A step without its update. `gradient` is infinite until `step` has been."""

    def __init__(self, setting: Setting) -> None:
        dtype = setting.host.head().weight.dtype
        self.setting = setting if dtype == setting.dtype else dataclasses.replace(setting, dtype=dtype)
        self.gradient = math.inf

    def step(self) -> float:
        """Forward and backward of the host over ids of the whole vocabulary, the shards' edges among the targets.

        Collectives: the host's, two gathers over the replicas, and those of `RealHead`.
        """
        setting = self.setting
        config, host, replicas = setting.config, setting.host, setting.job.replicas
        batch = config.train.batch
        length = max(1, min(config.model.context, _POSITIONS // batch, _LENGTH))
        ids = torch.randint(setting.shard.vocab_size, (batch, length + 1), generator=setting.draws("ids"))
        edges = torch.tensor(setting.edges[:length])
        ids[:, 1 : 1 + len(edges)] = edges
        share = batch // replicas.size
        own = ids[replicas.rank * share :][:share].to(setting.device)
        input, target = own[:, :-1].contiguous(), own[:, 1:].contiguous()
        hidden, loss = host.forward(input, target)
        host.backward(loss)
        rows = [gather_rows(replicas, one, [share * length] * replicas.size)
                for one in (hidden.flatten(0, 1), target.flatten())]  # fmt: skip
        head = RealHead(setting, rows[0], rows[1])
        self.gradient = max(head.part(1), head.part(2))
        return difference(loss, head.whole[0].mean())


class _Kept(Windows):
    """The host's model, which keeps its last logits for the oracle."""

    last: Tensor

    def __call__(self, prefix: Tensor, active: Tensor) -> Tensor:
        self.last = super().__call__(prefix, active)
        return self.last


class _Text:
    """Continuations of the prompts. `logprobs`, their largest error in nats, is infinite until `write` has been."""

    def __init__(self, setting: Setting, policy: Policy) -> None:
        self.setting, self.policy, self.logprobs = setting, policy, math.inf

    @torch.no_grad()
    def write(self) -> float:
        """How many ids are not the oracle's, or not the same on all ranks, or not the same a second time.

        Each step is one rank's to compare with the oracle, once all have been.

        Collectives: those of the steps, one gather of the logits a step, and an object broadcast.
        """
        shard, policy = self.setting.shard, self.policy
        model, view, state = _begin(self.setting, policy)
        first_draw, ids, own = state.streams, [], []
        for number, step in enumerate(_steps(self.setting, policy, model, view, state)):
            whole = gather_vocab(shard, model.last, dim=-1).cpu()
            if number % shard.tp_size == shard.rank:
                draws = dataclasses.replace(first_draw, draws=first_draw.draws + number)  # whatever the state says
                own.append((whole, view, state, draws.bits().cpu(), step))
            ids.append(step.token_ids)
            view, state = step.view, step.state
        first = torch.stack(ids)
        again = torch.stack([step.token_ids for step in _steps(self.setting, policy, *_begin(self.setting, policy))])
        wrong = unlike_first(self.setting, first) + (differing(again, first) if len(again) == len(ids) else math.inf)
        found = [_compare(policy, *one) for one in own]
        self.logprobs = max((error for _, error in found), default=0.0)
        return wrong + sum(ids for ids, _ in found)


def _steps(setting: Setting, policy: Policy, model: Windows, view: View, state: PolicyState) -> Iterator[Advance]:
    return rollout(
        lambda view, active: model(view.prefix, active), policy, view, state, shard=setting.shard,
        eos_ids=[setting.vocabulary.eos], max_new_tokens=NEW_IDS,
    )  # fmt: skip


def _begin(setting: Setting, policy: Policy) -> tuple[_Kept, View, PolicyState]:
    """The model, the prompts, and the policy's state at their end."""
    seed, count = setting.config.generate.seed, len(PROMPTS)
    model = _Kept(setting.host.hidden, setting.host.head(), setting.config.model.context)
    streams = Streams.of([seed] * count, list(PROMPTS), device=model.device)
    return model, View.of(_prompts(setting)).to(model.device), policy.start(count, streams)


def _compare(
    policy: Policy, whole: Tensor, view: View, state: PolicyState, bits: Tensor, step: Advance
) -> tuple[float, float]:
    """Wrong ids and the largest error of log-probabilities of one step; requests that had ended are left out."""
    rows = [[one for one in ids if one >= 0] for ids in view.prefix.tolist()]
    lengths = view.prompt_length.tolist()
    kept = [{name: value.tolist() for name, value in one.items()} for one in state.states]
    want = run_policy(
        policy.to_dict(), whole, [ids[:n] for ids, n in zip(rows, lengths, strict=True)],
        [ids[n:] for ids, n in zip(rows, lengths, strict=True)], bits, kept,
    )  # fmt: skip
    active = step.active.cpu()
    off = difference(step.logprobs.cpu()[active], want.logprobs[active])
    return differing(step.token_ids.cpu()[active], want.token_ids[active]), off


@torch.no_grad()
def _searched(setting: Setting, decoding: Decoding) -> float:
    """A beam search over the shards, and the same of one rank that holds whole rows."""
    shard, alone = setting.shard, VocabShard(VocabLayout(setting.shard.vocab_size, 1, multiple_of=1))

    class Whole(Windows):
        def __call__(self, prefix: Tensor, active: Tensor) -> Tensor:
            return gather_vocab(shard, super().__call__(prefix, active), dim=-1)

    found = []
    for kind, where in ((Windows, shard), (Whole, alone)):
        model = kind(setting.host.hidden, setting.host.head(), setting.config.model.context)
        found.append(
            search_prompts(
                model, _prompts(setting), decoding, shard=where, max_tokens=NEW_IDS, eos=setting.vocabulary.eos
            )
        )
    wrong = sum(one != other for one, other in zip(*found, strict=True))
    return float(wrong + (setting.job.agree(found[0]) != found[0]))


def _prompts(setting: Setting) -> list[list[int]]:
    vocabulary = setting.vocabulary
    return [[vocabulary.bos, *ids] for ids in vocabulary.encode_batch(PROMPTS)]


_LARGEST = "of the largest entry"
_POLICY = "vocab_parallel/decode/policy.py"
_SEARCH = "vocab_parallel/decode/search/beam_search.py"
RUNG = Rung(
    "end to end",
    "In its host the run's model has the oracle's loss, and its head the gradients; it writes what one rank would.",
    "vocab_parallel/integrations",
    checks,
)
