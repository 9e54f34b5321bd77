"""Models of ten families: what Transformers saves becomes a checkpoint that a converted model loads, and comes back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.case_runners.common import same_bits
from tests.integrations.transformers_models import FAMILIES, build
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint
from vocab_parallel.checkpoint.exchange.hugging_face import from_hugging_face, to_hugging_face
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations import transformers as vp

V = 19


def held(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def alone(family, seed):
    model = build(family, V, seed)
    vp.apply(model, shard=VocabShard(VocabLayout(V, 1)), prove=False)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_loads_into_a_converted_model_and_comes_back(family, tmp_path):
    from transformers import AutoModelForCausalLM

    model, tied = build(family, V).eval(), FAMILIES[family][1]
    model.save_pretrained(tmp_path / "hf", max_shard_size="6KB")
    done = from_hugging_face(tmp_path / "hf", tmp_path / "ours", tp_size=3, multiple_of=1)
    assert bool(done.ties) == tied and done.vocab_size == V
    assert len(done.tables) == (1 if tied else 2) + (family == "phi"), "embedding, head, and the bias of Phi"
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    first, back = held(tmp_path / "hf"), held(tmp_path / "back")
    assert set(first) == set(back) and all(same_bits(tensor, back[name]) for name, tensor in first.items())
    ids = torch.tensor([[3, 1, 18, 4]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert same_bits(again(ids).logits, model(ids).logits)
    other = alone(family, seed=1)
    if family == "mixtral":  # Transformers saves experts one by one and holds them as one tensor
        with pytest.raises(CheckpointLayoutError, match=r"experts.*not saved, here"):
            load_checkpoint(tmp_path / "ours", other)
        return
    load_checkpoint(tmp_path / "ours", other)
    wanted = model.state_dict()
    assert all(same_bits(tensor, wanted[name]) for name, tensor in vp.full_state_dict(other).items())


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_what_a_converted_model_saves_becomes_a_directory_for_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    plain, model = build(family, V).eval(), alone(family, seed=0)
    saved = save_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()), 3)
    plain.config.vocab_size = 32  # as padded elsewhere
    plain.config.save_pretrained(tmp_path / "config")
    done = to_hugging_face(saved, tmp_path / "hf", config=tmp_path / "config")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == V
    assert any("vocab_size 32 is now 19" in note for note in done.notes)
    ids = torch.tensor([[3, 1, 18, 4]])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(ids).logits
        assert same_bits(found, plain(ids).logits)
