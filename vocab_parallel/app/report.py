"""One self-contained HTML page on a run: plots, layout, configuration, environment."""

from __future__ import annotations

import argparse
import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vocab_parallel.app import runlog
from vocab_parallel.errors import ConfigError
from vocab_parallel.vocabulary.files import read_bytes
from vocab_parallel.vocabulary.manifest import Manifest

_LARGEST_TEXT = 2**27
Rows = Sequence[Mapping[str, Any]]


def write(folder: Path) -> Path:
    """Builds ``report.html`` from the other files of a run folder.

    A run that has not ended has no closing numbers; the page then says so and shows what there is.

    Returns:
        The page's path.

    Raises:
        ConfigError: `folder` is not a run folder, or has no step yet.
    """
    if not (folder / "manifest.json").is_file():
        raise ConfigError(f"{folder} holds no manifest.json: expected a run folder that `train` wrote")
    manifest = Manifest.read(folder)
    rows = runlog.read_metrics(folder)
    if not rows:
        raise ConfigError(f"{folder}/metrics.jsonl holds no step yet")
    ended = (folder / "summary.json").is_file()
    summary = runlog.read_json(folder, "summary.json") if ended else None
    try:
        page = _page(folder, manifest, rows, summary)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"{folder}: its files are not as `train` writes them ({what})") from error
    path = folder / "report.html"
    runlog.write_whole(path, page)
    return path


def document(title: str, body: str) -> str:
    """A whole HTML page; `body` is HTML, `title` text."""
    return _TEMPLATE.format(title=html.escape(title), style=_STYLE, body=body)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``report``."""
    parser.add_argument("source", help="a run folder")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel report``."""
    print(write(Path(args.source)))
    return 0


def _page(folder: Path, manifest: Manifest, rows: Rows, summary: Mapping[str, Any] | None) -> str:
    entropy = manifest.notes["corpus"]["unigram_entropy"]
    figures = [
        (
            "Loss",
            "nats a token; the oracle is one rank that holds the whole table, in float64",
            _loss_plot(rows, entropy),
        ),
        (
            "Difference to the oracle",
            "loss in nats; gradient over its largest entry",
            _oracle_plot(rows),
        ),
        (
            "Memory",
            "peak of the first rank's process, the oracle's work included, MB",
            _line_plot(rows, "peak_memory_bytes", 1e-6, "MB"),
        ),
        ("Bytes sent", "by each rank in one step, MB", _line_plot(rows, "bytes_sent", 1e-6, "MB")),
        ("Collectives", "calls in one step", _line_plot(rows, "collectives", 1.0, "calls")),
        ("Throughput", "tokens a second, checks not counted", _line_plot(rows, "tokens_per_second", 1.0, "tokens/s")),
    ]
    body = [f"<h1>{html.escape(folder.name)}</h1>", _closing(rows, summary)]
    body.append('<div class="figures">')
    body += [
        f"<figure><figcaption><b>{title}</b> {note}</figcaption>{image}</figure>" for title, note, image in figures
    ]
    body.append("</div>")
    body += ["<h2>Layout</h2>", _layout_table(manifest)]
    if summary is not None:
        body += ["<h2>Sample</h2>", f"<pre>{html.escape(summary['sample'])}</pre>"]
    for title, name in (("Configuration", "config.yaml"), ("Environment", "env.txt"), ("Manifest", "manifest.json")):
        path = folder / name
        text = read_bytes(path, _LARGEST_TEXT).decode("utf-8", "replace") if path.is_file() else "not there"
        body.append(f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>")
    return document(folder.name, "\n".join(body))


def _closing(rows: Rows, summary: Mapping[str, Any] | None) -> str:
    if summary is None:
        return f"<p>This run has not ended: {rows[-1]['step']} steps are logged.</p>"
    from vocab_parallel.app.closing import table_rows

    lines = [
        f'<tr><th>{html.escape(name)}</th><td class="n">{html.escape(value)}</td><td>{html.escape(note)}</td></tr>'
        for name, value, note in table_rows(summary)
    ]
    return f"<table>{''.join(lines)}</table>"


def _layout_table(manifest: Manifest) -> str:
    sharded = manifest.checkpoint
    if sharded is None:
        return "<p>The manifest does not say how the vocabulary was sharded.</p>"
    head = "<tr><th>rank</th><th>first id</th><th>end (not included)</th><th>real ids</th><th>padding rows</th></tr>"
    rows, lines = sharded.padded_size // sharded.tp_size, []
    for rank, (start, stop) in enumerate(sharded.shard_ranges):
        cells = (rank, start, stop, stop - start, rows - (stop - start))
        lines.append("<tr>" + "".join(f'<td class="n">{cell:,}</td>' for cell in cells) + "</tr>")
    about = (
        f"<p>{manifest.vocabulary.size:,} real ids, {sharded.padded_size:,} rows allocated over "
        f"{sharded.tp_size} ranks of {rows:,} rows.</p>"
    )
    return f"{about}<table>{head}{''.join(lines)}</table>"


def _loss_plot(rows: Rows, entropy: float) -> str:
    def draw(axes: Any) -> None:
        steps, values = _series(rows, "loss")
        axes.plot(steps, values, color=_BLUE, alpha=0.35, linewidth=1.2, label="training, sharded")
        axes.plot(steps, _running_mean(values), color=_BLUE, linewidth=1.8, label=f"mean of {_WINDOW} steps")
        steps, values = _series(rows, "oracle_loss")
        axes.plot(steps, values, color=_ORANGE, linewidth=1.0, linestyle=(0, (2, 3)), label="training, oracle")
        steps, values = _series(rows, "validation_loss")
        axes.plot(steps, values, color=_GREEN, marker="o", markersize=4, linewidth=1.2, label="validation")
        axes.axhline(entropy, color=_GREY, linewidth=1, linestyle="--", label=f"unigram entropy {entropy:.2f}")
        axes.legend(frameon=False, fontsize=8)
        axes.set_ylabel("nats")

    return _svg(draw)


def _oracle_plot(rows: Rows) -> str:
    series: list[tuple[list[int], list[float], str, dict[str, Any]]] = [
        (*_series(rows, "oracle_difference"), "loss", {"linewidth": 1, "color": _BLUE}),
        (*_series(rows, "oracle_gradient_difference"), "gradient", {"linestyle": "", "marker": "o", "color": _ORANGE}),
    ]
    if not any(values for _, values, _, _ in series):
        return "<p>The oracle was off in this run.</p>"

    def draw(axes: Any) -> None:
        for steps, values, label, style in series:
            if values:
                # An exact match has no place on a log axis; it is drawn at the bottom.
                axes.plot(steps, [max(value, 1e-12) for value in values], label=label, markersize=4, **style)
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)

    return _svg(draw)


def _line_plot(rows: Rows, key: str, factor: float, unit: str) -> str:
    steps, values = _series(rows, key)

    def draw(axes: Any) -> None:
        axes.plot(steps, [value * factor for value in values], color=_BLUE, linewidth=1.2)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(unit)

    return _svg(draw)


def _series(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None and math.isfinite(row[key])]
    return [step for step, _ in points], [value for _, value in points]


def _running_mean(values: Sequence[float]) -> list[float]:
    """The mean of each value and up to `_WINDOW` - 1 before it."""
    windows = [values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _svg(draw: Callable[[Any], None]) -> str:
    """An inline SVG of one set of axes; text stays text, so the page stays small and searchable."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    # Without the header and the block that names the drawing program and vocabularies on the web.
    text = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    return text[text.index("<svg") :]


_WINDOW = 25
_BLUE, _ORANGE, _GREEN, _GREY = "#1f5fa8", "#d9822b", "#3a8a4d", "#777777"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .2rem .9rem .2rem 0; text-align: left; }
tr { border-bottom: 1px solid #e6e6e6; } th { font-weight: 600; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { color: #555; font-size: .9rem; } figcaption b { color: #222; }
svg { width: 100%; height: auto; }
pre { background: #f6f6f4; padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; }
details { margin: .6rem 0; } details summary { cursor: pointer; font-weight: 600; }
"""

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>{style}</style></head>
<body>
{body}
</body>
</html>
"""
