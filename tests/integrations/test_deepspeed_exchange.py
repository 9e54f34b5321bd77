"""What a DeepSpeed engine saved, as a checkpoint of ours: the same bits, and training that goes on without it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.batch import assert_all_raise, attempt, run_batch
from tests.integrations.deepspeed_models import ADAMW, HALF, Case, Model, build, host, make_shard, start, train
from tests.memory import added_memory
from tests.multirank.shared_world import Batch
from tests.unit.releases import identity_of
from vocab_parallel.checkpoint import load_checkpoint
from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.checkpoint.manifest_check import disagreements
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed.exchange import from_deepspeed
from vocab_parallel.vocabulary.manifest import Manifest

pytestmark = pytest.mark.timeout(300)  # the first test waits for all ranks to train and save

PLAIN, PARALLEL, FROZEN = "", "a trunk over ranks", "frozen"
Entry = tuple[Case, str, str]
CASES: list[tuple[Case, str]] = [
    (Case(1, 2, 2), PLAIN),
    (Case(2, 2, 2, dtype="bfloat16", tie=False, bias=True), PLAIN),
    (Case(3, 2, 2, dtype="bfloat16", tie=False, bias=True), PLAIN),
    (Case(3, 2, 2), PLAIN),
    (Case(1, 2, 2, dtype="bfloat16", float32_sums=True), PLAIN),
    (Case(1, 1, 4), PLAIN),  # 9 rows on 4 ranks: the last has none
    (Case(3, 4, 1), PLAIN),
    (Case(1, 2, 2), PARALLEL),
    (Case(3, 2, 2), PARALLEL),
    (Case(1, 2, 2), FROZEN),
    (Case(3, 2, 2), FROZEN),
]
TRAINED = [case for case, kind in CASES if kind == PLAIN]


def _name(case: Case, kind: str) -> str:
    return f"{case}{'-' + kind.replace(' ', '-') if kind else ''}"


def _engine(case: Case, kind: str) -> Any:
    from vocab_parallel.integrations import deepspeed as integration

    if kind == PLAIN and case.stage == 3:
        return start(
            case, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 20}
        )
    if kind == PLAIN:
        return start(case)
    model = build(case)
    model.register_buffer("scale", torch.tensor([2.0, 3.0]))
    if kind == PARALLEL:  # as Megatron marks them; the ranks hold other parts
        for name, dim in (("weight", 1), ("bias", 0)):
            part = getattr(model.block, name)
            vars(part).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
            part.data.add_(dist.get_rank() % case.tp)
    else:
        model.embedding.weight.requires_grad_(False)
        model.norm.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], **ADAMW)
    return integration.initialize(model, config=case.config(), optimizer=optimizer)[0]


def _save(rank: int, world: int, entry: Entry) -> dict[str, Any]:
    """Trains to the half, saves, and takes one step more."""
    from vocab_parallel.integrations import deepspeed as integration

    case, kind, folder = entry
    place = Path(folder) / _name(case, kind)
    with host():
        engine = _engine(case, kind)
        if kind == PLAIN:
            train(case, engine, range(HALF))
        engine.save_checkpoint(str(place), "half")
        seen = {"whole": integration.full_state_dict(engine)}
        if rank == 0 and kind == PLAIN and case in (CASES[0][0], CASES[2][0]):
            integration.to_universal(place / "half", place / "universal")
        if kind == PLAIN and case.dtype == "float32":
            train(case, engine, range(HALF, HALF + 1))
            seen["next"] = integration.full_state_dict(engine)
        dist.barrier()
        return seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where every engine saved and its conversion lies, and what its first rank saw."""
    folder = tmp_path_factory.mktemp("exchange")
    found = run_batch(_save, 4, [(case, kind, str(folder)) for case, kind in CASES], timeout=150, detail=False)
    seen = {}
    for case, kind in CASES:
        ranks = found[case, kind, str(folder)]
        assert not isinstance(ranks, str), ranks
        seen[_name(case, kind)] = ranks[0]
        place = folder / _name(case, kind)
        from_deepspeed(place, place / "ours", tp_size=2, multiple_of=1)
    return folder, seen


@pytest.mark.parametrize(("case", "kind"), CASES, ids=[_name(*one) for one in CASES])
def test_the_weights_are_those_of_the_engine_bit_for_bit(
    case: Case, kind: str, saved: tuple[Path, dict[str, Any]]
) -> None:
    folder, seen = saved
    stored = open_checkpoint(folder / _name(case, kind) / "ours")
    stored.verify()
    whole = dict(seen[_name(case, kind)]["whole"])
    dtype = getattr(torch, case.dtype)
    assert {key for key in stored.tensors if key.startswith("model.")} == {f"model.{name}" for name in whole}
    for name, value in whole.items():
        of_model = stored.read(f"model.{name}")
        is_buffer = name == "scale"
        assert of_model.dtype == (torch.float32 if is_buffer else dtype)
        assert torch.equal(of_model, value.to(of_model.dtype)), name
        master = f"optimizer.{name}.master_weight"
        assert (master in stored.tensors) == (case.dtype == "bfloat16")
        if master in stored.tensors:
            assert torch.equal(stored.read(master), value), name
    tables = {"embedding.weight"} | ({"head.bias"} if case.bias else set()) | (set() if case.tie else {"head.weight"})
    assert set(stored.state["tables"]) == tables
    assert stored.state["ties"] == ({"head.weight": "embedding.weight"} if case.tie else {})
    assert stored.tensors["model.embedding.weight"][1] == (case.vocab, 4)
    assert stored.step == (HALF if kind == PLAIN else 0)
    assert stored.state["extra"]["deepspeed"]["zero_stage"] == case.stage


@pytest.mark.parametrize("case", [CASES[0][0], CASES[2][0]], ids=str)
def test_the_optimizer_state_is_that_of_a_universal_checkpoint(
    case: Case, saved: tuple[Path, dict[str, Any]]
) -> None:  # fmt: skip
    place = saved[0] / str(case)
    stored = open_checkpoint(place / "ours")
    for folder in sorted((place / "universal" / "zero").iterdir()):
        if not folder.is_dir():
            continue
        for state in ("exp_avg", "exp_avg_sq", "fp32"):
            key = f"optimizer.{folder.name}.{state if state != 'fp32' else 'master_weight'}"
            key = key if key in stored.tensors else f"model.{folder.name}"
            value = torch.load(folder / f"{state}.pt")
            assert torch.equal(stored.read(key), value["param"] if isinstance(value, dict) else value), key
        step = stored.read(f"optimizer.{folder.name}.step")
        assert step.dtype == torch.float32
        assert step.shape == ()
        assert step == HALF


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_every_trained_parameter_has_its_moments(case: Case, saved: tuple[Path, dict[str, Any]]) -> None:
    stored = open_checkpoint(saved[0] / str(case) / "ours")
    for key in [key for key in stored.tensors if key.startswith("model.")]:
        name = key.removeprefix("model.")
        for state in ("exp_avg", "exp_avg_sq"):
            moment = stored.read(f"optimizer.{name}.{state}")
            assert moment.shape == stored.tensors[key][1]
            assert moment.dtype == torch.float32
            assert moment.abs().sum() > 0


def test_an_engine_that_has_not_stepped_gives_weights_alone(saved: tuple[Path, dict[str, Any]]) -> None:
    stored = open_checkpoint(saved[0] / _name(Case(3, 2, 2), PARALLEL) / "ours")
    assert not [key for key in stored.tensors if key.startswith("optimizer.")]


def _go_on(rank: int, folder: str, case: Case) -> dict[str, Tensor]:
    """One step in plain torch, from the conversion, at this world's TP size."""
    world = dist.get_world_size()
    shard = make_shard(world, case.vocab)
    model = Model(shard, tie=case.tie, bias=case.bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    step, _ = load_checkpoint(Path(folder) / str(case) / "ours", model, optimizer)
    losses = [model(*case.batch(step, replica, 0)) for replica in range(case.dp)]
    torch.stack(losses).mean().backward()
    optimizer.step()
    tables = {"embedding.weight", "head.weight", "head.bias"}
    return {
        name: gather_vocab(shard, value.detach()).clone() if name in tables else value.detach().clone()
        for name, value in model.named_parameters()
    }


GO_ON = [case for case in TRAINED if case.dtype == "float32"]


@pytest.fixture(scope="module")
def going_on(saved: tuple[Path, dict[str, Any]]) -> Batch:
    return Batch(_go_on, [(str(saved[0]), case) for case in GO_ON])


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("case", GO_ON, ids=str)
def test_a_plain_model_at_any_tp_size_takes_the_engines_next_step(
    case: Case, tp: int, saved: tuple[Path, dict[str, Any]], going_on: Batch
) -> None:
    folder, seen = saved
    for after in going_on(tp, str(folder), case):
        wanted = seen[str(case)]["next"]
        assert set(after) == set(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            assert not torch.equal(value, seen[str(case)]["whole"][name]), "a step that changes nothing shows nothing"


# Ours of the first, into an engine of the second: another stage, TP size, padding, number of replicas, dtype.
INTO = [
    (Case(1, 2, 2), Case(3, 2, 2)),
    (Case(3, 2, 2), Case(2, 2, 2, padded=18)),
    (Case(3, 4, 1), Case(1, 4, 1)),
    (Case(1, 1, 4), Case(3, 4, 1)),
    (Case(1, 2, 2), Case(2, 1, 4)),
    (
        Case(3, 2, 2, dtype="bfloat16", tie=False, bias=True),
        Case(1, 4, 1, dtype="bfloat16", float32_sums=True, tie=False, bias=True),
    ),
    (Case(2, 2, 2, dtype="bfloat16", tie=False, bias=True), Case(3, 2, 2, dtype="bfloat16", tie=False, bias=True)),
    (Case(3, 2, 2, dtype="bfloat16", tie=False, bias=True), Case(2, 1, 4, tie=False, bias=True)),
]


BAD = {
    "weights alone": ["no optimizer state", "load_checkpoint"],
    "more rows": ["model.embedding.weight", "[10, 4]", "[9, 4]"],
    "fewer parameters": ["model.block.bias", "not at all"],
    "more parameters": ["model.block2.bias", "another model"],
    "moments without steps": ["exp_avg_sq without a count of steps"],
    "damaged": ["__0_0.distcp", "sha256"],
}


def _write_bad(folder: Path) -> None:
    """Checkpoints of ours that do not fit the first case."""
    stored = open_checkpoint(folder / str(CASES[0][0]) / "ours")
    kept = {name: stored.state[name] for name in ("layout", "tables", "ties")}
    good = {key: stored.read(key) for key in stored.tensors}
    rows = {key: torch.cat([v, v[:1]]) if len(v.shape) and len(v) == 9 else v for key, v in good.items()}
    for what, tensors in {
        "weights alone": {key: value for key, value in good.items() if key.startswith("model.")},
        "more rows": rows,
        "fewer parameters": {key: value for key, value in good.items() if key != "model.block.bias"},
        "more parameters": good | {"model.block2.bias": torch.zeros(4)},
        "moments without steps": {key: value for key, value in good.items() if not key.endswith(".step")},
        "damaged": good,
    }.items():
        write_checkpoint(folder / what, [tensors], state=make_state(3, tensors, **kept))
    file = folder / "damaged" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _into(rank: int, world: int, entry: tuple[Case, Case, str]) -> Any:
    """In a fresh engine, from another start: loads ours, and takes one step; another tie is refused."""
    from vocab_parallel.integrations import deepspeed as integration
    from vocab_parallel.integrations.deepspeed.loading import load_ours

    source, case, folder = entry
    with host() as deepspeed:
        engine = start(case, seed=7)
        seen: dict[str, Any] = {}
        for what in BAD if case.tie else ():
            seen[what] = attempt(lambda what=what: load_ours(engine, Path(folder) / what))  # type: ignore[misc]
        step = load_ours(engine, Path(folder) / str(source) / "ours")
        seen |= {"step": [step, engine.global_steps], "whole": integration.full_state_dict(engine, every_rank=True)}
        weight = engine.module.embedding.weight
        with deepspeed.zero.GatheredParameters([weight]):
            seen["padding"] = float(weight[engine.module.embedding.shard.num_valid :].detach().abs().sum())
        engine.save_checkpoint(str(Path(folder) / "again" / f"{source}-{case}"), "half")
        other = start(replace(case, tie=not case.tie, bias=False), seed=7)
        before = integration.full_state_dict(other, every_rank=True)
        seen["refused"] = attempt(lambda: load_ours(other, Path(folder) / str(source) / "ours"))
        after = integration.full_state_dict(other, every_rank=True)
        seen["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
        train(case, engine, range(HALF, HALF + 1))
        return seen | {"next": integration.full_state_dict(engine, every_rank=True)}


@pytest.fixture(scope="module")
def into(saved: tuple[Path, dict[str, Any]]) -> dict[Any, Any]:
    _write_bad(saved[0])
    entries = [(*pair, str(saved[0])) for pair in INTO]
    return run_batch(_into, 4, entries, timeout=150, detail=False)


@pytest.mark.parametrize(("source", "case"), INTO, ids=str)
def test_an_engine_of_another_shape_goes_on_from_ours(
    source: Case, case: Case, saved: tuple[Path, dict[str, Any]], into: dict[Any, Any], tmp_path: Path
) -> None:
    folder, seen = saved
    ranks = into[source, case, str(folder)]
    assert not isinstance(ranks, str), ranks
    for one in ranks:
        assert one["step"] == [HALF, HALF]
        assert one["padding"] == 0.0
        for name, value in seen[str(source)]["whole"].items():
            assert torch.equal(one["whole"][name], value), name
        if source.dp == case.dp and case.dtype == "float32":  # other replicas have other batches
            for name, value in seen[str(source)]["next"].items():
                torch.testing.assert_close(one["next"][name], value, rtol=0, atol=2e-6)
        assert one["unchanged"]
    assert_all_raise("another tie", [one["refused"] for one in ranks], ["CheckpointLayoutError"], ["ties"])
    for what, words in BAD.items() if case.tie else ():
        assert_all_raise(what, [one[what] for one in ranks], ["CheckpointLayoutError"], words)
    again = from_deepspeed(folder / "again" / f"{source}-{case}", tmp_path / "again")
    one, two = open_checkpoint(folder / str(source) / "ours"), open_checkpoint(again)
    for key in [key for key in two.tensors if key.startswith("optimizer.")]:
        assert torch.equal(one.read(key), two.read(key)), key


@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_steps_are_found_as_numbers_and_as_tensors(kind: str, tmp_path: Path) -> None:
    from vocab_parallel.integrations.deepspeed.loading import _kept_states

    names, steps = ["a", "b"], {f"optimizer.{name}.step": 5 for name in ("a", "b")}
    tensors = {f"optimizer.{name}.exp_avg_sq": torch.ones(2) for name in names}
    if kind == "tensors":
        tensors |= {key: torch.tensor(float(value)) for key, value in steps.items()}
    layout = {"vocab_size": 9, "padded_size": 9, "tp_size": 1}
    state = make_state(5, tensors, layout=layout, tables=[], scalars=steps if kind == "numbers" else None)
    write_checkpoint(tmp_path / "ours", [tensors], state=state)
    assert _kept_states(open_checkpoint(tmp_path / "ours"), names) == (["exp_avg_sq"], 5.0)


def _copy(saved: tuple[Path, dict[str, Any]], target: Path, case: Case = CASES[0][0]) -> Path:
    shutil.copytree(saved[0] / str(case), target)
    shutil.rmtree(target / "ours")
    return target


def _note(folder: Path, **entry: Any) -> None:
    path = folder / "half" / "vocab_parallel.json"
    note = json.loads(path.read_text())
    note["parameters"]["embedding.weight"] |= entry
    path.write_text(json.dumps(note))


def _replaced(path: Path, change: Any) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


MODEL, STATES = "half/mp_rank_01_model_states.pt", "half/zero_pp_rank_1_mp_rank_00_optim_states.pt"
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "a missing partition": (lambda p: (p / STATES).unlink(), ["zero_pp_rank_1_mp_rank_00_optim_states.pt", "2 data"]),
    "a missing model": (lambda p: (p / MODEL).unlink(), ["mp_rank_01_model_states.pt", "2 tensor-parallel"]),
    "no file at all": (lambda p: [one.unlink() for one in p.glob("half/*.pt")], ["model_states.pt", "missing"]),
    "a cut-off file": (lambda p: (p / STATES).write_bytes((p / STATES).read_bytes()[:900]), [STATES, "damaged"]),
    "another engine's": (
        lambda p: (p / "half" / "vocab_parallel.json").unlink(),
        ["vocab_parallel.json", "vocab_parallel.integrations.deepspeed.initialize"],
    ),
    "another layout beside it": (lambda p: _note(p, tp_size=4), ["2 tensor-parallel", "says 4"]),
    "another padding beside it": (lambda p: _note(p, padded_size=12), ["embedding.weight", "[5, 4]", "12 rows"]),
    "a layout that cannot be": (lambda p: _note(p, vocab_size=-1), ["vocab_parallel.json", "damaged"]),
    "a tag outside": (lambda p: (p / "latest").write_text("../elsewhere"), ["latest", "../elsewhere"]),
    "a universal checkpoint": (lambda p: (p / "latest").write_text("universal"), ["universal", "made from"]),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_with_both_sides_and_nothing_is_written(
    what: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    change, words = REFUSED[what]
    source = _copy(saved, tmp_path / "source")
    change(source)
    with pytest.raises(CheckpointLayoutError) as raised:
        from_deepspeed(source, tmp_path / "ours")
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert not (tmp_path / "ours").exists()


def _state_of_another_shape(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg_sq_row"] = torch.zeros(7)


def _lost_fragment(content: Any) -> None:
    content["optimizer_state_dict"]["param_slice_mappings"][0].popitem()


CHANGED = {
    "a factored moment": (_state_of_another_shape, ["exp_avg_sq_row"]),
    "a lost fragment": (_lost_fragment, ["block.bias", "rank 0"]),
    "no masters": (lambda c: c["optimizer_state_dict"].clear(), ["0.19", "KeyError"]),
}


@pytest.mark.parametrize("what", CHANGED)
def test_files_that_do_not_hold_every_element_are_refused(
    what: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    change, words = CHANGED[what]
    source = _copy(saved, tmp_path / "source")
    _replaced(source / STATES, change)
    with pytest.raises(CheckpointLayoutError) as raised:
        from_deepspeed(source, tmp_path / "ours")
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_a_stage_without_zero_is_refused_with_what_to_do(tmp_path: Path) -> None:
    content = {
        "module": {"embedding.weight": torch.zeros(5, 4)}, "dp_world_size": 1, "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 0}},
    }  # fmt: skip
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    _write_note(tmp_path, 5, 4, 1)
    with pytest.raises(CheckpointLayoutError, match=r"stage 0.*save_checkpoint"):
        from_deepspeed(tmp_path, tmp_path / "ours")


def test_another_vocabulary_or_an_old_target_is_refused(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:  # fmt: skip
    place = saved[0] / str(CASES[0][0])
    with pytest.raises(CheckpointLayoutError, match=r"9 real rows, not the 8 .*migrate"):
        from_deepspeed(place, tmp_path / "ours", vocab_size=8)
    with pytest.raises(CheckpointLayoutError, match="exists"):
        from_deepspeed(place, place / "ours")


class _Runs:
    """As an attacker would pickle a call."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({self._path!r}, 'w').close()",)


def test_no_code_of_a_file_runs_and_the_ordered_table_beside_it_goes_along(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    source = _copy(saved, tmp_path / "source")
    _replaced(source / MODEL, lambda content: content.update(client_state=_Runs(str(tmp_path / "ran"))))
    identity_of().write(source / "vocabulary.json")  # as the app puts it beside
    from_deepspeed(source, tmp_path / "ours")
    assert not (tmp_path / "ran").exists()
    assert _equal(open_checkpoint(tmp_path / "ours"), open_checkpoint(saved[0] / str(CASES[0][0]) / "ours"))
    assert Manifest.read(tmp_path / "ours").vocabulary.ordered_table_sha256 == identity_of().sha256
    assert disagreements(tmp_path / "ours") == [] and (tmp_path / "ours" / "vocabulary.json").is_file()
    identity_of(["a", "b", "c"]).write(source / "vocabulary.json")
    with pytest.raises(CheckpointLayoutError, match=r"has 3 ids, .*/half has 9 real rows"):
        from_deepspeed(source, tmp_path / "other")


def _equal(one: StoredCheckpoint, two: StoredCheckpoint) -> bool:
    return one.tensors == two.tensors and all(torch.equal(one.read(key), two.read(key)) for key in one.tensors)


WIDTH, TP = 64, 2


def _write_note(folder: Path, vocab: int, width: int, tp_size: int) -> None:
    entry = {"vocab_size": vocab, "padded_size": vocab, "tp_size": tp_size, "row": [width], "trained": True}
    note = {"parameters": {"embedding.weight": entry}, "aliases": {}}
    (folder / "vocab_parallel.json").write_text(json.dumps(note))


def _write_large(folder: Path, vocab: int) -> Path:
    """The files of stage 3 over two tensor-parallel ranks, as DeepSpeed lays them out, with one large table."""
    folder.mkdir()
    rows = vocab // TP
    _write_note(folder, vocab, WIDTH, TP)
    for rank in range(TP):
        flat = torch.arange(rows * WIDTH, dtype=torch.float32)
        model = {
            "module": {"embedding.weight": torch.empty(0)}, "buffer_names": [], "dp_world_size": 1,
            "mp_world_size": TP, "param_shapes": [{"embedding.weight": torch.Size([rows, WIDTH])}],
            "ds_config": {"zero_optimization": {"stage": 3}}, "global_steps": 1,
        }  # fmt: skip
        torch.save(model, folder / f"zero_pp_rank_0_mp_rank_{rank:02d}_model_states.pt")
        state = {0: {"momentum_buffer": flat + 1}}
        scaler = SimpleNamespace(cur_scale=1.0)  # of a class that is not loaded
        optimizer = {
            "fp32_flat_groups": [flat], "loss_scaler": scaler,
            "optimizer_state_dict": {"state": state, "param_groups": [{"params": [0]}]},
        }  # fmt: skip
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt")
    return folder


def _convert(source: str, target: str) -> None:
    from_deepspeed(source, target, tp_size=TP)
    shutil.rmtree(target)


@pytest.mark.parametrize("vocab", [2**18, 3 * 2**17])
def test_a_conversion_holds_less_than_a_shard(vocab: int, tmp_path: Path) -> None:
    small, large = _write_large(tmp_path / "small", 2**12), _write_large(tmp_path / "large", vocab)
    added = added_memory(
        _convert, str(large), str(tmp_path / "ours"), warm_up=(str(small), str(tmp_path / "warm"))
    )  # fmt: skip
    shard = vocab // TP * WIDTH * 4
    assert added.resident < 1.3 * shard, f"{added}, a shard has {shard}"
    assert added.private < 1.3 * shard, f"{added}, a shard has {shard}"


FILES = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
BOMB = torch.zeros(1).expand(2**40)
CLAIMS: dict[str, tuple[int, Any, list[str]]] = {
    "a buffer": (0, lambda c: c.update(module={"b": BOMB}, buffer_names=["b"]), ["b has 1099511627776"]),
    "masters": (1, lambda c: c["optimizer_state_dict"].update(fp32_flat_groups=[BOMB]), ["0 has 1099511627776"]),
    "ranks": (0, lambda c: c.update(dp_world_size=2**20 - 1), ["1048575 x 2 ranks"]),
    "a number": (1, lambda c: _base(c)["state"][0].update(beta=float("nan")), ["beta is nan"]),
}


def _base(content: Any) -> Any:
    return content["optimizer_state_dict"]["optimizer_state_dict"]


@pytest.mark.parametrize("what", CLAIMS)
def test_nothing_is_made_by_what_a_file_only_claims(what: str, tmp_path: Path) -> None:
    at, change, words = CLAIMS[what]
    source = _write_large(tmp_path / "source", 8)
    _replaced(source / FILES[at], change)
    with pytest.raises(CheckpointLayoutError) as raised:
        from_deepspeed(source, tmp_path / "ours")
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_a_table_that_is_larger_than_a_block_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    vocab = 2**15 + 64
    from_deepspeed(_write_large(tmp_path / "large", vocab), tmp_path / "ours", tp_size=3)
    stored = open_checkpoint(tmp_path / "ours")
    flat = torch.arange(vocab // TP * WIDTH, dtype=torch.float32).repeat(TP).view(vocab, WIDTH)
    assert torch.equal(stored.read("model.embedding.weight"), flat)
    assert torch.equal(stored.read("optimizer.embedding.weight.momentum_buffer"), flat + 1)
