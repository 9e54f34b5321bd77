"""The oracle of policies: transform after transform on whole rows, then the first of the total order or a draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.reference import processors, select, warpers
from vocab_parallel.reference.processors import Rows, of_row

States = Sequence[Mapping[str, Any]]  # of each transform: what it keeps, one entry a row


class Chosen(NamedTuple):
    """token_ids: int64 `[T]`. logprobs: float64 `[T]`. scores: `[T, V]`, after all transforms."""

    token_ids: Tensor
    logprobs: Tensor
    scores: Tensor


def run_policy(
    policy: Mapping[str, Any],  # as `Policy.to_dict` gives it
    logits: Tensor,  # [T, V]
    prompts: Rows,
    generated: Rows,
    bits: Tensor,  # int64 [T], uniform in [0, 2**62)
    states: States | None = None,
    extras: Mapping[str, Tensor] | None = None,
) -> Chosen:
    """What the policy chooses; `states` as at the start if None."""
    scores = final_scores(policy, logits, prompts, generated, states, extras)
    ids = select.greedy(scores) if policy.get("selector") == "greedy" else select.draw(scores, bits)
    logprobs = scores.double().log_softmax(1).gather(1, ids[:, None])[:, 0]
    return Chosen(ids, logprobs, scores)


def final_scores(
    policy: Mapping[str, Any],
    logits: Tensor,  # [T, V]
    prompts: Rows,
    generated: Rows,
    states: States | None = None,
    extras: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The scores after all transforms, float32, or float64 for float64 logits."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    for at, one in enumerate(policy["transforms"]):
        fields = {name: number(value) for name, value in one.items() if name != "name"}
        state = states[at] if states is not None else {}
        z = transform(one["name"], z, prompts, generated, fields, state, extras or {}).to(z.dtype)
    return z


def transform(
    name: str, z: Tensor, prompts: Rows, generated: Rows, fields: dict[str, Any], state: Any, extras: Any
) -> Tensor:
    """The scores after one transform."""
    if name in _KEPT:
        return torch.where(_KEPT[name](z, *(tensor(value) for value in fields.values())), z, -torch.inf)
    if name in _OTHERS:
        return _OTHERS[name](z, prompts, generated, fields, state, extras)
    return processors.process(name, z, prompts, generated, **fields)


def temperature(z: Tensor, prompts: Rows, generated: Rows, fields: Any, state: Any, extras: Any) -> Tensor:
    """`z / T`, in the scores' dtype."""
    return divided(z, warpers.per_row(tensor(fields["temperature"]), z))


def dynamic_temperature(z: Tensor, prompts: Rows, generated: Rows, fields: Any, state: Any, extras: Any) -> Tensor:
    """`z / T`, T by the row's entropy."""
    return divided(z, warpers.dynamic_temperature(z, *map(tensor, fields.values()))[:, None])


def divided(z: Tensor, t: Tensor) -> Tensor:
    """`z / t` for t `[T, 1]`; the first of the total order alone where t is 0."""
    cold = warpers.temperature(z, torch.where(t[:, 0] < 2.0**-64, 0.0, 1.0))
    return torch.where(t < 2.0**-64, cold.to(z.dtype), z / torch.where(t < 2.0**-64, 1.0, t).to(z.dtype))


def mirostat_v2(z: Tensor, prompts: Rows, generated: Rows, fields: Any, state: Any, extras: Any) -> Tensor:
    """Keeps what surprises by at most mu bits, `2 tau` at the start."""
    mu = state.get("mu", 2 * tensor(fields["tau"]))
    return torch.where(warpers.mirostat_v2(z, tensor(mu)), z, -torch.inf)


def recent_penalties(z: Tensor, prompts: Rows, generated: Rows, fields: Any, state: Any, extras: Any) -> Tensor:
    """`z / r` or `r z` by sign, then `- (f n + c)`, for the ids among the last ones."""
    z = z.clone()
    for t, row in enumerate(z):
        history = [*prompts[t], *generated[t]]
        last_n, r, f, c = (of_row(fields[name], t) for name in ("last_n", "repeat", "frequency", "presence"))
        recent = history if last_n < 0 else history[max(0, len(history) - last_n) :]
        r, f, c = (torch.tensor(value, dtype=z.dtype) for value in (r, f, c))
        for v in set(recent):
            row[v] = (row[v] * r if row[v] <= 0 else row[v] / r) - (recent.count(v) * f + c)
    return z


def fsm(z: Tensor, prompts: Rows, generated: Rows, fields: Any, state: Any, extras: Any) -> Tensor:
    """-inf at the ids that are illegal in each row's state."""
    machine, eos_ids = fields["machine"], fields.get("eos_ids", ())
    start = machine["start"] if fields.get("start_state") is None else fields["start_state"]
    return processors.fsm(z, state.get("state", [of_row(start, t) for t in range(len(z))]), machine, eos_ids)


def normalize(z: Tensor, prompts: Rows, generated: Rows, fields: Any, state: Any, extras: Any) -> Tensor:
    """`z - log sum exp z`."""
    return z.double().log_softmax(1)


def dola(z: Tensor, prompts: Rows, generated: Rows, fields: Any, state: Any, extras: Any) -> Tensor:
    """The contrast with the premature layers of the extras, `[T, V]` or `[M, T, V]`."""
    layers = extras["premature_logits"]
    return processors.dola(z, layers[:, None] if layers.dim() == 2 else layers.movedim(0, 1), **fields)


def tensor(value: Any) -> Tensor:
    """float64."""
    return torch.as_tensor(value, dtype=torch.float64)


def number(value: Any) -> Any:
    """A field as it was before it was written as text."""
    if isinstance(value, (list, tuple)):
        return [number(one) for one in value]
    return float(value) if value in ("inf", "-inf") else value


_KEPT: Mapping[str, Callable[..., Tensor]] = {
    "top_k": warpers.top_k, "top_p": warpers.top_p, "min_p": warpers.min_p, "typical": warpers.typical,
    "epsilon": warpers.epsilon, "eta": warpers.eta, "top_n_sigma": warpers.top_n_sigma,
}  # fmt: skip
_OTHERS: Mapping[str, Callable[..., Tensor]] = {
    "temperature": temperature, "dynamic_temperature": dynamic_temperature, "mirostat_v2": mirostat_v2,
    "recent_penalties": recent_penalties, "fsm": fsm, "normalize": normalize, "dola": dola,
}  # fmt: skip
