"""A benchmark's results as aligned text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Report = dict[str, Any]


def text(report: Report) -> str:
    """One table a point, then who did not run, the errors and the checks."""
    config = report["config"]
    lines = []
    for point in report["points"]:
        problem = point["problem"]
        lines += [
            "",
            f"{problem['tokens']:,} tokens, D {problem['hidden']}, V {problem['vocab']:,}, {config['dtype']}, "
            f"{problem['ranks']} ranks; extra: beside inputs and gradients",
            *aligned([_HEAD, *(_line(name, numbers) for name, numbers in point["results"].items())]),
        ]
        best = point.get("best_peer")
        if best:
            lines.append(
                f"ours takes {best['ours_over_it_best']:.3f}x of the best peer's time ({best['name']}); "
                f"median {best['ours_over_it_median']:.3f}x"
            )
    lines += ["", *_errors(report)]
    absent = {name: about for name, about in report["contestants"].items() if about["status"] != "ran"}
    lines += ["", *(f"{name}: {about['status']}: {about['reason']}" for name, about in absent.items())]
    for check in report["checks"]:
        verdict = "pass" if check["passed"] else "FAIL"
        lines.append(f"{verdict}  {check['name']}: within {check['spread']:.1%}, limit {check['limit']:.0%}")
    return "\n".join(lines)


_HEAD = [
    "", "chunk rows", "best s", "median s", "x floor", "median x", "extra MB", "resident MB", "collectives", "sent kB",
]  # fmt: skip


def _line(name: str, numbers: dict[str, Any]) -> list[str]:
    collectives = numbers.get("collectives")
    return [
        name,
        _number(numbers.get("chunk_rows"), "{:,.0f}"),
        f"{numbers['best_s']:.3f}",
        f"{numbers['median_s']:.3f}",
        _number(numbers.get("over_floor_best"), "{:.3f}"),
        _number(numbers.get("over_floor_median"), "{:.3f}"),
        _number(numbers.get("beyond_gradients_bytes"), "{:,.1f}", 1e-6),
        _number(numbers.get("resident_beyond_gradients_bytes"), "{:,.1f}", 1e-6),
        str(sum(collectives["calls"].values())) if collectives else "",
        f"{sum(collectives['bytes'].values()) / 1e3:,.1f}" if collectives else "",
    ]


def _errors(report: Report) -> list[str]:
    problem = report["errors"]["problem"]
    about = (
        f"largest error against float64 over the largest entry, on {problem['tokens']} tokens, D {problem['hidden']}, "
        f"V {problem['vocab']:,}"
    )
    rows = [
        [name, *(f"{errors[key]:.2e}" for key in ("loss", "hidden_grad", "weight_grad"))]
        for name, errors in report["errors"]["results"].items()
    ]
    return [about, *aligned([["", "loss", "dH", "dW"], *rows])]


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else form.format(value * factor)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plot(report: Report, path: Path) -> None:
    """Time and memory of each contestant; over a sweep, as lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.2), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2)
    draw = _bars if len(report["points"]) == 1 else _curve if _is_curve(report) else _lines
    draw(report, time, memory)
    for axes in (time, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.suptitle(_title(report), fontsize=10)
    figure.savefig(path)


def _is_curve(report: Report) -> bool:
    return report["config"]["sweep"] in ("chunk", "budget")


def _title(report: Report) -> str:
    config, first = report["config"], report["points"][0]["problem"]
    sizes = {"tokens": f"{first['tokens']:,} tokens", "vocab": f"V {first['vocab']:,}"}
    kept = [size for name, size in sizes.items() if name != config["sweep"]]
    return ", ".join([*kept, f"D {first['hidden']}", config["dtype"], f"{first['ranks']} ranks"])


def _bars(report: Report, time: Any, memory: Any) -> None:
    results = report["points"][0]["results"]
    names = list(reversed(results))
    colors = [_color(name) for name in names]
    best = [results[name]["best_s"] for name in names]
    bars = time.barh(names, best, color=colors)
    ratios = [_number(results[name].get("over_floor_best"), " {:.2f}x") for name in names]
    time.bar_label(bars, ratios, fontsize=8)
    time.set_xlabel("seconds a step, best; times the floor")
    time.margins(x=0.15)
    names = [name for name in names if "beyond_gradients_bytes" in results[name]]
    megabytes = [results[name]["beyond_gradients_bytes"] / 1e6 for name in names]
    bars = memory.barh(names, megabytes, color=[_color(name) for name in names])
    memory.bar_label(bars, [f" {value:,.0f}" for value in megabytes], fontsize=8)
    memory.set_xlabel("MB beside inputs and gradients, at the peak")
    memory.margins(x=0.15)


def _lines(report: Report, time: Any, memory: Any) -> None:
    for name in report["points"][0]["results"]:
        for axes, key, factor in ((time, "best_s", 1.0), (memory, "beyond_gradients_bytes", 1e-6)):
            points = [
                (point["value"], point["results"][name][key] * factor)
                for point in report["points"]
                if key in point["results"].get(name, {})
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, color=_color(name))
    for axes, label in ((time, "seconds a step, best"), (memory, "MB beside inputs and gradients, at the peak")):
        axes.set_xlabel(report["config"]["sweep"])
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    time.legend(frameon=False, fontsize=8)


def _curve(report: Report, time: Any, memory: Any) -> None:
    """Time against memory, and time over the floor against rows of a chunk."""
    points = [point for point in report["points"] if "ours" in point["results"]]
    ours = [point["results"]["ours"] for point in points]
    megabytes = [numbers.get("beyond_gradients_bytes", 0) / 1e6 for numbers in ours]
    time.plot(megabytes, [numbers["best_s"] for numbers in ours], marker="o", color=_color("ours"))
    for point, numbers, x in zip(points, ours, megabytes, strict=True):
        time.annotate(f" {point['chunk_rows']} rows", (x, numbers["best_s"]), fontsize=8)
    time.set_xlabel("MB beside inputs and gradients, at the peak")
    time.set_ylabel("seconds a step, best")
    rows = [point["chunk_rows"] or point["value"] for point in points]
    for name in ("ours", "floor"):
        values = [point["results"].get(name, {}).get("best_s") for point in points]
        memory.plot(rows, values, marker="o", label=name, color=_color(name))
    memory.set_xscale("log", base=2)
    memory.set_xticks(rows, [f"{value:,}" for value in rows])
    memory.set_ylim(bottom=0)
    memory.set_xlabel("rows of a chunk")
    memory.set_ylabel("seconds a step, best")
    memory.legend(frameon=False, fontsize=8)


def _color(name: str) -> str:
    return {"ours": "#1f5fa8", "floor": "#777777"}.get(name, "#d9822b")
