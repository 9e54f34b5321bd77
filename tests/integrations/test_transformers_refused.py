"""What cannot be converted is refused on every rank, with the reason, and the model is left as it was."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.batch import assert_all_raise, attempt
from tests.integrations.transformers_models import batch, build, make_optimizer, make_shard, whole_parameters
from tests.multirank.shared_world import Batch
from vocab_parallel.integrations import transformers as vp

VOCAB = 19


class Adapter(nn.Module):
    """Like LoRA's: the layer and a low-rank part."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, input):
        return self.base_layer(input) + self.up(self.down(input))


class EightBit(nn.Embedding):
    def __init__(self, table):
        super().__init__(*table.weight.shape)
        self.weight = nn.Parameter(table.weight.detach().mul(16).round().to(torch.int8), requires_grad=False)


def adapter(model):
    model.lm_head = Adapter(model.lm_head)


def quantised(model):
    model.model.embed_tokens = EightBit(model.model.embed_tokens)


def special_head(model):
    model.lm_head.__class__ = type("Linear8bitLt", (nn.Linear,), {})


def meta(model):
    model.to("meta")


def resized_table(model):
    model.model.embed_tokens = nn.Embedding(VOCAB + 2, 16)


def resized_without_config(model):
    model.model.embed_tokens, model.lm_head = nn.Embedding(VOCAB + 2, 16), nn.Linear(16, VOCAB + 2, bias=False)


def resized(model):
    model.resize_token_embeddings(VOCAB + 2, mean_resizing=False)


def no_head(model):
    model.get_output_embeddings = lambda: None


def unknown_loss(model):
    model.loss_function = lambda logits, labels, **_: logits.sum()


def unknown_scores(model):
    model.lm_head.register_forward_hook(lambda module, args, output: output * 1.5)


def scale_without_config(model):
    """A scale that the class applies and the config does not tell."""
    kind = type(model)
    forward = kind.forward

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.__class__ = type(kind.__name__, (kind,), {"forward": scaled})


def other_loss(model):
    """A loss of one's own in the class, beside the same logits."""
    kind = type(model)
    forward = kind.forward

    def doubled(self, *args, labels=None, **kwargs):
        output = forward(self, *args, labels=labels, **kwargs)
        if labels is not None:
            output.loss = output.loss * 1.01
        return output

    model.__class__ = type(kind.__name__, (kind,), {"forward": doubled})


def embedding_outside(model):
    """Uses its table outside the lookup, where rows of other ranks are missing."""
    kind = type(model)
    forward = kind.forward

    def regularised(self, *args, **kwargs):
        return forward(self, *args, **kwargs) if len(self.model.embed_tokens.weight) == VOCAB else 1 / 0

    model.__class__ = type(kind.__name__, (kind,), {"forward": regularised})


def copied(model):
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    model.config.tie_word_embeddings = True


def one_storage(model):
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())


def third_use(model):
    model.model.extra = nn.Linear(16, VOCAB, bias=False)
    model.model.extra.weight = model.lm_head.weight


def emptied(model):
    model.config.tie_word_embeddings = True
    model.tie_weights()
    state = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state, assign=True)
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def seeds(model):
    with torch.no_grad():
        next(model.parameters()).mul_(1 + torch.distributed.get_rank())


def not_a_model(model):
    return nn.Linear(2, 2)


CONFIG, TYING, LAYOUT = ["ConfigError"], ["TyingError"], ["LayoutMismatchError"]
PAIR = ["model.embed_tokens.weight", "lm_head.weight"]
REFUSED = [
    (adapter, CONFIG, ["adapter", "lm_head"]),
    (quantised, CONFIG, ["quantised", "model.embed_tokens"]),
    (special_head, CONFIG, ["quantised", "lm_head"]),
    (meta, CONFIG, ["meta", "from_pretrained"]),
    (resized_table, LAYOUT, ["21", "19", *PAIR]),
    (resized_without_config, LAYOUT, ["21", "19", "model.resize_token_embeddings"]),
    (resized, LAYOUT, ["21", "19", "VocabLayout"]),
    (no_head, CONFIG, ["output embeddings"]),
    (unknown_loss, CONFIG, ["ForCausalLMLoss"]),
    (unknown_scores, CONFIG, ["loss", "differs"]),
    (scale_without_config, CONFIG, ["unknown architecture", "logit_scale"]),
    (other_loss, CONFIG, ["loss", "differs"]),
    (embedding_outside, CONFIG, ["unknown architecture", "ZeroDivisionError"]),
    (copied, TYING, [*PAIR, "config.tie_word_embeddings"]),
    (one_storage, TYING, [*PAIR, "storage"]),
    (third_use, TYING, [*PAIR, "model.extra.weight"]),
    (emptied, TYING, [*PAIR, "storage"]),
    (seeds, CONFIG, ["different weights", "seed"]),
    (not_a_model, CONFIG, ["PreTrainedModel"]),
]


def _refuse(rank, name, data_parallel):
    change = next(change for change, _, _ in REFUSED if change.__name__ == name)
    model = build("llama untied", VOCAB)
    model = change(model) or model
    kind = type(model)
    before = {name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}
    flags = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    result = attempt(lambda: vp.apply(model, shard=make_shard(VOCAB), data_parallel=data_parallel))
    after = {name: (id(parameter), parameter.detach()) for name, parameter in model.named_parameters()}
    left = before.keys() == after.keys() and all(
        before[name][0] == after[name][0] and (after[name][1].is_meta or torch.equal(before[name][1], after[name][1]))
        for name in before
    )
    same = type(model) is kind and not hasattr(model, "_vocab_parallel")
    same = same and flags == [module.training for module in model.modules()]
    same = same and torch.equal(random, torch.get_rng_state())
    same = same and all(parameter.grad is None for parameter in model.parameters())
    return result, left and same


TRIED = Batch(_refuse, [(change.__name__, data) for change, _, _ in REFUSED for data in (False, True)])


@pytest.mark.parametrize(("change", "kinds", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", None))
@pytest.mark.parametrize("data_parallel", [False, True], ids=["same batch", "data parallel"])
def test_is_refused_with_the_reason_and_left_as_it_was(change, kinds, words, data_parallel):
    ranks = TRIED(2, change.__name__, data_parallel)
    assert_all_raise(change.__name__, [result for result, _ in ranks], kinds, words)
    assert [left for _, left in ranks] == [True, True], "the model was changed"


def _afterwards(rank):
    """What is done to a converted model later."""
    errors = {}
    ids, labels = batch(VOCAB, 0)
    shard = make_shard(VOCAB)
    model = build("llama", VOCAB)
    early = make_optimizer(model)
    vp.apply(model, shard=shard)
    errors["optimizer first"] = attempt(lambda: vp.verify(model, early))
    errors["twice"] = attempt(lambda: vp.apply(model, shard=shard))
    errors["resize"] = attempt(lambda: model.resize_token_embeddings(30))
    errors["save a shard"] = attempt(lambda: model.save_pretrained("/nowhere", state_dict=model.state_dict()))
    for what, kind, scaler in (("deepspeed", "DEEPSPEED", None), ("scaler", "MULTI_GPU", "a scaler")):
        host = SimpleNamespace(distributed_type=SimpleNamespace(value=kind), scaler=scaler)
        errors[what] = attempt(lambda host=host: vp.attach(host, model))
    errors["norm"] = attempt(lambda: vp.clip_like_torch_(model, 1.0, 1))
    wrong = {name: torch.cat([tensor, tensor]) if tensor.dim() == 2 else tensor for name, tensor in
             model.state_dict().items() if "embed" in name}  # fmt: skip
    wrong = {name: tensor[: VOCAB + 1] for name, tensor in wrong.items()}
    errors["another vocabulary"] = attempt(lambda: model.load_state_dict(wrong, strict=False))
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    errors["shifted labels"] = attempt(lambda: model(ids, labels=shifted))
    spread = build("llama", VOCAB)
    vp.apply(spread, shard=shard, data_parallel=True)
    errors["shifted on one rank"] = attempt(lambda: spread(ids, labels=shifted if rank else labels))
    head = model.lm_head
    model.lm_head = nn.Linear(16, VOCAB, bias=False)
    errors["another head"] = attempt(lambda: model(ids, labels=labels))
    model.lm_head = head
    head.weight = nn.Parameter(head.weight.detach().clone())
    errors["copied"] = attempt(lambda: model(ids, labels=labels))
    errors["copied, verified"] = attempt(lambda: vp.verify(model))
    head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        model.model.norm.weight.add_(rank)
    errors["trunk apart"] = attempt(lambda: vp.verify(model))
    errors["plain"] = attempt(lambda: vp.unapply(build("llama", VOCAB)))
    return errors


LATER = {
    "optimizer first": (TYING, ["model.embed_tokens.weight", "lm_head.weight", "optimizer"]),
    "twice": (CONFIG, ["unapply"]),
    "resize": (CONFIG, ["unapply", "resize"]),
    "save a shard": (CONFIG, ["full_state_dict", "model.embed_tokens.weight"]),
    "deepspeed": (CONFIG, ["DEEPSPEED", "host"]),
    "scaler": (CONFIG, ["float16", "bfloat16"]),
    "norm": (CONFIG, ["norm_type=1"]),
    "another vocabulary": (["CheckpointLayoutError"], ["20", "19", "model.embed_tokens.weight"]),
    "shifted labels": (CONFIG, ["labels", "shifted already", "shift_labels"]),
    "shifted on one rank": (CONFIG, ["labels", "shifted already", "shift_labels"]),
    "another head": (CONFIG, ["lm_head", "Linear"]),
    "copied": (TYING, PAIR),
    "copied, verified": (TYING, PAIR),
    "trunk apart": (LAYOUT, ["replicated", "attach"]),
    "plain": (CONFIG, ["apply"]),
}
AFTERWARDS = Batch(_afterwards, [()])


@pytest.mark.parametrize("what", LATER)
def test_a_converted_model_that_is_broken_later_is_caught(what):
    kinds, words = LATER[what]
    assert_all_raise(what, [errors[what] for errors in AFTERWARDS(2)], kinds, words)


def _to_empty(rank):
    """A converted model sent through the meta device, as loaders do: two Parameters where one was."""
    model = build("llama", VOCAB)
    vp.apply(model, shard=make_shard(VOCAB))
    state = whole_parameters(model)
    model.to("meta").to_empty(device="cpu")
    apart = model.lm_head.weight is not model.model.embed_tokens.weight
    caught = attempt(lambda: vp.verify(model))
    model.load_state_dict(state)  # the tie's hooks mend it
    return apart, caught, model.lm_head.weight is model.model.embed_tokens.weight


def test_to_empty_is_caught_by_the_names_of_both():
    ranks = Batch(_to_empty, [()])(2)
    assert all(apart for apart, _, _ in ranks)
    assert_all_raise("to_empty", [caught for _, caught, _ in ranks], TYING, PAIR)
