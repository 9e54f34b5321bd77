"""Failures 1 to 6: what goes into the head, and what the head is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.failures.lab import failure, refusal, the_same_on_all, whole_shard
from tests.multirank.loss_case import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import (
    CheckpointLayoutError,
    ConfigError,
    Streams,
    VocabParallelLMHead,
    cross_entropy,
    greedy,
    linear_cross_entropy,
    sample,
    token_logprobs,
)
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint
from vocab_parallel.decode import Policy, View, logit_lens

VOCAB, WIDTH, ROWS = 9, 6, 4
IDS = torch.tensor([0, 8, 3, 3])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_on(shard, *, bias=False):
    """A head with rows large enough to matter."""
    head = VocabParallelLMHead(WIDTH, shard=shard, bias=bias, dtype=torch.float64)
    head.reset_parameters(std=1.0)
    return head


def policy_step(logits, shard):
    policy = Policy(selector="greedy")
    return policy.step(logits, View.of([[1]] * ROWS), policy.start(ROWS), shard=shard)


HIDDEN = normal(ROWS, WIDTH)
CALLS = {  # each on every rank, with its shard of 3, 3, 3 and 0 ids at four ranks
    "hidden states to the loss": lambda shard: cross_entropy(HIDDEN, IDS, shard=shard),
    "hidden states to log-probabilities": lambda shard: token_logprobs(HIDDEN, IDS, shard=shard),
    "hidden states to greedy": lambda shard: greedy(HIDDEN, shard=shard),
    "hidden states to sample": lambda shard: sample(HIDDEN, shard=shard, streams=Streams.of([7] * ROWS, range(ROWS))),
    "hidden states to a policy": lambda shard: policy_step(HIDDEN, shard),
    "source rows to the loss": lambda shard: head_on(shard).loss(normal(ROWS + 1, WIDTH), IDS),
    "a transposed weight": lambda shard: linear_cross_entropy(HIDDEN, head_on(shard).weight.T, IDS, shard=shard),
    "a wide branch to the loss": lambda shard: head_on(shard).loss(normal(ROWS, 4 * WIDTH), IDS),
    "a wide branch to the logits": lambda shard: head_on(shard).logits(normal(ROWS, 4 * WIDTH)),
}  # fmt: skip


def _refused(rank, name):
    return refusal(CALLS[name], shard_of(VOCAB))


REFUSED = Batch(_refused, [(name,) for name in CALLS])


def refused(name):
    """The error of a call at 4 ranks, with an empty shard, and at 2."""
    return [the_same_on_all(REFUSED(tp, name)) for tp in (2, 4)]


@failure(
    1, "Hidden states handed on as logits", "refused",
    "Every operation takes this rank's columns of the vocabulary: another width is an error on every rank that names "
    "hidden states as a cause; where the widths agree by chance, `head.loss` still takes hidden states and nothing "
    "else.",
)  # fmt: skip
def test_hidden_states_are_refused_as_logits():
    for name in (name for name in CALLS if name.startswith("hidden states")):
        for kind, message in refused(name):
            assert kind == "LayoutMismatchError" and "hidden states that no head has projected" in message, name
    shard = whole_shard(WIDTH)  # as many ids as the states are wide
    head, target = head_on(shard), IDS % WIDTH
    right = F.cross_entropy(HIDDEN @ head.weight.T, target)
    assert torch.allclose(head.loss(HIDDEN, target), right)
    assert not torch.allclose(cross_entropy(HIDDEN, target, shard=shard), right, rtol=0.1)


@failure(
    2, "The final norm left out before the head", "shown",
    "A converted Transformers model's head gets what the model sends into it, and the conversion compares its logits "
    "with those before; a logit lens has no default norm: without a named one there is no call.",
)  # fmt: skip
def test_the_head_gets_normed_states_and_the_lens_needs_a_norm():
    from tests.integrations.transformers_models import build
    from vocab_parallel.integrations import transformers as vp

    model, ids, residual = build("llama", 19).eval(), torch.tensor([[3, 1, 4, 1, 5]]), []
    norm = model.model.norm
    hook = norm.register_forward_pre_hook(lambda module, args: residual.append(args[0].detach()))
    plain = model(ids).logits.detach()
    hook.remove()
    skipped = F.linear(residual[0], model.lm_head.weight.detach())
    assert skipped.shape == plain.shape and not torch.allclose(skipped, plain, rtol=0.1)
    vp.apply(model, shard=whole_shard(19))
    assert torch.allclose(model(ids).logits, plain, atol=1e-5)
    head = model.lm_head
    seen = logit_lens(residual[0], norm, head, norm_name="model.norm", k=1)
    assert torch.equal(seen.token_ids[0, :, 0], plain[0].argmax(-1))
    assert not torch.equal(seen.token_ids[0, :, 0], skipped[0].argmax(-1))
    with pytest.raises(TypeError, match="norm"):
        logit_lens(residual[0], head=head)
    with pytest.raises(ValueError, match="norm"):
        logit_lens(residual[0], None, head, norm_name="none")


@failure(
    3, "The target's head on the encoder's memory", "refused",
    "Encoder-decoder models are refused by the Transformers conversion, whose head would have two inputs to choose "
    "from; in a model of one's own, rows of the source are not the target's rows, an error on every rank.",
)  # fmt: skip
def test_the_encoders_rows_are_not_the_targets():
    from transformers import T5Config, T5ForConditionalGeneration

    from vocab_parallel.integrations import transformers as vp

    for kind, message in refused("source rows to the loss"):
        assert kind == "LayoutMismatchError" and "input [5, 6] and target [4] disagree" in message
    shapes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=19, **shapes)).eval()
    source, target = torch.tensor([[3, 1, 4]]), torch.tensor([[5, 9, 2]])
    memory = model.get_encoder()(source).last_hidden_state
    of_memory, right = model.lm_head(memory), model(input_ids=source, labels=target).logits
    assert of_memory.shape == right.shape and not torch.allclose(of_memory, right, rtol=0.1)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        vp.apply(model, shard=whole_shard(19))


@failure(
    4, "The output weight transposed by hand", "refused",
    "The weight is `[rows, width]` as `nn.Linear` stores it, and its first dimension must be the shard's rows, on "
    "every rank; a linear layer's state loads into the head as it is.",
)  # fmt: skip
def test_the_weight_is_taken_as_a_linear_layer_stores_it():
    for kind, message in refused("a transposed weight"):
        assert kind == "LayoutMismatchError" and "must be this rank's rows" in message
    linear = torch.nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
    head = VocabParallelLMHead(WIDTH, shard=whole_shard(VOCAB), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="size mismatch"):
        head.load_state_dict({"weight": linear.weight.detach().T})
    head.load_state_dict(linear.state_dict())
    assert torch.equal(head.logits(HIDDEN), linear(HIDDEN))


@failure(
    5, "A checkpoint without bias in a head with one", "refused",
    "A load compares the manifests and then every name before anything changes: a bias on one side only is an error "
    "on every rank that names it, in both directions.",
)  # fmt: skip
def test_a_bias_on_one_side_only_is_refused(tmp_path):
    plain, biased = (torch.nn.ModuleDict({"head": head_on(whole_shard(VOCAB), bias=bias)}) for bias in (False, True))
    torch.nn.init.normal_(biased["head"].bias, generator=torch.Generator().manual_seed(1))
    before = biased["head"].bias.detach().clone()
    careless = biased.load_state_dict(plain.state_dict(), strict=False)
    assert careless.missing_keys == ["head.bias"]
    wrong, right = biased["head"].logits(HIDDEN), plain["head"].logits(HIDDEN)
    assert torch.equal(biased["head"].weight, plain["head"].weight) and not torch.allclose(wrong, right, rtol=0.1)
    for saved, here in ((plain, biased), (biased, plain)):
        path = save_checkpoint(tmp_path / str(saved is plain), saved, None, 1)
        with pytest.raises(CheckpointLayoutError, match=r"head\.bias is (false|true) .*(false|true)"):
            load_checkpoint(path, here)
    assert torch.equal(biased["head"].bias, before)


@failure(
    6, "An inner activation of the feed-forward projected", "refused",
    "The head knows its width: states of another width are an error, on every rank in the loss and the logits alike.",
)  # fmt: skip
def test_a_branch_of_another_width_is_refused():
    for name in ("a wide branch to the loss", "a wide branch to the logits"):
        for kind, message in refused(name):
            assert kind == "LayoutMismatchError" and "input [4, 24] and weight" in message, name
