"""The run that other runs are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import SETTINGS, finish, metrics, start


@pytest.fixture(scope="session")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs, with one corpus's cache for all."""
    return tmp_path_factory.mktemp("launches")


@pytest.fixture(scope="session")
def plain(launches: Path) -> list[dict[str, Any]]:
    """Metrics of the plain host on 2 ranks of one node."""
    finish(start("local.sh", launches / "plain", "train", *SETTINGS))
    return metrics(launches / "plain")
