"""Where two manifests differ, what each difference means, and the gates that refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest.fields import TensorSpec
from vocab_parallel.vocabulary.manifest.rules import COMPARE, LOAD, RULES, Rule

if TYPE_CHECKING:
    from vocab_parallel.vocabulary.manifest import Manifest

MUST, TUNE, INFORMATIONAL = "must match", "may tune", "informational"
_SHOWN = 4  # differences in one error
# Causes before what follows from them.
_ORDER = ("vocabulary", "tying", "head", "loss", "policy", "randomness", "checkpoint", "runtime", "notes")
_TENSORS = "checkpoint.tensors."
_UNKNOWN = "not recorded on one side, so nothing is known"


class Difference(NamedTuple):
    """One field in which two manifests differ.

    Attributes:
        field: Dotted, such as "head.width".
        kind: "must match": it changes what a number means; "may tune": a knob; "informational".
        a, b: The two values.
        why: The failure that a refusal prevents.
    """

    field: str
    kind: str
    a: Any
    b: Any
    why: str

    def __str__(self) -> str:
        return f"{self.field} is {show(self.a)} and {show(self.b)}"


def compare(a: Manifest, b: Manifest, purpose: str | None = None) -> list[Difference]:
    """Every difference, causes before what follows from them.

    Args:
        purpose: "load": what must match is what must be equal to load `a` into `b`; "compare": what must be equal
            before numbers of the two are compared; None: both.
    """
    found = [difference for rule in RULES for difference in _differences(rule, a, b, purpose)]
    return sorted(found, key=lambda one: _ORDER.index(one.field.partition(".")[0]))


def require_loadable(saved: Manifest, here: Manifest, *, where: str, retie: bool = False) -> None:
    """The gate before a load: on every rank, before anything is read or changed.

    Args:
        saved: Of the checkpoint.
        here: Of the model, `Manifest.of(model, ...)`.
        where: The checkpoint, for the message.
        retie: The loader unties or ties by itself, so the tie and the keys that follow from it may differ.

    Raises:
        CheckpointLayoutError: What must match does not; with both sides and the command that would fix it.
    """
    found = [one for one in compare(saved, here, LOAD) if one.kind == MUST]
    if retie:
        found = [one for one in found if not _follows_from_tie(one, saved, here)]
    if found:
        raise CheckpointLayoutError(
            f"{where} does not fit here: {_words(found, 'saved', 'here')}. {' '.join(_fixes(found, where))}"
        )


def require_comparable(a: Manifest, b: Manifest, *, names: tuple[str, str] = ("a", "b")) -> None:
    """The gate before losses, logits or decisions of two artifacts are compared.

    Args:
        names: Of the two, for the message.

    Raises:
        CheckpointLayoutError: Their numbers mean different things; naming each difference.
    """
    found = [one for one in compare(a, b, COMPARE) if one.kind == MUST]
    if found:
        raise CheckpointLayoutError(
            f"{names[0]} and {names[1]} cannot be compared: {_words(found, *names)}. Run both with one setting of "
            "these, or compare what does not depend on them."
        )


def show(value: Any) -> str:
    """A value in a line."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return f"{value[:16]}…" if len(value) == 64 else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, TensorSpec):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        return _cut(", ".join(f"{key}={show(one)}" for key, one in value.items()) or "none")
    if isinstance(value, (tuple, list)):
        return _cut(f"[{', '.join(show(one) for one in value)}]")
    return str(value)


def _differences(rule: Rule, a: Manifest, b: Manifest, purpose: str | None) -> Iterator[Difference]:
    group, _, name = rule.field.partition(".")
    sides = [getattr(one, group) for one in (a, b)]
    if name and None in sides:
        return  # of a group that one side has not recorded, nothing is known
    mine, its = (getattr(one, name) for one in sides) if name else sides
    kind = _kind(rule, purpose)
    if rule.field == "policy.transforms":
        yield from _transforms(rule, kind, mine, its)
    elif rule.field in _BY_KEY and None not in (mine, its):
        yield from _by_key(rule, kind, mine, its)
    elif mine != its:
        unknown = rule.none_is_unknown and None in (mine, its)
        yield Difference(rule.field, INFORMATIONAL if unknown else kind, mine, its, _UNKNOWN if unknown else rule.why)


_BY_KEY = ("checkpoint.tensors", "runtime.versions", "notes", "vocabulary.special_ids")


def _by_key(rule: Rule, kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in [*a, *(key for key in b if key not in a)]:
        mine, its = a.get(key), b.get(key)
        if mine != its:
            loose = _loose(rule, key, mine, its) if kind == MUST else None
            yield Difference(f"{rule.field}.{key}", TUNE if loose else kind, mine, its, loose or rule.why)


def _loose(rule: Rule, key: str, mine: Any, its: Any) -> str | None:
    """Why one side may lack this; None: it may not."""
    if None not in (mine, its):
        return None
    if rule.field == "vocabulary.special_ids":
        return "a role may be given to an id later"
    return "weights load without an optimizer's state" if key.startswith("optimizer.") else None


def _transforms(rule: Rule, kind: str, a: Any, b: Any) -> Iterator[Difference]:
    """Names and order are the contract; numbers may be tuned; ids and tables decide which tokens are legal."""
    names = [[one["name"] for one in side] for side in (a, b)]
    if names[0] != names[1]:
        yield Difference(rule.field, kind, names[0], names[1], rule.why)
        return
    for at, (mine, its) in enumerate(zip(a, b, strict=True)):
        for key in {**mine, **its}:
            one, other = mine.get(key), its.get(key)
            if one != other:
                tuned = any(type(value) in (int, float) for value in (one, other))
                why = "another setting of one transform: a sweep" if tuned else rule.why
                yield Difference(f"{rule.field}[{at}].{key}", TUNE if tuned else kind, one, other, why)


def _kind(rule: Rule, purpose: str | None) -> str:
    if rule.gates if purpose is None else purpose in rule.gates:
        return MUST
    return INFORMATIONAL if rule.informational else TUNE


def _follows_from_tie(one: Difference, saved: Manifest, here: Manifest) -> bool:
    if one.field.startswith("tying."):
        return True
    names = {name for side in (saved, here) for name in (side.head.head_key, side.head.embedding_key)}
    names |= {name for side in (saved, here) for pair in side.tying.aliases.items() for name in pair}
    return one.field in {f"checkpoint.tensors.model.{name}" for name in names} and None in (one.a, one.b)


def _words(found: list[Difference], mine: str, its: str) -> str:
    causes, tensors = _causes(found)
    shown = (causes or tensors)[:_SHOWN]
    parts = [f"{one.field} is {show(one.a)} {mine}, {show(one.b)} {its} ({one.why})" for one in shown]
    left = len(causes or tensors) - len(shown)
    parts += [f"and {left} more"] if left else []
    parts += [f"and {len(tensors)} of the tensors"] if causes and tensors else []
    return "; ".join(parts)


def _causes(found: list[Difference]) -> tuple[list[Difference], list[Difference]]:
    """Without what follows from another: of a broken tie its other fields, of a size the shapes. And the tensors."""
    fields = {one.field for one in found}
    drop = {field for cause, follows in _FOLLOWS.items() if cause in fields for field in follows}
    kept = [one for one in found if one.field not in drop]
    tensors = [one for one in kept if one.field.startswith(_TENSORS)]
    if "tying.tied" in fields:
        tensors = [one for one in tensors if None not in (one.a, one.b)]
    if "vocabulary.size" in fields:
        tensors = [one for one in tensors if not _is_resized(one)]
    return [one for one in kept if not one.field.startswith(_TENSORS)], tensors


_FOLLOWS = {
    "tying.tied": ("tying.embedding_key", "tying.aliases", "tying.restoration"),
    "vocabulary.size": ("head.output_width",),
    "head.bias": ("head.bias_key",),
}


def _is_resized(one: Difference) -> bool:
    return None not in (one.a, one.b) and one.a.dtype == one.b.dtype and one.a.shape[1:] == one.b.shape[1:]


def _fixes(found: list[Difference], where: str) -> list[str]:
    """What to do about it, once each."""
    fixes: list[str] = []
    causes, tensors = _causes(found)
    for one in (causes or tensors)[:_SHOWN]:
        rule = max((rule for rule in RULES if one.field.startswith(rule.field)), key=lambda rule: len(rule.field))
        fix = rule.fix.format(where=where)
        if fix and fix not in fixes:
            fixes.append(fix)
    return fixes


def _cut(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"
