"""The losses where host frameworks put them: compiled, checkpointed, under autocast and a gradient scaler, in DDP.

What a host gives must be what the same model gives without it; that in turn is compared with the oracle elsewhere.
"""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import require_close, require_equal
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, loss, reference

VOCAB, HIDDEN, ROWS = 11, 6, 7
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.01}


def objective(rows, advantage):
    """A row loss that keeps tensors for its own backward."""
    return -rows.logprob.exp() * advantage - 0.1 * rows.entropy.square()


# What a model's forward does with its hidden states.
LOSSES = {
    "fused": lambda m, h, y: m.head.loss(h, y, chunk_size=3, **OPTIONS, **m.options),
    "per row": lambda m, h, y: m.head.loss(h, y, reduction="none", chunk_size=3).square().mean(),
    "of logits": lambda m, h, y: loss.cross_entropy(m.head(h), y, shard=m.head.shard, **OPTIONS, **m.options),
    "log-probabilities": lambda m, h, y: (
        torch.stack(loss.linear_token_logprobs(h, m.head.weight, y, shard=m.head.shard, linear_bias=m.head.bias))
        .square()
        .sum()
    ),
    "row loss": lambda m, h, y: loss.linear_row_loss(
        h,
        m.head.weight,
        y,
        objective,
        torch.linspace(-1, 1, len(y)),
        shard=m.head.shard,
        linear_bias=m.head.bias,
        chunk_size=3,
        **m.options,
    ),
    "distribution": lambda m, h, y: loss.linear_cross_entropy(
        h, m.head.weight, m.q, shard=m.head.shard, linear_bias=m.head.bias
    ),
    "invariant": lambda m, h, y: m.head.loss(h, y, tp_invariant=True),
}
KINDS = list(LOSSES)


class Model(nn.Module):
    """A language model: embedding, one layer, and a head with a loss. The parameters of a shard are of one table."""

    def __init__(self, shard, kind="fused", dtype=torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.kind = kind
        self.options = {}
        self.embedding = VocabParallelEmbedding(HIDDEN, shard=shard, dtype=dtype)
        self.embedding.reset_parameters(seed=1, std=1.0)
        self.trunk = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        self.head = VocabParallelLMHead(HIDDEN, shard=shard, bias=True, dtype=dtype)
        self.head.reset_parameters(seed=2, std=1.0)
        with torch.no_grad():
            for parameter in self.trunk.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))
            self.head.bias[: shard.num_valid] = torch.arange(shard.start, shard.stop) / VOCAB
        self.q = shard.slice(torch.rand(ROWS, VOCAB, generator=draw).softmax(-1), -1)

    def forward(self, ids, target):
        hidden = self.trunk(self.embedding(ids)).tanh()
        return 2.0 * LOSSES[self.kind](self, hidden, target)


def shard_of(group=None, vocab=VOCAB, deferred=None):
    """Over `group`, by default the world. The storage of 16 ids cuts into eight leaves at 1, 2 and 4 ranks."""
    tp = dist.get_world_size(group)
    layout = VocabLayout.from_padded(vocab, -(-vocab // 16) * 16, tp)
    return VocabShard(layout, (group or dist.group.WORLD) if tp > 1 else None, deferred_errors=deferred)


def batch(seed=0, rows=ROWS):
    draw = torch.Generator().manual_seed(seed)
    ids, target = torch.randint(0, VOCAB, (2, rows), generator=draw)
    target[torch.rand(rows, generator=draw) < 0.3] = -100
    return ids, target


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def plain(model, *args):
    """Loss and gradients without any host."""
    value = model(*args)
    value.backward()
    return value.detach(), gradients(model)


def require_same(name, got, expected):
    """Loss and gradients in the same bits."""
    require_equal(f"loss, {name}", [expected[0], got[0].detach()])
    assert got[1].keys() == expected[1].keys()
    for key, gradient in expected[1].items():
        require_equal(f"gradient of {key}, {name}", [gradient, got[1][key]])


def _compiled(rank, kind, backend):
    """torch.compile of the whole model. The loss is no part of a graph: it would break it at each collective."""
    torch._dynamo.reset()
    model = Model(shard_of(), kind)
    traced, graphs = [], 0

    def recorder(graph, inputs):
        traced.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    with warnings.catch_warnings():  # from torch's own tracing: of any graph break, and of importing its backends
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        compiled = torch.compile(model, backend=recorder)
        for seed in (0, 1):
            args = batch(seed)
            value = compiled(*args)
            value.backward()
            require_same(f"compiled, batch {seed}", (value, gradients(model)), plain(model, *args))
            graphs = graphs or len(traced)
    assert len(traced) == graphs, f"the second batch was compiled again: {traced[graphs:]}"
    foreign = {target for graph in traced for target in graph} & {"exp_", "amax", "sub_", "all_gather", "mm", "gather"}
    assert not foreign, f"the loss was traced: {foreign} in {traced}"
    assert len(traced) <= 4, f"{len(traced)} graphs: {traced}"


def _checkpointed(rank, kind, reentrant, deferred):
    """The loss within a checkpoint: its forward, with its collectives, runs again in backward, once."""
    shard = shard_of(deferred=deferred)
    model = Model(shard, kind)
    ids, target = batch()
    hidden = model.embedding(ids).detach().requires_grad_()

    def rest(hidden):
        return LOSSES[kind](model, model.trunk(hidden).tanh(), target)

    def results(value):
        value.backward()
        found = {name: gradient for name, gradient in gradients(model).items() if gradient is not None}
        found["hidden"], hidden.grad = hidden.grad, None
        return value, found

    for step in range(3 if deferred else 1):  # a deferred call has to be known before it goes on without its headers
        shard.traffic.reset()
        value = rest(hidden)
        forward = shard.traffic.total_calls
        expected = results(value)
        whole = shard.traffic.total_calls
        shard.traffic.reset()
        got = results(checkpoint(rest, hidden, use_reentrant=reentrant))
        require_same(f"checkpointed, step {step}", got, expected)
        again = shard.traffic.total_calls - whole
        assert again == forward or (reentrant and again <= forward), (
            f"{again} collectives more, a forward has {forward}"
        )


def _autocast(rank, kind):
    """float32 parameters, bfloat16 products: the gradients are float32, and what bfloat16 parameters would get."""
    shard = shard_of()
    model, low = Model(shard, kind), Model(shard, kind).bfloat16()
    _, target = batch()
    hidden = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected = LOSSES[kind](low, hidden.bfloat16(), target)
    expected.backward()
    low_hidden, hidden.grad = hidden.grad, None
    of_low = gradients(low)
    for inside in (False, True):  # backward within autocast is not what one should do, and done
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = LOSSES[kind](model, hidden, target)
            if inside:
                value.backward()
        if not inside:
            value.backward()
        require_equal("loss under autocast", [expected.detach(), value.detach()])
        require_equal(f"gradient of hidden, backward inside: {inside}", [low_hidden, hidden.grad])
        hidden.grad = None
        for name, gradient in gradients(model).items():
            if gradient is not None:
                assert gradient.dtype == torch.float32, f"{name} has a {gradient.dtype} gradient"
                require_equal(f"gradient of {name}, backward inside: {inside}", [of_low[name].float(), gradient])


def _autocast_of_others(rank):
    """Autocast leaves float64 alone, as it does in a linear layer, and off is off."""
    model = Model(shard_of(), dtype=torch.float64)
    expected = plain(model, *batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = plain(model, *batch())
        with torch.autocast("cpu", enabled=False):
            off = plain(model, *batch())
    require_same("off within autocast", off, expected)
    require_same("float64 under autocast", got, expected)


def _accumulated(rank, kind):
    """Gradients of micro-batches add up, and a second backward through a retained graph adds the same again."""
    model = Model(shard_of(), kind, torch.float64)
    first, second = plain(model, *batch(0)), plain(model, *batch(1))
    values = [model(*batch(seed)) for seed in (0, 1)]  # both forwards first: nothing of a call is kept in another
    for value in values:
        value.backward()
    for name, gradient in gradients(model).items():
        require_close(f"sum of {name}", gradient, first[1][name] + second[1][name], torch.float64)
    value = model(*batch(0))
    value.backward(retain_graph=True)
    for parameter in model.parameters():
        parameter.grad.mul_(2.0)  # in place: what the graph keeps must not be the gradient it gave
    value.backward()
    for name, gradient in gradients(model).items():
        require_close(f"{name}, twice and once", gradient, 3.0 * first[1][name], torch.float64)


def _main_grad(rank, kind):
    """Megatron's float32 gradient buffers: added to in float32, and `.grad` is zeros."""
    shard = shard_of()
    model = Model(shard, kind, torch.bfloat16)
    weight = model.head.weight
    first = plain(model, *batch(0))
    weight.main_grad = torch.full(weight.shape, 7.0)
    plain(model, *batch(0))
    assert bool((weight.main_grad == 7.0).all()), "without grad_added_to_main_grad a main_grad is left alone"
    weight.grad_added_to_main_grad = False
    weight.main_grad.zero_()
    got = plain(model, *batch(0))
    taken = kind != "of logits"  # that product is a linear layer's, not the loss's
    assert weight.grad_added_to_main_grad is taken
    if not taken:
        return require_same("the head as a linear layer", got, first)
    assert bool((got[1].pop("head.weight") == 0).all())
    once = weight.main_grad.clone()
    require_equal("dW in float32, rounded", [first[1].pop("head.weight"), once.bfloat16()])
    assert not torch.equal(once, once.bfloat16().float()), "rounded before it was added"
    require_same("all other gradients", got, first)
    (direct,) = torch.autograd.grad(model(*batch(0)), weight)
    assert direct.shape == weight.shape and direct.dtype == weight.dtype
    assert direct.untyped_storage().nbytes() == direct.element_size(), "the zeros should take no memory"
    weight.main_grad.zero_()
    summed, many = torch.zeros_like(weight), 32
    for _ in range(many):
        plain(model, *batch(0))
        summed += once.bfloat16()
    kept, lost = ((sums.float() / many - once).norm() / once.norm() for sums in (weight.main_grad, summed))
    assert kept <= 4e-7 < 1e-3 <= lost, f"off by {kept:.2g} after {many} micro-batches, in bfloat16 by {lost:.2g}"
    weight.main_grad.zero_()
    weight.grad_added_to_main_grad = False
    with torch.autocast("cpu", dtype=torch.float16):  # the product is of a copy: its gradient goes the usual way
        plain(model, *batch(0))
    assert weight.grad_added_to_main_grad is False and bool((weight.main_grad == 0).all())


def _main_grad_checkpointed(rank, reentrant):
    model = Model(shard_of())
    weight, (ids, target) = model.head.weight, batch()
    expected = plain(model, ids, target)[1]["head.weight"]
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
    hidden = model.trunk(model.embedding(ids)).tanh()
    checkpoint(lambda h: 2.0 * LOSSES["fused"](model, h, target), hidden, use_reentrant=reentrant).backward()
    require_equal("main_grad of a checkpointed loss", [expected, weight.main_grad])


def _half(rank, kind):
    """float16 at a vocabulary where a class's share of the gradient is near the smallest float16."""
    vocab, hidden_size, rows = 50_000, 16, 24
    shard = shard_of(vocab=vocab)
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(rows, hidden_size, generator=draw).half()
    table = (torch.randn(vocab, hidden_size, generator=draw) / 4).half()
    target = torch.randint(0, vocab, (rows,), generator=draw)
    q = torch.randn(rows, vocab, generator=draw).softmax(-1) if kind == "distribution" else None
    options = {
        "sum": {"reduction": "sum"},
        "mean": {},
        "per row": {"reduction": "none"},
        "smoothed": {"reduction": "sum", "label_smoothing": 0.1},
        "distribution": {"reduction": "sum"},
    }[kind]
    wholes = [hidden.double().requires_grad_(), table.double().requires_grad_()]
    expected = reference.linear_cross_entropy(*wholes, target if q is None else q, **options).sum()
    right = [gradient.detach() for gradient in torch.autograd.grad(expected, wholes)]
    right[1] = right[1][shard.start : shard.stop]
    h, w = hidden.requires_grad_(), shard.slice(table).requires_grad_()
    results = {}
    for scale in (1.0, 2.0**12):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        mine = target if q is None else shard.slice(q, -1)
        value = loss.linear_cross_entropy(h, w, mine, shard=shard, chunk_size=10, **options).sum()
        require_close("loss", value.detach(), expected.detach(), torch.float16)
        assert value.dtype == torch.float32
        scaler.scale(value).backward()
        assert h.grad.dtype == w.grad.dtype == torch.float16
        got = [h.grad.double() / scale, w.grad[: shard.num_valid].double() / scale]
        h.grad = w.grad = None
        for name, mine, exact in zip(("dH", "dW"), got, right, strict=True):
            kept = ~target_rows(name, target, shard)
            rounded = (exact * scale).half().double() / scale  # no float16 gradient can be nearer
            error, floor = (((some - exact)[kept].norm() / exact[kept].norm()).item() for some in (mine, rounded))
            results[name, scale] = error, floor
    return results


def target_rows(name, target, shard):
    """Which rows of dW belong to targets: their gradients are large, and would hide what the others lose."""
    if name == "dH":
        return torch.zeros(len(target), dtype=torch.bool)
    mine = target[(target >= shard.start) & (target < shard.stop)] - shard.start
    return torch.zeros(shard.num_valid, dtype=torch.bool).index_fill_(0, mine, True)


def _scaler_steps(rank):
    """Scaled, unscaled, stepped; a step with an infinite gradient is skipped on every rank."""
    model = Model(shard_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = plain(model, *batch())[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(*batch())).backward()
    scaler.unscale_(optimizer)
    for name, parameter in model.named_parameters():
        require_equal(f"unscaled gradient of {name}", [expected[name], parameter.grad])
    before = model.trunk.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.trunk.weight)
    optimizer.zero_grad()
    before = model.trunk.weight.detach().clone()
    scaler.scale(model(*batch()) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    require_equal("a skipped step changes nothing", [before, model.trunk.weight.detach()])
    assert scaler.get_scale() == 512.0


HALF = [*product([_half], ["sum", "mean", "per row", "smoothed", "distribution"])]
COMPILED = [(_compiled, "fused", "eager"), (_compiled, "row loss", "eager"), (_compiled, "of logits", "aot_eager")]
CHECKPOINTED = [
    *product([_checkpointed], KINDS, [False, True], [False]),
    *product([_checkpointed], ["fused", "per row", "row loss"], [False, True], [True]),
]
AUTOCAST = [*product([_autocast], [kind for kind in KINDS if kind != "of logits"]), (_autocast_of_others,)]
ACCUMULATED = [*product([_accumulated], KINDS)]
MAIN_GRAD = [
    *product([_main_grad], ["fused", "per row", "of logits", "row loss"]),
    *product([_main_grad_checkpointed], [False, True]),
]


def _run(rank, function, *args):
    return function(rank, *args)


COMPILER = Batch(_run, COMPILED)
HOSTS = Batch(_run, [*CHECKPOINTED, *AUTOCAST, *ACCUMULATED, *MAIN_GRAD, *HALF, (_scaler_steps,)])
TP = pytest.mark.parametrize("tp", [1, 2])


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(str(part) for part in case[1:]))


@TP
@each(COMPILED)
def test_a_compiled_model_gives_the_bits_of_an_eager_one_and_leaves_the_loss_out_of_its_graphs(case, tp):
    COMPILER(tp, *case)


@TP
@each(CHECKPOINTED)
def test_a_checkpointed_loss_gives_the_same_bits(case, tp):
    HOSTS(tp, *case)


@TP
@each(AUTOCAST)
def test_autocast_gives_the_bits_of_low_precision_in_the_parameters_dtype(case, tp):
    HOSTS(tp, *case)


@TP
@each(ACCUMULATED)
def test_micro_batches_and_second_backwards_add_up(case, tp):
    HOSTS(tp, *case)


@TP
@each(MAIN_GRAD)
def test_the_heads_gradient_adds_to_main_grad_in_float32(case, tp):
    HOSTS(tp, *case)


@TP
@each(HALF)
def test_float16_gradients_lose_what_float16_must_and_no_more(case, tp):
    """At most twice the rounding of the results, beyond 1e-3: float16's products are that exact."""
    for results in HOSTS(tp, *case):
        for what, (error, rounding) in results.items():
            limit = 1e-3 + 2.0 * rounding
            assert error <= limit, f"{what}: off by {error:.2e}, where rounding alone is {rounding:.2e}"


@TP
def test_a_gradient_scaler_scales_unscales_and_skips(tp):
    HOSTS(tp, _scaler_steps)


def _replicas(rank):
    """DDP over two replicas with unequal numbers of valid rows: loss and gradients, by kind and with a mean group."""
    tp = dist.get_world_size() // 2
    replica, column = divmod(rank, tp)
    shards = [dist.new_group(list(range(at, at + tp))) for at in (0, tp)]
    pairs = [dist.new_group([at, at + tp]) for at in range(tp)]
    shard = shard_of(shards[replica])
    results = {}
    for kind, wide in product(DDP_KINDS, [True, False]):
        model = Model(shard, kind, torch.float64)
        model.options = {"mean_group": pairs[column]} if wide else {}
        wrapped = DistributedDataParallel(model, process_group=pairs[column])
        value = wrapped(*batch(replica, rows=(3, 9)[replica]))
        value.backward()
        results[kind, wide] = (
            value.detach(),
            {
                name: gradient if "trunk" in name else gradient[: shard.num_valid].clone()
                for name, gradient in gradients(model).items()
            },
        )
    return results


DDP_KINDS = ["fused", "of logits", "row loss"]


def global_mean(kind):
    """The oracle on all rows of both replicas."""
    model = Model(VocabShard(VocabLayout(VOCAB, 1, multiple_of=16)), kind, torch.float64)
    parts = [batch(replica, rows=(3, 9)[replica]) for replica in (0, 1)]
    ids, target = (torch.cat(some) for some in zip(*parts, strict=True))
    model.zero_grad()
    hidden = model.trunk(reference.embedding(ids, model.embedding.weight)).tanh()
    weight, bias = model.head.weight[:VOCAB], model.head.bias[:VOCAB]
    if kind == "row loss":
        advantage = torch.cat([torch.linspace(-1, 1, len(rows)) for _, rows in parts])
        value = 2.0 * reference.linear_row_loss(hidden, weight, target, objective, advantage, bias=bias)
    else:
        value = 2.0 * reference.linear_cross_entropy(hidden, weight, target, bias=bias, **OPTIONS)
    value.backward()
    counts = [int((target != -100).sum()) for _, target in parts]
    assert counts[0] != counts[1], "the replicas must differ in their number of valid rows"
    return value.detach(), {
        name: gradient if "trunk" in name else gradient[:VOCAB] for name, gradient in gradients(model).items()
    }


@pytest.mark.parametrize("world", [2, 4])
def test_ddp_with_a_mean_group_averages_to_the_gradient_of_the_global_token_mean(world):
    ranks = run_ranks(_replicas, world, detail=False)  # with that check torch's DDP crashes
    for kind in DDP_KINDS:
        value, expected = global_mean(kind)
        require_equal(f"{kind}: loss on every rank", [result[kind, True][0] for result in ranks])
        require_close(f"{kind}: loss", ranks[0][kind, True][0], value, torch.float64)
        for name, gradient in expected.items():
            for replica, wide in product((0, 1), (True, False)):
                of_replica = ranks[replica * world // 2 : (replica + 1) * world // 2]
                parts = [result[kind, wide][1][name] for result in of_replica]
                got = parts[0] if "trunk" in name else torch.cat(parts)
                if wide:
                    require_close(f"{kind}: {name} of replica {replica}", got, gradient, torch.float64)
                else:
                    assert not torch.allclose(got, gradient), f"{name}: a mean of means does as well, and shows nothing"
