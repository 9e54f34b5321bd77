"""The rest of the DeepSpeed integration: three lines, model-parallel units, construction, resizing, settings."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.batch import Attempt, attempt, run_batch
from tests.integrations.deepspeed_models import (
    Case,
    Model,
    build,
    host,
    make_shard,
    oracle_of,
    tensor_groups,
    train,
)
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.collectives import gather_vocab

ROOT = Path(__file__).parents[2]
WORLD = 4


def three_lines() -> str:
    """The page's snippet, as written."""
    page = (ROOT / "docs" / "hosts" / "deepspeed.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- three lines -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    return block


def run_three_lines() -> dict[str, Any]:
    case = Case(1, 2, 2)
    torch.manual_seed(0)
    names = {
        "Model": Model, "vocab_size": case.vocab, "tp_size": 2, "tp_group": tensor_groups(2)[dist.get_rank() // 2],
        "config": case.config(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}),
    }  # fmt: skip
    exec(three_lines(), names)
    return train(case, names["engine"], range(1))


def test_the_three_lines_of_the_page_run_as_written() -> None:
    losses = {seen["losses"][0] for seen in observed("three lines")}
    assert abs(sum(losses) / 2 - oracle_of(Case(1, 2, 2))["losses"][0]) < 1e-6, "two replicas, each with its loss"
    assert len([line for line in three_lines().splitlines() if line and "import" not in line]) == 3


def run_mpus() -> dict[str, Any]:
    from megatron.core import parallel_state

    from vocab_parallel.integrations import deepspeed as integration

    ours = integration.GroupsMPU(tensor_groups(2)[dist.get_rank() // 2])
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    theirs = integration.MegatronMPU(parallel_state)
    shard = VocabShard(VocabLayout(9, 2, multiple_of=1), parallel_state.get_tensor_model_parallel_group())
    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    settings = {"config": Case(1, 2, 2).config(), "optimizer": optimizer}
    engine = integration.initialize(Model(shard), mpu=theirs, **settings)[0]
    seen: dict[str, Any] = {"train": train(Case(1, 2, 2), engine, range(2))}
    for name in (name for name in dir(ours) if name.startswith("get_")):
        answers = [getattr(mpu, name)() for mpu in (ours, theirs)]
        seen[name] = [dist.get_process_group_ranks(a) if isinstance(a, dist.ProcessGroup) else a for a in answers]
    parallel_state.destroy_model_parallel()
    stages = SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 2)
    return seen | {"pipeline": attempt(lambda: integration.MegatronMPU(stages))}


def test_megatrons_parallel_state_and_our_groups_answer_alike() -> None:
    for rank, seen in enumerate(observed("mpus")):
        pipeline: Attempt = seen.pop("pipeline")
        assert pipeline.kind == "ConfigError" and "pipeline" in pipeline.message
        assert seen.pop("train")["norms"][0] == pytest.approx(oracle_of(Case(1, 2, 2))["norms"][0], abs=1e-6)
        assert seen["get_data_parallel_group_ranks"][0] == [rank % 2, rank % 2 + 2]
        assert seen["get_tensor_model_parallel_src_rank"][0] == rank - rank % 2
        for name, (ours, theirs) in seen.items():
            assert ours == theirs, name


def run_groups() -> dict[str, Any]:
    from vocab_parallel.integrations import deepspeed as integration

    uneven = [dist.new_group([0]), dist.new_group([1, 2, 3])][min(1, dist.get_rank())]
    overlapping = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 3])]
    mine = overlapping[[0, 0, 1, 2][dist.get_rank()]]
    return {name: attempt(lambda g=g: integration.data_parallel_group(g))
            for name, g in (("uneven", uneven), ("overlapping", mine))}  # fmt: skip


@pytest.mark.parametrize("what", ["uneven", "overlapping"])
def test_groups_that_do_not_cut_the_world_need_a_data_group(what: str) -> None:
    for seen in observed("groups"):
        assert seen[what].kind == "ConfigError" and "data_group" in seen[what].message


def run_zero_init() -> dict[str, Any]:
    case = Case(3, 2, 2, construct="zero_init")
    with host() as deepspeed:
        plain, model = build(Case(3, 2, 2)), build(case)
        weight = model.embedding.weight
        seen: dict[str, Any] = {"rows before": weight.shape[0], "id": weight.ds_id == model.head.weight.ds_id}
        seen["outside"] = attempt(lambda: model(*case.batch(0, 0, 0)))
        with deepspeed.zero.GatheredParameters([weight]):
            seen["rows"] = weight.shape[0]
            seen["same"] = torch.equal(weight, plain.embedding.weight)
            seen["loss"] = float(model.head.loss(weight.detach()[:2], torch.tensor([0, 8])))
        seen["rows after"] = weight.shape[0]
        seen["partition"] = weight.ds_tensor.numel()
        return seen


def test_a_model_built_under_zero_init_has_its_own_rows_and_one_id() -> None:
    for seen in observed("zero_init"):
        outside: Attempt = seen.pop("outside")
        assert outside.kind == "UngatheredWeightError" and "GatheredParameters" in outside.message
        assert seen.pop("loss") > 0
        wanted = {"rows before": 0, "id": True, "rows": 5, "same": True, "rows after": 0, "partition": 10}
        assert seen == wanted


RESIZED = {"grown": 13, "shrunk": 7, "the same": 9}


def run_resize(construct: str, vocab: int) -> dict[str, Any]:
    from vocab_parallel.integrations import deepspeed as integration

    case = Case(3, 2, 2, construct=construct, bias=True)
    model = build(case)
    model.config = SimpleNamespace(vocab_size=9)
    with torch.no_grad(), _whole(model, "embedding.weight", "head.bias"):
        model.embedding.weight += 1.0
        model.head.bias += 2.0
    shard = integration.resize(model, vocab)
    seen: dict[str, Any] = {"config": model.config.vocab_size, "shard": (shard.vocab_size, shard.shard_size)}
    seen["alias"] = model.embedding.weight is model.head.weight
    seen["partitioned"] = [p.shape[0] == 0 for p in (model.embedding.weight, model.head.bias)]
    with torch.no_grad(), _whole(model, "embedding.weight", "head.bias"):
        seen["weight"] = gather_vocab(shard, model.embedding.weight)
        seen["bias"] = gather_vocab(shard, model.head.bias)
        seen["padding"] = float(model.embedding.weight[shard.num_valid :].abs().sum())
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    engine = integration.initialize(model, config=case.config(), optimizer=optimizer)[0]
    ids, target = torch.tensor([0, vocab - 1]), torch.tensor([vocab - 1, 1])
    loss = engine(ids, target)
    engine.backward(loss)
    engine.step()
    seen["pairs"] = integration.verify_tied(engine)
    return seen | {"late": attempt(lambda: integration.resize(engine.module, 20))}


def _whole(model: Any, *names: str) -> Any:
    import deepspeed

    parameters = [p for name, p in model.named_parameters() if name in names]
    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


@pytest.mark.parametrize("construct", ["plain", "zero_init"])
@pytest.mark.parametrize("what", RESIZED)
def test_a_resized_vocabulary_keeps_its_rows_and_draws_the_same_new_ones_on_every_rank(
    construct: str, what: str
) -> None:
    vocab = RESIZED[what]
    fresh = Model(VocabShard(VocabLayout(vocab, 1, multiple_of=1)))
    ranks, both = observed(f"resize {construct} {what}"), min(9, vocab)
    expected = fresh.embedding.weight.detach().clone()
    expected[:both] += 1.0
    bias = torch.cat([torch.full((both,), 2.0), torch.zeros(vocab - both)])
    for seen in ranks:
        assert seen["config"] == vocab and seen["shard"] == (vocab, -(-vocab // 2))
        assert seen["alias"] and seen["partitioned"] == [construct == "zero_init"] * 2
        assert torch.equal(seen["weight"], expected) and torch.equal(seen["bias"], bias)
        assert seen["padding"] == 0.0
        assert seen["pairs"] == [("embedding.weight", "head.weight")]
        late: Attempt = seen["late"]
        assert late.kind == "ConfigError" and "before initialize" in late.message


CONFIGS = sorted((ROOT / "configs" / "deepspeed").glob("*.json"))


def run_config(path: Path) -> dict[str, Any]:
    from vocab_parallel.integrations import deepspeed as integration

    torch.manual_seed(0)
    engine = integration.initialize(Model(make_shard(2, 9)), config=str(path))[0]
    seen: dict[str, Any] = train(Case(1, 2, 2), engine, range(2))
    return seen | {"stage": engine.zero_optimization_stage(), "pairs": integration.verify_tied(engine)}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_file_trains(path: Path) -> None:
    ranks = observed(f"config {path.stem}")
    assert {f"zero{seen['stage']}" for seen in ranks} == {path.stem}
    expected = oracle_of(Case(1, 2, 2))
    assert abs((ranks[0]["losses"][0] + ranks[2]["losses"][0]) / 2 - expected["losses"][0]) < 1e-5
    assert all(seen["norms"][0] == pytest.approx(expected["norms"][0], abs=1e-5) for seen in ranks)
    assert all(seen["pairs"] == [("embedding.weight", "head.weight")] for seen in ranks)


def run_padding(case: Case) -> dict[str, Any]:
    """Trains only 5 elements (one row of 4 and its bias) over 4 data-parallel ranks, saves and converts."""
    from vocab_parallel.integrations import deepspeed as integration

    model = build(case)
    for parameter in (*model.norm.parameters(), *model.block.parameters()):
        parameter.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = integration.initialize(model, config=case.config(), optimizer=torch.optim.AdamW(trained))[0]
    optimizer = engine.optimizer
    noted = optimizer.groups_padding if hasattr(optimizer, "groups_padding") else optimizer.group_paddings
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    train(Case(case.stage, 4, 1, vocab=1), engine, range(1))
    engine.save_checkpoint(str(folder), "tag")
    rows = {}
    if dist.get_rank() == 0:
        integration.to_universal(folder / "tag", folder / "universal")
        for name in ("embedding.weight", "head.bias"):
            rows[name] = torch.load(folder / "universal" / "zero" / name / "exp_avg.pt")["param"].shape
        shutil.rmtree(folder)
    dist.barrier()
    return {"noted": noted, "rows": rows, "optimizer": type(optimizer).__name__}


PADDED = {
    "float32": Case(1, 4, 1, vocab=1, bias=True),
    "bfloat16": Case(1, 4, 1, vocab=1, bias=True, dtype="bfloat16", float32_sums=True),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_that_covers_more_than_the_last_rank_is_noted_on_each(name: str) -> None:
    ranks = observed(f"padding {name}")
    assert [seen["noted"] for seen in ranks] == [[0], [0], [1], [2]]
    assert ranks[0]["rows"] == {"embedding.weight": (1, 4), "head.bias": (1,)}
    kind = {"float32": "DeepSpeedZeroOptimizer", "bfloat16": "BF16_Optimizer"}[name]
    assert {seen["optimizer"] for seen in ranks} == {kind}


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "three lines": run_three_lines,
    "mpus": run_mpus,
    "groups": run_groups,
    "zero_init": run_zero_init,
    **{
        f"resize {construct} {what}": functools.partial(run_resize, construct, vocab)
        for construct in ("plain", "zero_init")
        for what, vocab in RESIZED.items()
    },
    **{f"config {path.stem}": functools.partial(run_config, path) for path in CONFIGS},
    **{f"padding {name}": functools.partial(run_padding, case) for name, case in PADDED.items()},
}


def _run(rank: int, world: int, name: str) -> dict[str, Any]:
    with host():
        return RUNS[name]()


@functools.cache
def _observed() -> dict[str, Any]:
    return run_batch(_run, WORLD, list(RUNS), timeout=110, detail=False)


def observed(name: str) -> list[dict[str, Any]]:
    found = _observed()[name]
    assert not isinstance(found, str), found
    return found
