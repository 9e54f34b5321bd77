"""Megatron's own loss beside ours: equal where Megatron is right, and the values where it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import Setup, megatron
from tests.multirank.shared_world import Batch
from vocab_parallel import VocabLayout, VocabShard, cross_entropy

SETUP = Setup(tp=2)


def _both(logits: Tensor, target: Tensor, vocab: int, smoothing: float = 0.0) -> dict[str, Tensor]:
    """Whole logits `[T, padded]`; Megatron's and our losses and gradients `[T, v]`, of this rank's columns."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group = models.shard_of(SETUP).group
    shard = VocabShard(VocabLayout.from_padded(vocab, logits.shape[1], 2), group)
    local = logits.chunk(2, 1)[shard.rank].contiguous()
    found = {}
    for name in ("megatron", "ours"):
        mine = local.clone().requires_grad_()
        if name == "megatron":  # [s, b, v], and it overwrites its argument
            losses = vocab_parallel_cross_entropy(mine.clone()[:, None], target[:, None], smoothing)[:, 0]
        else:
            losses = cross_entropy(mine, target, shard=shard, reduction="none", label_smoothing=smoothing)
        losses.sum().backward()
        found[name], found[f"d {name}"] = losses.detach(), mine.grad
    return found


def _plain(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return _both(torch.randn(6, 10, generator=generator) * 3, torch.tensor([0, 4, 5, 9, 2, 7]), 10)


def _padded(rank: int) -> dict[str, Tensor]:
    """Ten logits of -3, padded to 16 with zeros."""
    logits = torch.cat([torch.full((1, 10), -3.0), torch.zeros(1, 6)], 1)
    return _both(logits, torch.tensor([4]), 10)


def _smoothed(rank: int) -> dict[str, Tensor]:
    return _both(torch.arange(8.0)[None] / 2, torch.tensor([2]), 8, 0.1)


def _ignored(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 10, generator=generator)
    found = _both(logits, torch.tensor([-100, 3]), 10)
    found["lse - max"] = logits[0].logsumexp(0) - logits[0].max()
    return found


def _wide(rank: int) -> dict[str, Tensor]:
    """A gap of 110 between logits, with smoothing."""
    return _both(torch.tensor([[110.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]), torch.tensor([0]), 8, 0.1)


def _seam(rank: int) -> dict[str, Any]:
    """Through the seam: Megatron's compute_language_model_loss and ours, of one model's logits and hidden states."""
    model = models.build(SETUP, vocab_size=12)
    shard = VocabShard(VocabLayout.from_padded(12, 12, 2), models.shard_of(SETUP).group)
    rows = models.batch(0, 12)
    hidden: list[Tensor] = []
    model.decoder.register_forward_hook(lambda _, __, out: hidden.append(out))
    theirs = models.call(model, rows)
    loss = megatron.TokenLoss(
        shard, {"ignore_index": -100, "label_smoothing": 0.0, "smoothing_over": "all", "z_loss": 0.0, "softcap": None},
        {"chunk_size": 7, "memory_budget": None},
    )  # fmt: skip
    weight = model.embedding.word_embeddings.weight
    ours = loss(rows["labels"], megatron.DeferredLogits(hidden[0], weight, None, False))
    formed = loss(rows["labels"], model.output_layer(hidden[0], weight=weight)[0])
    return {"megatron": theirs.detach(), "ours": ours.detach(), "formed": formed.detach()}


CASES = {"plain": _plain, "padded": _padded, "smoothed": _smoothed, "ignored": _ignored, "wide": _wide, "seam": _seam}


def _run(rank: int, name: str) -> Any:
    with models.parallel(SETUP):
        return CASES[name](rank)


WORLD = Batch(_run, [(name,) for name in CASES])


def test_they_agree_where_megatron_is_right() -> None:
    for found in WORLD(2, "plain"):
        torch.testing.assert_close(found["ours"], found["megatron"], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found["d ours"], found["d megatron"], atol=1e-6, rtol=1e-6)
    for found in WORLD(2, "seam"):
        torch.testing.assert_close(found["ours"], found["megatron"], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found["formed"], found["megatron"], atol=2e-6, rtol=2e-6)


def test_megatron_counts_padding_columns() -> None:
    for found in WORLD(2, "padded"):
        assert found["megatron"].item() == pytest.approx(4.8715, abs=1e-4)
        assert found["ours"].item() == pytest.approx(torch.tensor(10.0).log().item(), abs=1e-6)


def test_megatron_smooths_over_each_shard_alone() -> None:
    results = WORLD(2, "smoothed")
    theirs = [found["megatron"].item() for found in results]
    right = F.cross_entropy(torch.arange(8.0)[None] / 2, torch.tensor([2]), label_smoothing=0.1).item()
    assert abs(theirs[0] - theirs[1]) > 1e-2, "Megatron's ranks agree now: update docs/hosts/megatron.md"
    for found in results:
        assert found["ours"].item() == pytest.approx(right, abs=1e-6)


def test_megatron_gives_a_loss_to_ignored_rows() -> None:
    for found in WORLD(2, "ignored"):
        assert found["megatron"][0].item() == pytest.approx(found["lse - max"].item(), abs=1e-5)
        assert found["ours"][0].item() == 0.0 and not found["d ours"][0].any()
        assert found["ours"][1].item() == pytest.approx(found["megatron"][1].item(), abs=1e-6)


def test_megatron_is_infinite_with_smoothing_at_wide_gaps() -> None:
    for found in WORLD(2, "wide"):
        assert found["megatron"].isinf().all() or found["megatron"].isnan().all()
        assert found["ours"].item() == pytest.approx(0.1 * 110 * 7 / 8, abs=1e-4)
