"""Failures 7 to 14: logits, log-probabilities and probabilities taken for one another."""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import vocab_parallel
from tests.failures.lab import failure, refusal, the_same_on_all, whole_shard
from tests.failures.page import ROOT
from tests.multirank.loss_case import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import (
    Streams,
    VocabParallelLMHead,
    checkpoint,
    cross_entropy,
    greedy,
    sample,
    token_logprobs,
    top_logprobs,
)
from vocab_parallel import decode as decode_package
from vocab_parallel.decode import Normalize, Policy, Temperature, Transform, View

VOCAB, ROWS = 9, 4
IDS = torch.tensor([0, 8, 3, 3])
LOGITS = 2.0 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TEACHER = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

CALLS = {
    "of the whole row": lambda shard: token_logprobs(shard.slice(LOGITS, -1), IDS, shard=shard).logprob,
    "of the row, moved": lambda shard: token_logprobs(shard.slice(LOGITS + 5.0, -1), IDS, shard=shard).logprob,
    "one column": lambda shard: refusal(token_logprobs, LOGITS[:, :1], IDS, shard=shard),
    "logits as a distribution": lambda shard: refusal(
        cross_entropy, shard.slice(LOGITS, -1), shard.slice(TEACHER, -1), shard=shard
    ),
    "time last": lambda shard: refusal(greedy, LOGITS.T.contiguous()[: shard.shard_size], shard=shard),
}


def _run(rank, name):
    return CALLS[name](shard_of(VOCAB))


RANKS = Batch(_run, [(name,) for name in CALLS])


def on_ranks(name):
    """The result of a call at 2 ranks and at 4, one of them without ids; of a tensor each rank's bits."""
    results = [RANKS(tp, name) for tp in (2, 4)]
    plain = [[one.tolist() if isinstance(one, torch.Tensor) else one for one in each] for each in results]
    return [the_same_on_all(each) for each in plain]


@dataclass(frozen=True, eq=False)
class OfProbabilities(Transform):
    """A transform that works on probabilities only."""

    name: ClassVar[str] = "of probabilities"
    accepts: ClassVar[frozenset[str]] = frozenset({"probability"})


@dataclass(frozen=True, eq=False)
class Softmax(Transform):
    """A transform that makes probabilities."""

    name: ClassVar[str] = "softmax"
    gives: ClassVar[str | None] = "probability"


@failure(
    7, "Logits read as probabilities", "refused",
    "A policy types its scores, so what takes probabilities cannot follow the logits; a target distribution with an "
    "entry below 0 is an error on every rank; log-probabilities are results of their own, of the whole row.",
)  # fmt: skip
def test_logits_are_refused_where_probabilities_belong():
    one = torch.ones(ROWS, dtype=torch.float64)
    assert bool((LOGITS < 0).any()) and not torch.allclose(LOGITS.sum(1), one, rtol=0.1)
    with pytest.raises(ValueError, match="'of probabilities' cannot follow the logits, which gives raw scores"):
        Policy((OfProbabilities(),))
    for kind, message in on_ranks("logits as a distribution"):
        assert kind == "ValueError" and "the target of row 0 holds a probability below 0" in message
    every = top_logprobs(LOGITS, VOCAB, shard=whole_shard(VOCAB)).logprobs
    assert torch.allclose(every.exp().sum(1), one)


@failure(
    8, "A token's logit read as its binary log-odds", "shown",
    "A log-probability is formed from the row's whole normalizer, over all ranks: the same when a constant moves the "
    "row, where a sigmoid changes; a single column is refused.",
)  # fmt: skip
def test_a_log_probability_is_of_the_whole_row():
    expected = LOGITS.log_softmax(1).gather(1, IDS[:, None])[:, 0]
    for name in ("of the whole row", "of the row, moved"):
        for found in on_ranks(name):
            assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected)
    binary, moved = (F.logsigmoid(x.gather(1, IDS[:, None])[:, 0]) for x in (LOGITS, LOGITS + 5.0))
    assert not torch.allclose(binary, moved, rtol=0.1) and not torch.allclose(binary, expected, rtol=0.1)
    for kind, message in on_ranks("one column"):
        assert kind == "LayoutMismatchError" and "logits have 1 columns" in message


@failure(
    9, "A softmax over the time axis", "impossible",
    "No operation has an argument for an axis: the vocabulary is the last one, and another axis in its place does not "
    "have the shard's columns, an error on every rank.",
)  # fmt: skip
def test_no_operation_has_an_axis_to_choose():
    for package in (vocab_parallel, decode_package):
        for name in package.__all__:
            one = getattr(package, name)
            taken = inspect.signature(one).parameters if callable(one) and not isinstance(one, type) else {}
            assert "shard" not in taken or not {"dim", "axis"} & set(taken), name
    wrong, shard = LOGITS.softmax(0).log(), whole_shard(VOCAB)
    found = token_logprobs(LOGITS, IDS, shard=shard).logprob
    assert torch.allclose(found.exp(), LOGITS.softmax(1)[range(ROWS), IDS])
    assert not torch.allclose(found, wrong[range(ROWS), IDS], rtol=0.1)
    with pytest.raises(TypeError, match="dim"):
        token_logprobs(LOGITS, IDS, shard=shard, dim=0)
    for kind, message in on_ranks("time last"):
        assert kind == "LayoutMismatchError" and "another axis than the vocabulary" in message


@failure(
    10, "A softmax of probabilities", "refused",
    "In a policy a transform that gives probabilities can be followed by nothing that takes logits, the selector "
    "among it, so a second softmax is an error when the policy is made; losses of hidden states see no scores at all.",
)  # fmt: skip
def test_probabilities_cannot_be_normalised_again():
    once, twice = LOGITS.softmax(1), LOGITS.softmax(1).softmax(1)
    assert torch.allclose(twice.sum(1), once.sum(1)) and float(twice.max()) < 0.5 * float(once.max())
    with pytest.raises(ValueError, match="selector 'sample' cannot follow 'softmax', which gives probability scores"):
        Policy((Softmax(),))
    with pytest.raises(ValueError, match="'temperature' cannot follow 'softmax'"):
        Policy((Softmax(), Temperature(0.5)))
    with pytest.raises(ValueError, match="'normalize' cannot follow 'softmax'"):
        Policy((Softmax(), Normalize()))


@failure(
    11, "The claim that a softmax of log-probabilities changes them", "shown",
    "Log-probabilities are logits that sum to one: losses, log-probabilities and draws are those of the logits, and a "
    "policy may normalise anywhere.",
)  # fmt: skip
def test_log_probabilities_are_logits_too():
    shard, normalised = whole_shard(VOCAB), LOGITS.log_softmax(1)
    assert not torch.allclose(LOGITS, normalised, rtol=0.1)
    losses = [cross_entropy(x, IDS, shard=shard) for x in (LOGITS, normalised)]
    assert torch.allclose(*losses, rtol=1e-12)
    streams = Streams.of([3] * ROWS, range(ROWS))
    drawn = [sample(x, shard=shard, streams=streams).token_ids for x in (LOGITS, normalised)]
    assert torch.equal(*drawn)
    for transforms in ((), (Normalize(),), (Normalize(), Normalize())):
        policy = Policy(transforms)
        step = policy.step(LOGITS, View.of([[1]] * ROWS), policy.start(ROWS, streams), shard=shard)
        assert torch.equal(step.token_ids, drawn[0])
        assert torch.allclose(step.logprobs, normalised.gather(1, step.token_ids[:, None])[:, 0])


@failure(
    12, "A logarithm of a low-precision softmax", "shown",
    "Log-probabilities are differences of scores, formed in float32 or float64: finite and right where a formed "
    "probability is zero, with the gradient that goes with them.",
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_log_probability_survives_where_its_probability_is_zero(dtype):
    shard, target = whole_shard(3), torch.tensor([1])
    logits = torch.tensor([[0.0, -200.0, 3.0]], dtype=dtype)
    naive = logits.clone().requires_grad_()
    naive.softmax(-1).log()[0, 1].backward()
    assert naive.detach().softmax(-1).log()[0, 1] == -torch.inf and not bool(naive.grad.isfinite().all())
    ours = logits.clone().requires_grad_()
    found = token_logprobs(ours, target, shard=shard).logprob
    found.sum().backward()
    assert math.isclose(float(found.detach()), -200.0 - 3.0 - math.log1p(math.exp(-3.0)), rel_tol=1e-6)
    expected = torch.tensor([0.0, 1.0, 0.0]) - logits.float()[0].softmax(-1)
    assert torch.allclose(ours.grad[0].float(), expected, atol=1e-2)


@failure(
    13, "A multinomial draw with raw logits as weights", "shown",
    "`sample` and policies take logits and form the weights themselves, as integers: its draws have the softmax's "
    "frequencies, also where logits are negative and a multinomial draw fails.",
)  # fmt: skip
def test_sample_takes_logits_and_draws_by_their_softmax():
    shard, rows = whole_shard(3), 2000
    with pytest.raises(RuntimeError, match="probability tensor"):
        torch.multinomial(torch.tensor([1.0, -2.0, 3.0]), 1)
    for logits in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -2.0, 3.0])):
        drawn = sample(logits.expand(rows, 3), shard=shard, streams=Streams.of([7] * rows, range(rows))).token_ids
        counts = drawn.bincount(minlength=3).double()
        p = logits.double().softmax(0)
        deviation = (rows * p * (1.0 - p)).sqrt()
        assert bool(((counts - rows * p).abs() < 4.0 * deviation).all())
        if bool((logits > 0).all()):  # the weights that a careless draw would use
            assert bool(((counts - rows * logits / logits.sum()).abs() > 4.0 * deviation).any())


def unbound_calls(blocks: list[str], given: set[str]) -> list[str]:
    """The functions that a page's blocks of code call by a bare name that nothing on the page binds."""
    trees = [ast.parse(block) for block in blocks]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    bound = set(dir(builtins)) | given
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    called = [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sorted({name for name in called if name not in bound})


@failure(
    14, "A function called by a name that was never imported", "shown",
    "Every function that the code on our pages calls is imported there, public here, or a built-in; the linter "
    "refuses undefined names in the package itself.",
)  # fmt: skip
def test_the_pages_call_what_they_import():
    careless = "import torch.nn.functional as F\nlogp = log_softmax(logits, dim=-1)"
    assert unbound_calls([careless], set()) == ["log_softmax"]
    assert unbound_calls([careless.replace("log_softmax(", "F.log_softmax(")], set()) == []
    public = {name for package in (vocab_parallel, decode_package, checkpoint) for name in package.__all__}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "api"]  # those hold signatures
    seen = 0
    for page in [ROOT / "README.md", *pages]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        assert unbound_calls(blocks, public | {"Model"}) == [], page.name  # the reader's own model
        seen += len(blocks)
    assert seen > 10
    assert '"F"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")  # F821: undefined names
    head = VocabParallelLMHead(4, shard=whole_shard(VOCAB))
    assert head.loss(torch.ones(1, 4), IDS[:1]).isfinite()
