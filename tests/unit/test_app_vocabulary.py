"""The app's vocabularies: the ordered table of each, and a user's own tokenizer."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from vocab_parallel.app.config import DataConfig
from vocab_parallel.app.data import _key
from vocab_parallel.app.vocabulary import ByteVocabulary, TokenizerFile, open_vocabulary, require_trainable, tekken_path
from vocab_parallel.app.writing import Text
from vocab_parallel.errors import ConfigError
from vocab_parallel.vocabulary import byte_identity, read_vocabulary


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer.json that puts <s> before every text, and its configuration."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["a table of tokens, a table of ids"] * 9, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    configure(folder, bos_token="<s>", eos_token={"content": "</s>"})
    return folder


def configure(folder: Path, **roles: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))


@pytest.mark.parametrize("name", ["tekken", "bytes"])
def test_the_hash_is_of_the_ordered_table(name: str) -> None:
    vocabulary = open_vocabulary(str(tekken_path()) if name == "tekken" else name)  # a file of one's own
    identity = read_vocabulary(tekken_path()) if name == "tekken" else byte_identity()
    assert vocabulary.sha256 == vocabulary.identity.sha256 == identity.sha256
    assert (vocabulary.identity.size, vocabulary.identity.special_ids["bos"]) == (vocabulary.size, vocabulary.bos)
    [ids] = vocabulary.encode_batch(["déjà vu"])
    assert b"".join(vocabulary.identity.tokens[token_id] for token_id in ids) == "déjà vu".encode()


def test_a_folder_of_a_tokenizer_reads_back_what_it_wrote(trained: Path) -> None:
    vocabulary = open_vocabulary(str(trained))
    assert isinstance(vocabulary, TokenizerFile) and (vocabulary.bos, vocabulary.eos) == (0, 1)
    assert vocabulary.size == vocabulary.identity.size > 258
    texts = ["a table of tokens", "Größe\t日本", ""]
    batch = vocabulary.encode_batch(texts)
    assert all(vocabulary.bos not in ids for ids in batch) and len(batch[1]) > 3  # neither <s> nor the file's cut at 3
    for text, ids in zip(texts, batch, strict=True):
        assert vocabulary.decode([vocabulary.bos, *ids, vocabulary.eos]) == text
        assert vocabulary.decode_bytes([vocabulary.bos, *ids, vocabulary.eos]) == text.encode()
    writer = Text(vocabulary)
    assert "".join(map(writer.add, batch[1])) + writer.end() == texts[1]
    assert vocabulary.decode(vocabulary.encode_batch(["half \ud800"])[0]) == "half ?"


def test_a_file_has_the_roles_of_its_folder_and_one_role_serves_for_both(trained: Path) -> None:
    path = trained / "tokenizer.json"
    try:
        configure(trained, eos_token="</s>")
        only_eos = open_vocabulary(str(path))
        assert (only_eos.bos, only_eos.eos) == (1, 1)
        configure(trained, bos_token="<s>")
        only_bos = open_vocabulary(str(path))
        assert (only_bos.bos, only_bos.eos) == (0, 0) and only_bos.sha256 == only_eos.sha256
        # Ids that were made with one of these are not taken for those of another (`data.cache`).
        parsed = json.loads(path.read_text())
        parsed["model"]["merges"] = parsed["model"]["merges"][::-1]
        (trained / "other.json").write_text(json.dumps(parsed))
        other = open_vocabulary(str(trained / "other.json"))
        assert other.sha256 == only_bos.sha256 and other.encoding_sha256 != only_bos.encoding_sha256
        keys = {_key(DataConfig(), one, []) for one in (only_eos, only_bos, other, open_vocabulary(str(path)))}
        assert len(keys) == 3
        configure(trained)
        with pytest.raises(
            ConfigError, match=r"neither a bos nor an eos token.*name one in .*tokenizer_config.json, su"
        ):
            open_vocabulary(str(path))
    finally:
        configure(trained, bos_token="<s>", eos_token={"content": "</s>"})


def test_what_training_can_read_is_told_without_a_library_that_encodes(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ByteVocabulary().identity.write(tmp_path / "table.json")
    (tmp_path / "tokenizer.json").write_text((trained / "tokenizer.json").read_text())  # without roles
    refused = [str(tmp_path / "table.json"), str(tmp_path), str(tmp_path / "missing")]
    said = []
    for name in refused[:2]:
        with pytest.raises(ConfigError) as found:
            open_vocabulary(name)
        said.append(str(found.value))
    for package in ("tokenizers", "tiktoken"):
        monkeypatch.setitem(sys.modules, package, None)
    for name in (str(trained), str(trained / "tokenizer.json"), "tekken", "bytes"):
        require_trainable(name)
    for name, words in zip(refused, [*said, "missing"], strict=True):
        with pytest.raises(ConfigError, match=re.escape(words)):
            require_trainable(name)


def test_words_are_written_with_spaces_between(tmp_path: Path) -> None:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "now": 3, "[SEP]": 4}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    configure(tmp_path, eos_token="[SEP]")
    vocabulary = open_vocabulary(str(tmp_path))
    [ids] = vocabulary.encode_batch(["playing now"])
    assert ids == [1, 2, 3] and vocabulary.decode(ids) == "playing now"
    assert vocabulary.decode_bytes(ids) == b" playing now"


def test_what_is_no_vocabulary_is_a_configuration_error(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"data.vocab: expected tekken, bytes, or the path .*'teken' is none of these"
    ):
        open_vocabulary("teken")
    with pytest.raises(ConfigError, match=r"data.vocab: .* holds no tokenizer.json, tekken.json, "):
        open_vocabulary(str(tmp_path))
    broken = tmp_path / "tokenizer.json"
    broken.write_text('{"model": {"vocab": {"a": 0, "b": 0}}}')
    with pytest.raises(ConfigError, match=r"data.vocab: .*tokenizer.json: model.vocab: id 0 is both 'a' and 'b'"):
        open_vocabulary(str(broken))
    broken.write_text('{"model": {"vocab": {"a": 0}}}')
    configure(tmp_path, eos_token="a")
    with pytest.raises(ConfigError, match=r"data.vocab: the tokenizers package refuses .*tokenizer.json"):
        open_vocabulary(str(tmp_path))
    config = {"default_vocab_size": 257, "default_num_special_tokens": 1}
    ranks = [{"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode()} for rank in range(256)]
    for pattern, words in ((None, None), ("(", "tiktoken refuses it"), (7, "tiktoken refuses it")):
        table = {"config": config | ({} if pattern is None else {"pattern": pattern}), "vocab": ranks}
        broken.write_text(json.dumps(table))
        if words is None:
            assert open_vocabulary(str(broken)).encode_batch(["ab"]) == [[98, 99]]
        else:
            with pytest.raises(ConfigError, match=f"data.vocab: .*tokenizer.json: {words}"):
                open_vocabulary(str(broken))
    broken.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": {
        "type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}))  # fmt: skip
    with pytest.raises(ConfigError, match=r"data.vocab: the tokenizer cannot encode the text: .*UNK"):
        open_vocabulary(str(tmp_path)).encode_batch(["b"])
    ByteVocabulary().identity.write(tmp_path / "table.json")
    with pytest.raises(ConfigError, match=r"table.json is a table; training reads a tokenizer.json or a Tekken file"):
        open_vocabulary(str(tmp_path / "table.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        open_vocabulary(str(trained))
