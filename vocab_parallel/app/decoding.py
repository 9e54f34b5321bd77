"""How ``generate`` chooses tokens: a policy of a file or a preset, and its loop over the app's model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel.app.config import GenerateConfig
from vocab_parallel.app.model import Head
from vocab_parallel.app.settings import build, read_yaml, require
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.presets import PRESETS
from vocab_parallel.decode.rollout import Advance, rollout
from vocab_parallel.decode.search.beam_search import beam_search
from vocab_parallel.decode.search.searching import Stepped
from vocab_parallel.decode.transforms.contrast import Contrastive
from vocab_parallel.decode.transforms.dola import Dola
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.decode.transforms.warpers import Temperature, TopK
from vocab_parallel.errors import ConfigError
from vocab_parallel.select.streams import Streams
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary.files import RepeatedKey, each_once, read_bytes, too_many

_LARGEST_JSON, _MOST_LISTS = 2**26, 2**20
# What values of a wrong kind make of a policy beside ValueError: a list for a number, a number of too many digits.
NOT_A_POLICY = (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


@dataclasses.dataclass(frozen=True)
class Search:
    """The section ``search`` of a policy file."""

    beams: int = 1
    length_penalty: float = 1.0  # a hypothesis' log-probability is divided by its length to this power

    def __post_init__(self) -> None:
        require(self.beams >= 1, "search.beams", "at least 1", self.beams)


@dataclasses.dataclass(frozen=True)
class Decoding:
    """What ``generate`` does with logits: a policy's steps; with more than one beam a search under its transforms."""

    policy: Policy
    search: Search = dataclasses.field(default_factory=Search)


def decoding_of(options: GenerateConfig, vocab_size: int, requests: int = 1) -> Decoding:
    """What the section ``generate`` says, for a number of requests.

    Raises:
        ConfigError: As `load_policy`; or a policy with a value for each of another number of requests, or one that
            needs more than logits.
    """
    decoding = _of_keys(options, vocab_size) if options.policy is None else load_policy(options.policy, vocab_size)
    try:
        decoding.policy.start(requests, Streams.of([0] * requests))
    except ValueError as error:
        raise ConfigError(f"generate.policy: {error}") from error
    for one in decoding.policy.transforms:
        if isinstance(one, (Contrastive, Dola)):
            raise ConfigError(
                f"generate.policy: {one.name} needs data of each step beside the logits, which `generate` has not: use "
                "it in a loop of your own, with `Policy.step` or `decode.rollout`."
            )
    if options.beams is None:
        return decoding
    return dataclasses.replace(decoding, search=dataclasses.replace(decoding.search, beams=options.beams))


def _of_keys(options: GenerateConfig, vocab_size: int) -> Decoding:
    """The policy of the keys method, k and temperature."""
    if options.method == "greedy":
        return Decoding(Policy((), selector="greedy", vocab_size=vocab_size, name="greedy"))
    try:
        transforms = (TopK(min(options.k, vocab_size)), Temperature(options.temperature))
        return Decoding(Policy(transforms, selector="sample", vocab_size=vocab_size, name="top_k"))
    except ValueError as error:
        raise ConfigError(f"generate: {error}") from error


def load_policy(source: str, vocab_size: int) -> Decoding:
    """A policy file, YAML or JSON, or a preset by its name.

    A file is what `Policy.to_dict` gives, or `preset:` with that library's knobs; and perhaps a section `search`.

    Raises:
        ConfigError: Naming the file: it is not there, not a policy, or one of another vocabulary.
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml", ".json"):
        data = _read(path)
    elif source in PRESETS:
        data = {"preset": source}
    else:
        raise ConfigError(
            f"generate.policy: expected a .yaml or .json file or one of {', '.join(PRESETS)}, got {source!r}"
        )
    try:
        section = data.pop("search", {})
        require(isinstance(section, Mapping), "search", "a section (a mapping of keys)", section)
        search = build(Search, section)
        preset = data.pop("preset", None)
        if preset is None:
            policy = Policy.from_dict(data)
        elif preset in PRESETS:
            policy = PRESETS[preset](**data)
        else:
            raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
        if policy.vocab_size not in (None, vocab_size):
            raise ValueError(f"it is for a vocabulary of {policy.vocab_size} ids, this one has {vocab_size}")
        policy = policy.for_vocabulary(vocab_size)
    except (ValueError, *NOT_A_POLICY) as error:
        raise ConfigError(f"{path}: {str(error)[:1000] or type(error).__name__}") from error
    return Decoding(policy, search)


def _read(path: Path) -> dict[str, Any]:
    """The mapping that a file holds."""
    if not path.is_file():
        raise ConfigError(f"generate.policy: there is no file {path}")
    kind = "JSON" if path.suffix == ".json" else "YAML"  # which is no superset of it: tabs, numbers such as 1e-3
    try:
        data = _read_json(path) if kind == "JSON" else read_yaml(path)
    except ConfigError:
        raise
    except (ValueError, RecursionError, RepeatedKey) as error:
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: expected a policy, a mapping, got {type(data).__name__}")
    return dict(data)


def _read_json(path: Path) -> Any:
    """JSON with Infinity, which a policy may have."""
    data = read_bytes(path, _LARGEST_JSON)
    if too_many(data, _MOST_LISTS):
        raise ConfigError(f"{path}: more than {_MOST_LISTS:,} lists: no policy has so many")
    return json.loads(data, object_pairs_hook=each_once)


class Windows:
    """The app's model as a source of logits: for each new token it reads the last `context` ids again.

    One request at a time, so that no number of one depends on which others there are.

    Args:
        hidden: the model's hidden states ``[1, S]`` to ``[1, S, D]``, the same on every rank.
        head: this rank's rows of its head.
        context: tokens that the model attends over.
    """

    def __init__(self, hidden: Callable[[Tensor], Tensor], head: Head, context: int) -> None:
        self._hidden, self._head, self._context = hidden, head, context

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    def __call__(self, prefix: Tensor, active: Tensor) -> Tensor:
        """This rank's logits ``[T, shard_size]`` after prefixes ``[T, L]`` with -1 where there is no id.

        Those of a request that is not active are 0.

        Collectives: one embedding lookup for each active request.
        """
        weight, bias = self._head
        logits = weight.new_zeros(len(prefix), len(weight))
        for row in active.nonzero().flatten().tolist():
            ids = prefix[row][prefix[row] >= 0][-self._context :]
            logits[row] = F.linear(self._hidden(ids[None])[0, -1:], weight, bias)[0]
        return logits


@torch.no_grad()
def continue_prompts(
    model: Windows,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    streams: Streams,
    *,
    shard: VocabShard,
    max_tokens: int,
    eos: int,
    trace: bool = False,
) -> Iterator[Advance]:
    """The steps of a decoding with one beam; the same on every rank, and for a request whatever the others are.

    Args:
        prompts: at least one token id each.
        eos: ends a request; its id is among the step's.

    Collectives:
        For each token those of `Windows` and of the policy's step.
    """
    policy = decoding.policy
    yield from rollout(
        lambda view, active: model(view.prefix, active), policy, View.of(_padded(prompts, model.device)),
        policy.start(len(prompts), streams), shard=shard, eos_ids=[eos], max_new_tokens=max_tokens, trace=trace,
    )  # fmt: skip


@torch.no_grad()
def search_prompts(
    model: Windows,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    shard: VocabShard,
    max_tokens: int,
    eos: int,
) -> list[list[int]]:
    """The best continuation of each prompt by a beam search; the same on every rank. Its `eos` is left out."""

    def step(prefix: Tensor, parents: Tensor, state: Any) -> Stepped:
        return Stepped(model(prefix, torch.ones(len(prefix), dtype=torch.bool)))

    search = decoding.search
    found = beam_search(
        step, _padded(prompts, model.device), shard=shard, num_beams=search.beams, max_new_tokens=max_tokens,
        eos_ids=[eos], length_penalty=search.length_penalty, transforms=decoding.policy.transforms, num_return=1,
    )  # fmt: skip
    best = [ids[ids >= 0].tolist() for ids in found.token_ids[:, 0]]
    return [ids[:-1] if ids and ids[-1] == eos else ids for ids in best]


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 ``[T, L]``, -1 after a prompt's end."""
    return View.of(prompts).prefix.to(device)
