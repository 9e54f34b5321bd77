"""The app's settings: YAML plus dotted overrides into frozen, validated dataclasses.

``load(source, overrides)`` is the one entry. An unknown key, a wrong type and an impossible value are a `ConfigError`
that names the dotted key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from vocab_parallel.app.settings import assign, build, choice, read_yaml, require, type_name
from vocab_parallel.errors import ConfigError

HOSTS = ("plain", "deepspeed", "megatron", "transformers", "fsdp")


def load(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, or a run folder's ``config.yaml``, and applies overrides such as ``train.steps=10``.

    Args:
        source: a YAML file, or a run folder.
        overrides: ``dotted.key=value`` strings; the value is parsed as YAML (number, string, list, null).

    Returns:
        The validated configuration.

    Raises:
        ConfigError: file missing, not YAML, unknown key, wrong type or impossible value.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"no configuration at {path}: expected a YAML file or a run folder that holds config.yaml")
    data = read_yaml(path)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections at the top, got {type(data).__name__}")
    for text in overrides:
        assign(data, text)
    try:
        return from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"{path}{', with what was given beside it' if overrides else ''}: {error}") from error


def from_overrides(overrides: Sequence[str]) -> Config:
    """The default configuration with overrides applied; the errors are those of `load`."""
    data: dict[str, Any] = {}
    for text in overrides:
        assign(data, text)
    return from_dict(data)


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """How the vocabulary is spread."""

    tp: int | None = None  # ranks that share the vocabulary (the others are data-parallel); null: all ranks of the job
    multiple_of: int = 128  # each shard's rows are a multiple of this
    timeout_s: float = 40.0  # a collective that waits longer than this ends the job with an error
    threads: int | None = 1  # CPU threads per rank; null: leave PyTorch's choice
    device: str = "auto"  # auto | cpu | cuda

    def __post_init__(self) -> None:
        require(self.tp is None or self.tp >= 1, "parallel.tp", "null or at least 1", self.tp)
        require(self.multiple_of >= 1, "parallel.multiple_of", "at least 1", self.multiple_of)
        require(self.timeout_s > 0, "parallel.timeout_s", "above 0 seconds", self.timeout_s)
        require(self.threads is None or self.threads >= 1, "parallel.threads", "null or at least 1", self.threads)
        choice("parallel.device", self.device, ("auto", "cpu", "cuda"))


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Vocabulary and corpus."""

    vocab: str = "tekken"  # tekken (131,072 ids) | bytes (259 ids) | a tokenizer file, or the folder of one
    paths: list[str] = dataclasses.field(
        default_factory=list
    )  # files, folders, globs; empty: Python's standard library
    max_bytes: int | None = None  # stop after this much text; null: all
    validation_fraction: float = 0.03  # of the tokens, whole documents
    cache: str | None = None  # folder of tokenised corpora; null: the user's cache folder

    def __post_init__(self) -> None:
        if not Path(self.vocab).exists():
            choice("data.vocab", self.vocab, ("tekken", "bytes", "a tokenizer's path"))
        require(self.max_bytes is None or self.max_bytes > 0, "data.max_bytes", "null or above 0", self.max_bytes)
        fraction = self.validation_fraction
        require(0 < fraction < 1, "data.validation_fraction", "between 0 and 1, both excluded", fraction)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The decoder trunk (the same on every rank) and the tied vocabulary table."""

    dim: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 128  # tokens a row attends over, and the length of a training sequence
    mlp_ratio: int = 4
    head_bias: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "context", "mlp_ratio"):
            require(getattr(self, name) >= 1, f"model.{name}", "at least 1", getattr(self, name))
        wanted = f"a multiple of 2 * model.heads = {2 * self.heads} (rotary pairs)"
        require(self.dim % (2 * self.heads) == 0, "model.dim", wanted, self.dim)
        require(self.init_std > 0, "model.init_std", "above 0", self.init_std)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation, validation and checkpoints."""

    steps: int = 100
    batch: int = 2  # sequences a step, over all replicas; tokens a step = batch * model.context
    lr: float = 3e-3  # of the vocabulary table
    trunk_lr_ratio: float = 1.0  # the trunk learns at lr times this
    warmup: int = 10  # steps
    min_lr_ratio: float = 0.1  # the cosine ends at lr * min_lr_ratio
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    clip: float = 1.0  # largest global gradient norm
    seed: int = 0
    chunk_size: int | None = None  # rows a chunk of the fused loss; null: its own choice
    average_last: int = 10  # the final train loss is the mean over this many last steps
    validation_every: int = 50  # steps; 0: only at the end
    validation_sequences: int = 16
    checkpoint_every: int = 50  # steps; the last step always saves; 0: only at the end
    keep_checkpoints: int = 2
    async_checkpoints: bool = False  # write them beside the training, from a copy in memory
    resume: str | None = None  # a run folder: continue from its latest checkpoint
    require_under_unigram: bool = False  # exit with an error if the validation loss does not get under the entropy

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "average_last", "validation_sequences", "keep_checkpoints"):
            require(getattr(self, name) >= 1, f"train.{name}", "at least 1", getattr(self, name))
        for name in ("warmup", "validation_every", "checkpoint_every", "seed", "weight_decay"):
            require(getattr(self, name) >= 0, f"train.{name}", "0 or more", getattr(self, name))
        for name in ("lr", "clip", "trunk_lr_ratio"):
            require(getattr(self, name) > 0, f"train.{name}", "above 0", getattr(self, name))
        require(0 <= self.min_lr_ratio <= 1, "train.min_lr_ratio", "between 0 and 1", self.min_lr_ratio)
        good = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(good, "train.betas", "two numbers in [0, 1)", self.betas)
        good = self.chunk_size is None or self.chunk_size >= 1
        require(good, "train.chunk_size", "null or at least 1", self.chunk_size)


@dataclasses.dataclass(frozen=True)
class OracleConfig:
    """The single-rank float64 check beside the training."""

    every: int = 1  # steps between comparisons of the loss; 0: never
    gradient_every: int = 25  # steps between comparisons of the gradients too; 0: never
    chunk_rows: int = 64  # rows of whole logits that rank 0 forms at a time
    max_loss_difference: float | None = 1e-3  # nats; a larger one ends the job; null: only report
    max_gradient_difference: float | None = 1e-3  # relative to the largest gradient entry; null: only report

    def __post_init__(self) -> None:
        for name in ("every", "gradient_every"):
            require(getattr(self, name) >= 0, f"oracle.{name}", "0 or more", getattr(self, name))
        require(self.chunk_rows >= 1, "oracle.chunk_rows", "at least 1", self.chunk_rows)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """The sample at the end of a training, and the defaults of ``generate``."""

    prompt: str = "import "
    max_tokens: int = 48
    policy: str | None = None  # a policy file, or a preset's name; null: one of the next three
    method: str = "top_k"  # greedy | top_k
    k: int = 20
    temperature: float = 0.8
    seed: int = 0  # of the random numbers, with the request's name
    request: str | None = None  # the request's name; null: its prompt
    beams: int | None = None  # above 1: a beam search with this many; null: what the policy's file says, else none

    def __post_init__(self) -> None:
        choice("generate.method", self.method, ("greedy", "top_k"))
        for name in ("max_tokens", "k"):
            require(getattr(self, name) >= 1, f"generate.{name}", "at least 1", getattr(self, name))
        require(self.beams is None or self.beams >= 1, "generate.beams", "null or at least 1", self.beams)
        require(self.temperature >= 0, "generate.temperature", "0 (greedy) or more", self.temperature)
        check_seed("generate.seed", self.seed)


def check_seed(key: str, seed: int) -> None:
    """Raises unless a stream can have this seed."""
    require(-(2**63) <= seed < 2**64, key, "a number of at most 64 bits", seed)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run is made from; a run folder keeps it as ``config.yaml``."""

    name: str = "run"
    runs: str = "runs"  # the folder that run folders go to
    run: str | None = None  # this run folder: begin there, or go on from its newest checkpoint; null: a new one
    host: str = "plain"  # plain | deepspeed | megatron | transformers | fsdp: the stack that the training runs in
    host_config: str | None = None  # deepspeed: a JSON file for its engine; null: ZeRO stage 1
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    oracle: OracleConfig = dataclasses.field(default_factory=OracleConfig)
    generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)

    def __post_init__(self) -> None:
        good = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name) is not None
        require(good, "name", "letters, digits, '.', '_' and '-' only", self.name)
        choice("host", self.host, HOSTS)
        good = self.run is None or self.train.resume is None
        require(good, "run", "null with train.resume (train FOLDER), which names the folder too", self.run)
        good = self.host_config is None or self.host == "deepspeed"
        require(good, "host_config", f"null with host={self.host} (deepspeed has one)", self.host_config)

    def to_yaml(self) -> str:
        """The YAML text that `load` reads back to an equal configuration."""
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False, allow_unicode=True)


def from_dict(data: Mapping[str, Any]) -> Config:
    """Builds a `Config` from nested mappings; the errors are those of `load`."""
    _refuse(Config, data, "")
    return build(Config, data)


def _refuse(kind: type, data: Mapping[str, Any], prefix: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        path = f"{prefix}{key}"
        if key not in hints:
            near = _nearest(str(key), prefix)
            hint = f"; did you mean {near}?" if near else f"; known here: {', '.join(hints)}"
            raise ConfigError(f"unknown key {path[:200]}{hint}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}: expected a section (a mapping of keys), got {value!r:.200}")
            _refuse(typing.cast(type, hints[key]), value, f"{path}.")
            continue
        # bool is an int to Python, and text is a sequence; here a yes for a count and a name for a list are mistakes.
        kinds = typing.get_args(hints[key]) or (hints[key],)
        is_list = typing.get_origin(hints[key]) is list
        if (isinstance(value, bool) and bool not in kinds) or (is_list and not isinstance(value, list)):
            raise ConfigError(f"{path}: expected {type_name(hints[key])}, got {value!r:.200}")


def _nearest(key: str, prefix: str) -> str | None:
    """The known dotted name closest to an unknown one: the same name elsewhere, one here, one anywhere."""
    known = list(_dotted(Config, ""))
    here = {name[len(prefix) :]: name for name in known if name.startswith(prefix) and "." not in name[len(prefix) :]}
    anywhere = {name.rpartition(".")[2]: name for name in known}
    if key in anywhere:
        return anywhere[key]
    for names in (here, anywhere):
        for close in difflib.get_close_matches(key, names, n=1, cutoff=0.6):
            return names[close]
    return None


def _dotted(kind: type, prefix: str) -> typing.Iterator[str]:
    for name, hint in typing.get_type_hints(kind).items():
        yield prefix + name
        if dataclasses.is_dataclass(hint):
            yield from _dotted(typing.cast(type, hint), f"{prefix}{name}.")
