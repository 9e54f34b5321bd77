"""Checkpoints of DeepSpeed: into a fresh process, at another TP size and padding, and out as whole tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.batch import assert_all_raise, attempt, run_batch
from tests.integrations.deepspeed_models import HALF, STEPS, Case, Model, build, host, oracle_of, start, train
from vocab_parallel import VocabLayout, VocabShard, verify_tied

pytestmark = pytest.mark.timeout(300)  # the first test waits for all ranks to save and to resume

BFLOAT16 = Case(1, 2, 2, dtype="bfloat16", float32_sums=True)
SAME = [
    *(Case(stage, 2, 2) for stage in (0, 1, 2, 3)),
    Case(2, 2, 2, offload=True),
    Case(3, 2, 2, construct="zero_init"),
    Case(3, 2, 2, dtype="bfloat16"),
    BFLOAT16,
]
# Saved as the first, converted, resumed as the second: tp 2 to 1 and back, to another padding, to 3; more replicas.
OTHER = [
    *((Case(stage, 2, 2), Case(stage, 2, 1)) for stage in (1, 2, 3)),
    *((Case(stage, 2, 1), Case(stage, 2, 2, padded=18)) for stage in (1, 3)),
    (Case(1, 1, 2), Case(1, 1, 3)),
    (Case(3, 1, 2), Case(3, 1, 3, padded=24)),
    (Case(2, 1, 2), Case(2, 2, 1)),
    (Case(3, 2, 2, bias=True), Case(3, 2, 1, bias=True)),
    (Case(1, 2, 2, tie=False, bias=True), Case(1, 2, 1, tie=False, bias=True)),
    (BFLOAT16, replace(BFLOAT16, tp=1)),
]
SAVED = list(dict.fromkeys([*SAME, *(source for source, _ in OTHER)]))
LIMIT = {"float32": 1e-5, "bfloat16": 1e-2}
Entry = tuple[Case, Any, str]


def _save(rank: int, world: int, entry: Entry) -> dict[str, Any]:
    """Trains to the half, saves, exports, and converts."""
    from vocab_parallel.integrations import deepspeed as integration

    case, _, folder = entry
    place = Path(folder) / str(case)
    with host():
        engine = start(case)
        train(case, engine, range(HALF))
        engine.save_checkpoint(str(place), "half")
        integration.export(engine, place / "whole.pt")
        if rank == 0 and case.stage > 0:
            integration.to_universal(place / "half", place / "universal")
        dist.barrier()
    return {}


def _resume(rank: int, world: int, entry: Entry) -> dict[str, Any]:
    """In a fresh process, from another start: loads, and trains the second half."""
    from vocab_parallel.integrations import deepspeed as integration

    source, case, folder = entry
    with host() as deepspeed:
        universal = case != source
        engine = start(case, seed=7, checkpoint={"load_universal": universal})
        before = engine.module.embedding.weight
        engine.load_checkpoint(str(Path(folder) / str(source)), "universal" if universal else "half")
        pairs = [integration.verify_tied(engine)]
        with deepspeed.zero.GatheredParameters([before]):
            padding = float(before[engine.module.embedding.shard.num_valid :].abs().sum())
        seen: dict[str, Any] = train(case, engine, range(HALF, STEPS))
        pairs.append(integration.verify_tied(engine))
        weight = engine.module.embedding.weight
        seen |= {"alias": engine.module.head.weight is weight is before, "pairs": pairs, "steps": engine.global_steps}
        seen["padding"] = padding
        return seen | {"state": integration.full_state_dict(engine, every_rank=True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where every source has saved."""
    place = str(tmp_path_factory.mktemp("deepspeed"))
    for world in {case.world for case in SAVED}:
        found = run_batch(_save, world, [(case, None, place) for case in SAVED if case.world == world],
                          timeout=110, detail=False)  # fmt: skip
        assert not (failed := [one for one in found.values() if isinstance(one, str)]), failed
    return place


@pytest.fixture(scope="module")
def resumed(folder: str) -> dict[Entry, Any]:
    entries: list[Entry] = [*((case, case, folder) for case in SAME), *((*pair, folder) for pair in OTHER)]
    found: dict[Entry, Any] = {}
    for world in sorted({target.world for _, target, _ in entries}):
        mine = [entry for entry in entries if entry[1].world == world]
        found |= run_batch(_resume, world, mine, timeout=110, detail=False)
    return found


PAIRS = [*((case, case) for case in SAME), *OTHER]


@pytest.mark.parametrize(("source", "case"), PAIRS, ids=lambda case: str(case))
def test_a_fresh_process_goes_on_as_one_process_would(
    source: Case, case: Case, folder: str, resumed: dict[Entry, Any]
) -> None:
    ranks = resumed[source, case, folder]
    assert not isinstance(ranks, str), ranks
    expected, limit = oracle_of(source, dp_from_half=case.dp), LIMIT[case.dtype]
    for at, step in enumerate(range(HALF, STEPS)):
        by_rank = [ranks[replica * case.tp]["losses"][at] for replica in range(case.dp)]
        assert abs(sum(by_rank) / case.dp - expected["losses"][step]) <= limit, f"loss of step {step}"
    for seen in ranks:
        assert seen["norms"] == pytest.approx(expected["norms"][HALF:], abs=limit)
        assert seen["padding"] == 0.0
        assert seen["alias"] is case.tie
        assert seen["pairs"] == [[("embedding.weight", "head.weight")] if case.tie else []] * 2
        assert seen["steps"] == STEPS * case.accumulate
        for name, weight in expected["state"].items():
            torch.testing.assert_close(
                seen["state"][name], weight, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("case", [case for case in SAVED if case.stage > 0], ids=str)
def test_a_universal_checkpoint_holds_the_real_rows_and_the_tie_once(case: Case, folder: str) -> None:
    zero = Path(folder) / str(case) / "universal" / "zero"
    names = {"embedding.weight", "norm.weight", "norm.bias", "block.weight", "block.bias"}
    names |= set() if case.tie else {"head.weight"}
    names |= {"head.bias"} if case.bias else set()
    assert {path.name for path in zero.iterdir() if path.is_dir()} == names
    for name in names & {"embedding.weight", "head.weight", "head.bias"}:
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            rows = torch.load(zero / name / f"{state}.pt")["param"]
            assert len(rows) == case.vocab, f"{state} of {name}"
            assert rows.shape[1:] == (() if name == "head.bias" else (4,))
            assert rows.dtype == torch.float32


@pytest.mark.parametrize("case", SAVED, ids=str)
def test_an_export_is_whole_in_full_precision_and_loads_into_one_process(case: Case, folder: str) -> None:
    state = torch.load(Path(folder) / str(case) / "whole.pt")
    expected = oracle_of(case, steps=HALF)["state"]
    assert set(state) == set(expected)
    for name, weight in expected.items():
        assert state[name].dtype == torch.float32
        torch.testing.assert_close(state[name], weight, rtol=0, atol=LIMIT[case.dtype])
    model = Model(VocabShard(VocabLayout(case.vocab, 1, multiple_of=1)), tie=case.tie, bias=case.bias)
    model.load_state_dict(state, strict=False)
    assert torch.equal(model.head.weight, state["embedding.weight" if case.tie else "head.weight"])
    assert len(verify_tied(model, required=False)) == case.tie


def _refused(rank: int, world: int, entry: tuple[str, str]) -> Any:
    """Loads what is not of this layout, or converts what is not ours."""
    from vocab_parallel.integrations import deepspeed as integration

    what, folder = entry
    place = Path(folder) / str(Case(1, 2, 1))
    with host():
        if what == "another TP size":
            return attempt(lambda: start(Case(1, 1, 2)).load_checkpoint(str(place), "half"))
        if what == "weights alone of stage 3":
            saved = Path(folder) / str(Case(3, 1, 2))
            return attempt(lambda: start(Case(3, 1, 2)).load_checkpoint(saved, "half", load_optimizer_states=False))
        if what == "another vocabulary":
            return attempt(lambda: start(Case(1, 2, 1, vocab=10)).load_checkpoint(str(place), "half"))
        if what == "another vocabulary, universal":
            engine = start(Case(1, 2, 1, vocab=8), checkpoint={"load_universal": True})
            return attempt(lambda: engine.load_checkpoint(str(place), "universal"))
        if what == "a conversion of what another engine saved":
            return attempt(lambda: integration.to_universal(place, Path(folder) / "nowhere"))
        assert what == "a frozen vocabulary"
        model = build(Case(1, 2, 1))
        model.embedding.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        engine = integration.initialize(model, config=Case(1, 2, 1).config(), optimizer=optimizer)[0]
        engine.save_checkpoint(str(Path(folder) / "frozen"), "tag")
        whole = integration.full_state_dict(engine, every_rank=True)["embedding.weight"]
        assert torch.equal(whole, model.embedding.weight[:9])
        return attempt(lambda: integration.to_universal(Path(folder) / "frozen" / "tag", Path(folder) / "nowhere"))


REFUSED = {
    "another TP size": [
        "embedding.weight",
        "V=9 padded to 9 over 1 ranks",
        "V=9 padded to 10 over 2 ranks",
        "vocab_parallel.integrations.deepspeed.to_universal",
    ],
    "weights alone of stage 3": ["zero_to_fp32", "export"],
    "another vocabulary": ["embedding.weight", "V=9", "V=10"],
    "another vocabulary, universal": ["embedding.weight", "V=9", "V=8"],
    "a conversion of what another engine saved": [
        "vocab_parallel.json",
        "vocab_parallel.integrations.deepspeed.initialize",
    ],
    "a frozen vocabulary": ["embedding.weight", "export"],
}


@pytest.fixture(scope="module")
def refused(folder: str) -> dict[Any, Any]:
    return run_batch(_refused, 2, [(what, folder) for what in REFUSED], timeout=60, detail=False)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_loaded_or_converted_is_refused_on_every_rank(
    what: str, folder: str, refused: dict[Any, Any]
) -> None:
    found = refused[what, folder]
    assert not isinstance(found, str), found
    kind = "ConfigError" if what == "weights alone of stage 3" else "CheckpointLayoutError"
    assert_all_raise(what, found, [kind], REFUSED[what])
