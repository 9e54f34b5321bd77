"""Models that `apply` refuses, each with its reason; and newer models, through stand-ins with their signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations import megatron_models as models
from tests.integrations.megatron_models import HIDDEN, ROWS, SEQUENCE, Setup, megatron
from tests.multirank.shared_world import Batch
from vocab_parallel import VocabLayout, VocabShard

SETUP = Setup(tp=2)


def _plain(**settings: Any) -> Any:
    return models.build(SETUP, config=models.config_of(SETUP, **settings))


def _with(name: str, value: Any) -> Any:
    model = models.build(SETUP)
    setattr(model.config, name, value)
    return model


def _adapter() -> Any:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base = base

    model = models.build(SETUP)
    model.output_layer = Adapter(model.output_layer)
    return model


def _quantised() -> Any:
    model = models.build(SETUP)
    kind = type(model.embedding.word_embeddings)
    model.embedding.word_embeddings.__class__ = type("QuantizedEmbedding", (kind,), {})
    return model


def _twice() -> Any:
    return models.adopted(SETUP)


def _hooked() -> Any:
    model = models.build(SETUP)
    model.output_layer.register_forward_hook(lambda *_: None)
    return model


def _wrapped() -> Any:
    return models.wrap(SETUP, models.build(SETUP))


def _inside_wrapped() -> Any:
    model = models.build(SETUP)
    models.wrap(SETUP, model)
    return model


def _meta() -> Any:
    return models.build(SETUP).to("meta")


REFUSED: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    "multi-token prediction": (lambda: _with("mtp_num_layers", 1), "ConfigError", ("mtp_num_layers=1", "real logits")),
    "deferred dW": (lambda: _with("defer_embedding_wgrad_compute", True), "ConfigError", ("Turn it off",)),
    "adapter": (_adapter, "ConfigError", ("output_layer is a Adapter", "before adapters are attached")),
    "quantised": (_quantised, "ConfigError", ("embedding.word_embeddings is a QuantizedEmbedding",)),
    "twice": (_twice, "ConfigError", ("apply was called twice",)),
    "hooks": (_hooked, "ConfigError", ("output_layer has hooks",)),
    "wrapped": (_wrapped, "ConfigError", ("DistributedDataParallel wraps the model",)),
    "optimizer first": (_inside_wrapped, "TyingError",
                        ("embedding.word_embeddings.weight", "output_layer.weight", "Call apply first")),
    "meta": (_meta, "ConfigError", ("meta device", "Build the model on its device")),
    "no language model": (lambda: nn.Linear(2, 2), "ConfigError", ("no Megatron language model",)),
}  # fmt: skip
SHARDS: dict[str, tuple[Callable[[], VocabShard], str, tuple[str, ...]]] = {
    "other padding": (lambda: VocabShard(VocabLayout(9, 2), models.shard_of(SETUP).group), "LayoutMismatchError",
                      ("256 rows", "the model 10", "from_padded")),
    "other ranks": (lambda: VocabShard(VocabLayout(10, 1, multiple_of=1)), "LayoutMismatchError", ("model.tp_group",)),
}  # fmt: skip
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing"),
    "masked": ({"label_smoothing": 0.1, "masked_sum": True}, "masked_sum has no label smoothing"),
}


def _refuse(rank: int, name: str) -> str:
    with models.parallel(SETUP):
        model = REFUSED[name][0]() if name in REFUSED else models.build(SETUP)
        shard = SHARDS[name][0]() if name in SHARDS else models.shard_of(SETUP)
        before = [type(module) for module in model.modules()]
        try:
            megatron.apply(model, shard=shard, **OPTIONS.get(name, ({}, ""))[0])
        except Exception as error:
            assert [type(module) for module in model.modules()] == before, "a refused model was changed"
            return f"{type(error).__name__}: {error}"
        return "no error"


WORLD = Batch(_refuse, [(name,) for name in (*REFUSED, *SHARDS, *OPTIONS)])


@pytest.mark.parametrize("name", [*REFUSED, *SHARDS], ids=lambda name: name.replace(" ", "_"))
def test_what_is_not_supported_is_refused_with_the_reason_and_left_as_it_was(name: str) -> None:
    _, kind, words = (REFUSED | SHARDS)[name]  # type: ignore[operator]
    for message in WORLD(2, name):
        assert message.startswith(kind), message
        for word in words:
            assert word in message, message


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_that_do_not_go_together_are_refused(name: str) -> None:
    for message in WORLD(2, name):
        assert OPTIONS[name][1] in message, message


class _Trunk(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.tanh()


def _newer(rank: int, kind: str) -> dict[str, Any]:
    """Losses, logits and the table's gradient of a model with another signature, and what they should be."""
    with models.parallel(SETUP):
        model = _stand_in(kind, models.shard_of(SETUP))
        replaced = megatron.apply(model, shard=models.shard_of(SETUP))
        rows = models.batch(0, SETUP.vocab)
        losses = model(rows["tokens"], None, None, labels=rows["labels"])
        losses.sum().backward()
        logits = model(rows["tokens"], None, None, runtime_gather_output=True)[..., : SETUP.vocab]
        processed = None
        if kind == "hybrid":
            shape_of = {"output_processor": lambda **given: given["logits"].shape}
            processed = model(rows["tokens"], None, None, labels=rows["labels"], **shape_of)
        shard = model.embedding.word_embeddings.shard
        table = models.gather_vocab(shard, model.embedding.word_embeddings.weight).requires_grad_()
        hidden = F.embedding(rows["tokens"], table).tanh()
        expected_logits = hidden @ table.T * SCALE[kind]
        expected = F.cross_entropy(expected_logits.flatten(0, 1), rows["labels"].flatten(), reduction="none")
        (gradient,) = torch.autograd.grad(expected.sum(), table)
        return {
            "replaced": replaced, "losses": losses, "expected": expected.view(ROWS, SEQUENCE), "logits": logits,
            "expected logits": expected_logits, "processed": processed,
            "d": models.gather_vocab(shard, model.embedding.word_embeddings.weight.grad), "d expected": gradient,
            "class": type(model).__name__,
        }  # fmt: skip


SCALE = {"hybrid": 0.5, "mamba": 1.0, "linear": 1.0}


def _stand_in(kind: str, shard: VocabShard) -> Any:
    """Models with the signatures of HybridModel (newest), MambaModel 0.16.1 and GPTModel with a fused linear loss."""
    from megatron.core import tensor_parallel
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
    from megatron.core.models.common.language_module.language_module import LanguageModule

    class LinearCrossEntropyModule(tensor_parallel.ColumnParallelLinear):  # type: ignore[misc]
        """Of newer versions."""

    head_class = LinearCrossEntropyModule if kind == "linear" else tensor_parallel.ColumnParallelLinear

    class Base(LanguageModule):  # type: ignore[misc]
        def __init__(self) -> None:
            config = models.config_of(SETUP)
            super().__init__(config=config)
            self.pre_process = self.post_process = self.share_embeddings_and_output_weights = True
            self.vocab_size = SETUP.layout.padded_size
            self.embedding = LanguageModelEmbedding(config, self.vocab_size, SEQUENCE, "none", tp_group=self.tp_group)
            self.decoder = _Trunk()
            self.output_layer = head_class(
                HIDDEN, self.vocab_size, config=config, init_method=config.init_method, bias=False,
                skip_weight_param_allocation=True, tp_group=self.tp_group,
            )  # fmt: skip
            self.setup_embeddings_and_output_layer()

    class HybridModel(Base):
        def _scale_logits(self, logits: Any) -> Any:
            return logits * SCALE[kind]

        def forward(
            self, input_ids: Tensor, position_ids: Any, attention_mask: Any, decoder_input: Any = None,
            labels: Tensor | None = None, inference_context: Any = None, packed_seq_params: Any = None,
            runtime_gather_output: bool | None = None, *, inference_params: Any = None, loss_mask: Any = None,
            padding_mask: Any = None, output_processor: Any = None, output_processor_context: Any = None,
        ) -> Any:  # fmt: skip
            hidden = self.decoder(self.embedding(input_ids=input_ids, position_ids=position_ids))
            return self._postprocess(
                hidden, input_ids, position_ids, labels, None, loss_mask=loss_mask,
                runtime_gather_output=runtime_gather_output, output_processor=output_processor,
            )  # fmt: skip

        def _postprocess(
            self, hidden_states: Tensor, input_ids: Tensor, position_ids: Any, labels: Tensor | None,
            rotary_pos_emb: Any, rotary_pos_cos: Any = None, rotary_pos_sin: Any = None, mtp_in_postprocess: Any = None,
            loss_mask: Any = None, decoder_input: Any = None, attention_mask: Any = None, inference_params: Any = None,
            packed_seq_params: Any = None, sequence_len_offset: Any = None, runtime_gather_output: Any = None,
            extra_block_kwargs: Any = None, inference_context: Any = None, is_spec_decode: Any = None,
            output_processor: Any = None, output_processor_context: Any = None,
        ) -> Any:  # fmt: skip
            weight = self.shared_embedding_or_output_weight()
            logits, _ = self.output_layer(hidden_states, weight=weight, runtime_gather_output=runtime_gather_output)
            logits = self._scale_logits(logits)
            if output_processor is not None:
                return output_processor(logits=logits)
            if labels is None:
                return logits.transpose(0, 1).contiguous()
            return self.compute_language_model_loss(labels, logits)

    class MambaModel(Base):
        """Without a `_postprocess`: the seam is forward."""

        def forward(
            self, input_ids: Tensor, position_ids: Any, attention_mask: Any, decoder_input: Any = None,
            labels: Tensor | None = None, inference_context: Any = None, runtime_gather_output: bool | None = None,
            *, inference_params: Any = None, loss_mask: Any = None, packed_seq_params: Any = None,
            padding_mask: Any = None,
        ) -> Any:  # fmt: skip
            hidden = self.decoder(self.embedding(input_ids=input_ids, position_ids=position_ids))
            weight = self.shared_embedding_or_output_weight()
            logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=runtime_gather_output)
            if labels is None:
                return logits.transpose(0, 1).contiguous()
            return self.compute_language_model_loss(labels, logits)

    class GPTModel(Base):
        """Whose head gives the loss itself."""

        def forward(
            self, input_ids: Tensor, position_ids: Any, attention_mask: Any, labels: Tensor | None = None,
            runtime_gather_output: bool | None = None,
        ) -> Any:  # fmt: skip
            hidden = self.decoder(self.embedding(input_ids=input_ids, position_ids=position_ids))
            given = {"input_": hidden, "weight": self.shared_embedding_or_output_weight(),
                     "runtime_gather_output": runtime_gather_output}  # fmt: skip
            if labels is not None:
                return self.output_layer(output_cross_entropy_loss=True, labels=labels, **given)
            logits, _ = self.output_layer(**given)
            return logits.transpose(0, 1).contiguous()

    model = {"hybrid": HybridModel, "mamba": MambaModel, "linear": GPTModel}[kind]()
    with torch.no_grad():
        model.embedding.word_embeddings.weight.copy_(shard.slice(models.whole("table", (SETUP.vocab, HIDDEN))))
    return model


NEWER = Batch(_newer, [(kind,) for kind in SCALE])


@pytest.mark.parametrize("kind", list(SCALE))
def test_models_with_other_signatures_are_adopted_at_the_same_seams(kind: str) -> None:
    for found in NEWER(2, kind):
        assert found["replaced"] == ["embedding.word_embeddings", "output_layer", "compute_language_model_loss"]
        assert found["class"] == {"hybrid": "HybridModel", "mamba": "MambaModel", "linear": "GPTModel"}[kind]
        torch.testing.assert_close(found["losses"], found["expected"], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(found["d"], found["d expected"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["logits"], found["expected logits"], atol=2e-6, rtol=2e-6)
        if kind == "hybrid":  # a caller's own processor gets real logits, this rank's
            assert found["processed"] == (SEQUENCE, ROWS, SETUP.layout.shard_size)
