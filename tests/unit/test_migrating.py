"""Migration of checkpoints: each row and its moments move by the map, the rest stays, what cannot be is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.memory import added_memory
from tests.multirank.migration_cases import OLD, edited, oracle, whole
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.checkpoint import files, open_checkpoint
from vocab_parallel.checkpoint.migration.assets import vocabulary_bytes
from vocab_parallel.checkpoint.migration.checks import check_migration
from vocab_parallel.checkpoint.migration.migrating import migrate_checkpoint
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError, NonFiniteError, VocabularyError
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration import migrate
from vocab_parallel.vocabulary.migration.initialization import CopyOf, MeanOfRows, MeanOfSources, Normal, RowInit, Zeros
from vocab_parallel.vocabulary.row_states import is_row_state

WIDTH = 8
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adafactor": torch.optim.Adafactor,
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9),
    "muon": torch.optim.Muon,
}


def trained(optimizer: str, *, tied: bool, masters: bool, vocab: int = OLD) -> dict[str, Tensor]:
    """What a checkpoint holds after two steps of an optimizer; with masters the model itself is bfloat16."""
    shapes = {"embedding.weight": (vocab, WIDTH), "trunk.weight": (WIDTH, WIDTH)}
    if not tied:
        shapes["head.weight"] = (vocab, WIDTH)
    if optimizer != "muon":  # takes matrices only
        shapes["head.bias"] = (vocab,)
    named = {name: nn.Parameter(whole(*shape, seed=seed)) for seed, (name, shape) in enumerate(shapes.items())}
    stepper = OPTIMIZERS[optimizer](list(named.values()))
    for step in range(2):
        for at, parameter in enumerate(named.values()):
            parameter.grad = whole(*parameter.shape, seed=100 + 10 * step + at)
        stepper.step()
    tensors = {}
    for name, parameter in named.items():
        tensors[f"model.{name}"] = parameter.detach().bfloat16() if masters else parameter.detach()
        if masters:
            tensors[f"optimizer.{name}.master_weight"] = parameter.detach()
        for state, value in stepper.state[parameter].items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{state}"] = value
    return tensors


def stored(
    folder: Path, tensors: dict[str, Tensor], *, tp: int = 2, vocab: int = OLD, ties: dict[str, str] | None = None,
    identity: VocabIdentity | None = None, manifest: bool = False, assets: dict[str, bytes] | None = None,
    extra: dict[str, Any] | None = None, tables: list[str] | None = None,
) -> Path:  # fmt: skip
    """A checkpoint of step 7 of whole tensors, cut along the shards of `tp` ranks."""
    layout = VocabLayout(vocab, tp, multiple_of=1)
    names = [key.removeprefix("model.") for key in tensors if key.startswith("model.") and "trunk" not in key]
    tables = names if tables is None else tables
    sharded = {f"model.{name}" for name in tables}
    for key, value in tensors.items():
        owner = next((name for name in tables if key.startswith(f"optimizer.{name}.")), None)
        if owner and is_row_state(key, value.shape, tensors[f"model.{owner}"].shape):
            sharded.add(key)
    parts: list[dict[str, Tensor]] = []
    for rank in range(tp):
        own = layout.range(rank)
        parts.append({key: Rows.of(tensors[key][own.start : own.stop], own.start, vocab) for key in sharded})
    parts[0].update({key: value for key, value in tensors.items() if key not in sharded})
    sizes = {"vocab_size": vocab, "padded_size": layout.padded_size, "tp_size": tp}
    carried: dict[str, Path | bytes] = {f"assets/{name}": content for name, content in (assets or {}).items()}
    if identity is not None:
        carried["vocabulary.json"] = vocabulary_bytes(identity)
        extra = {"vocabulary_sha256": identity.sha256, **(extra or {})}
    said = None
    if manifest:
        specs = {key: (value.dtype, value.shape) for key, value in tensors.items()}
        said = Manifest.of_tensors(specs, tables=tables, ties=ties or {}, layout=layout, identity=identity, step=7)
    state = make_state(
        7, tensors, layout=sizes, tables=tables, ties=ties, scalars={"optimizer.trunk.weight.rate": 0.5}, extra=extra
    )
    return write_checkpoint(folder, parts, state=state, manifest=said, assets=carried)


def contents(folder: Path) -> dict[str, Tensor]:
    found = open_checkpoint(folder)
    return {key: found.read(key) for key in found.tensors}


def same_bits(a: Tensor, b: Tensor) -> bool:
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return a.dtype == b.dtype and torch.equal(a.view(kinds[a.element_size()]), b.view(kinds[b.element_size()]))


def words(count: int, *, first: int = 0) -> VocabIdentity:
    return VocabIdentity.of_tokens([f"word {first + at}" for at in range(count)], special_ids={"eos": 0})


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_appended_permuted_and_dropped_ids_carry_rows_moments_and_steps(
    tmp_path: Path, optimizer: str, tied: bool
) -> None:
    masters = optimizer == "adamw"
    before = trained(optimizer, tied=tied, masters=masters)
    ties = {"head.weight": "embedding.weight"} if tied else {}
    source = stored(tmp_path / "old", before, ties=ties)
    vocab_map = edited()
    report = migrate_checkpoint(source, tmp_path / "new", vocab_map, init=MeanOfSources(), tp_size=3, multiple_of=1)
    after = contents(tmp_path / "new")

    assert set(after) == set(before)
    moved = {key for table in report.tables for key in table.keys}
    for key, value in before.items():
        if key not in moved:
            assert same_bits(after[key], value), key
            continue
        table = before.get(key.replace("model.", "optimizer.") + ".master_weight", value)
        is_weight = key.startswith("model.") or key.endswith(".master_weight")
        want = oracle(table, vocab_map, MeanOfSources() if is_weight else None)
        want = want.to(value.dtype)  # of bfloat16: the master's, rounded
        assert same_bits(after[key], want), key
    states = {key.rpartition(".")[2] for key in moved if key.startswith("optimizer.embedding.weight.")}
    assert (
        states
        == {
            "adamw": {"master_weight", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
            "adafactor": {"row_var"},
            "sgd": {"momentum_buffer"},
            "muon": {"momentum_buffer"},
        }[optimizer]
    )
    assert any(key.endswith(".step") for key in before) == (optimizer in ("adamw", "adafactor"))
    found = open_checkpoint(tmp_path / "new")
    assert (found.step, found.state["scalars"]) == (7, {"optimizer.trunk.weight.rate": 0.5})
    assert (found.state["ties"], found.state["tables"]) == (ties, open_checkpoint(source).state["tables"])
    assert check_migration(source, tmp_path / "new", vocab_map).passed
    found.verify()


@pytest.mark.parametrize(
    "init", [Zeros(), MeanOfRows(), MeanOfSources(), Normal(3), CopyOf({i: i % 7 for i in range(2991, 3055)})], ids=str
)
def test_a_checkpoint_migrates_to_the_bits_of_the_live_migration_in_blocks_of_any_size(
    tmp_path: Path, init: RowInit, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_map = edited()
    names = {"model.embedding.weight": whole(OLD, WIDTH), "model.head.bias": whole(OLD, dtype=torch.bfloat16),
             "model.low.weight": whole(OLD, 3, dtype=torch.float8_e4m3fn)}  # fmt: skip
    shards = [VocabShard(VocabLayout(size, 1, multiple_of=1)) for size in (OLD, vocab_map.new_size)]
    want = migrate(names, vocab_map, src=shards[0], dst=shards[1], init=init)
    source = stored(tmp_path / "old", names)
    for block, tp in ((4 * 2**20, 1), (96 * 32, 4)):
        monkeypatch.setattr("vocab_parallel.checkpoint.rows.BLOCK_BYTES", block)
        monkeypatch.setattr("vocab_parallel.checkpoint.migration.rows.READ_BYTES", block // 3)
        target = tmp_path / f"new {block}"
        migrate_checkpoint(source, target, vocab_map, init=init, tp_size=tp, multiple_of=1)
        after = contents(target)
        assert all(same_bits(after[key], want[key]) for key in names)
    assert len(open_checkpoint(target).pieces["model.embedding.weight"]) > 30


def test_a_permutation_and_its_inverse_give_every_bit_back(tmp_path: Path) -> None:
    before = trained("adamw", tied=False, masters=True)
    before["model.embedding.weight"].view(torch.int16)[:3, 0] = torch.tensor([0x7F81, -0x8000, -1], dtype=torch.int16)
    source = stored(tmp_path / "old", before)
    order = torch.randperm(OLD, generator=torch.Generator().manual_seed(1))
    migrate_checkpoint(source, tmp_path / "there", VocabMap.permutation(order), init=Zeros(), tp_size=4)
    assert not same_bits(contents(tmp_path / "there")["model.head.weight"], before["model.head.weight"])
    migrate_checkpoint(tmp_path / "there", tmp_path / "back", VocabMap.permutation(order.argsort()), init=Zeros())
    after = contents(tmp_path / "back")
    assert all(same_bits(after[key], before[key]) for key in before)


def test_states_without_rows_stay_even_where_their_shape_has_as_many_numbers_as_the_vocabulary(tmp_path: Path) -> None:
    before = {
        "model.embedding.weight": whole(9, 9),
        "optimizer.embedding.weight.exp_avg_sq_row": whole(9, seed=1),
        "optimizer.embedding.weight.exp_avg_sq_col": whole(9, seed=2),
        "optimizer.embedding.weight.col_var@shards": whole(9, 9, seed=3),
        "model.trunk.square": whole(9, 9, seed=4),
        "model.trunk.empty": torch.empty(0, 4),
    }
    source = stored(tmp_path / "old", before, vocab=9)
    vocab_map = VocabMap.permutation(torch.arange(9).flip(0))
    report = migrate_checkpoint(source, tmp_path / "new", vocab_map, init=Zeros())
    after = contents(tmp_path / "new")
    moved = [key for key in before if not torch.equal(after[key], before[key])]
    assert moved == ["model.embedding.weight", "optimizer.embedding.weight.exp_avg_sq_row"]
    assert all(torch.equal(after[key], before[key].flip(0)) for key in moved)
    assert any("model.trunk.square has 9 rows too" in note for note in report.notes)
    with pytest.raises(CheckpointLayoutError, match=r"values for each of its 2 ranks .*without --tp"):
        migrate_checkpoint(source, tmp_path / "three", vocab_map, init=Zeros(), tp_size=3)


def test_what_cannot_move_by_row_is_refused_by_name(tmp_path: Path) -> None:
    vocab_map, table = VocabMap.append(9, 2), {"model.embedding.weight": whole(9, 4)}
    stored(tmp_path / "old", {"model.embedding.weight": table["model.embedding.weight"].to(torch.int8)}, vocab=9)
    refused(tmp_path, vocab_map, CheckpointLayoutError, "model.embedding.weight is torch.int8", "quantised")
    for key, value in (("absmax1", torch.ones(5)), ("absmax1@shards", torch.ones(2, 5))):
        stored(tmp_path / "old", {**table, f"optimizer.embedding.weight.{key}": value}, vocab=9)
        refused(
            tmp_path, vocab_map, VocabularyError, f"{tmp_path / 'old'}: optimizer.embedding.weight.absmax1", "[9, 4]"
        )


def test_rows_that_move_without_a_name_of_the_new_vocabulary_do_not_keep_the_old_one(tmp_path: Path) -> None:
    source = stored(
        tmp_path / "old", {"model.embedding.weight": whole(9, 4)}, vocab=9, identity=words(9), manifest=True
    )
    assert Manifest.read(source).vocabulary.ordered_table_sha256 == words(9).sha256
    migrate_checkpoint(source, tmp_path / "new", VocabMap.permutation(torch.arange(9).flip(0)), init=Zeros())
    vocabulary = Manifest.read(tmp_path / "new").vocabulary
    assert (vocabulary.size, vocabulary.ordered_table_sha256, vocabulary.special_ids) == (9, None, None)


def test_the_target_says_what_its_rows_are_and_where_they_are_from(tmp_path: Path) -> None:
    old, new = words(OLD), words(OLD - 10 + 64, first=10)
    vocab_map = VocabMap.from_vocabs(old, new, allow_drop=True)
    assert (vocab_map.kept, len(vocab_map.new_ids), len(vocab_map.dropped_ids)) == (
        2991,
        64,
        10,
    )  # eos goes by its role
    source = stored(tmp_path / "old", trained("adamw", tied=True, masters=False), identity=old, manifest=True,
                    ties={"head.weight": "embedding.weight"}, extra={"run": "x"})  # fmt: skip
    migrate_checkpoint(source, tmp_path / "new", vocab_map, init=MeanOfRows(), identity=new, tp_size=4)
    found, said = open_checkpoint(tmp_path / "new"), Manifest.read(tmp_path / "new")
    assert said.vocabulary.ordered_table_sha256 == new.sha256 and said.head.output_width == new.size
    layout = VocabLayout(new.size, 4)
    assert said.checkpoint is not None and said.checkpoint.step == 7
    assert said.checkpoint.shard_ranges == tuple((r.start, r.stop) for r in map(layout.range, range(4)))
    assert found.state["layout"] == {"vocab_size": 3055, "padded_size": layout.padded_size, "tp_size": 4}
    assert VocabIdentity.read(tmp_path / "new" / "vocabulary.json").sha256 == new.sha256
    assert found.state["extra"] == {
        "run": "x",
        "vocabulary_sha256": new.sha256,
        "migrated_from": {
            "checkpoint": "old", "old_sha256": old.sha256, "new_sha256": new.sha256, "kept": 2991, "new": 64,
            "dropped": 10, "init": "mean", "without_sources": 0,
        },
    }  # fmt: skip
    by_file = {piece.file: piece for piece in found.pieces["model.embedding.weight"]}
    assert sorted(by_file) == [f"__{rank}_0.distcp" for rank in range(4)]


def test_files_of_the_old_tokenizer_do_not_stay_beside_new_rows(tmp_path: Path) -> None:
    codes = {"vocab_size": 9, "pad_token_id": 8, "inner": {"eos_token_id": 8}}  # another vocabulary
    config = {
        "vocab_size": OLD,
        "eos_token_id": [0, 5],
        "pad_token_id": 4,
        "text_config": {"decoder_vocab_size": OLD, "bos_token_id": 7},
        "audio_config": codes,
        "bad_words_ids": [[6, 6], [4, 7]],
        "begin_suppress_tokens": [5, 4],
        "forced_decoder_ids": [[1, 8]],
    }
    assets = {
        "config.json": json.dumps(config).encode(),
        "tokenizer.json": b"old",
        "sub/merges.txt": b"old",
        "LICENSE": b"mine",
    }
    source = stored(tmp_path / "old", trained("sgd", tied=True, masters=False), assets=assets, identity=words(OLD))
    (tmp_path / "mine").write_bytes(b"\n new")  # a SentencePiece model, by its content
    pairs = [(old, old - 5) for old in range(5, OLD)]
    vocab_map = VocabMap.from_pairs(OLD, OLD + 3, pairs, allow_drop=True)
    for number, tokenizer in enumerate((None, tmp_path / "mine")):
        target = tmp_path / f"new {number}"
        report = migrate_checkpoint(source, target, vocab_map, init=Zeros(), tokenizer=tokenizer)
        carried = {path.name: path.read_bytes() for path in (target / "assets").iterdir()}
        changed = json.loads(carried.pop("config.json"))
        assert changed == {"vocab_size": OLD + 3, "eos_token_id": [0], "pad_token_id": None,
                           "text_config": {"decoder_vocab_size": OLD + 3, "bos_token_id": 2}, "audio_config": codes,
                           "bad_words_ids": [[1, 1]], "begin_suppress_tokens": [0],
                           "forced_decoder_ids": [[1, 8]]}  # fmt: skip
        assert carried == {"LICENSE": b"mine"} | ({"tokenizer.model": b"\n new"} if tokenizer else {})
        assert any("sub/merges.txt, tokenizer.json" in note for note in report.notes)
        assert any("forced_decoder_ids stays as it is" in note for note in report.notes)
        assert (
            not (target / "vocabulary.json").exists()
            and "vocabulary_sha256" not in open_checkpoint(target).state["extra"]
        )
        open_checkpoint(target).verify()


def test_appended_rows_without_tokens_keep_the_tokenizer_and_extend_its_table(tmp_path: Path) -> None:
    old = words(OLD)
    source = stored(
        tmp_path / "old", trained("sgd", tied=True, masters=False), assets={"tokenizer.json": b"old"}, identity=old
    )
    migrate_checkpoint(source, tmp_path / "new", VocabMap.append(OLD, 5), init=MeanOfRows())
    assert (tmp_path / "new" / "assets" / "tokenizer.json").read_bytes() == b"old"
    kept = VocabIdentity.read(tmp_path / "new" / "vocabulary.json")
    origin = open_checkpoint(tmp_path / "new").state["extra"]["migrated_from"]
    assert (origin["old_sha256"], origin["new_sha256"]) == (old.sha256, kept.sha256)
    assert (
        kept.sha256
        == old.resized(OLD + 5).sha256
        == open_checkpoint(tmp_path / "new").state["extra"]["vocabulary_sha256"]
    )


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    source = stored(tmp_path / "old", trained("adamw", tied=False, masters=False))
    before = sorted(tmp_path.rglob("*"))
    plan = migrate_checkpoint(source, tmp_path / "new", edited(), init=MeanOfSources(), dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    done = migrate_checkpoint(source, tmp_path / "new", edited(), init=MeanOfSources())
    assert plan.lines() == done.lines()
    text = "\n".join(plan.lines())
    assert "3,001 old ids to 3,055 new ids" in text and "64 are new" in text and "10 are dropped" in text
    assert "table head.weight: model.head.weight with exp_avg, exp_avg_sq, max_exp_avg_sq" in text
    held = open_checkpoint(tmp_path / "new").tensors
    assert plan.bytes == sum(size.numel() * dtype.itemsize for dtype, size in held.values())
    assert 0 < plan.without_sources < 64 and f"{plan.without_sources} new ids have no source sub-tokens" in text


def refused(tmp_path: Path, vocab_map: VocabMap, error: type[Exception], *parts: str, **options: Any) -> None:
    options = {"init": MeanOfRows(), **options}
    with pytest.raises(error) as caught:
        migrate_checkpoint(tmp_path / "old", tmp_path / "new", vocab_map, **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"], "something was left behind"


def test_a_map_of_another_vocabulary_is_refused_naming_both_and_the_command(tmp_path: Path) -> None:
    old, other, new = words(OLD), words(OLD, first=1), words(OLD + 1, first=1)
    stored(tmp_path / "old", trained("sgd", tied=True, masters=False), identity=old, manifest=True)
    command = "python -m vocab_parallel migrate"
    refused(tmp_path, VocabMap.from_vocabs(other, new, allow_drop=True), CheckpointLayoutError, old.sha256[:16],
            other.sha256[:16], command, "--old-vocab")  # fmt: skip
    refused(tmp_path, VocabMap.append(OLD - 1, 2), CheckpointLayoutError, "3,000 old ids", "3001 rows", command)
    good = VocabMap.from_vocabs(old, new, allow_drop=True)
    refused(tmp_path, good, VocabularyError, new.sha256, other.sha256, identity=other)
    refused(tmp_path, good, VocabularyError, "no row is named for the new ids", init=CopyOf({0: 1}))


def test_a_migration_that_would_move_nothing_is_refused_with_the_command_for_other_layouts(tmp_path: Path) -> None:
    stored(tmp_path / "old", trained("sgd", tied=True, masters=False))
    same = VocabMap.permutation(torch.arange(OLD))
    refused(tmp_path, same, CheckpointLayoutError, "nothing to migrate", "python -m vocab_parallel reshard", tp_size=4)
    none = VocabMap.append(OLD, 0, old_sha256="a" * 64)
    refused(tmp_path, none, CheckpointLayoutError, "nothing to migrate", "python -m vocab_parallel reshard")


def test_rows_that_all_stay_can_get_other_names(tmp_path: Path) -> None:
    old, new = words(OLD), dataclasses.replace(words(OLD), tokens=(b"<eos>", *words(OLD).tokens[1:]))
    source = stored(tmp_path / "old", trained("sgd", tied=True, masters=False), identity=old)
    vocab_map = VocabMap.from_vocabs(old, new)
    assert vocab_map.is_identity
    migrate_checkpoint(source, tmp_path / "new", vocab_map, init=Zeros(), identity=new)
    assert open_checkpoint(tmp_path / "new").state["extra"]["vocabulary_sha256"] == new.sha256 != old.sha256


def test_a_name_that_leads_out_of_the_checkpoint_is_neither_read_nor_written(tmp_path: Path) -> None:
    source = stored(tmp_path / "old", trained("sgd", tied=True, masters=False), assets={"notes": b"x"})
    (tmp_path / "secret").write_bytes(b"secret")
    state = json.loads((source / "state.json").read_text())
    state["files"]["assets/../../secret"] = state["files"]["assets/notes"]
    (source / "state.json").write_text(json.dumps(state))
    for verify in (True, False):
        with pytest.raises(CheckpointLayoutError, match="secret is no name of a file in it"):
            migrate_checkpoint(source, tmp_path / "new", edited(), init=Zeros(), verify=verify)


def test_damaged_files_rows_with_nan_and_an_existing_target_are_refused(tmp_path: Path) -> None:
    before = trained("sgd", tied=True, masters=False)
    before["model.embedding.weight"][1234, 3] = float("nan")
    source = stored(tmp_path / "old", before)
    refused(tmp_path, edited(), NonFiniteError, "row 1234 of model.embedding.weight")
    sources = dataclasses.replace(VocabMap.append(OLD, 1), sources={OLD: (3, 1234)})
    refused(tmp_path, sources, NonFiniteError, "row 1234 of model.embedding.weight", init=MeanOfSources())
    data = source / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    refused(tmp_path, edited(), CheckpointLayoutError, "damaged", "__0_0.distcp", init=Zeros())
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointLayoutError, match="new exists"):
        migrate_checkpoint(source, tmp_path / "new", edited(), init=Zeros())


BREAKS: dict[str, tuple[str, Any]] = {
    "a kept row": ("rows of model.embedding.weight", lambda t: t["model.embedding.weight"][100].add_(1)),
    "a kept moment": (
        "rows of optimizer.head.bias.momentum_buffer", lambda t: t["optimizer.head.bias.momentum_buffer"][5:6].mul_(2)
    ),
    "a moment of a new row": (
        "new rows of optimizer.embedding.weight.momentum_buffer",
        lambda t: t["optimizer.embedding.weight.momentum_buffer"][-1].fill_(1),
    ),
    "a tensor of the trunk": ("other tensors", lambda t: t["model.trunk.weight"][0].zero_()),
    "a key for the alias": ("aliases", lambda t: t.update({"model.head.weight": t["model.embedding.weight"].clone()})),
    "a state of no parameter": ("optimizer ownership", lambda t: t.update({"optimizer.gone.exp_avg": torch.ones(2)})),
    "a lost state": ("optimizer ownership", lambda t: t.pop("optimizer.trunk.weight.momentum_buffer")),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BREAKS))
def test_the_conformance_report_finds(tmp_path: Path, name: str) -> None:
    check, broken = BREAKS[name]
    ties = {"head.weight": "embedding.weight"}
    source = stored(tmp_path / "old", trained("sgd", tied=True, masters=False), ties=ties)
    migrate_checkpoint(source, tmp_path / "new", edited(), init=MeanOfRows())
    good = check_migration(source, tmp_path / "new", edited())
    assert good.passed and set(good.masses) == {"model.embedding.weight"}
    assert 0 < good.masses["model.embedding.weight"].mean < 1
    tensors = contents(tmp_path / "new")
    broken(tensors)
    tables = open_checkpoint(source).state["tables"]
    stored(tmp_path / "broken", tensors, vocab=edited().new_size, ties=ties, tables=tables)
    report = check_migration(source, tmp_path / "broken", edited())
    assert not report.passed
    assert check in {one.name for one in report.checks if not one.passed}


def test_each_block_of_a_permuted_table_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = stored(tmp_path / "old", {"model.embedding.weight": whole(OLD, WIDTH)})
    opened: list[files.Piece] = []
    true = files.data_offset
    monkeypatch.setattr(
        files, "data_offset", lambda file, piece, dtype: opened.append(piece) or true(file, piece, dtype)
    )
    monkeypatch.setattr("vocab_parallel.checkpoint.rows.BLOCK_BYTES", 96 * 32)
    order = torch.randperm(OLD, generator=torch.Generator().manual_seed(1))
    migrate_checkpoint(source, tmp_path / "new", VocabMap.permutation(order), init=Zeros())
    assert len(open_checkpoint(tmp_path / "new").pieces["model.embedding.weight"]) > 30
    assert len(opened) == len(open_checkpoint(source).pieces["model.embedding.weight"])


def big(folder: Path, vocab: int, width: int) -> Path:
    tensors = {"model.embedding.weight": whole(vocab, width), "model.trunk.weight": whole(4 * vocab // width, width)}
    tensors["optimizer.embedding.weight.exp_avg"] = whole(vocab, width, seed=1)
    return stored(folder, tensors, vocab=vocab)


def permute_and_append(source: str, target: str, vocab: int) -> None:
    """With the check of the result, as the command does it."""
    order = torch.randperm(vocab + 64, generator=torch.Generator().manual_seed(1))[:vocab]
    vocab_map = VocabMap.from_pairs(vocab, vocab + 64, torch.stack([torch.arange(vocab), order], 1))
    migrate_checkpoint(source, target, vocab_map, init=MeanOfRows())
    assert check_migration(source, target, vocab_map).passed


@pytest.mark.parametrize("vocab", [65_536, 98_304])
def test_a_migration_needs_less_memory_than_one_shard(tmp_path: Path, vocab: int) -> None:
    width = 128
    source, small = big(tmp_path / "old", vocab, width), big(tmp_path / "small", 4096, width)
    added = added_memory(
        permute_and_append,
        str(source),
        str(tmp_path / "new"),
        vocab,
        warm_up=(str(small), str(tmp_path / "warm"), 4096),
    )
    shard = vocab * width * 4 // 2
    print(vocab, added, shard)
    assert 2**20 < added.resident < 1.3 * shard, f"{added} beside a shard of {shard} bytes"
