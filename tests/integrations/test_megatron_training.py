"""Ten AdamW steps of a Megatron GPTModel with our embedding, head and loss equal one process with torch's own."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import EMBEDDING, HEAD, STEPS, Setup, megatron
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import require_equal

LOSS = {"float32": 1e-5, "bfloat16": 3e-2}
# Adam divides a gradient by its own size, so float32 noise in a small one moves its weight by up to a step's 2e-3 for
# a gradient of the size of eps 1e-5, and by a hundredth of that for the usual ones.
TABLE = {"float32": 3e-5, "bfloat16": 2e-2}
NORM = {"float32": 1e-4, "bfloat16": 3e-2}

ONE = [Setup(), Setup(tied=False)]
TWO = [
    Setup(tp=2, microbatches=2),
    Setup(tp=2, tied=False),
    Setup(tp=2, options=(("masked_sum", True),), microbatches=2),
    Setup(tp=2, sequence_parallel=True),
    Setup(tp=2, sequence_parallel=True, options=(("masked_sum", True), ("chunk_size", 6))),
    Setup(tp=2, sequence_parallel=True, positions="learned_absolute", tied=False, distributed=True),
    Setup(pp=2, microbatches=2),
    Setup(pp=2, tied=False, microbatches=2),
    Setup(pp=2, chunks=2, layers=4, microbatches=2),
    Setup(distributed=True),
    Setup(distributed=True, overlap=True, microbatches=2),
    Setup(distributed=True, overlap=True, tied=False),
    Setup(tp=2, dtype="bfloat16", distributed=True, microbatches=2),
    Setup(tp=2, dtype="bfloat16"),
]
FOUR = [
    Setup(tp=4),  # 3, 3, 3 and 0 rows
    Setup(tp=2, distributed=True, sequence_parallel=True),
    Setup(tp=2, pp=2, microbatches=2),
    Setup(pp=2, distributed=True, microbatches=2),
]
MIDDLE = Setup(pp=4, layers=4, microbatches=4)  # with stages in between


def _train(rank: int, setup: Setup) -> dict[str, Any]:
    with models.parallel(setup):
        model = models.adopted(setup)
        wrapped = models.wrap(setup, model)
        optimizer = models.optimizer_of(setup, wrapped)
        pairs = [megatron.verify_tied(wrapped, optimizer)] if setup.tied else []
        losses, norms = [], []
        for step in range(STEPS):
            loss, norm = models.step_of(setup, wrapped, optimizer, step)
            losses.append(None if loss is None else loss.item())
            norms.append(float(norm))
        if setup.overlap:
            wrapped.disable_forward_pre_hook()  # and waits for what the next forward would have waited for
        pairs += [megatron.verify_tied(wrapped, optimizer)] if setup.tied else []
        return {
            "losses": losses, "norms": norms, "tables": models.tables(setup, wrapped), "pairs": pairs,
            "states": models.count_states(wrapped, optimizer),
        }  # fmt: skip


ORACLES = Batch(
    models.oracle,
    [
        (Setup(),),
        (Setup(tied=False),),
        (Setup(tied=False, positions="learned_absolute"),),
        (Setup(layers=4),),
    ],
)
WORLDS = {ranks: Batch(_train, [(setup,) for setup in setups]) for ranks, setups in ((1, ONE), (2, TWO), (4, FOUR))}
EACH = pytest.mark.parametrize(
    ("ranks", "setup"),
    [*((1, setup) for setup in ONE), *((2, setup) for setup in TWO), *((4, setup) for setup in FOUR), (4, MIDDLE)],
    ids=lambda value: f"{value}ranks" if isinstance(value, int) else str(value),
)


@functools.cache
def _in_the_middle() -> list[dict[str, Any]]:
    """Torch's check of collectives counts sends, too, of which a stage in the middle has more: it must be off."""
    return run_ranks(_train, 4, MIDDLE, detail=False)


def trained(ranks: int, setup: Setup) -> list[dict[str, Any]]:
    return _in_the_middle() if setup == MIDDLE else WORLDS[ranks](ranks, setup)


@pytest.mark.timeout(300)
@EACH
def test_training_equals_one_process(ranks: int, setup: Setup) -> None:
    expected = ORACLES(1, Setup(tied=setup.tied, positions=setup.positions, layers=setup.layers))[0]
    results = trained(ranks, setup)
    losses = [result["losses"] for result in results if result["losses"][0] is not None]
    assert losses, "no rank has the last stage"
    for found in losses:
        difference = max(abs(a - b) for a, b in zip(found, expected["losses"], strict=True))
        assert difference < LOSS[setup.dtype], f"losses differ by {difference}: {found}, expected {expected['losses']}"
    for result in results:
        for found, wanted in zip(result["norms"], expected["norms"], strict=True):
            assert abs(found - wanted) < NORM[setup.dtype] * wanted, f"{result['norms']}, expected {expected['norms']}"
    for name in ("embedding", "head"):
        tables = [result["tables"][name] for result in results if name in result["tables"]]
        wanted = expected["tables"].get(name, expected["tables"]["embedding"])
        for table in tables:
            difference = float((table - wanted).abs().max())
            assert difference < TABLE[setup.dtype], f"{name} differs by {difference}"
        if tables:
            require_equal(f"{name} on every rank", tables)
    if setup.tied and setup.pp > 1:
        both = [table for result in results for table in result["tables"].values()]
        require_equal("the tied weight on the first and the last stage", both)


@EACH
def test_each_parameter_has_one_optimizer_state_and_the_tie_is_proved(ranks: int, setup: Setup) -> None:
    for result in trained(ranks, setup):
        assert result["states"]["elements"] == result["states"]["of parameters"], result["states"]
        ends = bool(result["tables"])
        assert result["pairs"] == ([[(EMBEDDING, HEAD)] if ends else []] * 2 if setup.tied else [])


def test_the_oracle_notices_a_gradient_that_is_lost() -> None:
    """What the comparison above can see: one process without the lookup's gradient is far outside the tolerances."""
    expected = ORACLES(1, Setup())[0]
    untied = ORACLES(1, Setup(tied=False))[0]
    assert abs(expected["losses"][-1] - untied["losses"][-1]) > 100 * LOSS["float32"]
    assert float((expected["tables"]["embedding"] - untied["tables"]["embedding"]).abs().max()) > 10 * TABLE["float32"]


def _first_norms(rank: int, setup: Setup) -> list[float]:
    """Norms with and without a mark that Megatron reads, after one step."""
    norms = []
    for drop in (False, True):
        with models.parallel(setup):
            model = models.adopted(setup)
            if drop:
                model.embedding.word_embeddings.weight.tensor_model_parallel = False
            wrapped = models.wrap(setup, model)
            norms.append(models.step_of(setup, wrapped, models.optimizer_of(setup, wrapped), 0)[1])
    return norms


def test_the_norm_would_lack_shards_without_the_marks() -> None:
    expected = ORACLES(1, Setup())[0]["norms"][0]
    for kept, dropped in run_ranks(_first_norms, 2, replace(Setup(), tp=2)):
        assert abs(kept - expected) < 1e-4 * expected
        assert abs(dropped - expected) > 0.01 * expected
