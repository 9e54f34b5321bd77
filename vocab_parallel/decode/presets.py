"""Policies with the orders of other libraries: the same knobs, by the names they have there.

A knob that this package has no transform for is refused when it is on: a silent other distribution would be worse.
A transform's number may be one for each request, too; what decides which transforms there are is for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from vocab_parallel.decode.knobs import (
    HUGGING_FACE,
    HUGGING_FACE_REFUSED,
    LLAMA_CPP,
    LLAMA_CPP_REFUSED,
    VLLM,
    VLLM_REFUSED,
    bias_sequences,
    chosen_knobs,
    each_value,
    id_tuple,
    if_given,
    require_ids,
    require_no_warping,
    unless_off,
)
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.policy_file import require_known
from vocab_parallel.decode.transforms.constraints import Fsm
from vocab_parallel.decode.transforms.controllers import DynamicTemperature, MirostatV2
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.machine import StateMachine
from vocab_parallel.decode.transforms.penalties import RecentPenalties
from vocab_parallel.decode.transforms.processors import (
    BadWords,
    Bias,
    Force,
    FrequencyPenalty,
    MinLength,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
    Suppress,
)
from vocab_parallel.decode.transforms.transform import Transform
from vocab_parallel.decode.transforms.warpers import Epsilon, Eta, MinP, Temperature, TopK, TopNSigma, TopP, Typical
from vocab_parallel.errors import ConfigError

_VLLM_GREEDY = 1e-5  # a lower temperature is greedy there
_NO_LIMIT = 2**31 - 1  # of a top-k that is off


def hugging_face(**knobs: Any) -> Policy:
    """The order of Transformers' `generate`: processors, then with `do_sample` temperature, top-k, top-p, min-p, ...

    Differs from it where it must: exactly `top_k` ids stay, where Transformers keeps all that tie with the last.

    Args:
        knobs: Of `GenerationConfig`, by name and with its defaults (`do_sample=False` is greedy, `top_k=50`). For ids
            by name `eos_token_id`. `constraint` is a `StateMachine`, which `eos_token_id` may end, or
            an `Fsm`, in the place of `prefix_allowed_tokens_fn`.

    Raises:
        ConfigError: A knob that is unknown, or that this package has nothing for.

    Source:
        `GenerationMixin._get_logits_processor` of Transformers 5.24.
    """
    given = chosen_knobs("hugging_face", knobs, HUGGING_FACE, HUGGING_FACE_REFUSED)
    if not given["do_sample"]:
        require_no_warping(given)
    eos = id_tuple(given["eos_token_id"])
    require_ids("eos_token_id", eos, given, "min_length", "min_new_tokens")
    words = [word for word in given["bad_words_ids"] or () if list(word) not in [[one] for one in eos]]  # as there
    if given["forced_eos_token_id"] is not None and given["max_length"] is None:
        raise ConfigError("hugging_face: forced_eos_token_id needs max_length, the length at which it is forced")
    if given["forced_bos_token_id"] is not None and given["begin_suppress_tokens"] is not None:
        raise ConfigError("hugging_face: begin_suppress_tokens with forced_bos_token_id depends on the prompt's length")
    last = each_value(given["max_length"], lambda one: one and one - 1)
    chain: list[Transform | None] = [
        if_given(given["sequence_bias"], lambda one: Bias(sequences=tuple(bias_sequences(one)))),
        unless_off(given["repetition_penalty"], 1.0, RepetitionPenalty),
        unless_off(given["no_repeat_ngram_size"], 0, NoRepeatNgram),
        if_given(words or None, BadWords),
        unless_off(given["min_length"], 0, lambda one: MinLength(one, eos, "all")),
        unless_off(given["min_new_tokens"], 0, lambda one: MinLength(one, eos, "generated")),
        if_given(given["constraint"], lambda one: _fsm(one, eos)),
        if_given(given["forced_bos_token_id"], lambda one: Force(id_tuple(one), 1, "all", 0.0)),
        if_given(given["forced_eos_token_id"], lambda one: Force(id_tuple(one), last, "all", 0.0)),
        if_given(given["suppress_tokens"], Suppress),
        if_given(given["begin_suppress_tokens"], lambda one: Suppress(one, (0,))),
    ]
    if given["do_sample"]:
        chain += [
            unless_off(given["temperature"], 1.0, Temperature),
            unless_off(given["top_k"], 0, TopK, zero=_NO_LIMIT),
            unless_off(given["top_p"], 1.0, TopP),
            unless_off(given["min_p"], 0.0, MinP),
            unless_off(given["typical_p"], 1.0, Typical),
            unless_off(given["epsilon_cutoff"], 0.0, Epsilon),
            unless_off(given["eta_cutoff"], 0.0, Eta),
        ]
    chain.append(Normalize() if given["renormalize_logits"] else None)
    return _policy("hugging_face", chain, "sample" if given["do_sample"] else "greedy")


def vllm(**knobs: Any) -> Policy:
    """The order of vLLM's sampler: legality, biases, penalties, temperature, min-p, top-k, top-p.

    A temperature below 1e-5 is greedy, as there.

    Args:
        knobs: Of `SamplingParams`, by name and with its defaults. `bad_words` are lists of ids here, not strings;
            `min_tokens` forbids `stop_token_ids` and `eos_token_id`. `constraint` is a `StateMachine`, which those end,
            or an `Fsm`.

    Raises:
        ConfigError: A knob that is unknown, or that this package has nothing for.

    Source:
        `vllm/v1/sample/sampler.py`: the steps that `Sampler` lists; the engine's grammar masks come before it.
    """
    given = chosen_knobs("vllm", knobs, VLLM, VLLM_REFUSED)
    ends = (*id_tuple(given["eos_token_id"]), *id_tuple(given["stop_token_ids"]))
    require_ids("eos_token_id or stop_token_ids", ends, given, "min_tokens")
    words = given["bad_words"] or ()
    if any(isinstance(word, str) for word in words):
        raise ConfigError("vllm: bad_words must be lists of token ids: a policy knows no tokenizer")
    temperature = each_value(given["temperature"], lambda one: 0.0 if 0 <= one < _VLLM_GREEDY else one)
    chain = [
        if_given(given["constraint"], lambda one: _fsm(one, ends)),
        if_given(given["allowed_token_ids"], _only),
        if_given(tuple(words) or None, lambda one: BadWords(one, "generated")),
        unless_off(given["min_tokens"], 0, lambda one: MinLength(one, ends, "generated")),
        if_given(given["logit_bias"], _bias),
        unless_off(given["repetition_penalty"], 1.0, RepetitionPenalty),
        unless_off(given["frequency_penalty"], 0.0, FrequencyPenalty),
        unless_off(given["presence_penalty"], 0.0, PresencePenalty),
        unless_off(temperature, 1.0, Temperature),
        unless_off(given["min_p"], 0.0, MinP),
        unless_off(each_value(given["top_k"], lambda one: 0 if one == -1 else one), 0, TopK, zero=_NO_LIMIT),
        unless_off(given["top_p"], 1.0, TopP),
    ]
    return _policy("vllm", chain, "sample")


def llama_cpp(**knobs: Any) -> Policy:
    """The order of llama.cpp's chain: penalties, top-n-sigma, top-k, typical, top-p, min-p, and temperature last.

    With `mirostat=2` the chain is temperature and Mirostat alone. `temp` of 0 or below is greedy.

    Args:
        knobs: Of `common_params_sampling`, by name and with its defaults (which truncate: `top_k=40, top_p=0.95,
            min_p=0.05, temp=0.8`). `samplers` is another order. `constraint` is a `StateMachine`, or an `Fsm` (which
            may have end ids), applied first; llama.cpp draws without its grammar, and again under it if that broke it.

    Raises:
        ConfigError: A knob that is unknown, or that this package has nothing for (dry, xtc, adaptive-p, mirostat 1).

    Source:
        `common/sampling.cpp` and `common/common.h` of llama.cpp.
    """
    given = chosen_knobs("llama_cpp", knobs, LLAMA_CPP, LLAMA_CPP_REFUSED)
    chain: list[Transform | None] = [if_given(given["constraint"], _fsm), if_given(given["logit_bias"], _bias)]
    temperature = each_value(given["temp"], _not_negative)
    if given["mirostat"] == 2:
        chain += [unless_off(temperature, 1.0, Temperature), MirostatV2(given["mirostat_tau"], given["mirostat_eta"])]
        return _policy("llama_cpp", chain, "sample")
    if given["mirostat"] != 0:
        raise ConfigError(f"llama_cpp: mirostat must be 0 or 2 (version 1 is not here), got {given['mirostat']!r}")
    makers: dict[str, Callable[[], Transform | None]] = {
        "penalties": lambda: _penalties(given),
        "dry": lambda: None,
        "top_n_sigma": lambda: unless_off(
            each_value(given["top_n_sigma"], lambda one: float("inf") if one <= 0 else one), float("inf"), TopNSigma
        ),
        "top_k": lambda: unless_off(
            each_value(given["top_k"], lambda one: 0 if one < 0 else one), 0, TopK, zero=_NO_LIMIT
        ),
        "typ_p": lambda: unless_off(given["typ_p"], 1.0, Typical),
        "top_p": lambda: unless_off(given["top_p"], 1.0, TopP),
        "min_p": lambda: unless_off(given["min_p"], 0.0, MinP),
        "xtc": lambda: None,
        "temperature": lambda: _dynamic(given, temperature),
    }
    require_known(given["samplers"], makers, "llama_cpp: sampler")
    chain += [makers[name]() for name in given["samplers"]]
    return _policy("llama_cpp", chain, "sample")


PRESETS: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {"hugging_face": hugging_face, "vllm": vllm, "llama_cpp": llama_cpp}
)


def _penalties(given: Mapping[str, Any]) -> Transform | None:
    values = [given[name] for name in ("penalty_repeat", "penalty_freq", "penalty_present")]
    if given["penalty_last_n"] == 0 or values == [1.0, 0.0, 0.0]:
        return None
    return RecentPenalties(given["penalty_last_n"], *values)


def _dynamic(given: Mapping[str, Any], temperature: Any) -> Transform | None:
    width = given["dynatemp_range"]
    if each_value(width, float) == 0.0:
        return unless_off(temperature, 1.0, Temperature)
    if isinstance(width, Sequence) or isinstance(given["temp"], Sequence):
        raise ConfigError("llama_cpp: temp and dynatemp_range must be one number for all requests if a range is on")
    return DynamicTemperature(max(0.0, given["temp"] - width), given["temp"] + width, given["dynatemp_exponent"])


def _fsm(constraint: Any, eos_ids: tuple[int, ...] = ()) -> Transform:
    return constraint if isinstance(constraint, Transform) else Fsm(constraint, eos_ids=eos_ids)


def _not_negative(value: Any) -> Any:
    return type(value)(0) if value < 0 else value


def _only(token_ids: Sequence[int]) -> Transform:
    return Fsm(StateMachine.from_table({0: {one: 0 for one in token_ids}}, accepting=(0,)))


def _bias(bias: Mapping[Any, float]) -> Transform:
    return Bias({int(token_id): float(value) for token_id, value in bias.items()})  # JSON's keys are text


def _policy(name: str, chain: Sequence[Transform | None], selector: str) -> Policy:
    return Policy(tuple(one for one in chain if one is not None), selector=selector, name=name)
