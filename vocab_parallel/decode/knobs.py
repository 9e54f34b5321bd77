"""Knobs of other libraries: what each library has, by name with its default, and what of it is refused here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vocab_parallel.decode.policy_file import require_known
from vocab_parallel.decode.transforms.transform import Transform
from vocab_parallel.errors import ConfigError

HUGGING_FACE = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "sequence_bias": None, "bad_words_ids": None, "min_length": 0, "min_new_tokens": None, "eos_token_id": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "max_length": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "renormalize_logits": False, "constraint": None,
}  # fmt: skip
_WARPING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
HUGGING_FACE_REFUSED = {
    "guidance_scale": (None, 1.0), "encoder_repetition_penalty": (None, 1.0), "encoder_no_repeat_ngram_size": (None, 0),
    "remove_invalid_values": (None, False), "exponential_decay_length_penalty": (None,), "top_h": (None,),
    "watermarking_config": (None,), "prefix_allowed_tokens_fn": (None,), "num_beams": (None, 1),
    "penalty_alpha": (None,), "dola_layers": (None,),
}  # fmt: skip
VLLM = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "logit_bias": None, "allowed_token_ids": None, "bad_words": None, "min_tokens": 0,
    "stop_token_ids": None, "eos_token_id": None, "constraint": None,
}  # fmt: skip
VLLM_REFUSED = {
    "n": (None, 1),
    "logits_processors": (None,),
    "guided_decoding": (None,),
    "structured_outputs": (None,),
}
LLAMA_CPP = {
    "samplers": ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"),
    "temp": 0.8, "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.05,
    "typ_p": 1.0, "top_n_sigma": -1.0, "penalty_last_n": 64, "penalty_repeat": 1.0, "penalty_freq": 0.0,
    "penalty_present": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "logit_bias": None,
    "constraint": None,
}  # fmt: skip
LLAMA_CPP_REFUSED = {
    "dry_multiplier": (None, 0.0), "xtc_probability": (None, 0.0), "min_keep": (None, 0), "ignore_eos": (None, False),
    "adaptive_target": (None, -1.0), "grammar": (None, ""),
}  # fmt: skip
_ADVICE = {
    "prefix_allowed_tokens_fn": "give a StateMachine as constraint",
    "grammar": "give a StateMachine as constraint",
    "guided_decoding": "give a StateMachine as constraint",
    "structured_outputs": "give a StateMachine as constraint",
    "ignore_eos": "give logit_bias={eos: -inf}",
    "num_beams": "see decode.beam_search",
    "penalty_alpha": "see the transform contrastive",
    "dola_layers": "see the transform dola",
    "n": "repeat the request with other streams",
}


def chosen_knobs(
    preset: str, knobs: Mapping[str, Any], known: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The knobs with their defaults, tensors as lists; an error for one that is unknown, or on and not here."""
    require_known(knobs, [*known, *refused], f"{preset}: knob")
    for name, value in knobs.items():
        if name in refused and value not in refused[name]:
            advice = f"; {_ADVICE[name]}" if name in _ADVICE else ""
            raise ConfigError(
                f"{preset}: {name}={value!r} has no transform here{advice}. It is not ignored: leave it out."
            )
    chosen = {name: knobs[name] if knobs.get(name) is not None else default for name, default in known.items()}
    return {name: one.tolist() if isinstance(one, Tensor) else one for name, one in chosen.items()}


def require_no_warping(given: Mapping[str, Any]) -> None:
    """Raises for a knob of sampling that is on, where nothing is sampled."""
    on = [name for name in _WARPING if given[name] != HUGGING_FACE[name]]
    if on:
        raise ConfigError(f"hugging_face: {', '.join(on)} acts with do_sample=True only, which is off: leave one out")


def require_ids(what: str, ids: Sequence[int], given: Mapping[str, Any], *names: str) -> None:
    """Raises for a knob of these names that is on without the ids that it is about."""
    on = [name for name in names if given[name] not in (None, 0)]
    if on and not ids:
        raise ConfigError(f"{on[0]} needs {what}: the ids that it forbids")


def if_given(value: Any, make: Callable[[Any], Transform]) -> Transform | None:
    """The transform of a knob that is off at None."""
    return None if value is None else make(value)


def unless_off(value: Any, off: float, make: Callable[[Any], Transform], zero: int | None = None) -> Transform | None:
    """The transform of a knob unless it is off for all requests; `zero` stands for off in a single one."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    if all(one is None or one == off for one in values):
        return None
    return make(value if zero is None else each_value(value, lambda one: zero if one == off else one))


def each_value(value: Any, change: Callable[[Any], Any]) -> Any:
    """A knob's value changed, for each request where it is one for each."""
    return tuple(change(one) for one in value) if isinstance(value, (list, tuple)) else change(value)


def id_tuple(value: Any) -> tuple[int, ...]:
    """One id, several or None, as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)


def bias_sequences(bias: Any) -> Sequence[tuple[tuple[int, ...], float]]:
    """Transformers takes a mapping of id tuples, or a list of pairs."""
    pairs = bias.items() if isinstance(bias, Mapping) else bias
    return [(tuple(ids), float(value)) for ids, value in pairs]
