"""``plan``: its settings, what it prints and writes, and its comparison with a benchmark's file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vocab_parallel import app
from vocab_parallel.app.plan import check as plan_check
from vocab_parallel.app.plan import command as plan
from vocab_parallel.app.plan.config import PlanConfig
from vocab_parallel.app.plan.cost import Machine
from vocab_parallel.app.plan.machines import preset_device, preset_network
from vocab_parallel.app.plan.schedules import SCHEDULES, fused
from vocab_parallel.app.settings import from_words
from vocab_parallel.errors import ConfigError


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = app.main(["plan", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_words_become_settings() -> None:
    config = from_words(
        PlanConfig, ["tokens=4096", "dtype=float32", "link=pcie", "link_gbs=12", "chunk_size=null", "tp=1024"]
    )
    assert (config.tokens, config.dtype, config.link, config.link_gbs, config.tp) == (
        4096,
        "float32",
        "pcie",
        12.0,
        1024,
    )
    assert config.chunk_size is None and from_words(PlanConfig, []) == PlanConfig()


@pytest.mark.parametrize(
    ("words", "device", "link", "measured"),
    [
        ([], "h100", "nvlink", False),
        (["link=loopback"], "cpu", "loopback", False),
        (["device=cpu"], "cpu", "loopback", False),
        (["link=measured"], "measured", "measured", True),
        (["device=measured"], "measured", "measured", True),
        (["device=measured", "link=pcie"], "measured", "pcie", True),
        (["device=h200", "link=measured"], "h200", "measured", True),
        (["link=infiniband"], "h100", "infiniband", False),
    ],
)
def test_device_and_link_imply_each_other(words: list[str], device: str, link: str, measured: bool) -> None:
    config = from_words(PlanConfig, words)
    assert (config.device_name, config.link_name, config.measured) == (device, link, measured)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tokns=3", "unknown key tokns; did you mean tokens?"),
        ("zzz=3", "unknown key zzz; known here: tokens, hidden"),
        ("link=nvlnk", "link: expected one of nvlink, pcie, infiniband, loopback, measured, got 'nvlnk'; did"),
        ("between=measured", "between: expected one of nvlink, pcie, infiniband, loopback, got 'measured'"),
        ("device=a100", "device: expected one of h100, h200, cpu, measured, got 'a100'; did you mean h100?"),
        ("dtype=int8", "dtype: expected one of float64, float32, bfloat16, float16"),
        ("tp=1025", "tp: expected null or a number of ranks up to 1,024, got 1025"),
        ("tp=0", "tp: expected null or a number of ranks up to 1,024, got 0"),
        ("tokens=0", "tokens: expected at least 1, got 0"),
        ("tokens=many", "tokens: expected a whole number, got 'many'"),
        ("tokens=true", "tokens: expected a whole number, got True"),
        ("memory_budget=0", "memory_budget: expected null or at least 1, got 0"),
        ("link_gbs=-1", "link_gbs: expected null or above 0, got -1.0"),
        ("where=tpu", "where: expected one of auto, cpu, cuda, got 'tpu'"),
        ("tokens", "expected dotted.key=value"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_by_name(capsys: pytest.CaptureFixture[str], word: str, message: str) -> None:
    status, out, err = run(capsys, word)
    assert status == 2 and message in err and out == ""


def test_the_plan_is_printed_as_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "tokens=8192", "hidden=4096", "tp=8")
    assert status == 0 and out.startswith("predicted by the cost model, not measured\n")
    for words in (
        "8,192 tokens x 4,096, 131,072 ids over 8 ranks of 16,384, bfloat16", "preset h100, link preset nvlink",
        "nvlink 360 GB/s", "infiniband 50 GB/s, 4 us a step between them", "exposed ms", "beyond dW, dH", "sent MB",
        "memory at the peak beside input and weight, MB by item", "ours by TP degree, up to 1,024", "\n1024 ",
        "advice\n  chunk: ", "dH reduction: hides up to TP ", "gather rows: ",
        "largest item of ours' memory: dW accumulator",
    ):  # fmt: skip
        assert words in out, f"{words!r} not in\n{out}"
    names = ["fused", "fused, sequence parallel", "fused, reduction none", "logits given (cross_entropy)",
             "Megatron plain", "DeepSpeed linear", "gather weights"]  # fmt: skip
    table = out.split("\n\n")[1].splitlines()[1:]
    assert (
        len(table) == len(SCHEDULES) and [line[: len(name)] for line, name in zip(table, names, strict=True)] == names
    )


def test_json_holds_what_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "deep" / "plan.json"
    status, out, _ = run(capsys, "tp=4", "--json", f"out={path}", "chunk_size=500")
    found = json.loads(out)
    assert status == 0 and found == json.loads(path.read_text()) and found["kind"] == "prediction"
    assert found["config"]["tp"] == found["workload"]["tp"] == 4
    assert list(found["schedules"]) == list(SCHEDULES)
    ours = found["schedules"]["fused"]
    assert ours["chunk_rows"] == 500 == found["advice"]["chunk_rows"]
    assert ours["total_sent_bytes"] == sum(ours["sent_bytes"].values()) > 0
    assert ours["peak_bytes"] == sum(ours["memory_bytes"].values())
    assert [one["tp"] for one in found["scaling"]] == [2**power for power in range(11)]
    assert found["advice"]["gather"] in ("rows", "weights") and len(found["advice"]["words"]) == 5
    assert found["machine"]["network"]["ranks_per_node"] == 8


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, _, err = run(capsys, f"out={tmp_path}")
    assert status == 2 and f"out: cannot write {tmp_path}" in err


def test_one_rank_of_a_job_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(capsys) == (0, "", "")


def test_given_rates_replace_those_of_the_preset() -> None:
    words = ["gemm_tflops=100", "memory_gbs=1000", "softmax_gps=50", "link_gbs=7", "link_us=3"]
    machine = plan.machine_of(from_words(PlanConfig, words), None)
    assert (machine.device.gemm, machine.device.stream, machine.device.softmax) == (100e12, 1000e9, 50e9)
    assert (machine.network.inside.bandwidth, machine.network.inside.latency) == (7e9, 3e-6)
    assert machine.network.between == preset_network("nvlink", "infiniband", 8).between
    slow = plan.make(from_words(PlanConfig, words), machine)
    assert "gemm_tflops and memory_gbs and softmax_gps and link_gbs and link_us as given" in slow["text"]
    fast = plan.make(PlanConfig(), plan.machine_of(PlanConfig(), None))
    seconds = [found["schedules"]["fused"]["predicted_seconds"] for found in (fast, slow)]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["tokens=1048576", "vocab=32768", "tp=8"], "gather weights: "),
        (["tokens=8192"], "gather rows: "),
        (["link_gbs=1e6", "ranks_per_node=1024", "link_us=1e-3", "vocab=100000000"], "hides at every TP degree up to"),
        (["link=loopback"], "so it never hides"),
        (["tp=64", "link_gbs=1"], "dH reduction: hides up to TP 1, and not past it"),
        (["chunk_size=100"], "chunk: 100 rows (as asked)"),
        (["memory_budget=1000000000"], "rows (within 1% of the fastest that 1,000.0 MB of logits allow)"),
        (["memory_budget=1"], "chunk: 1 rows"),
    ],
)  # fmt: skip
def test_advice_follows_the_sizes_and_links(words: list[str], advice: str) -> None:
    config = from_words(PlanConfig, words)
    text = plan.make(config, plan.machine_of(config, None))["text"]
    assert advice in text, text


def test_tp_defaults_to_the_ranks_of_the_job() -> None:
    assert plan.workload(PlanConfig(), 3).tp == 3 and plan.workload(PlanConfig()).tp == 8
    assert plan.workload(PlanConfig(tp=2), 3).tp == 2


def _bench(**changes: Any) -> dict[str, Any]:
    """What ``bench loss`` writes, as far as it is read."""
    calls = {"all_gather": 4, "all_reduce": 4}
    sent = {"all_gather": 4 * (64 + 12 * 512), "all_reduce": 4 * 512 * 768 * 4}
    point = {
        "value": None,
        "problem": {"tokens": 2048, "hidden": 768, "vocab": 65_536, "ranks": 2},
        "chunk_rows": 512,
        "results": {
            "floor": {"best_s": 1.2},
            "ours": {
                "best_s": 1.3, "peak_extra_bytes": 220_000_000, "chunk_rows": 512,
                "collectives": {"calls": calls, "bytes": sent},
            },
            "megatron": {"best_s": 1.9, "peak_extra_bytes": 370_000_000},
            "megatron_fused": {"best_s": 1.8},
        },
    }  # fmt: skip
    return {"config": {"dtype": "float32"}, "environment": {"device": "cpu"}, "points": [point]} | changes


def test_a_benchmark_is_compared_contestant_by_contestant(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(_bench()))
    status, out, _ = run(capsys, f"check={tmp_path}", "--json")
    found = json.loads(out)
    [point] = found["points"]
    assert status == 0 and found["kind"] == "check" and found["rates"] == "preset cpu, link preset loopback"
    assert point["gemm_rate"] == pytest.approx(6 * 2048 * 768 * 32_768 / 1.2)
    ours, megatron = point["contestants"]["ours"], point["contestants"]["megatron"]
    for exact in ("calls", "sent_bytes"):
        assert ours[exact]["predicted"] == ours[exact]["measured"] and ours[exact]["relative_error"] == 0
        assert megatron[exact]["measured"] is megatron[exact]["relative_error"] is None
    seconds = ours["seconds"]
    assert seconds["predicted"] > 1.2 and seconds["measured"] == 1.3
    assert seconds["relative_error"] == pytest.approx(seconds["predicted"] / 1.3 - 1)
    status, out, _ = run(capsys, f"check={tmp_path / 'bench.json'}")
    assert status == 0 and "no model of megatron_fused" in out and "(the floor of the file)" in out
    assert "8 / 8 (+0%)" in out and "4 / -" in out and "settled" not in out


def test_sizes_that_have_not_settled_are_explained(tmp_path: Path) -> None:
    report = _bench()
    report["points"][0]["results"]["ours"]["collectives"]["bytes"]["all_gather"] += 1
    (tmp_path / "bench.json").write_text(json.dumps(report))
    machine = Machine(preset_device("cpu", "float32"), preset_network("loopback", "loopback", 8))
    assert "once its exchanges have settled" in plan_check.against_bench(tmp_path, machine, fit=True)["text"]


def test_a_given_rate_is_not_fitted(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(_bench()))
    machine = Machine(preset_device("cpu", "float32"), preset_network("loopback", "loopback", 8))
    found = plan_check.against_bench(tmp_path, machine, fit=False)
    assert found["points"][0]["gemm_rate"] == machine.device.gemm and "floor of the file" not in found["text"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not a file of bench loss"),
        ('{"config": {"dtype": "float32"}}', "is not a file of bench loss: no 'points'"),
        ('{"config": {"dtype": "float32"}, "points": [{"problem": {}}]}', "is not a file of bench loss: no 'tokens'"),
        ('{"config": {"dtype": "int8"}, "points": []}', "dtype 'int8' has no model"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_benchmark_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_text(content)
    status, _, err = run(capsys, f"check={path}")
    assert status == 2 and message in err and str(path) in err


def test_relative_errors() -> None:
    prediction = fused(plan.workload(PlanConfig()), plan.machine_of(PlanConfig(), None), 512)
    measured = plan_check.Measured(2 * prediction.seconds, None, 0, 0)
    row = plan_check.compare(prediction, measured)
    assert row["seconds"]["relative_error"] == pytest.approx(-0.5)
    assert row["peak_bytes"]["relative_error"] is None
    assert row["calls"]["relative_error"] == 1.0  # predicted some where there were none
    alone = replace(plan.workload(PlanConfig()), tp=1)
    row = plan_check.compare(fused(alone, plan.machine_of(PlanConfig(), None), 512), measured)
    assert row["calls"]["relative_error"] == 0.0


def test_reading_a_benchmark_checks_it(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(_bench(points=[])))
    assert plan_check.read_bench(tmp_path)["points"] == []
    with pytest.raises(ConfigError, match="write one with bench loss"):
        plan_check.read_bench(tmp_path / "none")
