"""Whole commands that migrate and convert, tokenizers included, need less memory than 1.3 of one shard.

Where the old tokenizer encodes (`--init sources`) its library's own table counts too, which grows with the ids and not
with the columns: those need wider rows.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.memory import added_by_each
from tests.multirank.migration_cases import whole
from tests.unit.test_migrating import stored
from vocab_parallel.app import main
from vocab_parallel.app.vocabulary import tekken_path
from vocab_parallel.vocabulary import read_vocabulary
from vocab_parallel.vocabulary.formats.tokenizer_json import byte_alphabet

WIDTH, TP = 64, 2
SIZES = (65_536, 131_072)
ENCODING_WIDTH = 256
NEW = 64  # ids that only the new tokenizer has
SMALL = 1024


def write_tokenizer(folder: Path, size: int, *, new: bool = False) -> Path:
    """A folder with the tokenizer.json of a byte-level BPE of so many ids: bytes, pairs of bytes, and threes.

    Args:
        new: Ids in the opposite order, and others in place of the last `NEW`.
    """
    letters = list(byte_alphabet())
    merges = [(one, other) for one in letters for other in letters]
    merges += [(one + other, letter) for letter in letters[:2] for one, other in merges]
    count = size - 257
    merges = merges[: count - NEW] + merges[count : count + NEW] if new else merges[:count]
    words = ["<|end|>", *letters, *map("".join, merges)]
    ids = {word: at for at, word in enumerate(reversed(words) if new else words)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": ids["<|end|>"], "content": "<|end|>", "special": True, **flags}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": ids, "merges": [f"{one} {other}" for one, other in merges]},
    }
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}), encoding="utf-8")
    return folder


def run(*command: str) -> None:
    assert main(list(command)) == 0


def prepared(folder: Path, size: int, width: int = WIDTH) -> Path:
    """Two tokenizers; of the first one a checkpoint of this package, a run with it, and a Hugging Face directory."""
    tokenizer = write_tokenizer(folder / "old", size)
    write_tokenizer(folder / "new", size, new=True)
    table = whole(size, width)
    tensors = {"model.embedding.weight": table, "model.trunk.weight": whole(width, width)}
    stored(folder / "ours", tensors, tp=TP, vocab=size, identity=read_vocabulary(tokenizer))
    step = folder / "run" / "checkpoints" / "step-00000007"
    shutil.copytree(folder / "ours", step, copy_function=os.link)
    (folder / "run" / "config.yaml").write_text(f"data:\n  vocab: {tokenizer}\n")
    (folder / "run" / "metrics.jsonl").write_text("")
    shutil.copytree(tokenizer, folder / "hf")
    save_file({"model.embed_tokens.weight": table}, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "vocab_size": size, "tie_word_embeddings": True, "hidden_size": width}
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    return folder


def words(name: str, folder: Path, target: Path | None = None) -> tuple[str, ...]:
    """A command on what was prepared in a folder."""
    at = {one: str(folder / one) for one in ("ours", "old", "new", "hf", "run")} | {name: str(target or folder / name)}
    of_ours, of_run = ("migrate", at["ours"], at[name]), ("migrate", at["run"], at[name])
    of_hf = ("migrate", at["hf"], at[name], "--tp", str(TP))
    every = {
        "append": (*of_ours, "--append", "64", "--init", "mean"),
        "tokenizer": (
            *of_ours, "--old-vocab", at["old"], "--new-vocab", at["new"], "--init", "mean", "--allow-drop",
        ),
        "tekken": (
            *of_ours, "--old-vocab", at["old"], "--new-vocab", str(tekken_path()), "--init", "mean", "--allow-drop",
        ),
        "run of a tokenizer": (*of_run, "--new-vocab", at["new"], "--init", "mean", "--allow-drop"),
        "hf of appended": (*of_hf, "--append", "64", "--init", "mean"),
        "sources": (*of_ours, "--old-vocab", at["old"], "--new-vocab", at["new"], "--allow-drop"),
        "run of sources": (*of_run, "--new-vocab", at["new"], "--allow-drop"),
        "hf of sources": (*of_hf, "--new-vocab", at["new"], "--allow-drop"),
        "from hf": ("convert", at["hf"], at[name], "--tp", str(TP)),
        "to hf": ("convert", at["ours"], at[name], "--config", f"{at['hf']}/config.json"),
    }  # fmt: skip
    return every[name]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("small"), SMALL)


@pytest.mark.parametrize("size", SIZES)
def test_whole_commands_need_less_memory_than_one_shard_and_a_third(size: int, small: Path, tmp_path: Path) -> None:
    plain = ["append", "tokenizer", "run of a tokenizer", "hf of appended", "from hf", "to hf"]
    names = [*plain, "tekken"] if size == SIZES[1] else plain
    require_little(names, plain, small, tmp_path, size, WIDTH)


@pytest.mark.parametrize("size", SIZES)
def test_with_rows_of_sub_tokens_the_same_holds_of_256_columns(size: int, small: Path, tmp_path: Path) -> None:
    names = ["sources", "run of sources", "hf of sources"]
    require_little(names, names, small, tmp_path, size, ENCODING_WIDTH)


def require_little(names: list[str], warm: list[str], small: Path, tmp_path: Path, size: int, width: int) -> None:
    folder, shard = prepared(tmp_path / "large", size, width), size * width * 4 // TP
    added = added_by_each(
        run, [words(name, folder) for name in names], warm_up=[words(name, small, tmp_path / name) for name in warm]
    )
    for name, each in zip(names, added, strict=True):
        print(f"{size:,} x {width}: {name} {each.resident / shard:.2f} of {shard:,} bytes")
        assert each.resident < 1.3 * shard, f"{name}: {each} beside a shard of {shard:,} bytes"
