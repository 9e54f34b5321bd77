"""Release bundles: whole or not there, one of them in use, every part known by its hash, and one way back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.releases import POLICY, TOKENS, checkpoint, identity_of, tokenizer_file
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, tie_weights
from vocab_parallel.checkpoint import load_checkpoint, open_checkpoint, save_checkpoint
from vocab_parallel.checkpoint.files import Piece
from vocab_parallel.checkpoint.migration.checks import check_migration
from vocab_parallel.checkpoint.migration.migrating import migrate_checkpoint
from vocab_parallel.checkpoint.release import checks as bundle_checks
from vocab_parallel.checkpoint.release import list_bundles, open_current, promote, rollback, verify
from vocab_parallel.checkpoint.release.bundle import FileRecord, bundle_id, read_bundle
from vocab_parallel.checkpoint.release.checks import coverage
from vocab_parallel.checkpoint.release.conformance import conformance_record
from vocab_parallel.checkpoint.release.history import locked
from vocab_parallel.checkpoint.release.writing import remove
from vocab_parallel.decode.policy import Policy
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import Zeros
from vocab_parallel.vocabulary.migration.records import (
    fixed_hidden,
)

Refused = CheckpointLayoutError
SWAPPED = [*TOKENS[:3], "b", "a", *TOKENS[5:]]


def check_policy(policy, vocab_size):
    Policy.from_dict(policy).for_vocabulary(vocab_size)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three checkpoints, a tokenizer, and releases with the bundles of two of them, the second in use."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer_file(folder / "tokenizer.json")
    checkpoint(folder, seed=1)
    checkpoint(folder, seed=2, tied=False, tp=3)
    checkpoint(folder, seed=3)
    a = promote(folder / "releases", step(folder, 1), tokenizer=folder / "tokenizer.json", check_policy=check_policy,
                policy=POLICY, acceptance={"corpus": "held-out", "split": "test", "max_loss": 1.5})  # fmt: skip
    b = promote(folder / "releases", step(folder, 2), policy={**POLICY, "selector": "greedy"})
    return folder, a.id, b.id


@pytest.fixture
def two(made, tmp_path):
    """A copy of these releases to change: folder, first id, id in use."""
    folder, a, b = made
    shutil.copytree(folder / "releases", tmp_path / "releases", symlinks=True)
    yield tmp_path / "releases", a, b
    for path in (tmp_path / "releases").iterdir():
        remove(path)


def step(folder: Path, seed: int) -> Path:
    return folder / f"step-{seed:08d}"


def writable(bundle: Path) -> Path:
    for inner, _, names in os.walk(bundle):
        os.chmod(inner, 0o755)
        for name in names:
            path = Path(inner, name)
            data = path.read_bytes()
            path.unlink()  # no hard link to another test's file
            path.write_bytes(data)
    return bundle


def edit_list(bundle: Path, change: Any) -> None:
    data = json.loads((bundle / "bundle.json").read_text())
    change(data)
    (bundle / "bundle.json").write_text(json.dumps(data))


def test_a_bundle_holds_every_part_read_only_with_its_hash_and_what_was_in_use_before(made):
    folder, a, b = made
    bundle = read_bundle(folder / "releases" / a)
    assert {name.split("/")[0] for name in bundle.record.files} == {
        "checkpoint", "tokenizer", "vocabulary.json", "policy.json", "manifest.json", "acceptance.json"
    }  # fmt: skip
    assert bundle.policy == POLICY
    assert json.loads((bundle.path / "acceptance.json").read_text())["max_loss"] == 1.5
    assert Manifest.read(bundle.manifest).policy.name == "careful"
    assert bundle.tokenizer is not None and (bundle.tokenizer / "tokenizer.json").is_file()
    assert dict(bundle.record.ties) == {"head.weight": "embedding.weight"}
    assert (bundle.record.previous, read_bundle(folder / "releases" / b).record.previous) == (None, a)
    modes = {os.stat(Path(inner, name)).st_mode & 0o222 for inner, _, names in os.walk(bundle.path) for name in names}
    assert modes == {0} and os.stat(bundle.path).st_mode & 0o222 == 0
    assert open_current(folder / "releases").id == b


def test_equal_content_has_an_equal_id_wherever_it_comes_from_and_is_promoted_once(made, tmp_path):
    folder, a, _ = made
    shutil.copytree(step(folder, 1), tmp_path / "elsewhere")
    arguments = {
        "policy": json.loads(json.dumps(POLICY)),
        "acceptance": {"split": "test", "max_loss": 1.5, "corpus": "held-out"},
    }
    one = promote(tmp_path / "r", tmp_path / "elsewhere", tokenizer=folder / "tokenizer.json", copy=True, **arguments)
    again = promote(tmp_path / "r", step(folder, 1), tokenizer=folder, **arguments)
    assert (one.id, one.note) == (a, "promoted")
    assert (again.id, again.note) == (a, "already in use: the same content")
    assert len((tmp_path / "r/history.jsonl").read_text().splitlines()) == 1
    other = promote(tmp_path / "r", step(folder, 1), tokenizer=folder, **{**arguments, "acceptance": {"max_loss": 1.6}})
    assert other.id != a


def test_an_id_tells_apart_which_name_has_which_content():
    a, b = FileRecord(1, "a" * 64), FileRecord(1, "b" * 64)
    assert bundle_id({"x": a, "y": b}) == bundle_id({"y": b, "x": a})
    assert len({bundle_id({"x": a, "y": b}), bundle_id({"x": b, "y": a}), bundle_id({"x": a, "z": b})}) == 3


def test_checkpoint_files_are_linked_and_copied_only_if_asked_for(made, tmp_path):
    source = checkpoint(tmp_path, seed=1)
    linked = promote(tmp_path / "linked", source)
    copied = promote(tmp_path / "copied", source, copy=True)
    inode = (source / ".metadata").stat().st_ino
    assert (linked.checkpoint / ".metadata").stat().st_ino == inode
    assert (copied.checkpoint / ".metadata").stat().st_ino != inode
    shutil.rmtree(source)  # a run prunes its checkpoints
    assert verify(tmp_path / "linked") == []


def test_files_are_copied_where_the_file_system_has_no_links(tmp_path, monkeypatch):
    def no_link(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    source = checkpoint(tmp_path, seed=1)
    bundle = promote(tmp_path / "r", source)
    assert (bundle.checkpoint / ".metadata").stat().st_ino != (source / ".metadata").stat().st_ino
    assert verify(tmp_path / "r") == []


def test_a_saved_model_is_promoted_and_loads_from_its_bundle(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        shard = VocabShard(VocabLayout(9, 1, multiple_of=4))
        model = torch.nn.ModuleDict(
            {
                "embedding": VocabParallelEmbedding(4, shard=shard),
                "first": torch.nn.Linear(4, 4),
                "second": torch.nn.Linear(4, 4),
                "head": VocabParallelLMHead(4, shard=shard, bias=True),
            }
        )
        model["second"].weight = model["first"].weight  # a tie that is none of the vocabulary
        tie_weights(model["embedding"], model["head"])
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build(0)
    ids = torch.arange(9)
    model["head"].loss(model["second"](model["first"](model["embedding"](ids))), ids.roll(1)).backward()
    optimizer.step()
    manifest = Manifest.of(model, identity=identity_of())
    saved = save_checkpoint(tmp_path / "run", model, optimizer, 1, manifest=manifest, identity=identity_of())
    bundle = promote(tmp_path / "releases", saved, policy=POLICY, check_policy=check_policy)
    assert verify(tmp_path / "releases", check_policy=check_policy) == []
    other, its = build(1)
    load_checkpoint(open_current(tmp_path / "releases").checkpoint, other, its)
    assert torch.equal(other["embedding"].weight, model["embedding"].weight)
    assert dict(bundle.record.ties) == {"head.weight": "embedding.weight", "second.weight": "first.weight"}
    assert bundle.record.conformance["head"] == "model.embedding.weight"


# --- gates


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def nan_row(tensors, ties):
    tensors["model.embedding.weight"][4, 1] = torch.nan


def alias_weight(tensors, ties):
    tensors["model.head.weight"] = tensors["model.embedding.weight"].clone()


def alias_state(tensors, ties):
    tensors["optimizer.head.weight.exp_avg"] = torch.zeros(9, 6)


def lost_tie(tensors, ties):
    ties.clear()


def shared_trunk(tensors, ties):
    ties["trunk.other"] = "trunk.weight"


EDITS = [
    (nan_row, "row 4 of model.embedding.weight holds NaN"),
    (alias_weight, "two tensors would be loaded for one Parameter"),
    (alias_state, "head.weight is tied to embedding.weight and has an optimizer state of its own"),
]


@pytest.mark.parametrize(("edit", "words"), EDITS, ids=[edit.__name__ for edit, _ in EDITS])
def test_a_checkpoint_that_contradicts_itself_is_refused_and_leaves_nothing(edit, words, tmp_path):
    with pytest.raises(Refused, match=words):
        promote(tmp_path / "r", checkpoint(tmp_path, edit=edit))
    assert [path.name for path in (tmp_path / "r").iterdir()] == [".lock"]


def test_eight_bit_tables_are_looked_at_too_and_a_shared_trunk_ties_no_head(tmp_path):
    with pytest.raises(Refused, match=r"row 4 of model\.embedding\.weight holds NaN"):
        promote(tmp_path / "r", checkpoint(tmp_path, edit=nan_row, dtype=torch.float8_e4m3fn))
    for seed, dtype in enumerate((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float64), 1):
        bundle = promote(tmp_path / "r", checkpoint(tmp_path, seed=seed, dtype=dtype, tied=False, edit=shared_trunk))
        assert bundle.record.conformance["head"] == "model.head.weight" and verify(tmp_path / "r") == []


@pytest.mark.parametrize("name", ["../../outside", "assets/../../../outside", "{}/outside"])
def test_a_name_that_leads_out_of_the_checkpoint_is_neither_read_nor_written(name, tmp_path):
    source = checkpoint(tmp_path / "a" / "b")
    (tmp_path / "a" / "outside").write_text("secret")
    name = name.format(tmp_path / "a")
    state = json.loads((source / "state.json").read_text())
    state["files"][name] = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    (source / "state.json").write_text(json.dumps(state))
    with pytest.raises(Refused, match="outside is no name of a file in it"):
        promote(tmp_path / "c" / "r", source)
    assert [path.name for path in (tmp_path / "c").rglob("*")] == ["r", ".lock"]
    assert (tmp_path / "a" / "outside").stat().st_nlink == 1


def manifest_edit(source: Path, change: Any) -> None:
    """Changes the manifest and its hash, as somebody would who saved it so."""
    data = json.loads((source / "manifest.json").read_text())
    change(data)
    raw = json.dumps(data).encode()
    (source / "manifest.json").write_bytes(raw)
    state = json.loads((source / "state.json").read_text())
    state["files"]["manifest.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (source / "state.json").write_text(json.dumps(state))


def say_untied(data):
    data["tying"] = {"tied": False, "embedding_key": None, "aliases": {}, "restoration": "separate Parameters"}


MANIFESTS = [
    (say_untied, "manifest.json says the head is not tied, state.json that it is tied"),
    (lambda data: data["vocabulary"].update(ordered_table_sha256=None), "names no sha256.*save_checkpoint"),
    (lambda data: data["vocabulary"].update(added=[0, 2, 1]), "added is \\(0, 2, 1\\) in manifest.json"),
    (lambda data: data["vocabulary"]["special_ids"].update(eos=3), "special id eos is 3 in manifest.json, 2 in"),
    (lambda data: data["checkpoint"].update(shard_ranges=[]), "names no shard ranges"),
    (lambda data: data["head"].update(bias_key="other.bias"), "needs model.other.bias as a table of 9 rows"),
    (lambda data: data["checkpoint"]["tensors"].pop("model.trunk.weight"), "model.trunk.weight is in the files"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), MANIFESTS, ids=[words[:24] for _, words in MANIFESTS])
def test_a_manifest_that_says_something_else_than_the_files_is_refused(change, words, tmp_path):
    source = checkpoint(tmp_path)
    manifest_edit(source, change)
    with pytest.raises(Refused, match=words):
        promote(tmp_path / "r", source)


def test_a_damaged_checkpoint_or_one_without_manifest_is_refused(tmp_path):
    source = checkpoint(tmp_path)
    flip(source / "__1_0.distcp")
    with pytest.raises(Refused, match=r"__1_0\.distcp has sha256"):
        promote(tmp_path / "r", source)
    assert (source / "__1_0.distcp").stat().st_mode & 0o200, "only what is promoted becomes read-only"
    with pytest.raises(Refused, match="has no manifest"):
        promote(tmp_path / "r", checkpoint(tmp_path, seed=1, manifest=False))
    with pytest.raises(Refused, match="not a whole checkpoint"):
        promote(tmp_path / "r", tmp_path)


def test_a_tokenizer_with_two_swapped_ids_is_another_vocabulary(tmp_path):
    source = checkpoint(tmp_path)
    with pytest.raises(Refused, match=r"rows belong to other tokens.*vocab_parallel migrate"):
        promote(tmp_path / "r", source, tokenizer=tokenizer_file(tmp_path / "tokenizer.json", SWAPPED))
    with pytest.raises(Refused, match="holds no tokenizer"):
        promote(tmp_path / "r", source, tokenizer=source)


def test_a_model_with_more_rows_than_its_tokenizer_has_tokens_gets_a_table_with_unused_ids(tmp_path):
    source = checkpoint(tmp_path, rows=12, table=False)
    with pytest.raises(Refused, match=r"carries neither a tokenizer nor vocabulary.*--tokenizer PATH"):
        promote(tmp_path / "r", source)
    bundle = promote(tmp_path / "r", source, tokenizer=tokenizer_file(tmp_path / "tokenizer.json"))
    identity = VocabIdentity.read(bundle.vocabulary)
    assert identity.sha256 == Manifest.read(bundle.manifest).vocabulary.ordered_table_sha256
    assert (identity.size, identity.kinds[9:]) == (12, ("unused",) * 3)
    renamed = tokenizer_file(tmp_path / "of-the-model.json")
    assert promote(tmp_path / "r", source, tokenizer=renamed).tokenizer is not None and verify(tmp_path / "r") == []
    with pytest.raises(Refused, match="names id 11, which stands for no token"):
        promote(tmp_path / "r", source, tokenizer=tmp_path, policy={"special_ids": {"end": 11}})


def wrong_policies():
    token = {"name": "suppress", "token_ids": [9]}
    return [
        ({**POLICY, "special_ids": {"eos": 1}}, "special id eos is 1 .*'<s>'.*in the vocabulary it is 2"),
        ({**POLICY, "transforms": [token]}, "policy.json: .*9"),
        ({**POLICY, "special_ids": {"eos": 12}, "vocab_size": None}, "12"),
        ({**POLICY, "vocab_size": 10}, "policy.vocab_size"),
        ({**POLICY, "transforms": [{"name": "tempratur"}]}, "did you mean temperature"),
        ({"transforms": [{"name": "temperature", "temperature": float("nan")}]}, "policy must be plain JSON|finite"),
        ({"unknown": 1}, "policy is not what Policy.to_dict"),
    ]


@pytest.mark.parametrize(("policy", "words"), wrong_policies())
def test_a_policy_whose_ids_are_not_of_this_vocabulary_is_refused(policy, words, tmp_path):
    with pytest.raises(Refused, match=words):
        promote(tmp_path / "r", checkpoint(tmp_path), policy=policy, check_policy=check_policy)


def test_acceptance_criteria_are_plain_json(tmp_path):
    with pytest.raises(Refused, match="acceptance must be plain JSON"):
        promote(tmp_path / "r", checkpoint(tmp_path), acceptance={"max_loss": float("nan")})


def test_a_migrated_checkpoint_needs_the_report_that_its_rows_were_kept(tmp_path):
    old = checkpoint(tmp_path)
    vocab_map = VocabMap.from_pairs(9, 10, [(at, at) for at in range(9)])
    migrate_checkpoint(old, tmp_path / "new", vocab_map, init=Zeros(), identity=identity_of([*TOKENS, "g"]))
    with pytest.raises(Refused, match=r"was migrated .*has no migration\.json.*vocab_parallel migrate"):
        promote(tmp_path / "r", tmp_path / "new")
    origin = open_checkpoint(tmp_path / "new").state["extra"]["migrated_from"]
    report = {"migration": origin, "conformance": check_migration(old, tmp_path / "new", vocab_map).to_json()}
    for wrong, words in (
        ({**report, "migration": {**origin, "kept": 8}}, r"migration\.json is of the migration .*'kept': 8"),
        ({**report, "conformance": {"passed": False}}, "did not keep what it must"),
    ):
        with pytest.raises(Refused, match=words):
            promote(tmp_path / "r", tmp_path / "new", migration=wrong)
    (tmp_path / "new.migration.json").write_text(json.dumps(report))  # as `migrate` does
    bundle = promote(tmp_path / "r", tmp_path / "new")
    assert json.loads((bundle.path / "migration.json").read_text()) == report
    assert verify(tmp_path / "r") == []


# --- going back


def test_rollback_puts_the_whole_bundle_before_back_by_history_not_by_name(made, two):
    folder = made[0]
    releases, a, b = two
    c = promote(releases, step(folder, 3)).id
    assert rollback(releases).id == b and open_current(releases).id == b
    assert rollback(releases).id == a
    with pytest.raises(Refused, match=f"nothing to roll back to.*before {a}"):
        rollback(releases)
    again = promote(releases, releases / c)
    assert (again.id, again.note) == (c, "promoted again: the same content")
    assert rollback(releases).id == a, "a rollback goes to what was in use before, not to what was made before"
    assert verify(releases) == []
    assert [event.action for event in list_bundles(releases)[1].events] == [
        "promote", "promote", "promote", "rollback", "rollback", "promote", "rollback"
    ]  # fmt: skip


def test_rollback_goes_to_an_earlier_bundle_that_is_named_and_to_no_other(made, two):
    releases, a, b = two
    c = promote(releases, step(made[0], 3)).id
    with pytest.raises(Refused, match=f"bundle {c} is in use already"):
        rollback(releases, to=c)
    with pytest.raises(Refused, match="was not in use before"):
        rollback(releases, to="0" * 16)
    assert rollback(releases, to=a).id == a
    with pytest.raises(Refused, match="nothing to roll back to"):
        rollback(releases, to=b)


@pytest.mark.parametrize("part", ["policy", "tokenizer", "checkpoint", "temperature"])
def test_a_part_alone_is_never_rolled_back_and_the_refusal_names_what_differs(two, part):
    releases, _, b = two
    with pytest.raises(Refused) as raised:
        rollback(releases, only=part)
    words = str(raised.value)
    assert words.startswith(f"{part} alone is not rolled back")
    assert "tying.tied was true, is false" in words and "policy.json" in words and "release rollback" in words
    assert open_current(releases).id == b


def test_rollback_to_a_bundle_that_is_not_whole_is_refused_and_nothing_moves(two):
    releases, a, b = two
    flip(writable(releases / a) / "checkpoint" / ".metadata")
    with pytest.raises(Refused, match=r"not whole: checkpoint/\.metadata has sha256"):
        rollback(releases)
    assert open_current(releases).id == b and verify(releases) == []
    (releases / a / "policy.json").unlink()
    assert verify(releases)[0].startswith("no rollback is possible: the bundle")


def test_a_damaged_bundle_is_made_again_from_its_checkpoint_and_keeps_its_place(made, two):
    releases, a, b = two
    (writable(releases / b) / "bundle.json").write_text("{")
    with pytest.raises(Refused, match=rf"not whole.*chmod -R u\+w .*{b} && rm -r .*{b}"):
        promote(releases, step(made[0], 2), policy={**POLICY, "selector": "greedy"})
    remove(releases / b)
    again = promote(releases, step(made[0], 2), policy={**POLICY, "selector": "greedy"})
    assert (again.id, again.record.previous) == (b, a) and verify(releases) == []
    assert rollback(releases).id == a


def test_a_loader_keeps_the_bundle_that_it_opened(two):
    releases, _, b = two
    opened = open_current(releases)
    rollback(releases)
    assert opened.path.name == b and opened.policy["selector"] == "greedy"
    assert open_checkpoint(opened.checkpoint).state["ties"] == {}


# --- verify


def test_verify_finds_a_changed_a_missing_and_an_added_file(two):
    releases, _, b = two
    bundle = writable(releases / b)
    assert verify(releases) == verify(bundle) == verify(releases / "current") == []
    flip(bundle / "vocabulary.json")
    (bundle / "acceptance.json").unlink()
    (bundle / "checkpoint" / "more.bin").write_bytes(b"x")
    found = verify(releases)
    assert [line.split()[0] for line in found] == ["checkpoint/more.bin", "acceptance.json", "vocabulary.json"]
    with pytest.raises(Refused, match=r"acceptance\.json is missing"):
        open_current(releases)


@pytest.mark.parametrize("part", ["policy.json", "manifest.json", "tokenizer/tokenizer.json"])
def test_a_part_of_another_bundle_copied_in_is_found_and_its_owner_named(made, two, part):
    folder, releases, a = made[0], two[0], two[1]
    other = promote(releases, step(folder, 1), tokenizer=tokenizer_file(releases.parent / "tokenizer.json", TOKENS),
                    policy={**POLICY, "name": "x"})  # fmt: skip
    if part.startswith("tokenizer"):
        writable(other.path)
        (other.path / part).write_text((other.path / part).read_text() + " ")
        found = verify(other.path)
        assert found and found[0].startswith(f"{part} has ")
        return
    writable(other.path)
    shutil.copy(releases / a / part, other.path / part)
    found = verify(releases)
    assert len(found) == 1 and found[0].startswith(part) and f"it is that of bundle {a}" in found[0]


def test_a_list_edited_to_fit_an_exchanged_part_is_found_by_the_id(two):
    releases, _, b = two
    bundle = writable(releases / b)
    (bundle / "policy.json").write_bytes(b"null\n")
    edit_list(bundle, lambda data: data["files"].update({"policy.json": [5, hashlib.sha256(b"null\n").hexdigest()]}))
    with pytest.raises(Refused, match=r"its list of files has the id"):
        verify(bundle)
    assert "its list of files has the id" in verify(releases)[0]
    with pytest.raises(Refused, match="never edited"):
        open_current(releases)


def relisted(bundle: Path) -> Path:
    """The bundle with a list, an id and a name that fit what is in it now."""
    data = json.loads((bundle / "bundle.json").read_text())
    for name in data["files"]:
        raw = (bundle / name).read_bytes()
        data["files"][name] = FileRecord(len(raw), hashlib.sha256(raw).hexdigest())
    data["id"] = bundle_id(data["files"])
    (bundle / "bundle.json").write_text(json.dumps(data))
    return bundle.rename(bundle.parent / data["id"])


def another_policy(bundle: Path) -> None:
    (bundle / "policy.json").write_text(json.dumps({**POLICY, "transforms": POLICY["transforms"][::-1]}))


def no_policy(bundle: Path) -> None:
    (bundle / "policy.json").write_text("null")


def another_manifest(bundle: Path) -> None:
    manifest = Manifest.read(bundle / "manifest.json")
    dataclasses.replace(manifest, head=dataclasses.replace(manifest.head, softcap=30.0)).write(bundle / "manifest.json")


def another_tokenizer(bundle: Path) -> None:
    tokenizer_file(bundle / "tokenizer" / "tokenizer.json", SWAPPED)


def another_table(bundle: Path) -> None:
    (bundle / "vocabulary.json").write_text(json.dumps(identity_of(SWAPPED).to_json()))


PARTS = [
    (another_policy, "policy.json and the policy in manifest.json are two policies"),
    (no_policy, "policy.json holds none, manifest.json says a policy"),
    (another_manifest, "head.softcap is None in checkpoint/manifest.json, 30.0 in manifest.json"),
    (another_tokenizer, "(id 3 is 'a' in vocabulary.json and 'b' in tokenizer)"),
    (another_table, "vocabulary.json has the ordered table sha256"),
]


@pytest.mark.parametrize(("change", "words"), PARTS, ids=[change.__name__ for change, _ in PARTS])
def test_a_bundle_whose_list_fits_but_whose_parts_do_not_is_found(two, change, words):
    releases, a, _ = two
    change(writable(releases / a))
    found = verify(relisted(releases / a), check_policy=check_policy)
    assert any(words in line for line in found), found


def test_blocks_of_a_table_that_leave_out_or_repeat_a_row_are_found():
    def of(*ranges):
        pieces = [Piece((start, 0), (stop - start, 4), "f", 0, 0) for start, stop in ranges]
        return SimpleNamespace(tensors={"t": (torch.float32, (9, 4))}, pieces={"t": pieces})

    assert coverage(of((0, 3), (3, 9)), "t") is None
    assert coverage(of((0, 3), (4, 9)), "t") == "its blocks go from row 3 to row 4: expected contiguous ranges"
    assert coverage(of((0, 4), (3, 9)), "t") == "its blocks go from row 4 to row 3: expected contiguous ranges"
    assert coverage(of((0, 8)), "t") == "its blocks end at row 8, expected 9"


def test_blocks_are_looked_at_of_every_table_and_row_state(two, monkeypatch):
    releases, _, b = two
    monkeypatch.setattr(bundle_checks, "coverage", lambda stored, key: f"{stored.step} {key}")
    names = [f"{name}.weight" for name in ("embedding", "head")] + ["head.bias"]
    states = [f"optimizer.{name}.{state}" for name in names for state in ("exp_avg", "exp_avg_sq")]
    keys = [f"model.{name}" for name in names] + states
    assert sorted(verify(releases / b)) == sorted(f"{key}: 7 {key}" for key in keys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda data: data["conformance"].update(logits_sha256="0" * 64),
            "conformance: logits_sha256 was 000",
        ),
        (lambda data: data["conformance"]["rows_sha256"].clear(), "conformance: rows_sha256 was {} when promoted"),
        (lambda data: data.update(ties={"head.weight": "embedding.weight"}), "bundle.json lists the ties"),
        (lambda data: data.update(previous=None), "bundle.json has sha256"),
    ],
)
def test_verify_repeats_the_conformance_tests_and_knows_the_list_that_was_promoted(two, change, words):
    releases, _, b = two
    edit_list(writable(releases / b), change)
    found = verify(releases)
    assert any(words in line for line in found)
    assert "bundle.json has sha256" in found[-1]


def test_the_policy_is_checked_again_by_verify(two):
    releases, _, _ = two

    def refuse(policy, vocab_size):
        raise ValueError(f"{policy['name']} of {vocab_size}")

    assert verify(releases, check_policy=refuse) == ["policy.json: careful of 9"]


def test_links_and_pipes_in_a_bundle_are_not_followed(two):
    releases, a, b = two
    bundle = writable(releases / b)
    (bundle / "policy.json").unlink()
    os.symlink(releases / a / "policy.json", bundle / "policy.json")
    os.rename(bundle / "checkpoint", releases.parent / "moved")
    os.symlink(releases.parent / "moved", bundle / "checkpoint")
    (bundle / "acceptance.json").unlink()
    os.mkfifo(bundle / "acceptance.json")
    found = "; ".join(verify(releases))
    assert "policy.json is not a plain file" in found and "acceptance.json is not a plain file" in found
    assert "checkpoint/state.json lies in a linked folder" in found
    with pytest.raises(Refused, match="linked folder"):
        open_current(releases)


LISTS = [
    (lambda data: data["files"].update({"../outside": [1, "0" * 64]}), "no file of a bundle"),
    (lambda data: data["files"].update({"/etc/passwd": [1, "0" * 64]}), "no file of a bundle"),
    (lambda data: data["files"].update({"checkpoint/../../x": [1, "0" * 64]}), "no file of a bundle"),
    (lambda data: data["files"].update({"policy.json": [-1, "0" * 64]}), "expected a size and a sha256"),
    (lambda data: data["files"].update({"policy.json": [10**30, "0" * 64]}), "at most 64 bits"),
    (lambda data: data["files"].update({"policy.json": [1, "zz"]}), "expected a size and a sha256"),
    (lambda data: data["files"].pop("policy.json"), "lists no policy.json"),
    (lambda data: data.update(version=2), "version is 2"),
    (lambda data: data["files"].update({"checkpoint/a\nb": [1, "0" * 64]}), "cannot be printed"),
    (lambda data: data.update(run="rm"), "unknown key run"),
    (lambda data: data.update(previous="../x"), "no id of a bundle"),
    (lambda data: data.pop("ties"), "ties is missing"),
]


@pytest.mark.parametrize(("change", "words"), LISTS, ids=[words + str(at) for at, (_, words) in enumerate(LISTS)])
def test_a_list_that_cannot_be_is_refused_before_any_file_is_opened(two, change, words):
    releases, _, b = two
    edit_list(writable(releases / b), change)
    with pytest.raises(Refused, match=words):
        open_current(releases)
    with pytest.raises(Refused, match=words):
        verify(releases / b)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("../elsewhere", "expected the id of a bundle"),
        ("f" * 16, "not a release bundle"),
        (None, "no bundle is in use"),
    ],
)
def test_a_link_that_leads_to_no_bundle_is_refused(two, target, words):
    releases, _, _ = two
    (releases / "current").unlink()
    if target is not None:
        os.symlink(target, releases / "current")
    with pytest.raises(Refused, match=words):
        open_current(releases)
    with pytest.raises(Refused, match="is no folder of releases"):
        open_current(releases / "nothing")


def test_two_processes_do_not_promote_at_once(made, two):
    releases, _, b = two
    with locked(releases):
        with pytest.raises(Refused, match="another process is promoting"):
            promote(releases, step(made[0], 3))
        with pytest.raises(Refused, match="another process is promoting"):
            rollback(releases)
        assert open_current(releases).id == b and verify(releases) == []


# --- history


def test_a_link_that_was_moved_by_hand_becomes_part_of_the_history(made, two):
    releases, a, b = two
    (releases / "current").unlink()
    os.symlink(a, releases / "current")  # by hand: history still says b
    c = promote(releases, step(made[0], 3)).id
    assert [event.action for event in list_bundles(releases)[1].events][-2:] == ["undone", "promote"]
    (releases / "current").unlink()
    os.symlink(b, releases / "current")
    assert rollback(releases).id == c, "what was promoted last was in use before"


def test_a_torn_line_at_the_end_of_the_log_is_dropped_and_an_edited_log_refused(made, two):
    releases, a, b = two
    with (releases / "history.jsonl").open("ab") as file:
        file.write(b'{"action": "promote", "id"')
    assert verify(releases) == []
    assert rollback(releases).id == a
    lines = (releases / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [a, b, a]
    (releases / "history.jsonl").write_text('{"action": "explode", "id": null, "time": ""}\n')
    with pytest.raises(Refused, match=r"history\.jsonl line 1.*explode"):
        rollback(releases)


# --- conformance


def test_the_record_of_a_checkpoint_does_not_depend_on_how_it_was_sharded(tmp_path):
    records = []
    for tp in (1, 2, 3, 4):
        source = checkpoint(tmp_path / str(tp), tp=tp, dtype=torch.bfloat16)
        records.append(conformance_record(open_checkpoint(source), Manifest.read(source)))
    assert all(record == records[0] for record in records)


def test_the_record_holds_the_logits_of_the_head_with_its_bias(tmp_path):
    source = checkpoint(tmp_path, tied=False)
    stored = open_checkpoint(source)
    record = conformance_record(stored, Manifest.read(source))
    weight, bias = (stored.read(f"model.head.{name}").double() for name in ("weight", "bias"))
    expected = F.linear(fixed_hidden(6), weight, bias)
    assert record["head"] == "model.head.weight"
    for token_id, logits in record["probes"].items():
        assert torch.allclose(torch.tensor(logits, dtype=torch.float64), expected[:, int(token_id)], rtol=1e-12)
    assert [token_id for token_id, _ in record["best"]] == expected.argmax(1).tolist()
    assert set(record["probes"]) == {"0", "1", "2", "8"}
