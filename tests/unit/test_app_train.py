"""Pieces of the training: rate, gradient norm over shards, the oracle, initial values, run folders, the report."""

from __future__ import annotations

import dataclasses
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks
from vocab_parallel import VocabLayout, VocabShard, reference
from vocab_parallel.app import hosts, report, runlog
from vocab_parallel.app.config import Config, GenerateConfig, ModelConfig, TrainConfig
from vocab_parallel.app.generate import generate_ids
from vocab_parallel.app.job import Job, split_ranks
from vocab_parallel.app.model import LanguageModel
from vocab_parallel.app.optim import average_gradients_, learning_rate, make_optimizer, set_rate
from vocab_parallel.app.oracle import check, whole_loss
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.errors import ConfigError, NonFiniteError
from vocab_parallel.gradient_norm import clip_gradients_
from vocab_parallel.vocabulary.manifest import Manifest

MODEL = ModelConfig(dim=16, layers=1, heads=2, context=8, head_bias=True)
VOCAB = 101


def make(tp: int) -> tuple[VocabShard, LanguageModel]:
    shard = VocabShard(VocabLayout(VOCAB, tp, multiple_of=8), dist.group.WORLD if tp > 1 else None)
    return shard, LanguageModel(MODEL, shard, seed=3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def step_gradients(rank: int, tp: int, max_norm: float) -> dict[str, Any]:
    shard, model = make(tp)
    input, target = batch()
    hidden = model(input)
    loss = model.loss(hidden, target, chunk_size=5)
    loss.backward()
    shard.traffic.reset()
    norm = float(clip_gradients_(model, max_norm))
    calls = dict(shard.traffic.calls)
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name in ("embedding.weight", "lm_head.bias"):
        grads[name] = gather_vocab(shard, grads[name])
    weight = gather_vocab(shard, model.embedding.weight)
    return {"norm": norm, "loss": float(loss.detach()), "calls": calls, "grads": grads, "weight": weight}


def test_the_rate_warms_up_and_ends_low() -> None:
    config = TrainConfig(steps=100, warmup=10, lr=1.0, min_lr_ratio=0.1)
    assert learning_rate(config, 1) == pytest.approx(0.1) and learning_rate(config, 10) == 1.0
    assert learning_rate(config, 55) == pytest.approx(0.55) and learning_rate(config, 100) == pytest.approx(0.1)
    assert learning_rate(TrainConfig(steps=5, warmup=0, lr=1.0), 1) < 1.0


def test_initial_values_loss_and_norm_do_not_depend_on_the_number_of_ranks() -> None:
    one = run_ranks(step_gradients, 1, 1, 1e9)[0]
    for tp in (2, 3):
        ranks = run_ranks(step_gradients, tp, tp, 1e9)
        for other in ranks:
            assert torch.equal(other["weight"], one["weight"])
            assert other["norm"] == ranks[0]["norm"] and other["loss"] == ranks[0]["loss"]
            assert other["norm"] == pytest.approx(one["norm"], rel=1e-5)
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert other["calls"] == {"all_reduce": 1}
            for name, grad in one["grads"].items():
                torch.testing.assert_close(other["grads"][name], grad, rtol=1e-4, atol=1e-6)
                if "trunk" in name:  # what is replicated is the same bits
                    assert torch.equal(other["grads"][name], ranks[0]["grads"][name])
    # The norm is that of the whole model, the tied table once.
    assert one["norm"] == pytest.approx(math.sqrt(sum(float(g.double().square().sum()) for g in one["grads"].values())))


def test_clipping_scales_every_gradient_to_the_norm() -> None:
    free, clipped = run_ranks(step_gradients, 2, 2, 1e9)[0], run_ranks(step_gradients, 2, 2, 0.01)[0]
    assert clipped["norm"] == free["norm"] > 0.01
    for name, grad in free["grads"].items():
        torch.testing.assert_close(clipped["grads"][name], grad * (0.01 / free["norm"]), rtol=1e-5, atol=1e-9)


def broken_gradient(rank: int) -> None:
    _, model = make(2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if rank == 1:
        model.embedding.weight.grad[0, 0] = math.nan
    clip_gradients_(model, 1.0)


def test_a_gradient_that_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(broken_gradient, 2)
    assert {error.type for error in caught.value.errors.values()} == {NonFiniteError.__name__}
    assert set(caught.value.errors) == {0, 1}


def oracle_differences(rank: int, tp: int, spoil: float) -> list[float | None]:
    shard, model = make(tp)
    input, target = batch()
    hidden = model(input)
    loss = model.loss(hidden, target) + spoil
    job = Job(rank, tp, rank, torch.device("cpu"), dist.group.WORLD if tp > 1 else None)
    flat = hidden.detach().flatten(0, 1)
    with_gradients = check(
        job, shard, model.head(), flat, target.flatten(), loss.detach(), gradients=True, chunk_rows=3, chunk_size=4
    )
    without = check(
        job, shard, model.head(), flat, target.flatten(), loss.detach(), gradients=False, chunk_rows=3, chunk_size=4
    )
    assert without.gradient is None and without.loss == with_gradients.loss
    return [with_gradients.loss, with_gradients.gradient]


def replica_step(rank: int, tp: int, replicas: int) -> dict[str, Any]:
    """One step, each replica with its share of the batch, as the plain host makes it."""
    world = tp * replicas
    group = dist.group.WORLD if world > 1 else None
    part, across = split_ranks(rank, world, tp, timedelta(seconds=20))
    job = Job(rank, world, rank, torch.device("cpu"), group, across, part)
    shard = job.shard(VOCAB, 8)
    model = LanguageModel(MODEL, shard, seed=3, mean_group=job.data_group)
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.1, trunk_lr_ratio=0.5))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (6, 9), generator=generator)
    share = slice(job.replicas.rank * 6 // replicas, (job.replicas.rank + 1) * 6 // replicas)
    hidden, loss = model(ids[share, :-1], ids[share, 1:], chunk_size=5)
    loss.backward()
    average_gradients_(model, job.replicas)
    flat = hidden.flatten(0, 1)
    target = ids[share, 1:].flatten()
    found = check(job, shard, model.head(), flat, target, loss.detach(), gradients=True, chunk_rows=3, chunk_size=4)
    norm = float(clip_gradients_(model, math.inf))
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    for name in ("embedding.weight", "lm_head.bias"):
        grads[name] = gather_vocab(shard, grads[name])
    set_rate(optimizer, 1e-2)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    weight = gather_vocab(shard, model.embedding.weight)
    return {"loss": float(loss.detach()), "norm": norm, "grads": grads, "weight": weight, "found": found,
            "rates": rates, "place": (job.tp, shard.rank, job.replicas.rank)}  # fmt: skip


@pytest.mark.parametrize(("tp", "replicas"), [(1, 2), (2, 2), (1, 3)])
def test_replicas_give_loss_gradients_and_norm_of_the_whole_batch(tp: int, replicas: int) -> None:
    one = run_ranks(replica_step, 1, 1, 1)[0]
    ranks = run_ranks(replica_step, tp * replicas, tp, replicas)
    assert [found["place"] for found in ranks] == [(tp, rank % tp, rank // tp) for rank in range(tp * replicas)]
    for other in ranks:
        assert other["loss"] == ranks[0]["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["norm"] == ranks[0]["norm"] == pytest.approx(one["norm"], rel=1e-5)
        assert other["found"].loss < 1e-5 and 0 < other["found"].gradient < 1e-5
        assert other["rates"] == [1e-2, 5e-3]
        for name, grad in one["grads"].items():
            torch.testing.assert_close(other["grads"][name], grad, rtol=1e-4, atol=1e-6)
            assert torch.equal(other["grads"][name], ranks[0]["grads"][name])
        assert torch.equal(other["weight"], ranks[0]["weight"])


@pytest.mark.parametrize("tp", [1, 2])
def test_the_oracle_agrees_and_sees_a_wrong_loss(tp: int) -> None:
    good = run_ranks(oracle_differences, tp, tp, 0.0)
    assert all(found == good[0] for found in good) and 0 <= good[0][0] < 1e-5 and 0 < good[0][1] < 1e-5
    bad = run_ranks(oracle_differences, tp, tp, 0.25)
    assert all(found[0] == pytest.approx(0.25, abs=1e-5) for found in bad)


def test_the_oracle_in_chunks_equals_the_reference_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    bias, target = torch.randn(11, generator=generator), torch.randint(11, (7,), generator=generator)
    value, gradients = whole_loss(hidden, weight, bias, target, 3, gradients=True)
    inputs = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    want = reference.linear_cross_entropy(inputs[0], inputs[1], target, bias=inputs[2])
    want.backward()
    assert value == pytest.approx(float(want.detach()), abs=1e-14) and len(gradients) == 3
    for got, tensor in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(got, tensor.grad, rtol=0, atol=1e-14)
    assert whole_loss(hidden, weight, None, target, 3, gradients=False)[1] == []


def sample_ids(rank: int, tp: int, method: str) -> tuple[list[int], list[int]]:
    shard, model = make(tp)
    options = GenerateConfig(method=method, max_tokens=12, k=5, seed=4)
    of = (model, model.head(), shard, [1, 5, 9])
    ids = generate_ids(*of, options, context=8, eos=VOCAB)
    other = generate_ids(*of, dataclasses.replace(options, seed=5), context=8, eos=VOCAB)
    return ids, other


@pytest.mark.parametrize("method", ["greedy", "top_k"])
def test_every_rank_writes_the_same_text(method: str) -> None:
    one = run_ranks(sample_ids, 1, 1, method)
    two = run_ranks(sample_ids, 2, 2, method)
    assert two[0] == two[1] == one[0]  # here no two candidates are closer than rounding
    ids, other = one[0]
    assert len(ids) == 12 and all(0 <= token < VOCAB for token in ids)
    assert (ids == other) == (method == "greedy")  # the seed matters exactly when something is drawn


def test_generation_ends_at_eos() -> None:
    shard, model = make(1)
    of = (model, model.head(), shard, [1])
    first = generate_ids(*of, GenerateConfig(method="greedy", max_tokens=1), context=8, eos=VOCAB)
    assert generate_ids(*of, GenerateConfig(method="greedy"), context=8, eos=first[0]) == []


def row(step: int, **changes: Any) -> dict[str, Any]:
    base = {"step": step, "loss": 5.0 - step * 0.1, "validation_loss": None, "oracle_loss": 5.0 - step * 0.1,
            "oracle_difference": 1e-7, "oracle_gradient_difference": None, "tokens_per_second": 1000.0,
            "peak_memory_bytes": 10**8, "bytes_sent": 1000, "collectives": 4, "seconds": 0.1}  # fmt: skip
    return base | changes


MANIFEST = Manifest.of_tensors(
    {"model.embedding.weight": (torch.float32, (9, 4))},
    tables=["embedding.weight"],
    ties={},
    layout=VocabLayout.from_padded(9, 12, 2),
    notes={"corpus": {"unigram_entropy": 4.75}},
)


def test_a_resumed_log_keeps_what_the_checkpoint_knows(tmp_path: Path) -> None:
    log = runlog.RunLog(tmp_path)
    for step in (1, 2, 3):
        log.step(row(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a crash in mid-write
    assert [r["step"] for r in runlog.read_metrics(tmp_path)] == [1, 2, 3]
    log = runlog.RunLog(tmp_path, resume_step=2)
    log.step(row(3, loss=9.0))
    log.close()
    assert [(r["step"], r["loss"]) for r in runlog.read_metrics(tmp_path)] == [(1, 4.9), (2, 4.8), (3, 9.0)]
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_report_is_one_page_with_everything_in_it(tmp_path: Path) -> None:
    log = runlog.RunLog(tmp_path)
    log.describe(Config(name="a-run"), MANIFEST)
    for step in range(1, 6):
        log.step(row(step, validation_loss=4.6 if step == 5 else None, oracle_gradient_difference=0.0))
    log.close()
    page = report.write(tmp_path).read_text()
    assert "has not ended: 5 steps" in page
    for words in ("unigram entropy 4.75", "training, oracle", "9 real ids, 12 rows", "a-run", "python", "<svg"):
        assert words in page, words
    assert page.count("<svg") == 6 and '<td class="n">3</td>' in page  # the second shard's real ids, and its padding
    outside = [part for part in page.split('"') if part.startswith("http") and "w3.org" not in part]
    assert not outside
    assert "<script" not in page and "<link" not in page and "src=" not in page


def test_a_report_needs_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no manifest\.json"):
        report.write(tmp_path)
    MANIFEST.write(tmp_path)
    with pytest.raises(ConfigError, match="no step yet"):
        report.write(tmp_path)


def test_a_host_whose_package_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.importlib.util, "find_spec", lambda name: None)
    for name in ("deepspeed", "megatron", "transformers"):
        with pytest.raises(ConfigError, match=rf"host={name} needs its package: pip install '.*\[{name}\]'"):
            hosts.host_class(name)
    assert hosts.host_class("plain").__name__ == "PlainHost"
