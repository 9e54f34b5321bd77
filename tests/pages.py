"""What README and docs show: their blocks of code, the commands a reader types, and those of the app among them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HOSTS = ("megatron", "deepspeed", "transformers", "fsdp")
SCRIPT = re.compile(r"launch/(\w+)\.sh$")


def block_with(file: str, words: str) -> str:
    """The one block of Python on a page that holds these words."""
    (block,) = [block for block in _blocks(ROOT / file, "python") if words in block]
    return block


def sessions(page: Path) -> list[tuple[str, str]]:
    """Each command after a `$` in the page's console blocks, and the lines shown below it."""
    return [
        typed
        for block in _blocks(page, "console")
        for typed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)
    ]


def app_commands(page: Path) -> list[list[str]]:
    """Words for the app of each line that starts it: by python, by torchrun, or by a script of launch/.

    Lines of blocks of bash or without a language, and those typed after a `$`; a line that says how a command is
    written, with options in brackets, is none.
    """
    plain = "\n".join(_blocks(page, "", "bash")).replace("\\\n", " ").splitlines()
    lines = [*[line for line in plain if "[--" not in line], *[command for command, _ in sessions(page)]]
    parts = [part for line in lines for part in line.split("; ")]
    return [words for part in parts if (words := _after_start(part))]


def _blocks(page: Path, *languages: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)
    return [block for language, block in fenced if language in languages]


def _after_start(part: str) -> list[str]:
    if not re.match(r"(\w+=\S+ )*(python |torchrun |launch/)", part):
        return []
    words = shlex.split(part, comments=True)
    if "vocab_parallel" in words:
        return words[words.index("vocab_parallel") + 1 :]
    at = next(at for at, word in enumerate(words) if not re.match(r"\w+=", word))
    script = SCRIPT.match(words[at])
    if script is None:
        return []
    return [*(["train", "--host", script[1]] if script[1] in HOSTS else []), *words[at + 1 :]]
