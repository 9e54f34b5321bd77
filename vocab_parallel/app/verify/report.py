"""What the ladder found, as JSON for machines and as one page for people."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vocab_parallel.app import runlog
from vocab_parallel.app.report import document
from vocab_parallel.app.verify.ladder import Result, Rung
from vocab_parallel.app.verify.setting import Setting

JSON, HTML = "verify.json", "verify.html"


@dataclass(frozen=True)
class Ladder:
    """A climbed ladder.

    Attributes:
        about: what was verified, in names and values.
        rungs: those that were to be climbed.
        results: of all checks.
        config: as YAML.
        seconds: that it took, the opening of the model included.
    """

    about: dict[str, Any]
    rungs: tuple[Rung, ...]
    results: tuple[Result, ...]
    config: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every rung was climbed and every check passed."""
        climbed = {result.rung for result in self.results}
        return all(result.passed for result in self.results) and all(rung.name in climbed for rung in self.rungs)

    def write(self, folder: Path) -> None:
        """Writes ``verify.json`` and ``verify.html`` into a folder that is there."""
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        runlog.write_whole(folder / JSON, text)
        runlog.write_whole(folder / HTML, self.to_html())

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold; an infinite error is null."""
        return {
            "passed": self.passed,
            "about": self.about,
            "seconds": round(self.seconds, 3),
            "rungs": [self._rung(rung) for rung in self.rungs],
            "config": self.config,
            "environment": runlog.environment(),
        }

    def to_html(self) -> str:
        """One self-contained page."""
        verdict = "every rung passed" if self.passed else "FAILED"
        title = f"verify {self.about['name']}: {verdict}"
        facts = [f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in self.about.items()]
        body = [f"<h1>{_text(title)}</h1>", f"<table>{''.join(facts)}</table>"]
        for number, rung in enumerate(self.rungs, 1):
            body += [f"<h2>{number} {_text(rung.name)}</h2>", f"<p>{_text(rung.invariant)}</p>"]
            body += _table([result for result in self.results if result.rung == rung.name])
        for name, text in (("Configuration", self.config), ("Environment", runlog.environment())):
            body.append(f"<details><summary>{name}</summary><pre>{_text(text)}</pre></details>")
        return document(title, "\n".join(body))

    def _rung(self, rung: Rung) -> dict[str, Any]:
        found = [result for result in self.results if result.rung == rung.name]
        return {
            "name": rung.name,
            "invariant": rung.invariant,
            "module": rung.module,
            "passed": bool(found) and all(result.passed for result in found),
            "checks": [asdict(result) | {"error": _finite(result.error)} for result in found],
        }


def describe(setting: Setting) -> dict[str, Any]:
    """What is verified."""
    layout, job = setting.shard.layout, setting.job
    return {
        "name": setting.config.name,
        "weights": "fresh" if setting.folder is None else f"of the newest checkpoint in {setting.folder}",
        "host": setting.config.host,
        "vocabulary": f"{setting.config.data.vocab}, sha256 {setting.vocabulary.sha256}",
        "layout": str(layout),
        "width": setting.width,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "device": job.device.type,
        "ranks": job.world,
        "ranks that share the vocabulary": job.tp,
    }


def opening(setting: Setting) -> str:
    """What is verified, in two lines."""
    about = describe(setting)
    replicas = setting.job.replicas.size
    return (
        f"verify {about['name']}: weights {about['weights']}, host {about['host']}, {about['dtype']} on "
        f"{about['device']}{f', {replicas} data-parallel replicas' if replicas > 1 else ''}\n"
        f"vocabulary {setting.config.data.vocab}: {about['layout']}, D={about['width']}"
    )


def _table(results: Sequence[Result]) -> list[str]:
    if not results:
        return ["<p>Not climbed: the ladder ended before.</p>"]
    lines = ["<tr><th></th><th>check</th><th>largest error</th><th>limit</th><th>unit</th><th>seconds</th></tr>"]
    for one in results:
        look = "" if one.passed else f"<br>look in <code>{_text(one.module)}</code>. {_text(one.words)}"
        lines.append(
            f"<tr><td>{'pass' if one.passed else '<b>FAIL</b>'}</td><td>{_text(one.check)}{look}</td>"
            f'<td class="n">{one.error:.2e}</td><td class="n">{one.tolerance:.6g}</td>'
            f'<td>{_text(one.unit)}</td><td class="n">{one.seconds:.2f}</td></tr>'
        )
    return [f"<table>{''.join(lines)}</table>"]


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _text(value: object) -> str:
    return html.escape(str(value))
