"""The app's training in each host, at every split of the ranks: the same losses, the oracle's, and resumed bits."""

from __future__ import annotations

import functools
import os
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import ranks
from tests.integrations.megatron_cpu import cuda_stand_in
from tests.ranks import run_ranks
from vocab_parallel.app import config as configs
from vocab_parallel.app import runlog
from vocab_parallel.app.config import Config
from vocab_parallel.app.data import open_corpus
from vocab_parallel.app.generate import generate
from vocab_parallel.app.job import join
from vocab_parallel.app.train import Run
from vocab_parallel.app.vocabulary import open_vocabulary
from vocab_parallel.errors import CheckpointLayoutError, ConfigError
from vocab_parallel.vocabulary.manifest import Manifest, require_comparable, require_loadable

ranks.preload("torch.utils.tensorboard", "vocab_parallel.app.train")

ROOT = Path(__file__).parents[2]
# 259 ids over 2 ranks of 136 rows: the last shard has padding. AdamW's first steps are the rate's size whatever the
# gradient, so a small rate keeps rounding apart from learning.
SETTINGS = ["data.max_bytes=60000", "parallel.threads=1", "model.dim=16", "model.context=24", "train.steps=4",
            "train.lr=1e-3", "train.warmup=2", "train.checkpoint_every=2", "train.validation_every=2",
            "train.validation_sequences=4", "train.clip=0.5", "train.weight_decay=0.1", "train.trunk_lr_ratio=0.5",
            "oracle.gradient_every=2"]  # fmt: skip
BIAS = "model.head_bias=true"
SAME_MODEL = {
    2: [("plain", 2, ""), ("plain", 1, ""), ("fsdp", 2, ""), ("fsdp", 1, ""), ("deepspeed", 2, "zero1"),
        ("deepspeed", 1, "zero3")],
    4: [("plain", 2, ""), ("fsdp", 2, ""), ("deepspeed", 2, "zero3"), ("deepspeed", 4, "")],
}  # fmt: skip
OTHER_MODEL = {2: [("transformers", 2, ""), ("transformers", 1, ""), ("megatron", 2, ""), ("megatron", 1, "")]}
BASES = [(2, "plain", 2, ""), (2, "transformers", 2, ""), (2, "megatron", 2, "")]  # what the others are compared with
CASES = [(world, *case) for model in (SAME_MODEL, OTHER_MODEL) for world, cases in model.items() for case in cases]
# The plain host at TP 2 is in tests/e2e/test_resume.py.
RESUMED = [("plain", 1, ""), ("fsdp", 2, ""), ("fsdp", 1, ""), ("deepspeed", 2, "zero1"), ("deepspeed", 1, "zero3"),
           ("transformers", 2, ""), ("megatron", 2, "")]  # fmt: skip
Case = tuple[str, int, str]
pytestmark = pytest.mark.timeout(280)  # more than a world has, so that it can say which rank hangs


def settings(case: Case, place: Path) -> list[str]:
    host, tp, file = case
    words = [*SETTINGS, f"host={host}", f"parallel.tp={tp}", f"runs={place}", f"name={named(case)}",
             f"data.cache={place.parent / 'cache'}"]  # fmt: skip
    if tp == 4:  # 88, 88, 83 and 0 real rows
        words.append("parallel.multiple_of=88")
    if file:
        words.append(f"host_config={ROOT / 'configs' / 'deepspeed' / f'{file}.json'}")
    if host == "megatron":  # draws its values for padding rows too: the same number of them at either size
        words.append(f"parallel.multiple_of={272 // tp}")
    return words if host in ("transformers", "megatron") else [*words, BIAS]


def named(case: Case) -> str:
    return "-".join(str(part) for part in case if part)


def run_all(rank: int, place: Path, cases: list[Case]) -> list[str]:
    """Trains every case in this world. Returns the traces, empty where it went well."""
    return [attempt(rank, train_case, case, place)[1] for case in cases]


def resume_all(rank: int, place: Path, cases: list[Case]) -> list[tuple[Any, str]]:
    """Resumes every case, and lets it write. Returns its text and the trace."""
    return [attempt(rank, resume_case, case, place) for case in cases]


def attempt(rank: int, fn: Callable[[Case, Path], Any], case: Case, place: Path) -> tuple[Any, str]:
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        with warnings.catch_warnings(), cuda_stand_in() if case[0] == "megatron" else nullcontext():
            warnings.simplefilter("ignore")  # the hosts' own
            return fn(case, place), ""
    except Exception:
        return None, traceback.format_exc()


def train_case(case: Case, place: Path) -> None:
    with opened(configs.load(ROOT / "configs" / "smoke.yaml", settings(case, place))) as run:
        run.steps()


def resume_case(case: Case, place: Path) -> str:
    [folder] = place.glob(f"{named(case)}-2*")
    with opened(configs.load(folder, [f"train.resume={folder}"])) as run:
        run.steps()
    return generate(folder, configs.load(folder, ["generate.method=greedy", "generate.max_tokens=3"]))


@contextmanager
def opened(config: Config) -> Iterator[Run]:
    """A `Run` in the ranks that are there."""
    vocabulary = open_vocabulary(config.data.vocab)
    corpus = open_corpus(config.data, vocabulary, seed=config.train.seed, say=lambda text: None)
    with join(config.parallel) as job:
        run = Run(config, job, vocabulary, corpus)
        try:
            yield run
        finally:
            run.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("app-hosts")


@functools.cache
def world(size: int, place: Path) -> dict[Case, list[str]]:
    """Traces of every case on `size` ranks, by case: of the ranks that failed."""
    cases = [(host, tp, file) for ranks_of, host, tp, file in CASES if ranks_of == size]
    found = run_ranks(run_all, size, place / str(size), cases, timeout=240.0)
    return {case: [trace[at] for trace in found if trace[at]] for at, case in enumerate(cases)}


@functools.cache
def rows(size: int, case: Case, place: Path) -> tuple[dict[str, Any], ...]:
    """Metrics of a case."""
    traces = world(size, place)[case]
    assert not traces, "\n".join(traces)
    [folder] = (place / str(size)).glob(f"{named(case)}-2*")
    return tuple(runlog.read_metrics(folder))


@pytest.mark.parametrize(("size", "host", "tp", "file"), CASES)
def test_a_host_trains_and_its_loss_and_gradient_are_the_oracles(
    size: int, host: str, tp: int, file: str, place: Path
) -> None:
    found = rows(size, (host, tp, file), place)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert found[-1]["validation_loss"] < found[1]["validation_loss"] < found[0]["loss"] + 0.1
    for row in found:
        assert row["oracle_difference"] == abs(row["loss"] - row["oracle_loss"]) < 1e-5
        assert (row["oracle_gradient_difference"] is None) == (row["step"] % 2 == 1)
        assert row["oracle_gradient_difference"] is None or row["oracle_gradient_difference"] < 1e-5


@pytest.mark.parametrize(("size", "host", "tp", "file"), [case for case in CASES if case not in BASES])
def test_a_hosts_losses_and_norms_do_not_depend_on_the_ranks(
    size: int, host: str, tp: int, file: str, place: Path
) -> None:
    """DeepSpeed, FSDP2 and replicas train to what the plain host does; another model's splits agree with each other."""
    base = ("plain", 2, "") if (host, tp, file) in SAME_MODEL[size] else (host, 2, "")
    for row, want in zip(rows(size, (host, tp, file), place), rows(2, base, place), strict=True):
        assert row["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert row["gradient_norm"] == pytest.approx(want["gradient_norm"], rel=1e-4)
        assert row["learning_rate"] == want["learning_rate"]
        if want["validation_loss"] is not None:
            assert row["validation_loss"] == pytest.approx(want["validation_loss"], abs=1e-5)


def test_every_host_resumes_in_fresh_processes_to_the_same_bits_and_writes(place: Path) -> None:
    before = {case: rows(2, case, place) for case in RESUMED}
    for case in RESUMED:
        [folder] = (place / "2").glob(f"{named(case)}-2*")
        assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-00000002", "step-00000004"}
        shutil.rmtree(folder / "checkpoints" / "step-00000004")
    found = run_ranks(resume_all, 2, place / "2", RESUMED, timeout=240.0)
    traces = [trace for rank in found for _, trace in rank if trace]
    assert not traces, "\n".join(traces)
    assert found[0] == found[1]  # every rank writes the same
    texts = {case: text for case, (text, _) in zip(RESUMED, found[0], strict=True)}
    assert {texts[case] for case in RESUMED if case in SAME_MODEL[2]} == {texts["plain", 1, ""]}
    assert all(text.startswith("import ") and len(text) > len("import ") for text in texts.values())
    for case in RESUMED:
        [folder] = (place / "2").glob(f"{named(case)}-2*")
        again = runlog.read_metrics(folder)
        exact = ("step", "loss", "validation_loss", "gradient_norm", "oracle_loss", "learning_rate")
        assert [[row[key] for key in exact] for row in again] == [[row[key] for key in exact] for row in before[case]]
        timed = [row["seconds"] for row in again]
        assert timed[:2] == [row["seconds"] for row in before[case][:2]] != timed[2:]  # two steps were made again


def refused(rank: int, place: Path) -> list[str]:
    """Errors of configurations that cannot work, in words."""
    os.environ["LOCAL_RANK"] = str(rank)
    found = []
    for words in (["host=plain", "parallel.tp=1", "train.batch=3"], ["host=transformers", BIAS], ["host=megatron"]):
        config = configs.load(ROOT / "configs" / "smoke.yaml", [*SETTINGS, f"data.cache={place / 'cache'}", *words])
        with pytest.raises(ConfigError) as caught, opened(config):
            pass
        found.append(str(caught.value))
    [folder] = (place / "2").glob("deepspeed-2-zero1-2*")
    other = configs.load(folder, [f"train.resume={folder}", "host=plain", "host_config=null"])
    with pytest.raises(ConfigError, match="no whole checkpoint of host=plain"), opened(other):
        pass
    [folder] = (place / "2").glob("fsdp-2-2*")
    with opened(configs.load(folder, [f"train.resume={folder}", "parallel.tp=1"])) as run:  # FSDP2 takes another split
        found.append(str(run.validate()))
    [folder] = (place / "2").glob("deepspeed-2-zero1-2*")
    other = configs.load(folder, [f"train.resume={folder}", "parallel.tp=1"])
    with pytest.raises(CheckpointLayoutError) as mismatch, opened(other):
        pass
    return [*found, str(mismatch.value)]


def test_another_split_loads_or_is_refused_and_so_are_other_mistakes_on_every_rank(
    place: Path,
) -> None:
    before = rows(2, ("fsdp", 2, ""), place)
    one, two = run_ranks(refused, 2, place)
    assert one == two
    assert "train.batch=3 sequences do not divide among 2 data-parallel replicas" in one[0]
    assert "model.head_bias=true: the model of host=transformers has no bias" in one[1]
    assert "host=megatron needs CUDA" in one[2]
    assert float(one[3]) == pytest.approx(before[-1]["validation_loss"], abs=1e-6)
    assert "tp_size 2, here 1" in one[4] and "replicas 1, here 2" in one[4]


@pytest.mark.parametrize(
    "model", [SAME_MODEL[2], OTHER_MODEL[2][:2], OTHER_MODEL[2][2:]], ids=lambda cases: cases[0][0]
)
def test_the_manifests_of_one_model_fit_whatever_host_and_split_it_runs_in(model: list[Case], place: Path) -> None:
    """Whole shapes are told: of DTensors, of ZeRO-3's partitions, of Megatron's tensor-parallel trunk."""
    found = []
    for case in model:
        rows(2, case, place)
        [folder] = (place / "2").glob(f"{named(case)}-2*")
        found.append(Manifest.read(folder))
    assert [one.runtime.host for one in found] == [host for host, _, _ in model]
    for other in found[1:]:
        require_loadable(found[0], other, where="a run")
        require_comparable(found[0], other)
    assert all(one.tying.tied and one.vocabulary.size == 259 and one.notes["corpus"] for one in found)


# What is loaded, and as what: each on three ranks, which the training did not have.
MOVED = [(("plain", 2, ""), "fsdp"), (("fsdp", 2, ""), "fsdp"), (("fsdp", 1, ""), "plain"),
         (("transformers", 2, ""), "transformers")]  # fmt: skip


def moved(rank: int, place: Path, cases: list[tuple[Case, str]]) -> list[tuple[Any, str]]:
    return [attempt(rank, functools.partial(move, host=host), case, place) for case, host in cases]


def move(case: Case, place: Path, *, host: str) -> tuple[float, str]:
    """The last validation loss and some text of a run, on the ranks that are there."""
    [folder] = place.glob(f"{named(case)}-2*")
    words = [f"host={host}", "parallel.tp=3", "parallel.multiple_of=1"]
    text = generate(folder, configs.load(folder, [*words, "generate.method=greedy", "generate.max_tokens=3"]))
    again = place.parent / "moved" / f"{named(case)}-to-{host}"  # an opened run describes itself in its folder
    if int(os.environ["LOCAL_RANK"]) == 0:
        shutil.copytree(folder, again)
    dist.barrier()
    with opened(configs.load(again, [f"train.resume={again}", "train.steps=6", *words])) as run:
        loss = run.validate()
        run.steps()
    return loss, text


def test_a_run_generates_and_goes_on_at_another_number_of_ranks_and_in_another_host(place: Path) -> None:
    before = [rows(2, case, place)[-1]["validation_loss"] for case, _ in MOVED]
    found = run_ranks(moved, 3, place / "2", MOVED, timeout=240.0)
    assert not [trace for rank in found for _, trace in rank if trace]
    assert found[0] == found[1] == found[2]
    for (case, host), ((loss, text), _), want in zip(MOVED, found[0], before, strict=True):
        assert loss == pytest.approx(want, abs=1e-5), (case, host)
        assert text.startswith("import ") and len(text) > len("import ")
        folder = place / "moved" / f"{named(case)}-to-{host}"
        again = runlog.read_metrics(folder)
        assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6] and again[-1]["validation_loss"] < want + 1e-3
        assert (folder / "checkpoints" / "step-00000006" / "vocabulary.json").is_file()
    assert len({text for ((_, text), _), (case, _) in zip(found[0], MOVED, strict=True) if case in SAME_MODEL[2]}) == 1
