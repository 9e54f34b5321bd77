"""The Trainer and accelerate on a converted model: the losses, norms, checkpoints and weights of one process."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.batch import assert_all_raise, attempt
from tests.integrations.transformers_models import (
    build,
    clip_plain,
    largest_difference,
    make_optimizer,
    state_count,
    whole_parameters,
)
from tests.ranks import run_ranks
from tests.tolerances import require_equal
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.integrations import transformers as vp

VOCAB, ROWS, LENGTH, STEPS = 19, 4, 6, 10
MODES = ["same batch", "data parallel"]


def dataset(count):
    draw = torch.Generator().manual_seed(4)
    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=draw)
    ignored = torch.rand(ids.shape, generator=draw) < 0.3
    return [{"input_ids": ids[at], "labels": ids[at].masked_fill(ignored[at], -100)} for at in range(count)]


def launched(rank):
    """What torchrun sets, by which accelerate knows that it is one of several processes."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()), ACCELERATE_USE_CPU="true",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    warnings.simplefilter("default")  # the hosts' own
    warnings.filterwarnings("ignore")


def trainer_of(model, folder, optimizer=None, **changes):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": ROWS, "max_steps": STEPS, "learning_rate": 1e-2,
        "adam_epsilon": 1e-3, "max_grad_norm": 1.0, "logging_steps": 1, "lr_scheduler_type": "constant",
        "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 3,
        "optim": "adamw_torch",
    }  # fmt: skip
    arguments = transformers.TrainingArguments(**settings | changes)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=dataset(48))
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def logged(trainer, key):
    return torch.tensor([line[key] for line in trainer.state.log_history if key in line], dtype=torch.float64)


def convert(model, mode, tp):
    """`tp` consecutive ranks share a vocabulary and their batches; or all ranks, each with its own."""
    groups = [dist.new_group(list(range(at, at + tp))) for at in range(0, dist.get_world_size(), tp)]
    shard = VocabShard(VocabLayout(VOCAB, tp, multiple_of=1), groups[dist.get_rank() // tp])
    vp.apply(model, shard=shard, data_parallel=mode == "data parallel")


def _train(rank, mode, tp, rows, folder, resume, changes):
    model = build("llama", VOCAB)
    if mode != "plain":
        launched(rank)
        convert(model, mode, tp)
    else:
        warnings.simplefilter("ignore")
    trainer = trainer_of(
        model, folder, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, save_strategy="steps",
        save_steps=STEPS // 2, **changes,
    )  # fmt: skip
    if mode != "plain":
        vp.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    result = {"loss": logged(trainer, "loss"), "norm": logged(trainer, "grad_norm")}
    result["alias"] = model.lm_head.weight is model.model.embed_tokens.weight
    result["weights"] = whole_parameters(model)
    result["end"] = trainer.state.global_step
    result["together"] = trainer.get_total_train_batch_size(trainer.args)
    if mode != "plain":
        result["states"] = state_count(model, trainer.optimizer.optimizer)
        result["tied"] = vp.verify(trainer.model_wrapped, trainer.optimizer)
        result["rows"] = len(model.lm_head.weight)
    # a batch that is not full is padded with repeated rows by data-parallel ranks, as the hosts do
    counts = (14, 16) if mode == "plain" or (mode == "same batch" and tp == dist.get_world_size()) else (16,)
    result["evaluated"] = {count: trainer.evaluate(dataset(count))["eval_loss"] for count in counts}
    return result


def compare(ranks, expected, first=0):
    for rank in ranks:
        assert torch.allclose(rank["loss"], expected["loss"][first:], rtol=0, atol=1e-5)
        assert torch.allclose(rank["norm"], expected["norm"][first:], rtol=1e-4)
        assert largest_difference(rank["weights"], expected["weights"]) < 2e-5
        assert rank["end"] == STEPS
        assert rank["together"] == expected["together"], "rows of an optimizer step"
        assert rank["alias"]
        assert rank["tied"] == [("model.embed_tokens.weight", "lm_head.weight")]
        assert rank["states"] == [1, len(rank["weights"]) - 1]
        for count, loss in rank["evaluated"].items():
            assert abs(loss - expected["evaluated"][count]) < 1e-5, f"evaluation of {count} rows"
    for name in ranks[0]["weights"]:
        require_equal(f"{name} on every rank", [rank["weights"][name] for rank in ranks])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One process: with the batch of one rank, and with that of two."""
    made = {}

    def run(mode, world=1, tp=1, rows=ROWS, resume=None, **changes):
        key = (mode, world, tp, rows, resume, *sorted(changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("run")
            arguments = (mode, tp, rows, str(folder), resume, changes)
            made[key] = (run_ranks(_train, world, *arguments, timeout=110, detail=False), folder)
        return made[key]

    return run


@pytest.mark.parametrize(
    ("mode", "world", "tp", "rows"),
    [("same batch", 2, 2, ROWS), ("data parallel", 2, 2, 2 * ROWS), ("same batch", 4, 2, 2 * ROWS)],
    ids=["tp 2", "data parallel 2", "tp 2 x dp 2"],
)
def test_the_trainer_gives_the_losses_norms_and_weights_of_one_process(runs, mode, world, tp, rows):
    """Also G03: ranks with the same batch are not extra data, so neither loss nor gradient is multiplied."""
    (expected,), _ = runs("plain", rows=rows)
    ranks, _ = runs(mode, world, tp)
    assert ranks[0]["rows"] == -(-VOCAB // tp)
    compare(ranks, expected)


def test_the_loss_of_ranks_with_one_batch_is_right_also_where_tokens_are_not_summed_over_ranks(runs):
    (expected,), _ = runs("plain", rows=ROWS)
    ranks, _ = runs("same batch", 2, 2, average_tokens_across_devices=False)
    compare(ranks, expected)


def test_gradients_accumulate_over_batches_and_ranks(runs):
    """DDP reduces only after the last batch, the shards' gradients are whole after each."""
    (expected,), _ = runs("plain", rows=ROWS, gradient_accumulation_steps=2)
    ranks, _ = runs("data parallel", 2, 2, rows=ROWS // 2, gradient_accumulation_steps=2)
    compare(ranks, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_trainer_resumes_a_checkpoint_of_one_process_and_writes_one_for_it(runs, mode):
    """Whole tables and whole moments: a fresh world of 2 takes over from 1, and 1 from 2."""
    rows = ROWS if mode == "same batch" else 2 * ROWS
    (expected,), one = runs("plain", rows=rows)
    _, two = runs(mode, 2, 2)
    checkpoint = f"checkpoint-{STEPS // 2}"
    resumed, _ = runs(mode, 2, 2, resume=str(one / checkpoint))
    compare(resumed, expected)  # the log of the steps before comes with the checkpoint
    (back,), _ = runs("plain", rows=rows, resume=str(two / checkpoint))
    assert largest_difference(back["weights"], expected["weights"]) < 2e-5
    from safetensors.torch import load_file

    saved = load_file(two / checkpoint / "model.safetensors")
    assert saved["model.embed_tokens.weight"].shape[0] == VOCAB, "the real rows"
    assert "lm_head.weight" not in saved, "the tie once"


def _bare(rank, folder):
    launched(rank)
    model = build("llama", VOCAB)
    convert(model, "same batch", 2)
    trainer = trainer_of(model, folder, save_strategy="no")
    return attempt(trainer.train)


def test_a_trainer_that_does_not_know_of_the_shards_is_refused(tmp_path):
    attempts = run_ranks(_bare, 2, str(tmp_path), detail=False)
    words = ["vocab_parallel.integrations.transformers.attach", "Trainer"]
    assert_all_raise("no attach", attempts, ["ConfigError"], words)


def _accelerate(rank, mode, folder):
    from accelerate import Accelerator

    launched(rank)
    model = build("llama", VOCAB)
    plain = copy.deepcopy(model)
    convert(model, mode, 2)
    accelerator = Accelerator(cpu=True)
    vp.attach(accelerator, model)
    inner, optimizer = model, make_optimizer(model)
    loader = DataLoader(dataset(24), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for line in loader:
        loss = model(**line).loss
        accelerator.backward(loss)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    vp.verify(model, optimizer)
    accelerator.save_state(folder)
    accelerator.save_model(model, f"{folder}/model")
    plain_optimizer, expected, expected_norms = make_optimizer(plain), [], []
    together = ROWS if mode == "same batch" else 2 * ROWS
    for line in DataLoader(dataset(24), batch_size=together):
        loss = plain(**line).loss
        plain_optimizer.zero_grad()
        loss.backward()
        expected_norms.append(clip_plain(plain, 1.0))
        plain_optimizer.step()
        expected.append(loss.detach())
    return {
        "loss": torch.stack(losses), "expected": torch.stack(expected), "norm": torch.stack(norms),
        "expected norm": torch.stack(expected_norms), "weights": whole_parameters(inner),
        "end": largest_difference(whole_parameters(inner), whole_parameters(plain)),
        "moments": vp.full_optimizer_state(inner, optimizer.optimizer)["state"],
        "expected moments": plain_optimizer.state_dict()["state"],
    }  # fmt: skip


def _accelerate_again(rank, mode, folder):
    from accelerate import Accelerator

    launched(rank)
    model = build("llama", VOCAB, seed=1)
    convert(model, mode, 2)
    accelerator = Accelerator(cpu=True)
    vp.attach(accelerator, model)
    inner, optimizer = model, make_optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.load_state(folder)
    return {
        "weights": whole_parameters(inner), "tied": vp.verify(model, optimizer),
        "moments": vp.full_optimizer_state(inner, optimizer.optimizer)["state"],
    }  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_accelerate_trains_saves_and_loads_as_one_process(tmp_path, mode):
    ranks = run_ranks(_accelerate, 2, mode, str(tmp_path), detail=False)
    for rank in ranks:
        assert torch.allclose(rank["loss"], rank["expected"], rtol=0, atol=1e-5)
        assert torch.allclose(rank["norm"], rank["expected norm"], rtol=1e-5)
        assert rank["end"] < 2e-5
        for at, state in rank["expected moments"].items():
            for name, value in state.items():
                assert torch.allclose(rank["moments"][at][name], value, rtol=0, atol=1e-6), f"{name} of parameter {at}"
    for rank in run_ranks(_accelerate_again, 2, mode, str(tmp_path), detail=False):
        assert largest_difference(rank["weights"], ranks[0]["weights"]) == 0.0
        assert rank["tied"] == [("model.embed_tokens.weight", "lm_head.weight")]
        for at, state in ranks[0]["moments"].items():
            assert all(torch.equal(rank["moments"][at][name], value) for name, value in state.items())
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert largest_difference(saved, {name: ranks[0]["weights"][name] for name in saved}) == 0.0
