"""FSDP2: a model whose vocabulary is sharded over one mesh dimension and everything over another trains as one rank."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from tests.batch import attempt
from tests.integrations.fsdp_models import CLIP, SAVED, SETTINGS, STEPS, Plain, Sharded, batch, oracle
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import require_equal
from vocab_parallel import VocabLayout, VocabShard, clip_gradients_, tie_weights
from vocab_parallel.gradient_norm import gradient_norm
from vocab_parallel.integrations import fsdp

LOSS, WEIGHT, NORM = 1e-5, 2e-5, 1e-5  # absolute; of float32 sums in another order, after ten steps of AdamW
PAGE = Path(__file__).parents[2] / "docs" / "hosts" / "fsdp.md"

# dp, tp, vocabulary, multiple_of, tied. 9 ids over 4 ranks of 3 rows leave the last shard empty.
FOUR = [(2, 2, 13, 4, True), (2, 2, 9, 1, False), (1, 4, 9, 1, True), (4, 1, 9, 1, True)]
TWO = [(1, 2, 9, 1, True), (2, 1, 13, 4, True), (2, 1, 9, 1, False)]


def build(dp, tp, vocab, multiple_of, tied, meta=False, **options):
    """Mesh, shard, and a model under FSDP2."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    shard = VocabShard(VocabLayout(vocab, tp, multiple_of=multiple_of), mesh.get_group("tp"))
    model = Sharded(shard, tied, mean_group=mesh.get_group("dp"))
    if meta:
        model.to_empty(device="meta")
        if tied:
            tie_weights(model.embedding, model.lm_head)
    names = fsdp.apply(model, mesh, shard=shard, **options)
    assert names == ["embedding.weight", *([] if tied else ["lm_head.weight"]), "lm_head.bias"]
    return mesh, shard, model


def mine(mesh, vocab, step):
    """This rank's sequences of the batch."""
    return [part.tensor_split(mesh.size(0))[mesh.get_local_rank(0)] for part in batch(vocab, step)]


def train(mesh, model, optimizer, vocab, steps):
    losses, norms = [], []
    for step in steps:
        optimizer.zero_grad()
        ids, target = mine(mesh, vocab, step)
        loss = model(ids, target)
        loss.backward()
        norms.append(clip_gradients_(model, CLIP))
        optimizer.step()
        losses.append(loss.detach())
    return losses, norms


def alias(model, optimizer, tied):
    """Whether the tie holds, and how many states the optimizer has beside those of the trunk and the bias."""
    if tied:
        assert fsdp.verify_tied(model, optimizer) == [("embedding.weight", "lm_head.weight")]
        assert model.lm_head.weight is model.embedding.weight
    assert isinstance(model.embedding.weight, DTensor) and model.embedding.weight.device_mesh.ndim == 2
    return len(optimizer.state) - len(list(model.blocks.parameters())) - len(list(model.norm.parameters())) - 1


def _train(rank, folder, *case):
    """All steps, with a checkpoint in the middle."""
    mesh, _, model = build(*case)
    vocab, tied = case[2], case[4]
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    alias(model, optimizer, tied)
    losses, norms = train(mesh, model, optimizer, vocab, range(SAVED))
    fsdp.save(Path(folder) / name(case), model, optimizer)
    more = train(mesh, model, optimizer, vocab, range(SAVED, STEPS))
    return {
        "losses": torch.stack(losses + more[0]), "norms": torch.stack(norms + more[1]),
        "model": fsdp.full_state_dict(model), "states": alias(model, optimizer, tied),
        "rows": len(model.embedding.weight.to_local()),
    }  # fmt: skip


def _resume(rank, folder, case, dp, tp, multiple_of):
    """A fresh process, other numbers of ranks and another padding."""
    _, _, vocab, _, tied = case
    mesh, _, model = build(dp, tp, vocab, multiple_of, tied, meta=True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # what is not loaded would show
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    fsdp.load(Path(folder) / name(case), model, optimizer)
    before = alias(model, optimizer, tied)
    assert all(bool(parameter.to_local().isfinite().all()) for parameter in model.parameters()), "rows not loaded"
    losses, norms = train(mesh, model, optimizer, vocab, range(SAVED, STEPS))
    assert alias(model, optimizer, tied) == before
    return {
        "losses": torch.stack(losses), "norms": torch.stack(norms), "model": fsdp.full_state_dict(model),
        "states": before,
    }  # fmt: skip


def name(case):
    return "-".join(map(str, case))


RESUMES = [(FOUR[0], 1, 2, 1), (FOUR[1], 2, 1, 4), (FOUR[2], 1, 2, 4), (TWO[1], 1, 2, 1)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case in one world of its size, then every resumption in a new one: results by case, and the checkpoints."""
    folder = str(tmp_path_factory.mktemp("fsdp"))
    results = {}
    for world, cases in ((4, FOUR), (2, TWO)):
        trained = Batch(_train, [(folder, *case) for case in cases])
        for case in cases:
            results[case] = functools.partial(trained, world, folder, *case)
        trained(world, folder, *cases[0])  # resumptions need the checkpoints
    resumed = Batch(_resume, [(folder, *resume) for resume in RESUMES])
    results |= {resume: functools.partial(resumed, 2, folder, *resume) for resume in RESUMES}
    return Path(folder), results


def compare(ranks, vocab, tied, start):
    expected = oracle(vocab, tied)
    for rank in ranks:
        for key, limit in (("losses", LOSS), ("norms", NORM)):
            assert rank[key].shape == expected[key][start:].shape
            off = (rank[key].double() - expected[key][start:].double()).abs().max()
            assert off <= limit, f"{key} differ by {off:.3g}"
        assert set(rank["model"]) == set(expected["model"])
        for key, value in expected["model"].items():
            assert rank["model"][key].shape == value.shape, key
            off = (rank["model"][key] - value).abs().max()
            assert off <= WEIGHT, f"{key} differs by {off:.3g}"
        assert rank["states"] == (1 if tied else 2), "one state for a tied weight"
    for key in ("losses", "norms"):
        require_equal(f"{key} on every rank", [rank[key] for rank in ranks])
    for key in expected["model"]:
        require_equal(f"{key} on every rank", [rank["model"][key] for rank in ranks])


@pytest.mark.parametrize("case", FOUR + TWO, ids=name)
def test_ten_steps_equal_the_single_process(runs, case):
    dp, tp, vocab, multiple_of, tied = case
    ranks = runs[1][case]()
    compare(ranks, vocab, tied, 0)
    shard_size = VocabLayout(vocab, tp, multiple_of=multiple_of).shard_size
    rows = [rank["rows"] for rank in ranks]
    assert sum(rows) == tp * shard_size and max(rows) <= -(-shard_size // dp), "sharded over both dimensions"


@pytest.mark.parametrize("resume", RESUMES, ids=lambda resume: f"{name(resume[0])}-to-{name(resume[1:])}")
def test_a_checkpoint_resumes_in_fresh_processes_at_other_numbers_of_ranks_and_another_padding(runs, resume):
    _, _, vocab, _, tied = resume[0]
    compare(runs[1][resume](), vocab, tied, SAVED)


@pytest.mark.parametrize("case", FOUR + TWO, ids=name)
def test_a_checkpoint_holds_real_rows_and_a_tied_weight_once(runs, case):
    _, _, vocab, _, tied = case
    saved = FileSystemReader(runs[0] / name(case)).read_metadata().state_dict_metadata
    sizes = {key: list(entry.size) for key, entry in saved.items()}
    tables = {key: size for key, size in sizes.items() if "embedding" in key or "lm_head.weight" in key}
    owners = ["embedding.weight"] if tied else ["embedding.weight", "lm_head.weight"]
    moments = [f"optimizer.{owner}.{moment}" for owner in owners for moment in ("exp_avg", "exp_avg_sq")]
    assert {key for key, size in tables.items() if size} == {*(f"model.{owner}" for owner in owners), *moments}
    assert all(size == [vocab, 6] for size in tables.values() if size)
    assert sizes["model.lm_head.bias"] == [vocab]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", [FOUR[0], FOUR[1], TWO[1]], ids=name)
def test_a_checkpoint_loads_as_plain_tensors_without_this_package(runs, case):
    _, _, vocab, _, tied = case
    expected = oracle(vocab, tied, steps=SAVED)["model"]
    state = {f"model.{key}": torch.full_like(value, torch.nan) for key, value in expected.items()}
    load(state, storage_reader=FileSystemReader(runs[0] / name(case)), no_dist=True)
    for key, value in expected.items():
        assert (state[f"model.{key}"] - value).abs().max() <= WEIGHT, key


def copied_values(model, *_):
    model.lm_head.weight = nn.Parameter(model.embedding.weight.detach().clone())


def shared_storage(model, *_):
    model.lm_head.weight = nn.Parameter(model.embedding.weight.detach())


def emptied(model, *_):
    """As a model that was built on the meta device."""
    model.to_empty(device="meta")
    model.to_empty(device="cpu")


def assigned_plain(model, shard, *_):
    plain = torch.zeros(shard.shard_size, 6)
    model.load_state_dict({"embedding.weight": plain, "lm_head.weight": plain}, strict=False, assign=True)


def assigned_new(model, *_):
    """New DTensors: the model stays tied, with another Parameter than the optimizer has."""
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    assert model.lm_head.weight is model.embedding.weight


def tied_later(model, shard, *_):
    other = Sharded(shard, True)
    model.embedding.weight = other.embedding.weight
    tie_weights(model.embedding, model.lm_head)


BREAKS = [copied_values, shared_storage, assigned_plain, assigned_new, tied_later]


def break_and_verify(change, model, shard, optimizer):
    change(model, shard)
    fsdp.verify_tied(model, optimizer)


def _broken(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    shard = VocabShard(VocabLayout(9, 1, multiple_of=1), mesh.get_group("tp"))
    found = {}
    for change in BREAKS:
        *_, model = build(2, 1, 9, 1, True)
        optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
        found[f"{change.__name__}, after"] = attempt(
            functools.partial(break_and_verify, change, model, shard, optimizer)
        )
    for change in (copied_values, shared_storage, emptied):
        model = Sharded(shard, True)
        change(model)
        found[f"{change.__name__}, before"] = attempt(functools.partial(fsdp.apply, model, mesh, shard=shard))
    model = Sharded(shard, True)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    fsdp.apply(model, mesh, shard=shard)
    found["optimizer first"] = attempt(lambda: fsdp.verify_tied(model, optimizer))
    return found


def test_every_broken_tie_is_named_on_every_rank():
    first, second = run_ranks(_broken, 2)
    assert len(first) == len(BREAKS) + 4
    for what, raised in first.items():
        assert raised.kind == second[what].kind == "TyingError", (what, raised, second[what])
        assert "embedding.weight" in raised.message and "lm_head.weight" in raised.message, (what, raised.message)
        assert raised.message == second[what].message, what


def _refused(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    shard = VocabShard(VocabLayout(9, 1, multiple_of=1), mesh.get_group("tp"))
    wide = VocabShard(VocabLayout(9, 2, multiple_of=1), mesh.get_group("dp"))
    found = {}

    def refuse(what, model, mesh=mesh, shard=shard, **options):
        found[what] = attempt(lambda: fsdp.apply(model, mesh, shard=shard, **options))

    refuse("no vocabulary", Plain(9, True))
    refuse("no such dimension", Sharded(shard, True), tp_dim="model")
    refuse("another group", Sharded(wide, True), shard=wide)
    refuse("another shard", Sharded(wide, True))
    refuse("twice", build(2, 1, 9, 1, True)[-1])

    *_, model = build(2, 1, 9, 1, True)
    found["before forward"] = attempt(lambda: model.lm_head(torch.zeros(2, 6)))
    found["before forward, lookup"] = attempt(lambda: model.embedding(torch.tensor([1])))
    return found


WORDS = {
    "no vocabulary": ("ConfigError", ["Plain", "VocabParallelEmbedding"]),
    "no such dimension": ("ConfigError", ["model", "mesh_dim_names"]),
    "another group": ("ConfigError", ["get_group"]),
    "another shard": ("ConfigError", ["embedding.weight"]),
    "twice": ("ConfigError", ["embedding.weight", "DTensor"]),
    "before forward": ("UngatheredWeightError", ["forward", "of this rank's 9 rows"]),
    "before forward, lookup": ("UngatheredWeightError", ["forward", "of this rank's 9 rows"]),
}


def test_what_cannot_be_right_is_refused_with_the_reason():
    for found in run_ranks(_refused, 2):
        assert set(found) == set(WORDS)
        for what, (kind, words) in WORDS.items():
            assert found[what].kind == kind, (what, found[what])
            assert all(word in found[what].message for word in words), (what, found[what].message)


def _variants(rank):
    """What the page promises, one after the other, each a first step compared with the plain one's."""
    seen = {}
    vocab = 9

    for kernel in ("foreach", "fused"):
        mesh, _, model = build(2, 1, vocab, 1, True)
        optimizer = torch.optim.AdamW(model.parameters(), **{kernel: True}, **SETTINGS)
        losses, norms = train(mesh, model, optimizer, vocab, range(3))
        seen[kernel] = (torch.stack(losses), torch.stack(norms))

    def gradients(model, backward):
        backward()
        return gradient_norm(model)

    mesh, _, model = build(2, 1, vocab, 1, True)
    ids, target = mine(mesh, vocab, 0)
    whole = gradients(model, lambda: model(ids, target).backward())

    # the loss right after forward: FSDP keeps the outermost group gathered until its backward
    mesh, _, model = build(2, 1, vocab, 1, True)
    model.forward = model.hidden
    after = gradients(model, lambda: model.loss(model(ids), target).backward())
    seen["loss after forward"] = (whole, after)

    mesh, _, model = build(2, 1, vocab, 1, True)
    model.mean_group = None

    def accumulated():
        """Two micro-batches of one sequence each, weighted by their share of all targets."""
        total = (batch(vocab, 0)[1] != -100).sum()
        for at in range(2):
            model.set_requires_gradient_sync(at == 1)
            share = (target[at : at + 1] != -100).sum() * 2 / total
            (model(ids[at : at + 1], target[at : at + 1]) * share).backward()

    seen["accumulation"] = (whole, gradients(model, accumulated))

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh, _, model = build(2, 1, vocab, 1, True, mp_policy=policy)
    assert model.embedding.weight.dtype == torch.float32
    half = gradients(model, lambda: model(ids, target).backward())
    assert model.embedding.weight.grad.dtype == torch.float32
    seen["bfloat16"] = (whole, half)

    mesh, _, model = build(2, 1, vocab, 1, True)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    train(mesh, model, optimizer, vocab, range(1))
    state = {key: value * 2 for key, value in get_model_state_dict(model).items()}
    wanted = fsdp.full_state_dict(model)["embedding.weight"] * 2
    set_model_state_dict(model, state)
    fsdp.verify_tied(model, optimizer)
    seen["torch's state dict"] = (wanted.norm(), fsdp.full_state_dict(model)["embedding.weight"].norm())

    model = build(2, 1, vocab, 1, True)[-1]
    model(ids, target).backward()
    seen["torch's norm"] = attempt(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    return seen


def test_the_variants_of_the_page_do_what_it_says():
    expected = oracle(9, True, steps=3)
    for seen in run_ranks(_variants, 2):
        for kernel in ("foreach", "fused"):
            losses, norms = seen.pop(kernel)
            assert (losses - expected["losses"]).abs().max() <= LOSS, kernel
            assert (norms - expected["norms"]).abs().max() <= NORM, kernel
        assert seen.pop("torch's norm").kind is not None, "torch clips over two meshes now: the page is out of date"
        whole, half = seen.pop("bfloat16")
        assert 0 < (half - whole).abs() <= 3e-2 * whole
        for what, (want, got) in seen.items():
            assert (got - want).abs() <= 1e-6 * want, (what, want, got)


def snippet():
    """The page's three lines."""
    found = re.findall(r"<!-- three lines -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == 1
    return found[0]


def _as_written(rank, code):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    shard = VocabShard(VocabLayout(9, 2, multiple_of=1), mesh.get_group("tp"))
    names = {"torch": torch, "mesh": mesh, "shard": shard, "model": Sharded(shard, True)}
    exec(code, names)
    losses, norms = train(mesh, names["model"], names["optimizer"], 9, range(1))
    assert dist.get_world_size() == 2
    return losses[0], norms[0]


def test_the_three_lines_of_the_page_run_as_written():
    expected = oracle(9, True, steps=1)
    for loss, norm in run_ranks(_as_written, 2, snippet()):
        assert (loss - expected["losses"][0]).abs() <= LOSS and (norm - expected["norms"][0]).abs() <= NORM
