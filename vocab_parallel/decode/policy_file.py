"""Policies as data: names to transforms, and what a file gets wrong in words that name it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vocab_parallel.decode.running import Fallback
from vocab_parallel.decode.transforms.constraints import Fsm
from vocab_parallel.decode.transforms.contrast import Contrastive, Dola
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.penalties import RecentPenalties
from vocab_parallel.decode.transforms.processors import (
    BadWords,
    Bias,
    Force,
    FrequencyPenalty,
    MinLength,
    NoRepeatNgram,
    PresencePenalty,
    Prior,
    RepetitionPenalty,
    Suppress,
)
from vocab_parallel.decode.transforms.transform import Transform
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from vocab_parallel.errors import ConfigError

VERSION = 1
TRANSFORMS: tuple[type[Transform], ...] = (
    Bias, Suppress, Force, MinLength, BadWords, NoRepeatNgram, RepetitionPenalty, FrequencyPenalty, PresencePenalty,
    RecentPenalties, Prior, Temperature, DynamicTemperature, TopK, TopP, MinP, Typical, Epsilon, Eta, TopNSigma,
    MirostatV2, Fsm, Contrastive, Dola, Normalize,
)  # fmt: skip
# What is asked for by these names is no transform of scores, and nothing in a chain could stand for it.
_OTHER_THINGS = {
    "sampled_softmax": "it estimates a training loss from some of the ids; a token is chosen from the scores of all",
    "adaptive_softmax": "it is an output layer with weights of its own, and scores of one table cannot be made into it",
    "hierarchical_softmax": "it is an output layer with weights of its own, and a score here is no path through a tree",
    "mixture_of_softmaxes": "it is an output layer of several heads, and scores of one cannot be made into it",
    "beam_search": "it is a search over sequences: decode.beam_search, or the section search of a policy's file",
    "best_first": "it is a search over sequences: decode.best_first_search",
    "a_star": "it is a search over sequences: decode.best_first_search, whose result says whether it is proven",
    "best_of_n": "it ranks finished texts by a judge outside the model: draw n by rollout, and rank them",
}
_KEYS = ("version", "name", "selector", "fallback", "vocab_size", "special_ids", "transforms")


def parse(data: Mapping[str, Any], more: Sequence[type[Transform]] = ()) -> dict[str, Any]:
    """The arguments of `Policy` of a mapping; ConfigError names what is unknown, and the nearest known name."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"a policy must be a mapping with a list of transforms, got {type(data).__name__}")
    require_known(data, _KEYS, "a policy's key")
    if data.get("version", VERSION) != VERSION:
        raise ConfigError(f"a policy of version {data['version']!r}, this code reads {VERSION}")
    given = data.get("transforms", ())
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"transforms: expected a list, got {given!r}")
    known = {one.name: one for one in (*TRANSFORMS, *more)}
    arguments = {key: value for key, value in data.items() if key not in ("version", "transforms")}
    arguments["transforms"] = tuple(_transform(one, at, known) for at, one in enumerate(given))
    return arguments


def fallback(given: object) -> Fallback:
    """The fallback of "error", `{"token": id}` or `{"undo": True}`."""
    if given == "error":
        return Fallback()
    if isinstance(given, Mapping) and list(given) == ["undo"] and given["undo"] is True:
        return Fallback("undo")
    if isinstance(given, Mapping) and list(given) == ["token"]:
        return Fallback("token", given["token"])
    raise ValueError(f'fallback must be "error", {{"token": id}} or {{"undo": True}}, got {given!r}')


def _transform(given: object, at: int, known: Mapping[str, type[Transform]]) -> Transform:
    where = f"transforms[{at}]"
    if isinstance(given, str):  # a name alone: with its defaults
        given = {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ConfigError(f"{where}: expected a mapping with a name, got {given!r}")
    name = given["name"]
    if name in _OTHER_THINGS and name not in known:
        raise ConfigError(f"{where}: {name!r} is no transform: {_OTHER_THINGS[name]}")
    require_known([name], known, f"{where}: transform")
    kind = known[name]
    fields = [one.name for one in dataclasses.fields(kind) if one.init]  # type: ignore[arg-type]
    require_known([key for key in given if key != "name"], fields, f"{where} ({name}): field")
    try:
        return kind.from_dict(given)
    except TypeError as error:  # a field without a default is missing
        raise ConfigError(f"{where} ({name}): {error}") from error


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raises ConfigError for the first name that is unknown, with the nearest that is not."""
    known = list(known)
    for one in given:
        if one not in known:
            near = difflib.get_close_matches(str(one), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ConfigError(f"{what} {one!r} is unknown; {hint}")
