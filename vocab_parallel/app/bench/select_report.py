"""The results of ``bench select`` as aligned text."""

from __future__ import annotations

from typing import Any

from vocab_parallel.app.bench.report import aligned

# From so many bytes on, that a rank gives to a gather of its logits, ours has to be faster. Below, either is little
# more than one latency.
FROM_BYTES = 1 << 17

# What the keys of bench.json mean.
DEFINITIONS = {
    "ours": "this rank's columns in, ids out; K = 50, p = 0.9",
    "gather": "all_gather of the float32 logits, then torch: argmax, topk, softmax and multinomial; top_p sorts the "
    "row and adds up, top_k_top_p does so with the 50 candidates alone",
    "gather_ours": "all_gather of the float32 logits, then our selection on one rank",
    "seconds": "a call, of each round the slowest rank's from a barrier; calls repeat within a sample, samples of all "
    "contestants and operations alternate",
    "speedup_median": "median over the rounds of the other's time over ours in the same round",
    "bytes_a_row": "sent by a rank as a ring sends them, headers of 64 bytes a call among them; counted at PyTorch's "
    "dispatcher",
    "kind": "model: normal logits of deviation 2 under a head of 2,000 ids whose probabilities fall as rank**-a, "
    "1 / a of each row 0.85 times the root of a uniform number: nuclei as a small model has them; flat: deviation 0.1",
}


def text(report: dict[str, Any]) -> str:
    """One table a point, then what did not pass."""
    lines = [f"{report['environment']['ranks']} ranks, float32; ms a call (median), times ours, bytes sent a row"]
    others = [name for name in report["config"]["contestants"] if name != "ours"]
    for point in report["points"]:
        head = ["", "ours ms", *(f"{name} ms" for name in others), *(f"{name} x" for name in others)]
        rows = [[*head, "ours B", *(f"{name} B" for name in others), "calls"]]
        for operation, results in point["operations"].items():
            ours = results["ours"]
            rows.append([
                operation,
                *(f"{1e3 * results[name]['median_s']:.3f}" for name in ("ours", *others)),
                *(f"{results['compared'][name]['speedup_median']:.2f}" for name in others),
                *(f"{results[name]['bytes_a_row']:,.0f}" for name in ("ours", *others)),
                str(ours["collectives"]),
            ])  # fmt: skip
        lines += ["", f"V {point['vocab']:,}, B {point['rows']}, {point['kind']}", *aligned(rows)]
    lines += ["", *(f"FAIL  other ids than gathered: {where}" for where in report["other_ids"])]
    lines += [f"FAIL  {where}" for where in report["slower"]]
    lines += [f"slow  {where} (a rank's logits are below {FROM_BYTES >> 10} KiB)" for where in report["slower_small"]]
    if report["passed"]:
        lines.append(
            "pass  ours is faster in every case that has to be" if _judged(report) else "pass  nothing to beat"
        )
    return "\n".join(lines)


def _judged(report: dict[str, Any]) -> bool:
    return report["environment"]["ranks"] > 1 and len(report["config"]["contestants"]) > 1
