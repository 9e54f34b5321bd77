"""``manifest show|compare|verify``, the manifest of a run folder, and the gate of a resumed training."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from vocab_parallel import VocabLayout, app
from vocab_parallel.checkpoint.manifest_check import disagreements
from vocab_parallel.checkpoint.migration.migrating import migrate_checkpoint
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.decode.policy import Policy
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import (
    LossContract,
    Manifest,
    RandomnessContract,
    TensorSpec,
    VocabularyContract,
)
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import Zeros

ROOT = Path(__file__).parents[2]
V, D = 9, 4
TOKENS = VocabIdentity.of_tokens([f"t{at}" for at in range(V)], special_ids={"eos": 2}, added=[8])
TENSORS = {
    "model.embedding.weight": torch.zeros(V, D), "model.trunk.weight": torch.ones(D, D),
    "optimizer.embedding.weight.exp_avg": torch.zeros(V, D), "optimizer.embedding.weight.step": torch.tensor(3.0),
}  # fmt: skip
TIES = {"lm_head.weight": "embedding.weight"}


def manifest(**changes: Any) -> Manifest:
    specs = {key: (value.dtype, value.shape) for key, value in TENSORS.items()}
    made = Manifest.of_tensors(
        specs, tables=["embedding.weight"], ties=TIES, layout=VocabLayout(V, 2, multiple_of=1), identity=TOKENS, step=3
    )
    return dataclasses.replace(made, **changes)


def checkpoint(place: Path, said: Manifest | None = None, **state: Any) -> Path:
    """A checkpoint of TENSORS that was saved at TP 2, with a manifest."""
    made = make_state(
        3, TENSORS, layout={"vocab_size": V, "padded_size": 10, "tp_size": 2}, tables=["embedding.weight"], ties=TIES,
        extra={"vocabulary_sha256": TOKENS.sha256},
    )  # fmt: skip
    TOKENS.write(place.parent / "vocabulary.json")
    assets = {"vocabulary.json": place.parent / "vocabulary.json"}
    return write_checkpoint(place, [TENSORS], state=made | state, manifest=said or manifest(), assets=assets)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = app.main(["manifest", *map(str, words)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_show_prints_every_group_of_a_checkpoint_a_run_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    place = checkpoint(tmp_path / "checkpoints" / "step-00000003")
    manifest(notes={"run": True}).write(tmp_path / "manifest.json")
    status, shown, _ = run(capsys, "show", place)
    assert status == 0 and run(capsys, "show", tmp_path) == (0, shown, "")  # a run's is that of its latest checkpoint
    assert run(capsys, "show", place / "manifest.json")[1] == shown
    for words in ("head (version 1)", TOKENS.sha256, "eos=2", "[0, 5) [5, 9)", "float32 [9, 4]", "loss: not recorded",
                  "lm_head.weight=embedding.weight", "one Parameter", "notes: none"):  # fmt: skip
        assert words in shown, f"{words}\n{shown}"
    status, text, _ = run(capsys, "show", place, "--json")
    assert json.loads(text) == manifest().to_json()
    assert run(capsys, "show", tmp_path / "checkpoints")[1] == shown
    shutil.rmtree(place)
    assert "run  true" in run(capsys, "show", tmp_path)[1]  # without a checkpoint the run's own


def test_show_lists_few_tensors_unless_all_are_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = manifest()
    assert made.checkpoint is not None
    more = {f"model.layer.{at}": spec for at in range(20) for spec in [made.checkpoint.tensors["model.trunk.weight"]]}
    many = manifest(checkpoint=dataclasses.replace(made.checkpoint, tensors=more), loss=LossContract(),
                    randomness=RandomnessContract())  # fmt: skip
    file = many.write(tmp_path)
    shown, everything = run(capsys, "show", file)[1], run(capsys, "show", file, "--all")[1]
    assert "8 more: --all" in shown and "model.layer.19" not in shown and "model.layer.19" in everything
    assert "Philox4x32-10" in shown and "smoothing_over" in shown
    none = dataclasses.replace(many, checkpoint=dataclasses.replace(made.checkpoint, tensors={}))
    other = none.write(tmp_path / "other.json")
    status, shown, _ = run(capsys, "compare", file, other)
    assert (status, shown.count("model.layer")) == (1, 12) and "and 8 more of checkpoint.tensors: --all" in shown
    assert run(capsys, "compare", file, other, "--all")[1].count("model.layer") == 20


def test_compare_groups_differences_and_its_status_depends_on_what_must_match(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual, files = manifest(loss=LossContract()), {}
    for name, changes in {
        "usual": {}, "noted": {"notes": {"why": "a test"}}, "summed": {"loss": LossContract(reduction="sum")},
        "wide": {"head": dataclasses.replace(usual.head, width=8)},
    }.items():  # fmt: skip
        files[name] = manifest(**{"loss": LossContract(), **changes}).write(tmp_path / f"{name}.json")
    assert run(capsys, "compare", files["usual"], files["usual"])[:2] == (
        0, f"a: {files['usual']}\nb: {files['usual']}\n\nno difference\n"
    )  # fmt: skip
    status, shown, _ = run(capsys, "compare", files["usual"], files["noted"])
    assert status == 0 and "informational\n  notes.why: none | a test" in shown and "must match" not in shown
    status, shown, _ = run(capsys, "compare", files["usual"], files["summed"])
    assert status == 1 and "must match: the numbers mean different things\n  loss.reduction: mean | sum" in shown
    assert run(capsys, "compare", files["usual"], files["summed"], "--for", "compare")[0] == 1
    status, shown, _ = run(capsys, "compare", files["usual"], files["summed"], "--for", "load")
    assert status == 0 and "may tune" in shown  # a sum loads as well as a mean
    assert run(capsys, "compare", files["usual"], files["wide"], "--for", "load")[0] == 1


def test_bad_input_ends_with_status_2_and_says_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text("{")
    good = manifest().write(tmp_path / "good.json")
    (tmp_path / "empty").mkdir()
    for words, message in (
        (["show", tmp_path / "none"], "none is not there: expected a manifest.json"),
        (["show", tmp_path / "empty"], "holds no manifest.json"),
        (["compare", good, tmp_path / "broken.json"], "expected a manifest (version 1"),
        (["verify", good], "lies beside no checkpoint"),
    ):
        status, shown, error = run(capsys, *words)
        assert (status, shown.replace("\n", "")) == (2, "") and message in error, error
    for wrong in (["manifest"], ["manifest", "shwo", "x"], ["manifest", "compare", str(good)]):
        with pytest.raises(SystemExit) as caught:
            app.main(wrong)
        assert caught.value.code == 2


def test_verify_passes_a_checkpoint_as_it_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = checkpoint(tmp_path / "step-00000003")
    assert run(capsys, "verify", place) == (0, f"{place}: the manifest and all files agree\n", "")


def tampered(place: Path, what: str) -> None:
    """Changes one part of a whole checkpoint."""
    if what == "a flipped byte":
        [file] = place.glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif what == "a missing file":
        next(place.glob("*.distcp")).unlink()
    elif what == "another vocabulary":
        VocabIdentity.of_tokens([f"u{at}" for at in range(V)]).write(place / "vocabulary.json")
    elif what == "an edited manifest":
        dataclasses.replace(
            manifest(), checkpoint=dataclasses.replace(MADE.checkpoint, tp_size=1, shard_ranges=())
        ).write(place)
    elif what == "junk for a manifest":
        (place / "manifest.json").write_text("{}")


MADE, TABLE = manifest(), TensorSpec("float32", (V, D))
assert MADE.checkpoint is not None
OTHERS = {
    "a tensor too many": (
        {"checkpoint": dataclasses.replace(MADE.checkpoint, tensors={**MADE.checkpoint.tensors,
                                                                     "model.head.weight": TABLE})},
        ["model.head.weight is in manifest.json, the files have no such tensor"],
    ),
    "a tensor unnamed": (
        {"checkpoint": dataclasses.replace(MADE.checkpoint, tensors={})},
        [f"{key} is in the files, manifest.json does not name it" for key in TENSORS],
    ),
    "another dtype": (
        {"checkpoint": dataclasses.replace(MADE.checkpoint, tensors=MADE.checkpoint.tensors | {
            "model.trunk.weight": MADE.checkpoint.tensors["model.trunk.weight"]._replace(dtype="bfloat16")})},
        ["model.trunk.weight is bfloat16 [4, 4] in manifest.json, float32 [4, 4] in the files"],
    ),
    "another step": (
        {"checkpoint": dataclasses.replace(MADE.checkpoint, step=4)}, ["checkpoint.step is 4 in manifest.json, 3 in"],
    ),
    "another tie": (
        {"tying": dataclasses.replace(MADE.tying, aliases={})}, ["tying.aliases is {} in manifest.json"],
    ),
    "another hash": (
        {"vocabulary": dataclasses.replace(MADE.vocabulary, ordered_table_sha256="0" * 64)},
        ["vocabulary.ordered_table_sha256 is 000", "in vocabulary.json", "in state.json"],
    ),
    "other special ids": (
        {"vocabulary": dataclasses.replace(MADE.vocabulary, special_ids={"eos": 3})},
        ["vocabulary.special_ids is {'eos': 3} in manifest.json, {'eos': 2} in vocabulary.json"],
    ),
    "nothing of the checkpoint": ({"checkpoint": None}, ["its group `checkpoint` is null"]),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_verify_names_what_the_manifest_says_and_what_the_files_hold(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, wanted = OTHERS[what]
    place = checkpoint(tmp_path / "step-00000003", manifest(**changes))
    status, shown, error = run(capsys, "verify", place)
    assert status == 1 and "disagreement" in error and all(words in shown for words in wanted), shown
    assert len(shown.splitlines()) == len(disagreements(place)) <= len(wanted)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a flipped byte", "has sha256"), ("a missing file", "is missing"),
        ("another vocabulary", "vocabulary.json has"),
        ("an edited manifest", "checkpoint.tp_size is 1 in manifest.json, 2 in state.json"),
        ("an edited manifest", "manifest.json has"), ("junk for a manifest", "got version None"),
    ],
)  # fmt: skip
def test_verify_finds_files_that_were_changed_after_the_save(
    what: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = checkpoint(tmp_path / "step-00000003")
    tampered(place, what)
    status, shown, _ = run(capsys, "verify", place)
    assert status == 1 and words in shown, shown


def test_verify_tells_a_manifest_that_is_gone_from_one_that_never_was(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "step-00000003")
    (place / "manifest.json").unlink()
    assert any("manifest.json is missing" in line for line in disagreements(place))
    state = json.loads((place / "state.json").read_text())
    del state["files"]["manifest.json"]
    (place / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointLayoutError, match=r"cannot read .*manifest\.json"):  # it was saved without one
        disagreements(place)


def test_what_the_manifest_has_not_recorded_is_no_disagreement_with_a_table_beside_it(tmp_path: Path) -> None:
    bare = VocabularyContract(V)
    place = checkpoint(tmp_path / "step-00000003", manifest(vocabulary=bare))
    assert disagreements(place) == []


def test_rows_that_a_map_has_moved_are_no_longer_those_of_the_old_table(tmp_path: Path) -> None:
    place = checkpoint(tmp_path / "step-00000003")
    moved = migrate_checkpoint(place, tmp_path / "moved", VocabMap.permutation([1, 0, *range(2, V)]), init=Zeros())
    found = Manifest.read(moved.target)
    assert found.vocabulary == VocabularyContract(V) and disagreements(moved.target) == []


SETTINGS = ["data.vocab=bytes", "data.max_bytes=60000", "model.dim=16", "model.layers=1", "model.context=16",
            "train.steps=1", "train.validation_sequences=2", "train.validation_every=0", "oracle.every=0",
            "generate.max_tokens=2", "generate.seed=5"]  # fmt: skip


def test_a_run_writes_its_manifest_and_a_resumed_one_must_be_what_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SETTINGS, f"runs={tmp_path}", f"data.cache={tmp_path / 'cache'}"]
    assert app.main(["train", str(ROOT / "configs" / "smoke.yaml"), *words]) == 0
    [folder] = tmp_path.glob("smoke-*")
    found = Manifest.read(folder / "manifest.json")
    assert (found.vocabulary.size, found.head.width, found.runtime.host) == (259, 16, "plain")
    assert found.vocabulary.source == "bytes" and found.vocabulary.special_ids is not None
    assert found.vocabulary.special_ids["eos"] == 2 and found.vocabulary.ordered_table_sha256 is not None
    assert found.tying.aliases == TIES and found.loss == LossContract() and found.notes["corpus"]["train_tokens"] > 0
    assert found.policy is not None and found.policy.stop_ids == (2,) and found.randomness is not None
    assert Policy.from_dict(found.policy.policy_dict()).vocab_size == 259 and found.randomness.seed == 5
    capsys.readouterr()

    def resume(*more: str) -> tuple[int, str]:
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        status = app.main(["train", str(folder), *more])
        after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        assert status == 0 or after == before  # a refused run has changed nothing
        return status, capsys.readouterr().err

    status, error = resume("model.dim=32")
    assert status == 2 and "head.width is 16 saved, 32 here" in error and "No command changes a width" in error
    status, error = resume("model.head_bias=true")
    assert status == 2 and "head.bias is false saved, true here" in error
    status, error = resume("train.steps=2", "generate.temperature=0.5")  # may be tuned
    assert status == 0, error

    # Of a checkpoint that was saved without a manifest the run's own is asked.
    [place] = (folder / "checkpoints").glob("step-00000002")
    (place / "manifest.json").unlink()
    state = json.loads((place / "state.json").read_text())
    del state["files"]["manifest.json"]
    (place / "state.json").write_text(json.dumps(state))
    dataclasses.replace(found, head=dataclasses.replace(found.head, softcap=30.0)).write(folder)
    status, error = resume("train.steps=3")
    assert status == 2 and "head.softcap is 30.0 saved, none here" in error
