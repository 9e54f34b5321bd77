"""Tokenizer files that extend the app's plain bytes: the same 259 ids, then merged tokens."""

from __future__ import annotations

import json
from pathlib import Path

from vocab_parallel.vocabulary.formats.tokenizer_json import byte_alphabet

SPECIAL = ("<pad>", "<s>", "</s>")
# Frequent pairs of letters in Python's sources.
FOLLOWERS = {
    "a": "dlmrst", "c": "eht", "d": "ei", "e": "clnrstx", "f": "io", "g": "e", "h": "a", "i": "cmnost", "l": "aefi",
    "m": "aep", "n": "eot", "o": "dnpr", "p": "aeo", "r": "aeo", "s": "eistu", "t": "aehi", "u": "lnrs", "v": "e",
    "w": "ir",
}  # fmt: skip
PAIRS = tuple(one + other for one, others in FOLLOWERS.items() for other in others)
COUNT = len(PAIRS)


def write_merged_bytes(folder: Path, *, shuffled: bool = False) -> Path:
    """A folder with tokenizer.json of 259 + 64 tokens; `shuffled`: in other places, the special ones too."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    content = [*SPECIAL, *[letters[byte] for byte in range(256)], *PAIRS]
    if shuffled:
        content = [*content[3:50], *content[:3], *reversed(content[50:])]
    ids = {token: at for at, token in enumerate(content)}
    folder.mkdir(parents=True, exist_ok=True)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **flags} for token in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [f"{pair[0]} {pair[1]}" for pair in PAIRS],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    roles = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles), encoding="utf-8")
    return folder
