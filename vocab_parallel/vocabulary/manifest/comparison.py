"""Where two manifests differ, what each difference means, and the gates that refuse."""

from __future__ import annotations

import shlex
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
        tensors = _tensors_of_tie(saved, here)
        found = [one for one in found if not one.field.startswith("tying.")]
        found = [one for one in found if one.field not in tensors or None not in (one.a, one.b)]
    if found:
        shown, rest = _shown(found)
        raise CheckpointLayoutError(
            f"{where} does not fit here: {_words(shown, rest, 'saved', 'here')}. {' '.join(_fixes(shown, where))}"
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
            f"{names[0]} and {names[1]} cannot be compared: {_words(*_shown(found), *names)}. Run both with one "
            "setting of these, or compare what does not depend on them."
        )


def show(value: Any) -> str:
    """A value in a line."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return printable(f"{value[:16]}…" if len(value) == 64 else value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, TensorSpec):
        return f"{printable(value.dtype)} {list(value.shape)}"
    if isinstance(value, Mapping):
        return _cut(", ".join(f"{key}={show(one)}" for key, one in value.items()) or "none")
    if isinstance(value, (tuple, list)):
        return _cut(f"[{', '.join(show(one) for one in value)}]")
    return str(value)


def printable(text: str) -> str:
    """The text, its control characters escaped: what a file says may not move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


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


def _tensors_of_tie(saved: Manifest, here: Manifest) -> set[str]:
    """The fields of tensors that one side may lack, because the other has them under another name."""
    names = {name for side in (saved, here) for name in (side.head.head_key, side.head.embedding_key)}
    names |= {name for side in (saved, here) for pair in side.tying.aliases.items() for name in pair}
    return {f"{_TENSORS}model.{name}" for name in names}


def _words(shown: list[Difference], rest: list[str], mine: str, its: str) -> str:
    return "; ".join([f"{one.field} is {show(one.a)} {mine}, {show(one.b)} {its} ({one.why})" for one in shown] + rest)


def _shown(found: list[Difference]) -> tuple[list[Difference], list[str]]:
    """The causes to spell out, and how many differences are left; what follows from a cause is neither.

    From a tie follow its other fields, from a size the shapes. Tensors are spelled out where there is nothing else.
    """
    fields = {one.field for one in found}
    drop = {field for cause, follows in _FOLLOWS.items() if cause in fields for field in follows}
    tensors = [one for one in found if one.field.startswith(_TENSORS)]
    causes = [one for one in found if one.field not in drop and not one.field.startswith(_TENSORS)]
    if "tying.tied" in fields:
        tensors = [one for one in tensors if None not in (one.a, one.b)]
    if "vocabulary.size" in fields:
        tensors = [one for one in tensors if not _is_resized(one)]
    kept = causes or tensors
    rest = [f"and {len(kept) - _SHOWN} more"] if len(kept) > _SHOWN else []
    rest += [f"and {len(tensors)} of the tensors"] if causes and tensors else []
    return kept[:_SHOWN], rest


_FOLLOWS = {
    "tying.tied": ("tying.embedding_key", "tying.aliases", "tying.restoration"),
    "vocabulary.size": ("head.output_width",),
    "head.bias": ("head.bias_key",),
}


def _is_resized(one: Difference) -> bool:
    return None not in (one.a, one.b) and one.a.dtype == one.b.dtype and one.a.shape[1:] == one.b.shape[1:]


def _fixes(shown: list[Difference], where: str) -> list[str]:
    """What to do about it, once each."""
    rules = [max((rule for rule in RULES if one.field.startswith(rule.field)), key=lambda rule: len(rule.field))
             for one in shown]  # fmt: skip
    return list(dict.fromkeys(rule.fix.format(where=shlex.quote(where)) for rule in rules if rule.fix))


def _cut(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"
