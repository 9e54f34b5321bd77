"""The hosts are imported once, in the server that ranks are forked from; and no test here may be skipped."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests import ranks

ranks.preload(
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "transformers.trainer",
    "accelerate", "deepspeed", "megatron.core",
)  # fmt: skip


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as a Transformers checkpoint."""
    from tests.integrations.smollm2_model import write_checkpoint

    folder = tmp_path_factory.mktemp("smollm2")
    write_checkpoint(folder)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped integration test proves nothing: it fails."""
    report = yield
    return _must_run(report, item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Nor does a module that skips itself, as `importorskip` does."""
    report = yield
    return _must_run(report, collector.nodeid)


def _must_run(report: Any, name: str) -> Any:
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"{name} was skipped; integration tests must run: {report.longrepr}"
    return report
