"""The benchmark's parts: settings, what is counted, who is left out and why, and what is made of the numbers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from vocab_parallel import app
from vocab_parallel.app.bench import command as bench
from vocab_parallel.app.bench import config as bench_config
from vocab_parallel.app.bench import field as bench_field
from vocab_parallel.app.bench import measure as bench_measure
from vocab_parallel.app.bench import peers
from vocab_parallel.app.bench import problem as bench_problem
from vocab_parallel.app.bench import results as bench_results
from vocab_parallel.app.bench.peers import Choice, Contestant
from vocab_parallel.app.bench.problem import Problem, Shape
from vocab_parallel.app.bench.watch import CollectiveCounter
from vocab_parallel.app.job import Job
from vocab_parallel.app.settings import from_words
from vocab_parallel.errors import ConfigError


def shape_of(rank: int = 0, world: int = 1, **sizes: int) -> Shape:
    sizes = {"tokens": 12, "hidden": 5, "vocab": 16} | sizes
    return Shape(**sizes, dtype=torch.float32, device=torch.device("cpu"), rank=rank, world=world)


def test_settings_are_words_over_defaults() -> None:
    config = from_words(
        bench_config.BenchConfig, ["tokens=8", "dtype=bfloat16", "contestants=[ours, megatron]", "timeout_s=3"]
    )
    assert config == bench_config.BenchConfig(
        tokens=8, dtype="bfloat16", contestants=["ours", "megatron"], timeout_s=3.0
    )
    assert from_words(bench_config.BenchConfig, ["sweep=tokens"]).values() == [1024, 2048, 4096, 8192, 16384]
    assert from_words(bench_config.BenchConfig, ["sweep=vocab", "points=[8, 4, 8]"]).values() == [4, 8]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("token=3", "unknown key token; did you mean tokens?"),
        ("qqqq=3", "unknown key qqqq; known here: tokens, hidden"),
        ("tokens=many", "tokens: expected a whole number, got 'many'"),
        ("tokens=true", "tokens: expected a whole number, got True"),
        ("rounds=0", "rounds: expected at least 1, got 0"),
        ("chunk_size=0", "chunk_size: expected null or at least 1, got 0"),
        ("dtype=float16", "dtype: expected one of float32, bfloat16, got 'float16'; did you mean bfloat16?"),
        ("sweep=token", "did you mean tokens?"),
        ("points=[1, 2]", "points: expected null, as there is no sweep"),
        ("contestants=ours", "contestants: expected a list, each text or null, got 'ours'"),
    ],
)
def test_what_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_words(bench_config.BenchConfig, [word])
    assert message in str(error.value)


def test_the_command_refuses_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["bench", "loss", "contestants=[megatronn]"]) == 2
    assert "contestants: unknown name 'megatronn'; did you mean megatron?" in capsys.readouterr().err


def test_contestants_of_a_sweep_and_the_floor_is_always_there() -> None:
    assert bench.chosen(bench_config.BenchConfig()) == list(peers.CONTESTANTS)
    assert bench.chosen(bench_config.BenchConfig(sweep="tokens")) == ["floor", "ours"]
    assert bench.chosen(bench_config.BenchConfig(contestants=["ours"])) == ["floor", "ours"]


def test_a_problem_is_the_same_for_all_and_its_weight_is_one_tensor_over_tokens() -> None:
    whole = bench_problem.make(shape_of(), 0)
    for rank in range(2):
        shape = shape_of(rank, 2)
        part = bench_problem.make(shape, 0)
        assert torch.equal(part.hidden, whole.hidden) and torch.equal(part.target, whole.target)
        assert torch.equal(part.weight, bench_problem.weight_rows(shape, rank, 0)) and part.weight.shape == (8, 5)
        longer = bench_problem.make(dataclasses.replace(shape, tokens=20), 0, part)
        assert longer.weight is part.weight and len(longer.hidden) == len(longer.target) == 20
        assert bench_problem.make(dataclasses.replace(shape, vocab=8), 0, part).weight.shape == (4, 5)
    assert shape_of(0, 2).gradient_bytes == (12 * 5 + 8 * 5) * 4


@pytest.mark.parametrize("rows", [None, 5, 12, 100])
def test_the_floor_is_three_products_a_chunk_and_nothing_else(rows: int | None) -> None:
    job = Job(0, 1, 0, torch.device("cpu"), None)
    step = peers.CONTESTANTS["floor"].prepare(peers.Place(job, timedelta(seconds=5)))
    problem = bench_problem.make(shape_of(), 0)
    assert step(problem, Choice(rows)) is None
    operators: Counter[str] = Counter()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    with Watch():
        step(problem, Choice(rows))
    views = {"aten::t", "aten::slice", "aten::detach", "aten::permute"}
    chunks = -(-12 // min(rows or 12, 12))
    assert {name: count for name, count in operators.items() if name not in views} == {"aten::mm": 3 * chunks}


@pytest.mark.parametrize("rows", [3, 12])
def test_the_rows_of_a_chunk_are_seen(rows: int) -> None:
    problem = bench_problem.make(shape_of(), 0)

    def step() -> None:
        for chunk in problem.hidden.split(rows):
            (chunk @ problem.weight.T).sum().backward()

    assert bench_measure.projection_rows(problem, step) == rows
    assert problem.hidden.grad is None and problem.weight.grad is None
    assert bench_measure.projection_rows(problem, lambda: problem.hidden.sum()) is None


def test_errors_are_relative_to_the_largest_entry() -> None:
    exact = bench_measure.Float64(shape_of(), 0)
    problem = exact.problem

    def step(scale: float, value: float) -> Tensor:
        loss = torch.nn.functional.cross_entropy(problem.hidden @ problem.weight.T, problem.target)
        loss.backward()
        assert problem.hidden.grad is not None
        problem.hidden.grad.mul_(scale)
        return loss.detach() * value

    right = exact.compare(lambda: step(1.0, 1.0))
    assert max(dataclasses.astuple(right)) < 1e-6 and max(dataclasses.astuple(exact.unsharded())) < 1e-6
    wrong = exact.compare(lambda: step(1.5, 0.75))
    assert wrong.loss == pytest.approx(0.25) and wrong.hidden_grad == pytest.approx(0.5) and wrong.weight_grad < 1e-6
    assert bench_measure.Errors.largest([right, wrong]).loss == wrong.loss
    with pytest.raises(ValueError, match="expected a result of shape"):
        exact.compare(lambda: None)


def test_failures_become_one_line() -> None:
    assert bench_measure.agreed([None, None]) is None
    assert bench_measure.agreed(["the same", "the same"]) == "the same"
    assert bench_measure.agreed([None, "bad\nnews"]) == "rank 1: bad news"
    assert bench_measure.agreed(["a", "b"]) == "rank 0: a; rank 1: b"


def _counted(rank: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Six elements of 4 bytes through each road to a collective."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    x = torch.ones(6)
    mesh = init_device_mesh("cpu", (2,))

    newest = hasattr(functional, "reduce_scatter_single")  # torch 2.13 renamed it
    scatter = getattr(functional, "reduce_scatter_single" if newest else "reduce_scatter_tensor")

    def reduce_dtensor() -> None:
        DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local().sum()

    found = []
    for fn in (
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather([x.clone(), x.clone()], x),
        lambda: dist.all_to_all_single(torch.empty_like(x), x),
        lambda: dist.broadcast(x, 0),
        lambda: functional.all_reduce(x, "sum", dist.group.WORLD).sum(),
        lambda: scatter(x, "sum", 0, dist.group.WORLD).sum(),
        reduce_dtensor,
        lambda: x.sum(),
    ):
        with CollectiveCounter(2) as counter:
            fn()
        found.append((dict(counter.calls), dict(counter.bytes)))
    return found


def test_collectives_are_counted_on_every_road() -> None:
    assert run_ranks(_counted, 2) == [[
        ({"all_reduce": 1}, {"all_reduce": 24}),
        ({"all_gather": 1}, {"all_gather": 24}),
        ({"all_to_all": 1}, {"all_to_all": 12}),
        ({"other": 1}, {"other": 24}),
        ({"all_reduce": 1}, {"all_reduce": 24}),
        ({"reduce_scatter": 1}, {"reduce_scatter": 12}),
        ({"all_reduce": 1}, {"all_reduce": 24}),
        ({}, {}),
    ]] * 2  # fmt: skip


def _right(problem: Problem, choice: Choice) -> Tensor:
    loss = (problem.hidden.sum() + problem.weight.sum()) * 0
    loss.backward()
    return loss.detach()


def _field(rank: int) -> tuple[list[str], dict[str, Any], dict[str, int]]:
    """Contestants that fail in each way, beside two that run, through every stage."""
    place: list[peers.Place] = []

    def prepare(step: peers.Step) -> Any:
        return lambda where: place.append(where) or step

    def breaks(problem: Problem, choice: Choice) -> Tensor:
        if rank == 1:
            raise ValueError("broken here")
        dist.all_reduce(torch.ones(1), group=group)  # the other rank waits in vain
        return _right(problem, choice)

    def breaks_when_timed(problem: Problem, choice: Choice) -> Tensor:
        calls["late"] += 1
        if calls["late"] > 1:
            raise RuntimeError("later")
        return _right(problem, choice)

    def does_not_prepare(where: peers.Place) -> peers.Step:
        raise AttributeError("other version")

    calls: Counter[str] = Counter()
    contestants = {
        "floor": peers.CONTESTANTS["floor"],
        "absent": Contestant("", prepare(_right), modules=("no_such_package_anywhere.part",)),
        "other": Contestant("", does_not_prepare),
        "gpu": Contestant("", prepare(_right), cuda_only=True),
        "alone": Contestant("", prepare(_right), ranks="one"),
        "huge": Contestant("", prepare(_right), logit_bytes=10**15),
        "breaks": Contestant("", prepare(breaks)),
        "late": Contestant("", prepare(breaks_when_timed)),
        "right": Contestant("", prepare(_right), distribution="torch"),
    }
    bench_field.CONTESTANTS = contestants  # type: ignore[attr-defined]
    job = Job(rank, 2, rank, torch.device("cpu"), dist.group.WORLD)
    group = dist.new_group(timeout=timedelta(seconds=2))
    field = bench_field.Field(job, list(contestants), timedelta(seconds=2))
    field.enter()
    point = bench_field.Point(None, bench_problem.make(shape_of(rank, 2), 0), Choice(4))
    field.warm_up([point])
    for name in field.running * 2:
        if name in field.running:
            field.time(point, name)
    field.take_footprints([point])
    return field.running, field.standing(), {name: len(times) for name, times in point.seconds.items()}


def test_who_fails_on_one_rank_runs_on_none_and_is_named_and_the_others_go_on() -> None:
    for running, standing, times in run_ranks(_field, 2, detail=False):
        assert running == ["floor", "right"] and times == {"floor": 2, "right": 2}
        found = {name: (about["status"], about["reason"]) for name, about in standing.items()}
        assert found["right"] == found["floor"] == ("ran", None)
        assert standing["right"]["version"] == torch.__version__.partition("+")[0] or standing["right"]["version"]
        assert found["absent"] == ("missing", "ModuleNotFoundError: No module named 'no_such_package_anywhere'")
        assert found["other"] == ("failed", "AttributeError: other version")
        assert found["gpu"] == ("missing", "needs a GPU")
        assert found["alone"] == ("missing", "runs on one rank only")
        assert found["huge"][0] == "too large" and "needs about" in found["huge"][1]
        assert found["late"] == ("failed", "RuntimeError: later")
        status, reason = found["breaks"]
        assert status == "failed" and "rank 0: " in reason and "rank 1: ValueError: broken here" in reason


def swept(values: dict[int, tuple[float, int]]) -> list[dict[str, Any]]:
    """Points of a sweep from the best time and the memory at each value."""
    return [
        {"value": value, "results": {"ours": {"best_s": time, "beyond_gradients_bytes": memory}}}
        for value, (time, memory) in values.items()
    ]


def test_a_sweep_is_checked_for_straight_time_and_flat_memory() -> None:
    good = swept({1000: (1.0, 100), 2000: (2.1, 101), 4000: (3.9, 100)})
    assert [check["passed"] for check in bench_results.checks("tokens", good)] == [True, True]
    assert [check["name"] for check in bench_results.checks("vocab", good)] == ["time linear in vocab"]
    bent = swept({1000: (1.0, 100), 2000: (2.5, 125)})
    assert [check["passed"] for check in bench_results.checks("tokens", bent)] == [False, False]
    assert bench_results.checks("tokens", bent)[0]["spread"] == pytest.approx(1 / 9)
    assert bench_results.checks("none", good) == bench_results.checks("chunk", good) == []


def test_ratios_are_of_the_slowest_rank_round_by_round() -> None:
    job = Job(0, 1, 0, torch.device("cpu"), None)
    field = bench_field.Field(job, ["floor", "ours", "torch_linear", "loss_parallel"], timedelta(seconds=1))
    field.enter()
    assert field.running == ["floor", "ours", "torch_linear"]
    point = bench_field.Point(None, bench_problem.make(shape_of(), 0), Choice())
    point.seconds = {
        "floor": [[1.0, 2.0], [4.0, 3.0], [2.0, 2.0]],
        "ours": [[3.0, 1.0], [6.0, 6.0], [5.0, 2.0]],
        "torch_linear": [[6.0], [6.0], [10.0]],
    }
    footprints = [
        bench_measure.Footprint(1000 + rank, 50 - rank, 4, {"all_gather": 1}, {"all_gather": 9}) for rank in range(2)
    ]
    point.footprints = {"ours": footprints}
    numbers = bench_results.of_point(field, point)
    ours = numbers["results"]["ours"]
    assert ours["seconds"] == [3.0, 6.0, 5.0] and (ours["best_s"], ours["median_s"]) == (3.0, 5.0)
    assert ours["over_floor_best"] == 1.5 and ours["over_floor_median"] == 1.5  # of 1.5, 1.5, 2.5
    assert ours["peak_extra_bytes"] == 1001 and ours["beyond_gradients_bytes"] == 1001 - numbers["gradient_bytes"]
    assert ours["peak_resident_bytes"] == 50 and ours["chunk_rows"] == 4
    assert ours["resident_beyond_gradients_bytes"] == 50 - numbers["gradient_bytes"]
    assert ours["collectives"] == {"calls": {"all_gather": 1}, "bytes": {"all_gather": 9}}
    assert numbers["best_peer"] == {
        "name": "torch_linear", "ours_over_it_best": 0.5, "ours_over_it_median": 0.5,
    }  # fmt: skip
