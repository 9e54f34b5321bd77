"""A reader's shell: types the commands of a page one by one and compares what is printed with what the page shows.

What a page shows must be printed, with these rules: `...` is any lines; where a page shows nothing, anything may be
printed; seconds, sizes, sums and hashes (numbers with a point or a thousands comma, 8 or more hexadecimal digits),
times and folders may differ, as may what follows `best ids`, `corpus:`, `64 are new:` and `the first are`, which hang
on Python's own sources; the line `tokenised ...` comes once for each corpus and is left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT, block_with
from vocab_parallel import app

APP = "python -m vocab_parallel "
ERROR = re.compile(r"^\w+Error: ", re.M)
VARYING = [
    (r"(?m)^tokenised .*\n", ""),
    (r"\d{4}-\d\d-\d\dT[\d:+]+|\d{8}-\d{6}", "TIME"),
    (r"(?<!step-)\b[0-9a-f]{8,}\b", "HASH"),
    (r"\d{1,3}(,\d{3})+|\d+\.\d+(e-\d+)?", "NUMBER"),
    (r"(64 are new:|best ids|corpus:).*", r"\1"),
    (r"the first are [^;]*", ""),
    (r"[^\S\n]+", " "),
]


class Shell:
    """A reader's shell in one folder: commands of the app run in this process, all others in bash.

    What pages tell in another form is done first: files shown by `cat` are written, a block of Python makes the
    tokenizer, and releases, which are read-only, are opened where a page writes as root.
    """

    def __init__(self, place: Path, entries: list[tuple[str, str]]) -> None:
        """`entries`: each command, and what its page shows of its output (nothing: not shown)."""
        self.place = place
        self.entries = entries
        self.printed: list[tuple[int, str]] = []  # status and output of the commands so far
        self.bundles: dict[str, str] = {}  # the page's ids of bundles, and those here
        for name in ("configs", "launch"):
            (place / name).symlink_to(ROOT / name)

    def check(self, number: int) -> None:
        """A command, and before it those that have not run yet, must do what the page shows."""
        command, shown = self.entries[number]
        status, printed = self._until(number)
        if "echo $?" not in command:
            assert status == (2 if ERROR.search(shown) else 0), printed
        if shown:
            assert fits(printed, shown), f"the page shows\n{shown}\nprinted was\n{printed}"

    def _until(self, number: int) -> tuple[int, str]:
        while len(self.printed) <= number:
            command, shown = self.entries[len(self.printed)]
            self._prepare(command, shown)
            self.printed.append(self._run(command))
            self._pair(shown, self.printed[-1][1])
        return self.printed[number]

    def _prepare(self, command: str, shown: str) -> None:
        if command.startswith("cat "):
            (self.place / command.removeprefix("cat ")).write_text(shown)
        if "--new-vocab tokenizer" in command and not (self.place / "tokenizer").exists():
            exec(block_with("docs/vocabulary.md", "BpeTrainer("), {})
        if command.startswith("cp releases/"):
            self._bash("chmod -R u+w releases")

    def _run(self, command: str) -> tuple[int, str]:
        """One line, of several parts at times; the status is that of the last part that has one of its own."""
        for page, here in self.bundles.items():
            command = command.replace(page, here)
        status, output = 0, ""
        for part in command.partition("  #")[0].split("; "):
            if part == "echo $?":
                output += f"{status}\n"
                continue
            status, text = self._app(shlex.split(part)[3:]) if part.startswith(APP) else self._bash(part)
            output += text
        return status, output.replace(f"{self.place}/", "…/")

    def _app(self, words: list[str]) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            status = app.main(words)
        return status, text.getvalue()

    def _bash(self, line: str) -> tuple[int, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        job = subprocess.run(
            ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=200, cwd=self.place,
            check=False,
        )  # fmt: skip
        return job.returncode, job.stdout if job.returncode == 0 else job.stdout + job.stderr

    def _pair(self, shown: str, printed: str) -> None:
        """A promotion's bundle has an id of its contents, which no two machines train to the same bits."""
        page, here = (re.search(r"^bundle +(\w{16}) ", text, re.M) for text in (shown, printed))
        if page and here:
            self.bundles[page[1]] = here[1]


def fits(printed: str, shown: str) -> bool:
    """Whether a page shows what was printed."""
    lines = [r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in _steady(shown).splitlines()]
    return re.fullmatch("".join(lines), _steady(printed)) is not None


def _steady(text: str) -> str:
    """Without what may differ from one run to another."""
    for varying, name in VARYING:
        text = re.sub(varying, name, text)
    return text
