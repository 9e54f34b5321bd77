"""A checkpoint of any number of ranks loads at any other, with what the optimizer keeps, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multirank.checkpoint_cases import STEPS, load_and_train, oracle, train_and_save
from tests.multirank.shared_world import Batch
from vocab_parallel.checkpoint import open_checkpoint
from vocab_parallel.checkpoint.states import SHARDS

# tied, optimizer, tp_invariant
TIED = (True, "AdamW", True)
CASES = [TIED, (False, "AdamW", False), (False, "SGD", False),
         (True, "amsgrad", False), (True, "Adafactor", False), (False, "Muon", False)]  # fmt: skip
ROW_WISE = [case for case in CASES if case[1] not in ("Adafactor", "Muon")]  # the others look at whole columns
FROM = 2
TOLERANCE = 2e-5  # of float32 sums in another order, after 40 steps


def name(case: tuple[Any, ...]) -> str:
    return "-".join(str(part) for part in case)


class Saved:
    """Every case trained on two ranks, and loaded on each number of ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        trains = [(str(folder / name(case)), *case) for case in CASES]
        self.trained = Batch(train_and_save, trains)
        self.whole = {case: self.trained(FROM, str(folder / name(case)), *case) for case in CASES}

    @functools.cache  # noqa: B019 (one object a module)
    def _batch(self, tp: int) -> Batch:
        return Batch(load_and_train, [self._case(tp, case) for case in CASES])

    def loaded(self, tp: int, case: tuple[Any, ...]) -> list[dict[str, Any]]:
        return self._batch(tp)(tp, *self._case(tp, case))

    def _case(self, tp: int, case: tuple[Any, ...]) -> tuple[Any, ...]:
        return str(self.folder / name(case)), str(self.folder / f"{name(case)} at {tp}"), *case

    def path(self, case: tuple[Any, ...], tp: int | None = None) -> Path:
        return self.folder / (name(case) if tp is None else f"{name(case)} at {tp}") / f"step-{STEPS[case[1]]:08d}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("case", ROW_WISE, ids=name)
def test_a_run_that_moves_to_other_ranks_in_the_middle_has_the_oracles_losses(
    saved: Saved, case: tuple[Any, ...], tp: int
) -> None:
    want = oracle(*case[:2])
    assert saved.whole[case][0] == saved.whole[case][1] and len(set(want)) == len(want)
    assert saved.whole[case][0] == pytest.approx(want, abs=TOLERANCE)
    found = [rank["losses"] for rank in saved.loaded(tp, case)]
    assert all(losses == found[0] for losses in found)
    assert found[0] == pytest.approx(want[STEPS[case[1]] :], abs=TOLERANCE)
    assert not any(rank["warnings"] for rank in saved.loaded(tp, case))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_with_tp_invariant_sums_the_bits_do_not_depend_on_where_the_run_moves(saved: Saved, tp: int) -> None:
    assert saved.loaded(tp, TIED)[0]["losses"] == saved.whole[TIED][0][STEPS["AdamW"] :]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_at_the_same_ranks_the_bits_go_on_whatever_the_optimizer(saved: Saved, case: tuple[Any, ...]) -> None:
    assert saved.loaded(FROM, case)[0]["losses"] == saved.whole[case][0][STEPS[case[1]] :]
    assert not saved.loaded(FROM, case)[0]["warnings"]


@pytest.mark.parametrize("tp", [1, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_what_was_loaded_elsewhere_saves_to_the_same_tensors(saved: Saved, case: tuple[Any, ...], tp: int) -> None:
    saved.loaded(tp, case)
    before, after = open_checkpoint(saved.path(case)), open_checkpoint(saved.path(case, tp))
    after.verify()
    moved = {key for key in before.tensors if not key.endswith(SHARDS)}
    assert moved <= set(after.tensors) and after.state["scalars"] == before.state["scalars"]
    for key in moved:
        assert before.tensors[key] == after.tensors[key], key
        assert torch.equal(before.read(key), after.read(key)), key
    assert after.state["layout"]["tp_size"] == tp


@pytest.mark.parametrize("tp", [1, 3])
def test_a_column_factor_of_each_rank_becomes_the_mean_by_rows_elsewhere_with_a_warning(saved: Saved, tp: int) -> None:
    case = (True, "Adafactor", False)
    key = "optimizer.embedding.weight.col_var"
    parts = open_checkpoint(saved.path(case)).read(f"{key}{SHARDS}")
    assert list(parts.shape) == [2, 1, 6] and not torch.equal(parts[0], parts[1])
    [words] = saved.loaded(tp, case)[0]["warnings"]
    assert key in words and "mean, weighted by real rows" in words
    found = open_checkpoint(saved.path(case, tp)).read(key)
    want = (parts[0].double() * 16 + parts[1].double() * 13) / 29
    assert torch.allclose(found.double(), want, rtol=1e-6)


def test_the_files_hold_real_rows_a_tied_weight_once_and_the_ties(saved: Saved) -> None:
    stored = open_checkpoint(saved.path(TIED))
    models = {key: list(size) for key, (_, size) in stored.tensors.items() if key.startswith("model.")}
    assert models == {"model.embedding.weight": [29, 6], "model.trunk.weight": [6, 6], "model.trunk.bias": [6],
                      "model.head.bias": [29], "model.seen": [2]}  # fmt: skip
    assert stored.state["ties"] == {"head.weight": "embedding.weight"}
    assert stored.state["tables"] == ["embedding.weight", "head.bias"]
    assert stored.state["layout"] == {"vocab_size": 29, "padded_size": 32, "tp_size": 2}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"} == set(stored.state["files"])
    assert len([key for key in stored.tensors if key.startswith("optimizer.embedding.weight.")]) == 3
