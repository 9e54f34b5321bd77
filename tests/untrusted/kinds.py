"""Every kind of file that the package reads: a small whole one, and what its reader makes of it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from tests.unit.releases import POLICY, TOKENS, checkpoint, identity_of, tokenizer_file
from vocab_parallel.app import config, decoding, runlog
from vocab_parallel.app.hosts import folder as host_folder
from vocab_parallel.app.plan.check import read_bench
from vocab_parallel.checkpoint.exchange.hugging_face_names import ModelConfig
from vocab_parallel.checkpoint.exchange.megatron import from_megatron
from vocab_parallel.checkpoint.exchange.safetensors_files import open_safetensors
from vocab_parallel.checkpoint.exchange.safetensors_writing import ToWrite, write_safetensors
from vocab_parallel.checkpoint.files import StoredTensors, open_checkpoint
from vocab_parallel.checkpoint.folders import checkpoints
from vocab_parallel.checkpoint.manifest_check import disagreements
from vocab_parallel.checkpoint.migration.assets import carried_assets
from vocab_parallel.checkpoint.release.history import History
from vocab_parallel.checkpoint.release.releases import open_current, promote
from vocab_parallel.decode.diagnostics.translator import Translator
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.integrations.deepspeed.notes import named_tag
from vocab_parallel.integrations.deepspeed.zero_files import ZeroFiles
from vocab_parallel.integrations.deepspeed.zero_tag import find_tag
from vocab_parallel.layout import VocabLayout
from vocab_parallel.select.streams import Streams
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary.formats import read_vocabulary
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        make: Makes a whole one in an empty folder, with what belongs to it; returns the file.
        read: What is made of it, from the file's path.
        form: Of its content: "json", "lines" of JSON, "yaml", or "" of bytes.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    form: str = ""


def _checkpoint(name: str) -> Callable[[Path], Path]:
    return lambda folder: checkpoint(folder / "step-00000003") / name


def _tensors(stored: StoredTensors) -> dict[str, Any]:
    return {key: stored.read(key) for key in stored.tensors}


def _read_checkpoint(path: Path) -> Any:
    stored = open_checkpoint(path.parent)
    assert checkpoints(path.parent.parent) == [path.parent]
    carried_assets(stored, VocabMap.append(stored.state["layout"]["vocab_size"], 1), None, None)
    return _tensors(stored)


def _written(name: str, content: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    return make


def _tekken() -> dict[str, Any]:
    vocab = [{"rank": at, "token_bytes": text, "token_str": None} for at, text in enumerate(["YQ==", "Yg==", "YWI="])]
    return {"config": {"default_vocab_size": 8, "default_num_special_tokens": 5, "pattern": "."}, "vocab": vocab}


def _safetensors(folder: Path) -> Path:
    tensors = {"e.weight": torch.arange(36.0).view(9, 4), "b": torch.arange(3), "s": torch.tensor(2.0)}
    made = {name: ToWrite(one.dtype, tuple(one.shape), lambda one=one: iter([one])) for name, one in tensors.items()}
    write_safetensors(folder, made, max_shard_bytes=10**9)
    return folder / "model.safetensors"


def _index(folder: Path) -> Path:
    _safetensors(folder).rename(folder / "model-1.safetensors")
    weights = dict.fromkeys(("e.weight", "b", "s"), "model-1.safetensors")
    return _written("model.safetensors.index.json", {"metadata": {"total_size": 172}, "weight_map": weights})(folder)


def _read_safetensors(path: Path) -> Any:
    files = open_safetensors(path.parent)
    return {name: files.read(name) for name in files.places}


def _zero(name: str) -> Callable[[Path], Path]:
    """The files of stage 3 of one rank, as DeepSpeed lays them out."""

    def make(folder: Path) -> Path:
        entry = {"vocab_size": 9, "padded_size": 10, "tp_size": 1, "row": [4], "trained": True}
        note = {"parameters": {"e.weight": entry}, "aliases": {"h.weight": "e.weight"}}
        (folder / "vocab_parallel.json").write_text(json.dumps(note))
        flat = torch.arange(40.0)
        model = {
            "module": {"e.weight": torch.empty(0)}, "buffer_names": [], "dp_world_size": 1, "mp_world_size": 1,
            "param_shapes": [{"e.weight": torch.Size([10, 4])}], "ds_config": {"zero_optimization": {"stage": 3}},
            "global_steps": 1,
        }  # fmt: skip
        torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
        states = {"state": {0: {"exp_avg": flat + 1, "step": 3}}, "param_groups": [{"params": [0]}]}
        content = {"optimizer_state_dict": {"fp32_flat_groups": [flat], "optimizer_state_dict": states}}
        torch.save(content, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        return folder / name

    return make


def _read_zero(path: Path) -> Any:
    files = ZeroFiles.open(find_tag(path.parent))
    cuts = {name: {None: files.weight(name), **files.states(name)} for name in files.names}
    found = {
        name: {state: cut.rows(0, min(9, cut.shape[0])) for state, cut in one.items()} for name, one in cuts.items()
    }
    return found, files.step, files.origin(), files.vocab_size


def _megatron(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        tensors = {"embedding.word_embeddings.weight": torch.arange(40.0).view(10, 4), "decoder.w": torch.arange(6.0)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(tensors, checkpoint_id=folder, no_dist=True)
        torch.save({"iteration": 7, "optimizer": {"step": 3}}, folder / "common.pt")
        return (
            _written("metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})(folder).parent
            / name
        )

    return make


def _read_megatron(path: Path) -> Any:
    target = path.parent.parent / "ours"
    return _tensors(open_checkpoint(from_megatron(path.parent, target, vocab_size=9)))


def _bundle(folder: Path) -> Path:
    source = checkpoint(folder / "step-00000003")
    promote(folder / "releases", source, tokenizer=tokenizer_file(folder / "tokenizer.json"), policy=POLICY, copy=True)
    bundle = open_current(folder / "releases").path
    bundle.chmod(0o755)
    (bundle / "bundle.json").chmod(0o644)
    return bundle / "bundle.json"


def _read_bundle(path: Path) -> Any:
    bundle = open_current(path.parent.parent)
    return bundle.record, bundle.policy


RUN = """\
name: small
parallel: {tp: 2, timeout_s: 4.5e+1}
data:
  paths: [a.txt, b]
model: &sizes {dim: 8, layers: 1, heads: 2}
train: {betas: [0.9, 0.95], lr: 1e-3, resume: null}
"""
TRANSFORMS = [
    {"name": "bias", "bias": {"3": 1.5}}, {"name": "suppress", "token_ids": [0]},
    {"name": "bad_words", "words": [[1, 2]]}, {"name": "no_repeat_ngram", "n": 2},
    {"name": "repetition_penalty", "penalty": 1.2},
    {"name": "fsm", "machine": {"regex": "[1-8]{2,5} (3|4 5)*"}, "eos_ids": [2]},
    {"name": "temperature", "temperature": 0.5}, {"name": "top_k", "k": 4}, {"name": "top_p", "p": 0.9},
    {"name": "min_p", "min_p": 0.01},
]  # fmt: skip
EDGES = {"edges": [[0, 1, 9, 1], [1, 2, 4, 0]], "states": 2, "accepting": [1], "start": 0}


def policy_of(transforms: list[dict[str, Any]]) -> dict[str, Any]:
    return POLICY | {"transforms": transforms}


def read_policy(path: Path) -> Any:
    """The policy, and one step of it."""
    found = decoding.load_policy(str(path), 9)
    logits = torch.arange(9.0).repeat(2, 1)
    shard = VocabShard(VocabLayout(9, 1, multiple_of=1), None)
    view = View.of([[3], [4, 5]])
    try:
        step = found.policy.step(logits, view, found.policy.start(2, Streams.of([1, 2])), shard=shard)
    except ValueError:  # nothing is left to choose from, and it says so
        return found.search, found.policy.to_dict()
    return found.search, found.policy.to_dict(), step.token_ids


def _metrics() -> str:
    row = {"step": 1, "loss": 2.5, "validation_loss": None, "bytes_sent": 100, "seconds": 0.1}
    return "".join(json.dumps({**row, "step": at}) + "\n" for at in range(1, 6))


def _translator(folder: Path) -> Path:
    Translator([0, 2], 4, norm_name="rms").save(folder / "translator.pt")
    return folder / "translator.pt"


def _read_translator(path: Path) -> Any:
    made: nn.Module = Translator.load(path)
    return made.state_dict()


def _history(folder: Path) -> Path:
    events = [{"action": "promote", "id": f"{at:016x}", "time": "t", "sha256": "ab"} for at in range(3)]
    return _written("history.jsonl", "".join(json.dumps(one) + "\n" for one in events))(folder)


def _map(folder: Path) -> Path:
    VocabMap.from_pairs(9, 12, [(0, 0), (1, 4), (2, 5), (8, 11)], sources={7: (1, 2)}, allow_drop=True).write(
        folder / "map.json"
    )
    return folder / "map.json"


def _manifest(folder: Path) -> Path:
    path = checkpoint(folder / "step-00000003") / "manifest.json"
    return path.rename(folder / "manifest.json")


def _identity(folder: Path) -> Path:
    identity_of().write(folder / "vocabulary.json")
    return folder / "vocabulary.json"


_BENCH = {"config": {"dtype": "float32"}, "points": [
    {"problem": {"tokens": 8, "hidden": 4, "vocab": 9, "ranks": 1}, "results": {"ours": {"best_s": 0.5}}}]}  # fmt: skip
_HOST = {"step": 3, "about": {"host": "deepspeed", "tp_size": 2}, "extra": {"vocabulary_sha256": "ab"}}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 9,
    "tie_word_embeddings": True,
    "text_config": {"vocab_size": 9},
}
_TIKTOKEN = "YQ== 0\nYg== 1\nYWI= 2\nYmE= 3\n"
_ZERO = "zero_pp_rank_0_mp_rank_00_{}_states.pt"

KINDS: dict[str, Kind] = {
    "state.json": Kind(_checkpoint("state.json"), _read_checkpoint, "json"),
    ".metadata": Kind(_checkpoint(".metadata"), _read_checkpoint),
    "a .distcp": Kind(_checkpoint("__0_0.distcp"), _read_checkpoint),
    "files of a checkpoint": Kind(_checkpoint("state.json"), lambda path: disagreements(path.parent), "json"),
    "manifest.json": Kind(_manifest, lambda path: Manifest.read(path), "json"),
    "vocabulary.json": Kind(_identity, lambda path: VocabIdentity.read(path), "json"),
    "tokenizer.json": Kind(lambda f: tokenizer_file(f / "tokenizer.json"), lambda path: read_vocabulary(path), "json"),
    "tekken.json": Kind(_written("tekken.json", _tekken()), lambda path: read_vocabulary(path), "json"),
    "a tiktoken table": Kind(_written("x.tiktoken", _TIKTOKEN), lambda path: read_vocabulary(path)),
    "a mapping file": Kind(_map, lambda path: VocabMap.read(path), "json"),
    "safetensors": Kind(_safetensors, _read_safetensors),
    "an index of safetensors": Kind(_index, _read_safetensors, "json"),
    "config.json": Kind(_written("config.json", _CONFIG), lambda path: ModelConfig.read(path).values, "json"),
    "bundle.json": Kind(_bundle, _read_bundle, "json"),
    "history.jsonl": Kind(_history, lambda path: History(path.parent).stack, "lines"),
    "a policy in JSON": Kind(_written("p.json", policy_of(TRANSFORMS)), read_policy, "json"),
    "a machine in JSON": Kind(
        _written("p.json", policy_of([{"name": "fsm", "machine": EDGES, "eos_ids": [2]}])), read_policy, "json"),
    "a policy in YAML": Kind(_written("p.yaml", policy_of(TRANSFORMS)), read_policy, "yaml"),
    "config.yaml": Kind(_written("config.yaml", RUN), lambda path: config.load(path), "yaml"),
    "metrics.jsonl": Kind(
        _written("metrics.jsonl", _metrics()), lambda path: runlog.read_metrics(path.parent), "lines"),
    "summary.json": Kind(
        _written("summary.json", {"steps": 3}), lambda path: runlog.read_json(path.parent, path.name), "json"),
    "host.json": Kind(_written("host.json", _HOST), lambda path: host_folder._read(path.parent), "json"),
    "bench.json": Kind(_written("bench.json", _BENCH), read_bench, "json"),
    "vocab_parallel.json": Kind(_zero("vocab_parallel.json"), _read_zero, "json"),
    "DeepSpeed's model states": Kind(_zero(_ZERO.format("model")), _read_zero),
    "DeepSpeed's optimizer states": Kind(_zero(_ZERO.format("optim")), _read_zero),
    "latest": Kind(_written("latest", "global_step3"), named_tag),
    "Megatron's metadata.json": Kind(_megatron("metadata.json"), _read_megatron, "json"),
    "Megatron's common.pt": Kind(_megatron("common.pt"), _read_megatron),
    "a translator": Kind(_translator, _read_translator),
}  # fmt: skip
assert len(TOKENS) == 9
