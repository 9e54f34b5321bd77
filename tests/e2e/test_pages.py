"""The sessions of docs/checkpoints.md and docs/vocabulary.md and the README's commands on a run, typed one by one.

They run in the pages' order in one folder. Those with SmolLM2-135M are in tests/integrations/test_smollm2_pages.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest

from tests.page_shell import APP, Shell, fits
from tests.pages import ROOT, app_commands, sessions

LARGE = "smollm2"  # of a command's words
CHEAP = ("generate", "manifest", "plan", "release", "report")  # of the README's; other tests run the rest


def story() -> list[tuple[str, str]]:
    """All commands in the order of the pages, those of vocabulary.md before the releases; then the README's."""
    stored, vocabulary = (sessions(ROOT / page) for page in ("docs/checkpoints.md", "docs/vocabulary.md"))
    cut = next(at for at, (command, _) in enumerate(stored) if "acceptance.json" in command)
    entries = [*stored[:cut], *vocabulary, *stored[cut:]]
    known = {part for command, _ in entries for part in command.split("; ")}
    for page in ("README.md", "docs/decoding.md"):
        for words in app_commands(ROOT / page):
            line = APP + shlex.join(words).replace("'runs/<run>'", "runs/demo")
            if words[0] in CHEAP and line not in known:
                entries.append((line, ""))
    return [(command, shown) for command, shown in entries if LARGE not in command.lower()]


ENTRIES = story()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    place = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        yield Shell(place, ENTRIES)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [pytest.param(at, id=f"{at}-{one[:60]}") for at, (one, _) in enumerate(ENTRIES)])
def test_a_command_of_a_page_does_and_prints_what_the_page_shows(shell: Shell, number: int) -> None:
    shell.check(number)


def test_only_what_may_differ_is_left_out_of_the_comparison() -> None:
    shown = "V=259 over 2 ranks, 348,865 bytes, sha256 723cdae6a8fb3070… at step-00000008\n...\nwrote x in 0.4 s\n"
    same = shown.replace("348,865", "1,234").replace("723cdae6a8fb3070", "0123456789abcdef").replace("0.4", "11.5")
    assert fits(same.replace("...", "one\ntwo"), shown) and fits(same.replace("...\n", ""), shown)
    for old, new in [("259", "260"), ("2 ranks", "3 ranks"), ("00000008", "00000006"), ("wrote x", "wrote y")]:
        assert not fits(same.replace(old, new), shown), old


def test_every_session_is_run_but_those_of_the_large_model() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("docs/checkpoints.md", "docs/vocabulary.md"))
    left_out = set(re.findall(r"^\$ (.*)$", text, re.M)) - {command for command, _ in ENTRIES}
    assert left_out and all(LARGE in command.lower() for command in left_out)
