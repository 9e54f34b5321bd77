"""What stands in Megatron's places: names, attributes, marks; no logits in training, the same ones without labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import HIDDEN, ROWS, SEQUENCE, Setup, megatron
from tests.multirank.shared_world import Batch
from vocab_parallel import VocabParallelEmbedding, VocabParallelLMHead, reference, vocab_parameters
from vocab_parallel.collectives import gather_vocab

SETUPS = [Setup(tp=2), Setup(tp=2, sequence_parallel=True, tied=False), Setup(tp=2, vocab=7, padded=12)]
EACH = pytest.mark.parametrize("setup", SETUPS, ids=str)
TOKENS = ROWS * SEQUENCE


def _run(rank: int, name: str, setup: Setup) -> Any:
    with models.parallel(setup):
        return CASES[name](setup)


def _places(setup: Setup) -> dict[str, Any]:
    from megatron.core.models.gpt import GPTModel

    before = models.build(setup)
    names = list(before.named_parameters())
    keys = list(before.state_dict())
    model = models.build(setup)
    weights = {name: parameter for name, parameter in model.named_parameters()}
    attributes = {name: set(vars(module)) for name, module in _both(model).items()}
    replaced = megatron.apply(model, shard=models.shard_of(setup))
    lost = {name: [each for each in attributes[name] if not hasattr(module, each)]
            for name, module in _both(model).items()}  # fmt: skip
    model.load_state_dict(before.state_dict())  # strict
    return {
        "replaced": replaced,
        "lost": lost,
        "names": [name for name, _ in model.named_parameters()] == [name for name, _ in names],
        "keys": list(model.state_dict()) == keys,
        "same": all(parameter is weights[name] for name, parameter in model.named_parameters()),
        "types": (isinstance(model, GPTModel), type(model).__name__),
        "ours": (
            isinstance(model.embedding.word_embeddings, VocabParallelEmbedding),
            isinstance(model.output_layer, VocabParallelLMHead),
        ),
        "head weight": model.output_layer.weight is None,
        "found": sorted(vocab_parameters(model)),
    }


def _both(model: Any) -> dict[str, nn.Module]:
    return {"embedding": model.embedding.word_embeddings, "head": model.output_layer}


def _marks(setup: Setup) -> dict[str, Any]:
    model = models.build(setup, config=models.config_of(setup, perform_initialization=False))
    megatron.apply(model, shard=models.shard_of(setup))
    weights = {"embedding": model.embedding.word_embeddings.weight}
    if not setup.tied:
        weights["head"] = model.output_layer.weight
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce",
             "is_embedding_or_output_parameter", "zero_out_wgrad", "shared", "shared_embedding")  # fmt: skip
    return {name: {mark: getattr(weight, mark, None) for mark in names} for name, weight in weights.items()}


class _Shapes(TorchDispatchMode):
    """Notes the shape of every floating tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.shapes.add(tuple(tensor.shape))
        return out


def _logits_formed(setup: Setup) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of tensors of at least one number for each token and column, in a training step, without and with us."""
    setup = replace(setup, vocab=37, padded=None)  # 19 and 18 columns: no other size is either
    shard = models.shard_of(setup)
    columns = {shard.shard_size, shard.num_valid}
    found = {}
    for name in ("megatron", "rows", "masked sum"):
        model = models.build(setup)
        if name != "megatron":
            megatron.apply(model, shard=shard, chunk_size=8, masked_sum=name == "masked sum")
        rows = models.batch(0, setup.vocab)
        with _Shapes() as seen:
            losses = models.call(model, rows)
            (losses * rows["loss_mask"]).sum().backward()
        wide = [shape for shape in sorted(seen.shapes) if columns & set(shape)]
        found[name] = [shape for shape in wide if torch.Size(shape).numel() >= TOKENS * min(columns)]
    return found


@torch.no_grad()
def _logits(setup: Setup) -> dict[str, Tensor]:
    found = {}
    rows = models.batch(0, setup.vocab)
    for name, adopt in (("before", False), ("after", True)):
        model = models.build(setup)
        shard = models.shard_of(setup)
        if adopt:
            megatron.apply(model, shard=shard)
        model.eval()
        arguments = rows["tokens"], models.positions(), models.attention_mask()
        found[name] = model(*arguments)
        found[f"gathered {name}"] = model(*arguments, runtime_gather_output=True)
    found["valid"] = torch.tensor(shard.num_valid)
    return found


def _options(setup: Setup) -> dict[str, Any]:
    """Losses and the table's gradient with every option, and the oracle's from the same hidden states."""
    rows = models.batch(0, setup.vocab)
    labels = rows["labels"].clone()
    labels[0, 2] = labels[3, 7] = -1
    options = {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "chunk_size": 5}
    model = models.build(setup)
    megatron.apply(model, shard=models.shard_of(setup), **options)
    hidden: list[Tensor] = []
    model.decoder.register_forward_hook(lambda _, __, out: hidden.append(out))
    losses = models.call(model, {**rows, "labels": labels})
    shard = model.embedding.word_embeddings.shard
    head = model.embedding.word_embeddings if setup.tied else model.output_layer
    (gradient,) = torch.autograd.grad((losses * rows["loss_mask"]).sum(), hidden[0], retain_graph=True)
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

    whole = gather(hidden[0].detach()) if setup.sequence_parallel else hidden[0].detach()
    whole.requires_grad_()
    table = gather_vocab(shard, head.weight)
    del options["chunk_size"]
    per_row = reference.linear_cross_entropy(
        whole.transpose(0, 1).reshape(TOKENS, HIDDEN), table, labels.flatten(), reduction="none", **options
    )  # fmt: skip
    (expected,) = torch.autograd.grad((per_row * rows["loss_mask"].flatten()).sum(), whole)
    if setup.sequence_parallel:
        expected = expected.chunk(2)[shard.rank]
    return {"losses": losses, "expected": per_row.view(ROWS, SEQUENCE), "d": gradient, "d expected": expected,
            "dtype": losses.dtype}  # fmt: skip


def _masked(setup: Setup) -> dict[str, list[Tensor]]:
    """Losses and all gradients with and without masked_sum, with options and a mask that weighs tokens."""
    rows = models.batch(0, setup.vocab)
    rows["loss_mask"] = rows["loss_mask"] * torch.linspace(0.25, 2.0, SEQUENCE)
    rows["labels"][1, 5] = -100
    found = {}
    for masked_sum in (False, True):
        model = models.build(setup)
        megatron.apply(
            model, shard=models.shard_of(setup), z_loss=1e-2, softcap=3.0, chunk_size=5, masked_sum=masked_sum
        )
        losses = models.call(model, rows)
        ((losses * rows["loss_mask"]).sum() * 0.37).backward()
        found[str(masked_sum)] = [losses.detach(), *(parameter.grad for parameter in model.parameters())]
    return found


def _misused(setup: Setup) -> str:
    model = models.build(setup)
    megatron.apply(model, shard=models.shard_of(setup), masked_sum=True)
    losses = models.call(model, models.batch(0, setup.vocab))
    try:
        losses.square().sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _unmasked(setup: Setup) -> str:
    model = models.build(setup)
    megatron.apply(model, shard=models.shard_of(setup), masked_sum=True)
    rows = models.batch(0, setup.vocab)
    try:
        model(rows["tokens"], models.positions(), models.attention_mask(), labels=rows["labels"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _out_of_range(setup: Setup) -> str:
    model = models.adopted(setup)
    rows = models.batch(0, setup.vocab)
    rows["labels"][1, 1] = setup.vocab
    try:
        models.call(model, rows)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


CASES: dict[str, Callable[[Setup], Any]] = {
    "places": _places, "marks": _marks, "formed": _logits_formed, "logits": _logits, "options": _options,
    "masked": _masked, "misused": _misused, "unmasked": _unmasked, "range": _out_of_range,
}  # fmt: skip
WORLD = Batch(_run, [(name, setup) for name in CASES for setup in SETUPS])


@EACH
def test_modules_keep_names_parameters_attributes_and_checkpoint_keys(setup: Setup) -> None:
    for found in WORLD(2, "places", setup):
        assert found["replaced"] == ["embedding.word_embeddings", "output_layer", "compute_language_model_loss"]
        assert found["lost"] == {"embedding": [], "head": []}
        assert found["names"] and found["keys"] and found["same"], found
        assert found["types"] == (True, "GPTModel")
        assert found["ours"] == (True, True)
        assert found["head weight"] == setup.tied
        tables = ["embedding.word_embeddings.weight"] + ([] if setup.tied else ["output_layer.weight"])
        assert found["found"] == tables


@EACH
def test_marks_are_set_where_megatron_leaves_them_out(setup: Setup) -> None:
    for found in WORLD(2, "marks", setup):
        for marks in found.values():
            assert marks["tensor_model_parallel"] is True and marks["allreduce"] is True
            assert marks["partition_dim"] == 0 and marks["partition_stride"] == 1
            assert marks["is_embedding_or_output_parameter"] is True
            assert not marks["shared"] and not marks["shared_embedding"]
        assert bool(found["embedding"]["zero_out_wgrad"]) == setup.tied


@EACH
def test_training_never_forms_the_logits(setup: Setup) -> None:
    for found in WORLD(2, "formed", setup):
        assert found["megatron"], "the check does not see Megatron's own logits"
        assert found["rows"] == [] and found["masked sum"] == []


@EACH
def test_without_labels_logits_are_as_before_and_padding_is_never_found(setup: Setup) -> None:
    for found in WORLD(2, "logits", setup):
        valid = int(found["valid"])
        torch.testing.assert_close(found["after"][..., :valid], found["before"][..., :valid])
        assert bool((found["after"][..., valid:] == -torch.inf).all())
        gathered, before = found["gathered after"], found["gathered before"]
        assert gathered.shape == before.shape == (ROWS, SEQUENCE, setup.layout.padded_size)
        torch.testing.assert_close(gathered[..., : setup.vocab], before[..., : setup.vocab])
        assert bool((gathered[..., setup.vocab :] == -torch.inf).all())


@EACH
def test_options_that_megatron_lacks_equal_the_oracle(setup: Setup) -> None:
    for found in WORLD(2, "options", setup):
        assert found["dtype"] == torch.float32
        torch.testing.assert_close(found["losses"], found["expected"], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found["d"], found["d expected"], atol=2e-6, rtol=1e-5)


@EACH
def test_a_masked_sum_gives_the_same_losses_and_gradients(setup: Setup) -> None:
    for found in WORLD(2, "masked", setup):
        assert len(found["False"]) > 10
        for ours, wanted in zip(found["True"], found["False"], strict=True):
            torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=1e-5)


@EACH
def test_a_masked_sum_used_otherwise_is_an_error_on_every_rank(setup: Setup) -> None:
    for message in WORLD(2, "misused", setup):
        assert message.startswith("ConfigError") and "no multiple of loss_mask" in message
    for message in WORLD(2, "unmasked", setup):
        assert message.startswith("ConfigError") and "loss_mask=loss_mask" in message


@EACH
def test_a_label_of_a_padding_row_is_an_error_on_every_rank(setup: Setup) -> None:
    for message in WORLD(2, "range", setup):
        assert message.startswith("TargetRangeError") and f"target {setup.vocab} " in message
