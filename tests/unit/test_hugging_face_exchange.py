"""Hugging Face directories to checkpoints and back: bits, real rows, ties, configurations, refusals, memory."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.memory import added_memory
from vocab_parallel.checkpoint.exchange.hugging_face import from_hugging_face, to_hugging_face
from vocab_parallel.checkpoint.files import open_checkpoint
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.checkpoint.writing import make_state, write_checkpoint
from vocab_parallel.errors import CheckpointLayoutError, LayoutError
from vocab_parallel.vocabulary.formats import read_vocabulary
from vocab_parallel.vocabulary.manifest import Manifest

V, D = 9, 4
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def model_tensors(rows=V, dtype=torch.float32, *, head=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        EMBEDDING: torch.randn(rows, D, generator=generator).to(dtype),
        "model.layers.0.mlp.weight": torch.randn(3, D, generator=generator).to(dtype),
        "model.norm.weight": torch.randn(D, generator=generator).to(dtype),
    }
    if head:
        tensors[HEAD] = torch.randn(rows, D, generator=generator).to(dtype)
    return tensors


def write_folder(folder, tensors, config, metadata=None, **texts):
    folder.mkdir(parents=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", metadata=metadata)
    config = {"architectures": ["LlamaForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(config, indent=3))  # not as Transformers formats it
    for name, text in texts.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def byte_tokenizer(size=V):
    vocab = {chr(ord("a") + at): at for at in range(size - 1)}
    added = [{"id": size - 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False,
              "rstrip": False, "normalized": False}]  # fmt: skip
    return json.dumps({"version": "1.0", "added_tokens": added, "decoder": {"type": "ByteLevel"},
                       "model": {"type": "BPE", "vocab": vocab, "merges": []}})  # fmt: skip


def same(one, two):
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return not one.numel() or torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))


def refused(words, call, *args, **options):
    with pytest.raises(CheckpointLayoutError) as raised:
        call(*args, **options)
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.float16)])
def test_a_directory_comes_back_bit_for_bit_with_its_files(tp, dtype, tmp_path):
    others = {
        "model.scale": torch.tensor(2.5), "model.empty": torch.empty(0, 3), "model.no_columns": torch.empty(3, 0),
        "model.ids": torch.tensor([1, -2], dtype=torch.int64), "model.quantised": torch.arange(-6, 6).to(torch.int8),
        "model.mask": torch.tensor([True, False]), "model.eight": torch.randn(4).to(torch.float8_e4m3fn),
        "model.nan": torch.tensor([float("nan"), -0.0]),
    }  # fmt: skip
    tensors = model_tensors(dtype=dtype) | others
    source = write_folder(
        tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": False, "extra": float("inf")},
        tokenizer=byte_tokenizer(), tokenizer_config='{"eos_token": "</s>"}', generation_config="{}", other="{}",
    )  # fmt: skip
    done = from_hugging_face(source, tmp_path / "ours", tp_size=tp, multiple_of=1)
    assert done.tables == (EMBEDDING, HEAD) and done.vocab_size == V and done.ties == {}
    assert done.tensors == len(tensors) and done.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert done.notes == ("not carried along: other.json",)
    stored = open_checkpoint(tmp_path / "ours")
    stored.verify()
    assert {key.removeprefix("model.") for key in stored.tensors} == set(tensors)
    assert all(same(stored.read(f"model.{name}"), tensor) for name, tensor in tensors.items())
    assert stored.state["layout"] == {"vocab_size": V, "padded_size": -(-V // tp) * tp, "tp_size": tp}
    back = to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert back.notes == ()
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert set(found) == set(tensors) and all(same(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(tmp_path / "back" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for path in source.iterdir():
        if path.suffix == ".json" and path.name != "other.json":
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (tmp_path / "back" / "vocabulary.json").exists() and not (tmp_path / "back" / "other.json").exists()


def test_each_ranks_rows_lie_in_its_own_file_and_an_empty_shard_has_none(tmp_path):
    source = write_folder(tmp_path / "hf", model_tensors(), {"vocab_size": V, "tie_word_embeddings": False})
    from_hugging_face(source, tmp_path / "ours", tp_size=4, multiple_of=1, step=7)
    stored = open_checkpoint(tmp_path / "ours")
    held = {piece.file: (piece.offsets[0], piece.sizes[0]) for piece in stored.pieces[f"model.{EMBEDDING}"]}
    assert held == {"__0_0.distcp": (0, 3), "__1_0.distcp": (3, 3), "__2_0.distcp": (6, 3)}
    assert stored.step == 7
    manifest = Manifest.read(tmp_path / "ours")
    assert manifest.checkpoint.shard_ranges == ((0, 3), (3, 6), (6, 9), (9, 9))
    assert (manifest.head.embedding_key, manifest.head.head_key) == (EMBEDDING, HEAD)
    assert manifest.vocabulary.size == V and not manifest.tying.tied


def test_the_vocabulary_of_the_tokenizer_becomes_the_checkpoints(tmp_path):
    source = write_folder(
        tmp_path / "hf", model_tensors(), {"vocab_size": V, "tie_word_embeddings": False}, tokenizer=byte_tokenizer(7)
    )
    assert from_hugging_face(source, tmp_path / "ours").notes == ()
    identity = read_vocabulary(source, size=V)
    assert read_vocabulary(tmp_path / "ours" / "vocabulary.json") == identity
    assert Manifest.read(tmp_path / "ours").vocabulary.ordered_table_sha256 == identity.sha256
    assert open_checkpoint(tmp_path / "ours").state["extra"]["vocabulary_sha256"] == identity.sha256


@pytest.mark.parametrize(
    ("text", "words"), [(None, "no tokenizer"), ("{", "no ordered table"), (byte_tokenizer(12), "12")]
)
def test_a_tokenizer_that_does_not_fit_is_a_note_and_leaves_no_vocabulary(text, words, tmp_path):
    texts = {} if text is None else {"tokenizer": text}
    source = write_folder(tmp_path / "hf", model_tensors(), {"vocab_size": V, "tie_word_embeddings": False}, **texts)
    (note,) = from_hugging_face(source, tmp_path / "ours").notes
    assert words in note
    assert not (tmp_path / "ours" / "vocabulary.json").exists()


def test_several_files_with_an_index_are_one_model(tmp_path):
    tensors = model_tensors()
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": False})
    from_hugging_face(source, tmp_path / "ours", tp_size=2)
    to_hugging_face(tmp_path / "ours", tmp_path / "back", max_shard_bytes=200)
    names = sorted(path.name for path in (tmp_path / "back").iterdir())
    assert names == ["config.json", *[f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)],
                     "model.safetensors.index.json"]  # fmt: skip
    from_hugging_face(tmp_path / "back", tmp_path / "again", tp_size=3)
    stored = open_checkpoint(tmp_path / "again")
    assert all(same(stored.read(f"model.{name}"), tensor) for name, tensor in tensors.items())


def tied_tensors(keys):
    tensors = model_tensors(head=False)
    table = tensors.pop(EMBEDDING)
    return {**tensors, **{key: table.clone() for key in keys}}


@pytest.mark.parametrize("keys", [(EMBEDDING,), (EMBEDDING, HEAD), (HEAD,)])
@pytest.mark.parametrize("said", [{"tie_word_embeddings": True}, {}, {"text_config": {"tie_word_embeddings": True}}])
def test_a_tied_weight_is_one_key_and_a_tie_however_the_files_hold_it(keys, said, tmp_path):
    tensors = tied_tensors(keys)
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, **said})
    done = from_hugging_face(source, tmp_path / "ours", tp_size=2)
    assert done.tables == (EMBEDDING,) and done.ties == {HEAD: EMBEDDING}
    stored = open_checkpoint(tmp_path / "ours")
    assert f"model.{HEAD}" not in stored.tensors
    assert same(stored.read(f"model.{EMBEDDING}"), tensors[keys[0]])
    assert Manifest.read(tmp_path / "ours").tying.tied
    to_hugging_face(tmp_path / "ours", tmp_path / "one")
    to_hugging_face(tmp_path / "ours", tmp_path / "both", tied="both")
    one, both = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "both"))
    assert set(one) == set(tied_tensors([EMBEDDING])) and set(both) == {*one, HEAD}
    assert same(one[EMBEDDING], tensors[keys[0]]) and same(both[HEAD], both[EMBEDDING])
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings")) is True


def test_a_name_that_save_model_noted_is_the_ties_alias(tmp_path):
    source = write_folder(
        tmp_path / "hf", tied_tensors([HEAD]), {"vocab_size": V, "tie_word_embeddings": True},
        metadata={"backbone.emb.weight": HEAD},
    )  # fmt: skip
    assert from_hugging_face(source, tmp_path / "ours").ties == {HEAD: "backbone.emb.weight"}


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens.weight", "lm_head.weight"),
        ("model.language_model.embed_tokens.weight", "lm_head.weight"),
        ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
        ("transformer.wte.weight", "lm_head.weight"),
        ("transformer.word_embeddings.weight", "lm_head.weight"),
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("biogpt.embed_tokens.weight", "output_projection.weight"),
        ("backbone.embeddings.weight", "lm_head.weight"),
        ("tok_embeddings.weight", "output.weight"),
        ("embedding.word_embeddings.weight", "output_layer.weight"),
    ],
)
def test_tables_are_found_by_the_names_of_the_field(embedding, head, tmp_path):
    tensors = {embedding: torch.randn(V, D), head: torch.randn(V, D), head.replace("weight", "bias"): torch.randn(V),
               "h.0.attention.output.dense.weight": torch.randn(V, D), "h.wpe.weight": torch.randn(V, D)}  # fmt: skip
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": False})
    assert from_hugging_face(source, tmp_path / "ours").tables == (embedding, head, head.replace("weight", "bias"))


def test_a_model_without_a_head_has_one_table_and_no_tie(tmp_path):
    source = write_folder(
        tmp_path / "hf", model_tensors(head=False),
        {"vocab_size": V, "tie_word_embeddings": True, "architectures": ["LlamaModel"]},
    )  # fmt: skip
    done = from_hugging_face(source, tmp_path / "ours")
    assert done.tables == (EMBEDDING,) and done.ties == {}
    assert Manifest.read(tmp_path / "ours").head.head_key is None
    assert to_hugging_face(tmp_path / "ours", tmp_path / "back").notes == (), "a head made later is tied as said"
    config = {"vocab_size": V, "tie_word_embeddings": False, "architectures": ["LlamaForSequenceClassification"]}
    source = write_folder(tmp_path / "score", model_tensors(head=False) | {"score.weight": torch.randn(2, D)}, config)
    assert from_hugging_face(source, tmp_path / "scored").ties == {}


@pytest.mark.parametrize(
    ("other", "embedding", "head"),
    [
        ("cls.predictions.transform.dense.weight", "bert.embeddings.word_embeddings.weight",
         "cls.predictions.decoder.weight"),
        ("lm_head.dense.weight", "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        ("predictions.dense.weight", "albert.embeddings.word_embeddings.weight", "predictions.decoder.weight"),
        ("generator_predictions.dense.weight", "electra.embeddings.word_embeddings.weight", "generator_lm_head.weight"),
        ("model.encoder.conv1.weight", "model.decoder.embed_tokens.weight", "proj_out.weight"),
        ("x", "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
        ("x", "transformer.word_embedding.weight", "lm_head.weight"),
    ],
)  # fmt: skip
def test_the_head_of_a_tied_model_has_the_name_that_its_architecture_gives_it(other, embedding, head, tmp_path):
    tensors = {embedding: torch.randn(V, D), other: torch.randn(2, 2)}
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": True})
    assert from_hugging_face(source, tmp_path / "ours").ties == {head: embedding}


def test_an_encoders_and_a_decoders_copies_of_what_they_share_are_ties_if_they_are_equal(tmp_path):
    table, copies = torch.randn(V, D), ("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
    tensors = {**{name: table.clone() for name in copies}, "lm_head.weight": torch.randn(V, D), "shared.weight": table}
    config = {"vocab_size": V, "tie_word_embeddings": False}
    source = write_folder(tmp_path / "hf", tensors, config)
    done = from_hugging_face(source, tmp_path / "ours")
    assert done.tables == ("shared.weight", "lm_head.weight") and done.ties == dict.fromkeys(copies, "shared.weight")
    assert Manifest.read(tmp_path / "ours").head.head_key == "lm_head.weight"
    assert to_hugging_face(tmp_path / "ours", tmp_path / "back").notes == ()
    to_hugging_face(tmp_path / "ours", tmp_path / "one", tied="one")
    assert set(load_file(tmp_path / "one" / "model.safetensors")) == {"shared.weight", "lm_head.weight"}
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(tensors) and all(same(back[name], tensor) for name, tensor in tensors.items())
    del tensors["lm_head.weight"]
    from_hugging_face(write_folder(tmp_path / "tied", tensors, {"vocab_size": V}), tmp_path / "one table")
    assert Manifest.read(tmp_path / "one table").head.head_key == "lm_head.weight"
    tensors["decoder.embed_tokens.weight"] = table + 1
    source = write_folder(tmp_path / "other", tensors, config)
    refused(["not clear", "shared.weight", copies[0], "--tables"], from_hugging_face, source, tmp_path / "x")


def test_the_tables_of_layers_that_predict_further_tokens_are_ties(tmp_path):
    tensors = model_tensors()
    copies = {"model.layers.9.embed_tokens.weight": EMBEDDING, "model.layers.9.shared_head.head.weight": HEAD}
    tensors = {**{copy: tensors[name].clone() for copy, name in copies.items()}, **tensors}
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": False})
    done = from_hugging_face(source, tmp_path / "ours")
    assert done.tables == (EMBEDDING, HEAD) and done.ties == copies
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert set(load_file(tmp_path / "back" / "model.safetensors")) == set(tensors)


def test_a_tensor_with_a_column_for_each_id_is_named_in_a_note(tmp_path):
    tensors = model_tensors() | {"final_logits_bias": torch.zeros(1, V)}
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": False})
    assert "final_logits_bias [1, 9] is no table" in from_hugging_face(source, tmp_path / "ours").notes[0]


def test_a_tie_to_a_name_that_another_tensor_has_is_refused(tmp_path):
    source = write_folder(tmp_path / "hf", model_tensors(), {"vocab_size": V})
    refused([EMBEDDING, HEAD, "of its own"], from_hugging_face, source, tmp_path / "ours", tables=[EMBEDDING])


def test_numbers_that_a_dtype_cannot_hold_are_refused_and_nothing_is_left(tmp_path):
    config = {"vocab_size": V, "tie_word_embeddings": False}
    tensors = model_tensors() | {"model.w": torch.tensor([1.0, 7e4, float("inf")])}
    source = write_folder(tmp_path / "hf", tensors, config)
    from_hugging_face(source, tmp_path / "ours")
    words = ["model.w", "70000", "float16"]
    refused(words, from_hugging_face, source, tmp_path / "x", dtype=torch.float16)
    refused(words, to_hugging_face, tmp_path / "ours", tmp_path / "x", dtype=torch.float16)
    tensors["model.w"] = torch.ones(4).to(torch.float8_e4m3fn)
    source = write_folder(tmp_path / "eight", tensors, config)
    refused(["model.w", "scales", "--dtype"], from_hugging_face, source, tmp_path / "x", dtype=torch.bfloat16)
    quantised = {**config, "quantization_config": {"quant_method": "gptq"}}
    source = write_folder(tmp_path / "scaled", model_tensors(), quantised)
    from_hugging_face(source, tmp_path / "scaled ours")
    for call, at in ((from_hugging_face, source), (to_hugging_face, tmp_path / "scaled ours")):
        refused(["quantization_config", "--dtype"], call, at, tmp_path / "x", dtype=torch.bfloat16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eight", "hf", "ours", "scaled", "scaled ours"]


def test_a_scale_of_the_logits_is_in_the_manifest_and_must_be_a_number(tmp_path):
    config = {"vocab_size": V, "tie_word_embeddings": False, "logit_scale": 0.5, "final_logit_softcapping": 30}
    source = write_folder(tmp_path / "hf", model_tensors(), config)
    from_hugging_face(source, tmp_path / "ours")
    head = Manifest.read(tmp_path / "ours").head
    assert (head.scale, head.softcap) == (0.5, 30.0)
    for scale in ("0.5", float("nan"), 10**400):
        (source / "config.json").write_text(json.dumps({**config, "logit_scale": scale}))
        refused(["logit_scale", "positive number"], from_hugging_face, source, tmp_path / "x")


def test_a_vocabulary_size_in_the_text_section_counts_before_that_of_the_top(tmp_path):
    config = {"vocab_size": 12, "text_config": {"vocab_size": V, "tie_word_embeddings": False}}
    source = write_folder(tmp_path / "hf", model_tensors(rows=12), config)
    assert from_hugging_face(source, tmp_path / "ours").vocab_size == V


def test_other_tensors_are_spread_over_the_files(tmp_path):
    trunk = {f"model.layers.{at}.weight": torch.randn(5, D) for at in range(4)}
    tensors = model_tensors() | trunk
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": False})
    from_hugging_face(source, tmp_path / "ours", tp_size=4, multiple_of=1)
    pieces = open_checkpoint(tmp_path / "ours").pieces
    assert len({pieces[f"model.{name}"][0].file for name in trunk}) == 4


def test_two_equal_tables_of_an_untied_model_stay_two(tmp_path):
    source = write_folder(
        tmp_path / "hf", tied_tensors([EMBEDDING, HEAD]), {"vocab_size": V, "tie_word_embeddings": False}
    )
    assert from_hugging_face(source, tmp_path / "ours").tables == (EMBEDDING, HEAD)


def test_a_tie_that_does_not_hold_is_refused_with_both_names(tmp_path):
    tied = {"vocab_size": V, "tie_word_embeddings": True}
    tensors = tied_tensors([EMBEDDING, HEAD])
    tensors[HEAD][V - 1, 0] += 1
    source = write_folder(tmp_path / "hf", tensors, tied)
    refused([EMBEDDING, HEAD, "two different tensors"], from_hugging_face, source, tmp_path / "ours")
    tensors[HEAD] = tensors[EMBEDDING].double()
    source = write_folder(tmp_path / "other dtype", tensors, tied)
    refused([EMBEDDING, HEAD], from_hugging_face, source, tmp_path / "ours")
    source = write_folder(tmp_path / "apart", tied_tensors([EMBEDDING]), tied | {"tie_word_embeddings": False})
    refused([EMBEDDING, "only table", "not tied"], from_hugging_face, source, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_padding_rows_are_left_out_with_a_note(tmp_path):
    tensors = model_tensors(rows=12)
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": 12, "tie_word_embeddings": False})
    done = from_hugging_face(source, tmp_path / "ours", vocab_size=V, tp_size=2)
    assert "3 rows past vocab_size 9 are padding" in done.notes[0]
    assert same(open_checkpoint(tmp_path / "ours").read(f"model.{HEAD}"), tensors[HEAD][:V])
    source = write_folder(tmp_path / "config", tensors, {"vocab_size": 10, "tie_word_embeddings": False})
    assert from_hugging_face(source, tmp_path / "ten").vocab_size == 10
    back = to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert back.notes == ("config.json: vocab_size 12 is now 9",)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == V
    assert len(load_file(tmp_path / "back" / "model.safetensors")[EMBEDDING]) == V


def test_padding_that_differs_does_not_break_a_tie(tmp_path):
    tensors = {EMBEDDING: torch.randn(12, D)}
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][V:] = 0
    source = write_folder(tmp_path / "hf", tensors, {"vocab_size": V, "tie_word_embeddings": True})
    assert from_hugging_face(source, tmp_path / "ours").ties == {HEAD: EMBEDDING}


def test_tables_that_cannot_be_told_are_refused_with_the_candidates_and_taken_as_named(tmp_path):
    call, config = from_hugging_face, {"vocab_size": V, "tie_word_embeddings": False}
    strange = write_folder(tmp_path / "strange", {"in.table": torch.randn(V, D), "out.table": torch.randn(V, D),
                                                  "x": torch.randn(2)}, config)  # fmt: skip
    refused(["no table is known", "--tables", "in.table [9, 4], out.table [9, 4]"], call, strange, tmp_path / "ours")
    assert call(strange, tmp_path / "named", tables=["out.table", "in.table"]).tables == ("out.table", "in.table")
    refused(["no table nothing", "in.table"], call, strange, tmp_path / "ours", tables=["nothing"])
    two = {"encoder.embed_tokens.weight": torch.randn(V, D), "decoder.embed_tokens.weight": torch.randn(V, D)}
    source = write_folder(tmp_path / "two", two, config)
    refused(["not clear", *two], call, source, tmp_path / "ours")
    uneven = model_tensors() | {HEAD: torch.randn(V + 1, D)}
    source = write_folder(tmp_path / "uneven", uneven, config)
    refused(["not clear", "[9, 4]", "[10, 4]"], call, source, tmp_path / "ours")
    assert call(source, tmp_path / "apart", tables=[EMBEDDING, HEAD]).notes[0].startswith("1 rows past")
    source = write_folder(tmp_path / "short", model_tensors(), {**config, "vocab_size": 11})
    refused([EMBEDDING, "9 rows", "11 ids", "--vocab-size"], call, source, tmp_path / "ours")
    refused(["9 rows", "11 ids"], call, source, tmp_path / "ours", tables=[EMBEDDING, HEAD])
    refused(["named twice"], call, source, tmp_path / "ours", tables=[EMBEDDING, EMBEDDING])
    source = write_folder(tmp_path / "silent", model_tensors(), {"tie_word_embeddings": False})
    refused(["config.json has no vocab_size", "--vocab-size"], call, source, tmp_path / "ours")
    assert call(source, tmp_path / "told", vocab_size=V).vocab_size == V
    assert not (tmp_path / "ours").exists()


def test_a_directory_that_cannot_be_read_is_refused(tmp_path):
    config = {"vocab_size": V, "tie_word_embeddings": False}
    source = write_folder(tmp_path / "hf", model_tensors(), config)
    with pytest.raises(LayoutError):
        from_hugging_face(source, tmp_path / "ours", tp_size=0)
    for text, words in (("{", "not JSON"), ("[]", "no JSON object"), ("[" * 10_000, "not JSON")):
        (source / "config.json").write_text(text)
        refused(["config.json", words], from_hugging_face, source, tmp_path / "ours")
    (source / "config.json").unlink()
    refused(["config.json"], from_hugging_face, source, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_dtype_converts_floating_point_tensors_as_torch_does(tmp_path):
    tensors = model_tensors() | {"model.ids": torch.tensor([1, 2])}
    config = {"vocab_size": V, "tie_word_embeddings": False, "dtype": "float32"}
    source = write_folder(tmp_path / "hf", tensors, config)
    from_hugging_face(source, tmp_path / "half", dtype=torch.bfloat16)
    from_hugging_face(source, tmp_path / "full")
    done = to_hugging_face(tmp_path / "full", tmp_path / "back", dtype=torch.float16)
    stored, back = open_checkpoint(tmp_path / "half"), load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in tensors.items():
        own = tensor.is_floating_point()
        assert same(stored.read(f"model.{name}"), tensor.to(torch.bfloat16) if own else tensor), name
        assert same(back[name], tensor.to(torch.float16) if own else tensor), name
    assert done.notes == ('config.json: dtype "float32" is now "float16"',)


def write_ours(folder, *, ties=None, rows=V, extra_state=True):
    table = torch.randn(rows, D)
    tensors = {f"model.{EMBEDDING}": Rows.of(table, 0, rows), "model.w": torch.randn(2)}
    if extra_state:
        tensors[f"optimizer.{EMBEDDING}.exp_avg"] = Rows.of(table * 2, 0, rows)
    state = make_state(
        3, tensors, layout={"vocab_size": rows, "padded_size": 12, "tp_size": 1}, tables=[EMBEDDING], ties=ties
    )
    write_checkpoint(folder, [tensors], state=state)
    return table


def test_a_checkpoint_that_never_was_such_a_directory_is_written_with_a_config_that_is_given(tmp_path):
    table = write_ours(tmp_path / "ours", ties={HEAD: EMBEDDING})
    done = to_hugging_face(tmp_path / "ours", tmp_path / "bare")
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["model.safetensors"]
    assert "came without config.json" in done.notes[0] and "1 tensors of the optimizer" in done.notes[1]
    assert same(load_file(tmp_path / "bare" / "model.safetensors")[EMBEDDING], table)
    config = {"vocab_size": 12, "tie_word_embeddings": False, "text_config": {"vocab_size": 50, "hidden_size": D}}
    given = write_folder(tmp_path / "given", {"x": table}, config)
    for path, name in ((given, "one"), (given / "config.json", "two")):
        notes = to_hugging_face(tmp_path / "ours", tmp_path / name, config=path).notes
        made = json.loads((tmp_path / name / "config.json").read_text())
        assert made == {"architectures": ["LlamaForCausalLM"], "vocab_size": V, "tie_word_embeddings": True,
                        "text_config": {"vocab_size": V, "hidden_size": D}}  # fmt: skip
        assert "config.json: text_config.vocab_size 50 is now 9" in notes


def test_a_tie_within_the_trunk_is_no_tie_of_the_embedding(tmp_path):
    table = write_ours(tmp_path / "ours", ties={"again.w": "w"})
    given = write_folder(tmp_path / "given", {"x": table}, {"vocab_size": V, "tie_word_embeddings": False})
    to_hugging_face(tmp_path / "ours", tmp_path / "back", config=given)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False


def test_what_cannot_be_written_is_refused_and_nothing_is_left(tmp_path, monkeypatch):
    write_ours(tmp_path / "ours")
    call = to_hugging_face
    refused(["tied=one", "two weights"], call, tmp_path / "ours", tmp_path / "x", tied="one")
    write_ours(tmp_path / "tied", ties={HEAD: EMBEDDING})
    refused(["tied=three", "one or both"], call, tmp_path / "tied", tmp_path / "x", tied="three")
    refused(["not a whole checkpoint"], call, tmp_path, tmp_path / "x")
    refused(["cannot read"], call, tmp_path / "ours", tmp_path / "x", config=tmp_path / "none.json")
    file = tmp_path / "tied" / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    refused(["damaged", "__0_0.distcp"], call, tmp_path / "tied", tmp_path / "x")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vocab_parallel.checkpoint.exchange.hugging_face.write_safetensors", full)
    with pytest.raises(OSError, match="No space left"):
        call(tmp_path / "ours", tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "tied"]


def test_a_target_that_is_there_stays_unless_it_is_to_be_replaced(tmp_path):
    source = write_folder(tmp_path / "hf", model_tensors(), {"vocab_size": V, "tie_word_embeddings": False})
    from_hugging_face(source, tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    (tmp_path / "back" / "mine").write_text("kept")
    refused(["ours exists", "--overwrite"], from_hugging_face, source, tmp_path / "ours")
    refused(["back exists", "--overwrite"], to_hugging_face, tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "mine").exists()
    from_hugging_face(source, tmp_path / "ours", overwrite=True, step=5)
    to_hugging_face(tmp_path / "ours", tmp_path / "back", overwrite=True)
    assert open_checkpoint(tmp_path / "ours").step == 5 and not (tmp_path / "back" / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "ours"]
    again = {"overwrite": True}
    refused(["holds", "nothing is replaced"], from_hugging_face, source, source, **again)
    refused(["holds", "nothing is replaced"], to_hugging_face, tmp_path / "ours", tmp_path, **again)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    refused(["no checkpoint", "thesis.tex"], from_hugging_face, source, tmp_path / "home", **again)
    refused(["no folder"], from_hugging_face, source, tmp_path / "home" / "thesis.tex", **again)
    (tmp_path / "link").symlink_to(tmp_path / "back")
    refused(["no folder"], from_hugging_face, source, tmp_path / "link", **again)


def test_an_ordered_table_without_a_tokenizer_goes_along(tmp_path):
    write_ours(tmp_path / "ours")
    state = json.loads((tmp_path / "ours" / "state.json").read_text())
    (tmp_path / "ours" / "vocabulary.json").write_text("{}")
    to_hugging_face(tmp_path / "ours", tmp_path / "unlisted")
    assert not (tmp_path / "unlisted" / "vocabulary.json").exists(), "nobody has its hash"
    state["files"]["vocabulary.json"] = {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
    state.pop("sha256", None)
    (tmp_path / "ours" / "state.json").write_text(json.dumps(state))
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "vocabulary.json").read_text() == "{}"


def test_an_ordered_table_that_went_along_comes_back_with_no_word_of_a_loss(tmp_path):
    source = write_folder(
        tmp_path / "hf", model_tensors(), {"vocab_size": V, "tie_word_embeddings": False}, tokenizer=byte_tokenizer()
    )
    identity = read_vocabulary(source)
    (source / "tokenizer.json").unlink()
    identity.write(source / "vocabulary.json")
    assert from_hugging_face(source, tmp_path / "ours").notes == ()
    assert read_vocabulary(tmp_path / "ours" / "vocabulary.json") == identity


def test_tables_and_ties_that_are_not_what_the_state_says_are_refused(tmp_path):
    write_ours(tmp_path / "ours")
    path = tmp_path / "ours" / "state.json"
    state = json.loads(path.read_text())
    for change, words in (
        ({"tables": ["nothing"]}, ["nothing", "9 rows", "there is none"]),
        ({"layout": {"vocab_size": 5, "padded_size": 12, "tp_size": 1}}, [EMBEDDING, "5 rows", "[9, 4]"]),
        ({"ties": {HEAD: "nothing"}}, [HEAD, "nothing", "damaged"]),
        ({"ties": {"w": EMBEDDING}}, ["ties w", EMBEDDING, "of its own"]),
    ):
        path.write_text(json.dumps(state | change))
        refused(words, to_hugging_face, tmp_path / "ours", tmp_path / "back", tied="both" if "ties" in change else None)


def test_a_name_in_a_checkpoint_never_leaves_the_directory(tmp_path):
    write_ours(tmp_path / "ours")
    path = tmp_path / "ours" / "state.json"
    state = json.loads(path.read_text())
    (tmp_path / "secret.tiktoken").write_text("secret")
    state["files"] |= {f"assets/{name}": {} for name in ("../../secret.tiktoken", "/etc/x.tiktoken", "a/b.tiktoken")}
    path.write_text(json.dumps(state))
    refused(["../../secret.tiktoken is no name of a file"], to_hugging_face, tmp_path / "ours", tmp_path / "back")
    to_hugging_face(tmp_path / "ours", tmp_path / "back", verify=False)
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["model.safetensors"]


def _both_ways(source, folder):
    from_hugging_face(source, f"{folder}/ours", tp_size=2)
    to_hugging_face(f"{folder}/ours", f"{folder}/back")


@pytest.mark.parametrize("rows", [131_072, 262_144])
def test_peak_memory_of_both_ways_is_under_1_3_of_one_shard(rows, tmp_path, capsys):
    for name, size in (("small", 1_000), ("large", rows)):
        table = torch.randn(size, 64)
        tensors = {EMBEDDING: table, HEAD: table.clone(), "model.trunk.weight": torch.randn(size // 8, 64)}
        write_folder(tmp_path / name, tensors, {"vocab_size": size, "tie_word_embeddings": True})
        (tmp_path / f"{name} out").mkdir()
    small, large = ((str(tmp_path / name), str(tmp_path / f"{name} out")) for name in ("small", "large"))
    added = added_memory(_both_ways, *large, warm_up=small)
    shard = rows // 2 * 64 * 4
    with capsys.disabled():
        print(f"\n{rows:,} rows, shard {shard / 1e6:.1f} MB: {added.resident / 1e6:.1f} MB added, "
              f"{added.private / 1e6:.1f} of them no file's")  # fmt: skip
    assert max(added) < 1.3 * shard
    assert max(added) < 24e6, "whatever the size"
