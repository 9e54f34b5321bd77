"""The manifest: what it reads from a model, what its file refuses, where two differ, and the gates."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, tie_weights
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.processors import Suppress
from vocab_parallel.decode.transforms.warpers import Temperature, TopP
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations import fsdp
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import (
    LossContract,
    Manifest,
    PolicyContract,
    RandomnessContract,
    TensorSpec,
    compare,
    require_comparable,
    require_loadable,
)
from vocab_parallel.vocabulary.manifest.comparison import show
from vocab_parallel.vocabulary.manifest.manifest import vocabulary_of
from vocab_parallel.vocabulary.manifest.rules import RULES

V, D = 9, 4
TOKENS = VocabIdentity.of_tokens([f"t{at}" for at in range(V)], special_ids={"bos": 1, "eos": 2}, added=[8, 7])
POLICY = Policy((Suppress((3,)), Temperature(0.8), TopP(0.9)), vocab_size=V, name="usual")


class Model(nn.Module):
    def __init__(
        self, shard: VocabShard, *, tie: bool = True, bias: bool = True, wide: int = D, **options: Any
    ) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(D, shard=shard, **options)
        self.trunk = nn.Linear(wide, wide, **options)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(5), persistent=False)
        projection = nn.Linear(wide, D, bias=False, **options) if wide != D else None
        self.lm_head = VocabParallelLMHead(D, shard=shard, bias=bias, projection=projection, **options)
        if tie:
            tie_weights(self.embedding, self.lm_head)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(self.trunk(self.embedding(ids)))
        return found


def shard(tp: int = 1, multiple_of: int = 4) -> VocabShard:
    return VocabShard(VocabLayout(V, tp, multiple_of=multiple_of), dist.group.WORLD if tp > 1 else None)


def of(**options: Any) -> Manifest:
    return Manifest.of(Model(shard(), **options))


def full(**changes: Any) -> Manifest:
    made = Manifest.of(
        Model(shard()), identity=TOKENS, loss={"label_smoothing": 0.1}, policy=PolicyContract.of(POLICY, [2]),
        randomness=RandomnessContract(seed=2**64 - 1), step=7, host="plain", notes={"corpus": {"x": [1.5]}},
    )  # fmt: skip
    return replaced(made, changes)


def replaced(manifest: Manifest, changes: dict[str, Any]) -> Manifest:
    """With dotted fields changed; group by group, so that a change of several fields is checked once."""
    groups: dict[str, dict[str, Any]] = {}
    for field, value in changes.items():
        group, _, name = field.partition("__")
        groups.setdefault(group, {})[name] = value
    parts = {
        group: values[""] if "" in values else dataclasses.replace(getattr(manifest, group), **values)
        for group, values in groups.items()
    }
    return dataclasses.replace(manifest, **parts)


# What a model tells.


def test_a_model_tells_head_ties_tensors_and_shards() -> None:
    found = of()
    head, checkpoint = found.head, found.checkpoint
    assert (head.embedding_key, head.head_key, head.bias_key) == ("embedding.weight", "lm_head.weight", "lm_head.bias")
    assert (head.width, head.output_width, head.bias, head.projection) == (D, V, True, None)
    assert (head.parameter_dtype, head.accumulation_dtype) == ("float32", "float32")
    assert found.tying.tied and found.tying.aliases == {"lm_head.weight": "embedding.weight"}
    assert checkpoint is not None and (checkpoint.padded_size, checkpoint.shard_ranges) == (12, ((0, 9),))
    assert checkpoint.tensors == {  # real rows; no key for the alias, none for what a state_dict leaves out
        "model.embedding.weight": TensorSpec("float32", (V, D)), "model.trunk.weight": TensorSpec("float32", (D, D)),
        "model.trunk.bias": TensorSpec("float32", (D,)), "model.lm_head.bias": TensorSpec("float32", (V,)),
        "model.scale": TensorSpec("float32", (3,)),
    }  # fmt: skip
    assert found.loss is found.policy is found.randomness is None and found.vocabulary.ordered_table_sha256 is None
    assert found.runtime.versions["torch"] == torch.__version__ and found.runtime.kernels == "torch"


def test_an_untied_model_without_bias_in_another_dtype_and_width_is_told_apart() -> None:
    found = of(tie=False, bias=False, wide=6, dtype=torch.bfloat16)
    assert not found.tying.tied and found.tying.restoration == "separate Parameters" and not found.tying.aliases
    assert (found.head.bias, found.head.bias_key, found.head.parameter_dtype) == (False, None, "bfloat16")
    assert found.head.projection == "Linear(in_features=6, out_features=4, bias=False)"
    assert found.checkpoint is not None and found.checkpoint.tensors["model.lm_head.weight"] == ("bfloat16", (V, D))
    assert of(dtype=torch.float64).head.accumulation_dtype == "float64"


def test_wrappers_a_configuration_and_partitions_of_zero_3_are_looked_through() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    class Settings:
        final_logit_softcapping, logits_scaling = 30, 8.0

    model = Model(shard())
    assert Manifest.of(Wrapper(Wrapper(model))) == Manifest.of(model)
    for name, part in list(model.named_children()):  # what torch.compile and activation checkpoints leave of names
        wrapped = nn.Module()
        wrapped._orig_mod = nn.ModuleDict({"_checkpoint_wrapped_module": part})
        setattr(model, name, wrapped)
    assert Manifest.of(model).to_json() == of().to_json()
    model = Model(shard())
    for parameter in model.parameters():  # as ZeRO-3 leaves them between forwards
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert Manifest.of(model).to_json() == of().to_json()
    model.config = Settings()
    assert (Manifest.of(model).head.softcap, Manifest.of(model).head.scale) == (30.0, 0.125)


def test_a_model_of_more_than_text_tells_the_logits_of_its_text_part() -> None:
    class Part:
        final_logit_softcapping, logit_scale, lm_head_multiplier, logits_scaling = 30, None, 0.5, 4.0

    class Settings:
        def get_text_config(self) -> type[Part]:
            return Part

    model = Model(shard())
    model.config = Settings()
    head = Manifest.of(model).head
    assert (head.softcap, head.scale) == (30.0, 0.125)
    Part.logits_scaling = float("nan")
    with pytest.raises(CheckpointLayoutError, match="logits_scaling: expected a positive number, got nan"):
        Manifest.of(model)


def test_a_model_with_one_end_of_the_vocabulary_tells_that_end() -> None:
    ends = {"embedding": VocabParallelEmbedding(D, shard=shard()), "head": VocabParallelLMHead(D, shard=shard())}
    heads = {name: Manifest.of(nn.ModuleDict({name: module})).head for name, module in ends.items()}
    assert (heads["embedding"].embedding_key, heads["embedding"].head_key) == ("embedding.weight", None)
    assert (heads["head"].embedding_key, heads["head"].head_key) == (None, "head.weight")
    with pytest.raises(CheckpointLayoutError, match=r"Linear has no vocabulary-sharded.*integrations\.<host>\.apply"):
        Manifest.of(nn.Linear(2, 2))


def test_a_model_with_two_vocabularies_tells_that_of_its_head() -> None:
    decoder = Model(VocabShard(VocabLayout(12, 1)), tie=False)
    found = Manifest.of(nn.ModuleDict({"encoder": VocabParallelEmbedding(D, shard=shard()), "decoder": decoder}))
    assert (found.vocabulary.size, found.head.embedding_key) == (12, "decoder.embedding.weight")
    assert found.checkpoint is not None and found.checkpoint.tensors["model.encoder.weight"].shape == (V, D)


def test_an_identity_fills_the_vocabulary_and_must_fit_the_rows() -> None:
    found = Manifest.of(Model(shard()), identity=TOKENS).vocabulary
    assert (found.ordered_table_sha256, found.special_ids, found.added) == (TOKENS.sha256, {"bos": 1, "eos": 2}, (8, 7))
    with pytest.raises(CheckpointLayoutError, match=r"has 10 tokens, the model 9 rows: ids \[9, 10\).*migrate"):
        Manifest.of(Model(shard()), identity=TOKENS.resized(10))
    with pytest.raises(CheckpointLayoutError, match="that of the identity is"):
        Manifest.of(Model(shard()), identity=TOKENS, vocabulary_sha256="0" * 64)


def told_by_ranks(rank: int) -> list[str]:
    texts = [Manifest.of(Model(shard(4, multiple_of=1))).to_text()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    halves = VocabShard(VocabLayout(V, 2, multiple_of=1), mesh.get_group("tp"))
    model = Model(halves)
    texts.append(Manifest.of(model).to_text())
    fsdp.apply(model, mesh, shard=halves)
    return [*texts, Manifest.of(model).to_text()]


def test_every_rank_tells_the_same_at_any_number_of_ranks_and_under_fsdp() -> None:
    four = run_ranks(told_by_ranks, 4)
    assert all(found == four[0] for found in four)
    uneven, halves, sharded = four[0]
    assert json.loads(uneven)["checkpoint"]["shard_ranges"] == [[0, 3], [3, 6], [6, 9], [9, 9]]
    assert halves == sharded  # of whole shapes, whatever holds them
    differences = compare(Manifest.from_json(json.loads(halves)), of())
    assert {one.field for one in differences} == {
        "checkpoint.padded_size", "checkpoint.tp_size", "checkpoint.shard_ranges"
    }  # fmt: skip
    assert {one.kind for one in differences} == {"may tune"}


# Files.


def test_a_file_gives_the_manifest_back_and_the_same_bytes(tmp_path: Path) -> None:
    made = full()
    assert made.write(tmp_path) == tmp_path / "manifest.json" and Manifest.read(tmp_path) == made
    assert (
        Manifest.read(tmp_path).write(tmp_path / "again.json").read_bytes() == (tmp_path / "manifest.json").read_bytes()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.json", "manifest.json"]
    assert '"model.embedding.weight": ["float32", [9, 4]]' in (tmp_path / "manifest.json").read_text()
    assert made.policy is not None and Policy.from_dict(made.policy.policy_dict()).digest == POLICY.digest


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def make(data: dict[str, Any]) -> None:
        *groups, last = path.split(".")
        for group in groups:
            data = data[group]
        if value is REMOVED:
            del data[last]
        else:
            data[last] = value

    return make


REMOVED = "(the field is removed)"
DEEP: Any = []
for _ in range(50):
    DEEP = [DEEP]
WRONG = [
    ("version", 2, ["version 2", "expected a manifest (version 1"]),
    ("version", "1", ["version '1'"]),
    ("version", REMOVED, ["version None", "another file"]),
    ("headd", {}, ["unknown key headd; did you mean head?"]),
    ("head.widht", 4, ["unknown key head.widht; did you mean width?"]),
    ("head.width", REMOVED, ["head.width is missing: expected a whole number"]),
    ("head.width", 4.0, ["head.width: expected a whole number, got 4.0"]),
    ("head.width", True, ["head.width: expected a whole number, got True"]),
    ("head.width", 0, ["head.width: expected at least 1, got 0"]),
    ("head.width", 2**64, ["head.width", "at most 64 bits"]),
    ("head.output_width", 10, ["head.output_width: expected vocabulary.size 9, got 10"]),
    ("head.bias", "yes", ["head.bias: expected true or false, got 'yes'"]),
    ("head.bias", False, ["head.bias: expected true exactly with a bias_key"]),
    ("head.storage", "[D, V]", ["head.storage: expected one of", "[width, vocab_size]"]),
    ("head", [1], ["head: expected an object, got a list of 1"]),
    ("vocabulary.size", -9, ["vocabulary.size: expected at least 1, got -9"]),
    ("vocabulary.ordered_table_sha256", "abc", ["64 hexadecimal digits, got 'abc'"]),
    ("vocabulary.special_ids", {"bos": 9}, ["vocabulary.special_ids: expected ids in [0, 9), got 9"]),
    ("vocabulary.special_ids", {"bos": "1"}, ["vocabulary.special_ids.bos: expected a whole number, got '1'"]),
    ("vocabulary.added", [1, -1], ["vocabulary.added: expected ids in [0, 9), got -1"]),
    ("vocabulary.added", [0] * (2**20 + 1), ["vocabulary.added: expected at most 1,048,576 entries"]),
    ("vocabulary.source", "x" * 70_000, ["vocabulary.source: expected at most 65,536 characters"]),
    ("tying.tied", False, ["tying.restoration: expected \"separate Parameters\""]),
    ("loss.smoothing_over", "rest", ['loss.smoothing_over: expected one of "all", "others", got \'rest\'']),
    ("loss.label_smoothing", 1.5, ["loss.label_smoothing: expected in [0, 1], got 1.5"]),
    ("loss.z_loss", None, ["loss.z_loss: expected a number, got nothing"]),
    ("loss.temperature", 0, ["loss.temperature: expected above 0"]),
    ("policy.transforms", [{"p": 1}], ["policy.transforms[0].name: expected text, got None"]),
    ("policy.stop_ids", [9], ["policy.stop_ids: expected ids in [0, 9), got 9"]),
    ("policy.vocab_size", 8, ["policy.vocab_size: expected 9, got 8"]),
    ("policy.fallback", 3, ["policy.fallback: expected text or an object, got 3"]),
    ("randomness.seed", 0.5, ["randomness.seed: expected a whole number"]),
    ("checkpoint.tp_size", 0, ["checkpoint.tp_size: expected in [1, 2**20], got 0"]),
    ("checkpoint.padded_size", 8, ["checkpoint.padded_size: expected at least 9"]),
    ("checkpoint.shard_ranges", [[0, 8]], ["checkpoint.shard_ranges[0]: expected [0, 9], got [0, 8]"]),
    ("checkpoint.shard_ranges", [[0, 9], [9, 9]], ["checkpoint.shard_ranges: expected one for each of 1 ranks"]),
    ("checkpoint.shard_ranges", [[0, 9, 9]], ["checkpoint.shard_ranges[0]: expected a list of 2 values, got 3"]),
    ("checkpoint.tensors", {"w": ["float32", [-1]]}, ["checkpoint.tensors.w: expected sizes of at least 0"]),
    ("checkpoint.tensors", {"w": ["float32"]}, ["checkpoint.tensors.w: expected a list of 2 values, got 1"]),
    ("checkpoint.step", -1, ["checkpoint.step: expected null or at least 0, got -1"]),
    ("runtime.versions", {"torch": 2.1}, ["runtime.versions.torch: expected text, got 2.1"]),
    ("notes", {"deep": DEEP}, ["notes.deep", "more than 32 levels deep"]),
    ("notes", {"a\x1b[2J": 1}, ["notes: the key 'a\\x1b[2J' cannot be printed"]),
    ("a\nb", 1, ["the top: the key 'a\\nb' cannot be printed"]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "words"), WRONG, ids=lambda one: str(one)[:30])
def test_a_file_with_a_wrong_field_is_refused_by_name(path: str, value: Any, words: list[str], tmp_path: Path) -> None:
    data = full().to_json()
    change(path, value)(data)
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(data))
    with pytest.raises(CheckpointLayoutError) as caught:
        Manifest.read(file)
    message = str(caught.value)
    assert str(file) in message and len(message) < 800
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "Expecting value"), (b"\xff{}", "not UTF-8 at byte 0"),
        (b"[]", "expected a JSON object, got a list of 0"),
        (b'{"version": 1', "delimiter"), (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b'{"notes": NaN}', "NaN is not a JSON number"), (b'{"notes": -Infinity}', "-Infinity is not"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b"[" * (2**20 + 1), "more than 1,048,576 lists and objects"),
    ],
    ids=lambda one: str(one)[:20],
)  # fmt: skip
def test_a_file_that_is_no_manifest_is_refused(text: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_bytes(text)
    with pytest.raises(CheckpointLayoutError) as caught:
        Manifest.read(file)
    assert words in str(caught.value) and str(file) in str(caught.value)


def test_a_number_beyond_float_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text(full().to_text().replace('"z_loss": 0.0', '"z_loss": 1e999'))
    with pytest.raises(CheckpointLayoutError, match=r"loss\.z_loss: expected a finite number, got inf"):
        Manifest.read(file)
    file.write_text(full().to_text().replace('"width": 4', '"width": 1' + "0" * 5000))
    with pytest.raises(CheckpointLayoutError, match="digits"):
        Manifest.read(file)
    with pytest.raises(CheckpointLayoutError, match=r"cannot read .*none\.json, expected a manifest.*No such file"):
        Manifest.read(tmp_path / "none.json")


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vocab_parallel.vocabulary.manifest.strict_json.MAX_ENTRIES", 30)
    assert of().write(tmp_path).is_file()
    with pytest.raises(CheckpointLayoutError, match=r"could not be read: at most 134,217,728 and 30\. Are its notes"):
        replaced(of(), {"notes__": {"many": [[at] for at in range(30)]}}).write(tmp_path / "other.json")
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_key_that_stands_twice_among_many_is_found_at_once(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    file.write_text("{" + ",".join(f'"{at}":0' for at in [*range(100_000), 99_999]) + "}")
    with pytest.raises(CheckpointLayoutError, match="the key '99999' appears twice in one object"):
        Manifest.read(file)


def test_a_large_file_of_junk_allocates_next_to_nothing(tmp_path: Path) -> None:
    sizes = {"sparse.json": 2**27 + 1, "commas.json": 20 * 2**20}
    for name, size in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.write(b"{" if name == "sparse.json" else b'{"a": [' + b"0," * (size // 2))
            file.truncate(size)
    peaks = {}
    for name in sizes:
        tracemalloc.start()
        with pytest.raises(CheckpointLayoutError, match=r"more than 134,217,728 bytes|lists and objects"):
            Manifest.read(tmp_path / name)
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks["sparse.json"] < 2**20 and peaks["commas.json"] < 1.2 * sizes["commas.json"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_a_field_holds_the_reader_gives_a_manifest_or_its_own_error(data: st.DataObject) -> None:
    whole = full().to_json()
    group = data.draw(st.sampled_from(sorted(whole)))
    inner = whole[group] if isinstance(whole[group], dict) else None
    target = inner if inner and data.draw(st.booleans()) else whole
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    try:
        made = Manifest.from_json(whole)
    except CheckpointLayoutError:
        return
    assert Manifest.from_json(json.loads(made.to_text())) == made


def test_what_no_json_can_hold_is_refused_when_it_is_given() -> None:
    with pytest.raises(CheckpointLayoutError, match=r"notes\.loss: expected a finite number, got nan"):
        full(notes__={"loss": float("nan")})
    with pytest.raises(CheckpointLayoutError, match=r"notes: expected text, got 3"):
        full(notes__={3: 1})
    with pytest.raises(CheckpointLayoutError, match=r"unknown key loss\.smoothing; did you mean smoothing_over"):
        Manifest.of(Model(shard()), loss={"smoothing": 0.1})


# Differences.


def leaves(kind: Any, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        nested = [one for one in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(one)]
        yield from leaves(nested[0], f"{prefix}{field.name}.") if nested else [prefix + field.name]


def test_every_field_has_one_rule() -> None:
    assert sorted(rule.field for rule in RULES) == sorted(leaves(Manifest))
    assert all(rule.why for rule in RULES)
    assert all(rule.fix for rule in RULES if "load" in rule.gates)  # a refused load says what to do


MUST, TUNE, READ = "must match", "may tune", "informational"
# Changes, then the kind of the difference: for both purposes, to load, to compare.
CHANGES: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"head__width": 8}, "head.width", MUST, MUST, MUST),
    ({"head__bias": False, "head__bias_key": None}, "head.bias", MUST, MUST, MUST),
    ({"head__storage": "[width, vocab_size]"}, "head.storage", MUST, MUST, MUST),
    ({"head__softcap": 30.0}, "head.softcap", MUST, MUST, MUST),
    ({"head__projection": "Linear"}, "head.projection", MUST, MUST, MUST),
    ({"head__parameter_dtype": "bfloat16"}, "head.parameter_dtype", MUST, MUST, MUST),
    ({"head__accumulation_dtype": "float64"}, "head.accumulation_dtype", MUST, TUNE, MUST),
    ({"head__head_key": "output.weight"}, "head.head_key", MUST, MUST, TUNE),
    ({"vocabulary__ordered_table_sha256": "f" * 64}, "vocabulary.ordered_table_sha256", MUST, MUST, MUST),
    ({"vocabulary__added": (7, 8)}, "vocabulary.added", MUST, MUST, MUST),
    ({"vocabulary__special_ids": {"bos": 1, "eos": 3}}, "vocabulary.special_ids.eos", MUST, MUST, MUST),
    ({"vocabulary__special_ids": {"bos": 1, "eos": 2, "pad": 2}}, "vocabulary.special_ids.pad", TUNE, TUNE, TUNE),
    ({"vocabulary__source": "tekken"}, "vocabulary.source", READ, READ, READ),
    ({"tying__tied": False, "tying__aliases": {}, "tying__restoration": ""}, "tying.tied", MUST, MUST, MUST),
    ({"loss__smoothing_over": "others"}, "loss.smoothing_over", MUST, TUNE, MUST),
    ({"loss__label_smoothing": 0.2}, "loss.label_smoothing", MUST, TUNE, MUST),
    ({"loss__score_type": "probabilities"}, "loss.score_type", MUST, TUNE, MUST),
    ({"loss__ignore_index": 0}, "loss.ignore_index", MUST, TUNE, MUST),
    ({"loss__z_loss": 1e-4}, "loss.z_loss", MUST, TUNE, MUST),
    ({"loss__reduction": "sum"}, "loss.reduction", MUST, TUNE, MUST),
    ({"loss__vocabulary_sharded": False}, "loss.vocabulary_sharded", TUNE, TUNE, TUNE),
    ({"policy__selector": "greedy"}, "policy.selector", MUST, TUNE, MUST),
    ({"policy__stop_ids": (2, 3)}, "policy.stop_ids", MUST, TUNE, MUST),
    ({"policy__logprobs": "raw"}, "policy.logprobs", MUST, TUNE, MUST),
    ({"policy__name": "other"}, "policy.name", READ, READ, READ),
    ({"randomness__algorithm": "mt19937"}, "randomness.algorithm", MUST, TUNE, MUST),
    ({"randomness__draw_contract": "one uniform per row"}, "randomness.draw_contract", MUST, TUNE, MUST),
    ({"randomness__seed": 3}, "randomness.seed", TUNE, TUNE, TUNE),
    ({"checkpoint__padded_size": 9}, "checkpoint.padded_size", TUNE, TUNE, TUNE),
    ({"checkpoint__step": 9}, "checkpoint.step", READ, READ, READ),
    ({"checkpoint__format": "other 1"}, "checkpoint.format", MUST, MUST, TUNE),
    ({"runtime__device": "cuda"}, "runtime.device", READ, READ, READ),
    ({"runtime__versions": {"python": "3.9"}}, "runtime.versions.python", READ, READ, READ),
    ({"notes__": {"corpus": 1}}, "notes.corpus", READ, READ, READ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field", "both", "load", "compared"), CHANGES, ids=lambda one: str(one)[:40])
def test_a_changed_field_is_a_difference_of_its_kind(
    changes: dict[str, Any], field: str, both: str, load: str, compared: str
) -> None:
    a, b = full(), full(**changes)
    for purpose, kind in ((None, both), ("load", load), ("compare", compared)):
        found = {one.field: one for one in compare(a, b, purpose)}
        assert found[field].kind == kind and found[field].why
        back = {one.field: one for one in compare(b, a, purpose)}
        assert (back[field].kind, back[field].a, back[field].b) == (kind, found[field].b, found[field].a)
    gates = [(lambda: require_loadable(a, b, where="here"), load), (lambda: require_comparable(a, b), compared)]
    for gate, kind in gates:
        if kind == MUST:
            with pytest.raises(CheckpointLayoutError, match=field.replace(".", r"\.").replace("[", r"\[")):
                gate()
        else:
            gate()


def test_equal_manifests_have_no_difference() -> None:
    assert compare(full(), full()) == []
    require_comparable(full(), full())


def test_the_order_of_a_policy_must_match_and_its_numbers_may_be_tuned() -> None:
    def policy(*transforms: Any) -> Manifest:
        return full(policy__=PolicyContract.of(Policy(transforms, vocab_size=V)))

    usual = policy(Suppress((3,)), Temperature(0.8), TopP(0.9))
    kinds = {
        "swapped": compare(usual, policy(Suppress((3,)), TopP(0.9), Temperature(0.8))),
        "warmer": compare(usual, policy(Suppress((3,)), Temperature(1.2), TopP(0.9))),
        "other ids": compare(usual, policy(Suppress((4,)), Temperature(0.8), TopP(0.9))),
        "shorter": compare(usual, policy(Temperature(0.8), TopP(0.9))),
    }
    found = {name: [(one.field, one.kind) for one in differences] for name, differences in kinds.items()}
    assert found == {
        "swapped": [("policy.transforms", MUST)], "warmer": [("policy.transforms[1].temperature", TUNE)],
        "other ids": [("policy.transforms[0].token_ids", MUST)], "shorter": [("policy.transforms", MUST)],
    }  # fmt: skip


def test_what_one_side_has_not_recorded_is_never_a_reason_to_refuse() -> None:
    bare = of()
    require_loadable(full(), bare, where="here")
    require_comparable(full(), bare)
    unknown = {one.field: one for one in compare(full(), bare)}
    assert unknown["vocabulary.ordered_table_sha256"].kind == READ
    assert "not recorded" in unknown["vocabulary.ordered_table_sha256"].why
    assert not any(one.field.startswith(("loss", "policy", "randomness")) for one in compare(full(), bare))


def test_a_checkpoint_without_optimizer_state_loads_and_one_without_a_weight_does_not() -> None:
    def holding(more: dict[str, TensorSpec]) -> Manifest:
        made = full()
        assert made.checkpoint is not None
        return full(checkpoint__tensors={**made.checkpoint.tensors, **more})

    moments = holding({"optimizer.embedding.weight.exp_avg": TensorSpec("float32", (V, D))})
    require_loadable(moments, full(), where="here")
    require_loadable(full(), moments, where="here")
    with pytest.raises(CheckpointLayoutError, match=r"checkpoint\.tensors\.model\.extra is none saved, float32 \[2\]"):
        require_loadable(full(), holding({"model.extra": TensorSpec("float32", (2,))}), where="here")


# Gates.


def test_another_vocabulary_is_refused_with_both_hashes_and_the_command_that_moves_rows() -> None:
    swapped = VocabIdentity.of_tokens(
        [f"t{at}" for at in (0, 1, 2, 4, 3, 5, 6, 7, 8)], special_ids={"bos": 1, "eos": 2}, added=[8, 7]
    )
    with pytest.raises(CheckpointLayoutError) as caught:
        require_loadable(full(), Manifest.of(Model(shard()), identity=swapped), where="runs/a/step-00000007")
    message = str(caught.value)
    assert TOKENS.sha256[:16] in message and swapped.sha256[:16] in message
    assert "correct numbers attached to wrong symbols" in message
    assert "python -m vocab_parallel migrate runs/a/step-00000007 <target> --old-vocab" in message


def test_another_size_is_one_cause_and_not_one_line_for_each_tensor() -> None:
    other = Manifest.of(Model(VocabShard(VocabLayout(12, 1, multiple_of=4))))
    with pytest.raises(CheckpointLayoutError) as caught:
        require_loadable(of(), other, where="runs/a")
    message = str(caught.value)
    assert "vocabulary.size is 9 saved, 12 here" in message and "migrate runs/a" in message
    assert "checkpoint.tensors" not in message and "more" not in message and "output_width" not in message


def test_another_tie_is_refused_with_the_option_that_loads_it_and_passes_a_loader_that_has_it() -> None:
    for saved, here in ((of(), of(tie=False)), (of(tie=False), of())):
        with pytest.raises(CheckpointLayoutError) as caught:
            require_loadable(saved, here, where="runs/a")
        message = str(caught.value)
        assert "tying.tied is " in message and message.count("tying.") == 1 and "checkpoint.tensors" not in message
        assert 'tie="untie"' in message and 'tie="require_equal"' in message
        require_loadable(saved, here, where="runs/a", retie=True)
    with pytest.raises(CheckpointLayoutError, match=r"head\.bias is true saved, false here"):
        require_loadable(of(), of(tie=False, bias=False), where="runs/a", retie=True)


def test_another_dtype_is_refused_with_the_option_that_casts() -> None:
    with pytest.raises(CheckpointLayoutError, match=r"parameter_dtype is float32 saved, bfloat16 here.*cast=True"):
        require_loadable(of(), of(dtype=torch.bfloat16), where="runs/a")


def test_another_width_says_that_no_command_helps() -> None:
    other = replaced(of(), {"head__width": 8})
    with pytest.raises(CheckpointLayoutError, match=r"head\.width is 4 saved, 8 here.*No command changes a width"):
        require_loadable(of(), other, where="runs/a")


def test_what_follows_from_a_difference_is_counted_and_not_spelled_out() -> None:
    with pytest.raises(CheckpointLayoutError) as caught:
        require_loadable(of(bias=False), of(), where="runs/a")
    message = str(caught.value)
    assert "head.bias is false saved, true here" in message and "; and 1 of the tensors. Build the model" in message
    assert "bias_key" not in message and "checkpoint.tensors" not in message
    assert "python -m vocab_parallel manifest show runs/a tells how" in message


def test_runs_are_compared_by_their_loss_contract_with_both_names() -> None:
    other = full(loss__smoothing_over="others")
    with pytest.raises(CheckpointLayoutError) as caught:
        require_comparable(full(), other, names=("runs/a", "runs/b"))
    message = str(caught.value)
    assert message.startswith("runs/a and runs/b cannot be compared: loss.smoothing_over is all runs/a, others runs/b")
    require_loadable(full(), other, where="runs/a")  # it changes no weight


def test_many_differences_end_in_a_count() -> None:
    other = full(
        loss__=LossContract(score_type="probabilities", reduction="sum", ignore_index=0, z_loss=1.0, unit="bits")
    )
    with pytest.raises(CheckpointLayoutError, match=r"; and 2 more\. Run both"):
        require_comparable(full(), other)


# Without a model, and after a move.


def test_a_checkpoint_without_a_model_has_the_manifest_of_its_model() -> None:
    for options, tables, ties in (
        ({}, ["embedding.weight", "lm_head.bias"], {"lm_head.weight": "embedding.weight"}),
        ({"tie": False}, ["embedding.weight", "lm_head.weight", "lm_head.bias"], {}),
    ):
        want = of(**options)
        assert want.checkpoint is not None
        found = Manifest.of_tensors(
            want.checkpoint.tensors, tables=tables, ties=ties, layout=VocabLayout(V, 1, multiple_of=4)
        )
        assert [one for one in compare(found, want) if one.kind == MUST] == []
        assert found.head == want.head and found.tying == want.tying


def test_a_moved_manifest_has_the_new_layout_and_of_another_vocabulary_no_policy() -> None:
    made = full()
    assert made.checkpoint is not None
    tensors = dict(made.checkpoint.tensors)
    moved = made.moved(tensors, VocabLayout(V, 2, multiple_of=1), step=7)
    assert moved.vocabulary == made.vocabulary and moved.policy == made.policy
    assert moved.checkpoint is not None and moved.checkpoint.shard_ranges == ((0, 5), (5, 9))
    require_loadable(moved, made, where="here")
    larger = vocabulary_of(12, TOKENS.resized(12), None)
    grown = made.moved(tensors, VocabLayout(12, 1, multiple_of=1), step=7, vocabulary=larger)
    assert (grown.vocabulary.size, grown.head.output_width, grown.policy) == (12, 12, None)
    assert grown.vocabulary.ordered_table_sha256 == TOKENS.resized(12).sha256 != TOKENS.sha256
    unknown = made.moved(tensors, VocabLayout(V, 1, multiple_of=1), vocabulary=vocabulary_of(V, None, None))
    assert unknown.vocabulary.ordered_table_sha256 is unknown.vocabulary.special_ids is unknown.policy is None


def test_values_are_shown_in_a_line() -> None:
    shown = [
        show(one) for one in (None, True, "a" * 64, {}, {"a": TensorSpec("int8", (2,))}, [1, [2]], list(range(99)))
    ]
    assert show("é \x1b[2J\ud800") == r"é \x1b[2J\ud800" and show(TensorSpec("\n", ())) == r"\n []"
    assert shown[:6] == ["none", "true", "a" * 16 + "…", "none", "a=int8 [2]", "[1, [2]]"] and len(shown[6]) == 101
