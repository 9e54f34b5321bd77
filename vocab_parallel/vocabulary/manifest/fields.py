"""The groups of a manifest: what two artifacts must agree on before their numbers are loaded or compared."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.manifest.strict_json import parse, plain

_DRAWS = "one uniform per active row and step, inverse CDF in id order over integer masses"


class TensorSpec(NamedTuple):
    """A tensor of a checkpoint: a dtype such as "float32", and the shape over all ranks, real rows only."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HeadContract:
    """The projection onto the vocabulary.

    Attributes:
        embedding_key, head_key, bias_key: Names in the model; a tied weight has both, though one tensor. None: absent.
        width: D of the table; output_width: its real rows, the vocabulary's size.
        storage: Which dimension of a stored table is which.
        projection: What stands between hidden states and table, such as "Linear(in_features=8, ...)".
        softcap, scale: What the model's own forward does to its logits.
    """

    width: int
    output_width: int
    embedding_key: str | None = None
    head_key: str | None = None
    bias_key: str | None = None
    storage: str = "[vocab_size, width]"
    bias: bool = False
    parameter_dtype: str = "float32"
    accumulation_dtype: str = "float32"
    projection: str | None = None
    softcap: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        require(self.width >= 1, "head.width", "at least 1", self.width)
        require(self.output_width >= 1, "head.output_width", "at least 1", self.output_width)
        choice("head.storage", self.storage, ("[vocab_size, width]", "[width, vocab_size]"))
        require(self.bias == (self.bias_key is not None), "head.bias", "true exactly with a bias_key", self.bias)
        require(self.softcap is None or self.softcap > 0, "head.softcap", "null or above 0", self.softcap)


@dataclass(frozen=True)
class VocabularyContract:
    """Which token each row means. Of what is None nothing is known.

    Attributes:
        size: Real token ids.
        ordered_table_sha256: `VocabIdentity.sha256`, of the ordered table from id to token.
        special_ids: Role ("bos", "eos", "pad", ...) to id.
        added: Ids of added tokens, in the order of their file.
        source: The format that the table was read from.
    """

    size: int
    ordered_table_sha256: str | None = None
    special_ids: Mapping[str, int] | None = None
    added: tuple[int, ...] | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        require(self.size >= 1, "vocabulary.size", "at least 1", self.size)
        sha = self.ordered_table_sha256
        good = sha is None or re.fullmatch(r"[0-9a-f]{64}", sha) is not None
        require(good, "vocabulary.ordered_table_sha256", "null or 64 hexadecimal digits", sha)
        check_ids("vocabulary.special_ids", (self.special_ids or {}).values(), self.size)
        check_ids("vocabulary.added", self.added or (), self.size)


@dataclass(frozen=True)
class TyingContract:
    """Whether lookup and projection use one weight.

    Attributes:
        embedding_key: The one name of the tied weight in a checkpoint.
        aliases: Its other names in the model, each with the first.
        restoration: What a load must give back.
    """

    tied: bool
    embedding_key: str | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    restoration: str = ""

    def __post_init__(self) -> None:
        wanted = "one Parameter" if self.tied else "separate Parameters"
        if not self.restoration:
            object.__setattr__(self, "restoration", wanted)
        require(self.restoration == wanted, "tying.restoration", f'"{wanted}" with tied={self.tied}', self.restoration)
        good = self.tied or not self.aliases
        require(good, "tying.aliases", "none of a weight that is not tied", dict(self.aliases))


@dataclass(frozen=True)
class LossContract:
    """What one number of a loss means; defaults are those of `linear_cross_entropy`."""

    score_type: str = "raw logits"
    target_type: str = "token ids"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    smoothing_over: str = "all"
    z_loss: float = 0.0
    softcap: float | None = None
    temperature: float = 1.0
    reduction: str = "mean"
    vocabulary_sharded: bool = True
    tp_invariant: bool = False
    unit: str = "nats"

    def __post_init__(self) -> None:
        choice("loss.score_type", self.score_type, ("raw logits", "log-probabilities", "probabilities"))
        choice("loss.target_type", self.target_type, ("token ids", "probabilities", "log-probabilities"))
        choice("loss.smoothing_over", self.smoothing_over, ("all", "others"))
        choice("loss.reduction", self.reduction, ("mean", "sum", "none"))
        choice("loss.unit", self.unit, ("nats", "bits"))
        require(0 <= self.label_smoothing <= 1, "loss.label_smoothing", "in [0, 1]", self.label_smoothing)
        require(self.z_loss >= 0, "loss.z_loss", "at least 0", self.z_loss)
        require(self.softcap is None or self.softcap > 0, "loss.softcap", "null or above 0", self.softcap)
        require(self.temperature > 0, "loss.temperature", "above 0", self.temperature)


@dataclass(frozen=True)
class PolicyContract:
    """How a token is chosen: a `decode.policy.Policy` as it serialises itself, and the ids that end a text.

    Attributes:
        transforms: In the order in which they are applied, each with its "name" and its parameters.
        logprobs: Of which distribution the log-probabilities are that are reported with the tokens: the "processed"
            one that they are chosen from, or the "raw" one of the logits.
    """

    transforms: tuple[Mapping[str, Any], ...] = ()
    selector: str = "sample"
    fallback: str | Mapping[str, Any] = "error"
    stop_ids: tuple[int, ...] = ()
    logprobs: str = "processed"
    special_ids: Mapping[str, int] = field(default_factory=dict)
    vocab_size: int | None = None
    name: str = "policy"
    version: int = 1

    def __post_init__(self) -> None:
        choice("policy.selector", self.selector, ("sample", "greedy"))
        choice("policy.logprobs", self.logprobs, ("raw", "processed"))
        transforms = plain(self.transforms, "policy.transforms")
        object.__setattr__(self, "transforms", tuple(transforms))
        object.__setattr__(self, "fallback", plain(self.fallback, "policy.fallback"))
        for at, one in enumerate(self.transforms):
            require(isinstance(one.get("name"), str), f"policy.transforms[{at}].name", "text", one.get("name"))
        check_ids("policy.stop_ids", self.stop_ids, 2**31)

    @classmethod
    def of(cls, policy: Any, stop_ids: Collection[int] = (), logprobs: str = "processed") -> PolicyContract:
        """Of a `Policy` or of its `to_dict`."""
        data = plain(policy if isinstance(policy, Mapping) else policy.to_dict(), "policy")
        made: PolicyContract = parse(cls, {**data, "stop_ids": list(stop_ids), "logprobs": logprobs}, "policy")
        return made

    def policy_dict(self) -> dict[str, Any]:
        """What `Policy.from_dict` takes."""
        names = ("version", "name", "selector", "fallback", "vocab_size", "special_ids")
        return {**{name: getattr(self, name) for name in names}, "transforms": list(self.transforms)}


@dataclass(frozen=True)
class RandomnessContract:
    """Where the random numbers of selection come from."""

    algorithm: str = "Philox4x32-10"
    seed: int | None = None
    stream_owner: str = "request"
    draw_contract: str = _DRAWS


@dataclass(frozen=True)
class CheckpointContract:
    """What lies beside the manifest, or of a run: what its checkpoints hold.

    Attributes:
        format: Name and version of the files.
        step: None of a run.
        tensors: Every key, such as "model.embedding.weight", with dtype and whole shape.
        padded_size, tp_size, shard_ranges: How the vocabulary was sharded; `[start, stop)` of the real ids by rank.
    """

    padded_size: int
    tp_size: int
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)
    step: int | None = None
    format: str = "vocab_parallel 2"
    shard_ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        require(1 <= self.tp_size <= 2**20, "checkpoint.tp_size", "in [1, 2**20]", self.tp_size)
        require(self.padded_size >= 1, "checkpoint.padded_size", "at least 1", self.padded_size)
        require(self.step is None or self.step >= 0, "checkpoint.step", "null or at least 0", self.step)
        for key, spec in self.tensors.items():
            good = len(spec.shape) <= 64 and all(0 <= size < 2**63 for size in spec.shape)
            require(good, f"checkpoint.tensors.{key}", "sizes of at least 0", list(spec.shape)[:8])

    @classmethod
    def of(cls, layout: VocabLayout, tensors: Mapping[str, TensorSpec], step: int | None = None) -> CheckpointContract:
        """Of a layout and of all tensors."""
        ranges = tuple((r.start, r.stop) for r in map(layout.range, range(layout.tp_size)))
        return cls(layout.padded_size, layout.tp_size, dict(tensors), step, shard_ranges=ranges)


@dataclass(frozen=True)
class RuntimeContract:
    """What made the artifact: for reading, never a reason to refuse it.

    Attributes:
        versions: Package to version.
        host: "plain", "fsdp", "transformers", "megatron" or "deepspeed".
        device: "cpu", "cuda", ...
        kernels: "torch" or "triton", of the loss.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    host_version: str | None = None
    device: str | None = None
    kernels: str | None = None


def require(good: bool, name: str, wanted: str, value: object) -> None:
    """Raises unless `good`, naming field, what was expected and what was found."""
    if not good:
        raise CheckpointLayoutError(f"{name}: expected {wanted}, got {value!r}")


def choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises unless `value` is one of `choices`."""
    require(value in choices, name, "one of " + ", ".join(f'"{one}"' for one in choices), value)


def check_ids(name: str, ids: Collection[int], size: int) -> None:
    """Raises unless every id is in `[0, size)`."""
    wrong = next((one for one in ids if not 0 <= one < size), None)
    require(wrong is None, name, f"ids in [0, {size})", wrong)
