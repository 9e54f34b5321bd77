"""Megatron's distributed checkpoints to ours and back, from files that torch alone wrote in its layout."""

from __future__ import annotations

import argparse
import enum
import json
import pickle
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from tests.memory import added_memory
from vocab_parallel.checkpoint.exchange.megatron import from_megatron, to_megatron
from vocab_parallel.checkpoint.files import StoredTensors, open_checkpoint
from vocab_parallel.checkpoint.migration.migrating import migrate_checkpoint
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import Zeros

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WORDS, HEAD, BIAS = "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"
V, P, D = 11, 16, 4
CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def _tensors(*, tied: bool = True, prefix: str = "") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Any] = {f"{prefix}{WORDS}": torch.randn(P, D, generator=generator)}
    if not tied:
        made |= {f"{prefix}{HEAD}": torch.randn(P, D, generator=generator), f"{prefix}{BIAS}": torch.randn(P)}
    made[f"{prefix}decoder.layers.mlp.linear_fc1.weight"] = torch.randn(2, 6, D, generator=generator)
    return made


def _states(tensors: dict[str, Any], prefix: str = "", master: str = "") -> dict[str, Tensor]:
    states = {"exp_avg": 1.0, "exp_avg_sq": 2.0} | ({master: 3.0} if master else {})
    return {
        f"{prefix}optimizer.state.{s}.{name}": value + at for name, value in tensors.items() for s, at in states.items()
    }


def _write(folder: Path, tensors: dict[str, Any], common: dict[str, Any] | None = None, **config: Any) -> Path:
    """As `dist_checkpointing.save` lays a checkpoint out."""
    folder.mkdir(parents=True)
    save(dict(tensors), checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 7} if common is None else common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(CONFIG | config))
    return folder


@pytest.mark.parametrize("prefix", ["", "module."])
def test_real_rows_alone_are_taken_and_a_tied_weight_has_one_key(prefix: str, tmp_path: Path) -> None:
    tensors = _tensors(prefix=prefix)
    source = _write(tmp_path / "iter_0000007", tensors)
    stored = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=V, tp_size=2, multiple_of=1))
    stored.verify()
    assert stored.state["tables"] == [f"{prefix}{WORDS}"]
    assert stored.state["ties"] == {f"{prefix}{HEAD}": f"{prefix}{WORDS}"}
    assert stored.state["layout"] == {"vocab_size": V, "padded_size": 12, "tp_size": 2}
    assert stored.state["extra"]["megatron"]["padded_size"] == P
    assert stored.step == 7
    assert torch.equal(stored.read(f"model.{prefix}{WORDS}"), tensors[f"{prefix}{WORDS}"][:V])
    fc1 = f"{prefix}decoder.layers.mlp.linear_fc1.weight"
    assert torch.equal(stored.read(f"model.{fc1}"), tensors[fc1])
    assert set(stored.tensors) == {f"model.{name}" for name in tensors}
    manifest = Manifest.read(tmp_path / "ours")
    assert manifest.tying.tied
    assert manifest.vocabulary.size == V
    assert manifest.head.width == D


def test_an_untied_head_keeps_its_own_rows_and_bias(tmp_path: Path) -> None:
    tensors = _tensors(tied=False)
    stored = open_checkpoint(from_megatron(_write(tmp_path / "a", tensors), tmp_path / "ours", vocab_size=V))
    assert stored.state["tables"] == [WORDS, HEAD, BIAS]
    assert stored.state["ties"] == {}
    for name in (WORDS, HEAD, BIAS):
        assert torch.equal(stored.read(f"model.{name}"), tensors[name][:V])


@pytest.mark.parametrize("prefix", ["", "chained_0."])
@pytest.mark.parametrize("master", ["", "fp32_param", "param"])
def test_optimizer_state_by_parameter_is_taken_with_masters_and_steps(
    master: str, prefix: str, tmp_path: Path
) -> None:  # fmt: skip
    tensors = _tensors()
    states = _states(tensors, prefix, master)
    common = {"optimizer": {"optimizer": {"state": {"common_step": torch.tensor(5.0)}}, "param_groups": [{"lr": 1.0}]}}
    source = _write(tmp_path / "iter_0000009", {**tensors, **states}, common)
    stored = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=V))
    assert stored.step == 9
    for name, value in tensors.items():
        rows = V if name == WORDS else None
        kept = {"exp_avg": 1.0, "exp_avg_sq": 2.0} | ({"master_weight": 3.0} if master else {})
        for state, at in kept.items():
            assert torch.equal(stored.read(f"optimizer.{name}.{state}"), (value + at)[:rows])
        assert torch.equal(stored.read(f"optimizer.{name}.step"), torch.tensor(5.0))
    assert len(stored.tensors) == len(tensors) * (4 + bool(master))


@pytest.mark.parametrize(
    ("common", "wanted"),
    [
        ({"param_groups": [{"step": 3}, {"step": 3}]}, 3.0),
        ({"param_groups": [{"step": 3}, {"step": 4}]}, None),
        ({"step": torch.ones(2), "common_step": -1, "also": {"step": 10**400}}, None),
        ({}, None),
    ],
)
def test_steps_are_taken_only_where_the_checkpoint_says_one(common: Any, wanted: float | None, tmp_path: Path) -> None:
    tensors = _tensors()
    source = _write(tmp_path / "a", {**tensors, **_states(tensors)}, {"optimizer": common})
    stored = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=V))
    key = f"optimizer.{WORDS}.step"
    assert (float(stored.read(key)) if key in stored.tensors else None) == wanted


def test_weights_alone_are_taken_when_asked(tmp_path: Path) -> None:
    tensors = _tensors()
    source = _write(tmp_path / "a", {**tensors, "optimizer.distributed.gbuf_idx_0.bucket_idx_0.param": torch.ones(9)})
    stored = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=V, optimizer=False))
    assert set(stored.tensors) == {f"model.{name}" for name in tensors}


def test_there_and_back_is_bit_equal_with_objects_and_common_state(tmp_path: Path) -> None:
    tensors = _tensors(tied=False) | {
        "decoder.counts": torch.tensor([2**53 + 1, -1]), "decoder.half": torch.randn(3, 5).bfloat16(),
        "decoder.scalar": torch.tensor(3.5), "decoder.empty": torch.empty(0, 3),
        "decoder.bytes": torch.arange(5).byte(),
    }  # fmt: skip
    states = _states({name: tensors[name] for name in (WORDS, HEAD, BIAS)}, "", "fp32_param")
    objects = {"decoder.layers._extra_state/shard_0_1": "amax 1 2", "rng_state/shard_0_1": b"seven"}
    source = _write(tmp_path / "a", {**tensors, **states, **objects})
    ours = from_megatron(source, tmp_path / "ours", vocab_size=V, tp_size=3, multiple_of=1)
    back, before = StoredTensors(to_megatron(ours, tmp_path / "back")), StoredTensors(source)
    assert back.tensors == before.tensors
    assert set(back.metadata.state_dict_metadata) == set(before.metadata.state_dict_metadata)
    for key in before.tensors:
        one, two = before.read(key), back.read(key)
        if len(one.shape) and one.shape[0] == P:
            assert torch.equal(one[:V], two[:V])
            assert not two[V:].any()
        else:
            assert torch.equal(one, two), key
    for key in objects:
        assert _raw(before, key) == _raw(back, key)
    assert (back.path / "common.pt").read_bytes() == (source / "common.pt").read_bytes()
    assert json.loads((back.path / "metadata.json").read_text()) == CONFIG | {
        "common_backend": "torch", "common_backend_version": 1
    }  # fmt: skip


def _cut_by_columns(whole: Tensor, width: int) -> Rows:
    """As Megatron saves a weight that tensor-parallel ranks have columns of."""
    made: Any = Rows.of(whole, 0, len(whole))
    starts = range(0, whole.shape[1], width)

    def items(name: str, value: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=whole.dtype)
        chunks = [ChunkStorageMetadata(torch.Size([0, at]), torch.Size([len(whole), width])) for at in starts]
        data = [TensorWriteData(chunk=chunk, properties=properties, size=whole.size()) for chunk in chunks]
        return [WriteItem(MetadataIndex(name, one.chunk.offsets), WriteItemType.SHARD, tensor_data=one) for one in data]

    made.__create_write_items__ = items
    made.__get_tensor_shard__ = lambda index: whole[:, index.offset[1] : index.offset[1] + width].contiguous()
    result: Rows = made
    return result


def test_a_weight_that_is_cut_by_columns_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(37, 12).bfloat16()
    source = _write(tmp_path / "a", {**_tensors(), "decoder.linear_fc2.weight": _cut_by_columns(whole, 4)})
    stored = StoredTensors(source)
    assert [piece.offsets for piece in stored.pieces["decoder.linear_fc2.weight"]] == [(0, 0), (0, 4), (0, 8)]
    monkeypatch.setattr(StoredTensors, "_load", None)  # which reads a block whole
    rows = torch.tensor([5, 6, 30, 0])
    assert torch.equal(stored.rows_of("decoder.linear_fc2.weight", rows), whole[rows])
    assert torch.equal(stored.read("decoder.linear_fc2.weight", 3, 33), whole[3:33])
    ours = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=V))
    assert torch.equal(ours.read("model.decoder.linear_fc2.weight"), whole)


def _raw(stored: StoredTensors, key: str) -> bytes:
    (info,) = (info for index, info in stored.metadata.storage_data.items() if index.fqn == key)
    return (stored.path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]


@pytest.mark.parametrize("padded", [V, 12, 40])
def test_tables_are_padded_to_the_size_asked_for(padded: int, tmp_path: Path) -> None:
    tensors = _tensors()
    source = _write(tmp_path / "a", {**tensors, **_states(tensors)})
    ours = from_megatron(source, tmp_path / "ours", vocab_size=V)
    back = StoredTensors(to_megatron(ours, tmp_path / "back", padded_size=padded))
    for key, at in ((WORDS, 0.0), (f"optimizer.state.exp_avg.{WORDS}", 1.0)):
        table = back.read(key)
        assert table.shape == (padded, D)
        assert torch.equal(table[:V], tensors[WORDS][:V] + at)
        assert not table[V:].any()


def _own(folder: Path, names: tuple[str, ...], rows: int = V) -> Path:
    """A checkpoint of ours that was never Megatron's."""
    tensors = {f"model.{name}": torch.randn(rows, D) for name in names}
    tensors |= {f"optimizer.{name}.exp_avg": torch.randn(rows, D) for name in names}
    tensors["model.norm.weight"] = torch.ones(D)
    layout = {"vocab_size": rows, "padded_size": rows, "tp_size": 1}
    return write_checkpoint(folder, [tensors], state=make_state(3, tensors, layout=layout, tables=names))


def test_names_are_changed_as_asked_both_ways(tmp_path: Path) -> None:
    ours = _own(tmp_path / "ours", ("wte.weight", "lm_head.weight"))
    stored = open_checkpoint(ours)
    theirs = StoredTensors(to_megatron(ours, tmp_path / "there", rename={"wte.weight": WORDS, "lm_head.weight": HEAD}))
    assert set(theirs.tensors) == {WORDS, HEAD, "norm.weight"}, "optimizer state without Megatron's settings is no use"
    assert torch.equal(theirs.read(WORDS), stored.read("model.wte.weight"))
    assert torch.load(tmp_path / "there" / "common.pt") == {"iteration": 3, "checkpoint_version": 3.0}
    again = open_checkpoint(
        from_megatron(
            tmp_path / "there", tmp_path / "again", vocab_size=V, rename={WORDS: "wte.weight", HEAD: "lm_head.weight"}
        )
    )
    assert again.state["tables"] == ["wte.weight", "lm_head.weight"]
    assert torch.equal(again.read("model.lm_head.weight"), stored.read("model.lm_head.weight"))


def test_a_name_that_is_changed_on_the_way_back_takes_its_optimizer_state_along(tmp_path: Path) -> None:
    tensors = _tensors(tied=False)
    states = _states({HEAD: tensors[HEAD]})
    source = _write(tmp_path / "a", {**tensors, **states})
    ours = from_megatron(source, tmp_path / "ours", vocab_size=V, rename={HEAD: "head"})
    back = StoredTensors(to_megatron(ours, tmp_path / "back", rename={"head": f"module.{HEAD}"}))
    kept = {key for key in (*tensors, *states) if not key.endswith(HEAD)}
    moved = {f"module.{HEAD}", *(f"optimizer.state.{state}.module.{HEAD}" for state in ("exp_avg", "exp_avg_sq"))}
    assert set(back.tensors) == kept | moved
    found, wanted = back.read(f"optimizer.state.exp_avg.module.{HEAD}"), states[f"optimizer.state.exp_avg.{HEAD}"]
    assert torch.equal(found[:V], wanted[:V])


def test_the_tie_of_a_renamed_weight_has_the_new_names(tmp_path: Path) -> None:
    source = _write(tmp_path / "a", _tensors())
    rename = {WORDS: "wte.weight", HEAD: "lm_head.weight"}
    stored = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=V, rename=rename))
    assert stored.state["ties"] == {"lm_head.weight": "wte.weight"}


def test_a_migrated_checkpoint_goes_back_with_its_new_rows(tmp_path: Path) -> None:
    tensors = _tensors()
    source = _write(tmp_path / "a", {**tensors, **_states(tensors), "rng_state/shard_0_1": b"seven"})
    ours = from_megatron(source, tmp_path / "ours", vocab_size=V)
    migrate_checkpoint(ours, tmp_path / "larger", VocabMap.append(V, 9), init=Zeros())
    back = StoredTensors(to_megatron(tmp_path / "larger", tmp_path / "back"))
    assert back.tensors[WORDS][1] == (V + 9, D)
    assert torch.equal(back.read(f"optimizer.state.exp_avg.{WORDS}")[:V], tensors[WORDS][:V] + 1)
    assert "rng_state/shard_0_1" in back.metadata.state_dict_metadata


@pytest.mark.parametrize(("words", "name"), [("9\n", "iter_0000009"), ("release", "release")])
def test_a_save_folder_gives_the_checkpoint_that_its_tracker_names(words: str, name: str, tmp_path: Path) -> None:
    _write(tmp_path / "save" / "iter_0000003", _tensors(), {})
    _write(tmp_path / "save" / name, _tensors(tied=False), {})
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text(words)
    stored = open_checkpoint(from_megatron(tmp_path / "save", tmp_path / "ours", vocab_size=V))
    assert stored.state["ties"] == {}, "the other one is tied"
    assert stored.step == (9 if name.startswith("iter") else 0)


def _legacy(source: Path) -> None:
    (source / "metadata.json").unlink()
    (source / "mp_rank_00").mkdir()
    (source / "mp_rank_00" / "model_optim_rng.pt").touch()


def _cut_off(source: Path) -> None:
    (file,) = source.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-300])


BROKEN: dict[str, tuple[Any, list[str]]] = {
    "the legacy format": (_legacy, ["metadata.json", "legacy", "--ckpt-format torch_dist"]),
    "no checkpoint": (lambda p: [one.unlink() for one in p.iterdir()], ["no metadata.json"]),
    "another format": (
        lambda p: (p / "metadata.json").write_text(json.dumps(CONFIG | {"sharded_backend": "zarr"})),
        ["zarr", "torch_dist"],
    ),
    "a damaged description": (lambda p: (p / "metadata.json").write_text("{"), ["metadata.json", "damaged"]),
    "an unfinished save": (lambda p: (p / "common.pt").unlink(), ["common.pt", "did not finish"]),
    "no list of tensors": (lambda p: (p / ".metadata").unlink(), [".metadata", "did not finish"]),
    "a cut-off file": (_cut_off, ["cut off"]),
    "a damaged common state": (lambda p: (p / "common.pt").write_bytes(b"PK"), ["common.pt", "damaged"]),
    "a tracker that leads outside": (
        lambda p: [(p / "metadata.json").unlink(), (p / "latest_checkpointed_iteration.txt").write_text("../../x")],
        ["latest_checkpointed_iteration.txt", "../../x"],
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_folder_that_is_no_whole_distributed_checkpoint_is_refused(what: str, tmp_path: Path) -> None:
    change, words = BROKEN[what]
    source = _write(tmp_path / "a", _tensors())
    change(source)
    _refused(words, from_megatron, source, tmp_path / "ours", vocab_size=V)
    assert not (tmp_path / "ours").exists()


TABLES = _tensors()
MISFIT: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "no number of real rows": (TABLES, {"vocab_size": None}, ["16 rows", "--vocab-size", "convert"]),
    "more real rows than rows": (TABLES, {"vocab_size": 17}, ["16 rows", "17", "--vocab-size"]),
    "untied where tied was expected": (_tensors(tied=False), {"tied": True}, [HEAD, WORDS, "untied"]),
    "tied where untied was expected": (TABLES, {"tied": False}, [HEAD, WORDS, 'tie="untie"']),
    "no language model": ({"vision.weight": torch.ones(3, 4)}, {}, [WORDS, HEAD, "vision.weight"]),
    "tables of two sizes": ({WORDS: torch.ones(16, 4), HEAD: torch.ones(18, 4)}, {}, ["16", "18", HEAD]),
    "state of buckets": (
        {**TABLES, "optimizer.distributed.gbuf_idx_0.bucket_idx_0.exp_avg": torch.ones(9)},
        {},
        ["gbuf_idx_0", "fully_reshardable", "optimizer=False"],
    ),
    "flattened state": (
        {**TABLES, f"optimizer.state.exp_avg.{WORDS}": torch.ones(2, 32)},
        {},
        [f"optimizer.state.exp_avg.{WORDS}", "[2, 32]", "optimizer=False"],
    ),
    "state of a parameter that is not there": (
        {**TABLES, "optimizer.state.exp_avg.other": torch.ones(2)},
        {},
        ["optimizer.state.exp_avg.other"],
    ),
    "an unknown name": (TABLES, {"rename": {"wte": "embedding"}}, ["no parameter wte", WORDS]),
    "a table of one number": ({WORDS: torch.tensor(1.0)}, {}, ["0 rows", "11 asked for"]),
    "one name for two": (_tensors(tied=False), {"rename": {HEAD: WORDS}}, ["two tensors", WORDS]),
}


@pytest.mark.parametrize("what", MISFIT)
def test_what_does_not_fit_is_refused_with_both_sides_and_what_to_do(what: str, tmp_path: Path) -> None:
    tensors, options, words = MISFIT[what]
    source = _write(tmp_path / "a", tensors)
    _refused(words, from_megatron, source, tmp_path / "ours", **{"vocab_size": V, **options})
    assert not (tmp_path / "ours").exists()


def test_nothing_is_replaced_or_written_short(tmp_path: Path) -> None:
    source = _write(tmp_path / "a", _tensors())
    ours = from_megatron(source, tmp_path / "ours", vocab_size=V)
    _refused(["exists"], from_megatron, source, ours, vocab_size=V)
    _refused(["exists"], to_megatron, ours, source)
    _refused(["10", "11 real rows"], to_megatron, ours, tmp_path / "back", padded_size=10)
    own = _own(tmp_path / "own", ("wte.weight",))
    _refused(["wte.weight", WORDS, "rename=", "--rename wte.weight="], to_megatron, own, tmp_path / "back")
    _refused(["no parameter wte", "wte.weight"], to_megatron, own, tmp_path / "back", rename={"wte": WORDS})
    _refused(
        ["two tensors", WORDS], to_megatron, own, tmp_path / "back", rename={"wte.weight": WORDS, "norm.weight": WORDS}
    )  # fmt: skip
    (file,) = own.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    _refused(["damaged", file.name], to_megatron, own, tmp_path / "back", rename={"wte.weight": WORDS})
    state = json.loads((ours / "state.json").read_text())
    for found, words in (([1], "an object"), ({"padded_size": 16, "keys": {"a": 1}, "objects": {}}, "keys.a")):
        state["extra"]["megatron"] = found
        state.pop("sha256", None)
        (ours / "state.json").write_text(json.dumps(state))
        _refused(["extra.megatron", words], to_megatron, ours, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert not list(tmp_path.glob(".*"))


def _refused(words: list[str], call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(CheckpointLayoutError) as raised:
        call(*args, **options)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


class _Backend(enum.Enum):
    FLASH = 1


class _Runs:
    """As an attacker would pickle a call."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({self._path!r}, 'w').close()",)


def test_no_code_of_a_common_state_runs_and_its_classes_need_not_be_known(tmp_path: Path) -> None:
    endless: dict[str, Any] = {"step": 3}
    endless["itself"] = endless
    common = {
        "args": argparse.Namespace(attention=_Backend.FLASH, dtype=torch.bfloat16), "iteration": 4,
        "client": _Runs(str(tmp_path / "ran")), "optimizer": endless,
    }  # fmt: skip
    stored = open_checkpoint(from_megatron(_write(tmp_path / "a", _tensors(), common), tmp_path / "ours", vocab_size=V))
    assert stored.step == 4
    assert not (tmp_path / "ran").exists()


def test_no_code_of_a_list_of_tensors_runs(tmp_path: Path) -> None:
    source = _write(tmp_path / "a", _tensors())
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.planner_data = _Runs(str(tmp_path / "ran"))
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    _refused(["builtins.exec"], from_megatron, source, tmp_path / "ours", vocab_size=V)
    assert not (tmp_path / "ran").exists()


def test_a_list_of_tensors_of_megatron_0_15_is_read_without_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    source = _write(tmp_path / "a", _tensors())
    module = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    theirs = type("MCoreMetadata", (Metadata,), {"__module__": module.__name__})
    vars(module)["MCoreMetadata"] = theirs
    metadata = pickle.loads((source / ".metadata").read_bytes())
    metadata.__class__ = theirs
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        content = pickle.dumps(metadata)
    (source / ".metadata").write_bytes(content)
    assert b"MCoreMetadata" in content
    stored = open_checkpoint(from_megatron(source, tmp_path / "ours", vocab_size=V))
    assert torch.equal(stored.read(f"model.{WORDS}"), _tensors()[WORDS][:V])


WIDTH, TP = 64, 2


def _write_large(folder: Path, vocab: int) -> Path:
    """One large table, in one record of a file."""
    folder.mkdir()
    save({WORDS: torch.arange(vocab * WIDTH).view(vocab, WIDTH).float()}, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 1}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(CONFIG))
    return folder


def _there_and_back(source: str, target: str) -> None:
    ours = from_megatron(source, f"{target}.ours", vocab_size=StoredTensors(Path(source)).tensors[WORDS][1][0] - 5)
    to_megatron(ours, target)
    shutil.rmtree(ours)
    shutil.rmtree(target)


@pytest.mark.parametrize("vocab", [2**17, 2**18])
def test_both_conversions_hold_less_than_a_shard(vocab: int, tmp_path: Path) -> None:
    small, large = _write_large(tmp_path / "small", 2**10), _write_large(tmp_path / "large", vocab)
    added = added_memory(
        _there_and_back, str(large), str(tmp_path / "back"), warm_up=(str(small), str(tmp_path / "warm"))
    )  # fmt: skip
    shard = vocab // TP * WIDTH * 4
    assert added.resident < 1.3 * shard, f"{added}, a shard has {shard}"
    assert added.private < 1.3 * shard, f"{added}, a shard has {shard}"
