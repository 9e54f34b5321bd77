"""One vocabulary has one table whatever file it is read from, and a broken file is named, not obeyed."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from vocab_parallel.app.vocabulary import tekken_path
from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary import VocabIdentity, VocabMap, byte_identity, old_encoder, read_vocabulary

TEXT = [
    "The table of a vocabulary is ordered: each id is one token, and a row belongs to an id.",
    "Größe, déjà vu, naïve, 日本語のテキスト, emoji 🙂🙃, tabs\tand  spaces, a newline\nand numbers 12 345.",
    "def first_difference(a, b):\n    return next((i for i in range(len(a)) if a[i] != b[i]), None)",
] * 4


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """A trained byte-level BPE, as its file's JSON: a special token inside, one past the end, and a plain added one."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(["<|übung|>"])
    tokenizer.add_tokens(["Ġliteral"])
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


@pytest.fixture(scope="module")
def piece_models() -> dict[str, bytes]:
    """SentencePiece models trained here: BPE with byte fallback, unigram without."""
    import sentencepiece

    found = {}
    for name, options in {
        "bpe": {"byte_fallback": True, "user_defined_symbols": ["<tool>", "two words"], "pad_id": 3},
        "unigram": {"vocab_size": 150, "hard_vocab_limit": False},
    }.items():
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT), model_writer=out, model_type=name, minloglevel=2, num_threads=1,
            normalization_rule_name="identity", **{"vocab_size": 380, **options},
        )  # fmt: skip
        found[name] = out.getvalue()
    return found


def written(folder: Path, data: object, name: str = "tokenizer.json") -> Path:
    path = folder / name
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_byte_level_tokens_are_the_bytes_that_they_decode_to(byte_level: dict[str, Any], tmp_path: Path) -> None:
    identity = read_vocabulary(written(tmp_path, byte_level))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(byte_level))
    assert identity.size == tokenizer.get_vocab_size() == 332 and identity.source == "tokenizer.json"
    for text in TEXT:
        ids = tokenizer.encode(text).ids
        assert b"".join(identity.tokens[token_id] for token_id in ids) == f" {text}".encode()
    assert identity.tokens[tokenizer.token_to_id("Ġa")] == b" a"
    single = {token for token in identity.tokens if len(token) == 1}
    assert single == {bytes([byte]) for byte in range(256)} and len(identity.duplicates()) == 0


def test_added_tokens_are_their_text_inside_the_vocabulary_and_past_it(
    byte_level: dict[str, Any], tmp_path: Path
) -> None:
    identity = read_vocabulary(written(tmp_path, byte_level))
    # Added text is matched as it stands: its Ġ is a Ġ, not a space.
    assert [identity.named(token_id) for token_id in (0, 330, 331)] == [
        "special '<|end|>'", "special '<|übung|>'", "'Ġliteral'",
    ]  # fmt: skip
    assert identity.added == (0, 330, 331) and set(identity.kinds) == {"special", "normal"}


def test_holes_in_the_ids_are_unused(tmp_path: Path) -> None:
    identity = read_vocabulary(written(tmp_path, small({"a": 0, "b": 5}, added_tokens=[added_token(2, "<x>")])))
    assert identity.kinds == ("normal", "unused", "special", "unused", "unused", "normal") and identity.added == (2,)
    assert identity.tokens == (b"a", b"", b"<x>", b"", b"", b"b")
    padded = read_vocabulary(tmp_path / "tokenizer.json", size=8)
    assert padded.size == 8 and padded.kinds[6:] == ("unused",) * 2


def test_added_tokens_have_the_ids_that_the_library_gives_them_or_are_refused(tmp_path: Path) -> None:
    chance, outcomes = random.Random(0), [0, 0]
    for _ in range(150):
        names = chance.sample(["a", "b", "c", "<x>", "<y>"], chance.randint(1, 4))
        words = dict(zip(names, chance.sample(range(len(names) + 1), len(names)), strict=True))
        ids = chance.sample(range(len(names) + 3), chance.randint(0, 3))
        added = [added_token(token_id, chance.choice(["<x>", "<y>", "<z>", "a"])) for token_id in sorted(ids)]
        parsed = small(words, added_tokens=added, version="1.0")
        parsed["model"]["merges"] = []
        library = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        fits = all(library.token_to_id(one["content"]) == one["id"] for one in added)
        lost = {words[name] for name in names} & {one["id"] for one in added if words.get(one["content"]) != one["id"]}
        path = written(tmp_path, parsed)
        outcomes[fits and not lost] += 1
        if fits and not lost:
            assert read_vocabulary(path).size == 1 + max(library.get_vocab(True).values())
        else:
            with pytest.raises(VocabularyError, match="added_tokens"):
                read_vocabulary(path)
    assert min(outcomes) > 20  # both happen


def test_the_files_beside_a_tokenizer_give_the_roles(byte_level: dict[str, Any], tmp_path: Path) -> None:
    alone = read_vocabulary(written(tmp_path, byte_level))
    config = {"bos_token": {"content": "<|end|>"}, "add_bos_token": True, "num_image_token": 256, "unk_token": None,
              "image_token": "<image>"}  # fmt: skip
    written(tmp_path, config, "tokenizer_config.json")
    names = {"bos_token": "other", "eos_token": "<|übung|>", "additional_special_tokens": ["<|end|>"]}
    written(tmp_path, names, "special_tokens_map.json")
    folder = read_vocabulary(tmp_path)
    assert folder.special_ids == {"bos": 0, "eos": 330} and alone.special_ids == {}
    assert folder.sha256 == alone.sha256
    assert read_vocabulary(tmp_path, special_ids={"pad": 5}).special_ids == {"pad": 5}
    written(tmp_path, {"pad_token": "<pad>"}, "special_tokens_map.json")
    with pytest.raises(
        VocabularyError, match=r"the pad token '<pad>' of the files beside it is no token here.*save_pr"
    ):
        read_vocabulary(tmp_path)
    for beside in ({"additional_special_tokens": ["<pad>"]}, {"added_tokens_decoder": {"332": {"content": "<pad>"}}}):
        written(tmp_path, beside, "special_tokens_map.json")
        with pytest.raises(VocabularyError, match=r"the added token '<pad>' of the files beside it is no token here"):
            read_vocabulary(tmp_path)
    with pytest.raises(VocabularyError, match=r"special id pad is 400; expected an id in \[0, 332\)"):
        read_vocabulary(tmp_path / "tokenizer.json", special_ids={"pad": 400})


def as_tokenizer_json(model: bytes, form: str) -> dict[str, Any]:
    """The pieces of a SentencePiece model as a tokenizer.json, the way Transformers converts one."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(pieces.get_piece_size())
    words = [pieces.id_to_piece(token_id) for token_id in ids]
    control = [token_id for token_id in ids if pieces.is_control(token_id) or pieces.is_unknown(token_id)]
    plain = [token_id for token_id in ids if words[token_id] in ("<tool>", "two▁words")]
    added = [{"id": token_id, "content": words[token_id], "special": token_id in control, "single_word": False,
              "lstrip": False, "rstrip": False, "normalized": False} for token_id in [*control, *plain]]  # fmt: skip
    if form == "Unigram":
        scores = [[word, pieces.get_score(token_id)] for token_id, word in zip(ids, words, strict=True)]
        part: dict[str, Any] = {"type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": True}
        steps: dict[str, Any] = {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}}
    else:
        vocab = {word: token_id for token_id, word in zip(ids, words, strict=True)}
        part = {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": [], "byte_fallback": True}
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        sequence = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]}
        steps = {"normalizer": sequence, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}
    return {"version": "1.0", "added_tokens": added, **steps, "model": part}


@pytest.mark.parametrize(("name", "form"), [("bpe", "BPE"), ("bpe", "Unigram"), ("unigram", "Unigram")])
def test_a_sentencepiece_model_and_the_same_pieces_in_a_tokenizer_json_are_one_vocabulary(
    name: str, form: str, piece_models: dict[str, bytes], tmp_path: Path
) -> None:
    model = read_vocabulary(written(tmp_path, piece_models[name], "tokenizer.model"))
    parsed = as_tokenizer_json(piece_models[name], form)
    tokenizers.Tokenizer.from_str(json.dumps(parsed))  # the library takes it
    table = read_vocabulary(written(tmp_path, parsed))
    assert model.sha256 == table.sha256 and model.source == "sentencepiece" != table.source
    assert b" the" in model.tokens or b" a" in model.tokens
    assert model.special_ids == {"unk": 0, "bos": 1, "eos": 2, **({"pad": 3} if name == "bpe" else {})}
    if name == "bpe":
        assert model.kinds.count("byte") == 256 and (b"A", "byte") in zip(model.tokens, model.kinds, strict=True)
        assert (b"two words", "normal") in zip(model.tokens, model.kinds, strict=True)


def test_a_tiktoken_table_and_the_same_tokens_in_a_tokenizer_json_are_one_vocabulary(
    byte_level: dict[str, Any], tmp_path: Path
) -> None:
    parsed = {**byte_level, "added_tokens": [entry for entry in byte_level["added_tokens"] if entry["special"]]}
    table = read_vocabulary(written(tmp_path, parsed))
    lines = [f"{base64.b64encode(token).decode()} {token_id}" for token_id, token in enumerate(table.tokens)
             if table.kinds[token_id] == "normal"]  # fmt: skip
    path = written(tmp_path, "\r\n".join(lines).encode(), "some.tiktoken")
    found = read_vocabulary(path, special_tokens={"<|end|>": 0, "<|übung|>": 330})
    assert found.sha256 == table.sha256 and found.added == (0, 330) and found.source == "tiktoken"
    assert read_vocabulary(path).kinds[0] == "unused"
    with pytest.raises(VocabularyError, match=r"special token '<x>': id 1 is .* in an earlier entry"):
        read_vocabulary(path, special_tokens={"<x>": 1})
    with pytest.raises(VocabularyError, match=r"special_tokens are for .tiktoken tables; this is tokenizer.json"):
        read_vocabulary(tmp_path / "tokenizer.json", special_tokens={"<x>": 1})


def tekken(special: object = None, **config: int) -> dict[str, Any]:
    """Three special ids, then 6 of the file's 8 ranks."""
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(bytes([97 + rank])).decode()} for rank in range(8)]
    sizes = {"default_vocab_size": 9, "default_num_special_tokens": 3, "pattern": "."}
    extra = {} if special is None else {"special_tokens": special}
    return {"config": {**sizes, **config}, "vocab": vocab, **extra}


def test_tekken_has_special_ids_first_and_no_more_ids_than_its_size(tmp_path: Path) -> None:
    found = read_vocabulary(written(tmp_path, tekken(), "tekken.json"))
    assert found.tokens == (b"<unk>", b"<s>", b"</s>", b"a", b"b", b"c", b"d", b"e", b"f")
    assert found.kinds == ("special",) * 3 + ("normal",) * 6
    assert found.special_ids == {"unk": 0, "bos": 1, "eos": 2}
    listed = tekken([{"rank": 1, "token_str": "<pad>", "is_control": True}])
    found = read_vocabulary(written(tmp_path, listed, "tekken.json"))
    assert found.tokens[:3] == (b"<SPECIAL_0>", b"<pad>", b"<SPECIAL_2>") and found.special_ids == {"pad": 1}


@pytest.fixture(scope="module")
def mistral() -> VocabIdentity:
    """The Tekken file of mistral-common."""
    return read_vocabulary(tekken_path())


def test_the_tekken_file_of_mistral_common_reads_whole(mistral: VocabIdentity) -> None:
    found = mistral
    assert found.size == 131_072 and found.kinds.count("special") == 1_000 and found.duplicates() == []
    assert found.tokens[1000:1256] == tuple(bytes([byte]) for byte in range(256))
    assert (found.named(3), found.named(11), found.named(20)) == (
        "special '[INST]'", "special '<pad>'", "special '<SPECIAL_20>'",
    )  # fmt: skip


def test_word_pieces_keep_the_mark_that_tells_a_word_from_its_rest(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "ing": 1, "##ing": 2, "▁": 3}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocab}
    found = read_vocabulary(written(tmp_path, {"added_tokens": [], "model": model}))
    assert found.tokens == (b"[UNK]", b"ing", b"##ing", "▁".encode()) and found.special_ids == {"unk": 0}
    assert found.kinds == ("special", "normal", "normal", "normal")


def test_plain_bytes_and_the_own_file_read_back(tmp_path: Path) -> None:
    identity = byte_identity()
    assert identity.size == 259 and identity.tokens[3:] == tuple(bytes([byte]) for byte in range(256))
    identity.write(tmp_path / "vocabulary.json")
    assert read_vocabulary(tmp_path) == identity and read_vocabulary(tmp_path).source == "bytes"


def test_the_format_is_told_by_the_content(
    byte_level: dict[str, Any], piece_models: dict[str, bytes], tmp_path: Path
) -> None:
    contents: Mapping[str, object] = {
        "tokenizer.json": byte_level, "sentencepiece": piece_models["bpe"], "tekken": tekken(), "tiktoken": b"YQ== 0\n",
    }  # fmt: skip
    for source, content in contents.items():
        assert read_vocabulary(written(tmp_path, content, "download")).source == source
    marked = b"\xef\xbb\xbf \n" + json.dumps(byte_level).encode()
    assert read_vocabulary(written(tmp_path, marked, "download")).source == "tokenizer.json"


def small(vocab: object = None, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json of two tokens."""
    return {
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1} if vocab is None else vocab},
    } | changes


def added_token(token_id: object, content: object) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def added(token_id: object, content: object = "<x>") -> dict[str, Any]:
    return small(added_tokens=[added_token(token_id, content)])


BROKEN: dict[str, tuple[object, str]] = {
    "cut JSON": (json.dumps(small())[:40].encode(), r"not JSON at line 1 column \d+: .*Is the file complete\?"),
    "not UTF-8": (b'{"model": "\xff"}', "not UTF-8 at byte 11"),
    "deep": (b'{"a":' * 200_000, "nested too deeply"),
    "deep list": (b'{"model": ' + b"[" * 200_000, "nested too deeply"),
    "a long number": (b'{"a": ' + b"9" * 5_000 + b"}", "not JSON: "),
    "a key twice": (b'{"model": {"vocab": {"a": 0, "a": 1}}}', "the key 'a' appears twice in one object"),
    "an id twice": (small({"a": 0, "b": 0}), "model.vocab: id 0 is both 'a' and 'b'"),
    "a negative id": (small({"a": -1}), r"model.vocab 'a': expected an id in \[0, 16,777,216\), found -1"),
    "a huge id": (small({"a": 10**12}), "model.vocab 'a': expected an id in .* found 1000000000000"),
    "an id far off": (small({"a": 0, "b": 10**7}), "2 tokens, but ids up to 10,000,000 .*is an id damaged"),
    "an id of text": (small({"a": "0"}), "model.vocab 'a': expected an id, found '0'"),
    "a true id": (small({"a": True}), "model.vocab 'a': expected an id, found True"),
    "a float id": (small({"a": 0.0}), "model.vocab 'a': expected an id, found 0.0"),
    "no tokens": (small({}), "no tokens in this tokenizer.json file"),
    "no vocab": ({"model": {}}, "model.vocab: expected an object or a list, found nothing"),
    "half a character": (small({"\ud800": 0}), r"model.vocab '\\ud800': .* is not Unicode text \(a lone surrogate\)"),
    "unigram junk": (small([["a", 0.0], "b"]), r"model.vocab\[1\]: expected \[piece, score\], found 'b'"),
    "added junk": (small(added_tokens=[3]), r"added_tokens\[0\]: expected an object, found 3"),
    "added without text": (added(2, None), r"added_tokens\[0\].content: expected a string, found nothing"),
    "unigram without its unknown": (
        {"model": {"vocab": [["a", 0.0]], "unk_id": [0]}},
        "model.unk_id: expected an integer, found a list of 1",
    ),
    "added at a negative id": (added(-2), "'<x>' has id -2, but the tokenizers library gives it id 2"),
    "added past a hole": (added(335), "'<x>' has id 335, but the tokenizers library gives it id 2 when it loads"),
    "added beside its own word": (added(2, "b"), "'b' has id 2, but the tokenizers library gives it id 1"),
    "more lists than a tokenizer has": (b'{"a": [' + b"[]," * 2**23 + b"0]}", "more than 8,388,608 lists and objects"),
    "added over another": (
        small({"a": 0, "b": 2}, added_tokens=[added_token(2, "<x>")]),
        "added_tokens: id 2 is '<x>' here and 'b' in model.vocab",
    ),
    "added twice": (
        small(added_tokens=[{"id": 2, "content": "<x>"}, {"id": 2, "content": "<y>"}]),
        r"added_tokens\[1\]: id 2 is both '<x>' and '<y>'",
    ),
    "JSON of something else": ({"hidden_size": 4}, "JSON with the keys 'hidden_size': no vocabulary; expected"),
    "text of something else": (b"once upon a time", "begins with b'once upon a time', which is no vocabulary"),
    "nothing": (b"", "begins with b'', which is no vocabulary"),
    "cut base64": (b"YQ== 0\nYg= 1\n", "line 2: expected base64 and a rank, found b'Yg= 1'"),
    "cut rank": (b"YQ== 0\nYg==", "line 2: expected base64 and a rank"),
    "a rank far off": (b"YQ== 99999999999\n", r"rank 99999999999: expected an id in"),
    "a rank twice": (b"YQ== 0\nYg== 0\n", "id 0 is b'b' here and b'a' in an earlier entry"),
    "a token twice": (b"YQ== 0\nYQ== 1\n", "line 2: b'a' has ranks 0 and 1"),
    "a model that claims 1 GB": (b"\n\x80\x80\x80\x80\x04" + b"x" * 50, "not a whole SentencePiece model"),
    "a model cut": (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0a", "not a whole SentencePiece model"),
    "tekken too small": (tekken(default_vocab_size=12), "default_vocab_size: 12, but 3 special ids and 8 entries"),
    "tekken huge": (tekken(default_num_special_tokens=10**9), r"default_num_special_tokens: 1000000000 outside"),
    "tekken negative": (tekken(default_num_special_tokens=-1), "default_num_special_tokens: -1 outside"),
    "tekken special": (
        tekken([{"rank": 3, "token_str": "x"}]),
        r"special_tokens\[0\]: rank 3 is outside the 3 special",
    ),
    "tekken ranks": (
        {**tekken(), "vocab": [{"rank": 0, "token_bytes": "YQ=="}] * 8},
        "each rank below 6 once, found 1",
    ),
    "tekken bytes": ({**tekken(), "vocab": [{"rank": 0, "token_bytes": "Y"}] * 8}, r"vocab\[0\]: expected base64"),
}


@pytest.mark.parametrize(("content", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_the_place(content: object, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(VocabularyError, match=message) as caught:
        read_vocabulary(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_folder_without_a_vocabulary_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"holds no tokenizer.json, .*vocabulary.json; .*save_pretrained"):
        read_vocabulary(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(VocabularyError, match=r"pipe is no regular file; expected a file"):
        read_vocabulary(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError, match=r"missing.json"):
        read_vocabulary(tmp_path / "missing.json")
    written(tmp_path, small())
    written(tmp_path, {"bos_token": 5}, "tokenizer_config.json")
    with pytest.raises(VocabularyError, match=r"tokenizer_config.json: bos_token: expected a string, found 5"):
        read_vocabulary(tmp_path)


def test_numbers_in_a_file_do_not_size_memory(tmp_path: Path) -> None:
    kinds = {**byte_identity().to_json(), "kinds": [["normal", 10**9]], "size": 10**9}
    far, special = small({"a": 0, "b": 16_000_000}), tekken(default_num_special_tokens=10**9)
    claims = [far, added(16_000_000), special, b"YQ== 16000000\n", kinds]
    paths = [written(tmp_path, claim, str(number)) for number, claim in enumerate(claims)]
    tracemalloc.start()
    try:
        for path in paths:
            with pytest.raises(VocabularyError):
                read_vocabulary(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_file_beyond_any_vocabulary_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(2**28 + 1)  # sparse
    with pytest.raises(VocabularyError, match=r"more than 268,435,456 bytes: no file of this kind is that large"):
        read_vocabulary(path)


def test_a_missing_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, byte_level: dict[str, Any], piece_models: dict[str, bytes], tmp_path: Path
) -> None:
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
    for package, content in {"sentencepiece": piece_models["bpe"], "tokenizers": byte_level, "tiktoken": ranks}.items():
        path = written(tmp_path, content)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(VocabularyError, match=f"pip install {package}"):
                old_encoder(path)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
SHAPES: list[dict[str, Any]] = [
    {**small(), "added_tokens": [{"id": 2, "content": "<x>", "special": True}], "pre_tokenizer": {"type": "Metaspace"},
     "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}]}},
    small([["a", 0.0], ["b", -1.0]]),
    tekken([{"rank": 1, "token_str": "<s>"}]),
    VocabIdentity.of_tokens([b"\xff", "b", "c"], special_ids={"bos": 1}).to_json(),
]  # fmt: skip


def replaced(value: Any, path: list[int], junk: object) -> Any:
    """`value` with `junk` at a place inside it."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return junk
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    changed[key] = replaced(value[key], path[1:], junk)
    return changed


@settings(max_examples=250, deadline=None)
@given(shape=st.sampled_from(SHAPES), path=st.lists(st.integers(0, 9), min_size=1, max_size=5), junk=JUNK)
def test_junk_anywhere_in_a_file_is_a_vocabulary_error_or_a_vocabulary(
    shape: dict[str, Any], path: list[int], junk: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = written(tmp_path_factory.getbasetemp(), replaced(shape, path, junk), "junk")
    try:
        read_vocabulary(name)
    except VocabularyError as error:
        assert str(name) in str(error)


def test_flipped_and_cut_bytes_are_a_vocabulary_error_or_a_vocabulary(
    byte_level: dict[str, Any], piece_models: dict[str, bytes], tmp_path: Path
) -> None:
    chance = random.Random(0)
    pieces = piece_models["unigram"]
    for content in (json.dumps(byte_level).encode(), json.dumps(tekken()).encode(), pieces, b"YQ== 0\nYg== 1\n"):
        for _ in range(40):
            data = bytearray(content)
            for _ in range(chance.choice([1, 3, 30])):
                data[chance.randrange(len(data))] = chance.randrange(256)
            end = chance.choice([len(data), chance.randrange(len(data))])
            with contextlib.suppress(VocabularyError):
                read_vocabulary(written(tmp_path, bytes(data[:end])))


def test_an_old_tokenizer_encodes_a_token_as_it_stands_within_a_text(
    byte_level: dict[str, Any], piece_models: dict[str, bytes], tmp_path: Path
) -> None:
    ranks = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)] + ["dGg= 256", "dGhl 257"]
    contents = {
        "tokenizer.json": byte_level, "pieces": piece_models["bpe"], "tiktoken": "\n".join(ranks).encode(),
        "metaspace": as_tokenizer_json(piece_models["unigram"], "Unigram"),
    }  # fmt: skip
    for name, content in contents.items():
        path = written(tmp_path, content, name)
        identity, encode = read_vocabulary(path), old_encoder(path)
        for text in (b"the", b" the", b"  table", b"ordered:", "déjà".encode()):
            if name != "metaspace" or text.isascii():  # that model has no bytes to fall back to
                assert b"".join(identity.tokens[token_id] for token_id in encode(text)) == text, (name, text)
        assert encode(b"") == []
    assert old_encoder(tmp_path / "tiktoken")(b"the") == [257]


def test_nothing_that_the_file_puts_before_a_text_or_cuts_off_is_in_its_sub_tokens(tmp_path: Path) -> None:
    words = ["▁", "a", "b", "c", "▁a", "ab", "▁ab"]
    model = {"type": "BPE", "vocab": {word: at for at, word in enumerate(words)},
             "merges": ["▁ a", "a b", "▁ ab"]}  # fmt: skip
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    shared = {
        "version": "1.0", "model": model, "decoder": None, "post_processor": None, "padding": None,
        "added_tokens": [{"id": 7, "content": "abc", "normalized": True, **flags}],
    }  # fmt: skip
    file = {**shared, "truncation": cut, "normalizer": prepend, "pre_tokenizer": None}
    plain = {**shared, "truncation": None, "normalizer": {**prepend, "normalizers": [replace]}, "pre_tokenizer": None}
    encode, library = old_encoder(written(tmp_path, file)), tokenizers.Tokenizer.from_str(json.dumps(plain))
    for text in ("abc", "ab", " ab", "ababc a abc", "cab abcab"):
        assert encode(text.encode()) == library.encode(text).ids, text
    assert encode(b"ab") == [5]


def test_bytes_that_are_no_text_go_by_their_single_tokens(
    byte_level: dict[str, Any], piece_models: dict[str, bytes], tmp_path: Path
) -> None:
    for content in (byte_level, piece_models["bpe"]):
        path = written(tmp_path, content)
        identity, encode = read_vocabulary(path), old_encoder(path)
        ids = encode(b"a\xe6\x97 b\xff")
        assert b"".join(identity.tokens[token_id] for token_id in ids) == b"a\xe6\x97 b\xff"
        assert [identity.tokens[token_id] for token_id in encode(b"\xe6\x97")] == [b"\xe6", b"\x97"]
    pieces = written(tmp_path, piece_models["unigram"])
    assert old_encoder(pieces)(b"\xff") == []  # no token for it


def test_tekken_and_plain_bytes_encode_and_an_ordered_table_alone_does_not(
    mistral: VocabIdentity, tmp_path: Path
) -> None:
    identity, encode = mistral, old_encoder(tekken_path())
    assert [identity.tokens[token_id] for token_id in encode(b" tokenization\xff")] == [b" token", b"ization", b"\xff"]
    byte_identity().write(tmp_path / "bytes.json")
    assert old_encoder(tmp_path / "bytes.json")(b"a\xff") == [100, 258]
    VocabIdentity((b"a",), ("normal",), source="bytes").write(tmp_path / "fewer.json")
    assert old_encoder(tmp_path / "fewer.json")(b"ab") == [0]
    identity.write(tmp_path / "table.json")
    with pytest.raises(VocabularyError, match=r"an ordered table of tekken: .* give the tokenizer's own file"):
        old_encoder(tmp_path / "table.json")
    mapping = VocabMap.from_vocabs(byte_identity(), identity, encode=old_encoder(tmp_path / "bytes.json"))
    assert mapping.kept == 259 and mapping.old_to_new[:5].tolist() == [11, 1, 2, 1000, 1001]
    assert mapping.sources[identity.tokens.index(b" the")] == (35, 119, 107, 104)


def test_tokenizers_that_need_a_normalizer_still_encode_without_a_prefix(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"▁": 0, "a": 1, "▁a": 2}, [("▁", "a")], fuse_unk=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    path = written(tmp_path, tokenizer.to_str().encode())
    assert read_vocabulary(path).tokens == (b" ", b"a", b" a")
    assert old_encoder(path)(b"a") == [1] and old_encoder(path)(b" a") == [2]
    assert tokenizer.encode("a").ids == [2]


def test_what_an_old_tokenizer_cannot_write_has_no_sub_tokens(piece_models: dict[str, bytes], tmp_path: Path) -> None:
    words = {"[UNK]": 0, "a": 1, "##b": 2}
    forms: list[tuple[dict[str, Any], list[int]]] = [
        ({"type": "WordPiece", "vocab": words, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
          "max_input_chars_per_word": 9}, [1, 2]),
        ({"type": "WordLevel", "vocab": {"ab": 0}, "unk_token": "[UNK]"}, [0]),  # it raises: there is no [UNK]
        ({"type": "Unigram", "vocab": [["ab", 0.0], ["a", -9.0], ["b", -9.0]], "unk_id": None}, [0]),
    ]  # fmt: skip
    for model, ids in forms:
        encode = old_encoder(written(tmp_path, {"version": "1.0", "added_tokens": [], "model": model}))
        assert encode(b"ab") == ids and encode("日".encode()) == []
    assert old_encoder(written(tmp_path, piece_models["unigram"]))("☃".encode()) == []


def test_a_tokenizer_comes_before_a_table_of_the_same_folder(byte_level: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, byte_level)
    VocabIdentity.of_tokens(["of", "before"]).write(tmp_path / "vocabulary.json")
    assert read_vocabulary(tmp_path).size == 332 and len(old_encoder(tmp_path)(b"the")) > 0
