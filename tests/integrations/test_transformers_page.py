"""The host's page: its snippet runs as written; and the saved model is one that Transformers reads."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integrations.transformers_models import batch, build, largest_difference, make_shard, whole_parameters
from tests.ranks import run_ranks
from vocab_parallel.integrations import transformers as vp

PAGE = Path("docs/hosts/transformers.md")


def three_lines():
    (block,) = re.findall(r"<!-- three lines -->\n```python\n(.*?)```", PAGE.read_text(), re.S)
    return block


def _adopt(rank, snippet, folder):
    model = build("llama", 300)
    plain = copy.deepcopy(model)
    names = {"model": model, "tp_size": dist.get_world_size(), "tp_group": dist.group.WORLD}
    exec(snippet, names)
    ids, labels = batch(300, 0)
    loss = names["model"](ids, labels=labels).loss
    assert abs(loss.item() - plain(ids, labels=labels).loss.item()) < 1e-5
    assert len(model.lm_head.weight) < 300, "nothing was sharded"
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
        plain.lm_head.weight.mul_(1.5)
    model.save_pretrained(folder)  # every rank
    return largest_difference(whole_parameters(model), whole_parameters(plain))


def _outputs(rank):
    """What comes beside the loss, and in which form."""
    model = build("mixtral", 19)
    plain = copy.deepcopy(model).eval()
    vp.apply(model, shard=make_shard(19))
    model.eval()
    ids, labels = batch(19, 0)
    silent, full = model(ids, labels=labels), model(ids, labels=labels, return_logits=True)
    expected = plain(ids, labels=labels)
    assert silent.logits is None
    assert torch.allclose(full.logits, expected.logits, atol=1e-5)
    assert torch.allclose(silent.aux_loss, expected.aux_loss)
    assert abs(silent.loss.item() - expected.loss.item()) < 1e-5
    as_tuple = model(ids, labels=labels, return_dict=False)
    assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[0], silent.loss)
    by_position = model(ids, None, labels=labels)
    assert torch.equal(by_position.loss, silent.loss)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    assert torch.equal(model(ids, labels=labels, shift_labels=shifted).loss, silent.loss)
    nothing = model(ids, labels=torch.full_like(labels, -100))
    assert torch.isfinite(nothing.loss)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids, labels=labels).loss, silent.loss)


def test_the_three_lines_of_the_page_run_as_written_and_the_saved_model_is_read_in_one_process(tmp_path):
    assert run_ranks(_adopt, 2, three_lines(), str(tmp_path)) == [0.0, 0.0]
    from transformers import LlamaForCausalLM

    read = LlamaForCausalLM.from_pretrained(tmp_path)
    expected = build("llama", 300)
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert torch.equal(read.lm_head.weight, expected.lm_head.weight * 1.5)


def _low_precision(rank):
    """bfloat16 weights, and float32 ones under autocast: as close to float32 as the model's own loss is."""
    worst = {}
    for family in ("llama", "gemma2", "phi"):
        exact = build(family, 19)
        for data_parallel in (False, True):
            low, mixed = copy.deepcopy(exact).to(torch.bfloat16), copy.deepcopy(exact)
            own = copy.deepcopy(low)
            vp.apply(low, shard=make_shard(19), data_parallel=data_parallel)
            vp.apply(mixed, shard=make_shard(19), data_parallel=data_parallel)
            ids, labels = batch(19, 0)
            expected = exact(ids, labels=labels).loss.item()
            with torch.autocast("cpu", torch.bfloat16):
                found = mixed(ids, labels=labels).loss
            found.backward()
            loss = low(ids, labels=labels).loss
            loss.backward()
            assert loss.dtype == found.dtype == torch.float32
            assert low.get_input_embeddings().weight.grad.dtype == torch.bfloat16
            allowed = 2 * abs(own(ids, labels=labels).loss.item() - expected) + 5e-3
            worst[family, data_parallel] = (abs(loss.item() - expected), abs(found.item() - expected), allowed)
    return worst


def test_bfloat16_is_as_close_to_float32_as_the_model_itself():
    for worst in run_ranks(_low_precision, 2):
        for case, (low, mixed, allowed) in worst.items():
            assert low < allowed and mixed < allowed, (case, low, mixed, allowed)


def test_outputs_with_a_loss_keep_their_form():
    run_ranks(_outputs, 2)


def _saved(rank, folder):
    model = build("llama", 19, seed=7)
    vp.apply(model, shard=make_shard(19, 4), data_parallel=True)
    model.save_pretrained(folder)
    return whole_parameters(model)


def _read(rank, folder):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    vp.apply(model, shard=make_shard(19))
    return whole_parameters(model), model.lm_head.weight is model.model.embed_tokens.weight, vp.verify(model)


def test_a_saved_model_is_sharded_again_in_a_fresh_world_of_another_size(tmp_path):
    (saved, *_) = run_ranks(_saved, 2, str(tmp_path))
    for weights, alias, tied in run_ranks(_read, 3, str(tmp_path)):
        assert largest_difference(weights, saved) == 0.0
        assert alias
        assert tied == [("model.embed_tokens.weight", "lm_head.weight")]
