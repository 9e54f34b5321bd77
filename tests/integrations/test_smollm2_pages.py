"""The sessions of docs/checkpoints.md with SmolLM2-135M, typed one by one.

Left out for its time (10 s): `migrate SmolLM2-135M smollm2-think` in docs/vocabulary.md. What it does is tested on a
small Hugging Face directory in tests/unit/test_app_migrate.py.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.integrations.smollm2_model import write_tokenizer
from tests.page_shell import Shell
from tests.pages import ROOT, sessions

ENTRIES = [entry for entry in sessions(ROOT / "docs/checkpoints.md") if "smollm2" in entry[0].lower()]


@pytest.fixture(scope="module")
def shell(tmp_path_factory, smollm2):
    place = tmp_path_factory.mktemp("smollm2-pages")
    model = place / "SmolLM2-135M"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.link(smollm2 / name, model / name)
    write_tokenizer(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        yield Shell(place, ENTRIES)
    shutil.rmtree(place)  # gigabytes


@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [pytest.param(at, id=f"{at}-{one[:60]}") for at, (one, _) in enumerate(ENTRIES)])
def test_a_command_of_a_page_with_smollm2_does_and_prints_what_the_page_shows(shell, number):
    shell.check(number)


def test_the_sessions_with_smollm2_are_found():
    assert len(ENTRIES) == 8
