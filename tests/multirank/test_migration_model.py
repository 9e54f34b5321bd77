"""A model that is migrated in the middle of a run: every row, moment and step, as one process with whole tables."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.multirank.migration_cases import edited, joined, oracle, raised, shard_of, whole
from tests.multirank.shared_world import ALL_SIZES, Batch
from tests.tolerances import bits, require_close
from vocab_parallel import (
    VocabLayout,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    VocabShard,
    tie_weights,
    verify_tied,
    vocab_parameters,
)
from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration import migrate_model_
from vocab_parallel.vocabulary.migration.initialization import MeanOfRows, MeanOfSources, Normal
from vocab_parallel.vocabulary.migration.model_conformance import conformance_report, record_model
from vocab_parallel.vocabulary.migration.records import (
    fixed_hidden,
)

WIDTH, STEPS = 16, 3  # a row is a whole number of vectors: the tail of a vector loop may round otherwise
LARGE, SMALL = edited(), edited(9, 2, 6, 2, seed=3)  # the small one is over 4 ranks of 3, 3, 3 and no rows
MEDIUM = edited(301, 16, 100, 5, seed=1)
KINDS = ("adamw", "amsgrad", "sgd", "adafactor", "muon", "master")
ELEMENTWISE = ("adamw", "amsgrad", "sgd", "master")  # a step of theirs does not depend on how rows are sharded


def map_of(kind: str) -> VocabMap:
    return LARGE if kind == "adamw" else MEDIUM


class Model(nn.Module):
    """Whole tables without a shard: the oracle."""

    def __init__(self, shard: VocabShard | None, tied: bool, vocab: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if shard is None:
            self.embedding, self.head = nn.Module(), nn.Module()
        else:
            self.embedding = VocabParallelEmbedding(WIDTH, shard=shard, dtype=dtype)
            self.head = VocabParallelLMHead(WIDTH, shard=shard, bias=True, dtype=dtype)
        self.trunk = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        tables = {
            (self.embedding, "weight"): whole(vocab, WIDTH, dtype=dtype, seed=1),
            (self.head, "weight"): whole(vocab, WIDTH, dtype=dtype, seed=2),
            (self.head, "bias"): whole(vocab, dtype=dtype, seed=3),
        }
        for (module, name), table in tables.items():
            setattr(module, name, nn.Parameter(table if shard is None else shard.slice(table)))
        with torch.no_grad():
            self.trunk.weight.copy_(whole(WIDTH, WIDTH, dtype=dtype, seed=4))
            self.trunk.bias.zero_()
        if tied and shard is None:
            self.head.weight = self.embedding.weight
        elif tied:
            tie_weights(self.embedding, self.head)


class MasterMomentum(torch.optim.Optimizer):
    """Momentum on float32 copies that it keeps in its state."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"master_weight": p.float().clone(), "momentum_buffer": torch.zeros_like(p.float())}
                state["momentum_buffer"].mul_(0.9).add_(p.grad.float())
                state["master_weight"].sub_(state["momentum_buffer"] * group["lr"])
                p.copy_(state["master_weight"])


def optimizers_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    vocabulary = [p for name, p in named.items() if not name.startswith("trunk")]
    groups = [{"params": list(model.trunk.parameters()), "lr": 0.01}, {"params": vocabulary, "weight_decay": 0.0}]
    if kind in ("adamw", "amsgrad"):
        return [torch.optim.AdamW(groups, lr=0.1, amsgrad=kind == "amsgrad", fused=kind == "amsgrad", weight_decay=0.1)]
    if kind == "sgd":
        return [torch.optim.SGD(groups, lr=0.1, momentum=0.9)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(groups, lr=0.1)]
    if kind == "master":
        return [MasterMomentum([{"params": list(model.trunk.parameters())}, {"params": vocabulary}])]
    tables, rest = ([p for p in named.values() if (p.dim() == 2) == two] for two in (True, False))
    return [torch.optim.Muon(tables, lr=0.1), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def train(model: Model, optimizers: list[Any], shard: VocabShard | None, vocab: int, first: int) -> None:
    """Steps with gradients that are a function of step, parameter, id and column."""
    for step in range(first, first + STEPS):
        for at, (name, p) in enumerate(model.named_parameters()):
            over_vocabulary = not name.startswith("trunk")
            gradient = whole(*([vocab] if over_vocabulary else p.shape[:1]), *p.shape[1:], seed=100 * step + at)
            if over_vocabulary and shard is not None:
                gradient = shard.slice(gradient)
            p.grad = gradient.to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()


def tensors(model: nn.Module, optimizers: list[Any]) -> dict[str, Tensor]:
    """Everything, by "parameter" and "parameter.state"."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return found


def _migrates(rank: int, kind: str, tied: bool) -> dict[str, Any]:
    vocab_map = map_of(kind)
    shard = shard_of(vocab_map.old_size, dist.get_world_size())
    model = Model(shard, tied, vocab_map.old_size, torch.bfloat16 if kind == "master" else torch.float32)
    model.embedding.weight.sequence_parallel = False  # a mark of some host
    model.head.bias.requires_grad_(kind != "sgd")
    model.config = type("Config", (), {})()
    model.config.vocab_size, model.config.eos_token_id, model.config.pad_token_id = vocab_map.old_size, [17, 18], None
    optimizers = optimizers_of(model, kind)
    train(model, optimizers, shard, shard.vocab_size, 0)
    before, record = tensors(model, optimizers), record_model(model, optimizers)
    places = [[id(p) for p in group["params"]] for o in optimizers for group in o.param_groups]
    old = {id(p): name for name, p in model.named_parameters()}
    report = migrate_model_(model, optimizers, vocab_map, init=MeanOfSources(), layout=VocabLayout(
        vocab_map.new_size, shard.tp_size, multiple_of=8))  # fmt: skip
    after = tensors(model, optimizers)
    conformed = conformance_report(record, model, optimizers, vocab_map)
    new = {id(p): name for name, p in model.named_parameters()}
    held = [[new.get(id(p)) for p in group["params"]] for o in optimizers for group in o.param_groups]
    train(model, optimizers, report.shard, vocab_map.new_size, STEPS)
    if len(optimizers) == 1:
        verify_tied(model, optimizers[0], required=tied)
    return {
        "before": before, "after": after, "final": tensors(model, optimizers), "report": report.to_json(),
        "conformance": conformed.to_json(), "lines": [report.lines(), conformed.lines()],
        "logits": record.tables["embedding.weight" if tied else "head.weight"].logits,
        "same places": held == [[old[p] for p in group] for group in places],
        "shards": {id(model.embedding.shard), id(model.head.shard)} == {id(report.shard)},
        "kept": (model.embedding.weight.sequence_parallel, model.head.bias.requires_grad, vars(model.config)),
        "tied": model.head.weight is model.embedding.weight, "mark": hasattr(model.embedding.weight, "zero_out_wgrad"),
        "stale": sum(len(o.state) for o in optimizers) - sum(len(g["params"]) for o in optimizers
                                                             for g in o.param_groups),
    }  # fmt: skip


def kept_id(vocab_map: VocabMap) -> int:
    """An id above 0 that stays in the vocabulary."""
    return int((vocab_map.old_to_new[1:] >= 0).nonzero()[0, 0]) + 1


def _learns(rank: int, tied: bool, vocab_map: VocabMap) -> dict[str, Any]:
    """A real loss in float64, before and after."""
    tp = dist.get_world_size()
    shard = shard_of(vocab_map.old_size, tp)
    model = Model(shard, tied, vocab_map.old_size, torch.float64)
    model.embedding.padding_idx = kept_id(vocab_map)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for phase in range(2):
        ids = torch.arange(24) % 5 if phase == 0 else vocab_map.old_to_new[torch.arange(24) % 5]
        ids = ids[ids >= 0]
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model.head.loss(torch.tanh(model.trunk(model.embedding(ids))), ids.flip(0))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if phase == 0:
            report = migrate_model_(model, optimizer, vocab_map, init=Normal(3))
            verify_tied(model, optimizer, required=tied)
    parts = {name: p.detach() for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), "parts": parts, "layout": report.new_layout,
            "padding": model.embedding.padding_idx}  # fmt: skip


def _refused(rank: int, what: str) -> dict[str, Any]:
    tp = dist.get_world_size()
    last = rank == tp - 1
    shard = shard_of(9, tp)
    model = Model(shard, True, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, [optimizer], shard, 9, 0)
    vocab_map, options = SMALL, {}
    if what == "another map" and last:
        vocab_map = edited(9, 2, 6, 2, seed=4)
    if what == "another layout" and last:
        options["layout"] = VocabLayout(9, tp, multiple_of=16)
    if what == "a NaN row" and rank == 0:
        options["init"] = MeanOfRows()
        with torch.no_grad():
            model.embedding.weight[0, 0] = torch.nan
    elif what == "a NaN row":
        options["init"] = MeanOfRows()
    if what == "a stale state on one rank" and last:
        optimizer.state[model.embedding.weight]["exp_avg"] = torch.zeros(1000, WIDTH)
    if what == "a hook on one rank" and last:
        model.embedding.weight.register_hook(lambda gradient: gradient)
    before = tensors(model, [optimizer])
    parameters = [id(p) for p in model.parameters()]
    error = raised(migrate_model_, model, optimizer, vocab_map, **options)
    after = tensors(model, [optimizer])
    dist.barrier()
    return {
        "error": error,
        "unchanged": [id(p) for p in model.parameters()] == parameters
        and all(torch.equal(bits(before[name]), bits(after[name])) for name in before)
        and model.embedding.shard is shard and "vocabulary_sha256" not in optimizer.param_groups[0],
    }  # fmt: skip


def _broken(rank: int, what: str) -> tuple[list[dict[str, Any]], str]:
    """The checks that fail on a migrated model that something has broken since."""
    tp = dist.get_world_size()
    model = Model(shard_of(9, tp), True, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, [optimizer], model.embedding.shard, 9, 0)
    record = record_model(model, optimizer)
    report = migrate_model_(model, optimizer, SMALL, layout=VocabLayout(SMALL.new_size, tp, multiple_of=16))
    last = rank == tp - 1
    if what == "padding" and last:
        model.embedding.weight.data[-1, 0] = 1.0
    if what == "moment" and rank == report.shard.layout.owner(8):
        optimizer.state[model.embedding.weight]["exp_avg"][8 - report.shard.start] = 1.0
    if what == "tie":
        model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    if what == "owner":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if what == "tie":
        optimizer = None
    found = conformance_report(record, model, optimizer, SMALL).to_json()
    return [check for check in found["checks"] if not check["passed"]], str(found)


def _any(rank: int, what: str, *case: Any) -> Any:
    return {"migrates": _migrates, "refused": _refused, "learns": _learns_named, "broken": _broken}[what](rank, *case)


def _learns_named(rank: int, tied: bool, name: str) -> dict[str, Any]:
    return _learns(rank, tied, {"small": SMALL, "medium": MEDIUM}[name])


ERRORS = {
    "another map": ("LayoutMismatchError", "disagree"),
    "another layout": ("LayoutMismatchError", "disagree"),
    "a NaN row": ("NonFiniteError", "row 0 of embedding.weight"),
    "a stale state on one rank": ("VocabularyError", "exp_avg of embedding.weight has shape [1000, 16]"),
    "a hook on one rank": ("VocabularyError", "embedding.weight has hooks"),
}
BROKEN = {
    "padding": {"storage": "embedding.weight has padding that is not zero"},
    "moment": {"new rows of embedding.weight.exp_avg": "1 of 2 are not zero"},
    "tie": {"tied weights": "no longer one Parameter", "tables": "head.weight"},
    "owner": {"optimizer ownership": "a fresh one", "tables": "exp_avg"},
}
TIED = (False, True)
CASES = [
    *(("migrates", kind, tied) for kind in KINDS for tied in TIED),
    *(("learns", tied, name) for tied in TIED for name in ("small", "medium")),
    *(("refused", what) for what in ERRORS),
    *(("broken", what) for what in BROKEN),
]
RUN = Batch(_any, CASES)


def parts(ranks: list[dict[str, Any]], when: str, key: str, layout: VocabLayout) -> Tensor:
    return joined([rank[when][key] for rank in ranks], layout)


def layouts(kind: str, tp: int) -> tuple[VocabLayout, VocabLayout]:
    vocab_map = map_of(kind)
    return VocabLayout(vocab_map.old_size, tp, multiple_of=1), VocabLayout(vocab_map.new_size, tp, multiple_of=8)


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("tied", TIED, ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_and_moment_moves_and_the_rest_stays(kind: str, tied: bool, tp: int):
    ranks = RUN(tp, "migrates", kind, tied)
    vocab_map, (old, new) = map_of(kind), layouts(kind, tp)
    moved = {*ranks[0]["report"]["parameters"], *ranks[0]["report"]["states"]}
    assert moved >= {"embedding.weight", "head.bias"} and ("head.weight" in moved) != tied
    for key, local in ranks[0]["before"].items():
        if key not in moved:
            same = [torch.equal(bits(rank["before"][key]), bits(rank["after"][key])) for rank in ranks]
            assert all(same), key
            assert key.startswith("trunk") or local.numel() == 1 or key.endswith("col_var")
            continue
        is_weight = key.count(".") == 1
        init = MeanOfSources() if is_weight or key.endswith("master_weight") else None
        expected = oracle(parts(ranks, "before", key, old), vocab_map, init)
        master = f"{key}.master_weight"
        if master in moved:  # the weight is the master's, rounded
            expected = oracle(parts(ranks, "before", master, old), vocab_map, init).to(torch.bfloat16)
        assert torch.equal(bits(parts(ranks, "after", key, new)), bits(expected)), key


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("tied", TIED, ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_the_run_goes_on_as_one_process_that_migrated_its_whole_tables(kind: str, tied: bool, tp: int):
    ranks = RUN(tp, "migrates", kind, tied)
    expected = one_process(kind, tied)
    for key, table in expected.items():
        if key.startswith("trunk"):
            got = ranks[0]["final"][key]
            assert all(torch.equal(rank["final"][key], got) for rank in ranks)
        elif table.dim() and len(table) == map_of(kind).new_size:
            got = parts(ranks, "final", key, layouts(kind, tp)[1])
        else:
            got = ranks[-1]["final"][key]
        if key.startswith("head.bias"):  # one number a row: where the vectors end depends on the shard
            require_close(key, got, table, table.dtype)
        else:
            assert torch.equal(bits(got), bits(table)), f"{key}: {(got - table).abs().max()}"


@functools.cache
def one_process(kind: str, tied: bool) -> dict[str, Tensor]:
    """The oracle's run: whole tables, new Parameters and a new optimizer whose state is put together by hand."""
    vocab_map = map_of(kind)
    dtype = torch.bfloat16 if kind == "master" else torch.float32
    model = Model(None, tied, vocab_map.old_size, dtype)
    model.head.bias.requires_grad_(kind != "sgd")
    (optimizer,) = optimizers_of(model, kind)
    train(model, [optimizer], None, vocab_map.old_size, 0)
    states = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    for name, p in list(model.named_parameters()):
        if name.startswith("trunk"):
            continue
        module, _, key = name.partition(".")
        state = states[name]
        for which, value in state.items():
            if torch.as_tensor(value).shape == p.shape:
                state[which] = oracle(value, vocab_map, MeanOfSources() if which == "master_weight" else None)
        rows = state["master_weight"] if "master_weight" in state else oracle(p.detach(), vocab_map, MeanOfSources())
        setattr(getattr(model, module), key, nn.Parameter(rows.to(dtype), requires_grad=p.requires_grad))
    if tied:
        model.head.weight = model.embedding.weight
    (fresh,) = optimizers_of(model, kind)
    for name, p in model.named_parameters():
        fresh.state[p] = states[name]
    train(model, [fresh], None, vocab_map.new_size, STEPS)
    return tensors(model, [fresh])


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("tied", TIED, ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_holds_the_new_parameters_in_the_old_places(kind: str, tied: bool, tp: int):
    vocab_map = map_of(kind)
    for rank in RUN(tp, "migrates", kind, tied):
        assert rank["same places"] and rank["shards"] and rank["stale"] == 0
        assert rank["tied"] == tied == rank["mark"]
        new_ids = [int(vocab_map.old_to_new[17]), int(vocab_map.old_to_new[18])]
        config = {"vocab_size": vocab_map.new_size, "eos_token_id": new_ids, "pad_token_id": None}
        assert rank["kept"] == (False, kind != "sgd", config)
        counts = [rank["report"][key] for key in ("kept", "new", "dropped")]
        assert counts == ([2991, 64, 10] if kind == "adamw" else [296, 16, 5])
        without = [new for new in vocab_map.new_ids.tolist() if new not in vocab_map.sources]
        assert rank["report"]["without_sources"] == len(without) > 0


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("tied", TIED, ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_migration_conforms_with_one_report_on_every_rank(kind: str, tied: bool, tp: int):
    reports = [rank["conformance"] for rank in RUN(tp, "migrates", kind, tied)]
    assert all(report == reports[0] for report in reports)
    assert reports[0]["passed"], reports[0]
    names = {check["name"] for check in reports[0]["checks"]}
    head = "embedding.weight" if tied else "head.weight"
    assert {f"raw logits of {head}", "tied weights", "optimizer ownership", "shard ranges", "storage"} <= names
    (mass,) = reports[0]["new_rows_probability"].values()
    assert 0 < mass["mean"] <= mass["largest"] < 0.2
    ranks, old = RUN(tp, "migrates", kind, tied), layouts(kind, tp)[0]
    hidden, bias = fixed_hidden(WIDTH), parts(ranks, "before", "head.bias", old).double()
    expected = parts(ranks, "before", head, old).double() @ hidden.T + bias[:, None]
    assert all(torch.equal(rank["logits"], ranks[0]["logits"]) for rank in ranks)
    require_close("logits", ranks[0]["logits"], expected, torch.float64)


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("what", BROKEN)
def test_the_report_of_every_rank_names_what_one_rank_has_broken(what: str, tp: int):
    ranks = RUN(tp, "broken", what)
    assert len({words for _, words in ranks}) == 1
    failed = {check["name"]: check["detail"] for check in ranks[0][0]}
    assert set(failed) >= set(BROKEN[what]) and (len(failed) == 1 or "tables" in failed), failed
    assert all(words in failed[name] for name, words in BROKEN[what].items()), failed


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("tied", TIED, ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["small", "medium"])
def test_a_real_loss_goes_on_as_on_one_rank(name: str, tied: bool, tp: int):
    (alone,), ranks = RUN(1, "learns", tied, name), RUN(tp, "learns", tied, name)
    require_close("losses", ranks[0]["losses"], alone["losses"], torch.float64)
    assert all(torch.equal(rank["losses"], ranks[0]["losses"]) for rank in ranks)
    assert alone["losses"].isfinite().all() and alone["losses"][STEPS - 1] < alone["losses"][0]
    assert alone["losses"][-1] < alone["losses"][STEPS]
    vocab_map = {"small": SMALL, "medium": MEDIUM}[name]
    assert {rank["padding"] for rank in ranks} == {int(vocab_map.old_to_new[kept_id(vocab_map)])}
    for key, value in alone["parts"].items():
        if key.startswith("trunk"):
            continue
        got = joined([rank["parts"][key] for rank in ranks], ranks[0]["layout"])
        require_close(key, got, value[: len(got)], torch.float64)


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("what", ERRORS)
def test_a_refused_migration_changes_nothing_on_any_rank(what: str, tp: int):
    ranks = RUN(tp, "refused", what)
    if tp == 1 and what in ("another map", "another layout"):
        expected: tuple[str, str] = ("nothing", "")
    else:
        expected = ERRORS[what]
        assert all(rank["unchanged"] for rank in ranks)
    assert {rank["error"][0] for rank in ranks} == {expected[0]}, ranks
    assert all(expected[1] in rank["error"][1] for rank in ranks), ranks


def test_the_parameters_of_the_model_are_those_over_the_vocabulary():
    model = Model(shard_of(9, 1), False, 9)
    assert set(vocab_parameters(model)) == {"embedding.weight", "head.weight", "head.bias"}


class Config:
    """A configuration as Transformers has them, one of whose fields may refuse to be set."""

    refuses = -1

    def __init__(self, vocab_size: int, refuses: int = -1) -> None:
        self.vocab_size, self.suppress_tokens, self.bad_words_ids = vocab_size, [7, 3], [[3, 3], [8, 7]]
        self.refuses = refuses

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "vocab_size" and value == self.refuses:
            raise ValueError("not this one")
        super().__setattr__(name, value)


def _normed(model: Model, optimizer: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.embedding)


UNFIT = {
    "a setting that refuses": (lambda model, _: setattr(model, "config", Config(9, SMALL.new_size)), r"not this one"),
    "a computed weight": (_normed, "no Parameter called weight"),
    "a state in a list": (
        lambda model, optimizer: optimizer.state[model.head.bias].update(old=[1.0] * 9), "bias is a list"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNFIT)
def test_what_would_be_left_half_changed_is_refused_before_anything_is(what: str):
    spoil, words = UNFIT[what]
    model = Model(shard_of(9, 1), False, 9)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, [optimizer], model.embedding.shard, 9, 0)
    spoil(model, optimizer)
    before = tensors(model, [optimizer])
    with pytest.raises(VocabularyError, match=words):
        migrate_model_(model, optimizer, SMALL)
    after = tensors(model, [optimizer])
    assert list(after) == list(before) and all(torch.equal(after[key], before[key]) for key in before)
    assert model.embedding.shard.vocab_size == 9 and getattr(model, "config", Config(9)).vocab_size == 9


def test_lists_of_ids_in_a_configuration_move_with_their_tokens():
    model = Model(shard_of(9, 1), False, 9)
    model.config = Config(9)
    model.register_buffer("final_logits_bias", torch.zeros(1, 9))
    report = migrate_model_(model, None, VocabMap.permutation(list(range(8, -1, -1))))
    assert report.alike == ("final_logits_bias",) and "final_logits_bias" in str(report.lines())
    assert (model.config.suppress_tokens, model.config.bad_words_ids) == ([1, 5], [[5, 5], [0, 1]])
