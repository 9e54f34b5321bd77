"""The logit lens and its learned translators over shards: the oracle's readings, and a KL that falls alone."""

from __future__ import annotations

import math
import tempfile

import pytest
import torch
from torch import nn

from tests.batch import assert_all_raise, attempt
from tests.multirank.counting import Allocations
from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import ALL_SIZES, Batch
from tests.tolerances import bits, require_close, require_equal
from vocab_parallel import VocabParallelLMHead, reference
from vocab_parallel.decode.diagnostics.lens import logit_lens
from vocab_parallel.decode.diagnostics.translator import Translator, fit_translator
from vocab_parallel.reference import diagnostics as oracle

LAYERS, ROWS, HIDDEN, K = 3, 6, 8, 4


def parts(vocab, dtype, grid=False, bias=False, projection=False):
    """Whole head, norm and hidden states; on a grid every product is exact in any order."""
    draw = torch.Generator().manual_seed(vocab)
    values = [torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in (
        (LAYERS, ROWS, HIDDEN), (vocab, HIDDEN), (vocab,), (HIDDEN, HIDDEN),
    )]  # fmt: skip
    if grid:
        values = [(2 * value).round() / 2 for value in values]
    hidden, weight, offset, matrix = (value.to(dtype) for value in values)
    norm = nn.Identity() if grid else nn.RMSNorm(HIDDEN, eps=1e-6, dtype=dtype)
    target = torch.randint(vocab, (ROWS,), generator=draw)
    target[0] = vocab - 1
    return hidden, weight, offset if bias else None, matrix if projection else None, norm, target


def head_of(shard, weight, bias, matrix):
    projection = None
    if matrix is not None:
        projection = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=matrix.dtype)
        projection.weight.data.copy_(matrix)
    head = VocabParallelLMHead(
        HIDDEN, shard=shard, bias=bias is not None, projection=projection, dtype=weight.dtype
    )  # fmt: skip
    head.weight.data.copy_(shard.slice(weight, fill=math.nan))
    if bias is not None:
        head.bias.data.copy_(shard.slice(bias))
    return head


def _read(rank, layout, dtype, grid, bias, projection):
    shard = shard_of(*layout)
    hidden, weight, offset, matrix, norm, target = parts(layout[0], dtype, grid, bias, projection)
    head = head_of(shard, weight, offset, matrix)
    whole = logit_lens(hidden, norm, head, norm_name="final", k=K, target=target)
    shard.traffic.reset()
    blocks = logit_lens(hidden, norm, head, norm_name="final", k=K, target=target, rows_at_once=4)
    calls = shard.traffic.calls["all_gather"]
    plain = logit_lens(hidden.view(LAYERS, 2, 3, HIDDEN), norm, head, norm_name="final", k=K)
    assert plain.target_rank is None and torch.equal(plain.token_ids.flatten(1, 2), whole.token_ids)
    fresh = Translator(["a", "b", "c"], HIDDEN, norm_name="final", dtype=dtype)
    through = logit_lens(hidden, norm, head, norm_name="final", k=K, target=target, translator=fresh)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(through[1:], whole[1:], strict=True))
    return whole, blocks, calls


READ = [
    ((9, 1), torch.float32, True, True, False), ((9, 1), torch.float32, False, True, False),
    ((13, 4), torch.float64, True, True, False), ((13, 4), torch.float64, False, True, False),
    ((200, 8), torch.float32, True, True, False), ((9, 1), torch.float32, False, False, True),
]  # fmt: skip
GRIDS = [(layout, dtype) for layout, dtype, grid, _, _ in READ if grid]


@TP
@pytest.mark.parametrize(("layout", "dtype", "grid", "bias", "projection"), READ)
def test_readings_are_the_oracles_through_the_named_norm(tp, layout, dtype, grid, bias, projection):
    hidden, weight, offset, matrix, norm, target = parts(layout[0], torch.float64, grid, bias, projection)
    hidden, weight = hidden.to(dtype).double(), weight.to(dtype).double()

    def read(rows):
        rows = norm(rows)
        return reference.logits(rows if matrix is None else rows @ matrix.to(dtype).double().T, weight, offset)

    with torch.no_grad():
        ids, logprobs, entropy, rank = oracle.lens(hidden, read, target)
    for found, blocks, _ in RUNS(tp, _read, layout, dtype, grid, bias, projection):
        assert found.norm_name == "final"
        close = 1e-9 if dtype == torch.float64 or grid else 2e-5
        for one in (found, blocks):
            assert torch.equal(one.token_ids, ids[..., :K]) and torch.equal(one.target_rank, rank)
            assert torch.allclose(one.logprobs, logprobs[..., :K], rtol=0, atol=close)
            assert torch.allclose(one.entropy, entropy, rtol=0, atol=close)
            at = logprobs.gather(-1, rank[..., None] - 1)[..., 0]
            assert torch.allclose(one.target_logprob, at, rtol=0, atol=close)


@pytest.mark.parametrize(("layout", "dtype"), GRIDS)
def test_exact_products_read_to_the_same_bits_at_every_tp_size(layout, dtype):
    ranks = [one for tp in (1, 2, 3, 4) for whole, blocks, _ in RUNS(tp, _read, layout, dtype, True, True, False)
             for one in (whole, blocks)]  # fmt: skip
    for at, field in enumerate(ranks[0]._fields[1:], 1):
        require_equal(field, [one[at] for one in ranks])


def test_a_block_of_a_layer_is_four_exchanges():
    for _, _, calls in RUNS(4, _read, (9, 1), torch.float32, True, True, False):
        assert calls == 1 + LAYERS * 2 * 4  # one header, then best ids, masses, target's score, ids before it


def drawn(rows, dtype=torch.float32):
    """Two layers that are linear maps of the last one: a translator can undo them."""
    draw = torch.Generator().manual_seed(3)
    last = torch.randn(rows, HIDDEN, generator=draw, dtype=torch.float64)
    maps = torch.eye(HIDDEN, dtype=torch.float64) + 0.5 * torch.randn(2, HIDDEN, HIDDEN, generator=draw).double()
    return torch.stack([last @ maps[0] + 1.0, last @ maps[1]]).to(dtype), last.to(dtype)


def _trained(rank):
    shard = shard_of(9)
    _, weight, bias, _, _, _ = parts(9, torch.float32, bias=True)
    head, norm = head_of(shard, weight, bias, None), nn.RMSNorm(HIDDEN, eps=1e-6)
    model = {**head.state_dict(), **{f"norm.{name}": value for name, value in norm.state_dict().items()}}
    before = {name: bits(value).clone() for name, value in model.items()}
    hidden, last = drawn(64)
    translator = Translator(["first", "second"], HIDDEN, norm_name="final")
    start = translator.divergence(hidden, last, norm, head).detach()
    optimizer = torch.optim.Adam(translator.parameters(), lr=0.1)
    history = fit_translator(translator, [(hidden, last)] * 20, norm, head, optimizer=optimizer, chunk_size=32)
    untouched = all(torch.equal(bits(value), before[name]) for name, value in model.items())
    no_gradient = all(parameter.grad is None for module in (head, norm) for parameter in module.parameters())
    with tempfile.TemporaryDirectory() as folder:
        translator.save(f"{folder}/translator.pt")
        loaded = Translator.load(f"{folder}/translator.pt")
    seen = [logit_lens(hidden, norm, head, norm_name="final", translator=one, k=2) for one in (translator, loaded)]
    same = torch.equal(bits(seen[0].logprobs), bits(seen[1].logprobs))
    about = (loaded.layers, loaded.norm_name)
    return (
        start,
        history,
        untouched and no_gradient and same,
        about,
        translator.weight.detach(),
        translator.bias.detach(),
    )


@pytest.mark.parametrize("tp", [1, 4])
def test_a_translator_learns_to_agree_with_the_last_layer_and_touches_nothing_else(tp):
    ranks = RUNS(tp, _trained)
    _, weight, bias, _, _, _ = parts(9, torch.float32, bias=True)
    norm = nn.RMSNorm(HIDDEN, eps=1e-6)
    hidden, last = drawn(64)
    with torch.no_grad():
        teacher = reference.logits(norm(last), weight, bias).double()
        logits = reference.logits(norm(hidden), weight, bias).double()
        expected = torch.stack([reference.distillation(layer, teacher).mean() for layer in logits])
    for start, history, clean, about, _, _ in ranks:
        require_close("divergence of the plain lens", start, expected, torch.float32)
        assert history[0] == start.tolist()
        assert all(last < first / 4 for first, last in zip(history[0], history[-1], strict=True)), history[-1]
        assert clean and about == (("first", "second"), "final")
    for at in (4, 5):
        require_equal("the translator", [rank[at] for rank in ranks])


def _watched(rank):
    shard = shard_of(8000)
    head = VocabParallelLMHead(HIDDEN, shard=shard)
    hidden, last = drawn(64)
    translator = Translator(["first", "second"], HIDDEN, norm_name="none")
    with Allocations(head.weight) as made:
        fit_translator(translator, [(hidden, last)], nn.Identity(), head, chunk_size=4)
    return made.largest, shard.shard_size


def test_training_holds_no_logits_of_all_rows():
    for elements, columns in RUNS(2, _watched):
        assert elements < 64 * columns / 2


def _refused(rank, what):
    return attempt(lambda: _bad(rank, what))


def _bad(rank, what):
    shard = shard_of(9)
    hidden, weight, bias, _, norm, target = parts(9, torch.float32, bias=True)
    head = head_of(shard, weight, bias, None)
    options = {"norm_name": "final", "k": K, "target": target}
    if what == "no norm":
        norm = None
    elif what == "no name":
        options["norm_name"] = ""
    elif what == "k":
        options["k"] = 10
    elif what == "target":
        options["target"] = torch.tensor([0, 1, 9, 3, 4, 5])
    elif what == "no target":
        options["target"] = torch.tensor([0, 1, 2, -1, 4, 5])
    elif what == "targets":
        options["target"] = target[:2]
    elif what == "hidden":
        hidden = hidden[0, 0]
    elif what == "layers":
        options["translator"] = Translator(["one"], HIDDEN, norm_name="final")
    elif what == "another norm's":
        options["translator"] = Translator(["a", "b", "c"], HIDDEN, norm_name="other")
    elif what == "nan on one rank" and rank == 1:
        head.weight.data[0, 0] = math.nan
    elif what == "another name on one rank" and rank == 1:
        options["norm_name"] = "other"
    return logit_lens(hidden, norm, head, **options)


BAD = {
    "no norm": ("ValueError", "final norm"), "no name": ("ValueError", "named ''"), "k": ("ValueError", "10"),
    "target": ("TokenRangeError", "target 9 at row 2"), "no target": ("TokenRangeError", "target -1 at row 3"),
    "targets": ("LayoutMismatchError", "[2]"), "another norm's": ("ValueError", "'other'"),
    "hidden": ("LayoutMismatchError", "[L, T, D]"), "layers": ("LayoutMismatchError", "the translator 1: one"),
    "nan on one rank": ("NonFiniteError", "row 0 holds NaN"), "another name on one rank": ("LayoutMismatchError", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_the_same_error_on_every_rank(what):
    kind, words = BAD[what]
    assert_all_raise(what, RUNS(2, _refused, what), [kind], [words] if words else [])


def _run(rank, function, *case):
    return function(rank, *case)


def _sizes(case):
    return {_read: ALL_SIZES, _trained: (1, 4)}.get(case[0], (2,))


RUNS = Batch(
    _run,
    [*((_read, *case) for case in READ), (_trained,), (_watched,), *((_refused, what) for what in BAD)],
    _sizes,
)


def test_another_file_is_no_translator(tmp_path):
    torch.save({"state": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt is no"):
        Translator.load(tmp_path / "other.pt")
